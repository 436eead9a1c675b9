/* A row at a few of its elements, its ids, with all others in one (the tail) and the mean of all; and the gradient back from there.
   Macros: X (element type), LOAD_X, STORE_X, IS_LOGITS, IS_PROBS, IS_CAPPED. Ids are distinct, or -1. */

#include <stdlib.h>

#define NOINLINE __attribute__((noinline))

enum { SPAN = 256 };

typedef struct {
    const X *x;
    const int64_t *ids;     /* [rows, k] */
    real *gathered;         /* [rows, width]: k, and the tail, and the mean (work.Gather) */
    const real *d_gathered; /* [rows, width] */
    X *d_input;             /* may be x */
    int64_t rows, vocab, k, width, x_stride, d_input_stride;
    double temperature, softcap;
    int32_t threads;
} Arguments;

/* How elements of a row count, before they are multiplied by inv_temperature, which is 1 but for logits */
typedef struct { real inv_temperature, softcap, reference; } Counting;

INLINE real counted(X x, Counting c)
{
    const real value = LOAD_X(x);
    return IS_CAPPED ? softcapped(value, c.softcap) : IS_LOGITS ? value - c.reference : value;
}

/* The largest of a row's logits at its ids: an offset that all of a row have would take the digits of its tail. */
static real reference_of(const X *x, const int64_t *ids, int64_t k)
{
    real largest = -(real)INFINITY;
    if (!IS_LOGITS || IS_CAPPED)
        return 0;
    for (int64_t j = 0; j < k; j++) {
        const real value = ids[j] < 0 ? -(real)INFINITY : LOAD_X(x[ids[j]]);
        largest = value > largest ? value : largest;
    }
    return safe_abs(largest) < (real)INFINITY ? largest : (real)0;
}

#define NOTHING (IS_PROBS ? (real)0 : -(real)INFINITY)

NOINLINE static void copy_counted(const X *x, real *values, int64_t n, Counting c)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        values[i] = counted(x[i], c) * c.inv_temperature;
}

NOINLINE static double mean_of(const real *values, int64_t n)
{
    const real share = share_of((real)n);
    double total = 0;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++)
            part += values[i] * share;
        total += part;
    }
    return total / ((double)share * (double)n);
}

NOINLINE static double tail_of(const real *others, int64_t n)
{
    double total = 0;
    real top = -(real)INFINITY, poison = 0; /* a maximum drops NaN; a sum of zeros does not */
    if (!IS_PROBS) {
#pragma omp simd reduction(max: top) reduction(+: poison)
        for (int64_t i = 0; i < n; i++) {
            top = others[i] > top ? others[i] : top;
            poison += others[i] == others[i] ? (real)0 : others[i];
        }
        if (!(poison == 0) || safe_abs(top) == (real)INFINITY)
            return (double)top + (double)poison;
    }
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++)
            part += IS_PROBS ? others[i] : safe_exp(others[i] - top);
        total += part;
    }
    return IS_PROBS ? total : (double)top + log(total);
}

/* Of all elements; ids are written over. d_each: what each has of the mean's */
NOINLINE static void scatter_others(const X *x, X *out, int64_t n, Counting c, real tail, real d_tail, real d_each)
{
    const real lse = safe_abs(tail) < (real)INFINITY || tail > 0 ? tail : (real)0; /* none: exp(-inf) is 0 */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const real value = counted(x[i], c), slope = (IS_CAPPED ? softcap_grad(value, c.softcap) : (real)1) * c.inv_temperature;
        out[i] = STORE_X(IS_PROBS ? d_tail : (d_tail * safe_exp(value * c.inv_temperature - lse) + d_each) * slope);
    }
}

void kullback_gather(const Arguments *a)
{
    const real inv_temperature = IS_LOGITS ? (real)(1 / a->temperature) : (real)1, softcap = (real)a->softcap;
    const int has_tail = a->width > a->k, has_mean = a->width > a->k + 1;
#pragma omp parallel num_threads(a->threads)
    {
        real *values = has_tail ? malloc((size_t)a->vocab * sizeof *values) : NULL;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->rows; row++) {
            const X *x = a->x + row * a->x_stride;
            const int64_t *ids = a->ids + row * a->k;
            const Counting c = { inv_temperature, softcap, reference_of(x, ids, a->k) };
            real *gathered = a->gathered + row * a->width;
            for (int64_t j = 0; j < a->k; j++)
                gathered[j] = ids[j] < 0 ? NOTHING : counted(x[ids[j]], c) * c.inv_temperature;
            if (has_tail) {
                copy_counted(x, values, a->vocab, c);
                if (has_mean)
                    gathered[a->k + 1] = (real)mean_of(values, a->vocab);
                for (int64_t j = 0; j < a->k; j++)
                    if (ids[j] >= 0)
                        values[ids[j]] = NOTHING;
                gathered[a->k] = (real)tail_of(values, a->vocab);
            }
        }
        free(values);
    }
}

void kullback_scatter(const Arguments *a)
{
    const real inv_temperature = IS_LOGITS ? (real)(1 / a->temperature) : (real)1, softcap = (real)a->softcap;
    const int has_tail = a->width > a->k, has_mean = a->width > a->k + 1;
    ask_for_large_pages(a->d_input, (int64_t)sizeof(X) * a->rows * a->vocab);
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (int64_t row = 0; row < a->rows; row++) {
        const X *x = a->x + row * a->x_stride;
        X *out = a->d_input + row * a->d_input_stride;
        const int64_t *ids = a->ids + row * a->k;
        const real *gathered = a->gathered + row * a->width, *d_gathered = a->d_gathered + row * a->width;
        const Counting c = { inv_temperature, softcap, reference_of(x, ids, a->k) };
        const real tail = has_tail ? gathered[a->k] : (real)0;
        const real d_tail = has_tail ? d_gathered[a->k] : (real)0;
        const real d_each = has_mean ? d_gathered[a->k + 1] / (real)a->vocab : (real)0;
        if (d_tail == 0 && d_each == 0)
            memset(out, 0, (size_t)a->vocab * sizeof(X));
        else
            scatter_others(x, out, a->vocab, c, tail, d_tail, d_each);
        for (int64_t j = 0; j < a->k; j++)
            if (ids[j] >= 0) {
                const real own = d_gathered[j] + d_each;
                const real slope = IS_CAPPED ? scaled_softcap_grad(gathered[j], inv_temperature, softcap) : (real)1;
                out[ids[j]] = STORE_X(own == 0 ? (real)0 : own * (slope * inv_temperature));
            }
    }
}
