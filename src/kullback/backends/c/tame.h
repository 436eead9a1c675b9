/* The vocabulary where every element lies in its form's tame range (forms.py): no zero, no infinity, no NaN,
   no quotient that over- or underflows. These are then all that guards would leave. */

#define tame_abs k_abs
#define tame_sqrt k_sqrt
#define tame_exp k_exp
#define tame_expm1 k_expm1
#define tame_log1p k_log1p
#define tame_gap k_gap
#define tame_logit_difference k_logit_difference

INLINE real tame_mass_times(real mass, real x) { return mass * x; }
INLINE real tame_ratio_or_zero(real x, real y) { return x / y; }
INLINE real tame_log_difference(real log_p, real log_q) { return log_p - log_q; }
INLINE real tame_log_quotient(real p, real q) { return tame_log(p / q); }
INLINE real tame_bregman(real z) { return bregman_of(z, tame_log(z + 1)); }
