/* Rows whose gradients are not coarse, of kinds that are the mean of a log-ratio: an element is found by that and one mass, out to
   NEAR_ELEMENT_RADIUS. */
#pragma once

#include "cuda/logits/gradients.cuh"

namespace kullback {

#if HAS_NEAR_ELEMENT
/* Whether `near_element` serves an element of a row whose temperatures are equal */
INLINE bool is_near(const Row &row, float q, float p)
{
    const float ratio = near_logit_ratio(p, row.target_max, row.target_inv_temperature, q, row.input_max, row.input_inv_temperature,
                                         row.log_z_diff_high, row.log_z_diff_low);
    return fabsf(ratio) < NEAR_ELEMENT_RADIUS;
}

/* In place of the stable formula, where temperatures are equal. Elements that are far take the fast one, in which nothing cancels. What
   masses sum to beside 1 is in Σ d_log_q, and so taken off gradients. */
struct FineElements {
    Row row, near_row;
    float without_sum; /* 1 - Σ d_log_q, where masses of near elements are to be multiplied by it */
    Parameters parameters;

    INLINE FineElements(const Arguments &a, const RowStats &stats, const Sums &sums)
        : row(row_constants<STABLE>(a, opaque(stats), sums)), near_row(row), without_sum(SUM_IN_MASSES ? 1 - sums.d_log_q : 1),
          parameters(a.parameters)
    {
        near_row.input_inv_sum_exp *= without_sum;
        near_row.target_inv_sum_exp *= without_sum;
        near_row.input_grad_sum /= without_sum;
    }
    INLINE bool serve(const Arguments &a) const { return warp_all(has_one_temperature(a) && without_sum > 1e-3f); }
    /* Whether hardly one is far, by a sample of what this warp has */
    INLINE bool are_near(const Slice &slice, const Pipeline &pipeline, const RowGroup &group) const
    {
        float far = 0;
        each_first(slice, pipeline, group, [&](float x, float y, int) {
            far += is_near(row, input_of(slice.a, x), target_of(slice.a, y)) ? 0 : 1;
        });
        return warp_all(far == 0);
    }
    INLINE Element near(float q, float p) const
    {
        Element e = near_element(q, p, near_row, parameters);
        e.target *= 1 / without_sum;
        return e;
    }
    /* Both are found, for then no element waits for another's branch */
    INLINE Element any(float q, float p) const
    {
        const bool chosen = is_near(row, q, p);
        const Element a = near(q, p), b = fast_element(q, p, row, parameters);
        const auto choose = [&](float near, float far) { return chosen ? opaque(near) : opaque(far); };
        Element e = b;
        e.term = choose(a.term, b.term);
        e.d_log_q = choose(a.d_log_q, b.d_log_q);
        e.input = choose(a.input, b.input);
        e.target = choose(a.target, b.target);
        return e;
    }
};

/* As `thread_sums` */
INLINE Sums thread_sums_of(const FineElements &elements, const Slice &slice, Pipeline &pipeline, const RowGroup &group)
{
    const Arguments &a = slice.a;
    Sums sums;
    const auto add = [](Sums &sums, const Element &e) {
        sums.term += e.term;
        sums.d_log_q += e.d_log_q;
    };
    const auto add_any = [&](float x, float y) { add(sums, elements.any(input_of(a, x), target_of(a, y))); };
    if (elements.are_near(slice, pipeline, group)) {
        each_deferring<false, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
            Sums more = sums;
            bool all = true;
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                const float q = input_of(a, at(x, k)), p = target_of(a, at(y, k));
                add(more, elements.near(q, p));
                all &= is_near(elements.row, q, p);
            }
            if (all)
                sums = more;
            return all;
        }, [&](float x, float y, int, int, const Row &) { add_any(x, y); }, [&] { return elements.row; });
    } else {
        each_vector<false, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                add_any(at(x, k), at(y, k));
        });
        each_edge(slice, group, [&](int i) { add_any(to_real(slice.x()[i]), to_real(slice.y()[i])); });
    }
    sums.d_log_p = sums.term - sums.d_log_q; /* Euler's */
    sums.q_minus_p = HAS_P_LOG_RATIO ? sums.d_log_q : -sums.d_log_p; /* of a log-ratio's mean, centred */
    return sums;
}

/* As `write_gradients` */
INLINE void write_gradients_of(const FineElements &elements, const Slice &slice, Pipeline &pipeline, const RowGroup &group, GradOut grad_out)
{
    const Arguments &a = slice.a;
    differentiate_label(a, pipeline, group, [&](float q, float p) { return elements.any(q, p).input * grad_out.input; }, grad_out);
    const auto differentiate_any = [&](float x, float y, DX &input, DY &target) {
        const float q = input_of(a, x), p = target_of(a, y);
        pull_back(a, elements.any(q, p), q, p, grad_out, input, target);
    };
    const GradientVectors vectors(slice);
    each_vector<false, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int) {
        Packed<DX> input;
        Packed<DY> target;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            differentiate_any(at(x, k), at(y, k), input.element[k], target.element[k]);
        vectors.write(input, target, before);
    });
    each_edge(slice, group, [&](int i) {
        DX input;
        DY target;
        differentiate_any(to_real(slice.x()[i]), to_real(slice.y()[i]), input, target);
        write_element(slice, input, target, i);
    });
}
#endif

}
