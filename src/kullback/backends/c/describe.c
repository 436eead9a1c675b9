/* Every figure of rows of logits (work.Describe). Pasted above: `Row` and `Terms safe_terms(x, y, row)`
   (printer.print_terms), the softmaxes of both sides and their tokens, the order of what is written (NUMBER_*, TOKEN_*), and
   the macros

   X, Y, LOAD_X, LOAD_Y               element types of input and target
   LOADS_X, LOADS_Y                   as LOAD_X, of many elements
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
enum { SHORT, EXACT, OF_TWO_TEMPERATURES }; /* how log-ratios are found */

#define DECLARE(kind) double kind;
typedef struct {
    EACH_KIND(DECLARE)
    double q_minus_p, slope;
} Sums;

INLINE real log_q_of(real x, const Row *row)
{
    return (x - row->input_max) * row->input_inv_temperature - row->input_log_sum_exp;
}

INLINE real log_p_of(real y, const Row *row)
{
    return (y - row->target_max) * row->target_inv_temperature - row->target_log_sum_exp;
}

#if REAL_IS_DOUBLE
#define CLOSE_RATIO 0.48 /* found with a rounding; terms are close below 1/2 */

/* The longest log-ratio of a group; infinite also of NaN */
INLINE real longest_of(const real *x, const real *y, int64_t n, const Row *row)
{
    real longest = 0;
#pragma omp simd reduction(max: longest)
    for (int64_t i = 0; i < n; i++) {
        const real log_q = log_q_of(x[i], row), log_p = log_p_of(y[i], row);
        const real apart = safe_abs(log_p - log_q), of_number = apart < REAL_INFINITY ? apart : REAL_INFINITY;
        longest = of_number > longest ? of_number : longest;
    }
    return longest;
}

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

#endif

#define PRAGMA_OF(...) _Pragma(#__VA_ARGS__)
#define PRAGMA(...) PRAGMA_OF(__VA_ARGS__)
#define ZERO(kind) real kind = 0;
#define ADD_TERM(kind) kind += terms.kind;
#define ADD_SUM(kind) sums.kind += kind;

#define ADD_TERMS(terms_of)                                                                            \
    PRAGMA(omp simd reduction(+: KINDS, q_minus_p, slope))                                             \
    for (int64_t i = 0; i < count; i++) {                                                              \
        const Terms terms = terms_of(own[i], other[i], row);                                           \
        EACH_KIND(ADD_TERM)                                                                            \
        q_minus_p += terms.q_minus_p;                                                                  \
        slope += terms.slope;                                                                          \
    }

#if !REAL_IS_DOUBLE
/* Those that are near, by polynomials; of each the size of its log-ratio, whose longest is returned, or NaN. */
INLINE real add_near(Sums *sums, const real *x, const real *y, real *sizes, int64_t n, Row row, int ratios)
{
    EACH_NEAR_SUM(ZERO)
    ubits longest = 0; /* its bits: those of NaN are more than any number's */
    PRAGMA(omp simd reduction(+: NEAR_SUMS) reduction(max: longest))
    for (int64_t i = 0; i < n; i++) {
        const real ratio = ratios == SHORT ? short_ratio_of(x[i], y[i], &row)
            : ratios == EXACT              ? near_ratio_of(x[i], y[i], &row)
                                           : ratio_of(x[i], y[i], &row);
        const real root = ratios == OF_TWO_TEMPERATURES ? root_of(x[i], y[i], &row) : near_root_of(x[i], y[i], &row);
        const real size = safe_abs(ratio);
        const int is_near = size < NEAR_RADIUS;
        const NearSums more = near_sums(is_near ? ratio : 0, is_near ? root : 0);
        longest = to_bits(size) > longest ? to_bits(size) : longest;
        sizes[i] = size;
#define ADD_MORE(sum) sum += more.sum;
        EACH_NEAR_SUM(ADD_MORE)
    }
    const Terms terms = near_terms((NearSums) { NEAR_SUMS });
#define ADD_NEAR(kind) sums->kind += terms.kind;
    EACH_KIND(ADD_NEAR)
    ADD_NEAR(q_minus_p)
    ADD_NEAR(slope)
    return from_bits((bits)longest);
}

/* Those that are not near, side by side; returns how many. */
INLINE int64_t gather_far(real *x, real *y, const real *own, const real *other, const real *sizes, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        x[count] = own[i];
        y[count] = other[i];
        count += !(sizes[i] < NEAR_RADIUS);
    }
    return count;
}
#endif

/* Terms of elements that are close, or are far: there nothing cancels, and without infinities nothing wants a guard. */
NOINLINE static Sums sums_of(const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps, int ratios)
{
    Sums sums = { 0 };
    real own_room[LONG_SPAN], other_room[LONG_SPAN];
#if !REAL_IS_DOUBLE
    real sizes[LONG_SPAN], far_own[LONG_SPAN], far_other[LONG_SPAN];
#endif
    (void)ratios;
    for (int64_t start = 0; start < n; start += LONG_SPAN) {
        int64_t count = start + LONG_SPAN < n ? LONG_SPAN : n - start;
        const real *own = input_values(x + start, count, softcaps, own_room);
        const real *other = target_values(y + start, count, softcaps, other_room);
#if REAL_IS_DOUBLE
        const real longest = longest_of(own, other, count, &row);
#else
        const real longest = ratios == SHORT ? add_near(&sums, own, other, sizes, count, row, SHORT)
            : ratios == EXACT                ? add_near(&sums, own, other, sizes, count, row, EXACT)
                                             : add_near(&sums, own, other, sizes, count, row, OF_TWO_TEMPERATURES);
        if (longest < NEAR_RADIUS)
            continue;
        count = gather_far(far_own, far_other, own, other, sizes, count);
        own = far_own;
        other = far_other;
#endif
        EACH_KIND(ZERO)
        real q_minus_p = 0, slope = 0;
#if REAL_IS_DOUBLE
        if (longest < CLOSE_RATIO) {
            ADD_TERMS(close_terms)
        }
#else
        if (longest < REAL_INFINITY) {
            ADD_TERMS(fast_terms)
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
   row is summed again. So it is where what y - x is rounded by would show: it is 2^-25·|log_z_diff| at most beside what log-ratios are,
   of which Σ |p - q| is less than the mean, and a smooth kind has the square. */
static Sums divergences(const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps)
{
    enum { MOST_TIMES = 3 };
    const double small = 1e-3, offset = fabs((double)row.log_z_diff_high), least_over_offset = 1.0 / 32;
    int ratios = row.input_inv_temperature != row.target_inv_temperature ? OF_TWO_TEMPERATURES : offset <= 1 ? SHORT : EXACT;
    Sums sums = sums_of(x, y, n, row, softcaps, ratios);
    for (int times = 1; fabs(sums.q_minus_p) < 1;) {
        const int is_rounded = !REAL_IS_DOUBLE && ratios == SHORT && sums.WITH_CORNER < least_over_offset * offset;
        const int has_excess = times < MOST_TIMES && fabs(sums.q_minus_p) > small * sums.WITH_CORNER;
        if (!is_rounded && !has_excess)
            break;
        if (is_rounded)
            ratios = EXACT;
        if (has_excess) {
            set_log_z_diff(&row, (double)row.log_z_diff_high + (double)row.log_z_diff_low - sums.q_minus_p);
            times++;
        }
        sums = sums_of(x, y, n, row, softcaps, ratios);
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
