/* What ranks that share rows tell one another while they keep their slices on chip.

   Each has a buffer in memory that the others can write (torch's symmetric memory). A number travels with a flag in one store of
   64 bits, as in NCCL's LL protocol: who sees the flag has the number, and no fence is needed. Flags name the launch and, within a
   row, the exchange.

   A buffer has two halves for launches in turn: a rank begins a launch only after the others have begun the one before, and so
   ended that before it. In each half a row has two slots for exchanges in turn, for the same reason. A rank waits for a row only
   with all rows before it on that cluster done, and what it waits for was sent before the other rank waited: whatever the clusters
   of each, the first row that is not done goes on. All clusters of a grid have to be resident for that: no kernel beside this one may
   keep multiprocessors until another rank's has some.

   Memory begins as a flag that no exchange has: a row has fewer than 31. */
#pragma once

#include "cuda/logits/pipeline.cuh"
#include "cuda/warp.cuh"

namespace kullback {

#if HAS_PEERS
static_assert(RESIDENT && !HAS_AUXILIARY && !WANT_FIGURES);

enum { OF_ESTIMATE = 2, OF_EXCHANGE = 4, IN_TURN = 2 }; /* numbers of a row's estimate, and of an exchange */

static_assert(2 * (OF_ESTIMATE + IN_TURN * OF_EXCHANGE) == 20 && WARP / OF_EXCHANGE == 8); /* PACKETS and MAX_RANKS of symmetric.py */

typedef unsigned long long Packet;

INLINE unsigned now() { return (unsigned)(globaltimer() >> 20); } /* as `timeout`, of 2^20 ns */

INLINE unsigned launch_flag(const Arguments &a) { return (unsigned)__ldg(a.launches) << 5; }

/* Where a rank finds what `from` sent of a row: an estimate, or an exchange's numbers */
INLINE unsigned estimate_place(const Arguments &a, unsigned flag, unsigned row, unsigned from)
{
    const unsigned half = (flag >> 5) % 2 * (OF_ESTIMATE + IN_TURN * OF_EXCHANGE);
    return (half * a.buffer_rows + row * OF_ESTIMATE) * a.ranks + from * OF_ESTIMATE;
}
INLINE unsigned exchange_place(const Arguments &a, unsigned flag, unsigned row, unsigned from)
{
    const unsigned half = (flag >> 5) % 2 * (OF_ESTIMATE + IN_TURN * OF_EXCHANGE) + OF_ESTIMATE;
    return (half * a.buffer_rows + (row * IN_TURN + flag % IN_TURN) * OF_EXCHANGE) * a.ranks + from * OF_EXCHANGE;
}

INLINE void send(const Arguments &a, unsigned to, unsigned place, unsigned flag, float value)
{
    st_relaxed_sys(a.buffers[to] + place, (Packet)flag << 32 | __float_as_uint(value));
}

/* What was sent to a lane, if it waits for something. A whole warp calls, and none goes on before all have theirs. The producer says
   what is wrong when it has waited too long; others, which wait a little longer, end the launch: after a call that may come back a
   row's warps would be taken to be diverged. */
template <bool IS_PRODUCER> INLINE float received(const Arguments &a, bool waits, unsigned place, unsigned flag)
{
    const Packet *packet = a.buffers[a.rank] + place;
    const unsigned begin = now(), most = IS_PRODUCER ? a.timeout : a.timeout + 16;
    for (;;) {
        const Packet found = waits ? ld_relaxed_sys(packet) : (Packet)flag << 32;
        if (warp_all((unsigned)(found >> 32) == flag))
            return __uint_as_float((unsigned)found);
        if (warp_all(now() - begin > most)) {
            if (IS_PRODUCER)
                __assertfail("kullback: a rank that shares these rows has not sent its part (enable_symmetric_memory)", "", 0, "", 1);
            trap();
        }
    }
}

/* Lane OF_EXCHANGE · s + k gives number k of this rank's, and gets it reduced over ranks by a butterfly: the same bits
   on all. */
template <int COUNT, typename F> INLINE float all_ranks_reduced(const Arguments &a, RowGroup &group, float mine, F reduce)
{
    const unsigned lane = (unsigned)opaque(group.thread) % 32, rank = lane / OF_EXCHANGE, k = lane % OF_EXCHANGE;
    const unsigned flag = launch_flag(a) + group.sent++, row = (unsigned)opaque((int)group.row); /* kept, places would spill */
    const bool takes_part = rank < a.ranks && k < COUNT;
    if (takes_part && group.thread < 32 && cta_rank() == 0)
        send(a, rank, exchange_place(a, flag, row, a.rank) + k, flag, mine);
    const float theirs = received<false>(a, takes_part, exchange_place(a, flag, row, rank) + k, flag);
    mine = takes_part ? theirs : reduce.identity();
#pragma unroll
    for (int step = OF_EXCHANGE; step < 32; step *= 2)
        mine = reduce(mine, shfl_xor(mine, step));
    return mine;
}

/* Of a row's maxima what this rank's sample says; each lane sends to one rank, of as many as a sample has parts. */
INLINE void send_estimate(const Arguments &a, unsigned row, unsigned to, RowMax estimate)
{
    if (row >= a.rows || to >= a.ranks || cta_rank() != 0)
        return;
    const unsigned flag = launch_flag(a), place = estimate_place(a, flag, row, a.rank);
    send(a, to, place, flag, estimate.x);
    send(a, to, place + 1, flag, estimate.y);
}

/* And what all ranks' say */
INLINE RowMax received_estimate(const Arguments &a, unsigned row)
{
    const unsigned lane = threadIdx.x % 32, rank = lane / OF_ESTIMATE, k = lane % OF_ESTIMATE, flag = launch_flag(a);
    const float theirs = received<true>(a, rank < a.ranks, estimate_place(a, flag, row, rank) + k, flag);
    float most = rank < a.ranks ? theirs : -REAL_INFINITY;
#pragma unroll
    for (int step = OF_ESTIMATE; step < 32; step *= 2)
        most = fmaxf(most, shfl_xor(most, step));
    return { shfl(most, 0), shfl(most, 1) };
}
#endif

}
