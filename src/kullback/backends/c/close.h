/* Operations of formula.py where both masses of every element are nearly equal, in float64 and for describe.c alone: of two ways to a
   value the one right there. Losses of near rows have fine.h. */

#define close_select_near(x, bound, near, far) (near)
#define close_abs safe_abs
#define close_log_mix safe_log_mix
#define close_fraction safe_fraction
#define close_mixture safe_mixture
#define close_half_sign safe_half_sign
#define close_small_expm1 safe_small_expm1
#define close_small_bennett safe_small_bennett
#define close_small_exp_remainder safe_small_exp_remainder
#define close_logit_mass safe_logit_mass
#define close_logit_ratio safe_logit_ratio
#define close_logit_log_fraction safe_logit_log_fraction

INLINE real close_mass_times(real mass, real x) { return mass * x; }
