/* Every figure of rows of logits (work.Describe). A block takes a row: it reads each side for what is said of that alone, then
   both. Printed in the place of terms.cuh: `Terms safe_terms(x, y, row)` of an element, and of elements that are close, or
   light; the kinds; the order of what is written. */
#pragma once

#include "cuda/block.cuh"
#include "cuda/close.cuh"
#include "cuda/terms.cuh"
#include "cuda/vector.cuh"

namespace kullback {

enum { NOWHERE = 0x7fffffff };
#define CLOSE_RATIO (real)0.48 /* found with a rounding; terms are close below 1/2 */
/* The largest log-mass of light tokens: what they lose by terms of far ones is nothing where the row is not close. */
#define LIGHT_LOG_MASS (real)-6.9314718
#define MIN_LIGHT_SUM 5e-4
/* Of a row's squared log-ratios the mean from which on it is likely to be far */
#define FAR_SQUARE 0.03
enum { SAMPLES = 4 }; /* of a thread */
#define MAX_SUM 1e15

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
        const real exponent = (values[j] - side.max) * scale, mass = safe_exp(exponent);
        const bool is_max = values[j] == side.max;
        maxima += is_max;
        rest += is_max ? (real)0 : mass;
        moment += is_max ? (real)0 : mass * (exponent < (real)-1e30 ? (real)-1e30 : exponent);
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
    bool has_light; /* whether some terms were found by the formula for rows that are not close */
} Sums;

#define ADD_TERM(kind) sums.kind += (double)part.kind;
#define ADD_ELEMENT(kind) part.kind += terms.kind;
enum { PART = 8 }; /* elements of a thread that are summed in `real` */

INLINE Sums sums_of(const X *x, const Y *y, int vocab, const Row &row, real x_cap, real y_cap, bool tries_light)
{
    Sums sums = {};
    for (int first = 0; first < vocab; first += THREADS * PART) {
        Terms part = {};
#pragma unroll 1
        for (int u = 0; u < PART; u++) {
            const int i = first + u * THREADS + (int)threadIdx.x;
            const bool is_here = i < vocab;
            const real xi = is_here ? counted(to_real(x[i]), x_cap, INPUT_IS_CAPPED) : row.input_max;
            const real yi = is_here ? counted(to_real(y[i]), y_cap, TARGET_IS_CAPPED) : row.target_max;
            const real log_q = (xi - row.input_max) * row.input_inv_temperature - row.input_log_sum_exp;
            const real log_p = (yi - row.target_max) * row.target_inv_temperature - row.target_log_sum_exp;
            const real apart = safe_abs(log_p - log_q);
            const bool is_close = apart < CLOSE_RATIO;
            Terms terms;
            /* a warp whose lanes choose pays for each choice, and most warps need not */
            if (warp_all(is_close))
                terms = close_terms(xi, yi, row);
#if !REAL_IS_DOUBLE
            else if (tries_light && !is_close && apart < REAL_INFINITY && log_p < LIGHT_LOG_MASS && log_q < LIGHT_LOG_MASS) {
                terms = light_terms(xi, yi, row);
                sums.has_light = true;
            }
#endif
            else if (is_close)
                terms = close_terms(xi, yi, row);
            else
                terms = safe_terms(xi, yi, row);
            if (is_here) {
                EACH_KIND(ADD_ELEMENT)
                part.q_minus_p += terms.q_minus_p;
                part.slope += terms.slope;
            }
        }
        EACH_KIND(ADD_TERM)
        sums.q_minus_p += (double)part.q_minus_p;
        sums.slope += (double)part.slope;
    }
#define SHARE(kind) sums.kind = block_sum(sums.kind);
    EACH_KIND(SHARE)
    sums.q_minus_p = block_sum(sums.q_minus_p);
    sums.slope = block_sum(sums.slope);
    sums.has_light = block_sum((double)sums.has_light) != 0;
    return sums;
}

/* Whether terms of far elements are worth a try, by a few of the row */
INLINE bool looks_far(const X *x, const Y *y, int vocab, const Row &row)
{
    double square = 0;
    const int step = vocab / (SAMPLES * THREADS) + 1;
    for (int i = threadIdx.x * step; i < vocab; i += THREADS * step) {
        const real ratio = to_real(y[i]) * row.target_inv_temperature - to_real(x[i]) * row.input_inv_temperature
            - row.log_z_diff_high;
        square += ratio * ratio < 1 ? (double)(ratio * ratio) : safe_abs(ratio) < REAL_INFINITY ? 1.0 : 0.0;
    }
    return block_sum(square) * step > FAR_SQUARE * vocab;
}

INLINE bool is_far(const Sums &sums)
{
#define IS_FAR(kind) && sums.kind > MIN_LIGHT_SUM && sums.kind < MAX_SUM
    return true EACH_KIND(IS_FAR);
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
        Sums sums = sums_of(from, other, (int)vocab, row, x_cap, y_cap, looks_far(from, other, (int)vocab, row));
        if (sums.has_light && !is_far(sums))
            sums = sums_of(from, other, (int)vocab, row, x_cap, y_cap, false);
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
