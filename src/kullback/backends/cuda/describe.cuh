/* Every figure of rows of logits (work.Describe). A block takes a row: it reads each side for what is said of that alone, then both,
   from the row's end, of which the second-level cache still has the most. Printed in the place of terms.cuh: the terms of an element,
   and what they are made of; the kinds; the order of what is written. */
#pragma once

#include "cuda/side.cuh"
#include "cuda/terms.cuh"

namespace kullback {

enum { WARPS = THREADS / WARP, SIDES = 1 + HAS_TARGET };

#if HAS_TARGET
#define ADD_TERM(kind) sums.kind += factor * terms.kind;

INLINE void add_to(Terms &sums, const Terms &terms, real factor = 1)
{
    EACH_KIND(ADD_TERM)
    sums.q_minus_p += factor * terms.q_minus_p;
    sums.slope += factor * terms.slope;
}

/* The terms of a row's elements: of near ones by polynomials of their log-ratios, of others by the formula. */
struct Pair {
    Row row;
    real rest = 1;       /* what `less` was rounded by, as a factor: roots lack it, and sums get it in the end */
    real x_less, y_less; /* what logits of 16 bits have taken off before all else, exactly: their maximum */
#if !REAL_IS_DOUBLE
    real x_half, y_half, less; /* √(p·q) has the exponent x_half·(x - its max) + y_half·(y - its max) - less */
#endif

    INLINE Pair(const Whole &x, const Whole &y, const Scale &x_scale, const Scale &y_scale) : row()
    {
        x_less = IS_16_BIT ? x.max : 0;
        y_less = IS_16_BIT ? y.max : 0;
        const double difference = IS_16_BIT ? (double)y.log_sum_exp - (double)x.log_sum_exp : y.lse - x.lse;
        row.input_inv_temperature = x_scale.inv_temperature;
        row.input_max = IS_16_BIT ? 0 : x.max;
        row.input_inv_sum_exp = 1 / x.sum_exp;
        row.input_log_sum_exp = x.log_sum_exp;
        row.target_inv_temperature = y_scale.inv_temperature;
        row.target_max = IS_16_BIT ? 0 : y.max;
        row.target_inv_sum_exp = 1 / y.sum_exp;
        row.target_log_sum_exp = y.log_sum_exp;
        row.log_z_diff_high = (real)difference;
        row.log_z_diff_low = (real)(difference - (double)row.log_z_diff_high);
#if !REAL_IS_DOUBLE
        x_half = 0.5f * x_scale.scale;
        y_half = 0.5f * y_scale.scale;
        double exponent = 0.7213475204444817 * ((double)x.log_sum_exp + (double)y.log_sum_exp); /* ½·log2(e) */
        less = (real)exponent;
        rest = ex2((real)((double)less - exponent));
#endif
    }

#if !REAL_IS_DOUBLE
    INLINE real ratio(real x, real y) const
    {
        if (ONE_TEMPERATURE && IS_16_BIT)
            return fmaf(y - x, row.input_inv_temperature, -row.log_z_diff_high); /* its rounding counts with the normalisers' */
        return safe_logit_difference(y, row.target_inv_temperature, x, row.input_inv_temperature, row.log_z_diff_high,
                                     row.log_z_diff_low);
    }
    INLINE real root(real x, real y) const
    {
        return ex2(fmaf(x - row.input_max, x_half, fmaf(y - row.target_max, y_half, -less)));
    }
#endif
    INLINE Terms far_terms(real x, real y) const
    {
#if !REAL_IS_DOUBLE
        if (safe_abs(ratio(x, y)) < REAL_INFINITY)
            return light_terms(x, y, row);
#endif
        return safe_terms(x, y, row);
    }

    /* x(j) and y(j) are the elements, and again those that are read. */
    template <int COUNT, typename F, typename G, typename H, typename I>
    INLINE void add(Terms &sums, F x, G y, H read_x, I read_y) const
    {
        Terms part = {};
        unsigned far = (1u << COUNT) - 1; /* which elements are */
#if !REAL_IS_DOUBLE
        far = 0;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const real own = x(j), other = y(j), log_ratio = ratio(own, other);
            const bool is_near = safe_abs(log_ratio) < NEAR_RADIUS;
            far |= is_near ? 0 : 1u << j;
            /* All terms of r = 0 are 0 but the slope, by which a rounding is multiplied. */
            add_to(part, near_terms(is_near ? log_ratio : 0, root(own, other)));
        }
#endif
#pragma unroll 1
        for (; far; far &= far - 1) { /* read again: registers have no index */
            const int j = __ffs((int)far) - 1;
            add_to(part, far_terms(read_x(j), read_y(j)), 2 - rest); /* over rest, which is as near to 1 */
        }
        add_to(sums, part);
    }
};

INLINE Terms sums_of(const X *x, const Y *y, int vocab, const Pair &pair, real x_cap, real y_cap)
{
    Terms sums = {};
    const auto input = [&](real x) { return counted(x, x_cap, INPUT_IS_CAPPED) - pair.x_less; };
    const auto target = [&](real y) { return counted(y, y_cap, TARGET_IS_CAPPED) - pair.y_less; };
    /* Vectors where both sides' begin at the same element; the rest one by one */
    const Cover<X> cover(x, vocab, head_of(x, vocab) == head_of(y, vocab));
    int v = (cover.vectors - 1) / THREADS * THREADS + (int)threadIdx.x; /* from the row's end */
    Packed<X> own[UNROLL];
    Packed<Y> other[UNROLL];
    const auto fetch = [&](int u, int from) {
        if (from >= 0 && from < cover.vectors) {
            own[u] = load(x + cover.place(from));
            other[u] = load(y + cover.place(from));
        }
    };
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        fetch(u, v - u * THREADS);
#pragma unroll 1
    for (; v >= 0; v -= UNROLL * THREADS)
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int from = v - u * THREADS, place = cover.place(from);
            if (from >= 0 && from < cover.vectors)
                pair.add<WIDTH>(sums, [&](int j) { return input(at(own[u], j)); },
                                [&](int j) { return target(at(other[u], j)); },
                                [&](int j) { return input(to_real(x[place + j])); },
                                [&](int j) { return target(to_real(y[place + j])); });
            fetch(u, from - UNROLL * THREADS); /* long before it is needed */
        }
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < cover.edges; i += THREADS) {
        const real own_edge = input(to_real(x[cover.edge(i)])), other_edge = target(to_real(y[cover.edge(i)]));
        const auto own_again = [&](int) { return own_edge; };
        const auto other_again = [&](int) { return other_edge; };
        pair.add<1>(sums, own_again, other_again, own_again, other_again);
    }
    return sums;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kullback_describe(const X *x, const Y *y, const long long *labels, double *numbers, long long *tokens, long long rows,
                  long long vocab, long long x_stride, long long y_stride, double input_inv_temperature,
                  double target_inv_temperature, double input_softcap, double target_softcap)
{
    __shared__ Side warps[SIDES][WARPS];
    __shared__ Whole found[SIDES];
#if HAS_TARGET
    __shared__ Terms parts[WARPS];
#endif
    const real x_cap = (real)input_softcap, y_cap = (real)target_softcap;
    const Scale x_scale(input_inv_temperature), y_scale(target_inv_temperature);
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const X *from = x + r * x_stride;
        const Y *other = y + r * y_stride;
        const long long label = labels ? labels[r] : -1;
        const bool has_label = label >= 0;
        const real own = has_label ? counted(to_real(from[label]), x_cap, INPUT_IS_CAPPED) : (real)0;
        put(side_of(Cover<X>(from, (int)vocab), x_scale, x_cap, INPUT_IS_CAPPED, has_label, own), warps[0]);
#if HAS_TARGET
        const real their_own = has_label ? counted(to_real(other[label]), y_cap, TARGET_IS_CAPPED) : (real)0;
        put(side_of(Cover<Y>(other, (int)vocab), y_scale, y_cap, TARGET_IS_CAPPED, has_label, their_own), warps[SIDES - 1]);
#endif
        __syncthreads();
        for (int side = warp; side < SIDES; side += WARPS) {
            const Whole whole = merged(lane < WARPS ? warps[side][lane] : nothing(), side ? y_scale : x_scale);
            if (lane == 0) {
                found[side] = whole;
                write_whole(whole, numbers + (side ? NUMBER_TARGET_LSE : NUMBER_LSE) * rows + r,
                            tokens + (side ? TOKEN_TARGET_TOP_TOKEN : TOKEN_TOP_TOKEN) * rows + r, rows);
            }
        }
        __syncthreads();
#if HAS_TARGET
        const Pair pair(found[0], found[1], x_scale, y_scale);
        const Terms sums = sums_of(from, other, (int)vocab, pair, x_cap, y_cap);
        Terms part = {};
#define SUM(kind) part.kind = warp_sum(sums.kind);
        EACH_KIND(SUM)
        SUM(q_minus_p)
        SUM(slope)
        if (lane == 0)
            parts[warp] = part;
        __syncthreads();
        if (warp == 0) { /* before it writes there again, all are here for the next row's sides */
            part = lane < WARPS ? parts[lane] : Terms {};
#define WHOLE(kind) double kind = (double)pair.rest * warp_sum((double)part.kind);
            EACH_KIND(WHOLE)
            WHOLE(q_minus_p)
            WHOLE(slope)
            /* The normalisers' rounding shows in the masses as an excess. Smooth kinds have its square; where there is a corner
               it is had as it is, and to the first order taken out. */
            WITH_CORNER += 0.5 * q_minus_p * slope;
            double *of_kind = numbers + NUMBER_KINDS * rows + r;
#define WRITE(kind) *of_kind = kind, of_kind += rows;
            if (lane == 0) {
                EACH_KIND(WRITE)
            }
        }
#endif
    }
}

}
