/* What the threads of a row, of all its blocks, tell one another. */
#pragma once

#include "cuda/logits/ranks.cuh"

namespace kullback {

struct Add {
    static INLINE float identity() { return 0; }
    template <typename T> INLINE T operator()(T a, T b) const { return a + b; }
};

struct Max {
    static INLINE float identity() { return -REAL_INFINITY; }
    INLINE float operator()(float a, float b) const { return max_nan(a, b); }
};

/* Every thread gives values, and gets each reduced over the row's threads, in the same order. Lanes share the work: of the
   values each keeps one, after as many halvings. Warps send floats: a slot of the exchange buffer is [cluster · WARPS, 4] of them in
   each block.

   Two slots are enough: a warp writes to one again only after an all-reduce in the other, whose partials the others sent
   when they had read the first. */
template <typename T, int COUNT, typename F>
INLINE void row_all_reduce(const Arguments &a, const Pipeline &pipeline, RowGroup &group, T (&values)[COUNT], F reduce)
{
    enum { KEPT = COUNT > 2 ? 4 : 2, EACH = LOGICAL_WARP / KEPT }; /* lanes of a value */
    static_assert(COUNT <= KEPT && COUNT * sizeof(float) <= PARTIAL_BYTES && MAX_CLUSTER <= 32);
    const unsigned thread = (unsigned)opaque(group.thread), lane = thread % LOGICAL_WARP;
    const unsigned block = cta_rank(); /* early: it takes long to answer */
    T parts[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        parts[k] = values[min(k, COUNT - 1)];
#pragma unroll
    for (int step = LOGICAL_WARP / 2, count = KEPT / 2; step; step /= 2, count /= 2) {
        const bool is_upper = lane & step;
#pragma unroll
        for (int k = 0; k < count; k++)
            parts[k] = reduce(is_upper ? parts[k + count] : parts[k], shfl_xor(is_upper ? parts[k] : parts[k + count], step));
        if (count == 0)
            parts[0] = reduce(parts[0], shfl_xor(parts[0], step));
    }
    T mine = parts[0];
#if THREADS_PER_ROW > 32
    const unsigned cluster = group.cluster, warp = thread / 32, count = cluster * WARPS;
    const unsigned exchanges = (unsigned)opaque((int)group.exchanges);
    const unsigned slot = (unsigned)group.index * EXCHANGE_SLOTS + exchanges % EXCHANGE_SLOTS;
    float4 *partials = (float4 *)(shared() + a.exchange_offset + slot * count * PARTIAL_BYTES);
#if RESIDENT
    if (cluster > 1) {
        Mbarrier *arrived = pipeline.arrived(slot);
        if (thread == 0)
            mbarrier_arrive_expect_tx(arrived, count * PARTIAL_BYTES);
        float4 sent = { shfl((float)mine, 0), shfl((float)mine, EACH) };
        if (KEPT > 2) {
            sent.z = shfl((float)mine, 2 * EACH);
            sent.w = shfl((float)mine, 3 * EACH);
        }
        if (lane < cluster) /* all at once: each arrival wakes all that wait */
            st_async(partials + block * WARPS + warp, arrived, sent, lane);
        mbarrier_wait_cluster(arrived, exchanges / EXCHANGE_SLOTS % 2);
    } else
#endif
    {
        if (lane % EACH == 0)
            ((float *)(partials + warp))[lane / EACH] = (float)mine;
        group_sync(group);
    }
    group.exchanges++;
    mine = reduce.identity();
    const unsigned again = (unsigned)opaque(group.thread) % 32; /* the lane: kept while others are waited for, it would spill */
#pragma unroll
    for (unsigned first = 0; first < MAX_CLUSTER; first += EACH) {
        const unsigned block = first + again % EACH;
        if (block < cluster) { /* a lane reads what that sent, and adds pairs: one large partial is not to swallow small ones */
            const float *sent = (const float *)(partials + block * WARPS) + again / EACH;
            T reduced[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                reduced[w] = sent[4 * w];
#pragma unroll
            for (int step = 1; step < WARPS; step *= 2)
#pragma unroll
                for (int w = 0; w + step < WARPS; w += 2 * step)
                    reduced[w] = reduce(reduced[w], reduced[w + step]);
            mine = first ? reduce(mine, reduced[0]) : reduced[0];
        }
    }
#pragma unroll
    for (int step = (MAX_CLUSTER < EACH ? MAX_CLUSTER : EACH) / 2; step; step /= 2)
        mine = reduce(mine, shfl_xor(mine, step));
#endif
#if HAS_PEERS
    mine = all_ranks_reduced<COUNT>(a, group, shfl((float)mine, lane % OF_EXCHANGE * EACH % 32), reduce);
    enum { HOLDER = 1 };
#else
    enum { HOLDER = EACH };
#endif
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = shfl((float)mine, k * HOLDER);
}

/* Σ of terms and of their partial derivatives */
struct Sums {
    float term = 0, d_log_p = 0, d_log_q = 0;
    float q_minus_p = 0; /* the error of the difference of log-sum-exps, to first order */
    float auxiliary = 0; /* what of the row's loss beside its divergence has been taken off d_log_q (labels.cuh) */
    float squares = 1;   /* of one side's masses, where that is known */
    float ties = REAL_INFINITY; /* mass of tokens of log-ratios up to TIE, where that is known */
};

#define TIE 2e-7f /* what a difference of log-sum-exps is off by in most rows, or less */

/* Σ p · slope_p and Σ q · slope_q */
struct SlopeSums {
    float p = 0, q = 0;
};

/* Σ term of the tokens that have little mass, and of those that have much */
struct TermSums {
    float light = 0, heavy = 0;
};

INLINE Sums all_reduced(const Arguments &a, const Pipeline &pipeline, RowGroup &group, Sums sums)
{
    double values[] = { sums.term, sums.d_log_p, sums.d_log_q, sums.q_minus_p };
    row_all_reduce(a, pipeline, group, values, Add());
    return { (float)values[0], (float)values[1], (float)values[2], (float)values[3] };
}

INLINE SlopeSums all_reduced(const Arguments &a, const Pipeline &pipeline, RowGroup &group, SlopeSums sums)
{
    float values[] = { sums.p, sums.q };
    row_all_reduce(a, pipeline, group, values, Add());
    return { values[0], values[1] };
}

INLINE float all_reduced(const Arguments &a, const Pipeline &pipeline, RowGroup &group, float sum)
{
    return all_reduced(a, pipeline, group, SlopeSums { sum }).p;
}

/* Whether what each thread has counted is at most so small a part of a row's sample: of all ranks', who decide alike */
INLINE bool at_most_one_in(int many, const Arguments &a, const Pipeline &pipeline, RowGroup &group, float counted, float sampled)
{
    const SlopeSums sums = all_reduced(a, pipeline, group, SlopeSums { counted, HAS_PEERS && is_first_thread(group) ? sampled : 0 });
    return warp_all(sums.p <= (HAS_PEERS ? sums.q : sampled) / many);
}

INLINE void all_reduce(const Arguments &a, const Pipeline &pipeline, RowGroup &group, SlopeSums &sums, TermSums &terms)
{
    float values[] = { sums.p, sums.q, terms.light, terms.heavy };
    row_all_reduce(a, pipeline, group, values, Add());
    sums = { values[0], values[1] };
    terms = { values[2], values[3] };
}

INLINE TermSums all_reduced(const Arguments &a, const Pipeline &pipeline, RowGroup &group, TermSums sums)
{
    double values[] = { sums.light, sums.heavy };
    row_all_reduce(a, pipeline, group, values, Add());
    return { (float)values[0], (float)values[1] };
}

INLINE RowMax all_reduced(const Arguments &a, const Pipeline &pipeline, RowGroup &group, RowMax row_max)
{
    float values[] = { row_max.x, row_max.y };
    row_all_reduce(a, pipeline, group, values, Max());
    return { values[0], values[1] };
}

}
