/* Rows of which one token has nearly all mass, a sure one. Its gradient is as small as the mass of the others, and its own mass is
   rounded by about as much. But the gradients of a row's logits sum to 0. What they are found to sum to is the error of the
   normalisers, of which each token has a share as large as its mass: it is subtracted. */
#pragma once

#include "cuda/logits/gradients.cuh"

namespace kullback {

/* What a thread sums of a row whose gradients it writes. SURE: of one that a sure token may have. */
template <bool SURE> struct RowTerms : TermSums {
    float input = 0, target = 0; /* Σ gradients */

    INLINE void operator+=(const RowTerms &more)
    {
        light += more.light;
        see(more.input, more.target);
    }
    INLINE void see(float more_input, float more_target)
    {
        if (SURE && WANT_INPUT)
            input += more_input;
        if (SURE && WANT_TARGET)
            target += more_target;
    }
    INLINE void see(const Element &e, GradOut grad_out) { see(e.input * grad_out.input, e.target * grad_out.target); }
};

/* An element's, as they are upstream of softcaps */
struct Gradients {
    float input, target;

    INLINE Gradients(float input, float target) : input(input), target(target) {}
    INLINE Gradients(const Element &e, GradOut grad_out) : input(e.input * grad_out.input), target(e.target * grad_out.target) {}
};

#if HAS_SURE_ROWS
/* What the target has beside tokens of much mass */
INLINE float light_mass(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats)
{
    const Arguments &a = slice.a;
    const float log2_z_y = log2_z(stats.y_max, stats.y_sum_exp, a.target_inv_temperature);
    const float heavy = heavy_logit(log2_z_y, a.target_inv_temperature, HEAVY_EXPONENT_NEARER);
    float heavy_mass = 0;
    each_such<false>(slice, pipeline, group, [&](float, float y) { return target_of(a, y) >= heavy; }, [&](float, float y, int) {
        heavy_mass += fast_logit_mass(target_of(a, y), log2_z_y, a.target_inv_temperature, 1);
    });
    return mass_sum(stats.y_max, stats.y_sum_exp, a.target_inv_temperature)
        - all_reduced(a, pipeline, group, heavy_mass);
}

/* Writes the gradients of tokens of much mass again, less their shares of what the row's gradients sum to (with labels: beyond what
   they are to sum to). own(q, p): such a token's gradients as they were summed. The row is not read again. */
template <typename F>
INLINE void correct_gradients(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, const Sums &sums,
                              const RowTerms<true> &terms, GradOut grad_out, F own)
{
    const Arguments &a = slice.a;
    const SlopeSums found = all_reduced(a, pipeline, group, SlopeSums { terms.target, terms.input });
    const float of_target = found.p, of_input = HAS_AUXILIARY ? fmaf(-grad_out.input, sums.auxiliary, found.q) : found.q;
    const Row row = row_constants<FAST>(a, opaque(stats), {});
    const float heavy_x = heavy_logit(log2_z(stats.x_max, stats.x_sum_exp, a.input_inv_temperature), a.input_inv_temperature,
                                      HEAVY_EXPONENT_NEARER);
    const float heavy_y = heavy_logit(log2_z(stats.y_max, stats.y_sum_exp, a.target_inv_temperature), a.target_inv_temperature,
                                      HEAVY_EXPONENT_NEARER);
    const auto input_of_own = [&](float gradient, float q) {
        const float mass = fast_logit_mass(q, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
        return grad_out.of_input(a, fmaf(-mass, of_input, gradient), q);
    };
    const auto target_of_own = [&](float gradient, float p) {
        const float mass = fast_logit_mass(p, row.target_max, row.target_inv_temperature, row.target_inv_sum_exp);
        return rounded<DY>(fmaf(-mass, of_target, gradient) * (TARGET_IS_CAPPED ? softcap_grad(p, a.target_softcap) : 1));
    };
#if HAS_AUXILIARY
    if (WANT_INPUT && group.has_label) { /* its gradient is written after all others */
        const Label label = label_of(pipeline);
        const float q = input_of(a, label.x);
        own_label().input = input_of_own(own(q, target_of(a, label.y)).input - grad_out.label, q);
    }
#endif
    each_such<true>(slice, pipeline, group, [&](float x, float y) {
        return (WANT_INPUT && input_of(a, x) >= heavy_x) || (WANT_TARGET && target_of(a, y) >= heavy_y);
    }, [&](float x, float y, int i) {
        const float q = input_of(a, x), p = target_of(a, y);
        const Gradients gradients = own(q, p);
        write_element(slice, input_of_own(gradients.input, q), target_of_own(gradients.target, p), i);
    });
}
#endif

}
