/* What one side's row is normalised by. Pasted once for the input and once for the target, with the macros
   SIDE(name) (a name for the side), T (its element type), LOAD, COUNTED(x) (a logit as it counts). */

NOINLINE static double SIDE(max)(const T *x, int64_t n)
{
    real top = -(real)INFINITY;
    real poison = 0; /* a maximum drops NaN; a sum of zeros does not */
#pragma omp simd reduction(max: top) reduction(+: poison)
    for (int64_t i = 0; i < n; i++) {
        const real value = LOAD(x[i]);
        top = value > top ? value : top;
        poison += value == value ? (real)0 : value;
    }
    return (double)top + (double)poison;
}

/* Σ exp(exponent) and, if it is wanted, Σ exponent·exp(exponent), of exponents against the row's maximum. Beside the masses
   of 1 that maxima have, small ones would lose their digits: those are counted. */
INLINE Exponentials SIDE(exponentials)(const T *x, int64_t n, Softcaps softcaps, real inv_temperature, real row_max,
                                       int wants_moment)
{
    Exponentials result = { 0, 0, 0, 0 };
    (void)softcaps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real sum = 0, moment = 0;
        int32_t maxima = 0;
#pragma omp simd reduction(+: sum, moment, maxima)
        for (int64_t i = start; i < end; i++) {
            const real exponent = bounded_exponent((COUNTED(LOAD(x[i])) - row_max) * inv_temperature), mass = mass_exp(exponent);
            sum += exponent == 0 ? (real)0 : mass;
            maxima += exponent == 0;
            if (wants_moment)
                moment += mass * exponent;
        }
        result.rest += sum;
        result.maxima += maxima;
        result.moment += moment;
    }
    result.sum = result.rest + result.maxima;
    return result;
}
