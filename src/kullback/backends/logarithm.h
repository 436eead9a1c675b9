/* Logarithms by polynomial, for C and CUDA. Wanted before it: real, REAL_IS_DOUBLE, INLINE, bits, ubits, to_bits,
   from_bits, LN2_HIGH, LN2_LOW, MANTISSA_BITS, LOWEST_MANTISSA,
   in_range_ratio_or_zero, HAS_FAST_LOGARITHM. Polynomials: docs/numerics.md. */

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

#if !HAS_FAST_LOGARITHM
/* x = mantissa · 2^exponent, mantissa in [2/3, 4/3) (double: [√½, √2)), of a normal x. No result leaves through a pointer: a
   variable whose address is taken keeps a loop from vectorising. */
INLINE bits exponent_bits(real x)
{
    return ((bits)to_bits(x) - LOWEST_MANTISSA) & ~(((bits)1 << MANTISSA_BITS) - 1);
}

/* log x where x is positive, finite and normal */
INLINE real in_range_log(real x)
{
    const bits raised = exponent_bits(x);
    const real exponent = (real)(raised >> MANTISSA_BITS), f = from_bits((bits)to_bits(x) - raised) - 1;
    return exponent * LN2_HIGH + (f + (log_correction(f) + exponent * LN2_LOW));
}

/* log(p / q) where both and their quotient are positive, finite and normal. Near 1 the quotient's rounding
   would be all that is left of it: there the difference, which is exact, is divided. */
INLINE real in_range_log_quotient(real p, real q)
{
    const real inverse = in_range_ratio_or_zero(1, q), quotient = p * inverse;
    const bits raised = exponent_bits(quotient);
    const real exponent = (real)(raised >> MANTISSA_BITS), apart = from_bits((bits)to_bits(quotient) - raised) - 1;
    const real f = raised == 0 ? (p - q) * inverse : apart;
    return exponent * LN2_HIGH + (f + (log_correction(f) + exponent * LN2_LOW));
}
#endif
