/* What one side's row is normalised by. Read once for the input and once for the target, with the macros
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

NOINLINE static double SIDE(sum_exp)(const T *x, int64_t n, Softcaps softcaps, real inv_temperature, real row_max)
{
    double total = 0;
    (void)softcaps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++)
            part += safe_exp((COUNTED(LOAD(x[i])) - row_max) * inv_temperature);
        total += part;
    }
    return total;
}

/* log Σ exp less the mean of what it is of */
NOINLINE static double SIDE(entropy)(const T *x, int64_t n, Softcaps softcaps, real inv_temperature, real row_max, double sum_exp)
{
    double total = 0;
    (void)softcaps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++) {
            const real exponent = (COUNTED(LOAD(x[i])) - row_max) * inv_temperature;
            part += safe_exp(exponent) * (exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent);
        }
        total += part;
    }
    return log(sum_exp) - total / sum_exp;
}

#undef SIDE
#undef T
#undef LOAD
#undef COUNTED
