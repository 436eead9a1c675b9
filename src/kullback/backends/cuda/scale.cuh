/* gradient *= factor, read on the device; a factor of 1 costs one read of it. */
#pragma once

#include "cuda/vector.cuh"

namespace kullback {

extern "C" __global__ void __launch_bounds__(THREADS) kullback_scale(X *gradient, const LOSS *factor, long long count)
{
    const real by = to_real(*factor);
    if (by == 1)
        return;
    const long long step = (long long)gridDim.x * THREADS, vectors = is_aligned(gradient) ? count / WIDTH : 0;
    for (long long v = (long long)blockIdx.x * THREADS + threadIdx.x; v < vectors; v += step) {
        Packed<X> values = *(const Packed<X> *)(gradient + v * WIDTH);
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            values.element[k] = rounded<X>(to_real(values.element[k]) * by);
        store(gradient + v * WIDTH, values);
    }
    for (long long i = vectors * WIDTH + (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += step)
        gradient[i] = rounded<X>(to_real(gradient[i]) * by);
}

}
