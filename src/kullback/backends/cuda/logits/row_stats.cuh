/* A row is normalised: its maxima, its Σ exp, and with them the sums from which a kind's follow, or which foresee them. */
#pragma once

#include "cuda/logits/all_reduce.cuh"

namespace kullback {

/* Of Σ exp: below the first masses have underflowed; above the second exponents are rounded by too much. */
#define MIN_SUM_EXP 1e-18f
#define MAX_SUM_EXP (IS_COARSE ? MAX_SUM : 65536.0f)
/* Of a pair of logits' differences */
#define MAX_SPREAD 10.0f
/* In the sweep that sums and writes, gradients have fewer powers: up to this radius what is left out is at most 2e-3 of them, less than
   half an ulp of bfloat16. */
#define LONG_RATIO 0.375f
/* Neighbours that differ by more say that elements are far. */
#define LONG_DIFFERENCE (HAS_FINE_NEAR ? 2.0f : LONG_RATIO)
/* No logit, but all that are masked by the least float lie below it */
#define LOWEST_MAX -1e30f

/* What a row holds, each side's masses measured against a maximum: 2^(x·scale - max·scale), where a scale is
   base_2(inv_temperature) and the second product is rounded. */
struct RowStats {
    float x_max = 0, y_max = 0, x_sum_exp = 0, y_sum_exp = 0;
    float moments[MOMENTS + !MOMENTS] = {}; /* of divergences.py those that are wanted, and what foresees slopes; to base 2 */
    float largest[2 + MOMENTS] = {}; /* of this thread's vector of most mass, which its sums lack (KEEPS_LARGEST) */
#if WANT_FIGURES
    float weighted_exponents = 0; /* Σ of the input's masses times their exponents: this thread's part */
#endif
#if HAS_SMOOTHING
    float exponent_sum = 0; /* Σ of the input's exponents */
#endif
    float spread = 0;      /* `spread_of` a sample of neighbours: the row's, or this thread's (SPREAD_SHARED) */
    float sampled = 0;     /* of how many pairs; 0 where no other rank has some of them */
    float overlap = 0;     /* Σ of the product of what a thread has of either side's masses (OVERLAP_SHARED) */
    float tilted_lse = 0;  /* what sums are taken against (state.py) */
    float correction = 0;  /* of the difference of log-sum-exps; infinite: it is that of the maxima; NaN: of a row that is not in range */
#if HAS_NORMALISERS
    double log_z_diff = 0;
#endif

    /* Else Σ exp are of exp((x - max)·inv_temperature), and nothing else was summed. */
    INLINE bool in_range() const { return correction == correction; }
    INLINE void set_in_range(bool is)
    {
        if (!is)
            correction = REAL_INFINITY - REAL_INFINITY;
    }

    struct MaxExponents {
        float x, y;
    };
    INLINE MaxExponents max_exponents(const Arguments &a) const
    {
        return { mul_rn(x_max, base_2(a.input_inv_temperature)), mul_rn(y_max, base_2(a.target_inv_temperature)) };
    }

    /* x(k), y(k). GUARDED: of logits that may be -inf; of others a guard changes nothing. */
    template <int COUNT, bool GUARDED, typename F, typename G> INLINE void take(F x, G y, const Arguments &a, const MaxExponents &max)
    {
        const float x_scale = base_2(a.input_inv_temperature), y_scale = base_2(a.target_inv_temperature);
        float x_part = 0, y_part = 0, weighted_part = 0, exponent_part = 0; /* for a sum of few parts is more exact */
        float parts[MOMENTS + !MOMENTS];
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const auto add = [=](float &part, float more) { part = k ? part + more : more; };
            const float x_exponent = fmaf(x(k), x_scale, -max.x), y_exponent = fmaf(y(k), y_scale, -max.y);
            const float q = ex2(x_exponent), p = ex2(y_exponent);
            if (INPUT_IS_LOGITS)
                add(x_part, q);
            if (TARGET_IS_LOGITS)
                add(y_part, p);
            if (WANT_FIGURES)
                add(weighted_part, q * x_exponent); /* NaN where an exponent is -inf: found again */
            if (HAS_SMOOTHING)
                add(exponent_part, x_exponent);
#if HAS_LOG_RATIOS
            const float ratio = y_exponent - x_exponent;
            if (HAS_P_LOG_RATIO)
                add(parts[P_LOG_RATIO], p * (GUARDED ? finite_ratio(ratio) : ratio));
            if (HAS_Q_SQUARED)
                add(parts[Q_SQUARED], q * ratio * ratio);
            if (HAS_Q_BOUNDED)
                add(parts[Q_BOUNDED], q * fmaxf(ratio, LEAST_LOG2_RATIO));
            /* NaN if p = 0 < q, so that the row is summed again with guards; to foresee, where either is 0 */
            if (HAS_Q_LOG_RATIO)
                add(parts[Q_LOG_RATIO], q * (FORESEES_CLOSE || !GUARDED || ratio == ratio ? ratio : 0));
#endif
#if HAS_CHERNOFF
            add(parts[CHERNOFF], ex2(fmaf(a.exponent, y_exponent, (1 - a.exponent) * (GUARDED ? finite_ratio(x_exponent) : x_exponent))));
#endif
        }
        const bool is_x_largest = x_part > largest[0], is_y_largest = y_part > largest[1];
        add_part(x_sum_exp, 0, x_part, is_x_largest);
        add_part(y_sum_exp, 1, y_part, is_y_largest);
#if WANT_FIGURES
        weighted_exponents += weighted_part;
#endif
#if HAS_SMOOTHING
        exponent_sum += exponent_part;
#endif
#pragma unroll
        for (int m = 0; m < MOMENTS; m++)
            add_part(moments[m], 2 + m, parts[m], m == P_LOG_RATIO && HAS_P_LOG_RATIO ? is_y_largest : is_x_largest);
    }

private:
    /* What is no number shows in the sum of both. */
    INLINE void add_part(float &sum, int place, float part, bool is_largest)
    {
        sum += KEEPS_LARGEST && is_largest ? largest[place] : part;
        if (KEEPS_LARGEST && is_largest)
            largest[place] = part;
    }
};

/* What lanes' and warps' parts are added in */
template <bool IS_WIDE> struct SumOf {
    typedef float Type;
};
template <> struct SumOf<true> {
    typedef double Type;
};

/* Four numbers go at once, of these: where moments are summed, only rows that seem close ask for the sample. */
enum {
    SPREAD_SHARED = SAMPLES_SPREAD && MOMENTS + HAS_PEERS < 2,
    OVERLAP_SHARED = SPREAD_SHARED && !SUMS_FROM_MOMENTS && MOMENTS + HAS_PEERS == 0
};

INLINE RowStats all_reduced(const Arguments &a, const Pipeline &pipeline, RowGroup &group, RowStats stats)
{
    enum { SPREAD = 2 + MOMENTS, SAMPLED = SPREAD + SPREAD_SHARED, OVERLAP = SAMPLED + (SPREAD_SHARED && HAS_PEERS) };
    typedef SumOf<KEEPS_LARGEST>::Type Sum;
    Sum values[OVERLAP + OVERLAP_SHARED];
    const auto whole = [&](float sum, int place) { return KEEPS_LARGEST ? (Sum)sum + (Sum)stats.largest[place] : (Sum)sum; };
    values[0] = whole(stats.x_sum_exp, 0);
    values[1] = whole(stats.y_sum_exp, 1);
#pragma unroll
    for (int m = 0; m < MOMENTS; m++)
        values[2 + m] = whole(stats.moments[m], 2 + m);
    if (SPREAD_SHARED)
        values[SPREAD] = stats.spread;
    if (SPREAD_SHARED && HAS_PEERS)
        values[SAMPLED] = stats.sampled;
    if (OVERLAP_SHARED)
        values[OVERLAP] = stats.x_sum_exp * stats.y_sum_exp;
    row_all_reduce(a, pipeline, group, values, Add());
    if (SPREAD_SHARED)
        stats.spread = (float)values[SPREAD];
    if (SPREAD_SHARED && HAS_PEERS)
        stats.sampled = (float)values[SAMPLED];
    if (OVERLAP_SHARED)
        stats.overlap = (float)values[OVERLAP];
    stats.x_sum_exp = (float)values[0];
    stats.y_sum_exp = (float)values[1];
#pragma unroll
    for (int m = 0; m < MOMENTS; m++)
        stats.moments[m] = (float)values[2 + m];
    return stats;
}

#if WANT_FIGURES
/* A warp's part of Σ q·exponent. Nothing of the row waits for it: all parts are added when all rows have been read. */
INLINE void keep_exponents(const Arguments &a, unsigned row, const RowGroup &group, float weighted_exponents)
{
    const float part = warp_sum(weighted_exponents);
    if (threadIdx.x % LOGICAL_WARP == 0)
        a.exponents[((long long)row * group.cluster + cta_rank()) * WARPS + group.thread / LOGICAL_WARP] = part;
}
#endif

INLINE float max_margin(float inv_temperature)
{
    return fminf(MAX_MARGIN, in_range_ratio_or_zero(MAX_MARGIN, opaque(inv_temperature)));
}

/* In nats: of longer exponents floats keep too little beside a maximum. A token that is forced has such. */
#define MAX_EXPONENT 65536.0f
INLINE bool is_max(float x) { return x > LOWEST_MAX && x < REAL_INFINITY; }

/* Whether it is so of each side that is logits */
INLINE bool of_each_side(bool x, bool y) { return warp_all((!INPUT_IS_LOGITS || x) && (!TARGET_IS_LOGITS || y)); }

/* Threads that a sample has elements of, in this rank's slice */
INLINE int sampled_threads(const Slice &slice, const RowGroup &group)
{
    return min(slice.body / WIDTH, (int)group.cluster * THREADS_PER_ROW);
}

/* Neighbours of which `spread` is */
INLINE int sampled_pairs(const Slice &slice, const RowGroup &group) { return sampled_threads(slice, group) * (SAMPLE_WIDTH / 2); }

/* Of the difference of two neighbours' log-ratios: its size, as far as that says something; where moments are summed, whether it is
   long, or of tokens that both rows mask. */
INLINE float spread_of(const Arguments &a, float difference)
{
    if (SUMS_FROM_MOMENTS)
        return fabsf(difference) * a.input_inv_temperature < LONG_DIFFERENCE ? 0 : 1;
    return fminf(fabsf(difference), MAX_SPREAD);
}

/* Whether at most one in 32 of a sample's neighbours are apart: hardly an element of the row is far then. */
INLINE bool are_few_apart(const Slice &slice, const Pipeline &pipeline, RowGroup &group, const RowStats &stats)
{
    const float sampled = (float)sampled_pairs(slice, group);
    return SPREAD_SHARED ? warp_all(32 * stats.spread <= (HAS_PEERS ? stats.sampled : sampled))
                         : at_most_one_in(32, slice.a, pipeline, group, stats.spread, sampled);
}

/* The whole row's, against these maxima; FIRST: as of `each_vector`; GUARDED: as of `RowStats::take` */
template <bool FIRST, bool GUARDED>
INLINE RowStats row_stats(const Slice &slice, Pipeline &pipeline, RowGroup &group, RowMax row_max)
{
    const Arguments &a = slice.a;
    RowStats stats;
    stats.x_max = row_max.x;
    stats.y_max = row_max.y;
    const RowStats::MaxExponents max = stats.max_exponents(a);
    each_vector<FIRST, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
        stats.take<WIDTH, GUARDED>([&](int k) { return input_of(a, at(x, k)); }, [&](int k) { return target_of(a, at(y, k)); }, a, max);
    });
    each_edge(slice, group, [&](int i) {
        const float x = input_of(a, to_real(slice.x()[i])), y = target_of(a, to_real(slice.y()[i]));
        stats.take<1, GUARDED>([=](int) { return x; }, [=](int) { return y; }, a, max);
    });
    if (SAMPLES_SPREAD) {
        float before = 0;
        each_first(slice, pipeline, group, [&](float x, float y, int k) {
            const float apart = target_of(a, y) - input_of(a, x);
            stats.spread += k % 2 ? spread_of(a, apart - before) : 0;
            before = apart;
        });
        if (HAS_PEERS && is_first_thread(group))
            stats.sampled = (float)sampled_pairs(slice, group);
    }
#if WANT_FIGURES
    if (!warp_all(stats.weighted_exponents == stats.weighted_exponents)) { /* of logits that are -inf */
        double weighted = 0;
        const auto see = [&](float x) {
            const float exponent = finite_ratio(fmaf(input_of(a, x), base_2(a.input_inv_temperature), -max.x));
            weighted += (double)(ex2(exponent) * exponent);
        };
        /* by vectors, of which each thread has those that it had: other warps keep what they found */
        each_vector<false, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &, long long, int) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                see(at(x, k));
        });
        each_edge(slice, group, [&](int i) { see(to_real(slice.x()[i])); });
        stats.weighted_exponents = (float)weighted;
    }
    keep_exponents(a, slice.row, group, stats.weighted_exponents);
#endif
    stats = all_reduced(a, pipeline, group, stats);
#if HAS_SMOOTHING
    stats.exponent_sum = all_reduced(a, pipeline, group, stats.exponent_sum);
#endif
    return stats;
}

/* What the row's maxima may be: the largest of a sample, and so much that most rows have little above. */
struct MaxEstimate {
    RowMax row_max = { LOWEST_MAX, LOWEST_MAX };

    INLINE void see(const Arguments &a, X x, Y y)
    {
        row_max = { fmaxf(row_max.x, input_of(a, to_real(x))), fmaxf(row_max.y, target_of(a, to_real(y))) };
    }
    INLINE RowMax raised(const Arguments &a) const
    {
        return { row_max.x + max_margin(a.input_inv_temperature), row_max.y + max_margin(a.target_inv_temperature) };
    }
};

/* The index of `part` of so many among elements, seldom two at one phase of a mask that repeats itself */
INLINE unsigned sample_index(unsigned count, unsigned part, unsigned parts) { return min((count / parts + 1) * part, count - 1); }

/* Of some rows at once, each eight lanes' */
struct Sample {
    enum { PARTS = 8, ROWS = 32 / PARTS };
    X x;
    Y y;
#if HAS_AUXILIARY
    Label label;
    long long token = -1; /* of the row that is taken next: known by then, it is not waited for */
#endif

    INLINE void take(const Arguments &a, unsigned row)
    {
#if HAS_AUXILIARY
        label = loaded_label(a, row, token);
#endif
        const unsigned index = sample_index(a.vocab, threadIdx.x % PARTS, PARTS);
        x = (a.x + row * a.x_stride)[index];
        y = (a.y + row * a.y_stride)[index];
    }
    INLINE RowMax estimated_max(const Arguments &a) const
    {
        MaxEstimate estimate;
        estimate.see(a, x, y);
        RowMax &row_max = estimate.row_max;
#pragma unroll
        for (int step = PARTS / 2; step; step /= 2)
            row_max = { fmaxf(row_max.x, shfl_xor(row_max.x, step)), fmaxf(row_max.y, shfl_xor(row_max.y, step)) };
        return estimate.raised(a);
    }
};

/* Of one row: by what all its threads read, for then none waits for another lane */
INLINE RowMax estimated_max(const Slice &slice, const Pipeline &pipeline)
{
    const Arguments &a = slice.a;
    MaxEstimate estimate;
    const auto see = [&](const X *x, const Y *y, unsigned count) {
#pragma unroll
        for (unsigned i = 0; i < 4; i++)
            estimate.see(a, x[sample_index(count, i, 4)], y[sample_index(count, i, 4)]);
    };
#if COPIES_ROWS
    if (slice.body) /* apart, so that the compiler knows the pointers' space */
        see(copied_x(pipeline), copied_y(pipeline), (unsigned)slice.body);
    else
#endif
        see(slice.x(), slice.y(), a.vocab);
    return estimate.raised(a);
}

INLINE RowMax exact_max(const Slice &slice, Pipeline &pipeline, RowGroup &group)
{
    const Arguments &a = slice.a;
    RowMax row_max = { -REAL_INFINITY, -REAL_INFINITY };
    const auto see = [&](float x, float y) {
        row_max = { max_nan(row_max.x, input_of(a, x)), max_nan(row_max.y, target_of(a, y)) };
    };
    each_vector<false, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            see(at(x, k), at(y, k));
    });
    each_edge(slice, group, [&](int i) { see(to_real(slice.x()[i]), to_real(slice.y()[i])); });
    return all_reduced(a, pipeline, group, row_max);
}

/* Whether all are numbers, as they are of logits that are. What a guard serves makes one of them NaN, or infinite. */
INLINE bool has_finite_moments(const RowStats &stats)
{
    bool are_finite = true;
#pragma unroll
    for (int m = 0; m < MOMENTS; m++)
        are_finite &= fabsf(stats.moments[m]) < REAL_INFINITY;
    return warp_all(are_finite);
}

INLINE bool are_in_range(const Arguments &a, const RowStats &stats)
{
    const auto is_served = [](float sum_exp, float exponent) {
        return sum_exp > MIN_SUM_EXP && sum_exp < MAX_SUM_EXP && fabsf(exponent) < MAX_EXPONENT;
    };
    return of_each_side(is_served(stats.x_sum_exp, stats.x_max * a.input_inv_temperature),
                        is_served(stats.y_sum_exp, stats.y_max * a.target_inv_temperature));
}

/* The whole row's statistics: of finite logits, -inf among them, in one sweep against estimated maxima; in three where these
   are far off. Of rows that hold +inf, NaN, longer exponents, or nothing above LOWEST_MAX, sums are of
   exp((x - max)·inv_temperature), moments are not summed, and the result is false. */
INLINE bool normalise(const Slice &slice, Pipeline &pipeline, RowGroup &group, RowStats &stats)
{
    const Arguments &a = slice.a;
#if RESIDENT
    wait_tile(pipeline);
    RowMax row_max = pipeline.header()->row_max;
#else
    RowMax row_max = IS_EXACT ? exact_max(slice, pipeline, group) : estimated_max(slice, pipeline);
#endif
    group.finite = false;
    if (HAS_GUARDS && !group.guards) {
        stats = row_stats<true, false>(slice, pipeline, group, row_max);
        if (are_in_range(a, stats)) {
            group.finite = has_finite_moments(stats);
            group.guards = !group.finite;
            if (group.guards)
                stats = row_stats<false, true>(slice, pipeline, group, row_max);
            return true;
        }
    } else {
        stats = row_stats<true, true>(slice, pipeline, group, row_max);
        if (are_in_range(a, stats))
            return true;
    }
    if (!IS_EXACT) {
        row_max = exact_max(slice, pipeline, group);
        if (of_each_side(is_max(row_max.x), is_max(row_max.y))) {
            stats = row_stats<false, true>(slice, pipeline, group, row_max);
            if (SUMS_FROM_MOMENTS) /* a maximum says nothing of the other tokens: nothing is foreseen of them */
                stats.spread = REAL_INFINITY;
            if (are_in_range(a, stats))
                return true;
        }
    }
    double sums[3] = {}, weighted = 0; /* Σ exp of x and of y, Σ of exponents */
    each_element<false>(slice, pipeline, group, [&](float x, float y, int) {
        const float exponent = (input_of(a, x) - row_max.x) * a.input_inv_temperature, q = safe_exp(exponent);
        sums[0] += (double)q;
        sums[1] += (double)safe_exp((target_of(a, y) - row_max.y) * a.target_inv_temperature);
        if (HAS_SMOOTHING)
            sums[2] += (double)exponent;
        if (WANT_FIGURES)
            weighted += (double)(q * finite_ratio(exponent));
    });
    row_all_reduce(a, pipeline, group, sums, Add());
    stats.x_max = row_max.x;
    stats.y_max = row_max.y;
    stats.x_sum_exp = (float)sums[0];
    stats.y_sum_exp = (float)sums[1];
#if HAS_SMOOTHING
    stats.exponent_sum = (float)sums[2];
#endif
#if WANT_FIGURES
    keep_exponents(a, slice.row, group, (float)weighted);
#endif
    return false;
}

INLINE RowStats opaque(RowStats stats)
{
    stats.x_max = opaque(stats.x_max);
    stats.y_max = opaque(stats.y_max);
    stats.x_sum_exp = opaque(stats.x_sum_exp);
    stats.y_sum_exp = opaque(stats.y_sum_exp);
    return stats;
}

}
