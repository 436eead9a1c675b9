/* One side of a row of logits, for describe.cuh: its largest token, its log-sum-exp, its entropy, a label's rank. */
#pragma once

#include "cuda/light.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"

namespace kullback {

enum { NOWHERE = 0x7fffffff };

INLINE real larger(real a, real b) /* NaN stays */
{
#if REAL_IS_DOUBLE
    return a > b || a != a ? a : b;
#else
    return max_nan(a, b);
#endif
}

INLINE real counted(real x, real softcap, bool is_capped) { return is_capped ? softcapped(x, softcap) : x; }

/* The largest of a vector; of 16 bits in pairs. A cap keeps the order. */
template <typename T> INLINE real largest(const Packed<T> &x)
{
    real max = at(x, 0);
#pragma unroll
    for (int j = 1; j < WIDTH; j++)
        max = larger(max, at(x, j));
    return max;
}

template <typename T, typename F> INLINE real largest_of_pairs(const Packed<T> &x, F larger_pair)
{
    const unsigned *pairs = (const unsigned *)&x;
    unsigned max = pairs[0];
#pragma unroll
    for (int i = 1; i < WIDTH / 2; i++)
        max = larger_pair(max, pairs[i]);
    return larger(to_real(T { (unsigned short)max }), to_real(T { (unsigned short)(max >> 16) }));
}
INLINE real largest(const Packed<bfloat16> &x)
{
    return largest_of_pairs(x, [](unsigned a, unsigned b) { return max_nan_bf16x2(a, b); });
}
INLINE real largest(const Packed<float16> &x)
{
    return largest_of_pairs(x, [](unsigned a, unsigned b) { return max_nan_f16x2(a, b); });
}

/* How masses are found: exponents to base 2, in double to base e, against a maximum. Its product with the scale is rounded to `low`,
   by as much as all exponents are less than they are. */
struct Scale {
    real scale, inv_temperature;

    explicit INLINE Scale(double inv_temperature)
        : scale((real)inv_temperature), inv_temperature((real)inv_temperature)
    {
#if !REAL_IS_DOUBLE
        scale = base_2(scale);
#endif
    }
#if REAL_IS_DOUBLE
    INLINE real low(real max) const { return max * scale; }
    INLINE real exponent(real x, real low) const { return fma(x, scale, -low); }
    static INLINE real mass(real exponent) { return exp(exponent); }
    static INLINE real nats(real exponent) { return exponent; }
#else
    INLINE real low(real max) const { return mul_rn(max, scale); }
    INLINE real exponent(real x, real low) const { return fmaf(x, scale, -low); }
    static INLINE real mass(real exponent) { return ex2(exponent); }
    static INLINE real nats(real exponent) { return exponent * LN2; }
#endif
    /* exponent(max, low), or 0 where low is infinite */
    INLINE real of_max(real max, real low) const
    {
        const real found = exponent(max, low);
        return safe_abs(found) < 1 ? found : 0;
    }
};

/* A side's row, or part of it. Beside the masses of 1 that maxima have, small ones would lose their digits: those are counted. All of
   a warp have one maximum: one that each had for itself would seldom be the same step's, and a warp waits for all. */
struct Side {
    real max, low;
    real rest, moment;        /* of what is no maximum Σ exp(exponent), and Σ exponent·exp(exponent) */
    int maxima, first, above; /* how many maxima; the first, or that of NaN; how many are above the label */
};

INLINE Side nothing() { return { -REAL_INFINITY, -REAL_INFINITY, 0, 0, 0, NOWHERE, 0 }; }

/* Against a larger maximum, or NaN; against -inf there was nothing. */
INLINE void rescale(Side &side, real max, const Scale &scale)
{
    const real low = scale.low(max);
    if (side.max > -REAL_INFINITY) {
        const real of_max = scale.exponent(side.max, low), of_maxima = (real)side.maxima * Scale::mass(of_max);
        const real less = side.low - low, factor = Scale::mass(less);
        side.moment = (factor > 0 ? factor * (side.moment + less * side.rest) : 0) + (of_maxima > 0 ? of_maxima * of_max : 0);
        side.rest = factor * side.rest + of_maxima;
    }
    side.maxima = 0;
    side.first = NOWHERE;
    side.max = max;
    side.low = low;
}

/* COUNT elements of a row, where they are the thread's to add: x(j) at place(j). top: their largest. All of a warp call. */
template <int COUNT, typename F, typename G>
INLINE void add(Side &side, F x, G place, real top, bool is_here, const Scale &scale, bool has_label, real label)
{
    real rest = 0, moment = 0;
    const bool is_below = warp_all(!is_here || top < side.max);
    if (!is_below) {
        const real largest = larger(warp_reduce(is_here ? top : -REAL_INFINITY, larger), side.max);
        if (largest != side.max && side.max == side.max)
            rescale(side, largest, scale);
    }
    if (!is_here)
        return;
    if (is_below)
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const real exponent = scale.exponent(x(j), side.low), mass = Scale::mass(exponent);
            rest = j ? rest + mass : mass;
            moment = j ? real_fma(mass, exponent, moment) : mass * exponent;
        }
    if (!is_below || !(moment <= 0)) { /* there are maxima, or exponents that are infinite */
        const real of_max = scale.of_max(side.max, side.low);
        rest = moment = 0;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const real own = x(j), exponent = (own - side.max) * scale.scale + of_max, mass = Scale::mass(exponent);
            const bool is_max = own == side.max || own != own;
            side.maxima += is_max;
            side.first = is_max ? min(place(j), side.first) : side.first;
            rest += is_max ? 0 : mass;
            moment += is_max || !(mass > 0) ? 0 : mass * exponent;
        }
    }
    side.rest += rest;
    side.moment += moment;
    if (has_label && top > label) /* of a likely label few vectors have any */
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            side.above += x(j) > label;
}

/* A row's vectors, and the elements that none covers */
template <typename T> struct Cover {
    const T *row;
    int head, vectors, edges;

    INLINE Cover(const T *row, int vocab, bool has_vectors = true) : row(row)
    {
        head = (int)head_of(row, vocab);
        vectors = has_vectors ? (vocab - head) / WIDTH : 0;
        edges = vocab - vectors * WIDTH;
    }
    INLINE int place(int vector) const { return head + vector * WIDTH; }
    INLINE int edge(int i) const { return i < head || vectors == 0 ? i : i + vectors * WIDTH; }
};

/* Adds vectors of a row, THREADS apart from the one of that number on. */
template <typename T> struct Adder {
    const Cover<T> &cover;
    const Scale &scale;
    real softcap;
    bool is_capped, has_label;
    real label;

    template <int VECTORS> INLINE void add_to(Side &side, const Packed<T> (&loaded)[VECTORS], int v, bool is_here) const
    {
        real top = largest(loaded[0]);
#pragma unroll
        for (int u = 1; u < VECTORS; u++)
            top = larger(top, largest(loaded[u]));
        add<VECTORS * WIDTH>(side, [&](int j) { return counted(at(loaded[j / WIDTH], j % WIDTH), softcap, is_capped); },
                             [&](int j) { return cover.place(v + j / WIDTH * THREADS) + j % WIDTH; },
                             counted(top, softcap, is_capped), is_here, scale, has_label, label);
    }
};

/* Vectors of one side in flight a thread */
enum { AT_ONCE = WIDTH < 8 ? 4 : 2 };

/* This thread's part of a side. Vectors are taken several at once, and one by one where not all threads have as many. */
template <typename T>
INLINE Side side_of(const Cover<T> &cover, const Scale &scale, real softcap, bool is_capped, bool has_label, real label)
{
    Side side = nothing();
    const Adder<T> adder = { cover, scale, softcap, is_capped, has_label, label };
    int v = (int)threadIdx.x;
    const T *from = cover.row + cover.place(v);
#pragma unroll 1
    for (const int last = cover.vectors - AT_ONCE * THREADS + (int)threadIdx.x; v <= last; v += AT_ONCE * THREADS) {
        Packed<T> loaded[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            loaded[u] = load(from + u * THREADS * WIDTH);
        adder.add_to(side, loaded, v, true);
        from += AT_ONCE * THREADS * WIDTH;
    }
#pragma unroll 1
    for (; v - (int)threadIdx.x < cover.vectors; v += THREADS) {
        Packed<T> loaded[1] = {};
        if (v < cover.vectors)
            loaded[0] = load(from);
        adder.add_to(side, loaded, v, v < cover.vectors);
        from += THREADS * WIDTH;
    }
    const int i = (int)threadIdx.x, place = cover.edge(min(i, cover.edges - 1)); /* less than two vectors */
    if (cover.edges > 0) {
        const real edge = counted(to_real(cover.row[place]), softcap, is_capped);
        add<1>(side, [&](int) { return edge; }, [&](int) { return place; }, edge, i < cover.edges, scale, has_label, label);
    }
    return side;
}

/* What the whole row is found to be */
struct Whole {
    real max, sum_exp, log_sum_exp; /* NaN of a row that has an infinite maximum, as of one that has NaN */
    double lse, entropy;
    int top, above;
};

/* One warp calls, with a part of the row in each lane. */
INLINE Whole merged(const Side &part, const Scale &scale)
{
    Whole whole;
    whole.max = warp_reduce(part.max, larger);
    const bool has_max = part.max == whole.max || part.max != part.max;
    const double less = (double)part.low - (double)whole.max * (double)scale.scale; /* exponents are by that too small */
    const real shift = fabs(less) < 1e300 ? (real)less : 0, factor = Scale::mass(shift);
    real rest = part.rest > 0 ? factor * part.rest : 0, moment = rest > 0 ? factor * (part.moment + shift * part.rest) : 0;
    if (!has_max && part.maxima) {
        const real exponent = (part.max - whole.max) * scale.scale, mass = (real)part.maxima * Scale::mass(exponent);
        rest += mass;
        moment += mass > 0 ? mass * exponent : 0;
    }
    const int maxima = warp_sum(has_max ? part.maxima : 0);
    whole.above = warp_sum(part.above);
    whole.top = warp_min(has_max ? part.first : NOWHERE);
    const double others = warp_sum((double)rest), mean = warp_sum((double)moment);
    const bool is_number = safe_abs(whole.max) < REAL_INFINITY;
    whole.sum_exp = is_number ? (real)(others + maxima) : whole.max - whole.max;
    whole.log_sum_exp = (real)(is_number && maxima == 1 ? log1p(others) : log((double)whole.sum_exp));
    whole.lse = whole.max == -REAL_INFINITY
        ? (double)whole.max
        : (double)whole.max * (double)scale.inv_temperature + (double)whole.log_sum_exp;
    whole.entropy = (double)whole.log_sum_exp - (double)Scale::nats((real)(mean / (double)whole.sum_exp));
    return whole;
}

/* A thread's part, of which its warp's maximum is one -> the warp's */
INLINE void put(Side side, Side *warps)
{
    side.rest = warp_sum(side.rest);
    side.moment = warp_sum(side.moment);
    side.maxima = warp_sum(side.maxima);
    side.above = warp_sum(side.above);
    side.first = warp_min(side.first);
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = side;
}

INLINE void write_whole(const Whole &whole, double *numbers, long long *tokens, long long stride)
{
    numbers[0] = whole.lse;
    numbers[stride] = whole.entropy;
    tokens[0] = whole.top < NOWHERE ? whole.top : 0;
    tokens[stride] = whole.above;
}

}
