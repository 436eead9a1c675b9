/* Rows that are close, by power series in the log-ratio (series.py). */
#pragma once

#include "cuda/logits/log_ratio.cuh"
#include "cuda/logits/sure.cuh"

namespace kullback {

#if HAS_SERIES
/* Up to LONG_RATIO; of a term from the 2nd power on */
#define TERMS_WHILE_WRITING 5

/* Of a row that is close, the elements whose log-ratio r is below SERIES_RADIUS: powers of r, times √(p·q). Where temperatures
   differ, the series does not reach the parameter, or the sums are of a tilted distribution, no element is near. */
struct Series : LogRatio {
    INLINE Series(const Arguments &a, const RowStats &stats)
        : LogRatio(a, stats)
    {
        if (!(has_one_temperature(a) && term_factor(a, 2) != 0 && stats.tilted_lse == 0))
            log_z_diff = REAL_INFINITY;
    }
    static INLINE bool is_near(float ratio) { return fabsf(ratio) < (SUMS_WHILE_WRITING ? LONG_RATIO : SERIES_RADIUS); }

    /* Whether elements that are not near are few enough to be taken one by one, by a sample of what this warp has */
    INLINE bool serves(const Slice &slice, const Pipeline &pipeline, const RowGroup &group) const
    {
        float others = 0;
        each_first(slice, pipeline, group, [&](float x, float y, int) {
            others += is_near(of(input_of(slice.a, x), target_of(slice.a, y))) ? 0 : 1;
        });
        return warp_all(warp_sum(others) <= SAMPLE_WIDTH / 2); /* of 32 · SAMPLE_WIDTH */
    }
};

/* Σ √(p·q) · r^k */
struct PowerSums {
    float sum[SERIES_TERMS] = {};

    INLINE void add(float root, float r)
    {
        const float square = r * r;
        float odd = root * r;
#pragma unroll
        for (int k = 0; k < SERIES_TERMS; k += 2) {
            sum[k] += odd;
            if (k + 1 < SERIES_TERMS)
                sum[k + 1] = fmaf(odd, r, sum[k + 1]);
            odd *= square;
        }
    }
    INLINE void add_to(Sums &sums, const Arguments &a, float rest) const
    {
        float term = 0, difference = 0, q_minus_p = 0, factor = -1; /* of -2·sinh(r/2) */
#pragma unroll
        for (int k = SERIES_TERMS; k >= 1; k--) {
            term += term_factor(a, k) * sum[k - 1];
            difference += difference_factor(a, k) * sum[k - 1];
        }
#pragma unroll
        for (int k = 1; k <= SERIES_TERMS; k += 2) {
            q_minus_p += factor * sum[k - 1];
            factor /= 4 * (k + 1) * (k + 2);
        }
        sums.term += rest * term;
        sums.d_log_p += 0.5f * rest * (term - difference); /* their sum is term: Euler's */
        sums.d_log_q += 0.5f * rest * (term + difference);
        sums.q_minus_p += rest * q_minus_p;
    }
};

/* As `thread_sums` */
INLINE Sums thread_sums_by_series(const Slice &slice, Pipeline &pipeline, const RowGroup &group, const Series &series,
                                  const RowStats &stats)
{
    const Arguments &a = slice.a;
    PowerSums powers;
    Sums sums;
    each_deferring<false, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
        bool all = true;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float q = input_of(a, at(x, k)), p = target_of(a, at(y, k)), r = series.of(q, p);
            powers.add(series.root(q, p), series.is_near(r) ? r : 0);
            all &= series.is_near(r);
        }
        return all;
    }, [&](float x, float y, int i, int, const Row &row) {
        const float q = input_of(a, x), p = target_of(a, y);
        const bool is_added = series.is_near(series.of(q, p)) && i >= slice.head && i < slice.head + slice.body;
        if (!is_added)
            add<STABLE>(sums, stable_element(q, p, row, a.parameter));
    }, [&] { return row_constants<STABLE>(a, opaque(stats), {}); });
    powers.add_to(sums, a, series.rest);
    return sums;
}

template <int COUNT> INLINE float polynomial(const float (&factors)[COUNT], float r)
{
    return polynomial<COUNT, 1>([&](int k) { return factors[k]; }, r);
}

/* As `write_gradients` */
template <bool LAST, bool SURE>
INLINE void write_gradients_by_series(RowTerms<SURE> &found, const Slice &slice, Pipeline &pipeline, RowGroup &group,
                                      const Series &series, const RowStats &stats, const Sums &sums, GradOut grad_out)
{
    const Arguments &a = slice.a;
    const auto stable = [&](float q, float p) {
        return element<STABLE>(a, q, p, row_constants<STABLE>(a, opaque(stats), sums)).input * grad_out.input;
    };
    if (!IS_COARSE) /* now: there are no registers for it later */
        differentiate_label(a, pipeline, group, stable, grad_out);
    float term_factors[SUMS_WHILE_WRITING ? TERMS_WHILE_WRITING : SERIES_TERMS - 1]; /* from the 2nd power on */
#pragma unroll
    for (int k = 0; k < (int)(sizeof term_factors / sizeof *term_factors); k++)
        term_factors[k] = term_factor(a, k + 2);
    /* Over √(p·q), as powers of r from the 0th on: d_log_q - q·Σ d_log_q, and the same of p. 16-bit gradients need fewer. */
    enum { TERMS = SUMS_WHILE_WRITING ? TERMS_WHILE_WRITING : IS_COARSE ? 6 : SERIES_TERMS + 1 };
    float input_factor[TERMS], target_factor[TERMS], exponential = 1; /* of e^(±r/2) */
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        const float term = k ? term_factor(a, k) : 0, difference = k ? difference_factor(a, k) : 0;
        const float of_q = 0.5f * (term + difference), of_p = 0.5f * (term - difference);
        input_factor[k] = series.rest * grad_out.input * (of_q - sums.d_log_q * (k % 2 ? -exponential : exponential));
        target_factor[k] = series.rest * grad_out.target * (of_p - sums.d_log_p * exponential);
        exponential /= 2 * (k + 1);
    }
    if (IS_COARSE)
        differentiate_label(a, pipeline, group, [&](float q, float p) {
            const float r = series.of(q, p);
            return series.is_near(r) ? series.root(q, p) * polynomial(input_factor, r) : stable(q, p);
        }, grad_out);
    write_deferring<true, LAST>(slice, pipeline, group, found, [&](float x, float y, DX &input, DY &target, RowTerms<SURE> &part) {
        const float q = input_of(a, x), p = target_of(a, y), r = series.of(q, p), root = series.root(q, p);
        const float of_q = root * polynomial(input_factor, r), of_p = root * polynomial(target_factor, r);
        part.light = fmaf(root * (r * r), polynomial(term_factors, r), part.light);
        part.see(of_q, of_p);
        input = grad_out.of_input(a, of_q, q);
        target = rounded<DY>(TARGET_IS_CAPPED ? of_p * softcap_grad(p, a.target_softcap) : of_p);
        return series.is_near(r);
    }, [&](float x, float y, const Row &row, DX &input, DY &target) {
        const Element e = differentiate<STABLE>(a, x, y, row, grad_out, input, target);
        found.heavy += e.term;
        found.see(e, grad_out);
    }, [&] { return row_constants<STABLE>(a, opaque(stats), sums); });
    found.light *= series.rest;
    if constexpr (SURE)
        correct_gradients(slice, pipeline, group, stats, sums, found, grad_out, [&](float q, float p) {
            const float r = series.of(q, p), root = series.root(q, p);
            if (series.is_near(r))
                return Gradients(root * polynomial(input_factor, r), root * polynomial(target_factor, r));
            return Gradients(element<STABLE>(a, q, p, row_constants<STABLE>(a, opaque(stats), sums)), grad_out);
        });
}
#endif

}
