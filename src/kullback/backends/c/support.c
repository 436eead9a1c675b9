/* A row on a few of its elements, its ids, and on all others in one; and the gradient back from there.
   Macros: X (element type), IS_LOGITS, IS_PROBS, IS_CAPPED. Ids are distinct, or -1. */

#include <stdlib.h>

#define NOINLINE __attribute__((noinline))

enum { SPAN = 256 };

typedef struct {
    const X *x;
    const int64_t *ids;   /* [rows, k] */
    real *held;           /* [rows, width]: k, and with a rest one more */
    const real *d_held;   /* [rows, width] */
    X *out;               /* may be x */
    int64_t rows, vocab, k, width, x_stride, out_stride;
    double temperature, cap;
    int32_t threads;
} Arguments;

/* An element as it counts */
INLINE real counted(X x, real scale, real cap)
{
    const real value = LOAD_X(x);
    (void)cap;
    return IS_LOGITS ? (IS_CAPPED ? k_capped(value, cap) : value) * scale : value;
}

/* d counted / dx, from what it counts as */
INLINE real slope_of(real value, real scale, real cap)
{
    (void)cap;
    return IS_LOGITS ? (IS_CAPPED ? cap_slope(value / scale, cap) : (real)1) * scale : (real)1;
}

#define NOTHING (IS_PROBS ? (real)0 : -(real)INFINITY)

NOINLINE static double rest_of(const X *x, const unsigned char *mark, int64_t n, real scale, real cap)
{
    double total = 0;
    real top = -(real)INFINITY, poison = 0; /* a maximum drops NaN; a sum of zeros does not */
    if (!IS_PROBS) {
#pragma omp simd reduction(max: top) reduction(+: poison)
        for (int64_t i = 0; i < n; i++) {
            const real value = mark[i] ? NOTHING : counted(x[i], scale, cap);
            top = value > top ? value : top;
            poison += value == value ? (real)0 : value;
        }
        if (!(poison == 0) || k_abs(top) == (real)INFINITY)
            return (double)top + (double)poison;
    }
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++) {
            const real value = mark[i] ? NOTHING : counted(x[i], scale, cap);
            part += IS_PROBS ? value : k_exp(value - top);
        }
        total += part;
    }
    return IS_PROBS ? total : (double)top + log(total);
}

NOINLINE static void share(const X *x, X *out, const unsigned char *mark, int64_t n, real scale, real cap,
                                  real rest, real d_rest)
{
    const real top = k_abs(rest) < (real)INFINITY || rest > 0 ? rest : (real)0; /* none: exp(-inf) is 0 */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const real value = counted(x[i], scale, cap);
        const real part = IS_PROBS ? d_rest : d_rest * (k_exp(value - top) * slope_of(value, scale, cap));
        out[i] = STORE_X(mark[i] ? (real)0 : part);
    }
}

static void set_marks(unsigned char *mark, const int64_t *ids, int64_t k, unsigned char to)
{
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= 0)
            mark[ids[j]] = to;
}

void kullback_gather(const Arguments *a)
{
    const real scale = (real)(1 / a->temperature), cap = (real)a->cap;
    const int has_rest = a->width > a->k;
#pragma omp parallel num_threads(a->threads)
    {
        unsigned char *mark = has_rest ? calloc((size_t)a->vocab, 1) : NULL;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->rows; row++) {
            const X *x = a->x + row * a->x_stride;
            const int64_t *ids = a->ids + row * a->k;
            real *held = a->held + row * a->width;
            for (int64_t j = 0; j < a->k; j++)
                held[j] = ids[j] < 0 ? NOTHING : counted(x[ids[j]], scale, cap);
            if (has_rest) {
                set_marks(mark, ids, a->k, 1);
                held[a->k] = (real)rest_of(x, mark, a->vocab, scale, cap);
                set_marks(mark, ids, a->k, 0);
            }
        }
        free(mark);
    }
}

void kullback_scatter(const Arguments *a)
{
    const real scale = (real)(1 / a->temperature), cap = (real)a->cap;
    const int has_rest = a->width > a->k;
#pragma omp parallel num_threads(a->threads)
    {
        unsigned char *mark = has_rest ? calloc((size_t)a->vocab, 1) : NULL;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->rows; row++) {
            const X *x = a->x + row * a->x_stride;
            X *out = a->out + row * a->out_stride;
            const int64_t *ids = a->ids + row * a->k;
            const real *held = a->held + row * a->width, *d_held = a->d_held + row * a->width;
            const real rest = has_rest ? held[a->k] : (real)0;
            const real d_rest = has_rest ? d_held[a->k] : (real)0;
            if (d_rest == 0)
                memset(out, 0, (size_t)a->vocab * sizeof(X));
            else {
                set_marks(mark, ids, a->k, 1);
                share(x, out, mark, a->vocab, scale, cap, rest, d_rest);
                set_marks(mark, ids, a->k, 0);
            }
            for (int64_t j = 0; j < a->k; j++)
                if (ids[j] >= 0)
                    out[ids[j]] = STORE_X(d_held[j] == 0 ? (real)0 : d_held[j] * slope_of(held[j], scale, cap));
        }
        free(mark);
    }
}
