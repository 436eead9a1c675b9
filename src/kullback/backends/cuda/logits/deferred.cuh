/* Loops in which few elements need a formula of their own: they are marked, and the lanes of a warp share them afterwards. */
#pragma once

#include "cuda/logits/pipeline.cuh"
#include "cuda/warp.cuh"

namespace kullback {

/* A vector: the index of its first element in the row, and in the stages on chip */
struct Place {
    int in_row, on_chip;
};

/* Where this thread's vectors are, of which it has taken some: by steps back from the last, 1 being that. OF_TILE: of one tile, whose
   places need no division */
template <bool OF_TILE> struct Places;
#if RESIDENT
template <> struct Places<true> {
    int next;   /* the address on chip after the last vector and what other threads have */
    int in_row; /* the index in the row of what would be at address 0 */

    INLINE Place operator()(int steps) const
    {
        const int address = next - steps * THREADS_PER_ROW * X_BYTES;
        return Place { in_row + address / (int)sizeof(X), (address - (int)shared_address(shared())) / (int)sizeof(X) };
    }
};

template <> struct Places<false> {
    const Slice &slice;
    const Pipeline &pipeline;
    const RowGroup &group;

    INLINE Place operator()(int steps) const
    {
        const int thread = opaque(group.thread), each = (pipeline.vectors - thread + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
        const int whole = slice.vectors / pipeline.vectors, last = slice.vectors - whole * pipeline.vectors;
        const int i = whole * each + (last - thread + THREADS_PER_ROW - 1) / THREADS_PER_ROW - steps;
        const int tile = i / each, vector = thread + i % each * THREADS_PER_ROW;
        Pipeline found = pipeline;
        found.advance(tile);
        return Place { slice.head + (slice.first + tile * pipeline.vectors + vector) * WIDTH,
                       (found.first_vector() + vector) * WIDTH };
    }
};
#else
template <bool> struct Places {
    const Slice &slice;
    int next;

    INLINE Place operator()(int steps) const { return Place { slice.head + (next - steps * THREADS_PER_ROW) * WIDTH, 0 }; }
};
#endif

/* Calls f(x, y, index in the row, index in the stages on chip, row()) for the elements of vectors that have a bit in `marks`: the
   vector `place(steps from the end)` has the lowest bit where that is 1. Each lane takes an element, of as many vectors at once as
   there are lanes for. */
template <bool FROM_CHIP, typename P, typename F, typename R>
INLINE void each_marked(const Slice &slice, unsigned marks, const P &place, F f, R row)
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

/* Calls f(x, y, row(), index in the row) for the elements with is_such(x, y) of vectors that have a bit in `marks`, as of
   `each_marked`, and then after(index of the vector's first element in the row). Each lane takes its own, since few lanes have more than one. */
template <bool FROM_CHIP, typename P, typename C, typename F, typename A, typename R>
INLINE void each_own_marked(const Slice &slice, unsigned marks, const P &place, C is_such, F f, A after, R row)
{
    if (!ballot(marks != 0))
        return;
    constexpr bool is_on_chip = RESIDENT && FROM_CHIP;
    const auto found = row();
    const X *x = 0;
    const Y *y = 0;
    int first = 0;
    unsigned left = 0; /* of the vector's elements */
#pragma unroll 1
    while (ballot(marks != 0 || left != 0)) {
        if (!left && marks) {
            const Place mine = place(__ffs((int)marks));
            marks &= marks - 1;
            first = mine.in_row;
            x = is_on_chip ? (const X *)shared() + mine.on_chip : slice.x() + mine.in_row;
            y = is_on_chip ? (const Y *)(shared() + Y_OFFSET) + mine.on_chip : slice.y() + mine.in_row;
            const Packed<X> own = *(const Packed<X> *)x;
            const Packed<Y> other = *(const Packed<Y> *)y;
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                left |= is_such(at(own, k), at(other, k)) ? 1u << k : 0;
        }
        if (left) {
            const int k = __ffs((int)left) - 1;
            left &= left - 1;
            f(to_real(x[k]), to_real(y[k]), found, first + k);
            if (!left)
                after(first);
        }
    }
}

/* Calls now(x vector, y vector, bytes of x before it, the address of its x on chip) for this thread's vectors, and then
   marked(marks, place) of those where it was false, as of `each_marked`: of at most 32 vectors at once. FROM_CHIP: what is on chip is
   still the row, and `marked` reads it there. LAST: the row is not read again. Then each tile's are marked by themselves, so that the
   stage is free for the next row's while this row's other tiles are worked on. */
template <bool LAST, bool FROM_CHIP, typename F, typename M>
INLINE void each_marking(const Slice &slice, Pipeline &pipeline, const RowGroup &group, F now, M marked)
{
    static_assert(FROM_CHIP || !LAST);
#if RESIDENT
    if constexpr (LAST) {
        each_tile(slice, pipeline, [&](const Pipeline &tile, int start, int count) {
            unsigned marks = 0;
            const int next = each_of_tile(slice, tile, group, start, count, [&](const Packed<X> &x, const Packed<Y> &y, long long before,
                                                                                int address) {
                marks = 2 * marks + !now(x, y, before, address);
            });
            marked(marks, Places<true> { next, slice.head + (int)(bytes_before(slice, tile, start) / (int)sizeof(X)) });
            release_stage(tile, group);
        });
    } else {
        unsigned marks = 0; /* a thread has at most 32 vectors of a row on chip */
        each_vector<false, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int address) {
            marks = 2 * marks + !now(x, y, before, address);
        });
        marked(marks, Places<false> { slice, pipeline, group });
    }
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
        marked(marks, Places<LAST> { slice, v });
    }
#endif
}

/* The same, and calls later(x, y, index, index on chip, row()) for the elements of those vectors, and for those of no vector,
   which are not on chip: many vectors later, by any lane. */
template <bool LAST, bool FROM_CHIP, typename F, typename G, typename R>
INLINE void each_deferring(const Slice &slice, Pipeline &pipeline, const RowGroup &group, F now, G later, R row)
{
    each_marking<LAST, FROM_CHIP>(slice, pipeline, group, now, [&](unsigned marks, const Places<LAST> &place) {
        each_marked<FROM_CHIP>(slice, marks, place, later, row);
    });
    if (slice.body < (int)slice.a.vocab) {
        const Row found = row();
        each_edge(slice, group, [&](int i) { later(to_real(slice.x()[i]), to_real(slice.y()[i]), i, 0, found); });
    }
}

/* The same, and calls refine(x, y, row(), index) for the elements of those vectors with is_such(x, y), of which there is one, and
   then after(index of the first); and edge(index, row()) for those of no vector. */
template <bool LAST, bool FROM_CHIP, typename F, typename C, typename G, typename A, typename E, typename R>
INLINE void each_refining(const Slice &slice, Pipeline &pipeline, const RowGroup &group, F now, C is_such, G refine, A after, E edge,
                          R row)
{
    each_marking<LAST, FROM_CHIP>(slice, pipeline, group, now, [&](unsigned marks, const Places<LAST> &place) {
        each_own_marked<FROM_CHIP>(slice, marks, place, is_such, refine, after, row);
    });
    if (slice.body < (int)slice.a.vocab) {
        const auto found = row();
        each_edge(slice, group, [&](int i) { edge(i, found); });
    }
}

/* Calls f(x, y, index in the row) for this thread's elements with is_such(x, y), of which there are few, of a row of whole vectors. */
template <bool LAST, typename C, typename F>
INLINE void each_such(const Slice &slice, Pipeline &pipeline, const RowGroup &group, C is_such, F f)
{
    each_refining<LAST, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
        bool is_any = false;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            is_any |= is_such(at(x, k), at(y, k));
        return !is_any;
    }, is_such, [&](float x, float y, int, int i) { f(x, y, i); }, [](int) {}, [](int, int) {}, [] { return 0; });
}

}
