/* Sums over the threads of a block, and from these over the grid, in a fixed order. */
#pragma once

#include "cuda/config.cuh"
#include "cuda/warp.cuh"

namespace kullback {

/* Every thread of the block gets the sum. */
INLINE double block_sum(double value)
{
    __shared__ double warps[THREADS / WARP];
    value = warp_sum(value);
    __syncthreads(); /* the sum before may still be being read */
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = value;
    __syncthreads();
    double total = 0;
    for (int warp = 0; warp < THREADS / WARP; warp++)
        total += warps[warp];
    return total;
}

/* The last block to arrive adds the blocks' sums in order, and resets the ticket for the next launch. */
INLINE bool grid_sum(double value, double *partial, unsigned *ticket, double *result)
{
    __shared__ bool is_last;
    const double mine = block_sum(value);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = mine;
        __threadfence();
        is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last)
        return false;
    __threadfence();
    double sum = 0;
    for (unsigned block = threadIdx.x; block < gridDim.x; block += THREADS)
        sum += __ldcg(partial + block);
    *result = block_sum(sum);
    if (threadIdx.x == 0)
        *ticket = 0;
    return true;
}

}
