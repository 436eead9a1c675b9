/* How fast two streams can be read: 16-byte loads, no arithmetic to speak of. */
#pragma once

#include "cuda/config.cuh"

namespace kullback {

extern "C" __global__ void __launch_bounds__(THREADS) kullback_ceiling(const uint4 *x, const uint4 *y, unsigned *result,
                                                                      long long count)
{
    const long long step = (long long)gridDim.x * THREADS * UNROLL;
    unsigned seen = 0;
    for (long long base = (long long)blockIdx.x * THREADS * UNROLL + threadIdx.x; base < count; base += step) {
        uint4 a[UNROLL], b[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long i = base + u * THREADS < count ? base + u * THREADS : base;
            a[u] = __ldcs(x + i);
            b[u] = __ldcs(y + i);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            seen ^= a[u].x ^ a[u].y ^ a[u].z ^ a[u].w ^ b[u].x ^ b[u].y ^ b[u].z ^ b[u].w;
    }
    if (seen == 0x12345678u) /* so that the loads are not left out */
        *result = seen;
}

}
