/* Every figure of rows of logits (work.Describe). A block takes a row: it reads each side for what is said of that alone, then both,
   from the row's end, of which the second-level cache still has the most. Printed in the place of terms.cuh: the terms of an element,
   and what they are made of; the kinds; the order of what is written. */
#pragma once

#include "cuda/side.cuh"
#include "cuda/terms.cuh"

namespace kullback {

enum { WARPS = THREADS / WARP, SIDES = 1 + HAS_TARGET };

#if HAS_TARGET
/* Far elements whose places a thread keeps: a warp waits for its longest lane, so that many at once are found sooner. */
enum { MOST_FAR = 32 };
enum { MOST_TIMES = 3 }; /* that a row is summed */

/* As of `Packed` */
template <typename T> struct One {
    T element[1];
};
template <typename T> INLINE real at(const One<T> &value, int) { return to_real(value.element[0]); }

INLINE void add_to(NearSums &sums, const NearSums &more)
{
#define ADD_SUM(sum) sums.sum += more.sum;
    EACH_NEAR_SUM(ADD_SUM)
}

INLINE void add_to(Terms &sums, const Terms &terms, real factor = 1)
{
#define ADD_TERM(kind) sums.kind += factor * terms.kind;
    EACH_KIND(ADD_TERM)
    ADD_TERM(q_minus_p)
    ADD_TERM(slope)
}

/* The terms of a row's elements: of near ones by polynomials of their log-ratios, of others by the formula. */
struct Pair {
    Row row;
    real rest = 1;       /* what `less` was rounded by, as a factor: roots lack it, and sums get it in the end */
    real x_less, y_less; /* what logits of 16 bits have taken off before all else, exactly: their maximum */
#if !REAL_IS_DOUBLE
    real x_half, y_half, less; /* √(p·q) has the exponent x_half·(x - its max) + y_half·(y - its max) - less */
#endif

    INLINE void set_log_z_diff(double difference)
    {
        row.log_z_diff_high = (real)difference;
        row.log_z_diff_low = (real)(difference - (double)row.log_z_diff_high);
    }
    /* Their masses' excess is log(p/q)'s. */
    INLINE void take_off(double q_minus_p) { set_log_z_diff((double)row.log_z_diff_high + (double)row.log_z_diff_low - q_minus_p); }

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
        set_log_z_diff(difference);
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
            return fmaf(y - x, row.input_inv_temperature, -row.log_z_diff_high) - row.log_z_diff_low;
        return safe_logit_difference(y, row.target_inv_temperature, x, row.input_inv_temperature, row.log_z_diff_high,
                                     row.log_z_diff_low);
    }
    INLINE real root_exponent(real x, real y) const
    {
        return fmaf(x - row.input_max, x_half, fmaf(y - row.target_max, y_half, -less));
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

    /* Adds those of COUNT elements that are near; returns which are not. All of a warp call. */
    template <int COUNT, typename F, typename G> INLINE unsigned add_near(NearSums &sums, F x, G y, bool is_here) const
    {
#if REAL_IS_DOUBLE
        return is_here ? (1u << COUNT) - 1 : 0;
#else
        real ratios[COUNT], exponents[COUNT], longest = 0;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            ratios[j] = ratio(x(j), y(j));
            exponents[j] = root_exponent(x(j), y(j));
            longest = max_nan(longest, safe_abs(ratios[j]));
        }
        unsigned far = 0;
        if (!warp_all(longest < NEAR_RADIUS || !is_here))
#pragma unroll
            for (int j = 0; j < COUNT; j++) { /* all sums of r = 0 are 0 but the slope's, by which a rounding is multiplied */
                const bool is_near = safe_abs(ratios[j]) < NEAR_RADIUS;
                far |= is_near ? 0 : 1u << j;
                ratios[j] = is_near ? ratios[j] : 0;
            }
        if (!is_here)
            return 0;
        NearSums part = {};
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            add_to(part, near_sums(ratios[j], ex2(exponents[j])));
        add_to(sums, part);
        return far;
#endif
    }
};

/* A row's elements, and of their sums this thread's parts */
struct PairSums {
    const Pair &pair;
    const X *x;
    const Y *y;
    real x_cap, y_cap;
    int (*far_places)[THREADS];
    NearSums near = {};
    Terms far = {};
    int count = 0; /* of far elements that are still to be added */

    INLINE real input(real own) const { return counted(own, x_cap, INPUT_IS_CAPPED) - pair.x_less; }
    INLINE real target(real other) const { return counted(other, y_cap, TARGET_IS_CAPPED) - pair.y_less; }

    /* Elements from that place on, as of a vector; a thread that is not here has none. All of a warp call. */
    template <typename A, typename B> INLINE void take(const A &own, const B &other, int place, bool is_here)
    {
        enum { COUNT = sizeof(own.element) / sizeof(own.element[0]) };
        unsigned of_far = pair.add_near<COUNT>(near, [&](int j) { return input(at(own, j)); },
                                               [&](int j) { return target(at(other, j)); }, is_here);
#pragma unroll 1
        for (; of_far; of_far &= of_far - 1)
            far_places[count++][threadIdx.x] = place + __ffs((int)of_far) - 1;
    }
    INLINE bool has_room(int more) const { return warp_all(count <= MOST_FAR - more); }
    INLINE void add_far()
    {
#pragma unroll 1
        while (count) {
            const int i = far_places[--count][threadIdx.x];
            add_to(far, pair.far_terms(input(to_real(x[i])), target(to_real(y[i]))), 2 - pair.rest); /* over rest, near 1 */
        }
    }
};

INLINE Terms sums_of(const X *x, const Y *y, int vocab, const Pair &pair, real x_cap, real y_cap)
{
    __shared__ int far_places[MOST_FAR][THREADS];
    PairSums sums = { pair, opaque(x), opaque(y), x_cap, y_cap, far_places }; /* else each vector's address begins with the row's */
    /* Vectors where both sides' begin at the same element; the rest one by one */
    const Cover<X> cover(x, vocab, head_of(x, vocab) == head_of(y, vocab));
    const int steps = cover.vectors / THREADS; /* that all threads take; from the row's end, of which most is still near */
    int place = cover.place(steps * THREADS + (int)threadIdx.x);
    if (steps * THREADS < cover.vectors) {
        const bool is_here = steps * THREADS + (int)threadIdx.x < cover.vectors;
        const Packed<X> own = is_here ? load(sums.x + place) : Packed<X> {};
        const Packed<Y> other = is_here ? load(sums.y + place) : Packed<Y> {};
        sums.take(own, other, place, is_here);
    }
    Packed<X> own[UNROLL];
    Packed<Y> other[UNROLL];
    const auto fetch = [&](int u, int back) {
        own[u] = load(sums.x + place - back * THREADS * WIDTH);
        other[u] = load(sums.y + place - back * THREADS * WIDTH);
    };
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (u < steps)
            fetch(u, u + 1);
#pragma unroll 1
    for (int step = steps; step > 0; step -= UNROLL, place -= UNROLL * THREADS * WIDTH) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (u < step) {
                sums.take(own[u], other[u], place - (u + 1) * THREADS * WIDTH, true);
                if (u + UNROLL < step) /* long before it is needed */
                    fetch(u, u + 1 + UNROLL);
            }
        if (!sums.has_room(UNROLL * WIDTH))
            sums.add_far();
    }
#pragma unroll 1
    for (int first = 0; first == 0 || first < cover.edges; first += THREADS) {
        const bool is_here = first + (int)threadIdx.x < cover.edges, is_last = first + THREADS >= cover.edges;
        const int edge = is_here ? cover.edge(first + (int)threadIdx.x) : 0;
        sums.take(One<X> { { sums.x[edge] } }, One<Y> { { sums.y[edge] } }, edge, is_here);
        if (is_last || !sums.has_room(1))
            sums.add_far();
    }
    Terms terms = near_terms(sums.near);
    add_to(terms, sums.far);
    return terms;
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
    __shared__ double excess; /* of the masses of q, that a row is to be summed again without; or 0 */
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
        Pair pair(found[0], found[1], x_scale, y_scale);
#pragma unroll 1
        for (int times = 1;; times++) {
            const Terms sums = sums_of(from, other, (int)vocab, pair, x_cap, y_cap);
            Terms part = {};
#define SUM(kind) part.kind = warp_sum(sums.kind);
            EACH_KIND(SUM)
            SUM(q_minus_p)
            SUM(slope)
            if (lane == 0)
                parts[warp] = part;
            __syncthreads();
            if (warp == 0) {
                part = lane < WARPS ? parts[lane] : Terms {};
#define WHOLE(kind) double kind = (double)pair.rest * warp_sum((double)part.kind);
                EACH_KIND(WHOLE)
                WHOLE(q_minus_p)
                WHOLE(slope)
                /* As in c/describe.c: an excess of masses is taken out, or the row is summed again without */
                const bool is_small = fabs(q_minus_p) <= 1e-3 * WITH_CORNER;
                WITH_CORNER += 0.5 * q_minus_p * slope;
                WITH_CORNER = WITH_CORNER < 0 ? 0 : WITH_CORNER; /* NaN stays */
                double *of_kind = numbers + NUMBER_KINDS * rows + r;
#define WRITE(kind) *of_kind = kind, of_kind += rows;
                if (lane == 0) {
                    excess = is_small || !(fabs(q_minus_p) < 1) ? 0 : q_minus_p;
                    EACH_KIND(WRITE)
                }
            }
            __syncthreads();
            if (excess == 0 || times == MOST_TIMES)
                break;
            pair.take_off(excess);
        }
#endif
    }
}

}
