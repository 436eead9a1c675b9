/* Operations of formula.py for rows of logits that are far from each other, in float: near values need no series, and
   nothing is guarded. A sum shows afterwards whether they served: NaN or a huge number where they did not. */

/* 2^x of x < 128; 0 below -126.5 */
INLINE real ex2(real x)
{
    const real bounded = x > -127.0f ? x : -127.0f, rounded = bounded + ROUND_TO_INTEGER;
    return ex2_of_parts(rounded, bounded - (rounded - ROUND_TO_INTEGER));
}

/* What logits are multiplied by, to be exponents of 2 */
INLINE real base_2(real inv_temperature) { return inv_temperature * 1.44269504f; }

/* NaN of two -inf, and -inf, become what a mass of 0 makes nothing of. */
INLINE real finite_ratio(real ratio) { return ratio > -3e38f ? ratio : -3e38f; }

#define fast_abs safe_abs
#define fast_half_sign safe_half_sign
#define fast_exp_remainder safe_exp_remainder
#define fast_small_exp_remainder safe_small_exp_remainder
#define fast_bennett safe_bennett
#define fast_small_bennett safe_small_bennett
#define fast_sqrt safe_sqrt
#define fast_log1p safe_log1p
#define fast_log_quotient safe_log_quotient
#define fast_log_difference safe_log_difference
#define fast_logit_log_fraction safe_logit_log_fraction

INLINE real fast_select_near(real x, real bound, real near, real far)
{
    (void)x, (void)bound, (void)near;
    return far;
}

INLINE real fast_exp(real x) { return ex2(x * 1.44269504f); }
INLINE real fast_expm1(real x) { return fast_exp(x) - 1; }
#define fast_small_expm1 fast_expm1
INLINE real fast_log(real x) { return in_range_log(x > SMALLEST_NORMAL ? x : SMALLEST_NORMAL); }
INLINE real fast_mass_times(real mass, real x) { return mass * x; }
INLINE real fast_ratio_or_zero(real x, real y) { return x / (y > 1e-37f ? y : 1e-37f); }
#define fast_mixture safe_mixture
#define fast_fraction fast_ratio_or_zero
#define fast_select_normal(mass, normal, underflown) (underflown)

INLINE real fast_log_mix(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b;
    return in_range_log(larger + smaller * fast_exp(-safe_abs(ratio)));
}

INLINE real fast_logit_ratio(real y, real y_max, real y_scale, real x, real x_max, real x_scale, real high, real low)
{
    return finite_ratio(safe_logit_ratio(y, y_max, y_scale, x, x_max, x_scale, high, low));
}

INLINE real fast_logit_mass(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    return ex2((x - row_max) * base_2(inv_temperature)) * inv_sum_exp;
}

/* Powers of masses, as exponents */
INLINE real fast_logit_sqrt(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    return ex2((x - row_max) * (0.5f * base_2(inv_temperature))) * safe_sqrt(inv_sum_exp);
}

/* 2^x of any x; 2^127.5 from there on */
INLINE real saturating_ex2(real x) { return ex2(x < 127.5f ? x : 127.5f); }

/* 2^(a·y_exponent + (1 - a)·x_exponent) */
INLINE real ex2_of_mean(real y_exponent, real x_exponent, real a)
{
    return saturating_ex2(a * y_exponent + (1 - a) * finite_ratio(x_exponent));
}

/* By the ratio, whose multiples lose fewer digits than those of exponents */
INLINE real fast_logit_tilted_mass(real y, real y_max, real y_scale, real y_inv_sum_exp, real x, real x_max, real x_scale,
                                   real x_inv_sum_exp, real ratio, real a, real log_total)
{
    const real y_exponent = (y - y_max) * base_2(y_scale) + in_range_log(y_inv_sum_exp) * 1.44269504f;
    const real x_exponent = (x - x_max) * base_2(x_scale) + in_range_log(x_inv_sum_exp) * 1.44269504f;
    const real power = (ratio < 0 ? a * ratio : (a - 1) * ratio) - log_total;
    return saturating_ex2((ratio < 0 ? x_exponent : y_exponent) + power * 1.44269504f);
}

/* p^a q^(1-a) */
INLINE real fast_logit_geometric_mean(real y, real y_max, real y_scale, real y_inv_sum_exp, real x, real x_max, real x_scale,
                                      real x_inv_sum_exp, real ratio, real a)
{
    (void)x, (void)x_max, (void)x_scale, (void)x_inv_sum_exp;
    return saturating_ex2(((y - y_max) * base_2(y_scale) + (a - 1) * ratio * 1.44269504f)) * y_inv_sum_exp;
}
