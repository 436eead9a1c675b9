/* Rows that are near or close: an element's term and slope are polynomials of its log-ratio (near.py), which lose nothing however
   small they are. Of kinds that have slopes and no moments rows are summed so, and the few elements beyond the polynomials' radius
   take the stable formula. */
#pragma once

#include "cuda/logits/fast.cuh"
#include "cuda/logits/log_ratio.cuh"

namespace kullback {

#if HAS_NEAR
/* An element's term over √(p·q); with a corner negative where q is more than p */
template <bool NARROW> INLINE float term_over_root(const Arguments &a, float r)
{
    enum { TERMS = NARROW ? NARROW_TERMS : NEAR_TERMS };
    const float sum = polynomial<TERMS, NEAR_TERM_STEP>([&](int k) { return near_factor<NARROW>(a, k); }, r);
    return sum * (HAS_CORNER ? r : r * r);
}

/* d_log_q / q, less what is predicted, both times SLOPE_FACTOR: slopes of close rows would be short for halves. With a corner as
   a step; `slope_scale` makes it what it was. */
template <bool NARROW> INLINE float cached_slope_of(const Arguments &a, float r, float predicted)
{
    if (HAS_CORNER)
        return fast_step(r);
    enum { TERMS = NARROW ? NARROW_SLOPE_TERMS : NEAR_SLOPE_TERMS };
    float sum = near_slope_factor<NARROW>(a, TERMS - 1);
#pragma unroll
    for (int k = TERMS - 1 - NEAR_SLOPE_STEP; k >= 1; k -= NEAR_SLOPE_STEP) /* of a step of 2 even powers, and the first */
        sum = fmaf(sum, NEAR_SLOPE_STEP == 2 ? r * r : r, near_slope_factor<NARROW>(a, k));
    return fmaf(fmaf(sum, r, near_slope_factor<NARROW>(a, 0)), r, -predicted);
}
#endif

#if HAS_NEAR && !SUMS_FROM_MOMENTS
/* A row whose sum is less has slopes that are too short for halves even so; with a corner, a sure token may be nearer to the tie
   than its normaliser is exact. */
#define LEAST_CACHED_SUM (HAS_CORNER ? 5e-5f : 1e-6f)

INLINE SlopeScale slope_scale(const Arguments &a, float predicted)
{
    const float factor = HAS_CORNER ? near_slope_factor<false>(a, 0) : 1 / SLOPE_FACTOR;
    return { factor, HAS_CORNER ? -0.5f * factor : predicted };
}

/* Beyond which radius a row has so few tokens that these may be taken one by one */
enum FewBeyond { NARROW_REACH, WIDE_REACH, NO_REACH };

/* By the first tokens of each thread's */
INLINE FewBeyond reach_of(const Slice &slice, const Pipeline &pipeline, RowGroup &group, const RowStats &stats)
{
    const Arguments &a = slice.a;
    const float inv_temperature = a.input_inv_temperature; /* of both */
    const float log_z_diff = LN2 * (log2_z(stats.y_max, stats.y_sum_exp, inv_temperature)
                                    - log2_z(stats.x_max, stats.x_sum_exp, inv_temperature));
    float counts[2 + HAS_PEERS] = {}; /* beyond either radius; of how many */
    each_first(slice, pipeline, group, [&](float x, float y, int) {
        const float r = fmaf(target_of(a, y) - input_of(a, x), inv_temperature, -log_z_diff); /* a rounding is nothing here */
        counts[0] += fabsf(r) < NARROW_RADIUS ? 0 : 1;
        counts[1] += fabsf(r) < NEAR_RADIUS ? 0 : 1;
    });
    float sampled = (float)(sampled_threads(slice, group) * SAMPLE_WIDTH);
#if HAS_PEERS
    counts[2] = is_first_thread(group) ? sampled : 0;
#endif
    row_all_reduce(a, pipeline, group, counts, Add());
#if HAS_PEERS
    sampled = counts[2]; /* all ranks decide alike */
#endif
    if (NARROW_TERMS && warp_all(counts[0] <= sampled / 1024)) /* shorter polynomials save less than more tokens cost */
        return NARROW_REACH;
    return warp_all(counts[1] <= sampled / 160) ? WIDE_REACH : NO_REACH;
}

/* A thread's part of a row that is near */
struct NearSums {
    float slope;        /* Σ q · what is cached */
    float near;         /* Σ term, but for the factor that roots lack; */
    float signed_near;  /* with a corner also of terms that have the sign of p - q */
    float far, excess;  /* of elements that are far: Σ term, Σ q - p */
};

/* The row's sums; slopes are cached, if they are to be, less what is predicted. */
template <bool NARROW>
INLINE Sums sum_near(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, float predicted)
{
    const Arguments &a = slice.a;
    const float radius = NARROW ? NARROW_RADIUS : NEAR_RADIUS;
    const LogRatio log_ratio(a, opaque(stats));
    const Row row = row_constants<FAST>(a, stats, {});
    const SlopeScale scale = slope_scale(a, predicted);
    NearSums sums = {};
    const auto mass_of = [&](float x) {
        return fast_logit_mass(x, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
    };
    const auto add = [&](NearSums &sums, float x, float y, float r, float &mass, float &cached) {
        const float root = log_ratio.root(x, y);
        mass = mass_of(x);
        cached = cached_slope_of<NARROW>(a, r, SLOPE_FACTOR * predicted);
        sums.slope = fmaf(mass, cached, sums.slope);
        if (HAS_CORNER) {
            const float term = root * term_over_root<NARROW>(a, r);
            sums.near += fabsf(term);
            sums.signed_near += term;
        } else {
            sums.near = fmaf(root, term_over_root<NARROW>(a, r), sums.near);
        }
    };
    const auto add_far = [&](NearSums &sums, float x, float y, const Row &row, float &mass, float &cached) {
        const Element e = stable_element(x, y, row, a.parameter);
        const float own = input_mass(row, x);
        mass = mass_of(x);
        cached = own > SMALLEST_NORMAL ? (e.d_log_q / own - scale.offset) / scale.factor : 0;
        sums.slope = fmaf(mass, cached, sums.slope);
        sums.far += e.term;
        sums.excess += e.q_minus_p;
    };
    each_deferring<false, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int address) {
        float masses[WIDTH], cached[WIDTH], longest = 0;
        NearSums more = sums;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float own = input_of(a, at(x, k)), other = target_of(a, at(y, k)), r = log_ratio.of(own, other);
            longest = max_nan(longest, fabsf(r));
            add(more, own, other, r, masses[k], cached[k]);
            masses[k] *= INPUT_IS_CAPPED ? softcap_grad(own, a.input_softcap) : 1;
        }
        const bool are_near = longest < radius;
        if (are_near)
            sums = more;
#if CACHES_SLOPES
        if (are_near)
            cache_slopes(address, masses, cached);
#endif
        return are_near;
    }, [&](float x, float y, int i, int on_chip, const Row &stable_row) {
        const float own = input_of(a, x), other = target_of(a, y), r = log_ratio.of(own, other);
        float mass, cached;
        if (fabsf(r) < radius)
            add(sums, own, other, r, mass, cached);
        else
            add_far(sums, own, other, stable_row, mass, cached);
#if CACHES_SLOPES
        if (i >= slice.head && i < slice.head + slice.body)
            cache_slope(on_chip, INPUT_IS_CAPPED ? mass * softcap_grad(own, a.input_softcap) : mass, cached);
#endif
    }, [&] { return row_constants<STABLE>(a, opaque(stats), {}); });
    const RowStats again = opaque(stats);
    const float mean = in_range_ratio_or_zero(sums.slope, mass_sum(again.x_max, again.x_sum_exp, a.input_inv_temperature));
    const float excess = HAS_CORNER ? fmaf(2 * log_ratio.rest / scale.factor, sums.signed_near, sums.excess) : 0;
    float values[] = { mean, fmaf(log_ratio.rest, sums.near, sums.far), excess };
    row_all_reduce(a, pipeline, group, values, Add());
    Sums whole;
    whole.d_log_q = values[1] == 0 ? 0 : fmaf(scale.factor, values[0], scale.offset);
    whole.q_minus_p = values[2];
    whole.term = HAS_CORNER ? without_excess(values[1], whole.d_log_q, values[2]) : values[1];
    whole.d_log_p = whole.term - whole.d_log_q; /* Euler's */
    return whole;
}
#endif

}
