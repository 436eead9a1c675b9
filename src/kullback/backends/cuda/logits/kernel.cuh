/* All rows: who copies and who computes which, and their sum. The kernel itself, with its signature, is printed after this. */
#pragma once

#include "cuda/grid.cuh"
#include "cuda/logits/row.cuh"

namespace kullback {

#if RESIDENT
INLINE unsigned first_row(int) { return clusterid(); }
INLINE unsigned row_step() { return nclusterid(); }
#else
INLINE unsigned first_row(int group) { return blockIdx.x * GROUPS + group; }
INLINE unsigned row_step() { return gridDim.x * GROUPS; }
#endif

/* Every `step`th row of this cluster (of this group), in order; f(row, whether it is read). A whole logical warp calls. */
template <typename F> INLINE void each_row(const Arguments &a, unsigned first, unsigned step, F f)
{
    for (unsigned r = first; r < a.rows; r += step * row_step()) {
        const bool is_read = warp_all(weight_of(a, r) != 0);
        f(r, is_read);
    }
}

#if RESIDENT
/* What the producer does. Maxima of some rows are estimated at once, from logits that were asked for as many rows before: memory
   that is busy takes longer to answer than a row does. */
INLINE void produce_rows(const Arguments &a, Pipeline &pipeline, RowGroup &group)
{
    Sample next = {};
#if !HAS_PEERS
    RowMax row_max = {};
#endif
#if HAS_AUXILIARY
    Label label = {};
#endif
    const unsigned lane = threadIdx.x % 32;
    /* What is on chip is wanted in the second-level cache no more: there it would outlive rows that were announced. Clusters of
       eight, which leave multiprocessors idle, are faster without (docs/lab-notebook.md). */
    const unsigned long long policy = group.cluster == 8 ? createpolicy_evict_normal() : createpolicy_evict_first();
    const auto row_of_lane = [&](unsigned first) { return first + lane / Sample::PARTS * row_step(); };
    const auto take_next = [&](unsigned first) {
        const unsigned r = row_of_lane(first);
        if (r < a.rows && weight_of(a, r) != 0)
            next.take(a, r);
#if HAS_AUXILIARY
        const unsigned later = r + Sample::ROWS * row_step();
        if (later < a.rows)
            next.token = token_of(a, later);
#endif
    };
#if HAS_AUXILIARY
    if (row_of_lane(first_row(group.index)) < a.rows)
        next.token = token_of(a, row_of_lane(first_row(group.index)));
#endif
    take_next(first_row(group.index));
#if HAS_PEERS
    /* Other ranks get estimates as many rows before, too. */
    const auto send_next = [&](unsigned first) {
        send_estimate(a, row_of_lane(first), lane % Sample::PARTS, next.estimated_max(a));
        take_next(first + Sample::ROWS * row_step());
    };
    send_next(first_row(group.index));
#endif
    const auto produce_row = [&](unsigned r, unsigned turn, RowMax own) {
        const Slice slice = slice_of(a, r, cta_rank());
        pipeline.lead = slice.lead;
        const X *x = slice.x() + slice.head + slice.first * WIDTH;
        const Y *y = slice.y() + slice.head + slice.first * WIDTH;
#if HAS_AUXILIARY
        const unsigned of_row = turn * Sample::PARTS;
        const Label own_label = { shfl(label.x, of_row), shfl(label.y, of_row), shfl(label.token, of_row) };
#endif
        /* While the row's stages are not empty yet; of rows that are read once that is too soon. */
        if ((WANT_GRADIENT || !SUMS_FROM_MOMENTS) && slice.vectors > 0 && elect_sync()) {
            cp_async_bulk_prefetch_L2(x, (unsigned)slice.vectors * (unsigned)X_BYTES);
            cp_async_bulk_prefetch_L2(y, (unsigned)slice.vectors * (unsigned)Y_BYTES);
        }
        each_tile(slice, pipeline, [&](const Pipeline &tile, int start, int count) {
            mbarrier_wait(tile.empty(), tile.phase ^ 1);
            if (!elect_sync())
                return;
            fence_proxy_async(); /* what has been read of the stage comes before what is copied to it */
            if (start == 0) {
                tile.header()->row_max = own;
#if HAS_AUXILIARY
                tile.header()->label = own_label;
#endif
            }
            mbarrier_arrive_expect_tx(tile.full(), (unsigned)max(count, 0) * (unsigned)(X_BYTES + Y_BYTES));
            if (count > 0) {
                cp_async_bulk((void *)tile.x(), x + start * WIDTH, (unsigned)count * (unsigned)X_BYTES, tile.full(), policy);
                cp_async_bulk((void *)tile.y(), y + start * WIDTH, (unsigned)count * (unsigned)Y_BYTES, tile.full(), policy);
            }
        });
        pipeline.advance(pipeline.row_tiles);
    };
    each_row(a, first_row(group.index), 1, [&](unsigned r, bool is_read) {
        const unsigned turn = group.turn++ % Sample::ROWS;
#if HAS_PEERS
        if (turn == 0)
            send_next(r + Sample::ROWS * row_step());
        const RowMax own = received_estimate(a, r); /* though none be read: each rank waits for all others in each launch */
        if (is_read)
            produce_row(r, turn, own);
#else
        if (turn == 0) {
            row_max = next.estimated_max(a);
#if HAS_AUXILIARY
            label = next.label;
#endif
        }
        const RowMax own = { shfl(row_max.x, turn * Sample::PARTS), shfl(row_max.y, turn * Sample::PARTS) };
        if (is_read)
            produce_row(r, turn, own);
        if (turn == 0) /* after the row's copies: weights and labels are waited for */
            take_next(r + Sample::ROWS * row_step());
#endif
    });
    __syncwarp(); /* a cluster's barrier takes whole warps */
}

/* What the groups do: each its rows, in turn. Long as it is, what is done with a row has to be inlined: a function of its own would
   read the arguments from memory. */
INLINE void consume_rows(const Arguments &a, Pipeline &pipeline, RowGroup &group)
{
    const int index = group.index;
    /* Where all rows are read, a group goes straight to its own; else it has to count those before. */
    const int step = a.row_weight ? 1 : GROUPS, behind = a.row_weight ? 0 : index;
    pipeline.skip_rows(behind);
    each_row(a, first_row(index) + behind * row_step(), step, [&](unsigned r, bool is_read) __attribute__((always_inline)) {
        if (!is_read) {
            if (r / row_step() % GROUPS == index)
                clear_row(a, group, r);
            return;
        }
        if (step == GROUPS || group.turn++ % GROUPS == index)
            process_row(slice_of(a, r, cta_rank()), pipeline, group);
        pipeline.skip_rows(step);
    });
}
#else
INLINE void consume_rows(const Arguments &a, Pipeline &pipeline, RowGroup &group)
{
#if COPIES_ROWS
    pipeline.address = (int)shared_address(shared()) + group.index * SLOTS * SLOT_VECTORS * X_BYTES;
    const int both = 2 * pipeline.address + (SLOTS - 1) * SLOT_VECTORS * X_BYTES; /* the sum of the two that a group has */
    Vectors vectors = {};
    if (SLOTS == 2)
        vectors = copied_row(a, group, first_row(group.index), pipeline.address);
#endif
    each_row(a, first_row(group.index), 1, [&](unsigned r, bool is_read) __attribute__((always_inline)) {
#if COPIES_ROWS
        if (SLOTS == 1) /* of the row before all has been read: lanes have met since they took a sample of others' copies */
            vectors = copied_row(a, group, r, pipeline.address);
        const Slice slice = vectors.of(a, r);
        if (SLOTS == 2)
            vectors = copied_row(a, group, r + row_step(), both - pipeline.address);
        cp_async_wait<SLOTS - 1>();
        sync_warp(); /* others' copies, too */
#else
        const Slice slice = slice_of(a, r, 0);
#endif
        if (!is_read)
            clear_row(a, group, r);
        else
            process_row(slice, pipeline, group);
#if COPIES_ROWS
        pipeline.address = both - pipeline.address;
#endif
    });
}
#endif

#if WANT_FIGURES
/* Finishes the rows that this block has been the first of. What labels add to their losses goes to each warp's sum. */
INLINE void finish_rows(const Arguments &a, const RowGroup &group)
{
    enum { FIRSTS = RESIDENT ? 1 : GROUPS, READERS = GROUPS * THREADS_PER_ROW };
    if (cta_rank() != 0 || threadIdx.x >= READERS)
        return;
    double loss = 0;
    for (unsigned i = threadIdx.x; first_row(0) + i / FIRSTS * row_step() < a.rows; i += READERS) {
        const unsigned r = first_row((int)(i % FIRSTS)) + i / FIRSTS * row_step();
        if (r < a.rows && weight_of(a, r) != 0)
            loss += finish_row(a, r, group.cluster);
    }
    if (!HAS_AUXILIARY)
        return;
    loss = warp_sum(loss);
    if (threadIdx.x % LOGICAL_WARP == 0)
        warp_losses[threadIdx.x / LOGICAL_WARP] += loss;
}
#endif

/* The blocks' sums of losses */
INLINE void reduce_grid(const Arguments &a)
{
    if (threadIdx.x >= LOGICAL_WARP)
        return;
    first_warps_sum([] {
        double sum = 0;
        for (int g = 0; g < GROUPS; g++)
            sum += group_losses[g];
        for (int w = 0; w < GROUPS * WARPS; w++)
            sum += warp_losses[w];
        return sum;
    }, a.partial, a.ticket, [&](double sum) { *a.total = rounded<LOSS>((real)(sum * a.scale)); });
}

INLINE void run(Arguments a)
{
#if SUMS_FROM_MOMENTS
    a.exponent = chernoff_exponent(a.parameter);
#endif
    const int index = shfl((int)threadIdx.x / THREADS_PER_ROW, 0); /* so that the compiler sees it uniform */
    RowGroup group = { (int)threadIdx.x % THREADS_PER_ROW, index, 1 };
    Pipeline pipeline = {};
    if (threadIdx.x < GROUPS)
        group_losses[threadIdx.x] = 0;
    if (threadIdx.x < GROUPS * WARPS)
        warp_losses[threadIdx.x] = 0;
#if RESIDENT
    group.cluster = cluster_nctarank();
    pipeline.stages = a.stages;
    pipeline.stage_vectors = a.stage_vectors;
    pipeline.vectors = a.tile_vectors;
    pipeline.row_tiles = a.row_tiles;
    pipeline.headers = a.header_offset;
    if (threadIdx.x == 0) {
        for (Pipeline tile = pipeline; tile.phase == 0; tile.advance(1)) {
            mbarrier_init(tile.full(), 1); /* the producer's, which says what to expect; of arrivals the first thread's */
            mbarrier_init(tile.empty(), WARPS); /* each warp's that has read */
        }
        for (int slot = 0; slot < GROUPS * EXCHANGE_SLOTS; slot++)
            mbarrier_init(pipeline.arrived(slot), 1);
    }
    barrier_cluster();
    if (index == GROUPS)
        produce_rows(a, pipeline, group);
    else
        consume_rows(a, pipeline, group);
    barrier_cluster(); /* none leaves while another may still write to it */
#else
    __syncthreads(); /* losses are cleared */
    consume_rows(a, pipeline, group);
    __syncthreads();
#endif
#if WANT_FIGURES
    finish_rows(a, group);
    __syncthreads(); /* losses are added */
#endif
    if (WANT_SUM && a.total)
        reduce_grid(a);
}

}
