/* A row's gradients, written element by element. */
#pragma once

#include "cuda/logits/labels.cuh"
#include "cuda/logits/near.cuh"

namespace kullback {

/* Of logits that may be -inf, in any mode; which are changed to what the mode takes for them */
template <int MODE> INLINE Element floored_element(const Arguments &a, float &q, float &p, const Row &row)
{
    if (MODE == FAST) {
        q = floor_logit(q, row.input_max, a.input_inv_temperature);
        p = floor_logit(p, row.target_max, a.target_inv_temperature);
    }
    return element<MODE>(a, q, p, row);
}

/* Writes an element's gradients, and returns its term. */
template <int MODE>
INLINE float differentiate(const Arguments &a, float x, float y, const Row &row, GradOut grad_out, DX &input, DY &target)
{
    float q = input_of(a, x), p = target_of(a, y);
    const Element e = floored_element<MODE>(a, q, p, row);
    input = rounded<DX>(e.input * (INPUT_IS_CAPPED ? grad_out.input * softcap_grad(q, a.input_softcap) : grad_out.input));
    target = rounded<DY>(e.target * (TARGET_IS_CAPPED ? grad_out.target * softcap_grad(p, a.target_softcap) : grad_out.target));
    return e.term;
}

INLINE void write_element(const Slice &slice, DX input, DY target, int i)
{
    if (WANT_INPUT)
        slice.d_input()[i] = input;
    if (WANT_TARGET)
        slice.d_target()[i] = target;
}

/* Behind vectors of x of so many bytes, as many of another type */
template <typename T> INLINE T *after_vectors(T *first, long long before)
{
    constexpr int bytes = sizeof(Packed<T>);
    return (T *)((unsigned char *)first + (bytes == X_BYTES ? before : before / X_BYTES * bytes));
}

/* Where the row's vectors of gradients begin; in registers where these are to be had */
struct GradientVectors {
    DX *input;
    DY *target;

    INLINE GradientVectors(const Slice &slice)
        : input(WANT_INPUT ? slice.d_input() + slice.head : 0), target(WANT_TARGET ? slice.d_target() + slice.head : 0)
    {
        if (RESIDENT && WANT_INPUT)
            input = opaque(input);
        if (RESIDENT && WANT_TARGET)
            target = opaque(target);
    }
    /* before: bytes of x's vectors */
    INLINE void write(const Packed<DX> &input_vector, const Packed<DY> &target_vector, long long before) const
    {
        if (WANT_INPUT)
            store(after_vectors(input, before), input_vector);
        if (WANT_TARGET)
            store(after_vectors(target, before), target_vector);
    }
};

/* Returns this thread's part of the sum of terms, of modes whose gradients are found with them. */
template <int MODE>
INLINE TermSums write_gradients(const Slice &slice, Pipeline &pipeline, const RowGroup &group, const RowStats &stats,
                                const Sums &sums, SlopeScale cached, GradOut grad_out)
{
    const Arguments &a = slice.a;
    const Row row = row_constants<MODE>(a, stats, sums);
    differentiate_label(a, pipeline, group, [&](float q, float p) {
        return floored_element<MODE>(a, q, p, row).input * grad_out.input;
    }, grad_out);
    TermSums term;
    const auto one = [&](float x, float y, int i, const Row &row) {
        DX input;
        DY target;
        term.heavy += differentiate<MODE>(a, x, y, row, grad_out, input, target);
        write_element(slice, input, target, i);
    };
    if (MODE == SAFE) {
        each_element<true>(slice, pipeline, group, [&](float x, float y, int i) { one(x, y, i, row); });
        return term;
    }
    const GradientVectors vectors(slice);
    each_vector<false, true>(slice, pipeline, group, [&](Packed<X> x, Packed<Y> y, long long before, int) {
        Packed<DX> input;
        Packed<DY> target;
#if CACHES_SLOPES
        if (MODE == FAST) {
            const float factor = grad_out.input * cached.factor, offset = grad_out.input * (cached.offset - row.input_grad_sum);
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                input.element[k] = rounded<DX>(mul_ftz(at(x, k), fmaf(cached_slope(y, k), factor, offset)));
        } else
#endif
            each_of<MODE>([&](int k) {
                term.light += differentiate<MODE>(a, at(x, k), at(y, k), row, grad_out, input.element[k], target.element[k]);
            }, x, y, input, target);
        vectors.write(input, target, before);
    });
    if (slice.body < (int)a.vocab) { /* where slopes are cached, nothing else wants all of the row's constants */
        enum { AT_EDGE = RESIDENT && CACHES_SLOPES && MODE == FAST ? (int)STABLE : MODE }; /* of close rows, too */
        const Row at_edge = RESIDENT && CACHES_SLOPES ? row_constants<AT_EDGE>(a, opaque(stats), sums) : row;
        each_edge(slice, group, [&](int i) {
            DX input;
            DY target;
            term.heavy += differentiate<AT_EDGE>(a, to_real(slice.x()[i]), to_real(slice.y()[i]), at_edge, grad_out, input, target);
            write_element(slice, input, target, i);
        });
    }
    return term;
}

#if SUMS_FROM_MOMENTS && HAS_NEAR
/* This thread's part of the sum of terms of a row that is near: what its moments say of it is good for gradients, which may be
   written on the way, and too little for the loss. Where a log-ratio is long, nothing cancels in the fast formula. */
template <bool WRITES, bool LAST>
INLINE TermSums near_term(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, const Sums &sums,
                       GradOut grad_out)
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
    TermSums term;
    /* Whether that served an element */
    const auto by_polynomials = [&](float x, float y, DX &input, DY &target) {
        const float own = input_of(a, x), other = target_of(a, y), r = log_ratio.of(own, other);
        const float sum = log_ratio.root(own, other) * term_over_root<false>(a, r);
        const bool is_near = fabsf(r) < NEAR_RADIUS;
        if (is_near)
            term.light += sum;
        if (WRITES) {
            const float q = fast_logit_mass(own, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
            const float slope = cached_slope_of<false>(a, r, WANT_INPUT && !WANT_TARGET ? mean : 0);
            if (WANT_INPUT)
                input = rounded<DX>(q * (WANT_TARGET ? slope - mean : slope) * grad_out.input * of_slope
                                    * (INPUT_IS_CAPPED ? softcap_grad(own, a.input_softcap) : 1));
            if (WANT_TARGET) { /* d_log_p + d_log_q is the term: Euler's */
                const float p = fast_logit_mass(other, row.target_max, row.target_inv_temperature, row.target_inv_sum_exp);
                const float d_log_p = fmaf(log_ratio.rest, sum, -(q * slope * of_slope));
                target = rounded<DY>(fmaf(-p, sums.d_log_p, d_log_p) * grad_out.target
                                     * (TARGET_IS_CAPPED ? softcap_grad(other, a.target_softcap) : 1));
            }
        }
        return is_near;
    };
    const auto take = [&](float x, float y, DX &input, DY &target) {
        term.heavy += differentiate<FAST>(a, x, y, row, grad_out, input, target);
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
    return { log_ratio.rest * term.light, term.heavy };
}
#elif SUMS_FROM_MOMENTS
/* The same, by the fast formula; terms of few tokens of much mass are found by the stable one. */
template <bool WRITES, bool LAST>
INLINE TermSums near_term(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, const Sums &sums,
                       GradOut grad_out)
{
    const Arguments &a = slice.a;
    const Row row = row_constants<FAST>(a, stats, sums);
    if (WRITES)
        differentiate_label(a, pipeline, group, [&](float q, float p) {
            return floored_element<FAST>(a, q, p, row).input * grad_out.input;
        }, grad_out);
    /* Where the target's mass is little and the input's is not, nothing cancels. */
    const float exponent = fabsf(sums.term) < MIN_FAST_SUM / 8 ? HEAVY_EXPONENT_NEARER : HEAVY_EXPONENT;
    const float heavy = heavy_logit(row.target_max, a.target_inv_temperature, exponent);
    const GradientVectors vectors(slice);
    TermSums term;
    const auto is_heavy = [&](float y) { return target_of(a, y) >= heavy; };
    each_refining<LAST, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int) {
        Packed<DX> input;
        Packed<DY> target;
        float part = 0;
        bool is_light = true;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float more = differentiate<FAST>(a, at(x, k), at(y, k), row, grad_out, input.element[k], target.element[k]);
            if (!is_heavy(at(y, k)))
                part += more;
            else
                is_light = false;
        }
        term.light += part;
        if (WRITES && (RESIDENT || is_light)) /* else logits are to be read again, which the gradient may be written over */
            vectors.write(input, target, before);
        return is_light;
    }, [&](float, float y) { return is_heavy(y); }, [&](float x, float y, const Row &heavy_row) {
        term.heavy += element<STABLE>(a, input_of(a, x), target_of(a, y), heavy_row).term;
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
    }, [&](int i, const Row &heavy_row) {
        DX input;
        DY target;
        term.heavy += differentiate<STABLE>(a, to_real(slice.x()[i]), to_real(slice.y()[i]), heavy_row, grad_out, input, target);
        if (WRITES)
            write_element(slice, input, target, i);
    }, [&] { return heavy_row(a, stats, row); });
    const float norm = in_range_ratio_or_zero(1, mass_sum(stats.y_max, stats.y_sum_exp, a.target_inv_temperature));
    return { term.light * norm, term.heavy * norm };
}
#endif

}
