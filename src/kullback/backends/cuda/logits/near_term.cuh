/* The sum of terms of rows that are near, of kinds whose gradients follow from moments: what these say of such a row is good for
   gradients, which are written on the way, and too little for the loss. */
#pragma once

#include "cuda/logits/fine.cuh"
#include "cuda/logits/near.cuh"
#include "cuda/logits/sure.cuh"

namespace kullback {

#if SUMS_FROM_MOMENTS && HAS_NEAR_ELEMENT
/* What is upstream of either side's logits: where temperatures are equal, it is one. */
INLINE float upstream_of(GradOut grad_out) { return WANT_INPUT ? grad_out.input : WANT_TARGET ? grad_out.target : 1; }

/* Whether `near_element` serves a row of which hardly an element is far: temperatures are equal; log-sum-exps differ by so little, 32
   nats, that the square of half a unit in its last place is nothing; and masses multiplied by what is upstream are masses still. */
INLINE bool is_in_reach(const Slice &slice, const Pipeline &pipeline, const RowStats &stats)
{
    const Arguments &a = slice.a;
    float factor = 1; /* of masses, as of `CloseElements` */
#if HAS_AUXILIARY
    if (SUM_IN_MASSES)
        factor -= sum_with_label(a, label_of(pipeline), stats, 0, 1);
#endif
    const float inv_temperature = a.input_inv_temperature; /* of both */
    const float x_log2_z = log2_z(stats.x_max, stats.x_sum_exp, inv_temperature);
    const float y_log2_z = log2_z(stats.y_max, stats.y_sum_exp, inv_temperature);
    const double loss = WANT_GRADIENT ? weight_of(a, slice.row) * a.scale * divergence_weight(a) : 1;
    const float upstream = upstream_of(GradOut(a, (float)loss)) * factor;
    return warp_all(has_one_temperature(a) && fabsf(y_log2_z - x_log2_z) < 46 && upstream > 1e-18f && upstream < 1e18f);
}

/* Where a row's Σ d_log_q is 0, its product with a mass need not be found. */
INLINE Element without_sum(Element e)
{
    if (!HAS_D_LOG_Q_SUM && !HAS_AUXILIARY)
        e.input = e.d_log_q;
    return e;
}

/* What a close row's elements are found by: the log-ratio and one mass (`near_element`). Elements are homogeneous in their masses:
   with what is upstream in these, gradients need not be multiplied. SHORT: of a row whose logits' differences are hardly rounded. */
template <bool SHORT> struct CloseElements {
    Row row;
    GradOut in_masses;
    float factor, whole; /* of masses, and what they sum to */
    float shift;         /* of log-ratios, from those of the fast mode, whose roundings a sure token's gradient would show */

    INLINE CloseElements(const Arguments &a, const RowStats &stats, const Row &fast, GradOut grad_out)
        : row(fast), in_masses(grad_out), factor(upstream_of(grad_out))
    {
        in_masses.input = in_masses.target = 1;
        if (HAS_AUXILIARY && SUM_IN_MASSES) {
            const float less = 1 - fast.input_grad_sum;
            factor *= less;
            row.input_grad_sum = fast.input_grad_sum / less;
            in_masses.target = 1 / less;
        }
        if (!IS_COARSE) {
            row.input_inv_sum_exp = opaque(row.input_inv_sum_exp * factor);
            row.target_inv_sum_exp = opaque(row.target_inv_sum_exp * factor);
            shift = 0;
            whole = factor;
            return;
        }
        row.input_max = opaque(row.input_max - lg2(factor)); /* else both are found again for each vector */
        row.target_max = opaque(row.target_max - lg2(factor));
        row.log_z_diff_high = (float)log_z_diff_of(a, stats);
        row.log_z_diff_low = 0;
        shift = fast.log_z_diff_high - row.log_z_diff_high + fast.log_z_diff_low;
        whole = HAS_P_LOG_RATIO
            ? mass_sum(stats.y_max, stats.y_sum_exp, a.target_inv_temperature) * ex2(fast.target_max - row.target_max)
            : mass_sum(stats.x_max, stats.x_sum_exp, a.input_inv_temperature) * ex2(fast.input_max - row.input_max);
    }
    INLINE bool is_near(float q, float p) const { return kullback::is_near<SHORT>(row, q, p); }
    INLINE Element near(const Arguments &a, float q, float p) const
    {
        return without_sum(SHORT ? short_element(q, p, row, a.parameter) : near_element(q, p, row, a.parameter));
    }
    /* Of masses that are not multiplied. Of elements that are near only one mass is found; the other is to be as theirs. */
    INLINE Element far(const Arguments &a, float q, float p, const Row &fast) const
    {
        Element e = floored_element<FAST>(a, q, p, fast);
        e.term -= shift * e.d_log_q;
        return e;
    }
};

/* Adds this thread's part of the row's sum, by log-ratios and one mass. */
template <bool WRITES, bool LAST, bool SHORT, bool SURE>
INLINE void find_close_term(RowTerms<SURE> &found, const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats,
                            const Sums &sums, const Row &fast, GradOut grad_out)
{
    const Arguments &a = slice.a;
    const CloseElements<SHORT> elements(a, opaque(stats), fast, grad_out);
    const auto own = [&](float q, float p) {
        return elements.is_near(q, p) ? Gradients(elements.near(a, q, p), elements.in_masses)
                                      : Gradients(elements.far(a, q, p, fast), grad_out);
    };
    if (WRITES)
        differentiate_label(a, pipeline, group, [&](float q, float p) { return own(q, p).input; }, grad_out);
    const auto take_near = [&](float q, float p, DX &input, DY &target, RowTerms<SURE> &part) {
        const Element e = elements.near(a, q, p);
        pull_back(a, e, q, p, elements.in_masses, input, target);
        part.light += e.term;
        part.see(e, elements.in_masses);
    };
    write_deferring<WRITES, LAST>(slice, pipeline, group, found, [&](float x, float y, DX &input, DY &target, RowTerms<SURE> &part) {
        const float q = input_of(a, x), p = target_of(a, y);
        take_near(q, p, input, target, part);
        return elements.is_near(q, p);
    }, [&](float x, float y, const Row &, DX &input, DY &target) {
        const float q = input_of(a, x), p = target_of(a, y);
        if (elements.is_near(q, p)) {
            take_near(q, p, input, target, found);
        } else { /* nothing cancels in the fast formula */
            const Element e = elements.far(a, q, p, fast);
            pull_back(a, e, q, p, grad_out, input, target);
            found.heavy += e.term;
            found.see(e, grad_out);
        }
    }, [&] { return fast; });
    const float norm = in_range_ratio_or_zero(1, elements.whole);
    found.light *= norm;
    found.heavy *= norm * elements.factor;
    if constexpr (SURE)
        correct_gradients(slice, pipeline, group, stats, sums, found, grad_out, own);
}
#endif

#if SUMS_FROM_MOMENTS && HAS_NEAR
/* Adds this thread's part of the row's sum, by polynomials. Where a log-ratio is long, nothing cancels in the fast formula. */
template <bool WRITES, bool LAST, bool SURE>
INLINE void find_term_by_polynomials(RowTerms<SURE> &found, const Slice &slice, Pipeline &pipeline, RowGroup &group,
                                     const RowStats &stats, const Sums &sums, GradOut grad_out)
{
    const Arguments &a = slice.a;
    const LogRatio log_ratio(a, opaque(stats));
    const Row row = row_constants<FAST>(a, stats, sums);
    if (WRITES)
        differentiate_label(a, pipeline, group, [&](float q, float p) {
            return floored_element<FAST>(a, q, p, row).input * grad_out.input;
        }, grad_out);
    const float mean = SLOPE_FACTOR * sums.d_log_q, of_slope = 1 / SLOPE_FACTOR;
    const GradientVectors vectors(slice);
    /* sum: the element's term, but for the roots' factor */
    const auto gradients_of = [&](float own, float other, float r, float sum) {
        const float q = fast_logit_mass(own, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
        const float slope = cached_slope_of<false>(a, r, WANT_INPUT && !WANT_TARGET ? mean : 0);
        const float input = q * (WANT_TARGET ? slope - mean : slope) * grad_out.input * of_slope;
        if (!WANT_TARGET)
            return Gradients(input, 0);
        const float p = fast_logit_mass(other, row.target_max, row.target_inv_temperature, row.target_inv_sum_exp);
        const float d_log_p = fmaf(log_ratio.rest, sum, -(q * slope * of_slope)); /* d_log_p + d_log_q is the term: Euler's */
        return Gradients(input, fmaf(-p, sums.d_log_p, d_log_p) * grad_out.target);
    };
    /* Whether that served an element */
    const auto by_polynomials = [&](float x, float y, DX &input, DY &target) {
        const float own = input_of(a, x), other = target_of(a, y), r = log_ratio.of(own, other);
        const float sum = log_ratio.root(own, other) * term_over_root<false>(a, r);
        const bool is_near = fabsf(r) < NEAR_RADIUS;
        if (is_near)
            found.light += sum;
        if (WRITES) {
            const Gradients gradients = gradients_of(own, other, r, sum);
            if (WANT_INPUT)
                input = grad_out.of_input(a, gradients.input, own);
            if (WANT_TARGET)
                target = rounded<DY>(gradients.target * (TARGET_IS_CAPPED ? softcap_grad(other, a.target_softcap) : 1));
            if (is_near)
                found.see(gradients.input, gradients.target);
        }
        return is_near;
    };
    const auto take = [&](float x, float y, DX &input, DY &target) {
        const Element e = differentiate<FAST>(a, x, y, row, grad_out, input, target);
        found.heavy += e.term;
        found.see(e, grad_out);
    };
    each_vector<false, LAST>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int) {
        Packed<DX> input;
        Packed<DY> target;
        unsigned far = 0;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            far |= by_polynomials(at(x, k), at(y, k), input.element[k], target.element[k]) ? 0 : 1u << k;
        if (far)
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                if (far >> k & 1)
                    take(opaque(at(x, k)), opaque(at(y, k)), input.element[k], target.element[k]);
        if (WRITES)
            vectors.write(input, target, before);
    });
    each_edge(slice, group, [&](int i) {
        DX input;
        DY target;
        const float x = to_real(slice.x()[i]), y = to_real(slice.y()[i]);
        if (!by_polynomials(x, y, input, target))
            take(x, y, input, target);
        if (WRITES)
            write_element(slice, input, target, i);
    });
    found.light *= log_ratio.rest;
    if constexpr (SURE)
        correct_gradients(slice, pipeline, group, stats, sums, found, grad_out, [&](float q, float p) {
            const float r = log_ratio.of(q, p);
            return fabsf(r) < NEAR_RADIUS ? gradients_of(q, p, r, log_ratio.root(q, p) * term_over_root<false>(a, r))
                                          : Gradients(floored_element<FAST>(a, q, p, row), grad_out);
        });
}
#elif SUMS_FROM_MOMENTS
#if HAS_NEAR_ELEMENT
/* By the ratio and one mass, up to NEAR_ELEMENT_RADIUS */
INLINE float near_term_of(const Arguments &a, float q, float p, const Row &fast)
{
    const Element e = near_element(q, p, fast, a.parameter);
    return IS_16_BIT ? e.term + fast.log_z_diff_low * e.d_log_q : e.term; /* whose ratio lacks it */
}
#endif

/* A heavy token's, whose element by the stable formula is given: that rounds two exponents apart. */
INLINE float heavy_term(const Arguments &a, float q, float p, const Row &fast, const Element &stable)
{
#if HAS_NEAR_ELEMENT
    if (is_near(fast, q, p))
        return near_term_of(a, q, p, fast);
#endif
    return stable.term;
}

/* Adds this thread's part of the row's sum, by the fast formula. Few tokens have much mass: what that formula made of them is
   replaced. */
template <bool WRITES, bool LAST, bool SURE>
INLINE void find_term_by_fast_formula(RowTerms<SURE> &found, const Slice &slice, Pipeline &pipeline, RowGroup &group,
                                      const RowStats &stats, const Sums &sums, const Row &row, GradOut grad_out)
{
    const Arguments &a = slice.a;
    if (WRITES)
        differentiate_label(a, pipeline, group, [&](float q, float p) {
            return floored_element<FAST>(a, q, p, row).input * grad_out.input;
        }, grad_out);
    /* Where the target's mass is little and the input's is not, nothing cancels. */
    const float exponent = fabsf(sums.term) < MIN_FAST_SUM / 8 ? HEAVY_EXPONENT_NEARER : HEAVY_EXPONENT;
    const float heavy = heavy_logit(row.target_max, a.target_inv_temperature, exponent);
    const GradientVectors vectors(slice);
    const auto is_heavy = [&](float y) { return target_of(a, y) >= heavy; };
    /* By a moment of log-ratios. Rows of a sure token are too few for a loop more. */
    const bool are_finite = HAS_LOG_RATIOS && !SURE && group.finite;
    enum { ALL_STABLE = SURE || !HAS_NEAR_ELEMENT }; /* whether each heavy token has the stable formula; else those that are far */
    const auto constants = [&] { return heavy_row(a, opaque(stats), row); };
    const auto take = [&](const Packed<X> &x, const Packed<Y> &y, long long before, bool finite) __attribute__((always_inline)) {
        Packed<DX> input;
        Packed<DY> target;
        RowTerms<SURE> part;
        float highest = -REAL_INFINITY;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            float q = input_of(a, at(x, k)), p = target_of(a, at(y, k));
            highest = fmaxf(highest, p);
            Element e = finite ? finite_element(q, p, row, a.parameter) : floored_element<FAST>(a, q, p, row);
#if HAS_NEAR_ELEMENT
            e = without_sum(e);
#endif
            pull_back(a, e, q, p, grad_out, input.element[k], target.element[k]);
            part.light += e.term;
            part.see(e, grad_out);
        }
        const bool is_light = highest < heavy;
        found += part;
        if (WRITES && (RESIDENT || is_light)) /* else logits are to be read again, which the gradient may be written over */
            vectors.write(input, target, before);
        return is_light;
    };
    each_refining<LAST, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int) {
        return are_finite ? take(x, y, before, true) : take(x, y, before, false);
    }, [&](float, float y) { return is_heavy(y); }, [&](float x, float y, const Row &given, int) {
        float q = input_of(a, x), p = target_of(a, y);
        Element fast = floored_element<FAST>(a, q, p, row);
#if HAS_NEAR_ELEMENT
        fast = without_sum(fast);
        if (!ALL_STABLE && is_near(row, q, p)) {
            found.heavy += near_term_of(a, q, p, row) - fast.term;
            return;
        }
#endif
        const Element e = element<STABLE>(a, q, p, ALL_STABLE ? given : constants());
        found.heavy += heavy_term(a, q, p, row, e) - fast.term;
        found.see(e, grad_out); /* for of each exponent what is rounded is its own: no share of a mass */
        found.see(-fast.input * grad_out.input, -fast.target * grad_out.target);
    }, [&](int first) {
        if (RESIDENT || !WRITES)
            return;
        const Packed<X> x = load(slice.x() + first);
        const Packed<Y> y = load(slice.y() + first);
        Packed<DX> input;
        Packed<DY> target;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            differentiate<FAST>(a, at(x, k), at(y, k), row, grad_out, input.element[k], target.element[k]);
        vectors.write(input, target, (first - slice.head) / WIDTH * (long long)X_BYTES);
    }, [&](int i, const Row &given) {
        DX input;
        DY target;
        const float x = to_real(slice.x()[i]), y = to_real(slice.y()[i]);
        const Element e = differentiate<STABLE>(a, x, y, ALL_STABLE ? given : constants(), grad_out, input, target);
        found.heavy += heavy_term(a, input_of(a, x), target_of(a, y), row, e);
        if (WRITES)
            write_element(slice, input, target, i);
    }, [&] { return ALL_STABLE ? constants() : Row {}; });
    /* Terms are homogeneous: of what a side's masses sum to beside 1 they have the share that its derivatives have of them (Euler). */
    const float p_sum = mass_sum(stats.y_max, stats.y_sum_exp, a.target_inv_temperature);
    const float q_sum = mass_sum(stats.x_max, stats.x_sum_exp, a.input_inv_temperature);
    const float d_log_q = sums.d_log_q + sums.auxiliary; /* before it was shifted */
    const float norm = in_range_ratio_or_zero(1, fmaf(in_range_ratio_or_zero(d_log_q, sums.term), q_sum - p_sum, p_sum));
    found.light *= norm;
    found.heavy *= norm;
    if constexpr (SURE) {
        const Row of_heavy = heavy_row(a, opaque(stats), row);
        correct_gradients(slice, pipeline, group, stats, sums, found, grad_out, [&](float q, float p) {
            return Gradients(element<STABLE>(a, q, p, of_heavy), grad_out);
        });
    }
}
#endif

#if SUMS_FROM_MOMENTS
/* Adds this thread's part of the row's sum: by polynomials where a kind has them, and else by log-ratios and one mass where hardly an
   element is far, or by the fast formula. */
template <bool WRITES, bool LAST, bool SURE>
INLINE void find_near_term(RowTerms<SURE> &found, const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats,
                           const Sums &sums, bool few_are_far, GradOut grad_out)
{
#if HAS_NEAR
    find_term_by_polynomials<WRITES, LAST>(found, slice, pipeline, group, stats, sums, grad_out);
#else
    const Row row = row_constants<FAST>(slice.a, stats, sums);
#if HAS_NEAR_ELEMENT
    if (few_are_far || !REFINES_HEAVY) {
        /* A difference is exact but of logits that are shorter than it: then it is rounded by 2⁻²⁵ of the ratio and of what its like
           have in common. Gradients in float32 of sure tokens show that. */
        const float shared = row.log_z_diff_high;
        if (IS_COARSE && !IS_16_BIT && warp_all(shared * shared < 32 * fabsf(sums.term)))
            return find_close_term<WRITES, LAST, true>(found, slice, pipeline, group, stats, sums, row, grad_out);
        return find_close_term<WRITES, LAST, false>(found, slice, pipeline, group, stats, sums, row, grad_out);
    }
#endif
    find_term_by_fast_formula<WRITES, LAST>(found, slice, pipeline, group, stats, sums, row, grad_out);
#endif
}

/* This thread's part of the row's sum; its gradients are written. few_are_far: hardly an element is; is_sure: one token may have
   the row */
template <bool WRITES, bool LAST>
INLINE TermSums near_term(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, const Sums &sums, bool few_are_far,
                          bool is_sure, GradOut grad_out)
{
#if HAS_SURE_ROWS
    if (WRITES && is_sure) {
        RowTerms<true> found;
        find_near_term<WRITES, false>(found, slice, pipeline, group, stats, sums, few_are_far, grad_out);
        return found;
    }
#endif
    RowTerms<false> found;
    find_near_term<WRITES, LAST>(found, slice, pipeline, group, stats, sums, few_are_far, grad_out);
    return found;
}
#endif

}
