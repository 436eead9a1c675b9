/* What the elementary functions of the C backend are made of.
   At most 1 ulp for log and exp (tests/test_c_math.py measures them against long double); zero,
   infinity, NaN, negative and subnormal arguments included. Polynomials: docs/numerics.md. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL_LOOP
#define HAS_FAST_LOGARITHM 0
#define REAL_INFINITY ((real)INFINITY)
#define LN2 0.6931471805599453

#if REAL_IS_DOUBLE
typedef double real;
typedef int64_t bits;
typedef uint64_t ubits;
#define real_fma __builtin_fma
#define safe_abs __builtin_fabs
#define real_copysign __builtin_copysign
#define safe_sqrt __builtin_sqrt
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
#define real_fma __builtin_fmaf
#define safe_abs __builtin_fabsf
#define real_copysign __builtin_copysignf
#define safe_sqrt __builtin_sqrtf
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

INLINE real in_range_ratio_or_zero(real x, real y) { return x / y; }
