/* All rows: who fetches and who takes which, and their sum. */

#if RESIDENT
INLINE unsigned first_row(int) { return cluster_index(); }
INLINE unsigned row_step() { return cluster_count(); }
#else
INLINE unsigned first_row(int group) { return blockIdx.x * GROUPS + group; }
INLINE unsigned row_step() { return gridDim.x * GROUPS; }
#endif

/* Every `step`th row of this cluster (of this group), in order; f(row, whether it is read). A whole warp calls. */
template <typename F> INLINE void each_row(const Arguments &a, unsigned first, unsigned step, F f)
{
    for (unsigned r = first; r < a.rows; r += step * row_step()) {
        const bool is_read = agreed(weight_of(a, r) != 0);
        f(r, is_read);
    }
}

#if RESIDENT
/* What the warp that fetches does. Of some rows likely tops are found at once, from logits that were asked for as many rows
   before: memory that is busy takes longer to answer than a row does. */
INLINE void fetch_rows(const Arguments &a, Ring &ring, Team &team)
{
    Sample next = {};
    Tops tops = {};
    const unsigned lane = threadIdx.x % 32;
    const auto take_next = [&](unsigned first) {
        const unsigned r = first + lane / Sample::PARTS * row_step();
        if (r < a.rows && weight_of(a, r) != 0)
            next.take(a, r);
    };
    take_next(first_row(team.group));
    each_row(a, first_row(team.group), 1, [&](unsigned r, bool is_read) {
        const unsigned turn = team.turn++ % Sample::ROWS;
        if (turn == 0) {
            tops = next.likely_tops(a);
            take_next(r + Sample::ROWS * row_step());
        }
        if (!is_read)
            return;
        const Share share = share_of(a, r, own_rank());
        const X *x = share.x() + share.head + share.first * WIDTH;
        const Y *y = share.y() + share.head + share.first * WIDTH;
        const bool is_first = lane == 0;
        /* While the row's slots are not empty yet; of rows that are read once that is too soon. */
        if ((WANT_GRADIENT || !IS_SURVEYED) && is_first && share.vectors > 0) {
            foresee(x, (unsigned)share.vectors * (unsigned)X_BYTES);
            foresee(y, (unsigned)share.vectors * (unsigned)Y_BYTES);
        }
        const Tops own = { from_lane(tops.x, turn * Sample::PARTS), from_lane(tops.y, turn * Sample::PARTS) };
        if (is_first)
            each_piece(share, ring, [&](const Ring &slot, int start, int count) {
                await(slot.empty(), slot.parity ^ 1);
                if (start == 0)
                    *slot.tops() = own;
                expect(slot.full(), (unsigned)max(count, 0) * (unsigned)(X_BYTES + Y_BYTES));
                if (count > 0) {
                    copy((void *)slot.x(), x + start * WIDTH, (unsigned)count * (unsigned)X_BYTES, slot.full());
                    copy((void *)slot.y(), y + start * WIDTH, (unsigned)count * (unsigned)Y_BYTES, slot.full());
                }
            });
        __syncwarp();
        ring.advance(ring.pieces);
    });
}

/* What the groups do: each its rows, in turn */
INLINE void take_rows(const Arguments &a, Ring &ring, Team &team)
{
    const int group = team.group;
    /* Where all rows are read, a group goes straight to its own; else it has to count those before. */
    const int step = a.weights ? 1 : GROUPS, behind = a.weights ? 0 : group;
    ring.advance_rows(behind);
    each_row(a, first_row(group) + behind * row_step(), step, [&](unsigned r, bool is_read) {
        if (!is_read) {
            if (r / row_step() % GROUPS == group)
                clear(a, team, r);
            return;
        }
        if (step == GROUPS || team.turn++ % GROUPS == group)
            one_row(a, ring, team, r);
        ring.advance_rows(step);
    });
}
#else
INLINE void take_rows(const Arguments &a, Ring &ring, Team &team)
{
    each_row(a, first_row(team.group), 1, [&](unsigned r, bool is_read) {
        if (!is_read)
            clear(a, team, r);
        else
            one_row(a, ring, team, r);
    });
}
#endif

/* The last cluster to arrive adds the clusters' sums in order, and resets the ticket for the next launch. */
INLINE void add_up(const Arguments &a, const Team &team)
{
    if (own_rank() != 0 || threadIdx.x >= 32)
        return;
    const unsigned clusters = gridDim.x / team.size, cluster = blockIdx.x / team.size;
    unsigned before = 0;
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int g = 0; g < GROUPS; g++)
            sum += results[g];
        a.partial[cluster] = sum;
        __threadfence();
        before = atomicAdd(a.ticket, 1u);
    }
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before != clusters - 1)
        return;
    __threadfence();
    double sum = 0;
    for (unsigned c = threadIdx.x; c < clusters; c += 32)
        sum += __ldcg(a.partial + c);
    sum = sum_of_warp(sum);
    if (threadIdx.x == 0) {
        *a.total = rounded<LOSS>((real)(sum * a.scale));
        *a.ticket = 0;
    }
}

extern "C" __global__ void __launch_bounds__(LANES *GROUPS + 32 * RESIDENT, MIN_BLOCKS)
kullback_logits(const X *x, const Y *y, X *input_gradient, Y *target_gradient, const WEIGHT *weights,
                const double *known_state, double *state, LOSS *losses, LOSS *total, double *partial, unsigned *ticket,
                long long rows, long long vocab, long long x_stride, long long y_stride, long long input_gradient_stride,
                long long target_gradient_stride, double scale, double input_scale, double target_scale, double input_cap,
                double target_cap, double parameter, long long series_1, long long series_2, long long series_3,
                long long series_4, long long series_5, long long series_6, long long series_7, long long slots,
                long long slot_vectors, long long share, long long pieces, long long mail, long long barriers)
{
    Parameters parameters;
    *(real *)&parameters = (real)parameter;
    Arguments a = { x, y, input_gradient, target_gradient, weights, known_state, state, losses, total, partial, ticket,
                    (unsigned)rows, (unsigned)vocab, x_stride, y_stride, input_gradient_stride, target_gradient_stride,
                    scale, parameters, (float)input_scale, (float)target_scale, (float)input_cap, (float)target_cap, 0,
                    { series_1, series_2, series_3, series_4, series_5, series_6, series_7 },
                    (int)slots, (int)slot_vectors, (int)share, (int)pieces, (int)mail, (int)barriers };
#if IS_SURVEYED
    a.exponent = overlap_exponent(a.parameters);
#endif
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / LANES, 0); /* so that the compiler sees it uniform */
    Team team = { (int)threadIdx.x % LANES, group, 1 };
    Ring ring = {};
    if (threadIdx.x < GROUPS)
        results[threadIdx.x] = 0;
#if RESIDENT
    team.size = cluster_size();
    ring.count = a.slots;
    ring.vectors = a.slot_vectors;
    ring.pieces = a.pieces;
    ring.barriers = a.barriers;
    if (threadIdx.x == 0) /* full and arrived: the one that says what to expect; empty: each warp that has read */
        for (int i = 0; i < 2 * a.slots + GROUPS * MAILBOXES; i++)
            initialize(ring.barrier(i), i / a.slots == 1 ? WARPS : 1);
    synchronize_cluster();
    if (group == GROUPS)
        fetch_rows(a, ring, team);
    else
        take_rows(a, ring, team);
    synchronize_cluster(); /* none leaves while another may still write to it */
#else
    __syncthreads(); /* results are cleared */
    take_rows(a, ring, team);
    __syncthreads();
#endif
    if (WANT_SUM && a.total)
        add_up(a, team);
}
