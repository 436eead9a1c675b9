/* The formula's vocabulary for rows of which both sides are logits, in float, where a sum shows afterwards whether
   it served: NaN or a huge number where it did not. A quotient that would need a guard is bounded instead, and so is
   the log-ratio of an element without mass.

   apart_: the distributions are known to be apart, so that close values need no series, and the scales are equal
   close_: any others */

#define IS_NARROW (sizeof(X) == 2 && sizeof(Y) == 2)

#define ONE_LESS 0.99999994f /* the float below 1 */

#define apart_abs k_abs
#define apart_gap k_gap
#define apart_small_gap k_gap
#define apart_part_of tame_ratio_or_zero
#define apart_small_expm1 apart_expm1
#define apart_small_bregman k_small_bregman
#define apart_log1p k_log1p

INLINE real power_of_2(real x)
{
    real result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/* Not to be contracted with a sum: its rounding is counted on */
INLINE real product(real x, real y) { return __fmul_rn(x, y); }

/* Where x is subnormal, 0 */
INLINE real flushed_product(real x, real y)
{
    real result;
    asm("mul.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

/* What logits are multiplied by, to be exponents of 2 */
INLINE real binary(real scale) { return product(scale, 1.44269504f); }

/* The rounding of top · scale is in the row's total too. */
INLINE real close_logit_mass(real x, real top, real scale, real inverse_total)
{
    return power_of_2(fmaf(x, binary(scale), -product(top, binary(scale)))) * inverse_total;
}

/* Of 16-bit rows the top is the whole norm, as an exponent: masses sum to 1 but for its rounding, which their gradients
   do not show and their sums are corrected for. */
INLINE real apart_logit_mass(real x, real top, real scale, real inverse_total)
{
    if (IS_NARROW)
        return power_of_2(fmaf(x, binary(scale), -top));
    return close_logit_mass(x, top, scale, inverse_total);
}

/* NaN of two -inf, and -inf, become what a mass of 0 makes nothing of. */
INLINE real bounded(real ratio) { return fmaxf(ratio, -3e38f); }

/* Powers of masses, as exponents */
INLINE real apart_logit_root(real x, real top, real scale, real inverse_total)
{
    if (IS_NARROW)
        return power_of_2(fmaf(x, 0.5f * binary(scale), -0.5f * top));
    return power_of_2(fmaf(x, 0.5f * binary(scale), -0.5f * product(top, binary(scale)))) * sqrtf(inverse_total);
}

INLINE real apart_logit_overlap(real y, real y_top, real y_scale, real y_inverse_total,
                                real x, real x_top, real x_scale, real x_inverse_total, real, real a)
{
    const real y_less = IS_NARROW ? y_top : product(y_top, binary(y_scale)) - log2f(y_inverse_total);
    const real x_less = IS_NARROW ? x_top : product(x_top, binary(x_scale)) - log2f(x_inverse_total);
    const real y_power = fmaf(y, binary(y_scale), -y_less), x_power = bounded(fmaf(x, binary(x_scale), -x_less));
    return power_of_2(fmaf(a, y_power, (1 - a) * x_power));
}

/* The difference of two 16-bit numbers of like size is a float; of others its rounding is nothing beside it. */
INLINE real apart_logit_difference(real y, real y_scale, real x, real x_scale, real shift, real shift_low)
{
    if (IS_NARROW)
        return bounded(fmaf(y - x, y_scale, -shift) - shift_low);
    return bounded(k_logit_difference(y, y_scale, x, x_scale, shift, shift_low));
}

/* a·p + b·q, of which logarithm and reciprocal are numbers */
INLINE real apart_mixture(real a, real p, real b, real q) { return fmaf(a, p, fmaf(b, q, SMALLEST_NORMAL)); }

/* log2(mass / mixture): of 16-bit rows from two exponents, whose roundings their gradients do not show. The logarithm's
   mean error, a 4.6e-8th of it, is taken off where the difference is small, but for a quarter: as near as a factor of one
   multiplication comes. */
INLINE real apart_logit_log2_part(real x, real top, real scale, real, real mixture, real share)
{
    if (!IS_NARROW) /* a bounded ratio stays a number */
        return fmaxf(share, -1e38f) * 1.44269504f;
    return fmaf(fmaf(x, binary(scale), -top), ONE_LESS, -log2_of(mixture));
}

INLINE real apart_logit_log_part(real x, real top, real scale, real inverse_total, real mixture, real share)
{
    return IS_NARROW ? apart_logit_log2_part(x, top, scale, inverse_total, mixture, share) * LN2 : share;
}

INLINE real apart_near(real, real, real, real apart) { return apart; }
INLINE real apart_exp(real x) { return power_of_2(x * 1.44269504f); }
INLINE real apart_expm1(real x) { return apart_exp(x) - 1; }
INLINE real apart_log(real x) { return tame_log(x > SMALLEST_NORMAL ? x : SMALLEST_NORMAL); }
INLINE real apart_mass_times(real mass, real x) { return mass * x; }
INLINE real apart_ratio_or_zero(real x, real y) { return tame_ratio_or_zero(x, y > 1e-37f ? y : 1e-37f); }

INLINE real apart_sqrt(real x)
{
    real result;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE real apart_log_blend(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b;
    return tame_log(larger + smaller * apart_exp(-k_abs(ratio)));
}

/* Where x is no smaller than masses that show */
INLINE real apart_step(real x) { return __saturatef(fmaf(x, 1e30f, 0.5f)); }
INLINE real apart_half_sign(real x) { return apart_step(x) - 0.5f; }

INLINE real close_logit_root(real x, real top, real scale, real inverse_total)
{
    return apart_sqrt(close_logit_mass(x, top, scale, inverse_total));
}

INLINE real close_logit_overlap(real y, real y_top, real y_scale, real y_inverse_total,
                                real x, real x_top, real x_scale, real x_inverse_total, real ratio, real a)
{
    const real p = close_logit_mass(y, y_top, y_scale, y_inverse_total), q = close_logit_mass(x, x_top, x_scale, x_inverse_total);
    return (ratio < 0 ? q : p) * apart_exp(ratio < 0 ? a * ratio : (a - 1) * ratio);
}

#define close_abs k_abs
#define close_logit_log_part k_logit_log_part
#define close_half_sign k_half_sign
#define close_near k_near
#define close_log1p tame_log1p
#define close_small_bregman k_small_bregman
#define close_exp apart_exp
#define close_log apart_log
#define close_sqrt apart_sqrt
#define close_mass_times apart_mass_times
#define close_ratio_or_zero apart_ratio_or_zero
#define close_part_of tame_ratio_or_zero
#define close_mixture apart_mixture

INLINE real close_logit_difference(real y, real y_scale, real x, real x_scale, real shift, real shift_low)
{
    if (y_scale == x_scale)
        return apart_logit_difference(y, y_scale, x, x_scale, shift, shift_low);
    return bounded(k_logit_difference(y, y_scale, x, x_scale, shift, shift_low));
}

/* The caller takes another value where |d| >= 1/2. */
INLINE real close_small_gap(real d)
{
    const real series[] = K_GAP_SERIES;
    real sum = series[K_GAP_TERMS - 1];
    K_UNROLL
    for (int k = K_GAP_TERMS - 2; k >= 0; k--)
        sum = sum * d + series[k];
    return d * d * sum;
}

INLINE real close_gap(real d) { return k_abs(d) < 0.5f ? close_small_gap(d) : d + (apart_exp(-d) - 1); }

/* The same */
INLINE real close_small_expm1(real x)
{
    real sum = 1.9841270e-4f; /* Taylor's; the next term is 6e-8 of the whole at 1/2 */
    sum = sum * x + 1.3888889e-3f;
    sum = sum * x + 8.3333333e-3f;
    sum = sum * x + 4.1666667e-2f;
    sum = sum * x + 1.6666667e-1f;
    sum = sum * x + 0.5f;
    return x * x * sum + x;
}

INLINE real close_expm1(real x) { return k_abs(x) < 0.5f ? close_small_expm1(x) : apart_exp(x) - 1; }

INLINE real close_log_blend(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b, d = k_abs(ratio);
    const real less = smaller * close_expm1(-d), near = less + log_correction(less);
    const real far = tame_log(larger + smaller * apart_exp(-d));
    return less > -0.29f ? near : far;
}
