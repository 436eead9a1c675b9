/* What a row has to lose beside its divergence: its label's cross-entropy, and its log-sum-exp's square (labels.py). Each is a
   number of the row and, in the gradient, a factor of q, which is taken off Σ d_log_q. The label's own gradient is found before
   the row's may be written over logits, and written after them. */
#pragma once

#include "cuda/logits/gradients.cuh"

namespace kullback {

#if IS_MIXED
/* The logits of a row's label, and its gradient: its group's first thread writes and reads them. */
struct AtLabel {
    X x;
    Y y;
    DX input;
};
SHARED_ARRAY(AtLabel, at_label, GROUPS);

INLINE AtLabel &of_group() { return at_label[threadIdx.x / THREADS_PER_ROW]; } /* found again: so no register holds it */

/* A token of the row, NO_LABEL, or another negative number */
INLINE long long label_of(const Arguments &a, unsigned r) { return a.labels ? a.labels[r] : -1; }
INLINE bool is_here(const Arguments &a, long long label) { return label >= 0 && label < a.vocab; }

/* Whether the label is of this block's part of the row */
INLINE bool is_of_slice(const Slice &slice, long long label)
{
    const long long i = label - slice.head, first = (long long)slice.first * WIDTH;
    const bool is_edge = i < 0 || i >= slice.body;
    return is_here(slice.a, label) && (is_edge ? cta_rank() == 0 : i >= first && i < first + (long long)slice.vectors * WIDTH);
}

/* Before the group meets for the first time: from then on others may write gradients over logits. */
INLINE void read_label(const Slice &slice, const RowGroup &group)
{
    if (group.thread == 0) {
        const long long label = label_of(slice.a, slice.row);
        if (is_here(slice.a, label)) {
            of_group().x = slice.x()[label];
            of_group().y = slice.y()[label];
        }
    }
    if (KNOWN)
        group_sync(group);
}

INLINE double labelled_loss(const Arguments &a, unsigned r, double lse)
{
    const long long label = label_of(a, r);
    double loss = label != NO_LABEL && a.z_weight != 0 ? a.z_weight * lse * lse : 0;
    if (is_here(a, label) && a.label_weight != 0)
        loss += a.label_weight * (lse - (double)input_of(a, to_real(of_group().x)) * (double)a.input_inv_temperature);
    return loss;
}

/* The row's sums as gradients want them; what the loss is weighted by is upstream. */
INLINE Sums mixed_sums(const Slice &slice, const RowGroup &group, const RowStats &stats, Sums sums, double lse, double d_loss,
                       double upstream)
{
    const Arguments &a = slice.a;
    const long long label = label_of(a, slice.row);
    const double factor = label == NO_LABEL ? 0 : a.label_weight + (a.z_weight != 0 ? 2 * a.z_weight * lse : 0);
    if (factor != 0)
        sums.d_log_q -= (float)(factor / (a.divergence_weight * d_loss));
    if (WANT_INPUT && group.thread == 0 && a.label_weight != 0 && is_of_slice(slice, label)) {
        const float x = input_of(a, to_real(of_group().x)), y = target_of(a, to_real(of_group().y));
        const GradOut grad_out(a, (float)(upstream * a.divergence_weight * d_loss));
        const float of_row = safe_element(x, y, row_constants<SAFE>(a, stats, sums), a.parameters).input * grad_out.input;
        const float own = of_row - (float)(upstream * a.label_weight) * a.input_inv_temperature;
        of_group().input = rounded<DX>(INPUT_IS_CAPPED ? own * softcap_grad(x, a.input_softcap) : own);
    }
    return sums;
}

/* After the row's other gradients */
INLINE void write_label(const Slice &slice, const RowGroup &group)
{
    if (!WANT_INPUT || slice.a.label_weight == 0)
        return;
    group_sync(group);
    const long long label = label_of(slice.a, slice.row);
    if (group.thread == 0 && is_of_slice(slice, label))
        slice.d_input()[label] = of_group().input;
}
#endif

}
