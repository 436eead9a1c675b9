/* Rows that are close, in powers of the log-ratio. */

#if HAS_SERIES
/* Of a row that is close, the elements whose log-ratio r is below REACH: powers of r, times √(p·q), which is the same when p
   and q are exchanged. Where scales differ, or powers do not reach the parameters, the shift is infinite and none is. */
struct Near {
    float half, less; /* of the exponent of √(p·q): half · (x + y) - less */
    float rest;       /* what less was rounded by, as a factor of them all */
    float x_top, y_top, scale, shift, shift_low;

    INLINE Near(const Arguments &a, const Survey &survey)
    {
        const float factor = binary(a.input_scale);
        const double shift_found = shift_of(a, survey);
        double found = 0.5 * ((double)product(survey.x_top, factor) + (double)product(survey.y_top, factor))
            + 0.5 * (double)(log2f(survey.x_total) + log2f(survey.y_total));
        if (!IS_NARROW)
            found -= 0.5 * (double)factor * ((double)survey.x_top + (double)survey.y_top);
        half = 0.5f * factor;
        less = (float)found;
        rest = power_of_2((float)((double)less - found));
        x_top = survey.x_top;
        y_top = survey.y_top;
        scale = a.input_scale;
        const bool applies = has_one_scale(a) && term_factor(a, 2) != 0;
        shift = applies ? (float)shift_found : K_INFINITY;
        shift_low = (float)(shift_found - (double)shift);
    }

    INLINE float ratio(float x, float y) const
    {
        if (IS_NARROW)
            return fmaf(y - x, scale, -shift) - shift_low;
        return k_logit_difference(y, scale, x, scale, shift, shift_low);
    }
    INLINE float root(float x, float y) const
    {
        return power_of_2(fmaf(IS_NARROW ? x + y : (x - x_top) + (y - y_top), half, -less));
    }
    static INLINE bool holds(float ratio) { return fabsf(ratio) < REACH; }

    /* Whether the others are few enough to be taken one by one, by a sample of what this warp has of the row */
    INLINE bool serves(const Share &share, const Ring &ring, const Team &team) const
    {
        float others = 0;
        each_first(share, ring, team, [&](float x, float y, int) {
            others += holds(ratio(input_of(share.a, x), target_of(share.a, y))) ? 0 : 1;
        });
        return agreed(sum_of_warp(others) <= WIDTH / 2); /* of 32 · WIDTH */
    }
};

/* Calls f(x, y, index, row()) for the elements of vectors that have a bit in `far`: the vector `index(steps from the end)` has
   the lowest bit where that is 1. */
template <typename I, typename F, typename R> INLINE void each_far(const Share &share, unsigned far, I index, F f, R row)
{
    if (!far)
        return;
    const Row found = row();
    for (; far; far &= far - 1) {
        const int start = share.head + index(__ffs((int)far)) * WIDTH;
#pragma unroll 1
        for (int i = start; i < start + WIDTH; i++)
            f(to_real(share.x()[i]), to_real(share.y()[i]), i, found);
    }
}

/* Calls in_powers(x vector, y vector, bytes of x before it) for this thread's vectors, and otherwise(x, y, index, row()) for
   the elements of those where it was false: many vectors later, and read from memory, so that threads have such at the same
   time. LAST: the row is not read again. */
template <bool LAST, typename F, typename G, typename R>
INLINE void each_close(const Share &share, Ring &ring, const Team &team, F in_powers, G otherwise, R row)
{
#if RESIDENT
    unsigned far = 0; /* a thread has at most 32 vectors of a row on chip */
    each_vector<false, LAST, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int) {
        far = 2 * far + !in_powers(x, y, before);
    });
    each_far(share, far, [&](int steps) {
        const int lane = found_here(team.lane), each = (ring.vectors - lane + LANES - 1) / LANES, whole = share.vectors / ring.vectors;
        const int i = whole * each + (share.vectors - whole * ring.vectors - lane + LANES - 1) / LANES - steps;
        return share.first + i / each * ring.vectors + lane + i % each * LANES;
    }, otherwise, row);
#else
#pragma unroll 1
    for (int v = team.lane; v < share.vectors;) {
        unsigned far = 0;
#pragma unroll 1
        for (const int end = min(share.vectors, v + 32 * LANES); v < end; v += LANES) {
            const int i = share.head + v * WIDTH;
            far = 2 * far + !in_powers(load(share.x() + i), load(share.y() + i), v * (long long)X_BYTES);
        }
        each_far(share, far, [&](int steps) { return v - steps * LANES; }, otherwise, row);
    }
#endif
    if (share.body < (int)share.a.vocab) {
        const Row found = row();
        each_end(share, team, [&](int i) { otherwise(to_real(share.x()[i]), to_real(share.y()[i]), i, found); });
    }
}

/* Σ √(p·q) · r^k */
struct Powers {
    float sum[POWERS] = {};

    INLINE void add(float root, float r)
    {
        const float square = r * r;
        float odd = root * r;
#pragma unroll
        for (int k = 0; k < POWERS; k += 2) {
            sum[k] += odd;
            if (k + 1 < POWERS)
                sum[k + 1] = fmaf(odd, r, sum[k + 1]);
            odd *= square;
        }
    }
    INLINE void add_to(Sums &sums, const Arguments &a, float rest) const
    {
        float term = 0, difference = 0, excess = 0, of_excess = -1; /* of -2·sinh(r/2) */
#pragma unroll
        for (int k = POWERS; k >= 1; k--) {
            term += term_factor(a, k) * sum[k - 1];
            difference += difference_factor(a, k) * sum[k - 1];
        }
#pragma unroll
        for (int k = 1; k <= POWERS; k += 2) {
            excess += of_excess * sum[k - 1];
            of_excess /= 4 * (k + 1) * (k + 2);
        }
        sums.term += rest * term;
        sums.d_log_p += 0.5f * rest * (term - difference); /* their sum is term: Euler's */
        sums.d_log_q += 0.5f * rest * (term + difference);
        sums.excess += rest * excess;
    }
};

/* As `own_sums`: of a row that is close, in powers */
INLINE Sums own_sums_in_powers(const Share &share, Ring &ring, const Team &team, const Near &near, const Survey &survey)
{
    const Arguments &a = share.a;
    Powers powers;
    Sums sums;
    each_close<false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long) {
        bool all = true;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float q = input_of(a, at(x, k)), p = target_of(a, at(y, k)), r = near.ratio(q, p);
            powers.add(near.root(q, p), near.holds(r) ? r : 0);
            all &= near.holds(r);
        }
        return all;
    }, [&](float x, float y, int i, const Row &row) {
        const float q = input_of(a, x), p = target_of(a, y);
        const bool is_added = near.holds(near.ratio(q, p)) && i >= share.head && i < share.head + share.body;
        if (!is_added)
            add<CLOSE>(sums, close_element(q, p, row, a.parameters));
    }, [&] { return row_of<CLOSE>(a, found_here(survey), {}); });
    powers.add_to(sums, a, near.rest);
    return sums;
}

/* As `write_gradients` */
INLINE void write_gradients_in_powers(const Share &share, Ring &ring, const Team &team, const Near &near,
                                      const Survey &survey, const Sums &sums, Upstream upstream)
{
    const Arguments &a = share.a;
    /* Over √(p·q), as powers of r from the 0th on: d_log_q - q·Σ d_log_q, and the same of p. 16-bit gradients need fewer. */
    enum { TERMS = IS_NARROW ? 6 : POWERS + 1 };
    float input_factor[TERMS], target_factor[TERMS], exponential = 1; /* of e^(±r/2) */
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        const float term = k ? term_factor(a, k) : 0, difference = k ? difference_factor(a, k) : 0;
        const float of_q = 0.5f * (term + difference), of_p = 0.5f * (term - difference);
        input_factor[k] = near.rest * upstream.input * (of_q - sums.d_log_q * (k % 2 ? -exponential : exponential));
        target_factor[k] = near.rest * upstream.target * (of_p - sums.d_log_p * exponential);
        exponential /= 2 * (k + 1);
    }
    const auto polynomial = [](const float *factor, float r) {
        float sum = factor[TERMS - 1];
#pragma unroll
        for (int k = TERMS - 2; k >= 0; k--)
            sum = fmaf(sum, r, factor[k]);
        return sum;
    };
    const auto differentiate_near = [&](float q, float p, X &input, Y &target) {
        const float r = near.ratio(q, p), root = near.root(q, p);
        input = rounded<X>(root * polynomial(input_factor, r) * (INPUT_IS_CAPPED ? cap_slope(q, a.input_cap) : 1));
        target = rounded<Y>(root * polynomial(target_factor, r) * (TARGET_IS_CAPPED ? cap_slope(p, a.target_cap) : 1));
        return near.holds(r);
    };
    const Places places(share);
    each_close<true>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long before) {
        Packed<X> input;
        Packed<Y> target;
        bool all = true;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            all &= differentiate_near(input_of(a, at(x, k)), target_of(a, at(y, k)), input.element[k], target.element[k]);
        if (all) /* else logits are to be read again, which the gradient may be written over */
            places.write(input, target, before);
        return all;
    }, [&](float x, float y, int i, const Row &row) {
        X input;
        Y target;
        if (!differentiate_near(input_of(a, x), target_of(a, y), input, target))
            differentiate<CLOSE>(a, x, y, row, upstream, input, target);
        write_element(share, input, target, i);
    }, [&] { return row_of<CLOSE>(a, found_here(survey), sums); });
}
#endif
