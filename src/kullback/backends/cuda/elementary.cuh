/* Quotients with their guards, and logarithms of quotients. */

#if HAS_FAST_LOGARITHM
/* log(p / q). Near 1 the quotient's rounding would be all that is left of it: there the difference, which is
   exact, is divided, and a minimax polynomial takes it. */
INLINE real tame_log_quotient(real p, real q)
{
    const real inverse = tame_ratio_or_zero(1, q), z = (p - q) * inverse;
    real sum = -0.1705002f;
    sum = sum * z + 0.2031512f;
    sum = sum * z - 0.2499665f;
    sum = sum * z + 0.33331802f;
    sum = sum * z - 0.50000006f;
    const real near = sum * (z * z) + z, far = tame_log(p * inverse);
    return k_abs(z) < 0.125f ? near : far;
}
#endif

INLINE real tame_log1p(real z)
{
#if REAL_IS_DOUBLE
    return log1p(z);
#else
    const real near = z + log_correction(z);
    return k_abs(z) < 0.29f ? near : tame_log(z + 1 > SMALLEST_NORMAL ? z + 1 : SMALLEST_NORMAL);
#endif
}

INLINE real k_ratio_or_zero(real x, real y)
{
    return x == 0 && y == 0 ? (real)0 : x / y;
}

INLINE real k_log_quotient(real p, real q)
{
    const real quotient = p / q, least = (real)1e-30, most = (real)1e30;
    if (p >= least && p < most && q >= least && q < most && quotient >= least && quotient < most)
        return tame_log_quotient(p, q);
    return p == 0 && q == 0 ? (real)0 : k_log(p) - k_log(q);
}

/* Only C saves something by them: it computes both branches of a selection, and here a compiler sees what is left. */
#define k_small_gap k_gap
#define k_small_expm1 k_expm1
