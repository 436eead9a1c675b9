/* The formula's vocabulary in CUDA: what it is made of. In float the special-function unit gives reciprocals,
   powers and the logarithms of tame numbers, each to 1 or 2 ulp; others are the library's. */

#define INLINE __device__ __forceinline__
#define K_UNROLL _Pragma("unroll")
#define K_INFINITY ((real)__int_as_float(0x7f800000))

#define HAS_FAST_LOGARITHM (!REAL_IS_DOUBLE)

#if REAL_IS_DOUBLE
typedef double real;
typedef long long bits;
typedef unsigned long long ubits;
INLINE ubits to_bits(real x) { return (ubits)__double_as_longlong(x); }
INLINE real from_bits(bits x) { return __longlong_as_double(x); }
#define MANTISSA_BITS 52
#define LOWEST_MANTISSA 0x3fe6a09e667f3bcd /* √½ */
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
INLINE real k_abs(real x) { return fabs(x); }
INLINE real k_sqrt(real x) { return sqrt(x); }
INLINE real k_fma(real x, real y, real z) { return fma(x, y, z); }
INLINE real k_exp(real x) { return exp(x); }
INLINE real tame_exp(real x) { return exp(x); }
INLINE real k_expm1(real x) { return expm1(x); }
INLINE real k_log(real x) { return log(x); }
INLINE real k_log1p(real x) { return log1p(x); }
INLINE real tame_ratio_or_zero(real x, real y) { return x / y; }
#define SMALLEST_NORMAL 2.2250738585072014e-308
#else
typedef float real;
typedef int bits;
typedef unsigned ubits;
INLINE ubits to_bits(real x) { return __float_as_uint(x); }
INLINE real from_bits(bits x) { return __int_as_float(x); }
#define MANTISSA_BITS 23
#define LOWEST_MANTISSA 0x3f2aaaab /* 2/3 */
#define LN2_HIGH 0x1.62e4p-1f
#define LN2_LOW 0x1.7f7d1cp-20f
INLINE real k_abs(real x) { return fabsf(x); }
INLINE real k_sqrt(real x) { return __fsqrt_rn(x); }
INLINE real k_fma(real x, real y, real z) { return fmaf(x, y, z); }

/* The mean errors of the special functions, measured on an H200 (docs/numerics.md): a sum of millions of terms
   shows them where it would average the rest away. Negative exponents are the usual ones. */
#define EX2_MEAN_ERROR -3.4e-8f
#define LG2_MEAN_ERROR 6.2e-8f
#define LG2_MEAN_SLOPE -4.6e-8f
#define LN2 0.693147181f

/* exp x; x·log2(e) in two parts, so that a large x loses nothing */
INLINE real tame_exp(real x)
{
    const real high = x * 1.44269504f;
    const real low = fmaf(x, 1.44269504f, -high) + x * 1.92596299e-8f;
    real power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(high));
    return fmaf(power, fmaf(low, LN2, -EX2_MEAN_ERROR), power);
}

INLINE real k_exp(real x)
{
    const real bounded = x < -200.0f ? -200.0f : x > 200.0f ? 200.0f : x; /* NaN stays */
    const real result = tame_exp(bounded);
    return bounded > 100.0f ? K_INFINITY : result; /* where inf · 0 was added */
}

/* log2 x of a normal positive number */
INLINE real log2_of(real x)
{
    real result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/* log x of such */
INLINE real tame_log(real x)
{
    const real power = log2_of(x);
    return fmaf(power, LN2, fmaf(power, -LG2_MEAN_SLOPE * LN2, -LG2_MEAN_ERROR * LN2));
}

INLINE real k_log(real x) { return logf(x); }
INLINE real k_expm1(real x) { return expm1f(x); }
INLINE real k_log1p(real x) { return log1pf(x); }

/* x / y where y and 1 / y are positive, finite and normal */
INLINE real tame_ratio_or_zero(real x, real y)
{
    real inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
    return x * inverse;
}
#define SMALLEST_NORMAL 1.17549435e-38f
#endif
