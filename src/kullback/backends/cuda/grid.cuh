/* A sum over the grid, of one number of each block, in a fixed order. */
#pragma once

#include "cuda/config.cuh"
#include "cuda/warp.cuh"

namespace kullback {

/* The first warp of each block, or the first logical one, calls. own(): the block's number, asked of its first thread. The last block
   to arrive adds all in order, gives finish(sum), and resets the ticket for the next launch. */
template <typename F, typename G> INLINE void first_warps_sum(F own, double *partial, unsigned *ticket, G finish)
{
    unsigned before = 0;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = own();
        __threadfence();
        before = atomicAdd(ticket, 1u);
    }
    before = (unsigned)shfl((int)before, 0);
    if (before != gridDim.x - 1)
        return;
    __threadfence();
    double sum = 0;
    for (unsigned block = threadIdx.x; block < gridDim.x; block += LOGICAL_WARP)
        sum += __ldcg(partial + block);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) {
        finish(sum);
        *ticket = 0;
    }
}

}
