/* Rows that are apart, of kinds that have slopes and no moments. */

#if KEEPS_SLOPES
static_assert((int)X_BYTES == (int)Y_BYTES);

/* Of each element its mass, rounded as x is, in x's place, and in y's its slope in half precision, less what is to be expected
   of it: a gradient is a small difference from the row's mean slope, near which halves are to be fine. A slope of no mass may
   be longer than halves are: it stays finite, for the product to be 0. */
INLINE void keep(int place, const float *masses, const float *slopes)
{
    Packed<X> mass;
    unsigned slope[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        const float *s = slopes + 2 * i;
        mass.element[2 * i] = rounded<X>(masses[2 * i]);
        mass.element[2 * i + 1] = rounded<X>(masses[2 * i + 1]);
        asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(slope[i]) : "f"(s[1]), "f"(s[0]));
    }
    put(place, *(const uint4 *)&mass);
    put(beside(place), *(const uint4 *)slope);
}

INLINE float kept_slope(const Packed<Y> &y, int k)
{
    return to_real(float16 { (unsigned short)(((const unsigned *)&y)[k / 2] >> k % 2 * 16) });
}
#endif

#if HAS_APART && !IS_SURVEYED
#if !HAS_SLOPE
#error "A kind has moments or slopes."
#endif
/* Whether all exponents are finite: a mass of 0 times an infinite ratio is no number. */
INLINE bool is_finite(const Survey &survey) { return IS_FORETOLD && fabsf(survey.moments[CROSS_Q]) < MOST; }

/* Of log2(p/q) among the words that q chooses: the mean is less than 0 by the divergence of p from q. */
struct Ratios {
    float mean, variance;
};

/* Where one is infinite, or they are known to vary so much that few words may be why, once more with each bounded. (So
   bounded, too, the mean's divergence is more than 2.8 times jensen_shannon.) */
INLINE Ratios foretold(const Share &share, Ring &ring, Team &team, const Survey &survey)
{
    const Arguments &a = share.a;
    if (!IS_FORETOLD)
        return {};
    const float inverse = tame_ratio_or_zero(1, survey.x_total), shift = log2_of(survey.x_total) - log2_of(survey.y_total);
    float mean = survey.moments[CROSS_Q] * inverse, variance = HAS_SQUARE_Q ? survey.moments[SQUARE_Q] * inverse - mean * mean : 0;
    mean += shift;
    if (!(fabsf(mean) < MOST && variance < MOST_VARIED)) {
        const float x_factor = binary(a.input_scale), y_factor = binary(a.target_scale);
        const float x_low = product(survey.x_top, x_factor), y_low = product(survey.y_top, y_factor);
        SlopeSums sums;
        const auto add = [&](float x, float y) {
            const float x_power = fmaf(x, x_factor, -x_low), ratio = fmaf(y, y_factor, -y_low) - x_power + shift;
            const float bounded = fminf(fmaxf(ratio, -MOST_BITS), MOST_BITS), part = power_of_2(x_power) * bounded;
            sums.p += part;
            if (HAS_SQUARE_Q)
                sums.q = fmaf(part, bounded, sums.q);
        };
        each_vector<false, false, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                add(input_of(a, at(x, k)), target_of(a, at(y, k)));
        });
        each_end(share, team, [&](int i) { add(input_of(a, to_real(share.x()[i])), target_of(a, to_real(share.y()[i]))); });
        sums = exchanged(a, ring, team, sums);
        mean = sums.p * inverse;
        variance = sums.q * inverse - mean * mean;
    }
    return { mean, fmaxf(variance, 0) };
}

/* The mean slope_q, were those log-ratios normally distributed: by the Gauss-Hermite rule of three nodes. It is never less
   than 0: of jensen_shannon it is the divergence of the mixture from q, of skew_kl (1 - Σ p·q/m) / (1 - a), and p·q/m is at
   most (1-a)·p + a·q. */
INLINE float expected_slope(const Arguments &a, Ratios ratios, const Row &row)
{
    const float deviation = apart_sqrt(3 * ratios.variance), mean = ratios.mean;
    const float inverse = tame_ratio_or_zero(1, binary(a.input_scale)); /* scales are equal */
    const auto slope = [&](float ratio) { /* where q's mass is 1 */
        return apart_parts(row.input_top * inverse, (row.target_top + ratio) * inverse, row, a.parameters).slope_q;
    };
    return fmaxf((slope(mean - deviation) + 4 * slope(mean) + slope(mean + deviation)) * (1 / 6.0f), 0);
}

/* The sums of a row that is apart, of a kind that has slopes; they are kept, if they are to be, less what is expected.
   FINITE: all exponents are. */
template <bool FINITE>
INLINE Sums summed_by_slopes(const Share &share, Ring &ring, Team &team, const Survey &survey, float expected)
{
    const Arguments &a = share.a;
    SlopeSums by_slope;
    const Row row = row_of<APART>(a, survey, {});
    /* From a product what is expected is taken in the same instruction, and sums are of what is left. From a logarithm it is
       not, and not in sums: exchanging p and q is to exchange them, to the bit. */
    const float less = SLOPE_IS_LOG ? 0 : expected, lean = apart_affinity(row, a.parameters).lean;
    const auto add = [&](float x, float y) {
        Parts parts = FINITE ? apart_parts(x, y, row, a.parameters)
                             : apart_parts(bounded_logit(x, row.input_top, a.input_scale),
                                           bounded_logit(y, row.target_top, a.target_scale), row, a.parameters);
        parts.slope_q -= less;
        by_slope.p += parts.p * (HAS_LEAN ? fmaf(lean, parts.slope_q, parts.slope_p) : parts.slope_p);
        by_slope.q += parts.q * parts.slope_q;
        return parts;
    };
    each_vector<false, false, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int place) {
        float masses[WIDTH], slopes[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float q = input_of(a, at(x, k));
            const Parts parts = add(q, target_of(a, at(y, k)));
            masses[k] = INPUT_IS_CAPPED ? parts.q * cap_slope(q, a.input_cap) : parts.q;
            slopes[k] = parts.slope_q - (expected - less);
        }
#if KEEPS_SLOPES
        keep(place, masses, slopes);
#endif
    });
    each_end(share, team, [&](int i) { add(input_of(a, to_real(share.x()[i])), target_of(a, to_real(share.y()[i]))); });
    by_slope = exchanged(a, ring, team, by_slope);
    if (IS_NARROW) { /* of masses as they were there */
        const Survey again = found_here(survey);
        by_slope.p = tame_ratio_or_zero(by_slope.p, whole_of(again.y_top, again.y_total, a.target_scale));
        by_slope.q = tame_ratio_or_zero(by_slope.q, whole_of(again.x_top, again.x_total, a.input_scale));
    }
    const Affinity common = apart_affinity(row, found_here(a.parameters));
    Sums sums;
    sums.d_log_p = common.factor_p * (by_slope.p + (HAS_LEAN ? common.lean * less : 0)) + common.offset_p;
    sums.d_log_q = common.factor_q * (by_slope.q + less) + common.offset_q;
    sums.term = sums.d_log_p + sums.d_log_q; /* Euler's */
    return sums;
}
#endif

/* The row again, where masses and slopes have taken its place */
INLINE void restore(const Share &share, const Ring &ring, const Team &team)
{
#if KEEPS_SLOPES
    const X *x = share.x() + share.head + share.first * WIDTH;
    const Y *y = share.y() + share.head + share.first * WIDTH;
    each_piece(share, ring, [&](const Ring &slot, int start, int count) {
        for (int v = team.lane; v < count; v += LANES) {
            const int place = first_place(slot) + v * X_BYTES;
            put(place, *(const uint4 *)(x + (start + v) * WIDTH));
            put(beside(place), *(const uint4 *)(y + (start + v) * WIDTH));
        }
    });
    synchronize_group(team);
#endif
}
