/* A teacher's entries, of one id together, and what they leave of 1: its target (topk.py). Macros: X (type of
   the entries), LOAD_X, FROM_LOGITS, FROM_PROBS (what they are). */

#include <stdlib.h>

typedef struct {
    const X *values;              /* [rows, k] */
    const int64_t *indices;       /* [rows, k] */
    const unsigned char *skipped; /* [rows], or NULL */
    int64_t *ids;                 /* [rows, k] */
    real *target;                 /* [rows, width] */
    int64_t *wrong;               /* the place of an id that is no token, if there is one */
    int64_t rows, vocab, k, width;
    double temperature, least; /* what a tail counts at least */
    int32_t keeps_tail, normalises, threads;
} Arguments;

#define NOTHING (-(real)INFINITY)

static real log_of(X value) { return FROM_PROBS ? safe_log(LOAD_X(value)) : LOAD_X(value); }

/* ids[j] of present entries, the first of those of one id; -1 of others. `first` is -1 at every token, and is left so. */
static int64_t distinct(const Arguments *a, int64_t row, int64_t *first, int64_t *leader)
{
    const int64_t *indices = a->indices + row * a->k;
    int64_t *ids = a->ids + row * a->k, count = 0;
    const int counts = !(a->skipped && a->skipped[row]);
    for (int64_t j = 0; j < a->k; j++) {
        const int present = counts && indices[j] >= 0;
        if (present && first[indices[j]] < 0)
            first[indices[j]] = j;
        leader[j] = present ? first[indices[j]] : -1;
        ids[j] = leader[j] == j ? indices[j] : -1;
        count += leader[j] == j;
    }
    for (int64_t j = 0; j < a->k; j++)
        if (leader[j] >= 0)
            first[indices[j]] = -1;
    return count;
}

/* log Σ p over entries of one id, at the first of them; -inf elsewhere. Entries that stand alone are as they were. */
static void sum_of_equal(const X *values, const int64_t *leader, int64_t k, real *log_p, real *total)
{
    for (int64_t j = 0; j < k; j++)
        log_p[j] = total[j] = NOTHING;
    for (int64_t j = 0; j < k; j++)
        if (leader[j] >= 0) {
            const real value = log_of(values[j]), top = log_p[leader[j]];
            log_p[leader[j]] = value > top || value != value ? value : top;
        }
    for (int64_t j = 0; j < k; j++)
        if (leader[j] >= 0 && leader[j] != j)
            total[leader[j]] = 0;
    for (int64_t j = 0; j < k; j++)
        if (leader[j] >= 0 && total[leader[j]] >= 0)
            total[leader[j]] += safe_exp(log_of(values[j]) - log_p[leader[j]]);
    for (int64_t j = 0; j < k; j++)
        if (total[j] >= 0 && safe_abs(log_p[j]) < (real)INFINITY)
            log_p[j] += safe_log(total[j]);
}

/* x -= log Σ exp x; NaN of a row of no mass */
static void normalise(real *x, int64_t n)
{
    real top = NOTHING;
    double total = 0;
    for (int64_t j = 0; j < n; j++)
        top = x[j] > top || x[j] != x[j] ? x[j] : top;
    for (int64_t j = 0; j < n; j++)
        total += (double)safe_exp(x[j] - top);
    const real lse = top + (real)log(total);
    for (int64_t j = 0; j < n; j++)
        x[j] -= lse;
}

static void one_row(const Arguments *a, int64_t row, int64_t *first, int64_t *leader, real *total)
{
    const int has_tail = a->width > a->k;
    const int64_t count = distinct(a, row, first, leader);
    real *target = a->target + row * a->width;
    sum_of_equal(a->values + row * a->k, leader, a->k, target, total);
    double mass = 0;
    for (int64_t j = 0; j < a->k; j++) {
        mass += FROM_LOGITS ? 0 : exp((double)target[j]);
        target[j] = target[j] / (real)a->temperature;
    }
    if (!has_tail) { /* a row of no ids is given one outcome */
        if (count == 0)
            target[0] = 0;
        return;
    }
    /* of equal shares, the choice of largest entropy, tempered */
    const double others = (double)(a->vocab - count), left = 1 - mass > a->least || mass != mass ? 1 - mass : a->least;
    target[a->k] = NOTHING;
    if (!FROM_LOGITS && others > 0)
        target[a->k] = (real)(log(others) + (log(left) - log(others)) / a->temperature);
    if (a->normalises && !(FROM_LOGITS && count == 0))
        normalise(target, a->k + 1);
    if (!a->keeps_tail)
        target[a->k] = NOTHING;
}

void kullback_entries(const Arguments *a)
{
    for (int64_t i = 0; i < a->rows * a->k; i++)
        if (!(a->skipped && a->skipped[i / a->k]) && (a->indices[i] < -1 || a->indices[i] >= a->vocab)) {
            *a->wrong = i;
            return;
        }
#pragma omp parallel num_threads(a->threads)
    {
        int64_t *first = malloc((size_t)a->vocab * sizeof *first), *leader = malloc((size_t)a->k * sizeof *leader);
        real *total = malloc((size_t)a->k * sizeof *total);
        memset(first, 0xff, (size_t)a->vocab * sizeof *first); /* -1 */
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->rows; row++)
            one_row(a, row, first, leader, total);
        free(first);
        free(leader);
        free(total);
    }
}
