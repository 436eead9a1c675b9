/* The log-ratio of an element's masses, and √(p·q): what does not cancel, however close a row is. */
#pragma once

#include "cuda/logits/elements.cuh"

namespace kullback {

/* factor(0) + factor(STEP)·r^STEP + ..., of factors below COUNT */
template <int COUNT, int STEP, typename F> INLINE float polynomial(F factor, float r)
{
    enum { LAST = (COUNT - 1) / STEP * STEP };
    const float by = STEP == 2 ? r * r : r;
    float sum = factor((int)LAST);
#pragma unroll
    for (int k = LAST - STEP; k >= 0; k -= STEP)
        sum = fmaf(sum, by, factor(k));
    return sum;
}

/* What sum = a + b was rounded by (Knuth); the same when a and b are exchanged */
INLINE float rounding_of_sum(float a, float b, float sum)
{
    const float other = sum - a;
    return (a - (sum - other)) + (b - other);
}

/* Of a row whose temperatures are equal */
struct LogRatio {
    float half, less; /* of the exponent of √(p·q): half · (x + y) - less */
    float rest;       /* what less was rounded by, as a factor of them all */
    float x_max, y_max, inv_temperature, log_z_diff, log_z_diff_low;

    INLINE LogRatio(const Arguments &a, const RowStats &stats)
    {
        const float scale = base_2(a.input_inv_temperature);
        const double found = log_z_diff_of(a, stats);
        const auto exponent_of = [&](float max) { /* or, of logits that are given less their maximum, its rounding */
            const float exponent = mul_rn(max, scale);
            return IS_16_BIT ? exponent : -fmaf(max, scale, -exponent);
        };
        const float x = exponent_of(stats.x_max), y = exponent_of(stats.y_max), of_max = x + y;
        const float of_sums = log2f(stats.x_sum_exp * stats.y_sum_exp), both = of_max + of_sums; /* no product underflows: MIN_SUM_EXP */
        half = 0.5f * scale;
        less = 0.5f * both;
        rest = ex2(-0.5f * (rounding_of_sum(x, y, of_max) + rounding_of_sum(of_max, of_sums, both)));
        x_max = stats.x_max;
        y_max = stats.y_max;
        inv_temperature = a.input_inv_temperature;
        log_z_diff = (float)found;
        log_z_diff_low = (float)(found - (double)log_z_diff);
    }

    /* log(p / q); NaN of two -inf */
    INLINE float of(float x, float y) const
    {
        if (IS_16_BIT)
            return fmaf(y - x, inv_temperature, -log_z_diff) - log_z_diff_low;
        return near_logit_ratio(y, y_max, inv_temperature, x, x_max, inv_temperature, log_z_diff, log_z_diff_low);
    }
    /* √(p·q), but for the factor `rest`; the same when x and y are exchanged */
    INLINE float root(float x, float y) const
    {
        return ex2(fmaf(IS_16_BIT ? x + y : (x - x_max) + (y - y_max), half, -less));
    }
};

}
