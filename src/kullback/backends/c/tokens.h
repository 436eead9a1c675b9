/* What one side's tokens are to each other. Pasted as side.h is, with the macros LOADS (of many at once), IS_CAPPED. */

/* A span's logits as they count: in `room`, or where they lie if they are to be left as they are */
INLINE const real *SIDE(values)(const T *x, int64_t n, Softcaps softcaps, real *room)
{
    (void)softcaps;
    if (sizeof(T) == sizeof(real) && !IS_CAPPED)
        return (const real *)(const void *)x;
    LOADS(x, n, room);
    if (IS_CAPPED) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            room[i] = COUNTED(room[i]);
    }
    return room;
}

/* Of those that are the largest, as they count, the first; of NaN, if there is one */
NOINLINE static int64_t SIDE(first_of)(const T *x, int64_t n, Softcaps softcaps, real largest)
{
    (void)softcaps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        int64_t first = n;
#pragma omp simd reduction(min: first)
        for (int64_t i = start; i < end; i++) {
            const real value = COUNTED(LOAD(x[i]));
            const int64_t here = (value == largest) | ((value != value) & (largest != largest)) ? i : n;
            first = here < first ? here : first;
        }
        if (first < n)
            return first;
    }
    return 0;
}

/* A row's maximum as it counts, its Σ exp against that, and how many logits are larger than `own`, while it is read once; and where
   the maximum may be found first. A row of which Σ exp is no number is to be looked at again. */
typedef struct { Exponentials sums; real max; int64_t first, above; } SIDE(Found);

NOINLINE static SIDE(Found) SIDE(read)(const T *x, int64_t n, Softcaps softcaps, real scale, real own)
{
    SIDE(Found) found = { { 0, 0, 0, 0 }, -(real)INFINITY, 0, 0 };
    Exponentials *sums = &found.sums;
    real room[LONG_SPAN];
    for (int64_t start = 0; start < n; start += LONG_SPAN) {
        const int64_t count = start + LONG_SPAN < n ? LONG_SPAN : n - start;
        const real *values = SIDE(values)(x + start, count, softcaps, room);
        const real max = found.max;
        real top = -(real)INFINITY, sum = 0, moment = 0;
        int32_t above = 0;
#pragma omp simd reduction(max: top) reduction(+: sum, moment, above)
        for (int64_t i = 0; i < count; i++) {
            const real value = values[i], exponent = bounded_exponent((value - max) * scale), mass = bounded_mass_exp(exponent);
            top = value > top ? value : top;
            sum += mass;
            moment += mass * exponent;
            above += value > own;
        }
        found.above += above;
        if (top < max) {
            sums->rest += sum;
            sums->moment += moment;
            continue;
        }
        if (top > max) {
            if (max > -(real)INFINITY) {
                const double less = ((double)max - (double)top) * (double)scale, factor = exp(less);
                const double all = sums->rest + sums->maxima;
                sums->moment = factor * (sums->moment + less * all);
                sums->rest = factor * all;
                sums->maxima = 0;
            }
            found.max = top;
            found.first = start;
        }
        const Exponentials more = SIDE(exponentials)(x + start, count, softcaps, scale, top, 1);
        sums->rest += more.rest;
        sums->maxima += more.maxima;
        sums->moment += more.moment;
    }
    sums->sum = sums->rest + sums->maxima;
    return found;
}

/* Its log-sum-exp, its entropy, its top token and its label's rank; returns its softmax */
static Softmax SIDE(describe)(const T *x, int64_t n, Softcaps softcaps, double temperature, int64_t label, double *numbers,
                              int64_t *tokens, int64_t stride)
{
    const real scale = (real)(1 / temperature), own = label < 0 ? (real)INFINITY : COUNTED(LOAD(x[label]));
    SIDE(Found) found = SIDE(read)(x, n, softcaps, scale, own);
    if (!(found.sums.sum < INFINITY)) {
        found.max = COUNTED((real)SIDE(max)(x, n));
        found.sums = SIDE(exponentials)(x, n, softcaps, scale, found.max, 1);
        found.first = 0;
    }
    const Softmax softmax = { (double)found.max * (double)scale, found.sums.sum };
    numbers[0] = lse(softmax);
    numbers[stride] = entropy(found.sums);
    tokens[0] = found.first + SIDE(first_of)(x + found.first, n - found.first, softcaps, found.max);
    tokens[stride] = found.above;
    return softmax;
}
