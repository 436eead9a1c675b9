/* A sum over the grid, of one number of each block, in a fixed order. */
#pragma once

#include "cuda/config.cuh"
#include "cuda/warp.cuh"

namespace kullback {

/* The first warp of each block, or the first logical one, calls; the value is its first thread's. The last block to arrive adds
   the blocks' values, and resets the ticket for the next launch. */
INLINE bool first_warps_sum(double value, double *partial, unsigned *ticket, double *result)
{
    unsigned before = 0;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = value;
        __threadfence();
        before = atomicAdd(ticket, 1u);
    }
    before = (unsigned)shfl((int)before, 0);
    if (before != gridDim.x - 1)
        return false;
    __threadfence();
    double sum = 0;
    for (unsigned block = threadIdx.x; block < gridDim.x; block += LOGICAL_WARP)
        sum += __ldcg(partial + block);
    *result = warp_sum(sum);
    if (threadIdx.x == 0)
        *ticket = 0;
    return true;
}

}
