/* Operations of formula.py for rows of which both sides are logits, in float. A sum shows afterwards whether they served: it is NaN or
   huge where they did not. A quotient that would need a guard is bounded instead, and so is the
   log-ratio of an element without mass.

   fast_:   the distributions are known to be far from each other, so that near values need no series, and the
            temperatures are equal
   stable_: any others */
#pragma once

#include "cuda/vector.cuh"

namespace kullback {

#define ONE_LESS 0.99999994f /* the float below 1 */

#define fast_abs safe_abs
#define fast_exp_remainder safe_exp_remainder
#define fast_small_exp_remainder safe_exp_remainder /* in what is not chosen */
#define fast_fraction in_range_ratio_or_zero
#define fast_select_normal(mass, normal, underflown) (underflown)
#define fast_small_expm1 fast_expm1
#define fast_bennett safe_bennett
#define fast_small_bennett safe_small_bennett
#define fast_log1p safe_log1p
#define fast_log_quotient safe_log_quotient
#define fast_log_difference safe_log_difference

INLINE real ex2(real x) { return ex2_approx_ftz(x); }
INLINE real lg2(real x) { return lg2_approx_ftz(x); } /* of a normal positive number */

/* Not to be contracted with a sum: its rounding is counted on */
INLINE real mul_rn(real x, real y) { return __fmul_rn(x, y); }

/* What logits are multiplied by, to be exponents of 2 */
INLINE real base_2(real inv_temperature) { return mul_rn(inv_temperature, 1.44269504f); }

/* The rounding of row_max · inv_temperature is in the row's Σ exp too. */
INLINE real stable_logit_mass(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    return ex2(fmaf(x, base_2(inv_temperature), -mul_rn(row_max, base_2(inv_temperature)))) * inv_sum_exp;
}

/* Of 16-bit rows row_max is the whole log-sum-exp, as an exponent: masses sum to 1 but for its rounding, which their
   gradients do not show and their sums are corrected for. */
INLINE real fast_logit_mass(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    if (IS_COARSE)
        return ex2(fmaf(x, base_2(inv_temperature), -row_max));
    return stable_logit_mass(x, row_max, inv_temperature, inv_sum_exp);
}

/* NaN of two -inf, and -inf, become what a mass of 0 makes nothing of. */
INLINE real finite_ratio(real ratio) { return fmaxf(ratio, -3e38f); }

/* Powers of masses, as exponents */
INLINE real fast_logit_sqrt(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    if (IS_COARSE)
        return ex2(fmaf(x, 0.5f * base_2(inv_temperature), -0.5f * row_max));
    const real half = 0.5f * mul_rn(row_max, base_2(inv_temperature));
    return ex2(fmaf(x, 0.5f * base_2(inv_temperature), -half)) * sqrtf(inv_sum_exp);
}

/* p^a q^(1-a) */
INLINE real fast_logit_geometric_mean(real y, real y_max, real y_scale, real y_inv_sum_exp, real, real, real, real, real ratio,
                                      real a)
{
    const real y_exponent = IS_COARSE ? fmaf(y, base_2(y_scale), -y_max)
                                      : fmaf(y, base_2(y_scale), -mul_rn(y_max, base_2(y_scale))) + log2f(y_inv_sum_exp);
    return ex2(fmaf((a - 1) * 1.44269504f, ratio, y_exponent));
}

/* p^a q^(1-a) / exp(log_total) */
INLINE real fast_logit_tilted_mass(real y, real y_max, real y_scale, real y_inv_sum_exp, real x, real x_max, real x_scale,
                                   real x_inv_sum_exp, real ratio, real a, real log_total)
{
    if (IS_COARSE) { /* from the larger mass: the other power is small, and so are its roundings */
        const bool is_less = ratio < 0;
        const real mass = ex2(is_less ? fmaf(x, base_2(x_scale), -x_max) : fmaf(y, base_2(y_scale), -y_max));
        return mass * ex2(fmaf(is_less ? a : a - 1, ratio, -log_total) * 1.44269504f);
    }
    const real y_exponent = fmaf(y, base_2(y_scale), -mul_rn(y_max, base_2(y_scale))) + log2f(y_inv_sum_exp);
    const real x_exponent = finite_ratio(fmaf(x, base_2(x_scale), -mul_rn(x_max, base_2(x_scale))) + log2f(x_inv_sum_exp));
    return ex2(fmaf(a, y_exponent, fmaf(1 - a, x_exponent, -1.44269504f * log_total)));
}

/* The difference of two 16-bit numbers of like size is a float; of others its rounding is nothing beside it. */
INLINE real exact_logit_difference(real y, real y_scale, real x, real x_scale, real high, real low)
{
    if (IS_16_BIT)
        return finite_ratio(fmaf(y - x, y_scale, -high) - low);
    return finite_ratio(safe_logit_difference(y, y_scale, x, x_scale, high, low));
}

/* Of 16-bit rows of the masses as they are rounded, by their exponents: what those are off by enters a centred term squared. */
INLINE real ratio_of_exponents(real y, real y_max, real y_scale, real x, real x_max, real x_scale)
{
    return fmaf(y, base_2(y_scale), -y_max) - fmaf(x, base_2(x_scale), -x_max);
}
INLINE real fast_logit_ratio(real y, real y_max, real y_scale, real x, real x_max, real x_scale, real high, real low)
{
    if (IS_COARSE)
        return finite_ratio(ratio_of_exponents(y, y_max, y_scale, x, x_max, x_scale)) * LN2;
    return exact_logit_difference(y, y_scale, x, x_scale, high, low);
}

/* The same of rows whose logits are all finite */
INLINE real finite_logit_ratio(real y, real y_max, real y_scale, real x, real x_max, real x_scale, real high, real low)
{
    return IS_COARSE ? ratio_of_exponents(y, y_max, y_scale, x, x_max, x_scale) * LN2
                     : exact_logit_difference(y, y_scale, x, x_scale, high, low);
}

/* In `near_element` */
#define NEAR_ELEMENT_RADIUS (IS_COARSE ? 1.0f : 2.5f)

/* Of 16-bit rows `high` alone: centred sums have the square of what is left out. Others' difference is exact: s + rest (Knuth). NaN of
   two -inf, for the caller to look for. */
INLINE real near_logit_ratio(real y, real, real y_scale, real x, real, real, real high, real low)
{
    const real s = y - x, t = s - y, rest = (y - (s - t)) - (x + t);
    return IS_16_BIT ? fmaf(s, y_scale, -high) : fmaf(s, y_scale, -high) + fmaf(rest, y_scale, -low);
}

/* The same of logits whose difference is hardly rounded */
INLINE real short_logit_ratio(real y, real, real y_scale, real x, real, real, real high, real)
{
    return fmaf(y - x, y_scale, -high);
}

/* (e^-d - 1 + d) / d up to NEAR_ELEMENT_RADIUS, of minimax polynomials that are at most 1.5e-7 of it off */
INLINE real near_small_exp_slope(real d)
{
    if (!IS_COARSE) {
        real sum = -2.57442796e-08f;
        sum = sum * d + 3.08085077e-07f;
        sum = sum * d - 2.76739661e-06f;
        sum = sum * d + 2.46349737e-05f;
        sum = sum * d - 0.000198328911f;
        sum = sum * d + 0.00138921756f;
        sum = sum * d - 0.00833349302f;
        sum = sum * d + 0.0416664705f;
        sum = sum * d - 0.166666597f;
        sum = sum * d + 0.5f;
        return d * sum;
    }
    real sum = 2.49371460e-05f;
    sum = sum * d - 0.000203013842f;
    sum = sum * d + 0.00138913444f;
    sum = sum * d - 0.00833122339f;
    sum = sum * d + 0.0416665375f;
    sum = sum * d - 0.166666895f;
    sum = sum * d + 0.5f;
    return d * sum;
}

/* a·p + b·q, of which logarithm and reciprocal are numbers */
INLINE real fast_mixture(real a, real p, real b, real q) { return fmaf(a, p, fmaf(b, q, SMALLEST_NORMAL)); }

/* log2(part / whole): of 16-bit rows from two exponents, whose roundings their gradients do not show. The logarithm's
   mean error, a 4.6e-8th of it, is taken off where the difference is small, but for a quarter: as near as a factor of one
   multiplication comes. */
INLINE real fast_logit_log2_fraction(real x, real row_max, real inv_temperature, real, real whole, real value)
{
    if (!IS_COARSE) /* a bounded ratio stays a number */
        return fmaxf(value, -1e38f) * 1.44269504f;
    return fmaf(fmaf(x, base_2(inv_temperature), -row_max), ONE_LESS, -lg2(whole));
}

/* From the ratio of the two masses: 0 where they are equal */
INLINE real near_logit_log2_fraction(real, real, real, real, real, real value) { return fmaxf(value, -1e38f) * 1.44269504f; }

INLINE real fast_logit_log_fraction(real x, real row_max, real inv_temperature, real inv_sum_exp, real whole, real value)
{
    return IS_COARSE ? fast_logit_log2_fraction(x, row_max, inv_temperature, inv_sum_exp, whole, value) * LN2 : value;
}

INLINE real fast_select_near(real, real, real, real far) { return far; }
INLINE real fast_exp(real x) { return ex2(x * 1.44269504f); }
INLINE real fast_expm1(real x) { return fast_exp(x) - 1; }
INLINE real fast_log(real x) { return in_range_log(x > SMALLEST_NORMAL ? x : SMALLEST_NORMAL); }
INLINE real fast_mass_times(real mass, real x) { return mass * x; }
INLINE real fast_ratio_or_zero(real x, real y) { return in_range_ratio_or_zero(x, y > 1e-37f ? y : 1e-37f); }
INLINE real fast_sqrt(real x) { return sqrt_approx_ftz(x); }

INLINE real fast_log_mix(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b;
    return in_range_log(larger + smaller * fast_exp(-safe_abs(ratio)));
}

/* 0 of 1 */
INLINE real near_log(real x) { return lg2(x > SMALLEST_NORMAL ? x : SMALLEST_NORMAL) * LN2; }
INLINE real near_log_mix(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b;
    return lg2(larger + smaller * fast_exp(-safe_abs(ratio))) * LN2;
}

/* 1 for x > 0, 0 for x < 0, where x is no smaller than masses that show */
INLINE real fast_step(real x) { return __saturatef(fmaf(x, 1e30f, 0.5f)); }
INLINE real fast_half_sign(real x) { return fast_step(x) - 0.5f; }

/* A power: a mass that is no normal number has a root that is one. */
INLINE real stable_logit_sqrt(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    const real half = 0.5f * mul_rn(row_max, base_2(inv_temperature));
    return ex2(fmaf(x, 0.5f * base_2(inv_temperature), -half)) * fast_sqrt(inv_sum_exp);
}

INLINE real stable_logit_tilted_mass(real y, real y_max, real y_scale, real y_inv_sum_exp, real x, real x_max, real x_scale,
                                     real x_inv_sum_exp, real ratio, real a, real log_total)
{
    const real y_exponent = fmaf(y, base_2(y_scale), -mul_rn(y_max, base_2(y_scale))) + lg2(y_inv_sum_exp);
    const real x_exponent = fmaf(x, base_2(x_scale), -mul_rn(x_max, base_2(x_scale))) + lg2(x_inv_sum_exp);
    const real power = (ratio < 0 ? a * ratio : (a - 1) * ratio) - log_total;
    return ex2(fmaf(power, 1.44269504f, ratio < 0 ? x_exponent : y_exponent));
}

INLINE real stable_logit_geometric_mean(real y, real y_max, real y_scale, real y_inv_sum_exp, real x, real x_max, real x_scale,
                                        real x_inv_sum_exp, real ratio, real a)
{
    return stable_logit_tilted_mass(y, y_max, y_scale, y_inv_sum_exp, x, x_max, x_scale, x_inv_sum_exp, ratio, a, 0);
}

#define stable_abs safe_abs
#define stable_logit_log_fraction safe_logit_log_fraction
#define stable_half_sign safe_half_sign
#define stable_select_near safe_select_near
#define stable_log1p in_range_log1p
#define stable_bennett safe_bennett
#define stable_small_bennett safe_small_bennett
#define stable_log_quotient safe_log_quotient
#define stable_log_difference safe_log_difference
#define stable_exp fast_exp
#define stable_log fast_log
#define stable_sqrt fast_sqrt
#define stable_mass_times fast_mass_times
#define stable_ratio_or_zero fast_ratio_or_zero
#define stable_fraction in_range_ratio_or_zero
#define stable_select_normal in_range_select_normal
#define stable_mixture fast_mixture

INLINE real stable_logit_ratio(real y, real, real y_scale, real x, real, real x_scale, real high, real low)
{
    if (y_scale == x_scale)
        return exact_logit_difference(y, y_scale, x, x_scale, high, low);
    return finite_ratio(safe_logit_difference(y, y_scale, x, x_scale, high, low));
}

#define stable_small_exp_remainder exp_remainder_series

INLINE real stable_exp_remainder(real d)
{
    return safe_abs(d) < 0.5f ? exp_remainder_series(d) : d + (fast_exp(-d) - 1);
}

/* The caller takes another value where |x| >= 1/2. */
INLINE real stable_small_expm1(real x)
{
    real sum = 1.9841270e-4f; /* Taylor's; the next term is 6e-8 of the whole at 1/2 */
    sum = sum * x + 1.3888889e-3f;
    sum = sum * x + 8.3333333e-3f;
    sum = sum * x + 4.1666667e-2f;
    sum = sum * x + 1.6666667e-1f;
    sum = sum * x + 0.5f;
    return x * x * sum + x;
}

INLINE real stable_expm1(real x) { return safe_abs(x) < 0.5f ? stable_small_expm1(x) : fast_exp(x) - 1; }

INLINE real stable_log_mix(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b, d = safe_abs(ratio);
    const real less = smaller * stable_expm1(-d), near = less + log_correction(less);
    const real far = in_range_log(larger + smaller * fast_exp(-d));
    return less > -0.29f ? near : far;
}

}
