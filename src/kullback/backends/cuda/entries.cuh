/* A teacher's entries, of one id together, and what they leave of 1: its target (topk.py). A block takes a row; a bit of
   shared memory for each token tells whether an id has come before. */
#pragma once

#include "cuda/vector.cuh"
#include "cuda/warp.cuh"

namespace kullback {

enum { WARPS = THREADS / WARP };

/* A bit for each token */
INLINE unsigned *marks() { return (unsigned *)dynamic_shared(); }

/* Of a row: entries of distinct ids, their mass, and Σ exp(tempered - max) of what the target is normalised by */
struct Stats {
    int count;
    double mass;
    real max, sum_exp;

    INLINE void merge(Stats other)
    {
        const real higher = max > other.max ? max : other.max, from = higher == -REAL_INFINITY ? (real)0 : higher;
        count += other.count;
        mass += other.mass;
        sum_exp = sum_exp * safe_exp(max - from) + other.sum_exp * safe_exp(other.max - from);
        max = higher;
    }
};

INLINE real log_of(X value) { return FROM_PROBS ? safe_log(to_real(value)) : to_real(value); }

/* log Σ exp over the row's entries of the j-th's id, which stands first there; else -inf, and `first` says so. In order,
   so that it is the same each time. */
INLINE real of_equal(const X *values, const long long *ids, long long k, long long j, bool &first)
{
    real top = -REAL_INFINITY, total = 0;
    for (long long i = 0; i < k; i++)
        if (ids[i] == ids[j]) {
            if (i < j) {
                first = false;
                return -REAL_INFINITY;
            }
            const real value = log_of(values[i]);
            top = value > top || value != value ? value : top;
        }
    if (!(safe_abs(top) < REAL_INFINITY))
        return top;
    int count = 0;
    for (long long i = j; i < k; i++)
        if (ids[i] == ids[j]) {
            total += safe_exp(log_of(values[i]) - top);
            count++;
        }
    return count == 1 ? top : top + safe_log(total);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4 - 2 * REAL_IS_DOUBLE)
kullback_entries(const X *entries, const long long *indices, const unsigned char *skipped, long long *distinct,
                 real *target, long long rows, long long vocab, long long k, long long width, double temperature,
                 long long keeps_tail, long long normalises, double least)
{
    __shared__ Stats parts[WARPS];
    __shared__ int repeats;
    const bool has_tail = width > k;
    for (long long i = threadIdx.x; i <= vocab / 32; i += THREADS)
        marks()[i] = 0;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *values = entries + row * k;
        const long long *ids = indices + row * k;
        long long *own = distinct + row * k;
        real *out = target + row * width;
        const bool counts = !skipped || !skipped[row];
        if (threadIdx.x == 0)
            repeats = 0;
        __syncthreads();
        for (long long j = threadIdx.x; j < k && counts; j += THREADS) {
            if (ids[j] < -1 || ids[j] >= vocab)
                __assertfail("target_indices must lie from 0 to vocab - 1, or be -1", "kullback", 0, "entries", 1);
            else if (ids[j] >= 0 && atomicOr(&marks()[ids[j] >> 5], 1u << (ids[j] & 31)) >> (ids[j] & 31) & 1)
                repeats = 1;
        }
        __syncthreads();
        const bool is_repeated = repeats;
        Stats sum = { 0, 0, -REAL_INFINITY, 0 };
        for (long long j = threadIdx.x; j < k; j += THREADS) {
            bool present = counts && ids[j] >= 0;
            const real log_p = !present ? -REAL_INFINITY : is_repeated ? of_equal(values, ids, k, j, present) : log_of(values[j]);
            const real known = log_p / (real)temperature;
            own[j] = present ? ids[j] : -1;
            out[j] = known;
            if (present)
                sum.merge({ 1, FROM_LOGITS ? 0 : exp((double)log_p), known, 1 });
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2)
            sum.merge({ shfl_xor(sum.count, step), shfl_xor(sum.mass, step), shfl_xor(sum.max, step), shfl_xor(sum.sum_exp, step) });
        if (threadIdx.x % WARP == 0)
            parts[threadIdx.x / WARP] = sum;
        __syncthreads();
        sum = parts[0];
        for (int w = 1; w < WARPS; w++)
            sum.merge(parts[w]);
        if (!has_tail) { /* a row of no ids is given one outcome */
            if (threadIdx.x == 0 && sum.count == 0)
                out[0] = 0;
        } else {
            const double others = (double)(vocab - sum.count), left = 1 - sum.mass;
            const double log_others = log(others > 1 ? others : 1);
            /* of equal shares, the choice of largest entropy, tempered */
            real tail = -REAL_INFINITY;
            if (!FROM_LOGITS && others > 0)
                tail = (real)(log_others + (log(left < least ? least : left) - log_others) / temperature);
            if (normalises) {
                if (!FROM_LOGITS)
                    sum.merge({ 0, 0, tail, 1 });
                const real lse = sum.count == 0 && FROM_LOGITS ? (real)0 : sum.max + safe_log(sum.sum_exp);
                for (long long j = threadIdx.x; j < k; j += THREADS)
                    out[j] -= lse;
                tail -= lse;
            }
            if (threadIdx.x == 0)
                out[k] = keeps_tail ? tail : -REAL_INFINITY;
        }
        for (long long j = threadIdx.x; j < k && counts; j += THREADS)
            if (ids[j] >= 0)
                marks()[ids[j] >> 5] = 0;
        __syncthreads();
    }
}

}
