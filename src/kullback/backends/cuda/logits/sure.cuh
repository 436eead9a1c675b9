/* Rows that one sure token has, but for a little: what they have to lose is as small as that, whatever becomes of the other tokens,
   and so is the sure token's gradient. It is as large as all others' together, and what masses are off by is as large as its mass.
   But gradients sum to 0: what they sum to instead is taken off it. */
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
    /* An element's gradients, as they are upstream of softcaps */
    INLINE void see(const Element &e, GradOut grad_out) { see(e.input * grad_out.input, e.target * grad_out.target); }
};

#if HAS_SURE_ROWS
/* What the target has beside tokens of much mass */
INLINE float light_mass(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats)
{
    const Arguments &a = slice.a;
    const float log2_z_y = log2_z(stats.y_max, stats.y_sum_exp, a.target_inv_temperature);
    const float heavy = heavy_logit(log2_z_y, a.target_inv_temperature, HEAVY_EXPONENT_NEARER);
    const auto is_heavy = [&](float y) { return target_of(a, y) >= heavy; };
    float heavy_mass = 0;
    each_refining<false, true>(slice, pipeline, group, [&](const Packed<X> &, const Packed<Y> &y, long long, int) {
        bool is_any = false;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            is_any |= is_heavy(at(y, k));
        return !is_any;
    }, [&](float, float y) { return is_heavy(y); }, [&](float, float y, float low, int) {
        heavy_mass += ex2(fmaf(target_of(a, y), base_2(a.target_inv_temperature), -low));
    }, [](int) {}, [](int, float) {}, [&] { return log2_z_y; });
    return mass_sum(stats.y_max, stats.y_sum_exp, a.target_inv_temperature)
        - all_reduced(a, pipeline, group, SlopeSums { heavy_mass }).p;
}

/* Of either side's logits, the least mass that counts as a sure token's, as a power of 2 */
#define SURE_EXPONENT -6.0f

/* Takes off the gradients of tokens of much mass, as they have been written, what the row's sum to. The row is not read again. */
INLINE void correct_gradients(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, const RowTerms<true> &terms)
{
    const Arguments &a = slice.a;
    const SlopeSums excess = all_reduced(a, pipeline, group, SlopeSums { terms.target, terms.input });
    const Row row = row_constants<FAST>(a, opaque(stats), {});
    const float sure_x = heavy_logit(row.input_max, a.input_inv_temperature, SURE_EXPONENT);
    const float sure_y = heavy_logit(row.target_max, a.target_inv_temperature, SURE_EXPONENT);
    const auto is_sure = [&](float x, float y) {
        return (WANT_INPUT && input_of(a, x) >= sure_x) || (WANT_TARGET && target_of(a, y) >= sure_y);
    };
    each_refining<true, true>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
        bool is_any = false;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            is_any |= is_sure(at(x, k), at(y, k));
        return !is_any;
    }, is_sure, [&](float x, float y, const Row &row, int i) {
        const float own = input_of(a, x), other = target_of(a, y);
        if (WANT_INPUT) {
            const float q = fast_logit_mass(own, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
            const float cap = INPUT_IS_CAPPED ? softcap_grad(own, a.input_softcap) : 1;
            slice.d_input()[i] = rounded<DX>(fmaf(-q * cap, excess.q, to_real(slice.d_input()[i])));
        }
        if (WANT_TARGET) {
            const float p = fast_logit_mass(other, row.target_max, row.target_inv_temperature, row.target_inv_sum_exp);
            const float cap = TARGET_IS_CAPPED ? softcap_grad(other, a.target_softcap) : 1;
            slice.d_target()[i] = rounded<DY>(fmaf(-p * cap, excess.p, to_real(slice.d_target()[i])));
        }
    }, [](int) {}, [](int, const Row &) {}, [&] { return row; });
}
#endif

}
