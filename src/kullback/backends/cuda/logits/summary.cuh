/* Figures of a row, and what its label adds to its loss where figures are wanted. Their logarithms would keep a row's threads waiting for
   its first. They are found when all rows have been read, by a thread for each row, from what is kept of it. */
#pragma once

#include "cuda/logits/labels.cuh"

namespace kullback {

INLINE double lse_of(float max, float sum_exp, float inv_temperature, bool in_range)
{
    if (max == -REAL_INFINITY)
        return max; /* of a piece without mass */
    const double error = in_range ? scaling_error(max, inv_temperature) * (double)LN2 : 0;
    return (double)max * (double)inv_temperature + log((double)sum_exp) + error;
}

#if WANT_FIGURES
/* Of a row that is read; of its input as `RowStats` */
struct alignas(16) Summary {
    float max, sum_exp, exponent_sum, label_logit;
    double loss; /* of the divergence alone */
    bool in_range;
};
static_assert(sizeof(Summary) == SUMMARY_DOUBLES * sizeof(double));

INLINE Summary &summary_of(const Arguments &a, unsigned r) { return ((Summary *)a.summaries)[r]; }

INLINE void keep_summary(const Arguments &a, const Pipeline &pipeline, unsigned r, const RowStats &stats)
{
    float label_logit = 0, exponent_sum = 0;
#if HAS_AUXILIARY
    label_logit = label_of(pipeline).x;
#endif
#if HAS_SMOOTHING
    exponent_sum = stats.exponent_sum;
#endif
    Summary &summary = summary_of(a, r);
    *(float4 *)&summary = { stats.x_max, stats.x_sum_exp, exponent_sum, label_logit };
    summary.in_range = stats.in_range();
}

/* Writes the row's figures, and its loss where it is wanted and labels count; returns what these add to it. cluster: the blocks that had
   the row */
INLINE double finish_row(const Arguments &a, unsigned r, unsigned cluster)
{
    const Summary &summary = summary_of(a, r); /* of which not all is written */
    const unsigned parts = cluster * WARPS;
    double exponents = 0;
    for (unsigned i = 0; i < parts; i++)
        exponents += __ldcg(a.exponents + (long long)r * parts + i);
    const float mean = (float)exponents / summary.sum_exp; /* of exponents of 2, or of e */
    a.figures[r] = INPUT_IS_LOGITS ? lse_of(summary.max, summary.sum_exp, a.input_inv_temperature, summary.in_range) : 0;
    a.figures[a.rows + r] = logf(summary.sum_exp) - (summary.in_range ? mean * LN2 : mean);
    double labelled = 0;
#if HAS_AUXILIARY
    RowStats stats;
    stats.x_max = summary.max;
    stats.x_sum_exp = summary.sum_exp;
    stats.set_in_range(summary.in_range);
#if HAS_SMOOTHING
    stats.exponent_sum = summary.exponent_sum;
#endif
    labelled = weight_of(a, r) * (double)labelled_loss(a, token_of(a, r), summary.label_logit, stats);
    if (WRITES_LOSSES)
        a.loss[r] = rounded<LOSS>((real)(summary.loss + labelled));
#endif
    return labelled;
}
#endif

/* What a row loses, but for what its label adds where that is found later */
INLINE void write_loss(const Arguments &a, unsigned r, double loss)
{
#if WANT_FIGURES && HAS_AUXILIARY
    summary_of(a, r).loss = loss;
#else
    a.loss[r] = rounded<LOSS>((real)loss);
#endif
}

}
