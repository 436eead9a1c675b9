/* Operations of formula.py, of two ways to a value the one that is right where both masses of an element are nearly equal
   (close_), or where an element is light, a number, and of a row that is not close (light_). */
#pragma once

#include "cuda/vector.cuh"
#if !REAL_IS_DOUBLE
#include "cuda/logits/fast_math.cuh"
#endif

namespace kullback {

#define close_abs safe_abs
#define close_exp safe_exp
#define close_log_mix safe_log_mix
#define close_half_sign safe_half_sign
#define close_small_bennett safe_small_bennett
#define close_small_exp_remainder exp_remainder_series
#define close_logit_mass safe_logit_mass
#define close_logit_difference safe_logit_difference
#define close_logit_log_fraction safe_logit_log_fraction

INLINE real close_select_near(real, real, real near, real) { return near; }
INLINE real close_mass_times(real mass, real x) { return mass * x; }
INLINE real close_small_expm1(real x) { return x + exp_remainder_series(-x); }
#if REAL_IS_DOUBLE
#define close_mixture safe_mixture
#define close_fraction safe_fraction
#else
#define close_mixture fast_mixture
#define close_fraction in_range_ratio_or_zero

#define light_abs safe_abs
#define light_half_sign safe_half_sign
#define light_small_expm1 close_small_expm1
#define light_small_bennett safe_small_bennett
#define light_small_exp_remainder exp_remainder_series
#define light_logit_difference stable_logit_difference
#define light_logit_log_fraction safe_logit_log_fraction
#define light_select_near fast_select_near
#define light_mass_times fast_mass_times
#define light_mixture fast_mixture
#define light_fraction in_range_ratio_or_zero
#define light_log_mix fast_log_mix
#define light_exp fast_exp

/* Of the difference, as the row's Σ exp was found: a rounding that all masses share would not be in that. */
INLINE real light_logit_mass(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    return ex2((x - row_max) * base_2(inv_temperature)) * inv_sum_exp;
}
#endif

}
