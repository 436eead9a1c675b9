/* Rows that are far, of kinds that have slopes and no moments: sums of masses times slopes, which may be cached for the
   gradient. */
#pragma once

#include "cuda/logits/elements.cuh"

namespace kullback {

/* A log-ratio to base 2, as far as it foresees something; a variance of such that is believed, and a difference of log-sum-exps
   with which bounds are what they should be */
#define MAX_LOG2_RATIO 10.0f
#define MAX_VARIANCE 16.0f
#define MAX_SHIFT 8.0f

/* What the cached slopes of a row are to be multiplied by, and what is to be added */
struct SlopeScale {
    float factor, offset;
};

#if CACHES_SLOPES || CACHES_DERIVATIVES
static_assert((int)X_BYTES == (int)Y_BYTES);

/* Of each element its mass, rounded as x is, in x's place, and in y's its slope. Of a row that is far what is predicted for it
   is taken off: where it is rounded to a half, that makes gradients fine, which are small differences from the row's mean
   slope. A slope of no mass may be longer than halves are: it stays finite, for the product to be 0. */
INLINE void cache_slopes(int address, const float *masses, const float *slopes)
{
    Packed<X> mass;
    unsigned slope[VECTOR_BYTES / 4];
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        mass.element[k] = rounded<X>(masses[k]);
#pragma unroll
    for (int i = 0; i < VECTOR_BYTES / 4; i++)
        slope[i] = IS_16_BIT ? cvt_rn_satfinite_f16x2(slopes[(2 * i + 1) % WIDTH], slopes[2 * i % WIDTH])
                             : __float_as_uint(slopes[i]);
    st_shared_v4(address, *(const uint4 *)&mass);
    st_shared_v4(y_address(address), *(const uint4 *)slope);
}

/* The same of one element */
INLINE void cache_slope(int on_chip, float mass, float slope)
{
    ((X *)shared())[on_chip] = rounded<X>(mass);
    unsigned char *place = shared() + Y_OFFSET + on_chip * sizeof(Y);
    if (IS_16_BIT)
        *(unsigned short *)place = (unsigned short)cvt_rn_satfinite_f16x2(0, slope);
    else
        *(float *)place = slope;
}

INLINE float cached_slope(const Packed<Y> &y, int k)
{
    if (!IS_16_BIT)
        return at(y, k);
    return to_real(float16 { (unsigned short)(((const unsigned *)&y)[k / 2] >> k % 2 * 16) });
}
#endif

/* A sum of terms less what its masses are off by, to first order: a half of Σ q - p from each side. d_log_p + d_log_q is the term:
   Euler's. */
INLINE float without_excess(float term, float d_log_q, float excess) { return term + 0.5f * excess * (term - 2 * d_log_q); }

#define HAS_FAST_SUM (HAS_FAST && !SUMS_FROM_MOMENTS && HAS_SLOPES)
#if HAS_FAST_SUM
/* Whether all exponents are finite: a mass of 0 times an infinite ratio is no number. */
INLINE bool has_finite_exponents(const RowStats &stats)
{
    return FORESEES_CLOSE && fabsf(stats.moments[Q_LOG_RATIO]) < MAX_SUM;
}

/* Of log2(p/q) under q: the mean is less than 0 by KL(q‖p). */
struct Ratios {
    float mean, variance; /* 0 where it is not known */
};

/* Where one is infinite, or they are known to vary so much that few tokens may be why, once more with each ratio bounded:
   REVERSE_KL_FACTOR is a bound by that mean, too. */
INLINE Ratios predicted_ratios(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats)
{
    const Arguments &a = slice.a;
    if (!FORESEES_CLOSE)
        return {};
    const float inverse = in_range_ratio_or_zero(1, stats.x_sum_exp), shift = lg2(stats.x_sum_exp) - lg2(stats.y_sum_exp);
    float mean = stats.moments[HAS_Q_BOUNDED ? (int)Q_BOUNDED : (int)Q_LOG_RATIO] * inverse;
    float variance = HAS_Q_SQUARED ? stats.moments[Q_SQUARED] * inverse - mean * mean : 0;
    mean += shift;
    if (!(fabsf(mean) < MAX_SUM && variance < MAX_VARIANCE && (!HAS_Q_BOUNDED || shift < MAX_SHIFT))) {
        const float x_scale = base_2(a.input_inv_temperature), y_scale = base_2(a.target_inv_temperature);
        const float x_low = mul_rn(stats.x_max, x_scale), y_low = mul_rn(stats.y_max, y_scale);
        SlopeSums sums;
        const auto add = [&](float x, float y) {
            const float x_exponent = fmaf(x, x_scale, -x_low), ratio = fmaf(y, y_scale, -y_low) - x_exponent + shift;
            const float bounded = fminf(fmaxf(ratio, -MAX_LOG2_RATIO), MAX_LOG2_RATIO), part = ex2(x_exponent) * bounded;
            sums.p += part;
            if (HAS_Q_SQUARED)
                sums.q = fmaf(part, bounded, sums.q);
        };
        each_vector<false, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                add(input_of(a, at(x, k)), target_of(a, at(y, k)));
        });
        each_edge(slice, group, [&](int i) { add(input_of(a, to_real(slice.x()[i])), target_of(a, to_real(slice.y()[i]))); });
        sums = all_reduced(a, pipeline, group, sums);
        mean = sums.p * inverse;
        variance = sums.q * inverse - mean * mean;
    }
    return { mean, fmaxf(variance, 0) };
}

/* The mean slope_q, were those log-ratios normally distributed: by the Gauss-Hermite rule of three nodes, which are one where there
   is no variance. */
INLINE float predicted_slope(const Arguments &a, Ratios ratios, const Row &row)
{
    const float deviation = fast_sqrt(3 * ratios.variance), mean = ratios.mean;
    const float inverse = in_range_ratio_or_zero(1, base_2(a.input_inv_temperature)); /* temperatures are equal */
    const auto slope = [&](float ratio) { /* where q's mass is 1 */
        return fast_parts(row.input_max * inverse, (row.target_max + ratio) * inverse, row, a.parameter).slope_q;
    };
    const float at_mean = slope(mean);
    const float found = HAS_Q_SQUARED ? (slope(mean - deviation) + 4 * at_mean + slope(mean + deviation)) * (1 / 6.0f) : at_mean;
    return fmaxf(found, LEAST_MEAN_SLOPE);
}

/* The row's sums; slopes are cached, if they are to be, less what is predicted. FINITE: all exponents are. REFINES: the sum of
   terms is found apart, with the stable formula for heavy tokens. */
template <bool FINITE, bool REFINES>
INLINE Sums sum_by_slopes(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, float predicted)
{
    const Arguments &a = slice.a;
    SlopeSums by_slope;
    const Row row = row_constants<FAST>(a, stats, {});
    /* From a product what is predicted is taken in the same instruction, and sums are of what is left. From a logarithm it is
       not, and not in sums: exchanging p and q is to exchange them, to the bit. */
    const float less = SLOPE_IS_LOG ? 0 : predicted, coupling = fast_coefficients(row, a.parameter).coupling;
    TermSums terms;
    /* With a corner a term is the size of q - p, but for a factor, and what masses are off by, all of a side alike, enters it as it is:
       that is Σ q - p. */
    float size = 0, excess = 0;
    const float heavy_x = REFINES ? heavy_logit(row.input_max, a.input_inv_temperature, HEAVY_EXPONENT_NEARER) : 0;
    const float heavy_y = REFINES ? heavy_logit(row.target_max, a.target_inv_temperature, HEAVY_EXPONENT_NEARER) : 0;
    const auto is_heavy = [&](float x, float y) { return !(input_of(a, x) < heavy_x && target_of(a, y) < heavy_y); };
    const auto add = [&](float x, float y) {
        Parts parts = REFINES ? near_parts(x, y, row, a.parameter)
                    : FINITE  ? fast_parts(x, y, row, a.parameter)
                              : fast_parts(floor_logit(x, row.input_max, a.input_inv_temperature),
                                          floor_logit(y, row.target_max, a.target_inv_temperature), row, a.parameter);
        parts.slope_q -= less;
        if (!HAS_CORNER)
            by_slope.p += parts.p * (HAS_COUPLING ? fmaf(coupling, parts.slope_q, parts.slope_p) : parts.slope_p);
        by_slope.q += parts.q * parts.slope_q;
        return parts;
    };
    const auto add_difference = [&](float difference) {
        if (HAS_CORNER) {
            size += fabsf(difference);
            excess += difference;
        }
    };
    const auto take = [&](const Packed<X> &x, const Packed<Y> &y, long long, int address) {
        float masses[WIDTH], slopes[WIDTH], part = 0;
        bool is_light = true;
        const Coefficients factors = fast_coefficients(row, a.parameter);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float q = input_of(a, at(x, k)), p = target_of(a, at(y, k));
            const Parts parts = add(q, p);
            masses[k] = INPUT_IS_CAPPED ? parts.q * softcap_grad(q, a.input_softcap) : parts.q;
            slopes[k] = parts.slope_q - (predicted - less);
            if (REFINES) {
                const float slope_q = parts.slope_q + less;
                const float slope_p = HAS_COUPLING ? fmaf(coupling, slope_q, parts.slope_p) : parts.slope_p;
                const float of_q = parts.q * fmaf(factors.factor_q, slope_q, factors.offset_q);
                const float of_p = parts.p * fmaf(factors.factor_p, slope_p, factors.offset_p);
                const bool heavy = is_heavy(at(x, k), at(y, k));
                part += HAS_CORNER || heavy ? 0 : of_p + of_q;
                add_difference(heavy ? 0 : parts.q - parts.p);
                is_light &= !heavy;
            } else {
                add_difference(parts.q - parts.p);
            }
        }
        terms.light += part;
#if CACHES_SLOPES
        cache_slopes(address, masses, slopes);
#endif
        return is_light;
    };
    if (REFINES) {
        const auto refine = [&](float x, float y, const Row &heavy_row, int) {
            const Element e = stable_element(input_of(a, x), target_of(a, y), heavy_row, a.parameter);
            terms.heavy += e.term;
            add_difference(e.q_minus_p);
        };
        each_refining<false, !CACHES_SLOPES>(slice, pipeline, group, take, is_heavy, refine, [](int) {},
                                             [&](int i, const Row &heavy_row) {
            const float x = to_real(slice.x()[i]), y = to_real(slice.y()[i]);
            refine(x, y, heavy_row, i);
            add(input_of(a, x), target_of(a, y));
        }, [&] { return heavy_row(a, stats, row); });
        if (!HAS_CORNER)
            all_reduce(a, pipeline, group, by_slope, terms);
    } else {
        each_vector<false, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long before,
                                                              int address) { take(x, y, before, address); });
        each_edge(slice, group, [&](int i) {
            const Parts parts = add(input_of(a, to_real(slice.x()[i])), target_of(a, to_real(slice.y()[i])));
            add_difference(parts.q - parts.p);
        });
        if (!HAS_CORNER)
            by_slope = all_reduced(a, pipeline, group, by_slope);
    }
    if (HAS_CORNER) {
        float values[] = { by_slope.q, size, excess };
        row_all_reduce(a, pipeline, group, values, Add());
        by_slope.q = values[0];
        size = values[1];
        excess = values[2];
    }
    if (IS_COARSE) { /* of masses as they were there */
        const RowStats again = opaque(stats);
        by_slope.p = in_range_ratio_or_zero(by_slope.p, mass_sum(again.y_max, again.y_sum_exp, a.target_inv_temperature));
        by_slope.q = in_range_ratio_or_zero(by_slope.q, mass_sum(again.x_max, again.x_sum_exp, a.input_inv_temperature));
    }
    const Coefficients common = fast_coefficients(row, opaque(a.parameter));
    Sums sums;
    sums.d_log_p = common.factor_p * (by_slope.p + (HAS_COUPLING ? common.coupling * less : 0)) + common.offset_p;
    sums.d_log_q = common.factor_q * (by_slope.q + less) + common.offset_q;
    sums.term = sums.d_log_p + sums.d_log_q; /* Euler's */
    if (HAS_CORNER) {
        const float whole = 0.5f * common.factor_q * size;
        sums.term = without_excess(whole, sums.d_log_q, excess);
        sums.d_log_p = sums.term - sums.d_log_q;
    } else if (REFINES) {
        const float p_sum = mass_sum(stats.y_max, stats.y_sum_exp, a.target_inv_temperature);
        const float q_sum = mass_sum(stats.x_max, stats.x_sum_exp, a.input_inv_temperature);
        sums.term = (terms.light + terms.heavy) / (0.5f * (p_sum + q_sum));
    }
    return sums;
}
#endif

/* The row again, where masses and slopes, or derivatives, have taken its place */
INLINE void reload_row(const Slice &slice, const Pipeline &pipeline, const RowGroup &group)
{
#if (CACHES_SLOPES || CACHES_DERIVATIVES) && RESIDENT
    const X *x = slice.x() + slice.head + slice.first * WIDTH;
    const Y *y = slice.y() + slice.head + slice.first * WIDTH;
    each_tile(slice, pipeline, [&](const Pipeline &tile, int start, int count) {
        for (int v = group.thread; v < count; v += THREADS_PER_ROW) {
            const int address = first_address(tile) + v * X_BYTES;
            st_shared_v4(address, *(const uint4 *)(x + (start + v) * WIDTH));
            st_shared_v4(y_address(address), *(const uint4 *)(y + (start + v) * WIDTH));
        }
    });
    group_sync(group);
#elif CACHES_SLOPES
    copied_row(slice.a, group, slice.row, first_address(pipeline));
    cp_async_wait<0>();
#endif
}

}
