/* Elementary functions that vectorise: straight-line code on numbers, no table, no call.
   At most 1 ulp for log and exp (tests/test_c_math.py measures them against long double); zero,
   infinity, NaN, negative and subnormal arguments included. Polynomials: docs/numerics.md. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define K_UNROLL
#define K_INFINITY ((real)INFINITY)

#if REAL_IS_DOUBLE
typedef double real;
typedef int64_t bits;
typedef uint64_t ubits;
#define k_fma __builtin_fma
#define k_abs __builtin_fabs
#define k_sqrt __builtin_sqrt
#define SMALLEST_NORMAL 0x1p-1022
#define RAISE 0x1p54
#define RAISE_EXPONENT 54
#define MANTISSA_BITS 52
#define LOWEST_MANTISSA 0x3fe6a09e667f3bcd /* √½ */
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#define EXP_LOWEST (-746.0)
#define EXP_HIGHEST 710.0
#define EXPONENT_BIAS 1023
#define ROUND_TO_INTEGER 0x1.8p52
#else
typedef float real;
typedef int32_t bits;
typedef uint32_t ubits;
#define k_fma __builtin_fmaf
#define k_abs __builtin_fabsf
#define k_sqrt __builtin_sqrtf
#define SMALLEST_NORMAL 0x1p-126f
#define RAISE 0x1p23f
#define RAISE_EXPONENT 23
#define MANTISSA_BITS 23
#define LOWEST_MANTISSA 0x3f2aaaab /* 2/3 */
#define LN2_HIGH 0x1.62e4p-1f
#define LN2_LOW 0x1.7f7d1cp-20f
#define EXP_LOWEST (-105.0f)
#define EXP_HIGHEST 89.0f
#define EXPONENT_BIAS 127
#define ROUND_TO_INTEGER 0x1.8p23f
#endif

INLINE ubits to_bits(real x)
{
    ubits result;
    memcpy(&result, &x, sizeof x);
    return result;
}

INLINE real from_bits(bits x)
{
    real result;
    memcpy(&result, &x, sizeof x);
    return result;
}

/* log(1 + f) for f in [-1/3, 1/3] (double: [√½ - 1, √2 - 1]), as f plus a small correction */
INLINE real log_correction(real f)
{
#if REAL_IS_DOUBLE
    /* Remez fit of FreeBSD's e_log.c in s², s = f / (2 + f) */
    const real s = f / (2 + f), z = s * s, w = z * z;
    const real odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const real even = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01
        + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    const real half_square = 0.5 * f * f;
    return s * (half_square + (odd + even)) - half_square;
#else
    real sum = -0.13191646f;
    sum = sum * f + 0.1396245f;
    sum = sum * f - 0.12115126f;
    sum = sum * f + 0.1401092f;
    sum = sum * f - 0.16685466f;
    sum = sum * f + 0.20010044f;
    sum = sum * f - 0.24999689f;
    sum = sum * f + 0.33333224f;
    return (sum * f - 0.5f) * (f * f);
#endif
}

/* x = mantissa · 2^exponent, mantissa in [2/3, 4/3) (double: [√½, √2)), of a normal x. No result leaves through a pointer: a
   variable whose address is taken keeps a loop from vectorising. */
INLINE bits exponent_bits(real x)
{
    return ((bits)to_bits(x) - LOWEST_MANTISSA) & ~(((bits)1 << MANTISSA_BITS) - 1);
}

/* log x where x is positive, finite and normal */
INLINE real tame_log(real x)
{
    const bits raised = exponent_bits(x);
    const real exponent = (real)(raised >> MANTISSA_BITS), f = from_bits((bits)to_bits(x) - raised) - 1;
    return exponent * LN2_HIGH + (f + (log_correction(f) + exponent * LN2_LOW));
}

INLINE real k_log(real x)
{
    const int subnormal = x < SMALLEST_NORMAL;
    const real raised = tame_log(subnormal ? x * RAISE : x);
    const real finite = raised - (subnormal ? (real)(RAISE_EXPONENT * 0.6931471805599453) : (real)0);
    const real large = x < (real)INFINITY ? finite : x; /* +inf and NaN are themselves */
    const real positive = x == 0 ? -(real)INFINITY : large;
    return x < 0 ? (real)NAN : positive;
}

/* log(p / q) where both and their quotient are positive, finite and normal. Near 1 the quotient's rounding
   would be all that is left of it: there the difference, which is exact, is divided. */
INLINE real tame_log_quotient(real p, real q)
{
    const real inverse = 1 / q, quotient = p * inverse;
    const bits raised = exponent_bits(quotient);
    const real exponent = (real)(raised >> MANTISSA_BITS), apart = from_bits((bits)to_bits(quotient) - raised) - 1;
    const real f = raised == 0 ? (p - q) * inverse : apart;
    return exponent * LN2_HIGH + (f + (log_correction(f) + exponent * LN2_LOW));
}

INLINE real k_log_quotient(real p, real q)
{
    const real quotient = p / q, least = (real)1e-30, most = (real)1e30;
    const int direct = (p >= least) & (p < most) & (q >= least) & (q < most) & (quotient >= least) & (quotient < most);
    const real near = tame_log_quotient(p, q), far = k_log(p) - k_log(q);
    const real apart = direct ? near : far;
    return (p == 0) & (q == 0) ? (real)0 : apart;
}

INLINE real k_log1p(real z)
{
    const real near = z + log_correction(z), far = k_log(1 + z);
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

INLINE real k_exp(real x)
{
    const real low = x < EXP_LOWEST ? (real)EXP_LOWEST : x;
    const real bounded = low > EXP_HIGHEST ? (real)EXP_HIGHEST : low;
    const real rounded = bounded * (real)1.4426950408889634 + ROUND_TO_INTEGER;
    const real n = rounded - ROUND_TO_INTEGER;
    const real r = k_fma(n, -LN2_LOW, k_fma(n, -LN2_HIGH, bounded));
    const real y = (exp_series(r) * (r * r) + r) + 1;
    /* 2^n in two factors: the result may be subnormal where 2^n itself is not a number */
    const bits whole = (bits)n, half = whole >> 1;
    const real first = from_bits((half + EXPONENT_BIAS) << MANTISSA_BITS);
    const real second = from_bits((whole - half + EXPONENT_BIAS) << MANTISSA_BITS);
    const real result = (y * first) * second;
    return x == x ? result : x;
}

INLINE real k_expm1(real x)
{
    const real near = exp_series(x) * (x * x) + x, far = k_exp(x) - 1;
    return k_abs(x) < (real)0.3466 ? near : far;
}

INLINE real k_ratio_or_zero(real x, real y)
{
    const int nothing = (x == 0) & (y == 0);
    return x / (nothing ? (real)1 : y);
}

INLINE real tame_ratio_or_zero(real x, real y) { return x / y; }

INLINE real tame_log1p(real z)
{
    const real near = z + log_correction(z), one_more = z + 1;
    const real far = tame_log(one_more > SMALLEST_NORMAL ? one_more : (real)SMALLEST_NORMAL);
    return k_abs(z) < (real)0.29 ? near : far;
}
