/* What a row has to lose beside its divergence: its label's cross-entropy, and its log-sum-exp's square (labels.py). Each is a
   number of the row and, in the gradient, a factor of q, which is taken off Σ d_log_q. The label's own gradient is found before
   the row's may be written over logits, and written after them: by the thread that has its vector, so that none waits. */
#pragma once

#include "cuda/logits/elements.cuh"

namespace kullback {

/* What is upstream of a row's logits; and what is taken off its label's, and off those of all tokens of a smoothed label's row */
struct GradOut {
    float input, target, label, everywhere;

    /* loss: upstream of the row's divergence; label: of its label's cross-entropy */
    INLINE GradOut(const Arguments &a, float loss, float label = 0)
        : input(INPUT_IS_LOGITS ? loss * a.input_inv_temperature : loss),
          target(TARGET_IS_LOGITS ? loss * a.target_inv_temperature : loss), label(label * a.input_inv_temperature), everywhere(0)
    {
#if HAS_SMOOTHING
        everywhere = this->label * a.label_smoothing / (float)a.vocab;
        this->label *= 1 - a.label_smoothing;
#endif
    }

    /* What a logit of the input gets; gradient: with what is upstream of the divergence in it */
    INLINE DX of_input(const Arguments &a, float gradient, float x) const
    {
        const float found = HAS_SMOOTHING ? gradient - everywhere : gradient;
        return rounded<DX>(INPUT_IS_CAPPED ? found * softcap_grad(x, a.input_softcap) : found);
    }
};

#if HAS_AUXILIARY
/* What a group keeps of its row's label */
struct OwnLabel {
#if RESIDENT
    int token; /* kept: to be asked for again, from memory, it would take as long as a tenth of a row */
#else
    Label label;
#endif
    DX input;
};
SHARED_ARRAY(OwnLabel, own_labels, GROUPS);

INLINE OwnLabel &own_label() { return own_labels[threadIdx.x / THREADS_PER_ROW]; } /* found again: so no register holds it */

#if RESIDENT
INLINE Label label_of(const Pipeline &pipeline) { return pipeline.header()->label; }
#else
INLINE Label label_of(const Pipeline &) { return own_label().label; }
#endif

static_assert(!(KNOWN && HAS_AUXILIARY && RESIDENT)); /* else a stage may be another row's while its label is asked for */

/* Whether this thread has the token's vector, or has it among the edges */
INLINE bool has_token(const Slice &slice, const Pipeline &pipeline, const RowGroup &group, int token)
{
    const int i = token - slice.head, vector = i / WIDTH - slice.first;
    if (token < 0)
        return false;
    if (i < 0 || i >= slice.body)
        return cta_rank() == 0 && group.thread == (i < 0 ? token : token - slice.body) % THREADS_PER_ROW;
#if RESIDENT
    const int in_tile = vector % pipeline.vectors;
#else
    const int in_tile = vector;
#endif
    return vector >= 0 && vector < slice.vectors && group.thread == in_tile % THREADS_PER_ROW;
}

/* Before the row is read: nothing waits for it then. Off the chip before the group meets for the first time: from then on others may
   write gradients over logits. */
INLINE void read_label(const Slice &slice, const Pipeline &pipeline, RowGroup &group)
{
#if RESIDENT
    wait_tile(pipeline); /* the producer has read it */
#else
    group_sync(group); /* others may still read the label of the row before */
    if (group.thread == 0)
        own_label().label = loaded_label(slice.a, slice.row, token_of(slice.a, slice.row));
    group_sync(group);
#endif
    group.has_label = WANT_INPUT && slice.a.label_weight != 0 && has_token(slice, pipeline, group, label_of(pipeline).token);
}

INLINE float lse_error(const Arguments &a, const RowStats &stats)
{
    return stats.in_range() ? (float)scaling_error(stats.x_max, a.input_inv_temperature) * LN2 : 0;
}
INLINE float input_lse_of(const Arguments &a, const RowStats &stats)
{
    return fmaf(stats.x_max, a.input_inv_temperature, logf(stats.x_sum_exp) + lse_error(a, stats));
}

/* logit: the label's */
INLINE float labelled_loss(const Arguments &a, long long token, float logit, const RowStats &stats)
{
    if (token == IGNORED)
        return 0;
    const float lse = input_lse_of(a, stats), of_z = a.z_weight != 0 ? a.z_weight * lse * lse : 0;
    if (token < 0 || token >= a.vocab || a.label_weight == 0)
        return of_z;
    /* of logits far from 0 what is left must keep its digits */
    const float error = lse_error(a, stats), log_sum_exp = logf(stats.x_sum_exp);
    const float below = (stats.x_max - input_of(a, logit)) * a.input_inv_temperature;
    const float of_label = below + (log_sum_exp + error);
#if HAS_SMOOTHING /* exponents are of 2, less what the maximum's is rounded by; or of e */
    const float mean = stats.exponent_sum / (float)a.vocab * (stats.in_range() ? LN2 : 1);
    return of_z + a.label_weight * fmaf(a.label_smoothing, log_sum_exp - mean, (1 - a.label_smoothing) * of_label);
#else
    return of_z + a.label_weight * of_label;
#endif
}

/* What of that multiplies q in the gradient */
INLINE float mass_factor(const Arguments &a, const Label &label, const RowStats &stats)
{
    if (label.token == IGNORED)
        return 0;
    const float lse = stats.in_range() ? LN2 * log2_z(stats.x_max, stats.x_sum_exp, a.input_inv_temperature) : input_lse_of(a, stats);
    return a.label_weight + (a.z_weight != 0 ? 2 * a.z_weight * lse : 0);
}

/* The row's Σ d_log_q, less what its label and z-loss add to q's factor */
INLINE float sum_with_label(const Arguments &a, const Label &label, const RowStats &stats, float d_log_q, float d_loss)
{
    const float factor = mass_factor(a, label, stats);
    return factor != 0 ? d_log_q - in_range_ratio_or_zero(factor, a.divergence_weight * d_loss) : d_log_q;
}

/* The row's derivative by which something is divided, as of labels.py */
INLINE double dividing(const Arguments &a, const Pipeline &pipeline, const RowStats &stats, double d_loss)
{
    const float least = 1e-20f * in_range_ratio_or_zero(fabsf(a.label_weight) + fabsf(a.z_weight), fabsf(a.divergence_weight));
    if (FINISH_IS_IDENTITY || !(fabs(d_loss) < (double)least))
        return d_loss;
    return mass_factor(a, label_of(pipeline), stats) != 0 ? (double)least : d_loss;
}

/* Before gradients are written: the row's sums as they are to be */
INLINE void shift_sum(const Arguments &a, const Pipeline &pipeline, const RowStats &stats, Sums &sums, float d_loss)
{
    const float shifted = sum_with_label(a, label_of(pipeline), stats, sums.d_log_q, d_loss);
    sums.auxiliary = sums.d_log_q - shifted;
    sums.d_log_q = shifted;
}

/* What the label's logit is to get. `own(q, p)`: what it would get were it no label, by its logits; only this thread asks. */
template <typename F>
INLINE void differentiate_label(const Arguments &a, const Pipeline &pipeline, const RowGroup &group, F own, GradOut grad_out)
{
    if (!WANT_INPUT || !group.has_label)
        return;
    const Label label = label_of(pipeline);
    const float q = input_of(a, label.x);
#if RESIDENT
    own_label().token = label.token;
#endif
    own_label().input = grad_out.of_input(a, own(q, target_of(a, label.y)) - grad_out.label, q);
}

/* After the row's other gradients. Those of vectors are the same warp's; element by element all of a group has them. */
INLINE void write_label(const Slice &slice, const RowGroup &group, bool by_vectors)
{
    if (!WANT_INPUT || slice.a.label_weight == 0)
        return;
    if (by_vectors)
        sync_warp();
    else
        group_sync(group);
#if RESIDENT /* the label's place on chip may be another row's by now */
    const int token = own_label().token;
#else
    const int token = own_label().label.token;
#endif
    if (group.has_label)
        slice.d_input()[token] = own_label().input;
}
#else
INLINE double dividing(const Arguments &, const Pipeline &, const RowStats &, double d_loss) { return d_loss; }
template <typename F> INLINE void differentiate_label(const Arguments &, const Pipeline &, const RowGroup &, F, GradOut)
{
}
#endif

INLINE GradOut grad_out_of(const Arguments &a, const Pipeline &pipeline, double weight, double d_loss)
{
    const double upstream = weight * a.scale;
    float of_label = (float)upstream * label_weight(a);
#if HAS_SMOOTHING
    if (label_of(pipeline).token == IGNORED)
        of_label = 0;
#endif
    return GradOut(a, (float)(upstream * divergence_weight(a) * d_loss), of_label);
}

}
