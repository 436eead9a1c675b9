/* What a row has to lose beside its divergence: its label's cross-entropy, and its log-sum-exp's square (labels.py). Each is a
   number of the row and, in the gradient, a factor of q, which is taken off Σ d_log_q. The label's own gradient is found before
   the row's may be written over logits, and written after them: by one thread, not the one that has the row's loss to do. */
#pragma once

#include "cuda/logits/gradients.cuh"

namespace kullback {

#if IS_MIXED
/* What a group keeps of its row's label */
struct OwnLabel {
#if !RESIDENT
    Label label;
#endif
    int token; /* whose gradient is to be written, or negative: another block's, or none */
    DX input;
};
SHARED_ARRAY(OwnLabel, own_labels, GROUPS);

INLINE OwnLabel &own_label() { return own_labels[threadIdx.x / THREADS_PER_ROW]; } /* found again: so no register holds it */
INLINE bool has_label(const RowGroup &group) { return group.thread == THREADS_PER_ROW - 32; }

#if RESIDENT
INLINE void read_label(const Slice &, const RowGroup &) {} /* the producer has */
INLINE Label label_of(const Pipeline &pipeline) { return *pipeline.label(); }
#else
/* Before the group meets for the first time: from then on others may write gradients over logits. */
INLINE void read_label(const Slice &slice, const RowGroup &group)
{
    if (has_label(group))
        own_label().label = loaded_label(slice.a, slice.row);
    if (THREADS_PER_ROW > 32)
        group_sync(group);
    else
        __syncwarp();
}
INLINE Label label_of(const Pipeline &) { return own_label().label; }
#endif

/* Whether a token is of this block's part of the row */
INLINE bool is_of_slice(const Slice &slice, int token)
{
    const int i = token - slice.head, first = slice.first * WIDTH;
    const bool is_edge = i < 0 || i >= slice.body;
    return token >= 0 && (is_edge ? cta_rank() == 0 : i >= first && i < first + slice.vectors * WIDTH);
}

INLINE float lse_error(const Arguments &a, const RowStats &stats)
{
    return stats.in_range ? (float)scaling_error(stats.x_max, a.input_inv_temperature) * LN2 : 0;
}
INLINE float input_lse_of(const Arguments &a, const RowStats &stats)
{
    return fmaf(stats.x_max, a.input_inv_temperature, logf(stats.x_sum_exp) + lse_error(a, stats));
}

INLINE float labelled_loss(const Arguments &a, const Label &label, const RowStats &stats)
{
    if (label.token == NO_LABEL)
        return 0;
    const float lse = input_lse_of(a, stats), of_z = a.z_weight != 0 ? a.z_weight * lse * lse : 0;
    if (label.token < 0 || a.label_weight == 0)
        return of_z;
    /* of logits far from 0 what is left must keep its digits */
    const float error = lse_error(a, stats), below = (stats.x_max - input_of(a, label.x)) * a.input_inv_temperature;
    return of_z + a.label_weight * (below + (logf(stats.x_sum_exp) + error));
}

/* The row's Σ d_log_q as gradients want it */
INLINE float mixed_sum(const Arguments &a, const Label &label, const RowStats &stats, float d_log_q, float d_loss)
{
    if (label.token == NO_LABEL)
        return d_log_q;
    const float factor = a.label_weight + (a.z_weight != 0 ? 2 * a.z_weight * input_lse_of(a, stats) : 0);
    return factor != 0 ? d_log_q - factor / (a.divergence_weight * d_loss) : d_log_q;
}

/* What the label's logit is to get, of these sums; upstream: of the row's loss */
template <int MODE>
INLINE void differentiate_label(const Slice &slice, const Label &label, const RowStats &stats, const Sums &sums, GradOut grad_out,
                                float upstream)
{
    const Arguments &a = slice.a;
    const Row row = row_constants<MODE>(a, stats, sums);
    float q = input_of(a, label.x), p = target_of(a, label.y);
    if (MODE == FAST) {
        q = floor_logit(q, row.input_max, a.input_inv_temperature);
        p = floor_logit(p, row.target_max, a.target_inv_temperature);
    }
    const float own = element<MODE>(a, q, p, row).input * grad_out.input - upstream * a.label_weight * a.input_inv_temperature;
    own_label().token = is_of_slice(slice, label.token) ? label.token : -1;
    own_label().input = rounded<DX>(INPUT_IS_CAPPED ? own * softcap_grad(q, a.input_softcap) : own);
}

/* Before gradients are written, and what of the row waits to be */
INLINE void mix(const Slice &slice, const Pipeline &pipeline, const RowGroup &group, const RowStats &stats, Sums &sums, bool is_fast,
                GradOut grad_out, float d_loss, float upstream)
{
    const Arguments &a = slice.a;
    const Label label = label_of(pipeline);
    sums.d_log_q = mixed_sum(a, label, stats, sums.d_log_q, d_loss);
    if (!WANT_INPUT || !has_label(group))
        return;
    if (HAS_FAST && is_fast)
        differentiate_label<HAS_FAST ? FAST : SAFE>(slice, label, stats, sums, grad_out, upstream);
    else
        differentiate_label<SAFE>(slice, label, stats, sums, grad_out, upstream);
}

/* After the row's other gradients */
INLINE void write_label(const Slice &slice, const RowGroup &group)
{
    if (!WANT_INPUT || slice.a.label_weight == 0)
        return;
    if (THREADS_PER_ROW > 32)
        group_sync(group);
    else
        __syncwarp();
    if (has_label(group) && own_label().token >= 0)
        slice.d_input()[own_label().token] = own_label().input;
}
#endif

}
