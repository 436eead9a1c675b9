/* What threads of a warp tell one another: of a logical warp, which is one, or so many lanes as share a row that is short. */
#pragma once

#include "cuda/ptx.cuh"

#ifndef LOGICAL_WARP
#define LOGICAL_WARP 32 /* lanes, a power of two */
#endif

namespace kullback {

enum { WARP = 32 };

/* Its lanes: others of the warp may be elsewhere */
INLINE unsigned warp_mask()
{
    return LOGICAL_WARP == WARP ? 0xffffffffu
                                : ((1u << LOGICAL_WARP % WARP) - 1) << threadIdx.x % WARP / LOGICAL_WARP * LOGICAL_WARP;
}

INLINE float shfl_xor(float x, int step) { return __shfl_xor_sync(warp_mask(), x, step); }
INLINE double shfl_xor(double x, int step) { return __shfl_xor_sync(warp_mask(), x, step); }
INLINE int shfl_xor(int x, int step) { return __shfl_xor_sync(warp_mask(), x, step); }
INLINE float shfl(float x, unsigned lane) { return __shfl_sync(warp_mask(), x, (int)lane, LOGICAL_WARP); }
INLINE int shfl(int x, unsigned lane) { return __shfl_sync(warp_mask(), x, (int)lane, LOGICAL_WARP); }
INLINE unsigned ballot(bool condition) { return __ballot_sync(warp_mask(), condition); }

/* All have come here, and see what others wrote. */
INLINE void sync_warp() { __syncwarp(warp_mask()); }

/* What is the same in all threads of it, said so that the compiler knows */
INLINE bool warp_all(bool condition) { return __all_sync(warp_mask(), condition); }

/* By any function of two that may change places */
template <typename T, typename F> INLINE T warp_reduce(T x, F reduce)
{
#pragma unroll
    for (int step = LOGICAL_WARP / 2; step; step /= 2)
        x = reduce(x, shfl_xor(x, step));
    return x;
}

INLINE int warp_min(int x)
{
    return warp_reduce(x, [](int a, int b) { return min(a, b); });
}

/* Over groups of so many lanes, a power of two */
template <int LANE_COUNT = LOGICAL_WARP, typename T> INLINE T warp_sum(T x)
{
#pragma unroll
    for (int step = LANE_COUNT / 2; step; step /= 2)
        x += shfl_xor(x, step);
    return x;
}

}
