/* Operations of formula.py in CUDA. In float the special-function unit gives reciprocals, powers and the logarithms of
   normal numbers, each to 1 or 2 ulp; others are the library's. */
#pragma once

#include "cuda/config.cuh"
#include "cuda/ptx.cuh"

#define UNROLL_LOOP _Pragma("unroll")
#define REAL_INFINITY ((real)__int_as_float(0x7f800000))

#define HAS_FAST_LOGARITHM (!REAL_IS_DOUBLE)

namespace kullback {

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
INLINE real safe_abs(real x) { return fabs(x); }
INLINE real real_copysign(real x, real sign) { return copysign(x, sign); }
INLINE real safe_sqrt(real x) { return sqrt(x); }
INLINE real real_fma(real x, real y, real z) { return fma(x, y, z); }
INLINE real safe_exp(real x) { return exp(x); }
INLINE real in_range_exp(real x) { return exp(x); }
INLINE real safe_expm1(real x) { return expm1(x); }
INLINE real safe_log(real x) { return log(x); }
INLINE real safe_log1p(real x) { return log1p(x); }
INLINE real in_range_ratio_or_zero(real x, real y) { return x / y; }
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
INLINE real safe_abs(real x) { return fabsf(x); }
INLINE real real_copysign(real x, real sign) { return copysignf(x, sign); }
INLINE real safe_sqrt(real x) { return __fsqrt_rn(x); }
INLINE real real_fma(real x, real y, real z) { return fmaf(x, y, z); }

/* The mean errors of the special functions, measured on an H200 (docs/numerics.md): a sum of millions of terms
   shows them where it would average the rest away. Negative exponents are the usual ones. */
#define EX2_MEAN_ERROR -3.4e-8f
#define LG2_MEAN_ERROR 6.2e-8f
#define LG2_MEAN_SLOPE -4.6e-8f
#define LN2 0.693147181f

/* exp x; x·log2(e) in two parts, so that a large x loses nothing */
INLINE real in_range_exp(real x)
{
    const real high = x * 1.44269504f;
    const real low = fmaf(x, 1.44269504f, -high) + x * 1.92596299e-8f;
    const real power = ex2_approx(high);
    return fmaf(power, fmaf(low, LN2, -EX2_MEAN_ERROR), power);
}

INLINE real safe_exp(real x)
{
    const real bounded = x < -200.0f ? -200.0f : x > 200.0f ? 200.0f : x; /* NaN stays */
    const real result = in_range_exp(bounded);
    return bounded > 88.7228f ? REAL_INFINITY : result; /* where inf times a correction, which has any sign, was added */
}

/* log x of a normal positive number */
INLINE real in_range_log(real x)
{
    const real power = lg2_approx_ftz(x);
    return fmaf(power, LN2, fmaf(power, -LG2_MEAN_SLOPE * LN2, -LG2_MEAN_ERROR * LN2));
}

/* e^x of x that is no more than 0 */
INLINE real mass_exp(real x) { return ex2_approx_ftz(x * 1.44269504f); }

INLINE real safe_log(real x) { return logf(x); }
INLINE real safe_expm1(real x) { return expm1f(x); }
INLINE real safe_log1p(real x) { return log1pf(x); }

/* x / y where y and 1 / y are positive, finite and normal */
INLINE real in_range_ratio_or_zero(real x, real y) { return x * rcp_approx_ftz(y); }
#define SMALLEST_NORMAL 1.17549435e-38f
#endif

#include "logarithm.h"

#if HAS_FAST_LOGARITHM
/* log(p / q). Near 1 the quotient's rounding would be all that is left of it: there the difference, which is
   exact, is divided, and a minimax polynomial takes it. */
INLINE real in_range_log_quotient(real p, real q)
{
    const real inverse = in_range_ratio_or_zero(1, q), z = (p - q) * inverse;
    real sum = -0.1705002f;
    sum = sum * z + 0.2031512f;
    sum = sum * z - 0.2499665f;
    sum = sum * z + 0.33331802f;
    sum = sum * z - 0.50000006f;
    const real near = sum * (z * z) + z, far = in_range_log(p * inverse);
    return safe_abs(z) < 0.125f ? near : far;
}
#endif

INLINE real in_range_log1p(real z)
{
#if REAL_IS_DOUBLE
    return log1p(z);
#else
    const real near = z + log_correction(z);
    return safe_abs(z) < 0.29f ? near : in_range_log(z + 1 > SMALLEST_NORMAL ? z + 1 : SMALLEST_NORMAL);
#endif
}

INLINE real safe_ratio_or_zero(real x, real y)
{
    return x == 0 && y == 0 ? (real)0 : x / y;
}

INLINE real safe_log_quotient(real p, real q)
{
    const real quotient = p / q, least = (real)1e-30, most = (real)1e30;
    if (p >= least && p < most && q >= least && q < most && quotient >= least && quotient < most)
        return in_range_log_quotient(p, q);
    return p == 0 && q == 0 ? (real)0 : safe_log(p) - safe_log(q);
}

/* Only C saves something by them: it computes both branches of a selection, and here a compiler sees what is left. */
#define safe_small_exp_remainder safe_exp_remainder
#define safe_small_expm1 safe_expm1

#include "numerics.h"

}
