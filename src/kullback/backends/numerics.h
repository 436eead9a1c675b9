/* Functions of the formula's vocabulary that C and CUDA share. Wanted before it: real, REAL_IS_DOUBLE,
   SMALLEST_NORMAL, INLINE, K_INFINITY, K_UNROLL, to_bits (unsigned), k_abs, k_exp, k_expm1, k_log, k_log1p,
   k_fma. Every selection is a conditional between
   values already computed, so that a C compiler can vectorise it. Series are minimax fits (float) or
   Taylor (double); docs/numerics.md says how they were made. */

INLINE real k_near(real x, real bound, real close, real apart)
{
    return k_abs(x) < bound ? close : apart;
}

INLINE real k_half_sign(real x)
{
    const real less = x < 0 ? (real)-0.5 : (real)0;
    return x > 0 ? (real)0.5 : less;
}

INLINE real k_logit_mass(real x, real top, real scale, real inverse_total)
{
    return k_exp((x - top) * scale) * inverse_total;
}

INLINE real k_logit_root(real x, real top, real scale, real inverse_total)
{
    return k_sqrt(k_logit_mass(x, top, scale, inverse_total));
}

INLINE real k_logit_overlap(real y, real y_top, real y_scale, real y_inverse_total,
                            real x, real x_top, real x_scale, real x_inverse_total, real ratio, real a)
{
    const real p = k_logit_mass(y, y_top, y_scale, y_inverse_total), q = k_logit_mass(x, x_top, x_scale, x_inverse_total);
    return (ratio < 0 ? q : p) * k_exp(ratio < 0 ? a * ratio : (a - 1) * ratio);
}

/* cap · tanh(x / cap), and its derivative from its value */
INLINE real k_capped(real x, real cap)
{
    const real less = k_expm1(-2 * k_abs(x) / cap), tanh_of = cap * (less / (2 + less));
    return x < 0 ? tanh_of : -tanh_of;
}

INLINE real cap_slope(real capped, real cap)
{
    const real t = capped / cap;
    return (1 - t) * (1 + t);
}

INLINE real k_mass_times(real mass, real x)
{
    const int nothing = (mass == 0) & (k_abs(x) == K_INFINITY);
    return mass * (nothing ? (real)0 : x);
}

INLINE real k_log_difference(real log_p, real log_q)
{
    const int nothing = (log_p == log_q) & (k_abs(log_p) == K_INFINITY);
    return nothing ? (real)0 : log_p - log_q;
}

/* Two-difference (Knuth): s + r = y - x exactly. Infinite logits make r NaN; it is then nothing. */
INLINE real k_logit_difference(real y, real y_scale, real x, real x_scale, real shift, real shift_low)
{
    const real a = y * y_scale, b = x * x_scale;
    const real low = k_fma(y, y_scale, -a) - k_fma(x, x_scale, -b);
    const real s = a - b, t = s - a;
    const real rest = ((a - (s - t)) - (b + t)) + low;
    const real r = k_abs(rest) < K_INFINITY ? rest : (real)0;
    const real result = (s - shift) + (r - shift_low);
    const int nothing = (y == -K_INFINITY) & (x == -K_INFINITY);
    return nothing ? (real)0 : result;
}

INLINE real k_mixture(real a, real p, real b, real q) { return a * p + b * q; }

INLINE real k_part_of(real x, real whole)
{
    const int nothing = whole == 0;
    return (nothing ? (real)0 : x) / (nothing ? (real)1 : whole);
}

#if REAL_IS_DOUBLE
#define K_GAP_SERIES { 1.0/2, -1.0/6, 1.0/24, -1.0/120, 1.0/720, -1.0/5040, 1.0/40320, -1.0/362880, \
    1.0/3628800, -1.0/39916800, 1.0/479001600, -1.0/6227020800, 1.0/87178291200, \
    -1.0/1307674368000, 1.0/20922789888000 }
#define K_GAP_TERMS 15
#else
#define K_GAP_SERIES { 0.5f, -0.16666667f, 0.041666668f, -0.008333182f, 0.0013888608f, -0.00019962185f, \
    2.4957046e-05f }
#define K_GAP_TERMS 7
#define K_BREGMAN_SERIES { 0.49999997f, -0.16666655f, 0.083337836f, -0.050010528f, 0.03313448f, -0.02352312f, \
    0.020618126f, -0.016788587f }
#define K_BREGMAN_TERMS 8
#endif

INLINE real gap_series(real d)
{
    const real series[] = K_GAP_SERIES;
    real sum = series[K_GAP_TERMS - 1];
    K_UNROLL
    for (int k = K_GAP_TERMS - 2; k >= 0; k--)
        sum = sum * d + series[k];
    return d * d * sum;
}

INLINE real k_gap(real d)
{
    const real near = gap_series(d), far = d + (k_exp(-d) - 1);
    return k_abs(d) < (real)0.5 ? near : far;
}

INLINE real k_log_blend(real ratio, real a, real b)
{
    const real larger = ratio < 0 ? b : a, smaller = ratio < 0 ? a : b, d = k_abs(ratio);
    const real less = smaller * k_expm1(-d);
    return less > (real)-0.29 ? less + log_correction(less) : k_log(larger + smaller * k_exp(-d));
}

INLINE real k_small_bregman(real z)
{
#if REAL_IS_DOUBLE
    /* s = z / (2 + z): (1 + z)·log1p(z) - z = (2s² + (1 + s)·(log1p(z) - 2s)) / (1 - s) */
    const real s = z / (2 + z), w = s * s;
    real sum = 2.0 / 31;
    K_UNROLL
    for (int k = 29; k >= 3; k -= 2)
        sum = sum * w + 2.0 / k;
    return (2 * w + (1 + s) * (s * w * sum)) / (1 - s);
#else
    const real series[] = K_BREGMAN_SERIES;
    real sum = series[K_BREGMAN_TERMS - 1];
    K_UNROLL
    for (int k = K_BREGMAN_TERMS - 2; k >= 0; k--)
        sum = sum * z + series[k];
    return z * z * sum;
#endif
}

/* The caller brings log(1 + z), or any finite number where 1 + z = 0. */
INLINE real bregman_of(real z, real logarithm)
{
    const real far = (z + 1) * logarithm - z;
    const real near = k_small_bregman(z);
    return k_abs(z) < (real)(1.0 / 3) ? near : far;
}

INLINE real k_bregman(real z)
{
    return bregman_of(z, z + 1 == 0 ? (real)0 : k_log(z + 1));
}

#define k_logit_log_part(x, top, scale, inverse_total, mixture, share) (share)

/* The formula's vocabulary where every element lies in its form's tame range (forms.py): no zero, no
   infinity, no NaN, no quotient that over- or underflows, and so nothing to guard. Wanted before it:
   tame_log of a normal positive number, tame_log1p, tame_log_quotient, tame_ratio_or_zero. Kernels try this first and look at the range of
   what they read; where it was not tame they compute again. */

#define tame_abs k_abs
#define tame_half_sign k_half_sign
#define tame_near k_near
#define tame_sqrt k_sqrt
#define tame_expm1 k_expm1
#define tame_gap k_gap
#define tame_small_gap k_small_gap
#define tame_small_expm1 k_small_expm1
#define tame_logit_difference k_logit_difference

INLINE real tame_mass_times(real mass, real x) { return mass * x; }
INLINE real tame_part_of(real x, real whole) { return tame_ratio_or_zero(x, whole); }
INLINE real tame_log_difference(real log_p, real log_q) { return log_p - log_q; }

INLINE real tame_bregman(real z)
{
    const real one_more = z + 1; /* 0 where z was rounded to -1 */
    return bregman_of(z, tame_log(one_more > SMALLEST_NORMAL ? one_more : (real)SMALLEST_NORMAL));
}

/* How far an element is from the low end of its tame range, as an integer that grows with it: the bits of
   floats are ordered, and those of NaN and of negative numbers lie above all positive ones'. A range about
   zero (low < 0, high = -low) is one of magnitudes. */
#define WILDNESS(x, low) (to_bits((low) > 0 ? (x) : k_abs(x)) - to_bits((low) > 0 ? (low) : (real)0))
