/* What threads of a warp tell one another. */
#pragma once

#include "cuda/ptx.cuh"

namespace kullback {

enum { WARP = 32 };

INLINE float shfl_xor(float x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE double shfl_xor(double x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE int shfl_xor(int x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE float shfl(float x, unsigned lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }
INLINE int shfl(int x, unsigned lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }
INLINE unsigned ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }

/* What is the same in all threads of a warp, said so that the compiler knows */
INLINE bool warp_all(bool condition) { return __all_sync(0xffffffffu, condition); }

/* By any function of two that may change places */
template <typename T, typename F> INLINE T warp_reduce(T x, F reduce)
{
#pragma unroll
    for (int step = WARP / 2; step; step /= 2)
        x = reduce(x, shfl_xor(x, step));
    return x;
}

INLINE int warp_min(int x)
{
    return warp_reduce(x, [](int a, int b) { return min(a, b); });
}

/* Over groups of so many lanes, a power of two */
template <int LANE_COUNT = WARP, typename T> INLINE T warp_sum(T x)
{
#pragma unroll
    for (int step = LANE_COUNT / 2; step; step /= 2)
        x += shfl_xor(x, step);
    return x;
}

}
