/* Every figure of rows of logits (work.Describe). Pasted above: `Row` and `Terms safe_terms(x, y, row)`
   (printer.print_terms), the softmaxes of both sides and their tokens, the order of what is written (NUMBER_*, TOKEN_*), and
   the macros

   X, Y, LOAD_X, LOAD_Y               element types of input and target
   INPUT_IS_CAPPED, TARGET_IS_CAPPED
   HAS_TARGET                         without, the input is told of alone

   A row is read from memory once and then from a cache. */

typedef struct {
    const X *x;
    const Y *y;
    const int64_t *labels; /* [rows], negative: none; or NULL */
    double *numbers;       /* [NUMBERS, rows], or without a target the first of them */
    int64_t *tokens;       /* [TOKENS, rows], likewise */
    int64_t rows, vocab, x_stride, y_stride;
    double input_temperature, target_temperature, input_softcap, target_softcap;
    int32_t threads;
} Arguments;

#if HAS_TARGET
#define DECLARE(kind) double kind;
typedef struct {
    EACH_KIND(DECLARE)
    double q_minus_p, slope;
} Sums;

/* Of so many tokens together it is decided how their terms are found. */
enum { GROUP = 256 };

INLINE real log_q_of(real x, const Row *row)
{
    return (x - row->input_max) * row->input_inv_temperature - row->input_log_sum_exp;
}

INLINE real log_p_of(real y, const Row *row)
{
    return (y - row->target_max) * row->target_inv_temperature - row->target_log_sum_exp;
}

/* The longest log-ratio of a group; infinite also of NaN */
INLINE real longest_of(const X *x, const Y *y, int64_t n, const Row *row, Softcaps softcaps)
{
    real longest = 0;
    (void)softcaps;
#pragma omp simd reduction(max: longest)
    for (int64_t i = 0; i < n; i++) {
        const real log_q = log_q_of(COUNTED_X(LOAD_X(x[i])), row), log_p = log_p_of(COUNTED_Y(LOAD_Y(y[i])), row);
        const real apart = safe_abs(log_p - log_q), of_number = apart < REAL_INFINITY ? apart : REAL_INFINITY;
        longest = of_number > longest ? of_number : longest;
    }
    return longest;
}

#if REAL_IS_DOUBLE
#define CLOSE_RATIO 0.48 /* found with a rounding; terms are close below 1/2 */
#else
/* √(p·q) */
INLINE real root_of(real x, real y, const Row *row)
{
    return mass_exp((real)0.5 * (log_p_of(y, row) + log_q_of(x, row)));
}

INLINE real ratio_of(real x, real y, const Row *row)
{
    return safe_logit_difference(y, row->target_inv_temperature, x, row->input_inv_temperature, row->log_z_diff_high,
                                 row->log_z_diff_low);
}

/* Also of elements that are far, and numbers: there nothing cancels. */
INLINE Terms mixed_terms(real x, real y, Row row)
{
    const real ratio = ratio_of(x, y, &row);
    const int is_near = safe_abs(ratio) < NEAR_RADIUS;
    const Terms near = near_terms(near_sums(is_near ? ratio : 0, root_of(x, y, &row))), far = fast_terms(x, y, row);
    Terms terms;
#define CHOOSE(kind) terms.kind = is_near ? near.kind : far.kind;
    EACH_KIND(CHOOSE)
    terms.q_minus_p = is_near ? near.q_minus_p : far.q_minus_p;
    terms.slope = is_near ? near.slope : far.slope;
    return terms;
}
#endif

#define PRAGMA_OF(...) _Pragma(#__VA_ARGS__)
#define PRAGMA(...) PRAGMA_OF(__VA_ARGS__)
#define ZERO(kind) real kind = 0;
#define ADD_TERM(kind) kind += terms.kind;
#define ADD_SUM(kind) sums.kind += kind;

#define ADD_TERMS(terms_of)                                                                            \
    PRAGMA(omp simd reduction(+: KINDS, q_minus_p, slope))                                             \
    for (int64_t i = start; i < end; i++) {                                                            \
        const Terms terms = terms_of(COUNTED_X(LOAD_X(x[i])), COUNTED_Y(LOAD_Y(y[i])), row);           \
        EACH_KIND(ADD_TERM)                                                                            \
        q_minus_p += terms.q_minus_p;                                                                  \
        slope += terms.slope;                                                                          \
    }

#if !REAL_IS_DOUBLE
/* By polynomials, as if all were near; returns the longest log-ratio, or NaN. */
INLINE real add_near(Sums *sums, const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps, int one_temperature)
{
    EACH_NEAR_SUM(ZERO)
    ubits longest = 0; /* its bits: those of NaN are more than any number's */
    (void)softcaps;
    PRAGMA(omp simd reduction(+: NEAR_SUMS) reduction(max: longest))
    for (int64_t i = 0; i < n; i++) {
        const real own = COUNTED_X(LOAD_X(x[i])), other = COUNTED_Y(LOAD_Y(y[i]));
        const real ratio = one_temperature ? near_ratio_of(own, other, &row) : ratio_of(own, other, &row);
        const NearSums more = near_sums(ratio, one_temperature ? near_root_of(own, other, &row) : root_of(own, other, &row));
        const ubits size = to_bits(safe_abs(ratio));
        longest = size > longest ? size : longest;
#define ADD_MORE(sum) sum += more.sum;
        EACH_NEAR_SUM(ADD_MORE)
    }
    const real size = from_bits((bits)longest);
    if (size < NEAR_RADIUS) {
        const Terms terms = near_terms((NearSums) { NEAR_SUMS });
#define ADD_NEAR(kind) sums->kind += terms.kind;
        EACH_KIND(ADD_NEAR)
        ADD_NEAR(q_minus_p)
        ADD_NEAR(slope)
    }
    return size;
}
#endif

NOINLINE static Sums sums_of(const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps)
{
    Sums sums = { 0 };
    int is_far = 0; /* whether the group before was */
    const int one_temperature = row.input_inv_temperature == row.target_inv_temperature;
    (void)softcaps, (void)is_far, (void)one_temperature;
    for (int64_t start = 0; start < n; start += GROUP) {
        const int64_t end = start + GROUP < n ? start + GROUP : n;
#if REAL_IS_DOUBLE
        const real longest = longest_of(x + start, y + start, end - start, &row, softcaps);
#else
        real longest = is_far ? longest_of(x + start, y + start, end - start, &row, softcaps) : 0;
        if (longest < NEAR_RADIUS)
            longest = one_temperature ? add_near(&sums, x + start, y + start, end - start, row, softcaps, 1)
                                      : add_near(&sums, x + start, y + start, end - start, row, softcaps, 0);
        is_far = !(longest < NEAR_RADIUS);
        if (!is_far)
            continue;
#endif
        EACH_KIND(ZERO)
        real q_minus_p = 0, slope = 0;
#if REAL_IS_DOUBLE
        if (longest < CLOSE_RATIO) {
            ADD_TERMS(close_terms)
        }
#else
        if (longest < REAL_INFINITY) {
            ADD_TERMS(mixed_terms)
        }
#endif
        else {
            ADD_TERMS(safe_terms)
        }
        EACH_KIND(ADD_SUM)
        sums.q_minus_p += q_minus_p;
        sums.slope += slope;
    }
    return sums;
}

/* The normalisers' rounding shows in the masses as an excess. Smooth kinds have its square; where there is a corner it is had as it is,
   and to the first order taken out. Where it is more than a small part of what the sides differ by, it is taken off log(p/q), and the
   row is summed again. */
static Sums divergences(const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps)
{
    enum { MOST_TIMES = 3 };
    const double small = 1e-3;
    Sums sums = sums_of(x, y, n, row, softcaps);
    for (int times = 1; times < MOST_TIMES && fabs(sums.q_minus_p) < 1; times++) {
        if (fabs(sums.q_minus_p) <= small * sums.WITH_CORNER)
            break;
        set_log_z_diff(&row, (double)row.log_z_diff_high + (double)row.log_z_diff_low - sums.q_minus_p);
        sums = sums_of(x, y, n, row, softcaps);
    }
    sums.WITH_CORNER += 0.5 * sums.q_minus_p * sums.slope;
    sums.WITH_CORNER = sums.WITH_CORNER < 0 ? 0 : sums.WITH_CORNER;
    return sums;
}
#endif

static void one_row(const Arguments *a, int64_t r)
{
    const Softcaps softcaps = { (real)a->input_softcap, (real)a->target_softcap };
    const int64_t n = a->vocab, label = a->labels ? a->labels[r] : -1;
    const X *x = a->x + r * a->x_stride;
    double *numbers = a->numbers + r;
    int64_t *tokens = a->tokens + r;
    const Softmax input = input_describe(x, n, softcaps, a->input_temperature, label, numbers + NUMBER_LSE * a->rows,
                                         tokens + TOKEN_TOP_TOKEN * a->rows, a->rows);
    (void)input;
#if HAS_TARGET
    const Y *y = a->y + r * a->y_stride;
    const Temperatures temperatures = { a->input_temperature, a->target_temperature };
    const Softmax target = target_describe(y, n, softcaps, a->target_temperature, label, numbers + NUMBER_TARGET_LSE * a->rows,
                                           tokens + TOKEN_TARGET_TOP_TOKEN * a->rows, a->rows);
    Row row = { 0 };
    set_softmaxes(&row, input, target, log_z_diff(input, target), temperatures);
    const Sums sums = divergences(x, y, n, row, softcaps);
    double *of_kind = numbers + NUMBER_KINDS * a->rows;
#define WRITE(kind) *of_kind = sums.kind, of_kind += a->rows;
    EACH_KIND(WRITE)
#endif
}

void kullback_describe(const Arguments *a)
{
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (int64_t r = 0; r < a->rows; r++)
        one_row(a, r);
}
