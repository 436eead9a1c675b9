/* Where a row's logits lie, and loops over a thread's part of them.

   A resident row is spread over the blocks of a cluster. In each, one more warp, the producer, copies tiles of rows into
   the stages of a pipeline in shared memory, as far ahead as there are stages. The row groups take rows in turn: while one
   waits for the other blocks of its row, another computes.

   A short row has a warp, or some lanes of one. They copy it to the chip themselves, each what it will read, while they work on
   the row before. Rows of other shapes are read from memory again for each pass.

   Results depend on the launch shape, which depends on the device, the vocabulary and the tensors' layout alone. */
#pragma once

#include "cuda/logits/arguments.cuh"

namespace kullback {

/* What masses are measured against: estimates of the largest logits, or these; NaN, if there is one */
struct alignas(8) RowMax {
    float x, y;
};

#if HAS_AUXILIARY
/* A row's label, or a negative number: IGNORED, or any other; and the logits there, else 0 */
struct alignas(8) Label {
    float x, y;
    int token;
};

INLINE long long token_of(const Arguments &a, unsigned r) { return a.labels ? a.labels[r] : -1; }

INLINE Label loaded_label(const Arguments &a, unsigned r, long long token)
{
    if (token < 0 || token >= a.vocab)
        return { 0, 0, token == IGNORED ? (int)IGNORED : -1 };
    return { to_real(a.x[r * a.x_stride + token]), to_real(a.y[r * a.y_stride + token]), (int)token };
}
#endif

/* This block's part of a row: whole vectors, and for the first block of a cluster the edges that no vector covers.
   Pointers are found when they are wanted: kept, they would cost registers. */
struct Slice {
    const Arguments &a;
    unsigned row;
    int head, first, vectors; /* ours are [first, first + vectors) of those that begin at head */
    int body;                 /* elements that vectors cover */
    int lead;                 /* vectors of its line before the first: what is a line in memory is to be one on chip */

    INLINE const X *x() const { return a.x + (unsigned)opaque((int)row) * a.x_stride; }
    INLINE const Y *y() const { return a.y + (unsigned)opaque((int)row) * a.y_stride; }
    INLINE DX *d_input() const { return a.d_input + row * a.d_input_stride; }
    INLINE DY *d_target() const { return a.d_target + row * a.d_target_stride; }
};

#if ON_CHIP
/* The stages' tiles of x, or two rows of it for each group; at Y_OFFSET those of y. Where there are stages, then every row
   group's exchange slots, a barrier of arrivals for each, and the stages' headers. */
INLINE unsigned char *shared() { return dynamic_shared(); }
#else
INLINE unsigned char *shared()
{
    __shared__ __align__(16) unsigned char memory[GROUPS * EXCHANGE_SLOTS * WARPS * PARTIAL_BYTES];
    return memory;
}
#endif

#if RESIDENT
enum { LINE = 128 }; /* bytes of a line of memory */

/* Of a stage */
struct alignas(16) StageHeader {
    Mbarrier full, empty;
    RowMax row_max; /* of the row that begins here */
#if HAS_AUXILIARY
    Label label;
#endif
};
static_assert(sizeof(StageHeader) <= HEADER_BYTES);

/* Offsets instead of pointers, and counts: what a thread keeps has to fit its registers. */
struct Pipeline {
    int stages, stage_vectors; /* vectors of a stage, of either tensor */
    int vectors;               /* of a tile */
    int row_tiles;             /* stages that a row takes: as many in each block, whether or not vectors are left for all */
    int headers;               /* the offset of stages' headers, before which are the exchange slots' barriers */
    int stage;                 /* the next row's first */
    unsigned phase;            /* of its barriers: they tell a round from the next, and no more */
    int lead;                  /* of this row's slice */

    INLINE void advance(int tiles) /* a round at most */
    {
        stage += tiles;
        const bool is_over = stage >= stages;
        stage -= is_over ? stages : 0;
        phase ^= is_over;
    }
    INLINE void skip_rows(int rows)
    {
        for (int row = 0; row < rows; row++)
            advance(row_tiles);
    }
    INLINE int first_vector() const { return stage * stage_vectors + lead; } /* of the stages' */
    INLINE const X *x() const { return (const X *)shared() + first_vector() * WIDTH; }
    INLINE const Y *y() const { return (const Y *)(shared() + Y_OFFSET) + first_vector() * WIDTH; }
    INLINE StageHeader *header() const { return (StageHeader *)(shared() + headers) + stage; }
    INLINE Mbarrier *full() const { return &header()->full; }
    INLINE Mbarrier *empty() const { return &header()->empty; }
    INLINE Mbarrier *arrived(int slot) const { return (Mbarrier *)(shared() + headers) + (slot - GROUPS * EXCHANGE_SLOTS); }
};
#else
struct Pipeline {
#if COPIES_ROWS
    int address; /* of the row's first vector of x on chip */
#endif
};
#endif

/* The threads of a block that share a row */
struct RowGroup {
    int thread, index; /* of this thread among them; of the group in its block */
    unsigned cluster;  /* blocks of the cluster */
    /* All-reduces so far, modulo twice the slots; whether this row's logits are known to be finite; whether a row had -inf, so that the
       next may; rows that were read so far, of the producer of all. Together: a register more would spill. */
#if HAS_PEERS
    unsigned exchanges : 2, finite : 1, guards : 1, sent : 5, turn : 23; /* sent: exchanges of the row with other ranks */
    unsigned row;
#else
    unsigned exchanges : 2, finite : 1, guards : 1, turn : 28;
#endif
#if HAS_AUXILIARY
    bool has_label; /* whether this thread has the row's label: not in the word above, by whose bits a warp branches */
#endif
};

/* This block's rank in the cluster, asked for each time: kept, it would spill. */
#if RESIDENT
INLINE unsigned cta_rank() { return cluster_ctarank(); }
#else
INLINE unsigned cta_rank() { return 0; }
#endif

/* Of all the row's */
INLINE bool is_first_thread(const RowGroup &group) { return group.thread == 0 && cta_rank() == 0; }

/* All threads of the group have come here. */
INLINE void group_sync(const RowGroup &group)
{
    if constexpr (THREADS_PER_ROW > WARP)
        bar_sync<THREADS_PER_ROW>(group.index + 1);
    else
        sync_warp();
}

INLINE Slice slice_of(const Arguments &a, unsigned r, unsigned rank)
{
    Slice slice = { a, r };
    const int misaligned = (int)((unsigned long long)slice.x() % sizeof(Packed<X>) / sizeof(X)), vocab = (int)a.vocab;
    slice.head = misaligned ? WIDTH - misaligned : 0;
    /* rows that are not aligned alike have no vectors; they are on no chip */
    const bool together = ON_CHIP || (slice.head <= vocab && (unsigned long long)(slice.y() + slice.head) % VECTOR_BYTES == 0
        && (!WANT_INPUT || is_aligned(slice.d_input() + slice.head))
        && (!WANT_TARGET || is_aligned(slice.d_target() + slice.head)));
    int vectors = together ? (vocab - slice.head) / WIDTH : 0;
    /* A last step that few threads would have: its elements are taken one by one, as the edges are. */
    const int last = vectors % THREADS_PER_ROW;
    if (COPIES_ROWS && vocab - (vectors - last) * WIDTH <= THREADS_PER_ROW)
        vectors -= last;
    slice.body = vectors * WIDTH;
#if HAS_LEAD
    slice.lead = (int)((unsigned long long)(slice.x() + slice.head) / X_BYTES % (LINE / X_BYTES));
#endif
    slice.first = min(vectors, a.slice_vectors * (int)rank);
    slice.vectors = min(vectors - slice.first, a.slice_vectors);
    return slice;
}

#if RESIDENT
/* Calls f(the pipeline at the tile's stage, the tile's first vector of the slice, its vectors) for the tiles of a slice. */
template <typename F> INLINE void each_tile(const Slice &slice, Pipeline pipeline, F f)
{
    for (int tile = 0, start = 0; tile < pipeline.row_tiles; tile++, start += pipeline.vectors) {
        f(pipeline, start, min(pipeline.vectors, slice.vectors - start));
        pipeline.advance(1);
    }
}

/* Barriers count rounds of the pipeline modulo 2, and this group may be a round ahead of another: first the round before has
   to be over. */
INLINE void wait_tile(const Pipeline &tile)
{
    mbarrier_wait(tile.empty(), tile.phase ^ 1);
    mbarrier_wait(tile.full(), tile.phase);
}

INLINE void release_stage(const Pipeline &tile, const RowGroup &group)
{
    if (CACHES_SLOPES || CACHES_DERIVATIVES) /* what we wrote there comes before what the next copy writes */
        fence_proxy_async();
    __syncwarp();
    if (group.thread % 32 == 0)
        mbarrier_arrive(tile.empty());
}
#endif

/* The row is not read again. */
INLINE void release_row(const Slice &slice, const Pipeline &pipeline, const RowGroup &group)
{
#if RESIDENT
    each_tile(slice, pipeline, [&](const Pipeline &tile, int, int) { release_stage(tile, group); });
#endif
}

#if RESIDENT
/* A tile's vectors of x in shared memory, by addresses: one register counts and points. */
INLINE int first_address(const Pipeline &tile) { return (int)shared_address(tile.x()); }
INLINE int end_address(const Pipeline &tile, int count) { return first_address(tile) + max(count, 0) * X_BYTES; }
#elif COPIES_ROWS
INLINE int first_address(const Pipeline &pipeline) { return pipeline.address; }
#endif

#if ON_CHIP
/* Of y, where that of x is there */
INLINE int y_address(int address)
{
    const int before = address - (int)shared_address(shared());
    return address + Y_OFFSET + (X_BYTES == Y_BYTES ? 0 : before / X_BYTES * Y_BYTES - before);
}
#endif

#if COPIES_ROWS
static_assert(THREADS_PER_ROW <= WARP);

/* The elements of the row's vectors, of which each thread has copied some */
INLINE const X *copied_x(const Pipeline &pipeline)
{
    return (const X *)(shared() + (first_address(pipeline) - (int)shared_address(shared())));
}
INLINE const Y *copied_y(const Pipeline &pipeline)
{
    return (const Y *)(shared() + (y_address(first_address(pipeline)) - (int)shared_address(shared())));
}

/* Where a row that is copied has vectors */
struct Vectors {
    int head, count;

    INLINE Slice of(const Arguments &a, unsigned r) const { return { a, r, head, 0, count, count * WIDTH }; }
};

/* Of the row, if there is one that is to be read; asks for those that this thread will read. */
INLINE Vectors copied_row(const Arguments &a, const RowGroup &group, unsigned r, int address)
{
    Vectors vectors = {};
    if (r < a.rows && weight_of(a, r) != 0) {
        const Slice slice = slice_of(a, r, 0);
        vectors = { slice.head, slice.vectors };
        const X *x = opaque(slice.x() + slice.head + group.thread * WIDTH); /* else each copy finds its address from the first */
        const Y *y = opaque(slice.y() + slice.head + group.thread * WIDTH);
        address += group.thread * X_BYTES;
        const int left = slice.vectors - group.thread;
#pragma unroll
        for (int v = 0; v < SLOT_VECTORS; v += THREADS_PER_ROW)
            if (v < left) {
                cp_async<X_BYTES>(address + v * X_BYTES, x + v * WIDTH);
                cp_async<Y_BYTES>(y_address(address + v * X_BYTES), y + v * WIDTH);
            }
    }
    cp_async_commit();
    return vectors;
}
#endif

#if RESIDENT
/* Bytes of the row's vectors of x before what would be at address 0 of this tile, whose first vector is `start` of the slice */
INLINE long long bytes_before(const Slice &slice, const Pipeline &tile, int start)
{
    return (slice.first + start) * (long long)X_BYTES - first_address(tile);
}

/* Of one tile, as `each_vector`; the address on chip after the last vector and what other threads have */
template <typename F>
INLINE int each_of_tile(const Slice &slice, const Pipeline &tile, const RowGroup &group, int start, int count, const F &f)
{
    const long long before = bytes_before(slice, tile, start);
    int address = first_address(tile) + group.thread * X_BYTES;
#pragma unroll 1
    for (; address < end_address(tile, count); address += THREADS_PER_ROW * X_BYTES)
        f(ld_shared<X>(address), ld_shared<Y>(y_address(address)), before + (unsigned)address, address);
    return address;
}
#endif

/* Calls f(x vector, y vector, bytes of the row's vectors of x before it, the address of its x on chip) for this thread's
   vectors. FIRST: all but the first tile may still be on their way; LAST: the row is not read again. */
template <bool FIRST, bool LAST, typename F>
INLINE void each_vector(const Slice &slice, Pipeline &pipeline, const RowGroup &group, F f)
{
#if RESIDENT
    each_tile(slice, pipeline, [&](const Pipeline &tile, int start, int count) {
        if (FIRST && start) /* the first has been waited for */
            wait_tile(tile);
        each_of_tile(slice, tile, group, start, count, f);
        if (LAST)
            release_stage(tile, group);
    });
#elif COPIES_ROWS
    const int first = first_address(pipeline);
#pragma unroll 1
    for (int address = first + group.thread * X_BYTES; address < first + slice.vectors * X_BYTES; address += THREADS_PER_ROW * X_BYTES)
        f(ld_shared<X>(address), ld_shared<Y>(y_address(address)), address - first, address);
#else
    const X *x = slice.x() + slice.head;
    const Y *y = slice.y() + slice.head;
#pragma unroll 1
    for (int v = group.thread; v < slice.vectors; v += THREADS_PER_ROW)
        f(load(x + v * WIDTH), load(y + v * WIDTH), v * (long long)X_BYTES, 0);
#endif
}

/* Elements of a thread's that a sample of the row has */
enum { SAMPLE_WIDTH = WIDTH / 2 };

/* Calls f(x, y, k) for the first of this thread's first vector, which has arrived. */
template <typename F>
INLINE void each_first(const Slice &slice, const Pipeline &pipeline, const RowGroup &group, F f)
{
    if (group.thread >= slice.vectors)
        return;
#if ON_CHIP
    const Packed<X> x = ld_shared<X>(first_address(pipeline) + group.thread * X_BYTES);
    const Packed<Y> y = ld_shared<Y>(y_address(first_address(pipeline) + group.thread * X_BYTES));
#else
    const int i = slice.head + group.thread * WIDTH;
    const Packed<X> x = load(slice.x() + i);
    const Packed<Y> y = load(slice.y() + i);
#endif
#pragma unroll
    for (int k = 0; k < SAMPLE_WIDTH; k++)
        f(at(x, k), at(y, k), k);
}

/* And f(index in the row) for the elements that no vector covers. */
template <typename F> INLINE void each_edge(const Slice &slice, const RowGroup &group, F f)
{
    const int edges = (int)slice.a.vocab - opaque(slice.body);
#pragma unroll 1
    for (int i = group.thread; i < edges; i += THREADS_PER_ROW)
        if (cta_rank() == 0) /* asked last: it takes long to answer, and most rows have no edges */
            f(i < slice.head ? i : i + slice.body);
}

/* Calls f(x, y, index in the row) for each of this thread's elements: for what is rare or slow. */
template <bool LAST, typename F>
INLINE void each_element(const Slice &slice, const Pipeline &pipeline, const RowGroup &group, F f)
{
    const int first = slice.head + slice.first * WIDTH;
#if RESIDENT
    each_tile(slice, pipeline, [&](const Pipeline &tile, int start, int count) {
        const X *x = tile.x();
        const Y *y = tile.y();
#pragma unroll 1
        for (int i = group.thread; i < count * WIDTH; i += THREADS_PER_ROW)
            f(to_real(x[i]), to_real(y[i]), first + start * WIDTH + i);
        if (LAST)
            release_stage(tile, group);
    });
#else
#pragma unroll 1
    for (int i = first + group.thread; i < first + slice.vectors * WIDTH; i += THREADS_PER_ROW)
        f(to_real(slice.x()[i]), to_real(slice.y()[i]), i);
#endif
    each_edge(slice, group, [&](int i) { f(to_real(slice.x()[i]), to_real(slice.y()[i]), i); });
}

}
