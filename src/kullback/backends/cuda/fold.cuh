/* Sums over a group of LANES threads (a power of two, or the block) and over the grid, in a fixed order. */

INLINE double sum_warp(double value, int lanes)
{
    for (int step = lanes / 2; step; step /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

/* Every thread of the block gets the sum. */
INLINE double sum_block(double value)
{
    __shared__ double warps[THREADS / 32];
    value = sum_warp(value, 32);
    __syncthreads(); /* the sum before may still be being read */
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = value;
    __syncthreads();
    double total = 0;
    for (int warp = 0; warp < THREADS / 32; warp++)
        total += warps[warp];
    return total;
}

INLINE double sum_group(double value)
{
    return LANES > 32 ? sum_block(value) : sum_warp(value, LANES);
}

/* The last block to arrive adds the blocks' sums in order, and resets the ticket for the next launch. */
INLINE bool sum_grid(double value, double *partial, unsigned *ticket, double *result)
{
    __shared__ bool is_last;
    const double mine = sum_block(value);
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
    *result = sum_block(sum);
    if (threadIdx.x == 0)
        *ticket = 0;
    return true;
}
