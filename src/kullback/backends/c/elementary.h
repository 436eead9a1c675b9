/* exp, expm1, log, log1p and the guarded quotients: straight-line code on numbers, no table, no call. */

INLINE real safe_log(real x)
{
    const int subnormal = x < SMALLEST_NORMAL;
    const real raised = in_range_log(subnormal ? x * RAISE : x);
    const real finite = raised - (subnormal ? (real)(RAISE_EXPONENT * LN2) : (real)0);
    const real large = x < (real)INFINITY ? finite : x; /* +inf and NaN are themselves */
    const real positive = x == 0 ? -(real)INFINITY : large;
    return x < 0 ? (real)NAN : positive;
}

INLINE real safe_log_quotient(real p, real q)
{
    const real quotient = p / q, least = (real)1e-30, most = (real)1e30;
    const int direct = (p >= least) & (p < most) & (q >= least) & (q < most) & (quotient >= least) & (quotient < most);
    const real near = in_range_log_quotient(p, q), far = safe_log(p) - safe_log(q);
    const real apart = direct ? near : far;
    return (p == 0) & (q == 0) ? (real)0 : apart;
}

INLINE real safe_log1p(real z)
{
    const real near = z + log_correction(z), far = safe_log(1 + z);
    const int small = (z > (real)-0.29) & (z < (real)(1.0 / 3));
    return small ? near : far;
}

/* (exp(r) - 1 - r) / r², |r| <= log(2) / 2 */
INLINE real exp_series(real r)
{
#if REAL_IS_DOUBLE
    real sum = 1.0 / 87178291200.0;
    sum = sum * r + 1.0 / 6227020800.0;
    sum = sum * r + 1.0 / 479001600;
    sum = sum * r + 1.0 / 39916800;
    sum = sum * r + 1.0 / 3628800;
    sum = sum * r + 1.0 / 362880;
    sum = sum * r + 1.0 / 40320;
    sum = sum * r + 1.0 / 5040;
    sum = sum * r + 1.0 / 720;
    sum = sum * r + 1.0 / 120;
    sum = sum * r + 1.0 / 24;
    sum = sum * r + 1.0 / 6;
    return sum * r + 0.5;
#else
    real sum = 0.0001990758f;
    sum = sum * r + 0.001393365f;
    sum = sum * r + 0.0083332863f;
    sum = sum * r + 0.041666467f;
    sum = sum * r + 0.16666667f;
    return sum * r + 0.5f;
#endif
}

INLINE real safe_exp(real x)
{
    const real low = x < EXP_LOWEST ? (real)EXP_LOWEST : x;
    const real bounded = low > EXP_HIGHEST ? (real)EXP_HIGHEST : low;
    const real rounded = bounded * (real)1.4426950408889634 + ROUND_TO_INTEGER;
    const real n = rounded - ROUND_TO_INTEGER;
    const real r = real_fma(n, -LN2_LOW, real_fma(n, -LN2_HIGH, bounded));
    const real y = (exp_series(r) * (r * r) + r) + 1;
    /* 2^n in two factors: the result may be subnormal where 2^n itself is not a number */
    const bits whole = (bits)n, half = whole >> 1;
    const real first = from_bits((bits)((ubits)(half + EXPONENT_BIAS) << MANTISSA_BITS));
    const real second = from_bits((bits)((ubits)(whole - half + EXPONENT_BIAS) << MANTISSA_BITS));
    const real result = (y * first) * second;
    return x == x ? result : x;
}

#if !REAL_IS_DOUBLE
/* 2^(n + f) of |f| <= 1/2, where ROUND_TO_INTEGER + n is given, whose last bits are n; 0 of n = -127. The polynomial is a minimax
   fit (docs/numerics.md). */
INLINE real ex2_of_parts(real rounded, real f)
{
    real sum = 0.00015353372f;
    sum = sum * f + 0.0013398874f;
    sum = sum * f + 0.009618437f;
    sum = sum * f + 0.055503324f;
    sum = sum * f + 0.24022648f;
    sum = sum * f + 0.6931472f;
    sum = sum * f + 1;
    return sum * from_bits((bits)((to_bits(rounded) << MANTISSA_BITS) + ((ubits)EXPONENT_BIAS << MANTISSA_BITS)));
}
#endif

/* Below it `mass_exp` is 0 */
#define LEAST_EXPONENT (REAL_IS_DOUBLE ? (real)-750.0 : (real)-88.1)
INLINE real bounded_exponent(real x) { return x < LEAST_EXPONENT ? LEAST_EXPONENT : x; }

INLINE real bounded_mass_exp(real bounded)
{
#if REAL_IS_DOUBLE
    return safe_exp(bounded);
#else
    /* x·log2(e) less an integer, in two parts: the product of neither is rounded */
    const real rounded = bounded * 1.44269504f + ROUND_TO_INTEGER, n = rounded - ROUND_TO_INTEGER;
    return ex2_of_parts(rounded, real_fma(bounded, 1.92596299e-8f, real_fma(bounded, 1.44269504f, -n)));
#endif
}

/* e^x of x that is no more than 0, but for a rounding; 0 where that would be subnormal */
INLINE real mass_exp(real x) { return bounded_mass_exp(bounded_exponent(x)); }

#define safe_small_exp_remainder exp_remainder_series
INLINE real safe_small_expm1(real x) { return exp_series(x) * (x * x) + x; }

INLINE real safe_expm1(real x)
{
    const real near = safe_small_expm1(x), far = safe_exp(x) - 1;
    return safe_abs(x) < (real)0.3466 ? near : far;
}

INLINE real safe_ratio_or_zero(real x, real y)
{
    const int nothing = (x == 0) & (y == 0);
    return x / (nothing ? (real)1 : y);
}

INLINE real in_range_log1p(real z)
{
    const real near = z + log_correction(z), one_more = z + 1;
    const real far = in_range_log(one_more > SMALLEST_NORMAL ? one_more : (real)SMALLEST_NORMAL);
    return safe_abs(z) < (real)0.29 ? near : far;
}

#define in_range_exp safe_exp
