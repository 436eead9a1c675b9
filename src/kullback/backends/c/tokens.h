/* What one side's tokens are to each other. Pasted as side.h is. */

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

/* How many are larger */
NOINLINE static int64_t SIDE(count_above)(const T *x, int64_t n, Softcaps softcaps, real own)
{
    int64_t total = 0;
    (void)softcaps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        int32_t count = 0;
#pragma omp simd reduction(+: count)
        for (int64_t i = start; i < end; i++)
            count += COUNTED(LOAD(x[i])) > own;
        total += count;
    }
    return total;
}

/* A row's maximum as it counts, and its Σ exp against that, while it is read once; and where the maximum may be found first. A row
   of which that is no number is to be looked at again. */
typedef struct { Exponentials sums; real max; int64_t first; } SIDE(Found);

NOINLINE static SIDE(Found) SIDE(read)(const T *x, int64_t n, Softcaps softcaps, real scale)
{
    SIDE(Found) found = { { 0, 0, 0, 0 }, -(real)INFINITY, 0 };
    Exponentials *sums = &found.sums;
    (void)softcaps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real top = -(real)INFINITY;
#pragma omp simd reduction(max: top)
        for (int64_t i = start; i < end; i++)
            top = LOAD(x[i]) > top ? LOAD(x[i]) : top;
        top = COUNTED(top);
        if (top > found.max) {
            if (found.max > -(real)INFINITY) {
                const double less = ((double)found.max - (double)top) * (double)scale, factor = exp(less);
                const double all = sums->rest + sums->maxima;
                sums->moment = factor * (sums->moment + less * all);
                sums->rest = factor * all;
                sums->maxima = 0;
            }
            found.max = top;
            found.first = start;
        }
        if (top == found.max) {
            const Exponentials more = SIDE(exponentials)(x + start, end - start, softcaps, scale, top, 1);
            sums->rest += more.rest;
            sums->maxima += more.maxima;
            sums->moment += more.moment;
            continue;
        }
        real sum = 0, moment = 0;
        const real max = found.max;
#pragma omp simd reduction(+: sum, moment)
        for (int64_t i = start; i < end; i++) {
            const real exponent = bounded_exponent((COUNTED(LOAD(x[i])) - max) * scale), mass = mass_exp(exponent);
            sum += mass;
            moment += mass * exponent;
        }
        sums->rest += sum;
        sums->moment += moment;
    }
    sums->sum = sums->rest + sums->maxima;
    return found;
}

/* Its log-sum-exp, its entropy, its top token and its label's rank; returns its softmax */
static Softmax SIDE(describe)(const T *x, int64_t n, Softcaps softcaps, double temperature, int64_t label, double *numbers,
                              int64_t *tokens, int64_t stride)
{
    const real scale = (real)(1 / temperature);
    SIDE(Found) found = SIDE(read)(x, n, softcaps, scale);
    if (!(found.sums.sum < INFINITY)) {
        found.max = COUNTED((real)SIDE(max)(x, n));
        found.sums = SIDE(exponentials)(x, n, softcaps, scale, found.max, 1);
        found.first = 0;
    }
    const Softmax softmax = { (double)found.max * (double)scale, found.sums.sum };
    numbers[0] = lse(softmax);
    numbers[stride] = entropy(found.sums);
    tokens[0] = found.first + SIDE(first_of)(x + found.first, n - found.first, softcaps, found.max);
    tokens[stride] = label < 0 ? 0 : SIDE(count_above)(x, n, softcaps, COUNTED(LOAD(x[label])));
    return softmax;
}
