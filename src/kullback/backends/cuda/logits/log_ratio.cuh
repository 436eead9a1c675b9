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

/* Of a row whose temperatures are equal */
struct LogRatio {
    float half, less; /* of the exponent of √(p·q): half · (x + y) - less */
    float rest;       /* what less was rounded by, as a factor of them all */
    float x_max, y_max, inv_temperature, log_z_diff, log_z_diff_low;

    INLINE LogRatio(const Arguments &a, const RowStats &stats)
    {
        const float scale = base_2(a.input_inv_temperature);
        const double found = log_z_diff_of(a, stats);
        double exponent = 0.5 * ((double)mul_rn(stats.x_max, scale) + (double)mul_rn(stats.y_max, scale))
            + 0.5 * (double)(log2f(stats.x_sum_exp) + log2f(stats.y_sum_exp));
        if (!IS_16_BIT)
            exponent -= 0.5 * (double)scale * ((double)stats.x_max + (double)stats.y_max);
        half = 0.5f * scale;
        less = (float)exponent;
        rest = ex2((float)((double)less - exponent));
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
