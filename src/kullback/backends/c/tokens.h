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

/* Its log-sum-exp, its entropy, its first token and its label's rank; returns its softmax */
static Softmax SIDE(describe)(const T *x, int64_t n, Softcaps softcaps, double temperature, int64_t label, double *numbers,
                              int64_t *tokens, int64_t stride)
{
    const real scale = (real)(1 / temperature), largest = COUNTED((real)SIDE(max)(x, n));
    Softmax softmax = { (double)largest * (double)scale, 1 };
    const Exponentials found = SIDE(exponentials)(x, n, softcaps, scale, largest, 1);
    softmax.sum_exp = found.sum;
    numbers[0] = lse(softmax);
    numbers[stride] = entropy(found);
    tokens[0] = SIDE(first_of)(x, n, softcaps, largest);
    tokens[stride] = label < 0 ? 0 : SIDE(count_above)(x, n, softcaps, COUNTED(LOAD(x[label])));
    return softmax;
}
