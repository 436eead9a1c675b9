/* The formula's vocabulary for rows of which both sides are logits and whose distributions are known to be apart: close
   values need no series. A sum shows afterwards whether it served: NaN or a huge number where it did not. In float. */

/* 2^x of x < 128; 0 below -126.5. The polynomial is a minimax fit (docs/numerics.md). */
INLINE real power_of_2(real x)
{
    const real bounded = x > -127.0f ? x : -127.0f;
    const real rounded = bounded + ROUND_TO_INTEGER, f = bounded - (rounded - ROUND_TO_INTEGER);
    real sum = 0.00015353372f;
    sum = sum * f + 0.0013398874f;
    sum = sum * f + 0.009618437f;
    sum = sum * f + 0.055503324f;
    sum = sum * f + 0.24022648f;
    sum = sum * f + 0.6931472f;
    sum = sum * f + 1;
    /* of the rounded number the last bits are the integer */
    return sum * from_bits((bits)((to_bits(rounded) << MANTISSA_BITS) + ((ubits)EXPONENT_BIAS << MANTISSA_BITS)));
}

/* What logits are multiplied by, to be exponents of 2 */
INLINE real binary(real scale) { return scale * 1.44269504f; }

/* NaN of two -inf, and -inf, become what a mass of 0 makes nothing of. */
INLINE real bounded(real ratio) { return ratio > -3e38f ? ratio : -3e38f; }

#define apart_abs k_abs
#define apart_half_sign k_half_sign
#define apart_gap k_gap
#define apart_small_gap k_small_gap
#define apart_small_bregman k_small_bregman
#define apart_sqrt k_sqrt
#define apart_log1p k_log1p
#define apart_logit_log_part k_logit_log_part

INLINE real apart_near(real x, real bound, real close, real apart)
{
    (void)x, (void)bound, (void)close;
    return apart;
}

INLINE real apart_exp(real x) { return power_of_2(x * 1.44269504f); }
INLINE real apart_expm1(real x) { return apart_exp(x) - 1; }
#define apart_small_expm1 apart_expm1
INLINE real apart_log(real x) { return tame_log(x > SMALLEST_NORMAL ? x : SMALLEST_NORMAL); }
INLINE real apart_mass_times(real mass, real x) { return mass * x; }
INLINE real apart_ratio_or_zero(real x, real y) { return x / (y > 1e-37f ? y : 1e-37f); }
#define apart_mixture k_mixture
#define apart_part_of apart_ratio_or_zero

INLINE real apart_log_blend(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b;
    return tame_log(larger + smaller * apart_exp(-k_abs(ratio)));
}

INLINE real apart_logit_difference(real y, real y_scale, real x, real x_scale, real shift, real shift_low)
{
    return bounded(k_logit_difference(y, y_scale, x, x_scale, shift, shift_low));
}

INLINE real apart_logit_mass(real x, real top, real scale, real inverse_total)
{
    return power_of_2((x - top) * binary(scale)) * inverse_total;
}

/* Powers of masses, as exponents */
INLINE real apart_logit_root(real x, real top, real scale, real inverse_total)
{
    return power_of_2((x - top) * (0.5f * binary(scale))) * k_sqrt(inverse_total);
}

/* The same of any x: 2^127.5 from there on */
INLINE real large_power_of_2(real x) { return power_of_2(x < 127.5f ? x : 127.5f); }

/* 2^(a·y_power + (1 - a)·x_power) */
INLINE real blend_of_powers(real y_power, real x_power, real a)
{
    return large_power_of_2(a * y_power + (1 - a) * bounded(x_power));
}

/* By the ratio, whose multiples lose fewer digits than those of exponents */
INLINE real apart_logit_overlap(real y, real y_top, real y_scale, real y_inverse_total,
                                real x, real x_top, real x_scale, real x_inverse_total, real ratio, real a)
{
    const real p = apart_logit_mass(y, y_top, y_scale, y_inverse_total), q = apart_logit_mass(x, x_top, x_scale, x_inverse_total);
    return (ratio < 0 ? q : p) * large_power_of_2((ratio < 0 ? a * ratio : (a - 1) * ratio) * 1.44269504f);
}
