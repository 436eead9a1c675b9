/* Operations of formula.py that C and CUDA share, and softcaps. Each of the prefixes has every operation that a kind may be printed
   with, so that a new kind compiles. Wanted before it: real, REAL_IS_DOUBLE, SMALLEST_NORMAL, INLINE, REAL_INFINITY,
   UNROLL_LOOP, to_bits (unsigned), real_fma, real_copysign, safe_ abs, exp, expm1, log, log1p, sqrt, the in_range_ ones of division
   and exp, log_correction; mass_exp in float. Every selection is a conditional between values already computed, so that a C
   compiler can vectorise it. Series are minimax fits (float) or Taylor (double); docs/numerics.md says how they were made. */

INLINE real safe_select_near(real x, real bound, real near, real far)
{
    return safe_abs(x) < bound ? near : far;
}

INLINE real safe_select_normal(real mass, real normal, real underflown)
{
    return mass < SMALLEST_NORMAL ? underflown : normal;
}

#define HIGHEST_EXPONENT (REAL_IS_DOUBLE ? (real)709 : (real)88) /* whose power is a number */

/* A power of 2, no more than 1/n: of n numbers times that no sum is beyond the largest of them. */
INLINE real share_of(real n)
{
    real share = 1;
    while (share * n > 1)
        share /= 2;
    return share;
}

/* mass · exp(x), also where the mass underflows or the exponential overflows */
INLINE real safe_mass_times_exp(real mass, real log_mass, real x)
{
    const int by_logs = (mass < SMALLEST_NORMAL) | (x > HIGHEST_EXPONENT);
    return (by_logs ? (real)1 : mass) * safe_exp(by_logs ? log_mass + x : x);
}

INLINE real safe_half_sign(real x)
{
    const real less = x < 0 ? (real)-0.5 : (real)0;
    return x > 0 ? (real)0.5 : less;
}

INLINE real safe_logit_mass(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    return safe_exp((x - row_max) * inv_temperature) * inv_sum_exp;
}

INLINE real safe_logit_sqrt(real x, real row_max, real inv_temperature, real inv_sum_exp)
{
    return safe_sqrt(safe_logit_mass(x, row_max, inv_temperature, inv_sum_exp));
}

/* log(p^a q^(1-a)), from the larger mass: of two infinities one would be subtracted */
INLINE real safe_logit_log_geometric_mean(real y, real y_max, real y_scale, real y_inv_sum_exp,
                                          real x, real x_max, real x_scale, real x_inv_sum_exp, real ratio, real a)
{
    const real log_p = (y - y_max) * y_scale + safe_log(y_inv_sum_exp);
    const real log_q = (x - x_max) * x_scale + safe_log(x_inv_sum_exp);
    return (ratio < 0 ? log_q : log_p) + (ratio < 0 ? a * ratio : (a - 1) * ratio);
}

/* p^a q^(1-a) / exp(log_total) */
INLINE real safe_logit_tilted_mass(real y, real y_max, real y_scale, real y_inv_sum_exp, real x, real x_max, real x_scale,
                                   real x_inv_sum_exp, real ratio, real a, real log_total)
{
    return safe_exp(safe_logit_log_geometric_mean(y, y_max, y_scale, y_inv_sum_exp, x, x_max, x_scale, x_inv_sum_exp, ratio, a)
                    - log_total);
}

/* p^a q^(1-a) */
INLINE real safe_logit_geometric_mean(real y, real y_max, real y_scale, real y_inv_sum_exp, real x, real x_max, real x_scale,
                                      real x_inv_sum_exp, real ratio, real a)
{
    return safe_exp(safe_logit_log_geometric_mean(y, y_max, y_scale, y_inv_sum_exp, x, x_max, x_scale, x_inv_sum_exp, ratio, a));
}

/* cap · tanh(x / cap), and its derivative from its value. In float it is x less a minimax fit, where x is small beside the cap, or
   else the cap less 2·cap·e / (1 + e), e = exp(-2|x| / cap). What is taken off is the smaller part: its rounding counts little. */
INLINE real softcapped(real x, real cap)
{
#if REAL_IS_DOUBLE
    const real less = safe_expm1(-2 * safe_abs(x) / cap), tanh_of = cap * (less / (2 + less));
    return x < 0 ? tanh_of : -tanh_of;
#else
    const real size = safe_abs(x) * (1 / cap), square = size * size;
    real sum = -0.005895157f;
    sum = sum * square + 0.020795971f;
    sum = sum * square - 0.05378383f;
    sum = sum * square + 0.13331924f;
    sum = sum * square - 0.333333f;
    const real near = real_fma(x * square, sum, x);
    const real power = mass_exp(-2 * size), far = cap - in_range_ratio_or_zero(2 * cap * power, 1 + power);
    return size < 0.6f ? near : real_copysign(far, x);
#endif
}

INLINE real softcap_grad(real capped, real cap)
{
    const real inverse = 1 / cap;
    return (cap - capped) * inverse * ((cap + capped) * inverse);
}

/* From the value times inv_temperature: the cap itself is told before a quotient rounds it. */
INLINE real scaled_softcap_grad(real scaled, real inv_temperature, real cap)
{
    const real slope = softcap_grad(scaled / inv_temperature, cap);
    return safe_abs(scaled) < cap * inv_temperature ? slope : (real)0;
}

INLINE real safe_mass_times(real mass, real x)
{
    const int nothing = (mass == 0) & (safe_abs(x) == REAL_INFINITY);
    return mass * (nothing ? (real)0 : x);
}

INLINE real safe_log_difference(real log_p, real log_q)
{
    const int nothing = (log_p == log_q) & (safe_abs(log_p) == REAL_INFINITY);
    return nothing ? (real)0 : log_p - log_q;
}

/* Two-difference (Knuth): s + r = y - x exactly. Infinite logits make r NaN; it is then nothing. */
INLINE real safe_logit_difference(real y, real y_scale, real x, real x_scale, real high, real low)
{
    const real a = y * y_scale, b = x * x_scale;
    const real tail = real_fma(y, y_scale, -a) - real_fma(x, x_scale, -b);
    const real s = a - b, t = s - a;
    const real rest = ((a - (s - t)) - (b + t)) + tail;
    const real r = safe_abs(rest) < REAL_INFINITY ? rest : (real)0;
    const real result = (s - high) + (r - low);
    const int nothing = (a < (real)-1e38) & (b < (real)-1e38); /* no masses, and of scaled numbers one may be infinite */
    return nothing ? (real)0 : result;
}

/* The same as log(p / q), of which some have exponents (lowering.py) */
INLINE real safe_logit_ratio(real y, real y_max, real y_scale, real x, real x_max, real x_scale, real high, real low)
{
    (void)y_max, (void)x_max;
    return safe_logit_difference(y, y_scale, x, x_scale, high, low);
}

INLINE real safe_mixture(real a, real p, real b, real q) { return a * p + b * q; }

INLINE real safe_fraction(real part, real whole)
{
    const int nothing = whole == 0;
    return (nothing ? (real)0 : part) / (nothing ? (real)1 : whole);
}

#if REAL_IS_DOUBLE
#define EXP_REMAINDER_SERIES { 1.0/2, -1.0/6, 1.0/24, -1.0/120, 1.0/720, -1.0/5040, 1.0/40320, -1.0/362880, \
    1.0/3628800, -1.0/39916800, 1.0/479001600, -1.0/6227020800, 1.0/87178291200, \
    -1.0/1307674368000, 1.0/20922789888000 }
#define EXP_REMAINDER_TERMS 15
#else
#define EXP_REMAINDER_SERIES { 0.5f, -0.16666667f, 0.041666668f, -0.008333182f, 0.0013888608f, -0.00019962185f, \
    2.4957046e-05f }
#define EXP_REMAINDER_TERMS 7
#define BENNETT_SERIES { 0.49999997f, -0.16666655f, 0.083337836f, -0.050010528f, 0.03313448f, -0.02352312f, \
    0.020618126f, -0.016788587f }
#define BENNETT_TERMS 8
#endif

INLINE real exp_remainder_series(real d)
{
    const real series[] = EXP_REMAINDER_SERIES;
    real sum = series[EXP_REMAINDER_TERMS - 1];
    UNROLL_LOOP
    for (int k = EXP_REMAINDER_TERMS - 2; k >= 0; k--)
        sum = sum * d + series[k];
    return d * d * sum;
}

INLINE real safe_exp_remainder(real d)
{
    const real near = exp_remainder_series(d), far = d + (safe_exp(-d) - 1);
    return safe_abs(d) < (real)0.5 ? near : far;
}

INLINE real safe_log_mix(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b, d = safe_abs(ratio);
    const real less = smaller * safe_expm1(-d);
    return less > (real)-0.29 ? less + log_correction(less) : safe_log(larger + smaller * safe_exp(-d));
}

INLINE real safe_small_bennett(real z)
{
#if REAL_IS_DOUBLE
    /* s = z / (2 + z): (1 + z)·log1p(z) - z = (2s² + (1 + s)·(log1p(z) - 2s)) / (1 - s) */
    const real s = z / (2 + z), w = s * s;
    real sum = 2.0 / 31;
    UNROLL_LOOP
    for (int k = 29; k >= 3; k -= 2)
        sum = sum * w + 2.0 / k;
    return (2 * w + (1 + s) * (s * w * sum)) / (1 - s);
#else
    const real series[] = BENNETT_SERIES;
    real sum = series[BENNETT_TERMS - 1];
    UNROLL_LOOP
    for (int k = BENNETT_TERMS - 2; k >= 0; k--)
        sum = sum * z + series[k];
    return z * z * sum;
#endif
}

/* The caller brings log(1 + z), or any finite number where 1 + z = 0. */
INLINE real bennett_of(real z, real logarithm)
{
    const real far = (z + 1) * logarithm - z;
    const real near = safe_small_bennett(z);
    return safe_abs(z) < (real)(1.0 / 3) ? near : far;
}

INLINE real safe_bennett(real z)
{
    return bennett_of(z, z + 1 == 0 ? (real)0 : safe_log(z + 1));
}

#define safe_logit_log_fraction(x, row_max, inv_temperature, inv_sum_exp, whole, value) (value)

/* The same where every element lies in its form's range (forms.py): no zero, no infinity, no NaN, no quotient that over-
   or underflows, and so nothing to guard. Wanted before it: in_range_log of a normal positive number, in_range_log1p,
   in_range_log_quotient, in_range_ratio_or_zero. Kernels try this first and look at the range of what they read; where
   something was out of it they compute again. */

#define in_range_abs safe_abs
#define in_range_half_sign safe_half_sign
#define in_range_select_near safe_select_near
#define in_range_sqrt safe_sqrt
#define in_range_expm1 safe_expm1
#define in_range_exp_remainder safe_exp_remainder
#define in_range_small_exp_remainder safe_small_exp_remainder
#define in_range_small_expm1 safe_small_expm1
#define in_range_small_bennett safe_small_bennett
#define in_range_log_mix safe_log_mix

INLINE real in_range_select_normal(real mass, real normal, real underflown)
{
    (void)mass, (void)underflown;
    return normal;
}

INLINE real in_range_mass_times_exp(real mass, real log_mass, real x)
{
    (void)log_mass;
    return mass * in_range_exp(x);
}

INLINE real in_range_mass_times(real mass, real x) { return mass * x; }
INLINE real in_range_fraction(real part, real whole) { return in_range_ratio_or_zero(part, whole); }
INLINE real in_range_log_difference(real log_p, real log_q) { return log_p - log_q; }

INLINE real in_range_bennett(real z)
{
    const real one_more = z + 1; /* 0 where z was rounded to -1 */
    return bennett_of(z, in_range_log(one_more > SMALLEST_NORMAL ? one_more : (real)SMALLEST_NORMAL));
}

/* How far an element is above the low end of its range, as an integer that grows with it: the bits of floats are
   ordered, and those of NaN and of negative numbers lie above all positive ones'. A range about zero (low < 0,
   high = -low) is one of magnitudes. */
#define RANGE_OFFSET(x, low) (to_bits((low) > 0 ? (x) : safe_abs(x)) - to_bits((low) > 0 ? (low) : (real)0))
