/* Rows of a divergence on a CPU. Pasted above: the formula (`Row`, elements, `finish`), the layout of what
   is known of rows (state.py), and the macros

   X, Y, DX, DY, WEIGHT, LOSS         element types of input, target, their gradients, row weights, losses
   WANT_INPUT, WANT_TARGET            which gradients may be wanted; those without memory are not
   INPUT_IS_LOGITS, INPUT_IS_CAPPED   and the same of the target
   KEEPS_SLOPES                       whether the sweep that sums a row that is far may leave each d_log_q in the gradient's
                                      memory: what is left to do costs a mass
   HAS_CORNER                         whether terms have a corner at p = q, and are no parabolas there
   HAS_FAST, SLOPES_ARE_LOGS          whether the element is there for rows that are far (c/fast.h), and its slopes are logs
   HAS_FINE                           whether polynomials serve rows that are near (fine.h)
   X_LOW, X_HIGH, Y_LOW, Y_HIGH       the range in which elements of other forms need no guards

   Sums are taken in `real` over SPAN elements and in double from there (or in double at once: `refined`), in an order that depends
   on the row alone: neither the number of threads nor the rows beside a row can change its result. */

#include <stdlib.h>

/* A unit of work has so many elements, of as many rows. */
enum { UNIT = 1 << 16 };

typedef struct {
    const X *x;
    const Y *y;
    const WEIGHT *row_weight; /* [rows], or NULL: 1 */
    const int64_t *labels;    /* [rows]: a token of the row, IGNORED, or negative: of another's slice; or NULL */
    const double *known;      /* [fields, rows]: of the statistics to accumulate with, of the state of a gradient */
    double *found;            /* [fields, rows]: a loss's state, statistics, or sums; or NULL */
    LOSS *loss;               /* [rows], or NULL */
    double *total;            /* or NULL */
    DX *d_input;              /* or NULL */
    DY *d_target;             /* or NULL */
    double *figures;          /* [2, rows]: of the input its log-sum-exp and its entropy; or NULL */
    const float *fine;        /* the factors of near rows' polynomials (HAS_FINE), or NULL */
    int64_t rows, vocab, elements; /* of all rows: the last may be shorter */
    int64_t x_stride, y_stride, d_input_stride, d_target_stride;
    double scale, input_temperature, target_temperature, input_softcap, target_softcap, parameter;
    double divergence_weight, label_weight, z_weight, label_smoothing; /* of what a row's loss is a sum of (labels.py) */
    int32_t verb, threads;
} Arguments;

/* What is found of a row before its gradients are written */
typedef struct {
    Softmax input, target;
    double log_z_diff, tilted_lse;
    Sums sums;
    int mode;
    int has_slopes; /* whether d_log_q of each element is where the gradient is to be */
} Found;

/* Rows of logits are tried without series and guards first; those whose sum is smaller than the first, of which a term's
   rounding would be too much, or is no number, are summed again. */
#define MIN_FAST_SUM 0.05
#define MAX_SUM 1e15
/* Where terms are masses times small logarithms, rows between are near: their gradients are good, and of their sums the
   terms of tokens that have more than 2^-10 of a mass are found again. */
#define MIN_NEAR_SUM (SLOPES_ARE_LOGS ? 2e-4 : MIN_FAST_SUM)
#define SURE_SUM_EXP 1.001 /* against the maximum: less is of a row that one token has */
/* What is left of moments is off by a few roundings of 1: where polynomials serve, less than this is summed again. */
#define MIN_MOMENTS_SUM 0.1
/* Where polynomials serve, what log-sum-exps are rounded by shows in less than this: that is taken off, and the row summed again. */
#define LEAST_NEAR_SUM 2e-8
#define MAX_REFINED_SUM 1.0 /* less, found of moments, shows how spans were added */
#define HEAVY_LOG_MASS -6.9314718f
enum { HEAVY_SPAN = 64 };
/* Of Σ p^a q^(1-a) against maxima: smaller ones have lost terms that underflowed. */
#define MIN_CHERNOFF 1e-25

#if HAS_FAST
INLINE int is_well_conditioned(Sums sums, double min)
{
    const double least = fmin(fabs(sums.d_log_p), fabs(sums.d_log_q));
    return (HAS_CHERNOFF ? least : fabs(sums.term)) > min && fabs(sums.term) < MAX_SUM
        && fabs(sums.d_log_p) < MAX_SUM && fabs(sums.d_log_q) < MAX_SUM;
}

/* Both sides' masses against their maxima, and the moments, with logarithms to base 2 */
typedef struct { double x_sum_exp, y_sum_exp, p_log_ratio, q_log_ratio, chernoff; } Statistics;

/* Of the span that begins at `start`, added in so wide a type */
#define STATISTICS_OF_SPAN(NAME, WIDE)                                                                                    \
    INLINE Statistics NAME(const X *x, const Y *y, int64_t start, int64_t n, Softcaps softcaps, Row row, real exponent)    \
    {                                                                                                                     \
        const int64_t end = start + SPAN < n ? start + SPAN : n;                                                          \
        const real x_max = row.input_max, y_max = row.target_max;                                                         \
        const real x_scale = base_2(row.input_inv_temperature), y_scale = base_2(row.target_inv_temperature);             \
        WIDE x_sum_exp = 0, y_sum_exp = 0, p_log_ratio = 0, q_log_ratio = 0, chernoff = 0;                                \
        (void)softcaps, (void)exponent;                                                                                   \
        _Pragma("omp simd reduction(+: x_sum_exp, y_sum_exp, p_log_ratio, q_log_ratio, chernoff)")                        \
        for (int64_t i = start; i < end; i++) {                                                                           \
            const real x_exponent = (COUNTED_X(LOAD_X(x[i])) - x_max) * x_scale;                                          \
            const real y_exponent = (COUNTED_Y(LOAD_Y(y[i])) - y_max) * y_scale;                                          \
            const real q = ex2(x_exponent), p = ex2(y_exponent), ratio = y_exponent - x_exponent;                         \
            x_sum_exp += q;                                                                                               \
            y_sum_exp += p;                                                                                               \
            if (HAS_P_LOG_RATIO)                                                                                          \
                p_log_ratio += p * finite_ratio(ratio);                                                                   \
            if (HAS_Q_LOG_RATIO)                                                                                          \
                q_log_ratio += q * (ratio == ratio ? ratio : 0); /* a mass over none makes it infinite, and the row safe */ \
            if (HAS_CHERNOFF)                                                                                             \
                chernoff += ex2_of_mean(y_exponent, x_exponent, exponent);                                                \
        }                                                                                                                 \
        return (Statistics){ x_sum_exp, y_sum_exp, p_log_ratio, q_log_ratio, chernoff };                                  \
    }
STATISTICS_OF_SPAN(span_statistics, real)
STATISTICS_OF_SPAN(exact_span_statistics, double)

static void add(Statistics *sum, Statistics part, double sign)
{
    sum->x_sum_exp += sign * part.x_sum_exp;
    sum->y_sum_exp += sign * part.y_sum_exp;
    sum->p_log_ratio += sign * part.p_log_ratio;
    sum->q_log_ratio += sign * part.q_log_ratio;
    sum->chernoff += sign * part.chernoff;
}

/* Whether a part has more than an eighth of a side whose largest token has that, too: against it Σ exp is less than 8. */
INLINE int is_large(Statistics part, Statistics whole)
{
    return whole.x_sum_exp < fmin(8, 8 * part.x_sum_exp) || whole.y_sum_exp < fmin(8, 8 * part.y_sum_exp);
}

/* Spans that were large when they were found. Of a whole fewer are large than there is room for: of either side seven. */
enum { MOST_LARGE = 16 };
typedef struct { struct { int64_t start; Statistics found; } span[MOST_LARGE]; int count; } LargeSpans;

static void keep_large(LargeSpans *large, Statistics whole)
{
    int kept = 0;
    for (int k = 0; k < large->count; k++)
        if (is_large(large->span[k].found, whole))
            large->span[kept++] = large->span[k];
    large->count = kept;
}

NOINLINE static Statistics statistics(const X *x, const Y *y, int64_t n, Softcaps softcaps, Row row, real exponent, LargeSpans *large)
{
    Statistics result = { 0, 0, 0, 0, 0 };
    large->count = 0;
    for (int64_t start = 0; start < n; start += SPAN) {
        const Statistics part = span_statistics(x, y, start, n, softcaps, row, exponent);
        add(&result, part, 1);
        if (HAS_MOMENTS && is_large(part, result)) {
            if (large->count == MOST_LARGE)
                keep_large(large, result);
            large->span[large->count].start = start;
            large->span[large->count++].found = part;
        }
    }
    return result;
}

#if HAS_MOMENTS
/* The same, with large spans added in double: a token of much mass leaves float little room for what is added to it. */
NOINLINE static Statistics refined(Statistics result, const LargeSpans *large, const X *x, const Y *y, int64_t n, Softcaps softcaps,
                                   Row row, real exponent)
{
    const Statistics whole = result;
    for (int k = 0; k < large->count; k++) {
        if (is_large(large->span[k].found, whole)) {
            add(&result, large->span[k].found, -1);
            add(&result, exact_span_statistics(x, y, large->span[k].start, n, softcaps, row, exponent), 1);
        }
    }
    return result;
}

static Element of_moments(Statistics s, double exponent, real parameter, double *chernoff)
{
    const double shift = log2(s.x_sum_exp / s.y_sum_exp);
    *chernoff = s.chernoff / s.x_sum_exp * exp2(exponent * shift);
    return from_moments((real)((s.p_log_ratio / s.y_sum_exp + shift) * LN2),
                        (real)((s.q_log_ratio / s.x_sum_exp + shift) * LN2), (real)*chernoff, parameter);
}
#endif
#endif

#if HAS_LOGITS
static void set_row(Row *row, const Found *found, const Arguments *a)
{
    const Temperatures temperatures = { a->input_temperature, a->target_temperature };
    set_softmaxes(row, found->input, found->target, found->log_z_diff, temperatures);
    row->tilted_lse = (real)found->tilted_lse;
}

/* From a log-sum-exp: against the number next to it that elements can hold */
static Softmax softmax_of(double lse, double temperature)
{
    const double scale = (double)(real)(1 / temperature), max = (double)(real)(lse / scale) * scale;
    return (Softmax){ max, exp(lse - max) };
}
#endif

#if HAS_TILTED_LSE
static int is_far_lse(double lse) { return fabs(lse) >= FAR_TILTED_LSE && lse > -INFINITY; }

/* The row's log Σ p^a q^(1-a) */
NOINLINE static double tilted_lse(const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps, real parameter)
{
    real top = -REAL_INFINITY;
    double total = 0;
    (void)softcaps;
#pragma omp simd reduction(max: top)
    for (int64_t i = 0; i < n; i++) {
        const real value = safe_log_tilted(COUNTED_X(LOAD_X(x[i])), COUNTED_Y(LOAD_Y(y[i])), row, parameter);
        top = value > top ? value : top;
    }
    if (top == REAL_INFINITY)
        return top;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++)
            part += safe_exp(safe_log_tilted(COUNTED_X(LOAD_X(x[i])), COUNTED_Y(LOAD_Y(y[i])), row, parameter) - top);
        total += part;
    }
    return top + log(total);
}
#endif

#if HAS_FAST && SLOPES_ARE_LOGS
/* What the fast sum of a row lacks in the spans that have a heavy token of either side */
NOINLINE static double heavy_rounding(const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps, real parameter)
{
    const real x_heavy = row.input_max + (row.input_log_sum_exp + HEAVY_LOG_MASS) / row.input_inv_temperature;
    const real y_heavy = row.target_max + (row.target_log_sum_exp + HEAVY_LOG_MASS) / row.target_inv_temperature;
    double total = 0;
    (void)softcaps;
    for (int64_t start = 0; start < n; start += HEAVY_SPAN) {
        const int64_t end = start + HEAVY_SPAN < n ? start + HEAVY_SPAN : n;
        real above = -REAL_INFINITY, part = 0;
#pragma omp simd reduction(max: above)
        for (int64_t i = start; i < end; i++) {
            const real x_above = COUNTED_X(LOAD_X(x[i])) - x_heavy, y_above = COUNTED_Y(LOAD_Y(y[i])) - y_heavy;
            const real higher = x_above > y_above ? x_above : y_above;
            above = higher > above ? higher : above;
        }
        if (above < 0)
            continue;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++) {
            const real xi = COUNTED_X(LOAD_X(x[i])), yi = COUNTED_Y(LOAD_Y(y[i]));
            part += safe_element(xi, yi, row, parameter).term - fast_element(xi, yi, row, parameter).term;
        }
        total += part;
    }
    return total;
}
#endif

#if HAS_LOGITS
/* What q's masses sum to more than p's is what log-sum-exps are off by: a half is taken from each. */
static void take_off(Found *found, double q_minus_p)
{
    found->input.sum_exp *= exp(0.5 * q_minus_p);
    found->target.sum_exp *= exp(-0.5 * q_minus_p);
}

/* The row's constants by the softmaxes that are found, with which it is summed from nothing */
static void begin_sums(Row *row, Found *found, const Arguments *a)
{
    found->log_z_diff = log_z_diff(found->input, found->target);
    set_row(row, found, a);
    found->sums = (Sums){ 0, 0, 0, 0 };
}
#endif

#if HAS_FINE
/* The sums of a row that is near; false of one that a sure token has: others' masses are too exact for its normalisers. */
static int sum_near(const X *x, const Y *y, int64_t n, Row *row, Softcaps softcaps, real parameter, const Arguments *a,
                    Found *found)
{
    const int is_sure = found->input.sum_exp < SURE_SUM_EXP || found->target.sum_exp < SURE_SUM_EXP;
    if (is_sure || a->verb != VERB_LOSS || a->input_temperature != a->target_temperature)
        return 0;
    found->sums = (Sums){ 0, 0, 0, 0 };
    found->mode = STABLE;
    near_sum(x, y, n, *row, softcaps, parameter, *(const Fine *)a->fine, &found->sums);
    if (found->sums.term != 0 && fabs(found->sums.term) < LEAST_NEAR_SUM) {
        take_off(found, found->sums.q_minus_p);
        begin_sums(row, found, a);
        near_sum(x, y, n, *row, softcaps, parameter, *(const Fine *)a->fine, &found->sums);
    }
    return fabs(found->sums.term) < MAX_SUM;
}
#endif

#if HAS_FAST
/* Both softmaxes and the sums of a row that is far, or near; false where it is not. `is_untilted`: whether the row is known to
   need no log-sum-exp of its tilted masses. */
static int sum_fast(const X *x, const Y *y, DX *d_input, int64_t n, Row *row, Softcaps softcaps, real parameter,
                    const Arguments *a, Found *found, int *is_untilted)
{
    (void)d_input;
#if HAS_CHERNOFF
    const double exponent = chernoff_exponent(parameter);
#else
    const double exponent = 0;
#endif
    LargeSpans large;
    Statistics s = statistics(x, y, n, softcaps, *row, (real)exponent, &large);
    if (!(s.x_sum_exp > 0 && s.x_sum_exp < MAX_SUM && s.y_sum_exp > 0 && s.y_sum_exp < MAX_SUM))
        return 0;
#if HAS_MOMENTS
    double chernoff;
    Element whole = of_moments(s, exponent, parameter, &chernoff);
    if (fabs(whole.term) < MAX_REFINED_SUM) {
        s = refined(s, &large, x, y, n, softcaps, *row, (real)exponent);
        whole = of_moments(s, exponent, parameter, &chernoff);
    }
#endif
    found->input.sum_exp = s.x_sum_exp;
    found->target.sum_exp = s.y_sum_exp;
    found->log_z_diff = log_z_diff(found->input, found->target);
    set_row(row, found, a);
#if HAS_MOMENTS
    found->sums = (Sums){ whole.term, whole.d_log_p, whole.d_log_q, 0 };
#if HAS_TILTED_LSE
    *is_untilted = fabs(log(chernoff)) < FAR_TILTED_LSE;
    if (!*is_untilted) {
        if (!(s.chernoff > MIN_CHERNOFF && is_well_conditioned(found->sums, MIN_FAST_SUM)))
            return 0;
        found->tilted_lse = log(chernoff);
        found->sums = (Sums){ 0, 0, 0, 0 };
        found->mode = FAST;
        set_row(row, found, a);
        return 1;
    }
#endif
#else
#if HAS_FINE
    const int64_t sampled = n < SPAN ? n : SPAN;
    if (longest_ratio(x, y, sampled, row, softcaps) < (real)0.8 * FINE_RADIUS && sum_near(x, y, n, row, softcaps, parameter, a, found))
        return 1;
#endif
    found->sums = (Sums){ 0, 0, 0, 0 };
#if KEEPS_SLOPES
    found->has_slopes = a->verb == VERB_LOSS && d_input && (const void *)d_input != (const void *)x;
    if (found->has_slopes)
        fast_sum_and_slopes(x, y, d_input, 0, n, *row, softcaps, parameter, NO_GRADIENT, &found->sums);
    else
#endif
        fast_sum(x, y, 0, 0, n, *row, softcaps, parameter, NO_GRADIENT, &found->sums);
#endif
#if SLOPES_ARE_LOGS
    if (!is_well_conditioned(found->sums, MIN_FAST_SUM) && is_well_conditioned(found->sums, MIN_NEAR_SUM))
        found->sums.term += heavy_rounding(x, y, n, *row, softcaps, parameter);
#endif
#if HAS_FINE && HAS_MOMENTS
    const Sums moments = found->sums;
    if (fabs(moments.term) < MIN_MOMENTS_SUM && sum_near(x, y, n, row, softcaps, parameter, a, found))
        return 1;
    found->sums = moments;
#endif
    found->mode = FAST;
    (void)is_untilted;
    return is_well_conditioned(found->sums, MIN_NEAR_SUM);
}
#endif

#if HAS_LOGITS
/* Against the row's maxima */
static void sum_exponentials(const X *x, const Y *y, int64_t n, const Row *row, Softcaps softcaps, Found *found)
{
    (void)x, (void)y;
#if INPUT_IS_LOGITS
    found->input.sum_exp = input_exponentials(x, n, softcaps, row->input_inv_temperature, row->input_max, 0).sum;
#endif
#if TARGET_IS_LOGITS
    found->target.sum_exp = target_exponentials(y, n, softcaps, row->target_inv_temperature, row->target_max, 0).sum;
#endif
}

/* Both softmaxes and the sums of any row */
static void sum_safe(const X *x, const Y *y, int64_t n, Row *row, Softcaps softcaps, real parameter,
                     const Arguments *a, Found *found, int is_untilted)
{
    sum_exponentials(x, y, n, row, softcaps, found);
    found->mode = SAFE;
    (void)is_untilted;
#if HAS_TILTED_LSE
    if (!is_untilted) {
        found->log_z_diff = log_z_diff(found->input, found->target);
        set_row(row, found, a);
        const double lse = tilted_lse(x, y, n, *row, softcaps, parameter);
        if (is_far_lse(lse)) {
            found->tilted_lse = lse;
            found->sums = (Sums){ 0, 0, 0, 0 };
            set_row(row, found, a);
            return;
        }
    }
#endif
    for (int pass = 0; pass < 2; pass++) {
        begin_sums(row, found, a);
        sum(x, y, 0, 0, n, *row, softcaps, parameter, NO_GRADIENT, &found->sums);
        /* The sums' rounding is in the difference of log-sum-exps, and shows in the masses as an excess. Smooth kinds
           have its square, and seldom too much of it; one with a corner has it as it is, and so have pieces that are merged
           by their masses. */
        const Sums s = found->sums;
        const double tolerated = a->verb == VERB_STATISTICS ? 0 : 1e-6 * fabs(s.term);
        const double slope = HAS_CORNER ? 0.5 : fmax(fabs(s.d_log_p), fabs(s.d_log_q)); /* else 0 at a tie */
        const double wrong = fabs(s.q_minus_p) * slope;
        if (!(wrong > tolerated && wrong < MAX_SUM))
            break;
        take_off(found, s.q_minus_p);
    }
}

/* A row, or a piece of one that counts as a row */
static void sum_row(const X *x, const Y *y, DX *d_input, int64_t n, Row *row, Softcaps softcaps, real parameter,
                    const Arguments *a, Found *found)
{
    int is_untilted = 0;
    (void)d_input;
    *found = (Found){ { 0, 1 }, { 0, 1 }, 0, 0, { 0, 0, 0, 0 }, SAFE, 0 };
#if INPUT_IS_LOGITS
    found->input.max = COUNTED_X((real)input_max(x, n)) * (double)(real)(1 / a->input_temperature);
#endif
#if TARGET_IS_LOGITS
    found->target.max = COUNTED_Y((real)target_max(y, n)) * (double)(real)(1 / a->target_temperature);
#endif
    set_row(row, found, a);
    if (a->verb == VERB_STATISTICS && !HAS_MOMENTS) {
        sum_exponentials(x, y, n, row, softcaps, found);
        return;
    }
#if HAS_FAST
    if (fabs(found->input.max) < INFINITY && fabs(found->target.max) < INFINITY
        && sum_fast(x, y, d_input, n, row, softcaps, parameter, a, found, &is_untilted))
        return;
    found->tilted_lse = 0;
#endif
    sum_safe(x, y, n, row, softcaps, parameter, a, found, is_untilted);
}
#endif

/* Packed numbers of rows: known[field * rows + row], and so what is found */
static double known(const Arguments *a, int field, int64_t r) { return a->known[field * a->rows + r]; }
static void keep(const Arguments *a, int field, int64_t r, double value) { a->found[field * a->rows + r] = value; }

static int fields_found(const Arguments *a)
{
    return a->verb == VERB_STATISTICS ? (int)STATS_FIELDS : a->verb == VERB_ACCUMULATE ? (int)SUMS_FIELDS : (int)STATE_FIELDS;
}

static void keep_statistics(const Arguments *a, int64_t r, const Found *found)
{
#if HAS_LOGITS
    keep(a, STATS_INPUT_LSE, r, INPUT_IS_LOGITS ? lse(found->input) : 0);
    keep(a, STATS_TARGET_LSE, r, TARGET_IS_LOGITS ? lse(found->target) : 0);
    keep(a, STATS_TERM, r, found->sums.term);
    keep(a, STATS_D_LOG_P, r, found->sums.d_log_p);
    keep(a, STATS_D_LOG_Q, r, found->sums.d_log_q);
    keep(a, STATS_MODE, r, found->mode);
#if HAS_TILTED_LSE
    keep(a, STATS_TILTED_LSE, r, found->tilted_lse);
#endif
#endif
}

static void keep_sums(const Arguments *a, int64_t r, const Found *found)
{
    keep(a, SUMS_TERM, r, found->sums.term);
    keep(a, SUMS_D_LOG_P, r, found->sums.d_log_p);
    keep(a, SUMS_D_LOG_Q, r, found->sums.d_log_q);
    keep(a, SUMS_Q_MINUS_P, r, found->sums.q_minus_p);
    keep(a, SUMS_MODE, r, found->mode);
}

static void keep_state(const Arguments *a, int64_t r, const Found *found, double d_loss)
{
#if HAS_LOGITS
    keep(a, STATE_INPUT_LSE, r, INPUT_IS_LOGITS ? lse(found->input) : 0);
    keep(a, STATE_TARGET_LSE, r, TARGET_IS_LOGITS ? lse(found->target) : 0);
#else
    keep(a, STATE_INPUT_LSE, r, 0);
    keep(a, STATE_TARGET_LSE, r, 0);
#endif
    keep(a, STATE_LOG_Z_DIFF, r, found->log_z_diff);
    keep(a, STATE_D_LOG_P, r, found->sums.d_log_p);
    keep(a, STATE_D_LOG_Q, r, found->sums.d_log_q);
    keep(a, STATE_D_LOSS, r, d_loss);
    keep(a, STATE_MODE, r, found->mode);
#if HAS_TILTED_LSE
    keep(a, STATE_TILTED_LSE, r, found->tilted_lse);
#endif
}

#if INPUT_IS_LOGITS
/* A row's label: the logits there, read before gradients may take their place, as they count; else 0. Where it is smoothed, the mean
   of the input's */
typedef struct { int64_t token; real x, y; double mean; } Label;

NOINLINE static double mean_logit(const X *x, int64_t n, Softcaps softcaps)
{
    double sum = 0;
    (void)softcaps;
#pragma omp simd reduction(+: sum)
    for (int64_t i = 0; i < n; i++)
        sum += (double)COUNTED_X(LOAD_X(x[i]));
    return sum / (double)n;
}

static Label label_of(const Arguments *a, int64_t r, const X *x, const Y *y, int64_t n, Softcaps softcaps)
{
    Label label = { a->labels ? a->labels[r] : -1, 0, 0, 0 };
    (void)softcaps;
    if (label.token >= n)
        label.token = -1;
    if (label.token >= 0) {
        label.x = COUNTED_X(LOAD_X(x[label.token]));
        label.y = COUNTED_Y(LOAD_Y(y[label.token]));
        if (a->label_smoothing && a->label_weight)
            label.mean = mean_logit(x, n, softcaps);
    }
    return label;
}

/* What the row loses beside its divergence */
static double labelled_loss(const Arguments *a, Label label, double lse)
{
    if (label.token == IGNORED)
        return 0;
    const double smoothing = a->label_smoothing, own = (double)label.x;
    const double logit = smoothing ? (1 - smoothing) * own + smoothing * label.mean : own;
    const double of_label = a->label_weight ? a->label_weight * (lse - logit * (double)(real)(1 / a->input_temperature)) : 0;
    return of_label + (a->z_weight ? a->z_weight * lse * lse : 0);
}

/* What of that multiplies q in the gradient */
static double mass_factor(const Arguments *a, Label label, double lse)
{
    return label.token == IGNORED ? 0 : a->label_weight + (a->z_weight ? 2 * a->z_weight * lse : 0);
}

/* A row's derivative by which something is divided, as of labels.py */
static double dividing(const Arguments *a, double d_loss)
{
    if (FINISH_IS_IDENTITY)
        return d_loss;
    const double least = 1e-20 * (fabs(a->label_weight) + fabs(a->z_weight)) / fabs(a->divergence_weight);
    return fabs(d_loss) < least ? least : d_loss;
}
#endif

static void clear(const Arguments *a, int64_t r, int64_t n)
{
    if (a->d_input)
        memset(a->d_input + r * a->d_input_stride, 0, (size_t)n * sizeof(DX));
    if (a->d_target)
        memset(a->d_target + r * a->d_target_stride, 0, (size_t)n * sizeof(DY));
    if (a->loss)
        a->loss[r] = STORE_LOSS(0);
    if (a->figures)
        a->figures[r] = a->figures[a->rows + r] = 0;
    if (a->found)
        for (int field = 0; field < fields_found(a); field++)
            keep(a, field, r, 0);
}

#if HAS_LOGITS
static void read_state(const Arguments *a, int64_t r, Found *found)
{
    found->input = softmax_of(known(a, STATE_INPUT_LSE, r), a->input_temperature);
    found->target = softmax_of(known(a, STATE_TARGET_LSE, r), a->target_temperature);
    found->log_z_diff = known(a, STATE_LOG_Z_DIFF, r);
    found->sums = (Sums){ 0, known(a, STATE_D_LOG_P, r), known(a, STATE_D_LOG_Q, r), 0 };
    found->mode = (int)known(a, STATE_MODE, r);
#if HAS_TILTED_LSE
    found->tilted_lse = known(a, STATE_TILTED_LSE, r);
#endif
}

static void read_statistics(const Arguments *a, int64_t r, Found *found)
{
    found->input = softmax_of(known(a, STATS_INPUT_LSE, r), a->input_temperature);
    found->target = softmax_of(known(a, STATS_TARGET_LSE, r), a->target_temperature);
    found->log_z_diff = known(a, STATS_TARGET_LSE, r) - known(a, STATS_INPUT_LSE, r);
#if HAS_TILTED_LSE
    found->tilted_lse = known(a, STATS_TILTED_LSE, r);
#endif
}
#endif

/* A row that counts, and where what is asked of it goes */
typedef struct {
    const X *x;
    const Y *y;
    DX *d_input;  /* or NULL */
    DY *d_target; /* or NULL */
    int64_t index, n;
    double weight;
    Softcaps softcaps;
    real parameter;
#if INPUT_IS_LOGITS
    Label label;
#endif
} Task;

static Task task_of(const Arguments *a, int64_t r, int64_t n, real parameter, double weight)
{
    Task task = { a->x + r * a->x_stride, a->y + r * a->y_stride, 0, 0, r, n, weight,
                  { (real)a->input_softcap, (real)a->target_softcap }, parameter };
    if (a->d_input)
        task.d_input = a->d_input + r * a->d_input_stride;
    if (a->d_target)
        task.d_target = a->d_target + r * a->d_target_stride;
#if INPUT_IS_LOGITS
    task.label = label_of(a, r, task.x, task.y, n, task.softcaps);
#endif
    return task;
}

/* What is known of the row, or found of it; where elements stand alone gradients are written with it. */
static Found found_of(const Arguments *a, const Task *t, Row *row, int has_state)
{
    Found found = { { 0, 1 }, { 0, 1 }, 0, 0, { 0, 0, 0, 0 }, SAFE, 0 };
#if HAS_LOGITS
    if (has_state) {
        read_state(a, t->index, &found);
        set_row(row, &found, a);
    } else if (a->verb == VERB_ACCUMULATE) {
        read_statistics(a, t->index, &found);
        set_row(row, &found, a);
        sum(t->x, t->y, 0, 0, t->n, *row, t->softcaps, t->parameter, NO_GRADIENT, &found.sums);
    } else {
        sum_row(t->x, t->y, t->d_input, t->n, row, t->softcaps, t->parameter, a, &found);
    }
    row->input_grad_sum = (real)found.sums.d_log_q;
    row->target_grad_sum = (real)found.sums.d_log_p;
#else
    if (has_state)
        return found;
#if ONE_SWEEP
    if (t->d_input || t->d_target) {
        const GradOut grad_out = { (real)(t->weight * a->scale), 0 };
        sum_and_gradient(t->x, t->y, t->d_input, t->d_target, t->n, *row, t->softcaps, t->parameter, grad_out, &found.sums);
        return found;
    }
#endif
    sum(t->x, t->y, t->d_input, t->d_target, t->n, *row, t->softcaps, t->parameter, NO_GRADIENT, &found.sums);
#endif
    return found;
}

/* d_loss: the derivative of the row's divergence in its sum of terms */
static void write_gradients(const Arguments *a, const Task *t, Row row, Found *found, double d_loss)
{
    double upstream = t->weight * a->scale;
#if INPUT_IS_LOGITS
    const double factor = mass_factor(a, t->label, lse(found->input));
    if (factor != 0) {
        d_loss = dividing(a, d_loss);
        row.input_grad_sum = (real)(found->sums.d_log_q - factor / (a->divergence_weight * d_loss));
    }
    upstream *= a->divergence_weight;
#endif
    upstream *= d_loss;
    GradOut grad_out = { (real)upstream, 0 };
#if INPUT_IS_LOGITS
    const double of_label = t->label.token >= 0 ? t->weight * a->scale * a->label_weight : 0;
    grad_out.everywhere = (real)(of_label * a->label_smoothing / (double)t->n);
#endif
#if KEEPS_SLOPES
    if (found->mode == FAST && found->has_slopes)
        gradient_of_slopes(t->x, t->d_input, t->n, row, t->softcaps, grad_out);
    else
#endif
#if HAS_FAST
    if (found->mode == FAST)
        fast_gradient(t->x, t->y, t->d_input, t->d_target, t->n, row, t->softcaps, t->parameter, grad_out, &found->sums);
    else
#endif
#if HAS_FINE
    if (found->mode == STABLE)
        near_gradient(t->x, t->y, t->d_input, t->d_target, t->n, row, t->softcaps, t->parameter, grad_out, *(const Fine *)a->fine);
    else
#endif
        gradient(t->x, t->y, t->d_input, t->d_target, t->n, row, t->softcaps, t->parameter, grad_out, &found->sums);
#if INPUT_IS_LOGITS && WANT_INPUT
    if (of_label != 0) {
        const real of_row = safe_element(t->label.x, t->label.y, row, t->parameter).input * grad_out.loss;
        const real slope = row.input_inv_temperature * (INPUT_IS_CAPPED ? softcap_grad(t->label.x, t->softcaps.input) : 1);
        const real less = (real)(of_label * (1 - a->label_smoothing)) + grad_out.everywhere;
        t->d_input[t->label.token] = STORE_DX((of_row - less) * slope);
    }
#endif
}

/* The row's part of what the verb asks for; returns its weighted loss. */
static double one_row(const Arguments *a, int64_t r, int64_t n, real parameter)
{
    const double weight = a->row_weight ? (double)a->row_weight[r] : 1;
    if (weight == 0) { /* not read: garbage in it cannot leak */
        clear(a, r, n);
        return 0;
    }
    const Task task = task_of(a, r, n, parameter, weight);
    const int has_state = a->verb == VERB_GRADIENT && a->known;
    Row row = { 0 };
    Found found = found_of(a, &task, &row, has_state);
    if (a->verb == VERB_STATISTICS) {
        keep_statistics(a, r, &found);
        return 0;
    }
    if (a->verb == VERB_ACCUMULATE) {
        keep_sums(a, r, &found);
        return 0;
    }
#if INPUT_IS_LOGITS
    if (a->figures) { /* before gradients may take the logits' place */
        a->figures[r] = lse(found.input);
        a->figures[a->rows + r]
            = entropy(input_exponentials(task.x, n, task.softcaps, row.input_inv_temperature, row.input_max, 1));
    }
#endif
    double loss = 0, d_loss = 1;
    if (has_state) {
        d_loss = known(a, STATE_D_LOSS, r);
    } else {
        if (HAS_FAST && found.sums.term < 0) /* by what subnormal masses are rounded */
            found.sums.term = 0;
        const Finish done = finish(found.sums.term, found.tilted_lse, parameter);
        loss = weight * done.loss;
        d_loss = done.derivative;
#if INPUT_IS_LOGITS
        loss = weight * (a->divergence_weight * done.loss + labelled_loss(a, task.label, lse(found.input)));
#endif
    }
    if ((task.d_input || task.d_target) && (!ONE_SWEEP || has_state))
        write_gradients(a, &task, row, &found, d_loss);
    if (a->loss)
        a->loss[r] = STORE_LOSS(loss);
    if (a->found)
        keep_state(a, r, &found, d_loss);
    return loss;
}

/* Rows of one element whose term is the loss (`reduction="none"` of kl_div): a row is a vector lane. */
#define ELEMENTWISE (FINISH_IS_IDENTITY && !HAS_LOGITS)
#if ELEMENTWISE
INLINE void each_element(const Arguments *a, int64_t start, int64_t end, real parameter, int wants)
{
    const Row row = { 0 };
    const real scale = (real)a->scale;
    LOSS *loss = a->loss;
    const WEIGHT *weights = a->row_weight;
    DX *d_input = a->d_input;
    DY *d_target = a->d_target;
#pragma omp simd
    for (int64_t i = start; i < end; i++) {
        const Element e = safe_element(LOAD_X(a->x[i]), LOAD_Y(a->y[i]), row, parameter);
        const real weight = weights ? (real)weights[i] : (real)1;
        if (loss)
            loss[i] = STORE_LOSS(weight == 0 ? (real)0 : weight * e.term);
        if (WANT_INPUT && wants)
            d_input[i] = STORE_DX(weight == 0 ? (real)0 : scale * weight * e.input);
        if (WANT_TARGET && wants)
            d_target[i] = STORE_DY(weight == 0 ? (real)0 : scale * weight * e.target);
    }
}

NOINLINE static void losses_of_elements(const Arguments *a, int64_t start, int64_t end, real parameter)
{
    each_element(a, start, end, parameter, 0);
}

NOINLINE static void gradients_of_elements(const Arguments *a, int64_t start, int64_t end, real parameter)
{
    each_element(a, start, end, parameter, 1);
}
#endif

void kullback_rows(const Arguments *a)
{
    if (a->d_input)
        ask_for_large_pages(a->d_input, (int64_t)sizeof(DX) * a->elements);
    if (a->d_target)
        ask_for_large_pages(a->d_target, (int64_t)sizeof(DY) * a->elements);
    const int64_t rows_per_unit = a->vocab >= UNIT ? 1 : UNIT / (a->vocab ? a->vocab : 1);
    const int64_t units = (a->rows + rows_per_unit - 1) / rows_per_unit;
    double *partial = a->total ? calloc((size_t)units + 1, sizeof *partial) : 0;
    const real parameter = (real)a->parameter;
#pragma omp parallel for schedule(static) num_threads(a->threads) if (units > 1)
    for (int64_t unit = 0; unit < units; unit++) {
        const int64_t first = unit * rows_per_unit;
        const int64_t last = first + rows_per_unit < a->rows ? first + rows_per_unit : a->rows;
#if ELEMENTWISE
        if (a->vocab == 1 && a->d_input_stride <= 1 && a->d_target_stride <= 1 && !a->total && !a->found) {
            (a->d_input || a->d_target ? gradients_of_elements : losses_of_elements)(a, first, last, parameter);
            continue;
        }
#endif
        double part = 0;
        for (int64_t r = first; r < last; r++) {
            const int64_t left = a->elements - r * a->vocab;
            part += one_row(a, r, left < a->vocab ? left : a->vocab, parameter);
        }
        if (partial)
            partial[unit] = part;
    }
    if (a->total) {
        double total = 0, lost = 0; /* Neumaier's sum; where it is infinite what was lost is NaN */
        for (int64_t unit = 0; unit < units; unit++) {
            const double part = partial[unit], next = total + part;
            lost += fabs(total) >= fabs(part) ? (total - next) + part : (part - next) + total;
            total = next;
        }
        *a->total = (lost == lost ? total + lost : total) * a->scale;
    }
    free(partial);
}
