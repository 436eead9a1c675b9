/* Rows that are compared with themselves: their divergence is 0, and what they lose is their label's cross-entropy and the square
   of their log-sum-exp (labels.py). The blocks of a cluster share a row, which is read once. In each, the last warp, the producer,
   copies tiles of its slice into the stages of a pipeline in shared memory, as far ahead as there are stages. */
#pragma once

#include "cuda/grid.cuh"
#include "cuda/softmax.cuh"

namespace kullback {

enum { CONSUMERS = THREADS - WARP, WARPS = CONSUMERS / WARP, BYTES = sizeof(Packed<X>) };
enum { NO_TOKEN = -1 }; /* where labels have no weight, and of one that is no token */

/* The kernel's arguments, as in logits/arguments.cuh: what a launch reads and writes */
struct Operands {
    const X *x;
    const WEIGHT *row_weight; /* [rows], or 0: 1 */
    const long long *labels;  /* [rows]: a token, or IGNORED */
    double *found;            /* [fields, rows]: states; or 0 */
    LOSS *loss;               /* [rows], or 0 */
    LOSS *total;              /* or 0 */
    X *d_input;
    double *partial;          /* [blocks] */
    unsigned *ticket;
    unsigned rows, vocab; /* at most 2^30 each */
    long long x_stride, d_input_stride;
    double scale;
};

/* What is the same in every launch for such tensors */
struct Setup {
    float inv_temperature, softcap, label_weight, z_weight, label_smoothing;
    int slice_vectors, tiles; /* of a row in a block, at most, and tiles that they take: the last may be empty */
    int tile_vectors, stages;
};

struct Arguments : Operands, Setup {};

INLINE int label_of(const Arguments &a, unsigned r)
{
    const long long label = r < a.rows ? a.labels[r] : IGNORED;
    return label == IGNORED || (label >= 0 && label < (long long)a.vocab) ? (int)label : (int)NO_TOKEN;
}

INLINE double weight_of(const Arguments &a, unsigned r) { return a.row_weight && r < a.rows ? (double)a.row_weight[r] : 1.0; }

/* What a smoothed label's row has its logits summed against, so that none are far from 0: its first, if that is finite */
INLINE real origin_of(const Arguments &a, unsigned r)
{
    const real first = HAS_SMOOTHING && r < a.rows ? counted(to_real(a.x[r * a.x_stride]), (real)a.softcap, 0) : (real)0;
    return safe_abs(first) < REAL_INFINITY ? first : (real)0;
}

/* Shared memory: tiles; of each exchange what each warp of the cluster has found, as [max, Σ exp, the label's logit or 0, Σ logits
   less as many origins]; barriers: full and empty of each stage, arrivals of each exchange */
struct Memory {
    int stages, tile_vectors, warps; /* of the cluster */

    INLINE X *tile(int stage) const { return (X *)dynamic_shared() + stage * tile_vectors * WIDTH; }
    INLINE float4 *found(unsigned exchange) const { return (float4 *)tile(stages) + exchange * (unsigned)warps; }
    INLINE Mbarrier *full(int stage) const { return (Mbarrier *)found(EXCHANGE_SLOTS) + stage; }
    INLINE Mbarrier *empty(int stage) const { return full(stages) + stage; }
    INLINE Mbarrier *arrived(unsigned exchange) const { return empty(stages) + exchange; }
};

/* The stage of a tile, and of its barriers the phase */
struct Stage {
    int index;
    unsigned phase;

    INLINE void advance(int stages)
    {
        index++;
        phase ^= index == stages;
        index = index == stages ? 0 : index;
    }
};

/* This block's part of a row: whole vectors, and for the first block of a cluster the edges that none covers */
struct Slice {
    const X *row;
    int vocab, head, begin, vectors; /* the row's first vector begins at head, ours at begin */
    int body, edges;                 /* elements that the row's vectors cover; ours that none covers */

    INLINE Slice(const Arguments &a, unsigned r, unsigned rank) : row(a.x + r * a.x_stride), vocab((int)a.vocab)
    {
        head = (int)head_of(row, vocab);
        const int all = (vocab - head) / WIDTH, first = min(all, a.slice_vectors * (int)rank);
        begin = head + first * WIDTH;
        vectors = min(all - first, a.slice_vectors);
        body = all * WIDTH;
        edges = rank == 0 ? vocab - body : 0;
    }
    INLINE int edge(int i) const { return i < head ? i : i + body; }
    INLINE int in_vectors(int token) const /* where among their elements, or negative */
    {
        return token >= begin && token < begin + vectors * WIDTH ? token - begin : -1;
    }
    INLINE bool has(int token) const
    {
        return in_vectors(token) >= 0 || (edges && token >= 0 && (token < head || token >= head + body));
    }
};

/* A warp: all tiles of all rows of the cluster, each when its stage is empty */
INLINE void produce_rows(const Arguments &a, const Memory &memory, unsigned rank)
{
    const unsigned long long policy = createpolicy_evict_normal();
    Stage stage = { 0, 0 };
    for (unsigned r = clusterid(); r < a.rows; r += nclusterid()) {
        const Slice slice(a, r, rank);
        const X *from = slice.row + slice.begin;
        for (int tile = 0; tile < a.tiles; tile++, stage.advance(memory.stages)) {
            const int start = tile * memory.tile_vectors, count = max(min(memory.tile_vectors, slice.vectors - start), 0);
            mbarrier_wait(memory.empty(stage.index), stage.phase ^ 1);
            if (!elect_sync())
                continue;
            mbarrier_arrive_expect_tx(memory.full(stage.index), (unsigned)count * (unsigned)BYTES);
            if (count)
                cp_async_bulk(memory.tile(stage.index), from + start * WIDTH, (unsigned)count * (unsigned)BYTES,
                              memory.full(stage.index), policy);
        }
    }
}

/* Calls f(vector, its place among the slice's) for this thread's vectors. LAST: the slice is not read again. */
template <bool LAST, typename F> INLINE void each_vector(const Memory &memory, const Slice &slice, Stage stage, int tiles, F f)
{
#pragma unroll 1
    for (int tile = 0, start = 0; tile < tiles; tile++, start += memory.tile_vectors, stage.advance(memory.stages)) {
        mbarrier_wait(memory.full(stage.index), stage.phase);
        const int address = (int)shared_address(memory.tile(stage.index)) - start * BYTES;
        const int end = min(start + memory.tile_vectors, slice.vectors);
#pragma unroll 1
        for (int v = start + (int)threadIdx.x; v < end; v += CONSUMERS)
            f(ld_shared<X>(address + v * BYTES), v);
        if (LAST) {
            sync_warp();
            if (threadIdx.x % WARP == 0)
                mbarrier_arrive(memory.empty(stage.index));
        }
    }
}

/* What all warps of the cluster know of a row, by what each has found: all-reduced in the same order everywhere. The label stands
   apart: q - 1 has no digits where q is next to 1. */
struct Whole {
    real own, from, of_own, of_others; /* the label's logit; what masses are relative to; the label's, and all others' */
    real inv_sum_exp, log_sum_exp;
    real above_origin; /* Σ logits less as many origins (HAS_SMOOTHING) */

    INLINE Whole(const float4 *found, int count, bool has_label, real to_exponent)
    {
        const int lane = (int)threadIdx.x % WARP;
        real max = -REAL_INFINITY, sum = 0, label = 0, above = 0;
        const auto larger = [](real a, real b) { return b > a ? b : a; };
#pragma unroll 1
        for (int i = lane; i < count; i += WARP)
            max = larger(max, found[i].x);
        max = against(warp_reduce(max, larger));
#pragma unroll 1
        for (int i = lane; i < count; i += WARP) {
            sum += found[i].y * power((found[i].x - max) * to_exponent);
            label += found[i].z;
            above += found[i].w;
        }
        sum = warp_sum(sum);
        above_origin = HAS_SMOOTHING ? warp_sum(above) : 0;
        own = has_label ? warp_sum(label) : -REAL_INFINITY;
        from = against(own > max || sum == 0 ? own : max);
        of_own = power((own - from) * to_exponent);
        of_others = sum == 0 ? 0 : sum * power((max - from) * to_exponent);
        inv_sum_exp = 1 / (of_own + of_others);
        log_sum_exp = of_own == 1 ? safe_log1p(of_others) : safe_log(of_own + of_others);
    }
};

/* Tells all blocks of the cluster what this warp has found, and waits for what others have. */
INLINE const float4 *exchanged(const Memory &memory, unsigned turn, unsigned rank, unsigned blocks, float4 mine)
{
    const unsigned exchange = turn % EXCHANGE_SLOTS, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float4 *found = memory.found(exchange);
    if (blocks == 1) {
        if (lane == 0)
            found[warp] = mine;
        if constexpr (WARPS > 1)
            bar_sync<CONSUMERS>(1);
        else
            sync_warp();
        return found;
    }
    if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(memory.arrived(exchange), blocks * (unsigned)(WARPS * sizeof(float4)));
    sync_warp();
    if (lane < blocks)
        st_async(found + rank * WARPS + warp, memory.arrived(exchange), mine, lane);
    mbarrier_wait_cluster(memory.arrived(exchange), turn / EXCHANGE_SLOTS % 2);
    return found;
}

INLINE SoftmaxStats warp_merged(SoftmaxStats mine, real to_exponent)
{
    const real max = warp_reduce(mine.max, [](real a, real b) { return b > a ? b : a; });
    return { max, warp_sum(mine.sum_exp * power((mine.max - against(max)) * to_exponent)) };
}

/* To where the row may have its vectors elsewhere: element by element, then */
INLINE void write(X *to, const Packed<X> &values, bool in_phase)
{
    if (in_phase)
        store(to, values);
    else
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            to[j] = values.element[j];
}

SHARED_ARRAY(double, losses, 1); /* of this block's rows: a register of its own would spill */

/* All warps but the producer */
INLINE void consume_rows(const Arguments &a, const Memory &memory, unsigned rank)
{
    const real inverse = a.inv_temperature, cap = a.softcap, to_exponent = exponent_scale(inverse);
    const real of_label = a.label_weight, of_z = a.z_weight, smoothing = HAS_SMOOTHING ? a.label_smoothing : (real)0;
    const unsigned blocks = cluster_nctarank();
    const int thread = (int)threadIdx.x, tiles = a.tiles;
    int next_label = label_of(a, clusterid());
    double next_weight = weight_of(a, clusterid());
    real next_origin = origin_of(a, clusterid());
    Stage first = { 0, 0 };
    unsigned turn = 0;
    for (unsigned r = clusterid(); r < a.rows; r += nclusterid(), turn++) {
        const Slice slice(a, r, rank);
        const int label = next_label, token = of_label != 0 && label >= 0 ? label : (int)NO_TOKEN;
        const int in_vectors = slice.in_vectors(token), own_vector = in_vectors < 0 ? -1 : in_vectors / WIDTH;
        const double weight = next_weight;
        const real origin = next_origin;
        const bool is_read = label != IGNORED && weight != 0;
        const real own = thread < WARP && slice.has(token) ? counted(to_real(slice.row[token]), cap, 0) : (real)0;
        next_label = label_of(a, r + nclusterid()); /* a row before they are needed */
        next_weight = weight_of(a, r + nclusterid());
        next_origin = origin_of(a, r + nclusterid());

        SoftmaxStats others = { -REAL_INFINITY, 0 };
        real above_origin = 0;
        const auto take = [&](const Packed<X> &loaded, int v) {
            real values[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                values[j] = counted(at(loaded, j), cap, 0);
            if (HAS_SMOOTHING) {
                real part = 0;
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    part += values[j] - origin;
                above_origin += part;
            }
            if (others.max == -REAL_INFINITY) /* a maximum is sought only where the first logit is far too small */
                others.max = values[0];
            if (__builtin_expect(v == own_vector, 0))
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    values[j] = j == in_vectors % WIDTH ? -REAL_INFINITY : values[j];
            add<WIDTH>(others, values, to_exponent);
        };
        each_vector<!WANT_INPUT>(memory, slice, first, tiles, take);
        if (thread < slice.edges) {
            const real value = counted(to_real(slice.row[slice.edge(thread)]), cap, 0);
            above_origin += value - origin;
            if (slice.edge(thread) != token)
                add<1>(others, &value, to_exponent);
        }
        others = warp_merged(others, to_exponent);
        const float4 *found
            = exchanged(memory, turn, rank, blocks, { others.max, others.sum_exp, own, HAS_SMOOTHING ? warp_sum(above_origin) : (real)0 });
        const Whole whole(found, memory.warps, token >= 0, to_exponent);
        const real lse = real_fma(whole.from, inverse, whole.log_sum_exp);
        if (rank == 0 && thread == 0) {
            double lost = token < 0 ? 0 : (double)of_label * ((whole.from - whole.own) * inverse + whole.log_sum_exp);
            if (HAS_SMOOTHING && token >= 0) {
                const real below = (whole.from - origin) - whole.above_origin / (real)slice.vocab;
                lost = (double)(1 - smoothing) * lost + (double)(smoothing * of_label) * (below * inverse + whole.log_sum_exp);
            }
            if (of_z != 0)
                lost += (double)of_z * lse * lse;
            lost = is_read ? lost * weight : 0;
            if (a.loss)
                a.loss[r] = rounded<LOSS>((real)lost);
            if (a.found) /* both sides' */
                a.found[r] = a.found[(long long)a.rows + r] = (double)whole.from * inverse + whole.log_sum_exp;
            losses[0] += lost;
        }
        if (WANT_INPUT) {
            X *to = a.d_input + r * a.d_input_stride;
            const bool in_phase = (int)head_of(to, a.vocab) == slice.head;
            const real upstream = is_read ? (real)(weight * a.scale) * inverse : (real)0, of_square = 2 * of_z * lse;
            const real everywhere = HAS_SMOOTHING && token >= 0 ? upstream * of_label * smoothing / (real)slice.vocab : (real)0;
            const real factor = upstream * ((token >= 0 ? of_label : (real)0) + of_square) * whole.inv_sum_exp;
            const auto with_cap = [&](real found, real value) { return IS_CAPPED ? found * softcap_grad(value, cap) : found; };
            const auto gradient = [&](real value) {
                const real mass = power((value - whole.from) * to_exponent);
                const real found = HAS_SMOOTHING ? real_fma(factor, mass, -everywhere) : factor * mass;
                return rounded<X>(is_read ? with_cap(found, value) : (real)0);
            };
            const auto of_token = [&] { /* of the label itself */
                const real more = of_square * whole.of_own, less = of_label * whole.of_others;
                const real found = upstream * (more - less) * whole.inv_sum_exp, smoothed = upstream * of_label * smoothing - everywhere;
                return rounded<X>(is_read ? with_cap(HAS_SMOOTHING ? found + smoothed : found, whole.own) : (real)0);
            };
            each_vector<true>(memory, slice, first, tiles, [&](const Packed<X> &loaded, int v) {
                Packed<X> values;
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    values.element[j] = gradient(counted(at(loaded, j), cap, 0));
                write(to + slice.begin + v * WIDTH, values, in_phase);
                if (__builtin_expect(v == own_vector, 0))
                    to[token] = of_token();
            });
            if (thread < slice.edges) {
                const int i = slice.edge(thread);
                to[i] = i == token ? of_token() : gradient(counted(to_real(slice.row[i]), cap, 0));
            }
        }
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++)
            first.advance(memory.stages);
    }
}

INLINE void run(const Arguments &a)
{
    const unsigned rank = cluster_ctarank();
    const Memory memory = { a.stages, a.tile_vectors, (int)cluster_nctarank() * WARPS };
    const int warp = shfl((int)threadIdx.x / WARP, 0); /* so that the compiler sees it uniform */
    if (threadIdx.x == 0) { /* full and arrived: the one that says what to expect; empty: each warp that has read */
        losses[0] = 0;
        for (int stage = 0; stage < memory.stages; stage++) {
            mbarrier_init(memory.full(stage), 1);
            mbarrier_init(memory.empty(stage), WARPS);
        }
        for (int exchange = 0; exchange < EXCHANGE_SLOTS; exchange++)
            mbarrier_init(memory.arrived(exchange), 1);
    }
    barrier_cluster();
    if (warp < WARPS)
        consume_rows(a, memory, rank);
    else
        produce_rows(a, memory, rank);
    sync_warp();
    barrier_cluster(); /* none leaves while another may still write to it */
    if (a.total && warp == 0)
        first_warps_sum([] { return losses[0]; }, a.partial, a.ticket,
                        [&](double sum) { *a.total = rounded<LOSS>((real)(sum * a.scale)); });
}

}
