/* A row's gradients, written element by element. */
#pragma once

#include "cuda/logits/fast.cuh"
#include "cuda/logits/labels.cuh"

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

/* What an element's logits get; of logits that are (q, p) */
INLINE void pull_back(const Arguments &a, const Element &e, float q, float p, GradOut grad_out, DX &input, DY &target)
{
    input = HAS_SMOOTHING
        ? grad_out.of_input(a, e.input * grad_out.input, q)
        : rounded<DX>(e.input * (INPUT_IS_CAPPED ? grad_out.input * softcap_grad(q, a.input_softcap) : grad_out.input));
    target = rounded<DY>(e.target * (TARGET_IS_CAPPED ? grad_out.target * softcap_grad(p, a.target_softcap) : grad_out.target));
}

/* Finds an element's gradients, and returns the element. */
template <int MODE>
INLINE Element differentiate(const Arguments &a, float x, float y, const Row &row, GradOut grad_out, DX &input, DY &target)
{
    float q = input_of(a, x), p = target_of(a, y);
    const Element e = floored_element<MODE>(a, q, p, row);
    pull_back(a, e, q, p, grad_out, input, target);
    return e;
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

INLINE void write_zeros(const Slice &slice, Pipeline &pipeline, const RowGroup &group)
{
    const GradientVectors vectors(slice);
    const Packed<DX> input = {};
    const Packed<DY> target = {};
    each_vector<false, true>(slice, pipeline, group, [&](const Packed<X> &, const Packed<Y> &, long long before, int) {
        vectors.write(input, target, before);
    });
    each_edge(slice, group, [&](int i) { write_element(slice, input.element[0], target.element[0], i); });
}

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
        term.heavy += differentiate<MODE>(a, x, y, row, grad_out, input, target).term;
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
                term.light += differentiate<MODE>(a, at(x, k), at(y, k), row, grad_out, input.element[k], target.element[k]).term;
            }, x, y, input, target);
        vectors.write(input, target, before);
    });
    if (slice.body < (int)a.vocab) { /* where slopes are cached, nothing else wants all of the row's constants */
        enum { AT_EDGE = RESIDENT && CACHES_SLOPES && MODE == FAST ? (int)STABLE : MODE }; /* of close rows, too */
        const Row at_edge = RESIDENT && CACHES_SLOPES ? row_constants<AT_EDGE>(a, opaque(stats), sums) : row;
        each_edge(slice, group, [&](int i) {
            DX input;
            DY target;
            term.heavy += differentiate<AT_EDGE>(a, to_real(slice.x()[i]), to_real(slice.y()[i]), at_edge, grad_out, input, target).term;
            write_element(slice, input, target, i);
        });
    }
    return term;
}

/* Writes gradients of vectors of which now(x, y, input, target, part) serves all elements, and adds what it sums to `light`. Others
   are given to later(x, y, row(), input, target), many vectors later: their logits are read again, which gradients may be written
   over. */
template <bool WRITES, bool LAST, typename S, typename F, typename G, typename R>
INLINE void write_deferring(const Slice &slice, Pipeline &pipeline, const RowGroup &group, S &light, F now, G later, R row)
{
    const GradientVectors vectors(slice);
    each_deferring<LAST, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int) {
        Packed<DX> input;
        Packed<DY> target;
        S part = {};
        bool all = true;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            all &= now(at(x, k), at(y, k), input.element[k], target.element[k], part);
        if (all) {
            light += part;
            if (WRITES)
                vectors.write(input, target, before);
        }
        return all;
    }, [&](float x, float y, int i, int, const Row &found) {
        DX input;
        DY target;
        later(x, y, found, input, target);
        if (WRITES)
            write_element(slice, input, target, i);
    }, row);
}

}
