/* The normaliser of a row's elements, or of some of them, found in one pass (online softmax: Milakov and Gimelshein, 2018): of labels
   alone and of top-k rows. Losses of two rows of logits have logits/row_stats.cuh. */
#pragma once

#include "cuda/vector.cuh"

namespace kullback {

/* Of logits Σ exp((x - max) · inv_temperature), the maximum as it was before the temperature; of probabilities the sum */
typedef struct { real max, sum_exp; } SoftmaxStats;

#define NOTHING (IS_PROBS ? (real)0 : -REAL_INFINITY)
#define MAX_PART (real)1e15 /* of a vector's sum against an earlier maximum */

/* An element as it counts, but for the temperature; of logits without a cap less the row's reference */
INLINE real counted(real x, real softcap, real reference)
{
    return IS_CAPPED ? softcapped(x, softcap) : IS_LOGITS ? x - reference : x;
}

/* e^(d · inv_temperature) = power(d · exponent_scale(inv_temperature)) */
INLINE real exponent_scale(real inv_temperature) { return REAL_IS_DOUBLE ? inv_temperature : inv_temperature * (real)1.44269504; }

INLINE real power(real d)
{
#if REAL_IS_DOUBLE
    return exp(d);
#else
    return ex2_approx_ftz(d);
#endif
}

/* What exponents are taken against: -inf - -inf would be NaN where nothing is. */
INLINE real against(real max) { return max == -REAL_INFINITY ? (real)0 : max; }

INLINE SoftmaxStats merged(SoftmaxStats a, SoftmaxStats b, real scale)
{
    if (IS_PROBS)
        return { 0, a.sum_exp + b.sum_exp };
    const real max = a.max > b.max ? a.max : b.max, from = against(max);
    return { max, a.sum_exp * power((a.max - from) * scale) + b.sum_exp * power((b.max - from) * scale) };
}

/* Measured against the maximum of what came before, until it would grow too large for that. */
template <int COUNT> INLINE void add(SoftmaxStats &sum, const real *values, real scale)
{
    real part = 0;
    if (IS_PROBS) {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            part += values[j];
        sum.sum_exp += part;
        return;
    }
    const auto measure = [&](real from) {
        part = 0;
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            part += power((values[j] - from) * scale);
    };
    measure(sum.max);
    if (__builtin_expect(!(part < MAX_PART), 0)) {
        real top = sum.max;
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            top = values[j] > top ? values[j] : top;
        const real from = against(top);
        sum = { top, sum.sum_exp * power((sum.max - from) * scale) };
        measure(from);
    }
    sum.sum_exp += part;
}

}
