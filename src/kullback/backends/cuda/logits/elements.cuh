/* What an element has to know of its row, and sums over elements, in each mode (state.py). */
#pragma once

#include "cuda/logits/deferred.cuh"
#include "cuda/logits/row_stats.cuh"

namespace kullback {

/* Of a row whose sum is below this, distributions count as close: 6e-8, which an element's term may be wrong by, would be more
   than 3e-6 of it; of 1 - Σ p^a q^(1-a) the rounding of a whole sum is left. */
#define MIN_FAST_SUM (HAS_CHERNOFF ? 0.04f : 0.02f)

/* And of 16 bits below this; between, rows are near: few tokens of much mass need the stable formula, or polynomials serve (near.cuh). */
#define MIN_NEAR_SUM (HAS_TILTED_LSE && !HAS_NEAR ? 3e-3f : SUMS_FROM_MOMENTS ? 2e-4f : HAS_CORNER ? 5e-3f : 4e-4f)

/* An exponent of no mass, and a number after any factor */
#define NO_MASS_EXPONENT -1e4f

/* The error of max · base_2(inv_temperature), rounded: every power in a row's Σ exp has it. */
INLINE double scaling_error(float max, float inv_temperature)
{
    /* Kept as a double for the next row it would take registers that these have not. */
    const float scale = SUMS_FROM_MOMENTS || (HAS_AUXILIARY && !IS_COARSE) ? opaque(base_2(inv_temperature)) : base_2(inv_temperature);
    return (double)mul_rn(max, scale) - (double)max * (double)scale;
}

/* log(y / x); exchanging them changes the sign and not a bit */
INLINE float log_quotient_of(float y, float x)
{
    const bool is_less = y < x;
    const float size = logf((is_less ? x : y) / (is_less ? y : x));
    return is_less ? -size : size;
}

/* A row's log-sum-exp as an exponent, and what its masses sum to when that was rounded */
INLINE float log2_z(float max, float sum_exp, float inv_temperature)
{
    return mul_rn(max, base_2(inv_temperature)) + lg2(sum_exp);
}
INLINE float mass_sum(float max, float sum_exp, float inv_temperature)
{
    return sum_exp * ex2(mul_rn(max, base_2(inv_temperature)) - log2_z(max, sum_exp, inv_temperature));
}

/* The same difference as it is between the exponents that 16-bit masses are found with, rounded as they are: with it a mass is
   the other times e^ratio, and what both are off by enters sums that are centred squared. In units of the ratio, whose factor is
   not that of the exponents to the last bit. */
INLINE double log_z_diff_of_exponents(const Arguments &a, float x_log2_z, float y_log2_z)
{
    const float inv_temperature = a.input_inv_temperature;
    const float excess = fmaf(-base_2(inv_temperature), LN2, inv_temperature) * in_range_ratio_or_zero(1, opaque(inv_temperature));
    const double difference = ((double)y_log2_z - (double)x_log2_z) * 0.6931471805599453;
    return difference + difference * (double)excess;
}

/* log-sum-exp of y less that of x: as it is given; else as floats found it, and what is known to be wrong with that */
INLINE double log_z_diff_of(const Arguments &a, const RowStats &stats)
{
#if HAS_NORMALISERS
    return stats.log_z_diff;
#endif
    const double error = stats.in_range()
        ? scaling_error(stats.y_max, a.target_inv_temperature) - scaling_error(stats.x_max, a.input_inv_temperature)
        : 0;
    const double of_max = (double)stats.y_max * (double)opaque(a.target_inv_temperature)
        - (double)stats.x_max * (double)opaque(a.input_inv_temperature);
    if (HANDLES_PEAKED && stats.correction == REAL_INFINITY) /* to the bit as elements find it of maxima */
        return of_max + (double)safe_logit_difference(stats.y_max, a.target_inv_temperature, stats.x_max, a.input_inv_temperature,
                                                      (float)of_max, (float)(of_max - (double)(float)of_max));
    return of_max + error * (double)LN2 + (double)log_quotient_of(stats.y_sum_exp, stats.x_sum_exp) + (stats.in_range() ? opaque(stats.correction) : 0);
}

/* Found in each mode where it is used, so that nothing is that is not. A mass of `safe_` is
   exp((x - max)·inv_temperature) / Σ exp; one of the others has the scaling's error in it, as a Σ exp in range. */
template <int MODE> INLINE Row row_constants(const Arguments &a, const RowStats &stats, const Sums &sums)
{
    const bool is_exponent = MODE == FAST && IS_COARSE;
    Row row;
    row.input_inv_temperature = a.input_inv_temperature;
    row.target_inv_temperature = a.target_inv_temperature;
    row.input_max = is_exponent ? log2_z(stats.x_max, stats.x_sum_exp, a.input_inv_temperature) : stats.x_max;
    row.target_max = is_exponent ? log2_z(stats.y_max, stats.y_sum_exp, a.target_inv_temperature) : stats.y_max;
    const double x_error = stats.in_range() && INPUT_IS_LOGITS ? scaling_error(stats.x_max, a.input_inv_temperature) : 0;
    const double y_error = stats.in_range() && TARGET_IS_LOGITS ? scaling_error(stats.y_max, a.target_inv_temperature) : 0;
    row.input_inv_sum_exp = 1 / (MODE == SAFE ? stats.x_sum_exp * ex2((float)x_error) : stats.x_sum_exp);
    row.target_inv_sum_exp = 1 / (MODE == SAFE ? stats.y_sum_exp * ex2((float)y_error) : stats.y_sum_exp);
    row.input_log_sum_exp = logf(stats.x_sum_exp) + (float)x_error * LN2;
    row.target_log_sum_exp = logf(stats.y_sum_exp) + (float)y_error * LN2;
    const double log_z_diff = is_exponent && !HAS_NORMALISERS
        ? log_z_diff_of_exponents(a, row.input_max, row.target_max)
        : log_z_diff_of(a, stats);
    row.log_z_diff_high = (float)log_z_diff;
    row.log_z_diff_low = (float)(log_z_diff - (double)row.log_z_diff_high);
    row.tilted_lse = stats.tilted_lse;
    row.input_grad_sum = sums.d_log_q;
    row.target_grad_sum = sums.d_log_p;
    return row;
}

#if HAS_FAST
/* Masses of the stable formula; row: its constants */
INLINE float input_mass(const Row &row, float q)
{
    return stable_logit_mass(q, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
}
INLINE float target_mass(const Row &row, float p)
{
    return stable_logit_mass(p, row.target_max, row.target_inv_temperature, row.target_inv_sum_exp);
}
#endif

template <typename T> INLINE void swap_halves(Packed<T> &values)
{
    enum { COUNT = sizeof(Packed<T>) / sizeof(unsigned) };
    unsigned *parts = (unsigned *)&values;
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        const unsigned first = parts[i];
        parts[i] = parts[i + COUNT / 2];
        parts[i + COUNT / 2] = first;
    }
}

/* Calls f(k) for the elements of vectors. Of the long formulas half of them at a time, the vectors' halves being swapped
   between: all at once would not fit the registers. */
template <int MODE, typename F, typename... VECTORS> INLINE void each_of(F f, VECTORS &...vectors)
{
    enum { PARTS = MODE == FAST ? 1 : 2 };
#pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int k = 0; k < WIDTH / PARTS; k++)
            f(k);
        if (PARTS == 2)
            (swap_halves(vectors), ...);
    }
}

/* A logit as log_fraction takes it, of a row whose log-sum-exp is in the exponent: -inf has an exponent too. */
INLINE float floor_logit(float x, float max, float inv_temperature)
{
    return HAS_LOG_FRACTION && IS_COARSE ? fmaxf(x, (max + NO_MASS_EXPONENT) / base_2(inv_temperature)) : x;
}

template <int MODE> INLINE Element element(const Arguments &a, float x, float y, const Row &row)
{
#if HAS_FAST
    if (MODE == FAST)
        return fast_element(x, y, row, a.parameter);
    if (MODE == STABLE)
        return stable_element(x, y, row, a.parameter);
#endif
    return safe_element(x, y, row, a.parameter);
}

#if HAS_FAST
/* Tokens of much mass decide a row's error: a rounding of a mass is nothing beside another's term. Of the others the fast
   formula is as good. More than 2^HEAVY_EXPONENT is much, and more of rows that are nearer. */
#define HEAVY_EXPONENT -12.0f
#define HEAVY_EXPONENT_NEARER -14.0f

/* The least of such logits; log2_z: of the fast mode's row */
INLINE float heavy_logit(float log2_z, float inv_temperature, float exponent) { return (log2_z + exponent) / base_2(inv_temperature); }

/* A heavy token's: its ratio is to be that of the others, and so are its masses, which sum to what theirs do. */
INLINE Row heavy_row(const Arguments &a, const RowStats &stats, const Row &fast)
{
    const auto factor = [](float max, float inv_temperature, float log2_z) {
        return ex2(mul_rn(max, base_2(inv_temperature)) - log2_z);
    };
    Row row = fast;
    row.input_max = stats.x_max;
    row.target_max = stats.y_max;
    row.input_inv_sum_exp = factor(stats.x_max, a.input_inv_temperature, fast.input_max);
    row.target_inv_sum_exp = factor(stats.y_max, a.target_inv_temperature, fast.target_max);
    return row;
}
#endif

template <int MODE> INLINE void add(Sums &sums, const Element &e)
{
    sums.term += e.term;
    sums.d_log_p += e.d_log_p;
    sums.d_log_q += e.d_log_q;
    if (MODE == STABLE)
        sums.q_minus_p += e.q_minus_p;
}

/* Of this thread's elements; where the row is not fast */
template <int MODE>
INLINE Sums thread_sums(const Slice &slice, Pipeline &pipeline, const RowGroup &group, const RowStats &stats)
{
    const Arguments &a = slice.a;
    Sums sums;
    const Row row = row_constants<MODE>(a, stats, sums);
    const auto take = [&](float x, float y) {
        add<MODE>(sums, element<MODE>(a, input_of(a, x), target_of(a, y), row));
    };
    if (MODE == SAFE) {
        each_element<false>(slice, pipeline, group, [&](float x, float y, int) { take(x, y); });
    } else {
        each_vector<false, false>(slice, pipeline, group, [&](Packed<X> x, Packed<Y> y, long long, int) {
            each_of<MODE>([&](int k) { take(at(x, k), at(y, k)); }, x, y);
        });
        each_edge(slice, group, [&](int i) { take(to_real(slice.x()[i]), to_real(slice.y()[i])); });
    }
    return sums;
}

}
