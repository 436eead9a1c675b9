/* A row at a few of its elements, its ids, with all others in one (the tail) and the mean of all; and the gradient back from there.
   A block takes a row; which elements are among the ids is told by a bit each, in shared memory. Ids are distinct, or -1. */
#pragma once

#include "cuda/block.cuh"
#include "cuda/softmax.cuh"
#include "cuda/warp.cuh"

namespace kullback {

enum { WARPS = THREADS / WARP };

/* A bit for each token */
INLINE unsigned *marks() { return (unsigned *)dynamic_shared(); }

/* Bits lie so that those of a vector are side by side in one number. */
INLINE long long bit_of(long long i, long long head) { return i + (WIDTH - head) % WIDTH; }
INLINE unsigned marks_at(long long at) { return marks()[at >> 5] >> (at & 31); }

INLINE void mark(const long long *ids, long long k, long long head, bool set)
{
    for (long long j = threadIdx.x; j < k; j += THREADS)
        if (ids[j] >= 0) {
            const long long at = bit_of(ids[j], head);
            if (set)
                atomicOr(&marks()[at >> 5], 1u << (at & 31));
            else
                marks()[at >> 5] = 0;
        }
}

INLINE void clear_marks(long long vocab)
{
    for (long long i = threadIdx.x; i <= (vocab + 31) / 32; i += THREADS)
        marks()[i] = 0;
    __syncthreads();
}

/* The largest of a row's logits at its ids: an offset that all of a row have would take the digits of its tail. All of a
   block call, and have passed a barrier since they last did. */
INLINE real reference_of(const X *x, const long long *ids, long long k)
{
    __shared__ real largest_of[WARPS];
    real largest = -REAL_INFINITY;
    if (!IS_LOGITS || IS_CAPPED)
        return 0;
    for (long long j = threadIdx.x; j < k; j += THREADS) {
        const real value = ids[j] < 0 ? -REAL_INFINITY : to_real(x[ids[j]]);
        largest = value > largest ? value : largest;
    }
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) {
        const real other = shfl_xor(largest, step);
        largest = other > largest ? other : largest;
    }
    if (threadIdx.x % WARP == 0)
        largest_of[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (int w = 0; w < WARPS; w++)
        largest = largest_of[w] > largest ? largest_of[w] : largest;
    return safe_abs(largest) < REAL_INFINITY ? largest : (real)0;
}

/* log Σ exp of a few logarithms; of probabilities' */
INLINE real few_lse(const real *values, long long k, bool are_probs)
{
    real top = -REAL_INFINITY, sum = 0;
    for (long long j = 0; j < k; j++)
        top = values[j] > top ? values[j] : top;
    for (long long j = 0; j < k; j++)
        sum += are_probs ? values[j] : safe_exp(values[j] - against(top));
    return are_probs ? safe_log(sum) : against(top) + safe_log(sum);
}

/* Leave in a target's tail what is more than rounding: none where the row has none. At a temperature it has grown beyond
   measure, and no more is taken than the row has; what it loses goes to the entries. One thread calls. */
INLINE void drop_rounding(const real *gathered, real *target, long long k, bool is_tempered)
{
    const bool is_none = gathered[k] == NOTHING;
    if (!is_tempered) {
        target[k] = is_none ? -REAL_INFINITY : target[k];
        return;
    }
    const real own = IS_PROBS ? safe_log(gathered[k]) : gathered[k], known = few_lse(target, k, false);
    const real share = is_none ? -REAL_INFINITY : own - few_lse(gathered, k, IS_PROBS) + known;
    if (!(share < target[k]))
        return;
    const real gain = safe_log1p(safe_exp(target[k] - known)) - safe_log1p(safe_exp(share - known));
    for (long long j = 0; j < k; j++)
        target[j] += gain;
    target[k] = share + gain;
}

extern "C" __global__ void __launch_bounds__(THREADS, REAL_IS_DOUBLE ? 1 : 4 - HAS_MEAN)
kullback_gather(const X *x, const long long *ids, real *gathered, real *target, long long rows, long long vocab,
                long long k, long long width, long long x_stride, double inv_temperature, double softcap,
                double negligible, long long is_tempered)
{
    const real inverse = IS_LOGITS ? (real)inv_temperature : (real)1, cap = (real)softcap, scale = exponent_scale(inverse);
    __shared__ SoftmaxStats parts[WARPS];
    const real share = HAS_MEAN ? share_of((real)vocab) : (real)0;
    const bool has_tail = width > k;
    if (has_tail)
        clear_marks(vocab);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *from = x + row * x_stride;
        const long long *own = ids + row * k;
        const real reference = reference_of(from, own, k);
        for (long long j = threadIdx.x; j < k; j += THREADS)
            gathered[row * width + j] = own[j] < 0 ? NOTHING : counted(to_real(from[own[j]]), cap, reference) * inverse;
        if (!has_tail) {
            __syncthreads(); /* what the reference was found from is written again */
            continue;
        }
        const long long head = head_of(from, vocab), vectors = (vocab - head) / WIDTH;
        mark(own, k, head, true);
        __syncthreads();
        SoftmaxStats sum = { -REAL_INFINITY, 0 };
        real total = 0; /* of all, times `share`; found where it is wanted */
        const X *aligned = from + head;
        for (long long v = threadIdx.x; v < vectors; v += THREADS * UNROLL) {
            Packed<X> loaded[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (v + u * THREADS < vectors)
                    loaded[u] = load(aligned + (v + u * THREADS) * WIDTH);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (v + u * THREADS < vectors) {
                    const unsigned among = marks_at(bit_of(head + (v + u * THREADS) * WIDTH, head));
                    real values[WIDTH];
#pragma unroll
                    for (int j = 0; j < WIDTH; j++)
                        values[j] = counted(at(loaded[u], j), cap, reference);
                    real part = 0;
#pragma unroll
                    for (int j = 0; j < WIDTH; j++)
                        part = real_fma(values[j], share, part);
                    total += part;
                    if (__builtin_expect(among & ((1u << WIDTH) - 1), 0))
#pragma unroll
                        for (int j = 0; j < WIDTH; j++)
                            values[j] = among >> j & 1 ? NOTHING : values[j];
                    add<WIDTH>(sum, values, scale);
                }
        }
        const long long edges = vocab - vectors * WIDTH;
        for (long long i = threadIdx.x; i < edges; i += THREADS) {
            const long long end = i < head ? i : i + vectors * WIDTH;
            const real own_value = counted(to_real(from[end]), cap, reference);
            const real value = marks_at(bit_of(end, head)) & 1 ? NOTHING : own_value;
            add<1>(sum, &value, scale);
            total += own_value * share;
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            const SoftmaxStats other = { shfl_xor(sum.max, step), shfl_xor(sum.sum_exp, step) };
            sum = merged(sum, other, scale);
        }
        if (threadIdx.x % WARP == 0)
            parts[threadIdx.x / WARP] = sum;
        const double whole = HAS_MEAN ? block_sum((double)total) : 0;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < WARPS; w++)
                sum = merged(sum, parts[w], scale);
            /* +inf among them made a NaN of inf - inf */
            const bool infinite = !IS_PROBS && sum.max == REAL_INFINITY;
            const real lse = infinite ? sum.max : against(sum.max) * inverse + safe_log(sum.sum_exp);
            const real tail = IS_PROBS ? sum.sum_exp : lse;
            gathered[row * width + k] = tail;
            if (HAS_MEAN)
                gathered[row * width + k + 1] = (real)(whole / ((double)share * (double)vocab) * (double)inverse);
            if (target && target[row * width + k] <= (real)negligible)
                drop_rounding(gathered + row * width, target + row * width, k, is_tempered);
        }
        mark(own, k, head, false);
        __syncthreads();
    }
}

/* The gradient of an element outside the ids. d_each: what each has of the mean's */
INLINE real other_grad(real x, real inv_temperature, real softcap, real reference, real tail, real d_tail, real d_each)
{
    if (IS_PROBS)
        return d_tail;
    const real value = counted(x, softcap, reference);
    const real part = d_tail * power(exponent_scale(real_fma(value, inv_temperature, -tail))) + d_each;
    return part * ((IS_CAPPED ? softcap_grad(value, softcap) : (real)1) * inv_temperature);
}

extern "C" __global__ void __launch_bounds__(THREADS, REAL_IS_DOUBLE ? 1 : 4 - HAS_MEAN)
kullback_scatter(const X *x, const long long *ids, const real *gathered, const real *d_gathered, X *d_input,
                 long long rows, long long vocab, long long k, long long width, long long x_stride,
                 long long d_input_stride, double inv_temperature, double softcap)
{
    const real inverse = IS_LOGITS ? (real)inv_temperature : (real)1, cap = (real)softcap;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *from = x + row * x_stride;
        X *to = d_input + row * d_input_stride;
        const long long *own = ids + row * k;
        const real reference = reference_of(from, own, k);
        const real tail = width > k ? against(gathered[row * width + k]) : (real)0;
        const real d_tail = width > k ? d_gathered[row * width + k] : (real)0;
        const real d_each = HAS_MEAN ? d_gathered[row * width + k + 1] / (real)vocab : (real)0;
        const bool is_none = d_tail == 0 && d_each == 0; /* then the row is not read */
        const auto grad_of = [&](real value) { return other_grad(value, inverse, cap, reference, tail, d_tail, d_each); };
        const long long head = head_of(to, vocab);
        const bool in_phase = head_of(from, vocab) == head;
        const long long vectors = in_phase ? (vocab - head) / WIDTH : 0;
        for (long long v = threadIdx.x; v < vectors; v += THREADS * UNROLL) {
            Packed<X> values[UNROLL] = {};
            if (!is_none)
#pragma unroll
                for (int u = 0; u < UNROLL; u++)
                    if (v + u * THREADS < vectors)
                        values[u] = load(from + head + (v + u * THREADS) * WIDTH);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (v + u * THREADS < vectors) {
                    if (!is_none)
#pragma unroll
                        for (int j = 0; j < WIDTH; j++)
                            values[u].element[j] = rounded<X>(grad_of(at(values[u], j)));
                    store(to + head + (v + u * THREADS) * WIDTH, values[u]);
                }
        }
        const long long scalars = vocab - vectors * WIDTH;
        for (long long i = threadIdx.x; i < scalars; i += THREADS) {
            const long long end = i < head ? i : i + vectors * WIDTH;
            to[end] = rounded<X>(is_none ? (real)0 : grad_of(to_real(from[end])));
        }
        __syncthreads(); /* ids are written over what their elements have by now */
        for (long long j = threadIdx.x; j < k; j += THREADS)
            if (own[j] >= 0) {
                const real d = d_gathered[row * width + j] + d_each;
                const real slope = IS_CAPPED ? scaled_softcap_grad(gathered[row * width + j], inverse, cap) : (real)1;
                to[own[j]] = rounded<X>(d == 0 ? (real)0 : d * (slope * inverse));
            }
    }
}

}
