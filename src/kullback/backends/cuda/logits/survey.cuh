/* A row is normalised: its tops, its totals, and with them the sums from which a kind's follow, or which foretell them. */

/* What a row holds, each side's masses measured against a top: 2^(x·factor - top·factor), where a factor is binary(scale)
   and the second product is rounded. */
struct Survey {
    float x_top = 0, y_top = 0, x_total = 0, y_total = 0;
    float moments[MOMENTS + !MOMENTS] = {}; /* of divergences.py those that are wanted, and Σ q log²(p/q); to base 2 */
    float correction = 0;                   /* of the shift between the norms; infinite: it is that of the tops */
    bool is_usual = false; /* else totals are of exp((x - top)·scale), and nothing else was summed */

    /* The tops as exponents */
    struct Lows {
        float x, y;
    };
    INLINE Lows lows(const Arguments &a) const { return { product(x_top, binary(a.input_scale)), product(y_top, binary(a.target_scale)) }; }

    template <int COUNT, typename F, typename G> INLINE void take(F x, G y, const Arguments &a, const Lows &low) /* x(k), y(k) */
    {
        const float x_factor = binary(a.input_scale), y_factor = binary(a.target_scale);
        float x_part = 0, y_part = 0, parts[MOMENTS + !MOMENTS]; /* for a sum of few parts is more exact */
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const auto add = [=](float &part, float more) { part = k ? part + more : more; };
            const float x_power = fmaf(x(k), x_factor, -low.x), y_power = fmaf(y(k), y_factor, -low.y);
            const float q = power_of_2(x_power), p = power_of_2(y_power);
            if (INPUT_IS_LOGITS)
                add(x_part, q);
            if (TARGET_IS_LOGITS)
                add(y_part, p);
#if IS_CROSSED
            const float ratio = y_power - x_power;
            if (HAS_CROSS_P)
                add(parts[CROSS_P], p * bounded(ratio));
            if (HAS_SQUARE_Q)
                add(parts[SQUARE_Q], q * ratio * ratio);
            if (HAS_CROSS_Q) /* where p alone is 0 this is to be no number, however small q; foretold, where either is */
                add(parts[CROSS_Q], q * (IS_FORETOLD || ratio == ratio ? ratio : 0));
#endif
#if HAS_OVERLAP
            add(parts[OVERLAP], power_of_2(fmaf(a.exponent, y_power, (1 - a.exponent) * bounded(x_power))));
#endif
        }
        x_total += x_part;
        y_total += y_part;
#pragma unroll
        for (int m = 0; m < MOMENTS; m++)
            moments[m] += parts[m];
    }
};

INLINE Tops exchanged(const Arguments &a, const Ring &ring, Team &team, Tops tops)
{
    float values[] = { tops.x, tops.y };
    exchange<float>(a, ring, team, values, Highest());
    return { values[0], values[1] };
}

INLINE Survey exchanged(const Arguments &a, const Ring &ring, Team &team, Survey survey)
{
    float values[2 + MOMENTS] = { survey.x_total, survey.y_total };
#pragma unroll
    for (int m = 0; m < MOMENTS; m++)
        values[2 + m] = survey.moments[m];
    exchange<float>(a, ring, team, values, Add());
    survey.x_total = values[0];
    survey.y_total = values[1];
#pragma unroll
    for (int m = 0; m < MOMENTS; m++)
        survey.moments[m] = values[2 + m];
    return survey;
}

INLINE float usual_range(float scale) { return fminf(USUAL_RANGE, tame_ratio_or_zero(USUAL_RANGE, found_here(scale))); }
INLINE bool is_usual(float total) { return total > LEAST_TOTAL && total < MOST_TOTAL; }
INLINE bool is_top(float top) { return top > NO_TOP && top < K_INFINITY; }

/* Whether a side's number is such, of each side that is logits */
INLINE bool are(bool (*is_such)(float), float x, float y)
{
    return agreed((!INPUT_IS_LOGITS || is_such(x)) && (!TARGET_IS_LOGITS || is_such(y)));
}

/* The whole row's survey, against these tops; FIRST: as of `each_vector`. */
template <bool FIRST> INLINE Survey surveyed(const Share &share, Ring &ring, Team &team, Tops tops)
{
    const Arguments &a = share.a;
    Survey survey;
    survey.x_top = tops.x;
    survey.y_top = tops.y;
    const Survey::Lows low = survey.lows(a);
    each_vector<FIRST, false, FIRST>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
        survey.take<WIDTH>([&](int k) { return input_of(a, at(x, k)); }, [&](int k) { return target_of(a, at(y, k)); }, a, low);
    });
    each_end(share, team, [&](int i) {
        const float x = input_of(a, to_real(share.x()[i])), y = target_of(a, to_real(share.y()[i]));
        survey.take<1>([=](int) { return x; }, [=](int) { return y; }, a, low);
    });
    return exchanged(a, ring, team, survey);
}

/* What the row's tops may be: the largest of a sample, and so much that most rows have little above. */
struct Likely {
    Tops tops = { NO_TOP, NO_TOP };

    INLINE void see(const Arguments &a, X x, Y y)
    {
        tops = { fmaxf(tops.x, input_of(a, to_real(x))), fmaxf(tops.y, target_of(a, to_real(y))) };
    }
    INLINE Tops raised(const Arguments &a) const { return { tops.x + usual_range(a.input_scale), tops.y + usual_range(a.target_scale) }; }
};

/* `part` of so many in the row, seldom two at one place of a mask that repeats itself */
INLINE unsigned sample_place(const Arguments &a, unsigned part, unsigned parts) { return min((a.vocab / parts + 1) * part, a.vocab - 1); }

/* Of some rows at once, each eight lanes' */
struct Sample {
    enum { PARTS = 8, ROWS = 32 / PARTS };
    X x;
    Y y;

    INLINE void take(const Arguments &a, unsigned row)
    {
        const unsigned place = sample_place(a, threadIdx.x % PARTS, PARTS);
        x = (a.x + row * a.x_stride)[place];
        y = (a.y + row * a.y_stride)[place];
    }
    INLINE Tops likely_tops(const Arguments &a) const
    {
        Likely likely;
        likely.see(a, x, y);
#pragma unroll
        for (int step = PARTS / 2; step; step /= 2)
            likely.tops = { fmaxf(likely.tops.x, shuffled(likely.tops.x, step)), fmaxf(likely.tops.y, shuffled(likely.tops.y, step)) };
        return likely.raised(a);
    }
};

/* Of one row: by what all its threads read, for then none waits for another lane */
INLINE Tops likely_tops(const Share &share)
{
    const Arguments &a = share.a;
    Likely likely;
#pragma unroll
    for (unsigned i = 0; i < 4; i++)
        likely.see(a, share.x()[sample_place(a, i, 4)], share.y()[sample_place(a, i, 4)]);
    return likely.raised(a);
}

INLINE Tops found_tops(const Share &share, Ring &ring, Team &team)
{
    const Arguments &a = share.a;
    Tops tops = { -K_INFINITY, -K_INFINITY };
    const auto see = [&](float x, float y) { tops = { maximum(tops.x, input_of(a, x)), maximum(tops.y, target_of(a, y)) }; };
    each_vector<false, false, IS_EXACT>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            see(at(x, k), at(y, k));
    });
    each_end(share, team, [&](int i) { see(to_real(share.x()[i]), to_real(share.y()[i])); });
    return exchanged(a, ring, team, tops);
}

/* The whole row's survey: of finite logits, -inf among them, in one sweep beside that which finds tops; where likely tops are
   far from what they are, in two. Of rows that hold +inf, NaN, or nothing above NO_TOP, totals are of exp((x - top)·scale),
   terms are not summed, and the result is false. */
INLINE bool normalize(const Share &share, Ring &ring, Team &team, Survey &survey)
{
    const Arguments &a = share.a;
#if RESIDENT
    await_piece(ring);
    Tops tops = *ring.tops();
#else
    hold(share, ring, team);
    Tops tops = IS_EXACT ? found_tops(share, ring, team) : likely_tops(share);
#endif
    survey = surveyed<true>(share, ring, team, tops);
    if (are(is_usual, survey.x_total, survey.y_total))
        return true;
    if (!IS_EXACT) {
        tops = found_tops(share, ring, team);
        if (are(is_top, tops.x, tops.y)) {
            survey = surveyed<false>(share, ring, team, tops);
            if (are(is_usual, survey.x_total, survey.y_total))
                return true;
        }
    }
    double x_total = 0, y_total = 0;
    each_element<false>(share, ring, team, [&](float x, float y, int) {
        x_total += (double)k_exp((input_of(a, x) - tops.x) * a.input_scale);
        y_total += (double)k_exp((target_of(a, y) - tops.y) * a.target_scale);
    });
    const Sums totals = exchanged(a, ring, team, Sums { (float)x_total, (float)y_total });
    survey.x_top = tops.x;
    survey.y_top = tops.y;
    survey.x_total = totals.term;
    survey.y_total = totals.d_log_p;
    return false;
}

INLINE Survey found_here(Survey survey)
{
    survey.x_top = found_here(survey.x_top);
    survey.y_top = found_here(survey.y_top);
    survey.x_total = found_here(survey.x_total);
    survey.y_total = found_here(survey.y_total);
    return survey;
}
