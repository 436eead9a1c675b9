/* Operations of formula.py for an element of logits whose log-ratio is finite and beyond NEAR_RADIUS, so that no selection takes
   what is near (light_). */
#pragma once

#include "cuda/vector.cuh"
#if !REAL_IS_DOUBLE
#include "cuda/logits/fast_math.cuh"
#endif

namespace kullback {

#if !REAL_IS_DOUBLE
#define light_abs safe_abs
#define light_half_sign safe_half_sign
#define light_small_expm1(x) ((real)0)
#define light_small_bennett(x) ((real)0)
#define light_small_exp_remainder(x) ((real)0)
#define light_logit_ratio stable_logit_ratio
#define light_logit_log_fraction safe_logit_log_fraction
#define light_select_near fast_select_near
#define light_mass_times fast_mass_times
#define light_mixture fast_mixture
#define light_fraction in_range_ratio_or_zero
#define light_log_mix near_log_mix

/* Of the difference, as the row's Σ exp was found: a rounding that all masses share would not be in that. */
INLINE real light_logit_mass(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    return ex2((x - row_max) * base_2(inv_temperature)) * inv_sum_exp;
}
#endif

}
