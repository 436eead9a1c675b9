/* Operations of formula.py where every element is near: of two ways to a value the one that is right there. */

#define near_select_near(x, bound, near, far) (near)
#define near_abs safe_abs
#define near_exp safe_exp
#define near_log_mix safe_log_mix
#define near_fraction safe_fraction
#define near_mixture safe_mixture
#define near_half_sign safe_half_sign
#define near_small_expm1 safe_small_expm1
#define near_small_bennett safe_small_bennett
#define near_small_exp_remainder safe_small_exp_remainder
#define near_logit_mass safe_logit_mass
#define near_logit_difference safe_logit_difference
#define near_logit_log_fraction safe_logit_log_fraction

INLINE real near_mass_times(real mass, real x) { return mass * x; }
