/* Loops in which few elements need a formula of their own: they are marked, and the lanes of a warp share them afterwards. */
#pragma once

#include "cuda/logits/pipeline.cuh"
#include "cuda/warp.cuh"

namespace kullback {

/* A vector: the index of its first element in the row, and in the stages on chip */
struct Place {
    int in_row, on_chip;
};

/* Calls f(x, y, index in the row, index in the stages on chip, row()) for the elements of vectors that have a bit in `marks`: the
   vector `place(steps from the end)` has the lowest bit where that is 1. Each lane takes an element, of as many vectors at once as
   there are lanes for. */
template <bool FROM_CHIP, typename P, typename F, typename R>
INLINE void each_marked(const Slice &slice, unsigned marks, P place, F f, R row)
{
    unsigned owners = ballot(marks != 0);
    if (!owners)
        return;
    const Row found = row();
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll 1
    for (; owners; owners = ballot(marks != 0)) {
        const Place mine = marks ? place(__ffs((int)marks)) : Place { 0, 0 };
        unsigned others = owners;
#pragma unroll
        for (unsigned before = WIDTH; before < WARP; before += WIDTH)
            others &= lane < before ? others : others - 1;
        const unsigned owner = (unsigned)(__ffs((int)others) - 1) % WARP;
        const int i = shfl(mine.in_row, owner) + (int)(lane % WIDTH), k = shfl(mine.on_chip, owner) + (int)(lane % WIDTH);
        if (others) {
#if RESIDENT
            if (FROM_CHIP)
                f(to_real(((const X *)shared())[k]), to_real(((const Y *)(shared() + Y_OFFSET))[k]), i, k, found);
            else
#endif
                f(to_real(slice.x()[i]), to_real(slice.y()[i]), i, k, found);
        }
        if (__popc(owners & ((1u << lane) - 1)) < WARP / WIDTH)
            marks &= marks - 1;
        __syncwarp(); /* what was read may be written over */
    }
}

/* Calls now(x vector, y vector, bytes of x before it, the address of its x on chip) for this thread's vectors, and
   later(x, y, index, index on chip, row()) for the elements of those where it was false, and for those of no vector, which are
   not on chip: many vectors later, by any lane. LAST: the row is not read again. FROM_CHIP: what is on chip is still the row. */
template <bool LAST, bool FROM_CHIP, typename F, typename G, typename R>
INLINE void each_deferring(const Slice &slice, Pipeline &pipeline, const RowGroup &group, F now, G later, R row)
{
#if RESIDENT
    unsigned marks = 0; /* a thread has at most 32 vectors of a row on chip */
    each_vector<false, LAST && !FROM_CHIP, false>(slice, pipeline, group,
                                                  [&](const Packed<X> &x, const Packed<Y> &y, long long before, int address) {
        marks = 2 * marks + !now(x, y, before, address);
    });
    each_marked<FROM_CHIP>(slice, marks, [&](int steps) {
        const int thread = opaque(group.thread), each = (pipeline.vectors - thread + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
        const int whole = slice.vectors / pipeline.vectors, last = slice.vectors - whole * pipeline.vectors;
        const int i = whole * each + (last - thread + THREADS_PER_ROW - 1) / THREADS_PER_ROW - steps;
        const int tile = i / each, vector = thread + i % each * THREADS_PER_ROW;
        int stage = pipeline.stage + tile;
        stage -= stage >= pipeline.stages ? pipeline.stages : 0;
        return Place { slice.head + (slice.first + tile * pipeline.vectors + vector) * WIDTH,
                       (stage * pipeline.vectors + vector) * WIDTH };
    }, later, row);
    if (LAST && FROM_CHIP)
        release_row(slice, pipeline, group);
#else
#pragma unroll 1
    for (int first = 0; first < slice.vectors; first += 32 * THREADS_PER_ROW) {
        unsigned marks = 0;
        int v = first + group.thread;
#pragma unroll 1
        for (const int end = min(slice.vectors, first + 32 * THREADS_PER_ROW); v < end; v += THREADS_PER_ROW) {
            const int i = slice.head + v * WIDTH;
            marks = 2 * marks + !now(load(slice.x() + i), load(slice.y() + i), v * (long long)X_BYTES, 0);
        }
        each_marked<false>(slice, marks, [&](int steps) {
            return Place { slice.head + (v - steps * THREADS_PER_ROW) * WIDTH, 0 };
        }, later, row);
    }
#endif
    if (slice.body < (int)slice.a.vocab) {
        const Row found = row();
        each_edge(slice, group, [&](int i) { later(to_real(slice.x()[i]), to_real(slice.y()[i]), i, 0, found); });
    }
}

}
