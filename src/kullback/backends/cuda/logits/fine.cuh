/* Rows whose gradients are not coarse: an element is found by its log-ratio, out to a radius. Beyond, nothing cancels in the fast formula.
   Kinds that are the mean of a log-ratio have that and one mass, others two polynomials (near.py). */
#pragma once

#include "cuda/logits/log_ratio.cuh"
#include "cuda/logits/sure.cuh"

namespace kullback {

#if HAS_NEAR_ELEMENT
/* Whether `near_element` serves an element of a row whose temperatures are equal; or `short_element` */
template <bool SHORT = false> INLINE bool is_near(const Row &row, float q, float p)
{
    const auto ratio_of = SHORT ? short_logit_ratio : near_logit_ratio;
    const float ratio = ratio_of(p, row.target_max, row.target_inv_temperature, q, row.input_max, row.input_inv_temperature,
                                 row.log_z_diff_high, row.log_z_diff_low);
    return fabsf(ratio) < NEAR_ELEMENT_RADIUS;
}

/* In place of the stable formula, where temperatures are equal. What masses sum to beside 1 is in Σ d_log_q, and so taken off
   gradients. */
struct FineElements {
    Row row, near_row;
    float mass_factor; /* 1 - Σ d_log_q, where masses of near elements are to be multiplied by it */
    real parameter;

    INLINE FineElements(const Arguments &a, const RowStats &stats, const Sums &sums)
        : row(row_constants<STABLE>(a, stats, sums)), near_row(row), mass_factor(SUM_IN_MASSES ? 1 - sums.d_log_q : 1),
          parameter(a.parameter)
    {
        near_row.input_inv_sum_exp *= mass_factor;
        near_row.target_inv_sum_exp *= mass_factor;
        near_row.input_grad_sum /= mass_factor;
    }
    INLINE bool serve(const Arguments &a) const { return warp_all(has_one_temperature(a) && mass_factor > 1e-3f); }
    INLINE bool is_near(float q, float p) const { return kullback::is_near(row, q, p); }
    /* One side's, which is found anyway */
    INLINE float mass(float q, float p) const { return HAS_P_LOG_RATIO ? target_mass(row, p) : input_mass(row, q); }
    INLINE Element near(float q, float p) const
    {
        Element e = near_element(q, p, near_row, parameter);
        e.target *= 1 / mass_factor;
        return e;
    }
    /* Of an element that may be far, what sums are made of, or gradients. Beyond the radius nothing cancels in the fast formula. Both are
       found, for then no element waits for another's branch. */
    enum { ANY_MODE = FAST }; /* as which `each_of` takes elements of a vector */
    template <bool OF_SUMS> INLINE Element any(float q, float p) const
    {
        const bool chosen = is_near(q, p);
        const Element a = near(q, p), b = fast_element(q, p, row, parameter);
        const auto choose = [&](float near, float far) { return chosen ? opaque(near) : opaque(far); };
        Element e = {};
        if (OF_SUMS) {
            e.term = choose(a.term, b.term);
            e.d_log_q = choose(a.d_log_q, b.d_log_q);
        } else {
            e.input = WANT_INPUT ? choose(a.input, b.input) : 0;
            e.target = WANT_TARGET ? choose(a.target, b.target) : 0;
        }
        return e;
    }
};
#elif HAS_FINE && HAS_CORNER
/* The stable formula, of which derivatives are masses with signs. */
struct FineElements {
    const Arguments &a;
    Row row;

    INLINE FineElements(const Arguments &a, const RowStats &stats, const Sums &sums) : a(a), row(row_constants<STABLE>(a, stats, sums)) {}
    INLINE bool serve(const Arguments &) const { return true; }
    INLINE bool is_near(float, float) const { return true; }
    INLINE float mass(float q, float) const { return input_mass(row, q); }
    INLINE Element near(float q, float p) const { return stable_element(q, p, row, a.parameter); }
    enum { ANY_MODE = STABLE };
    template <bool> INLINE Element any(float q, float p) const { return near(q, p); }
};
#elif HAS_FINE
/* The same by two polynomials over √(p·q). d_log_q + d_log_p is the term: Euler's. Elements that are far keep the stable formula. */
struct FineElements {
    const Arguments &a;
    Row row;
    LogRatio log_ratio;

    INLINE FineElements(const Arguments &a, const RowStats &stats, const Sums &sums)
        : a(a), row(row_constants<STABLE>(a, stats, sums)), log_ratio(a, stats)
    {
    }
    INLINE bool serve(const Arguments &) const { return warp_all(has_one_temperature(a) && row.tilted_lse == 0); }
    INLINE bool is_near(float q, float p) const { return fabsf(log_ratio.of(q, p)) < FINE_RADIUS; }
    INLINE float mass(float q, float) const { return input_mass(row, q); }
    INLINE Element near(float q, float p) const
    {
        const float r = log_ratio.of(q, p), product = log_ratio.rest * log_ratio.root(q, p) * r, square = r * r;
        const float difference = product * polynomial<FINE_DIFFERENCES, FINE_DIFFERENCE_STEP>([&](int k) {
            return fine_difference_factor(a, k);
        }, r);
        Element e;
        e.term = product * (r * polynomial<FINE_TERMS, FINE_TERM_STEP>([&](int k) { return fine_term_factor(a, k); }, r));
        e.d_log_q = 0.5f * (e.term + difference);
        e.d_log_p = 0.5f * (e.term - difference);
        e.input = fmaf(-input_mass(row, q), row.input_grad_sum, e.d_log_q);
        e.target = fmaf(-target_mass(row, p), row.target_grad_sum, e.d_log_p);
        float sinh = 1 / 92897280.0f; /* 2·sinh(r/2) / r */
        sinh = fmaf(sinh, square, 1 / 322560.0f);
        sinh = fmaf(sinh, square, 1 / 1920.0f);
        sinh = fmaf(sinh, square, 1 / 24.0f);
        e.q_minus_p = -product * fmaf(sinh, square, 1);
        return e;
    }
    enum { ANY_MODE = STABLE };
    template <bool> INLINE Element any(float q, float p) const { return stable_element(q, p, row, a.parameter); }
};
#endif

#if HAS_FINE
/* Whether hardly an element is far, by a sample of what this warp has: to find a marked one takes as long as four others. */
INLINE bool are_near(const FineElements &elements, const Slice &slice, const Pipeline &pipeline, const RowGroup &group)
{
    if (HAS_CORNER)
        return true;
    enum { MOST = HAS_NEAR_ELEMENT ? 0 : SAMPLE_WIDTH / 2 }; /* of 32 · SAMPLE_WIDTH */
    float far = 0;
    each_first(slice, pipeline, group, [&](float x, float y, int) {
        far += elements.is_near(input_of(slice.a, x), target_of(slice.a, y)) ? 0 : 1;
    });
    return warp_all(warp_sum(far) <= MOST);
}

/* A thread's. of_q: d_log_q, or by polynomials d_log_q - d_log_p, whose sign is all that changes when p and q are exchanged.
   checked: squares of masses; with a corner, masses of tokens that may have the other sign. */
struct FineSums {
    float term = 0, of_q = 0, q_minus_p = 0, checked = 0;
};

/* The row's sums. Where derivatives are cached, so are masses, each times the derivative of a softcap. */
INLINE Sums row_sums_of(const FineElements &elements, const Slice &slice, Pipeline &pipeline, RowGroup &group)
{
    const Arguments &a = slice.a;
    enum { IS_OF_Q = HAS_NEAR_ELEMENT || HAS_CORNER };
    FineSums sums;
    const auto add = [&](FineSums &sums, const Element &e, float q, float p, float &mass, float &derivative) {
        const float one = elements.mass(q, p);
        sums.term += e.term;
        sums.of_q += IS_OF_Q ? e.d_log_q : e.d_log_q - e.d_log_p;
        sums.q_minus_p += HAS_NEAR_ELEMENT ? 0 : e.q_minus_p;
        if (HAS_CORNER)
            sums.checked += fabsf(e.q_minus_p) <= TIE * one ? one : 0;
        else
            sums.checked = fmaf(one, one, sums.checked);
#if CACHES_DERIVATIVES
        const float of_cap = INPUT_IS_CAPPED ? softcap_grad(q, a.input_softcap) : 1;
        mass = one * of_cap;
        derivative = e.d_log_q * of_cap;
#endif
    };
    const auto add_any = [&](float x, float y, float &mass, float &derivative) {
        const float q = input_of(a, x), p = target_of(a, y);
        add(sums, elements.any<true>(q, p), q, p, mass, derivative);
    };
    if (are_near(elements, slice, pipeline, group)) {
        each_deferring<false, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int address) {
            float masses[WIDTH], derivatives[WIDTH];
            FineSums more = sums;
            bool all = true;
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                const float q = input_of(a, at(x, k)), p = target_of(a, at(y, k));
                add(more, elements.near(q, p), q, p, masses[k], derivatives[k]);
                all &= elements.is_near(q, p);
            }
            if (all)
                sums = more;
#if CACHES_DERIVATIVES
            if (all)
                cache_slopes(address, masses, derivatives);
#endif
            return all;
        }, [&](float x, float y, int i, int on_chip, const Row &) {
            float mass, derivative;
            add_any(x, y, mass, derivative);
#if CACHES_DERIVATIVES
            if (i >= slice.head && i < slice.head + slice.body)
                cache_slope(on_chip, mass, derivative);
#endif
        }, [&] { return elements.row; });
    } else {
        each_vector<false, false>(slice, pipeline, group, [&](Packed<X> x, Packed<Y> y, long long, int address) {
            Packed<float> masses, derivatives;
            each_of<FineElements::ANY_MODE>([&](int k) {
                add_any(at(x, k), at(y, k), masses.element[k], derivatives.element[k]);
            }, x, y, masses, derivatives);
#if CACHES_DERIVATIVES
            cache_slopes(address, masses.element, derivatives.element);
#endif
        });
        each_edge(slice, group, [&](int i) {
            float mass, derivative;
            add_any(to_real(slice.x()[i]), to_real(slice.y()[i]), mass, derivative);
        });
    }
    double values[] = { sums.term, sums.of_q, sums.q_minus_p, sums.checked };
    row_all_reduce(a, pipeline, group, values, Add());
    const float term = (float)values[0], of_q = (float)values[1];
    Sums whole = { term, 0.5f * (term - of_q), 0.5f * (term + of_q), (float)values[2] }; /* d_log_p + d_log_q is the term: Euler's */
    if (IS_OF_Q) {
        whole.d_log_q = of_q;
        whole.d_log_p = term - of_q;
    }
    if (HAS_CORNER) {
        whole.ties = (float)values[3];
        return whole;
    }
    whole.squares = values[3];
    if (HAS_NEAR_ELEMENT)
        whole.q_minus_p = HAS_P_LOG_RATIO ? of_q : -whole.d_log_p; /* of a log-ratio's mean, centred */
    return whole;
}

/* As `write_gradients` */
INLINE void write_gradients_of(const FineElements &elements, const Slice &slice, Pipeline &pipeline, const RowGroup &group, GradOut grad_out)
{
    const Arguments &a = slice.a;
    differentiate_label(a, pipeline, group, [&](float q, float p) { return elements.any<false>(q, p).input * grad_out.input; }, grad_out);
    const auto differentiate_any = [&](float x, float y, DX &input, DY &target) {
        const float q = input_of(a, x), p = target_of(a, y);
        pull_back(a, elements.any<false>(q, p), q, p, grad_out, input, target);
    };
    const auto at_edge = [&](int i) {
        DX input;
        DY target;
        differentiate_any(to_real(slice.x()[i]), to_real(slice.y()[i]), input, target);
        write_element(slice, input, target, i);
    };
    const GradientVectors vectors(slice);
#if CACHES_DERIVATIVES
    const float sum = elements.row.input_grad_sum;
    each_vector<false, true>(slice, pipeline, group, [&](const Packed<X> &mass, const Packed<Y> &d_log_q, long long before, int) {
        Packed<DX> input;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            input.element[k] = rounded<DX>(fmaf(-at(mass, k), sum, at(d_log_q, k)) * grad_out.input);
        vectors.write(input, {}, before);
    });
    each_edge(slice, group, at_edge);
#else
    if (!HAS_NEAR_ELEMENT && are_near(elements, slice, pipeline, group)) {
        RowTerms<false> none;
        write_deferring<true, true>(slice, pipeline, group, none, [&](float x, float y, DX &input, DY &target, RowTerms<false> &) {
            const float q = input_of(a, x), p = target_of(a, y);
            pull_back(a, elements.near(q, p), q, p, grad_out, input, target);
            return elements.is_near(q, p);
        }, [&](float x, float y, const Row &, DX &input, DY &target) { differentiate_any(x, y, input, target); },
                                    [&] { return elements.row; });
        return;
    }
    each_vector<false, true>(slice, pipeline, group, [&](Packed<X> x, Packed<Y> y, long long before, int) {
        Packed<DX> input;
        Packed<DY> target;
        each_of<FineElements::ANY_MODE>([&](int k) {
            differentiate_any(at(x, k), at(y, k), input.element[k], target.element[k]);
        }, x, y, input, target);
        vectors.write(input, target, before);
    });
    each_edge(slice, group, at_edge);
#endif
}
#endif

}
