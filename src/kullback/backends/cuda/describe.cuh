/* Every figure of rows of logits (work.Describe). A block takes a row: it reads each side for what is said of that alone, then
   both. Printed in the place of terms.cuh: the terms of an element, and what they are made of; the kinds; the order of what is
   written. */
#pragma once

#include "cuda/block.cuh"
#include "cuda/light.cuh"
#include "cuda/terms.cuh"
#include "cuda/vector.cuh"

namespace kullback {

enum { NOWHERE = 0x7fffffff };

/* A side's row, or part of it: masses are against the largest logit as it counts. Beside the masses of 1 that maxima have,
   small ones would lose their digits: those are counted. */
typedef struct {
    real max;
    int first, nan_at, above; /* the first of the maxima; of NaN; how many are above the label */
    double maxima, rest, moment; /* of the others Σ exp(exponent), and Σ exponent·exp(exponent) */
} Side;

INLINE Side nothing() { return { -REAL_INFINITY, NOWHERE, NOWHERE, 0, 0, 0, 0 }; }

/* Against another maximum, which is larger; against -inf there was nothing but NaN. */
INLINE void rescale(Side &side, real max, real scale)
{
    if (side.max > -REAL_INFINITY) {
        const double less = ((double)side.max - (double)max) * (double)scale, factor = exp(less);
        const double total = side.rest + side.maxima;
        side.moment = factor * (side.moment + less * total);
        side.rest = factor * total;
    }
    side.maxima = 0;
    side.max = max;
    side.first = NOWHERE;
}

INLINE Side merged(Side a, Side b, real scale)
{
    if (a.max < b.max)
        rescale(a, b.max, scale);
    else if (b.max < a.max)
        rescale(b, a.max, scale);
    return { a.max, a.first < b.first ? a.first : b.first, a.nan_at < b.nan_at ? a.nan_at : b.nan_at, a.above + b.above,
             a.maxima + b.maxima, a.rest + b.rest, a.moment + b.moment };
}

/* COUNT elements of a row, from place `start` on, where they are the thread's to add. All of a warp call, and have one
   maximum: one that each had for itself would seldom be the same step's, and a warp waits for all. */
template <int COUNT> INLINE void add(Side &side, const real *values, int start, bool is_here, real scale, real own)
{
    real top = -REAL_INFINITY, rest = 0, moment = 0;
    int maxima = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        top = is_here && values[j] > top ? values[j] : top;
    if (!warp_all(!(top > side.max))) {
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            const real other = shfl_xor(top, step);
            top = other > top ? other : top;
        }
        rescale(side, top, scale);
    }
    if (!is_here)
        return;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const real exponent = (values[j] - side.max) * scale, mass = mass_exp(exponent);
        const bool is_max = values[j] == side.max;
        maxima += is_max;
        rest += is_max ? (real)0 : mass;
        moment = mass > 0 ? mass * exponent + moment : moment; /* 0 of a maximum */
        side.above += values[j] > own;
    }
    if (maxima && side.first == NOWHERE)
#pragma unroll
        for (int j = COUNT - 1; j >= 0; j--)
            side.first = values[j] == side.max ? start + j : side.first;
    if (rest != rest)
#pragma unroll
        for (int j = COUNT - 1; j >= 0; j--)
            side.nan_at = values[j] != values[j] && start + j < side.nan_at ? start + j : side.nan_at;
    side.maxima += maxima;
    side.rest += (double)rest;
    side.moment += (double)moment;
}

INLINE Side shfl_xor(const Side &side, int step)
{
    return { shfl_xor(side.max, step), shfl_xor(side.first, step), shfl_xor(side.nan_at, step), shfl_xor(side.above, step),
             shfl_xor(side.maxima, step), shfl_xor(side.rest, step), shfl_xor(side.moment, step) };
}

/* All threads get the row's. */
INLINE Side block_merged(Side side, real scale)
{
    __shared__ Side warps[THREADS / WARP];
#pragma unroll
    for (int step = WARP / 2; step; step /= 2)
        side = merged(side, shfl_xor(side, step), scale);
    __syncthreads(); /* the side before may still be being read */
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = side;
    __syncthreads();
    side = warps[0];
    for (int warp = 1; warp < THREADS / WARP; warp++)
        side = merged(side, warps[warp], scale);
    return side;
}

INLINE real counted(real x, real softcap, bool is_capped) { return is_capped ? softcapped(x, softcap) : x; }

template <typename T> INLINE Side side_of(const T *x, int vocab, real scale, real softcap, bool is_capped, real own)
{
    Side side = nothing();
    const int head = (int)head_of(x, vocab), vectors = (vocab - head) / WIDTH, edges = vocab - vectors * WIDTH;
    for (int first = 0; first < vectors; first += THREADS * UNROLL) {
        const int v = first + threadIdx.x;
        Packed<T> loaded[UNROLL] = {};
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (v + u * THREADS < vectors)
                loaded[u] = load(x + head + (v + u * THREADS) * WIDTH);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            real values[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                values[j] = counted(at(loaded[u], j), softcap, is_capped);
            add<WIDTH>(side, values, head + (v + u * THREADS) * WIDTH, v + u * THREADS < vectors, scale, own);
        }
    }
    const int i = threadIdx.x, place = i < head ? i : i + vectors * WIDTH; /* less than two vectors */
    const real edge = i < edges ? counted(to_real(x[place]), softcap, is_capped) : (real)0;
    add<1>(side, &edge, place, i < edges, scale, own);
    return block_merged(side, scale);
}

/* NaN of a row that has an infinite maximum, as of one that has NaN */
INLINE double sum_exp(const Side &side)
{
    return safe_abs(side.max) < REAL_INFINITY ? side.rest + side.maxima : (double)(side.max - side.max);
}

/* One thread calls. */
INLINE void write_side(const Side &side, real scale, double *numbers, long long *tokens, long long stride)
{
    const double sum = sum_exp(side);
    numbers[0] = side.max == -REAL_INFINITY && side.nan_at == NOWHERE ? (double)side.max : (double)side.max * (double)scale + log(sum);
    numbers[stride] = (side.maxima == 1 ? log1p(side.rest) : log(sum)) - side.moment / sum;
    tokens[0] = side.nan_at < NOWHERE ? side.nan_at : side.first < NOWHERE ? side.first : 0;
    tokens[stride] = side.above;
}

#define DECLARE(kind) double kind;
typedef struct {
    EACH_KIND(DECLARE)
    double q_minus_p, slope;
} Sums;

#define ADD_TERM(kind) sums.kind += (double)part.kind;
#define ADD_ELEMENT(kind) part.kind += terms.kind;
#define SHARE(kind) sums.kind = block_sum(sums.kind);

/* An element's terms: polynomials of its log-ratio where that is short, so that nothing cancels; else the formula, without guards
   where all is finite. */
INLINE void add_terms(Terms &part, real xi, real yi, const Row &row)
{
    Terms terms;
#if REAL_IS_DOUBLE
    terms = safe_terms(xi, yi, row);
#else
    const real x_exponent = (xi - row.input_max) * row.input_inv_temperature - row.input_log_sum_exp;
    const real y_exponent = (yi - row.target_max) * row.target_inv_temperature - row.target_log_sum_exp;
    const real ratio = stable_logit_difference(yi, row.target_inv_temperature, xi, row.input_inv_temperature, row.log_z_diff_high,
                                               row.log_z_diff_low);
    const bool is_near = safe_abs(ratio) < NEAR_RADIUS, are_near = warp_all(is_near);
    terms = near_terms(is_near ? ratio : 0, fast_exp((real)0.5 * (x_exponent + y_exponent)));
    if (!are_near && !is_near)
        terms = safe_abs(y_exponent - x_exponent) < REAL_INFINITY ? light_terms(xi, yi, row) : safe_terms(xi, yi, row);
#endif
    EACH_KIND(ADD_ELEMENT)
    part.q_minus_p += terms.q_minus_p;
    part.slope += terms.slope;
}

INLINE Sums sums_of(const X *x, const Y *y, int vocab, const Row &row, real x_cap, real y_cap)
{
    Sums sums = {};
    const auto take = [&](Terms &part, real xi, real yi) {
        add_terms(part, counted(xi, x_cap, INPUT_IS_CAPPED), counted(yi, y_cap, TARGET_IS_CAPPED), row);
    };
    const auto close = [&](const Terms &part) {
        EACH_KIND(ADD_TERM)
        sums.q_minus_p += (double)part.q_minus_p;
        sums.slope += (double)part.slope;
    };
    /* Vectors where both sides' begin at the same element; the rest one by one. All of a warp go along. */
    const int head = (int)head_of(x, vocab), vectors = head == (int)head_of(y, vocab) ? (vocab - head) / WIDTH : 0;
    for (int first = 0; first < vectors; first += THREADS) {
        const int v = min(first + (int)threadIdx.x, vectors - 1);
        const Packed<X> own = load(x + head + v * WIDTH);
        const Packed<Y> other = load(y + head + v * WIDTH);
        Terms part = {};
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            take(part, at(own, j), at(other, j));
        if (first + (int)threadIdx.x < vectors)
            close(part);
    }
    const int edges = vocab - vectors * WIDTH;
    for (int first = 0; first < edges; first += THREADS) {
        const int i = min(first + (int)threadIdx.x, edges - 1), place = i < head || vectors == 0 ? i : i + vectors * WIDTH;
        Terms part = {};
        take(part, to_real(x[place]), to_real(y[place]));
        if (first + (int)threadIdx.x < edges)
            close(part);
    }
    EACH_KIND(SHARE)
    sums.q_minus_p = block_sum(sums.q_minus_p);
    sums.slope = block_sum(sums.slope);
    return sums;
}

INLINE Row row_of(const Side &input, const Side &target, real x_scale, real y_scale)
{
    const double x_sum = sum_exp(input), y_sum = sum_exp(target);
    const double difference = ((double)target.max * (double)y_scale - (double)input.max * (double)x_scale) + (log(y_sum) - log(x_sum));
    Row row = {};
    row.input_inv_temperature = x_scale;
    row.input_max = input.max;
    row.input_inv_sum_exp = (real)(1 / x_sum);
    row.input_log_sum_exp = (real)log(x_sum);
    row.target_inv_temperature = y_scale;
    row.target_max = target.max;
    row.target_inv_sum_exp = (real)(1 / y_sum);
    row.target_log_sum_exp = (real)log(y_sum);
    row.log_z_diff_high = (real)difference;
    row.log_z_diff_low = (real)(difference - (double)row.log_z_diff_high);
    return row;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kullback_describe(const X *x, const Y *y, const long long *labels, double *numbers, long long *tokens, long long rows,
                  long long vocab, long long x_stride, long long y_stride, double input_inv_temperature,
                  double target_inv_temperature, double input_softcap, double target_softcap)
{
    const real x_scale = (real)input_inv_temperature, x_cap = (real)input_softcap;
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const long long label = labels ? labels[r] : -1;
        const X *from = x + r * x_stride;
        const real own = label < 0 ? REAL_INFINITY : counted(to_real(from[label]), x_cap, INPUT_IS_CAPPED);
        const Side input = side_of(from, (int)vocab, x_scale, x_cap, INPUT_IS_CAPPED, own);
        if (threadIdx.x == 0)
            write_side(input, x_scale, numbers + NUMBER_LSE * rows + r, tokens + TOKEN_TOP_TOKEN * rows + r, rows);
#if HAS_TARGET
        const real y_scale = (real)target_inv_temperature, y_cap = (real)target_softcap;
        const Y *other = y + r * y_stride;
        const real their_own = label < 0 ? REAL_INFINITY : counted(to_real(other[label]), y_cap, TARGET_IS_CAPPED);
        const Side target = side_of(other, (int)vocab, y_scale, y_cap, TARGET_IS_CAPPED, their_own);
        const Row row = row_of(input, target, x_scale, y_scale);
        Sums sums = sums_of(from, other, (int)vocab, row, x_cap, y_cap);
        if (threadIdx.x == 0) {
            write_side(target, y_scale, numbers + NUMBER_TARGET_LSE * rows + r, tokens + TOKEN_TARGET_TOP_TOKEN * rows + r, rows);
            /* The normalisers' rounding shows in the masses as an excess. Smooth kinds have its square; where there is a
               corner it is had as it is, and to the first order taken out. */
            sums.WITH_CORNER += 0.5 * sums.q_minus_p * sums.slope;
            double *of_kind = numbers + NUMBER_KINDS * rows + r;
#define WRITE(kind) *of_kind = sums.kind, of_kind += rows;
            EACH_KIND(WRITE)
        }
#endif
    }
}

}
