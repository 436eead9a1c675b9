/* The formula's vocabulary in CUDA. In float: one special-function instruction for a logarithm or a power
   (2 ulp), the exact library where an argument is out of the ordinary. In double: the library. */

#define INLINE __device__ __forceinline__
#define K_UNROLL _Pragma("unroll")
#define K_INFINITY ((real)__int_as_float(0x7f800000))

#if REAL_IS_DOUBLE
typedef double real;
typedef unsigned long long ubits;
INLINE ubits to_bits(real x) { return (ubits)__double_as_longlong(x); }
INLINE real k_abs(real x) { return fabs(x); }
INLINE real k_sqrt(real x) { return sqrt(x); }
INLINE real k_fma(real x, real y, real z) { return fma(x, y, z); }
INLINE real k_exp(real x) { return exp(x); }
INLINE real k_expm1(real x) { return expm1(x); }
INLINE real k_log(real x) { return log(x); }
INLINE real k_log1p(real x) { return log1p(x); }
INLINE real tame_log(real x) { return log(x); }
INLINE real tame_log1p(real z) { return log1p(z); }
INLINE real tame_ratio_or_zero(real x, real y) { return x / y; }
#define SMALLEST_NORMAL 2.2250738585072014e-308
#else
typedef float real;
typedef unsigned ubits;
INLINE ubits to_bits(real x) { return __float_as_uint(x); }
INLINE real k_abs(real x) { return fabsf(x); }
INLINE real k_sqrt(real x) { return __fsqrt_rn(x); }
INLINE real k_fma(real x, real y, real z) { return fmaf(x, y, z); }

INLINE real k_exp(real x)
{
    /* x·log2(e) in two parts, so that a large x loses nothing */
    const real high = x * 1.44269504f;
    const real low = fmaf(x, 1.44269504f, -high) + x * 1.92596299e-8f;
    real power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(high));
    const real result = fmaf(power, low * 0.693147181f, power);
    return k_abs(high) < 200.0f ? result : power; /* inf - inf in `low` */
}

INLINE real k_log(real x)
{
    real result;
    asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result * 0.693147181f;
}

INLINE real k_expm1(real x) { return expm1f(x); }
INLINE real k_log1p(real x) { return log1pf(x); }

/* log x where x is positive, finite and normal */
INLINE real tame_log(real x)
{
    real result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result * 0.693147181f;
}

/* log(1 + z); the polynomial of the C path's log (docs/numerics.md) where it holds */
INLINE real tame_log1p(real z)
{
    real sum = -0.13191646f;
    sum = sum * z + 0.1396245f;
    sum = sum * z - 0.12115126f;
    sum = sum * z + 0.1401092f;
    sum = sum * z - 0.16685466f;
    sum = sum * z + 0.20010044f;
    sum = sum * z - 0.24999689f;
    sum = sum * z + 0.33333224f;
    const real near = (sum * z - 0.5f) * (z * z) + z;
    return k_abs(z) < 0.29f ? near : tame_log(z + 1);
}

/* x / y where y and 1 / y are positive, finite and normal */
INLINE real tame_ratio_or_zero(real x, real y)
{
    real inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
    return x * inverse;
}
#define SMALLEST_NORMAL 1.17549435e-38f
#endif

INLINE real k_ratio_or_zero(real x, real y)
{
    return x == 0 && y == 0 ? (real)0 : x / y;
}

/* log(p / q) where both and their quotient are positive, finite and normal. Near 1 the quotient's rounding
   would be all that is left of it: there the difference, which is exact, is divided. */
INLINE real tame_log_quotient(real p, real q)
{
#if REAL_IS_DOUBLE
    const real near = log1p((p - q) / q);
    return k_abs(p - q) < (real)0.25 * q ? near : log(p / q);
#else
    const real inverse = tame_ratio_or_zero(1, q), z = (p - q) * inverse;
    real sum = -0.1705002f;
    sum = sum * z + 0.2031512f;
    sum = sum * z - 0.2499665f;
    sum = sum * z + 0.33331802f;
    sum = sum * z - 0.50000006f;
    const real near = sum * (z * z) + z, far = tame_log(p * inverse);
    return k_abs(z) < 0.125f ? near : far;
#endif
}

INLINE real k_log_quotient(real p, real q)
{
    const real quotient = p / q, least = (real)1e-30, most = (real)1e30;
    if (p >= least && p < most && q >= least && q < most && quotient >= least && quotient < most)
        return tame_log_quotient(p, q);
    return p == 0 && q == 0 ? (real)0 : k_log(p) - k_log(q);
}
