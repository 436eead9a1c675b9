/* Rows of a divergence on a CPU. The formula is pasted above as `element` and `finish`; so are the
   macros X, Y (element types of input and target), WEIGHT, LOSS, WANT_INPUT, WANT_TARGET.

   Sums are taken in `real` over SPAN elements and in double from there, in an order that depends on
   the shape alone: neither the number of threads nor the rows beside a row can change its result. */

#define NOINLINE __attribute__((noinline))
#define PREFETCH(p) __builtin_prefetch(p)

/* While a span is computed the next one is fetched; short spans keep the fetches from coming all at once. */
enum { SPAN = 256, UNIT = 1 << 16, CACHE_LINE = 64 };

typedef struct {
    const X *x;
    const Y *y;
    X *input_gradient;
    Y *target_gradient;
    const WEIGHT *weight;         /* of each row; NULL: 1 */
    LOSS *loss;                   /* [rows], or NULL */
    double *state;                /* [7, rows], or NULL */
    const double *known_state;    /* [7, rows], or NULL */
    double *partial;              /* [units], or NULL */
    int64_t rows, vocab, x_stride, y_stride, input_gradient_stride, target_gradient_stride, elements;
    double scale, input_temperature, target_temperature, input_cap, target_cap, parameters[1];
    int32_t threads;
} Arguments;

typedef struct { double term, d_log_p, d_log_q, excess; } Sums; /* the excess is that of q's masses over p's */
typedef struct { real input, target; } Caps;
#define CAPPED_X(x, caps) (INPUT_IS_CAPPED ? k_capped(x, (caps).input) : (x))
#define CAPPED_Y(y, caps) (TARGET_IS_CAPPED ? k_capped(y, (caps).target) : (y))
typedef struct { double top, total; } LogSumExp;

#if NEEDS_NORMS
NOINLINE static double top_x(const X *x, int64_t n)
{
    real top = -(real)INFINITY;
    real poison = 0; /* a maximum drops NaN; a sum of zeros does not */
#pragma omp simd reduction(max: top) reduction(+: poison)
    for (int64_t i = 0; i < n; i++) {
        const real value = LOAD_X(x[i]);
        top = value > top ? value : top;
        poison += value == value ? (real)0 : value;
    }
    return (double)top + (double)poison;
}

NOINLINE static double top_y(const Y *y, int64_t n)
{
    real top = -(real)INFINITY;
    real poison = 0;
#pragma omp simd reduction(max: top) reduction(+: poison)
    for (int64_t i = 0; i < n; i++) {
        const real value = LOAD_Y(y[i]);
        top = value > top ? value : top;
        poison += value == value ? (real)0 : value;
    }
    return (double)top + (double)poison;
}

NOINLINE static double total_x(const X *x, int64_t n, Caps caps, real scale, real top)
{
    double total = 0;
    (void)caps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++)
            part += k_exp((CAPPED_X(LOAD_X(x[i]), caps) - top) * scale);
        total += part;
    }
    return total;
}

NOINLINE static double total_y(const Y *y, int64_t n, Caps caps, real scale, real top)
{
    double total = 0;
    (void)caps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real part = 0;
#pragma omp simd reduction(+: part)
        for (int64_t i = start; i < end; i++)
            part += k_exp((CAPPED_Y(LOAD_Y(y[i]), caps) - top) * scale);
        total += part;
    }
    return total;
}
#endif

/* Rows of logits are tried without series and guards first; those whose sum is smaller than the first, of which a term's
   rounding would be too much, or is no number, are summed again. */
#define LEAST_APART 0.05
#define MOST 1e15

#if HAS_APART
INLINE int is_apart(Sums sums)
{
    const double least = fmin(fabs(sums.d_log_p), fabs(sums.d_log_q));
    return (HAS_OVERLAP ? least : fabs(sums.term)) > LEAST_APART && fabs(sums.term) < MOST && fabs(sums.d_log_p) < MOST
        && fabs(sums.d_log_q) < MOST;
}

/* Both sides' masses against their tops, and the sums that divergences.py calls moments, with logarithms to base 2 */
typedef struct { double x_total, y_total, cross_p, cross_q, overlap; } Survey;

NOINLINE static Survey survey(const X *x, const Y *y, int64_t n, Caps caps, Row row, real exponent)
{
    Survey result = { 0, 0, 0, 0, 0 };
    const real x_top = row.input_top, y_top = row.target_top;
    const real x_factor = binary(row.input_scale), y_factor = binary(row.target_scale);
    (void)caps, (void)exponent;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real x_total = 0, y_total = 0, cross_p = 0, cross_q = 0, overlap = 0;
#pragma omp simd reduction(+: x_total, y_total, cross_p, cross_q, overlap)
        for (int64_t i = start; i < end; i++) {
            const real x_power = (CAPPED_X(LOAD_X(x[i]), caps) - x_top) * x_factor;
            const real y_power = (CAPPED_Y(LOAD_Y(y[i]), caps) - y_top) * y_factor;
            const real q = power_of_2(x_power), p = power_of_2(y_power), ratio = y_power - x_power;
            x_total += q;
            y_total += p;
            if (HAS_CROSS_P)
                cross_p += p * bounded(ratio);
            if (HAS_CROSS_Q)
                cross_q += q * (ratio == ratio ? ratio : 0); /* a mass over none makes it infinite, and the row guarded */
            if (HAS_OVERLAP)
                overlap += blend_of_powers(y_power, x_power, exponent);
        }
        result.x_total += x_total;
        result.y_total += y_total;
        result.cross_p += cross_p;
        result.cross_q += cross_q;
        result.overlap += overlap;
    }
    return result;
}
#endif

/* SPAN elements of one sweep; `element` is the formula in one of its vocabularies. */
#define SWEEP_SPAN(element)                                                                       \
    _Pragma("omp simd reduction(+: term, d_log_p, d_log_q, excess) reduction(max: wildest_x, wildest_y)")                   \
    for (int64_t i = start; i < end; i++) {                                                       \
        const real xi = CAPPED_X(LOAD_X(x[i]), caps), yi = CAPPED_Y(LOAD_Y(y[i]), caps);          \
        const Element e = element(xi, yi, row, parameters);                                       \
        const ubits wild_x = WILDNESS(xi, X_LOW), wild_y = WILDNESS(yi, Y_LOW);                   \
        wildest_x = wild_x > wildest_x ? wild_x : wildest_x;                                      \
        wildest_y = wild_y > wildest_y ? wild_y : wildest_y;                                      \
        if (want_sum) {                                                                           \
            term += e.term;                                                                       \
            if (NEEDS_NORMS) {                                                                    \
                d_log_p += e.d_log_p;                                                             \
                d_log_q += e.d_log_q;                                                             \
            }                                                                                     \
            if (INPUT_IS_LOGITS && TARGET_IS_LOGITS && !apart)                                    \
                excess += e.excess;                                                               \
        }                                                                                         \
        if (WANT_INPUT && want_gradient)                                                          \
            input_gradient[i] = STORE_X(e.input * (input_upstream * (INPUT_IS_CAPPED ? cap_slope(xi, caps.input) : 1)));    \
        if (WANT_TARGET && want_gradient)                                                         \
            target_gradient[i] = STORE_Y(e.target * (target_upstream * (TARGET_IS_CAPPED ? cap_slope(yi, caps.target) : 1))); \
    }

/* One pass over part of a row: its sums, its gradients, or both. A span is tried with the tame formula and
   done again with the guarded one if it was not tame. Logits say nothing of their masses, which may be 0: of them a
   whole row is apart, or guarded. */
INLINE void sweep(const X *x, const Y *y, X *input_gradient, Y *target_gradient, int64_t n, Row row, Caps caps,
                  Parameters parameters, real upstream, Sums *sums, int apart, int want_sum, int want_gradient)
{
    const real input_upstream = INPUT_IS_LOGITS ? upstream * row.input_scale : upstream;
    const real target_upstream = TARGET_IS_LOGITS ? upstream * row.target_scale : upstream;
    (void)input_upstream, (void)target_upstream, (void)caps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real term = 0, d_log_p = 0, d_log_q = 0, excess = 0;
        ubits wildest_x = 0, wildest_y = 0;
        const int64_t next_end = end + SPAN < n ? end + SPAN : n;
        for (int64_t i = end; i < next_end; i += CACHE_LINE / sizeof(X))
            PREFETCH(x + i);
        for (int64_t i = end; i < next_end; i += CACHE_LINE / sizeof(Y))
            PREFETCH(y + i);
#if HAS_APART
        if (apart) {
            SWEEP_SPAN(apart_element)
        } else
#elif !NEEDS_NORMS
        SWEEP_SPAN(tame_element)
        if (wildest_x >= WILDNESS(X_HIGH, X_LOW) || wildest_y >= WILDNESS(Y_HIGH, Y_LOW))
#endif
        {
            term = d_log_p = d_log_q = excess = 0;
            SWEEP_SPAN(k_element)
        }
        if (want_sum) {
            sums->term += term;
            sums->d_log_p += d_log_p;
            sums->d_log_q += d_log_q;
            sums->excess += excess;
        }
    }
    (void)apart;
}

#define SWEEP(name, apart, want_sum, want_gradient) \
    NOINLINE static void name(const X *x, const Y *y, X *input_gradient, Y *target_gradient, int64_t n, \
                                     Row row, Caps caps, Parameters parameters, real upstream, Sums *sums) \
    { sweep(x, y, input_gradient, target_gradient, n, row, caps, parameters, upstream, sums, apart, want_sum, want_gradient); }

#define WANT_GRADIENT (WANT_INPUT || WANT_TARGET)
/* A gradient that needs no sum of its row is written while the row is summed. */
#define ONE_SWEEP (FINISH_IS_LINEAR && !NEEDS_NORMS && WANT_GRADIENT)
#if ONE_SWEEP
SWEEP(sum_and_gradient, 0, 1, 1)
#else
SWEEP(sum, 0, 1, 0)
#if WANT_GRADIENT
SWEEP(gradient, 0, 0, 1)
#endif
#if HAS_APART
SWEEP(apart_sum, 1, 1, 0)
#if WANT_GRADIENT
SWEEP(apart_gradient, 1, 0, 1)
#endif
#endif
#endif

#if NEEDS_NORMS
INLINE void set_row(Row *row, LogSumExp input, LogSumExp target, const Arguments *a)
{
    /* The states hold the top of the scaled row, with the scale as rounded to `real`; elements want the row's own. */
    row->input_scale = (real)(1 / a->input_temperature);
    row->input_top = (real)(input.top / (double)row->input_scale);
    row->input_inverse_total = (real)(1 / input.total);
    row->input_log_total = (real)log(input.total);
    row->target_scale = (real)(1 / a->target_temperature);
    row->target_top = (real)(target.top / (double)row->target_scale);
    row->target_inverse_total = (real)(1 / target.total);
    row->target_log_total = (real)log(target.total);
    const double shift = (target.top - input.top) + (log(target.total) - log(input.total));
    row->shift_high = (real)shift;
    row->shift_low = (real)(shift - (double)row->shift_high);
}
#endif

#if HAS_APART
/* Both norms and the sums of a row whose distributions are apart; otherwise returns 0. */
static int sum_apart(const X *x, const Y *y, int64_t n, Row *row, Caps caps, Parameters parameters, const Arguments *a,
                     LogSumExp *input, LogSumExp *target, Sums *sums)
{
#if HAS_OVERLAP
    const double exponent = overlap_exponent(parameters);
#else
    const double exponent = 0;
#endif
    const Survey s = survey(x, y, n, caps, *row, (real)exponent);
    if (!(s.x_total > 0 && s.x_total < MOST && s.y_total > 0 && s.y_total < MOST))
        return 0;
    input->total = s.x_total;
    target->total = s.y_total;
    set_row(row, *input, *target, a);
#if HAS_MOMENTS
    const double shift = log2(s.x_total / s.y_total);
    const Element whole = of_moments((real)((s.cross_p / s.y_total + shift) * 0.6931471805599453),
                                     (real)((s.cross_q / s.x_total + shift) * 0.6931471805599453),
                                     (real)(s.overlap / s.x_total * exp2(exponent * shift)), parameters);
    *sums = (Sums){ whole.term, whole.d_log_p, whole.d_log_q, 0 };
#else
    *sums = (Sums){ 0, 0, 0, 0 };
    apart_sum(x, y, 0, 0, n, *row, caps, parameters, 0, sums);
#endif
    return is_apart(*sums);
}
#endif

#if NEEDS_NORMS
/* The same of any row */
static void sum_guarded(const X *x, const Y *y, int64_t n, Row *row, Caps caps, Parameters parameters, const Arguments *a,
                        LogSumExp *input, LogSumExp *target, Sums *sums)
{
#if INPUT_IS_LOGITS
    input->total = total_x(x, n, caps, row->input_scale, row->input_top);
#endif
#if TARGET_IS_LOGITS
    target->total = total_y(y, n, caps, row->target_scale, row->target_top);
#endif
    for (int pass = 0; pass < 2; pass++) {
        set_row(row, *input, *target, a);
        *sums = (Sums){ 0, 0, 0, 0 };
        sum(x, y, 0, 0, n, *row, caps, parameters, 0, sums);
        /* The totals' rounding is in the shift between the norms, and shows in the masses as an excess. Smooth kinds have
           its square, and seldom too much of it; total_variation has it as it is. */
        const double wrong = fabs(sums->excess) * fmax(fabs(sums->d_log_p), fabs(sums->d_log_q));
        if (!(wrong > 1e-6 * fabs(sums->term) && wrong < MOST))
            break;
        input->total *= exp(0.5 * sums->excess);
        target->total *= exp(-0.5 * sums->excess);
    }
}
#endif

static void clear(const Arguments *a, int64_t r, int64_t n)
{
    (void)n;
#if WANT_INPUT
    memset(a->input_gradient + r * a->input_gradient_stride, 0, (size_t)n * sizeof(X));
#endif
#if WANT_TARGET
    memset(a->target_gradient + r * a->target_gradient_stride, 0, (size_t)n * sizeof(Y));
#endif
    if (a->loss)
        a->loss[r] = STORE_LOSS(0);
    if (a->state)
        for (int k = 0; k < 7; k++)
            a->state[k * a->rows + r] = 0;
}

static double one_row(const Arguments *a, int64_t r, int64_t n, Parameters parameters)
{
    const double weight = a->weight ? (double)a->weight[r] : 1;
    if (weight == 0) { /* not read: garbage in it cannot leak */
        clear(a, r, n);
        return 0;
    }
    const X *x = a->x + r * a->x_stride;
    const Y *y = a->y + r * a->y_stride;
    X *input_gradient = 0;
    Y *target_gradient = 0;
#if WANT_INPUT
    input_gradient = a->input_gradient + r * a->input_gradient_stride;
#endif
#if WANT_TARGET
    target_gradient = a->target_gradient + r * a->target_gradient_stride;
#endif
    Row row = { 0 };
    const Caps caps = { (real)a->input_cap, (real)a->target_cap };
    Sums sums = { 0, 0, 0, 0 };
    LogSumExp input = { 0, 0 }, target = { 0, 0 };
    int apart = 0;
    (void)input_gradient, (void)target_gradient, (void)apart;
#if NEEDS_NORMS
    const double *known = a->known_state;
    if (known) {
        apart = known[a->rows + r] > 0;
        input = (LogSumExp){ known[r], fabs(known[a->rows + r]) };
        target = (LogSumExp){ known[2 * a->rows + r], known[3 * a->rows + r] };
        sums = (Sums){ known[4 * a->rows + r], known[5 * a->rows + r], known[6 * a->rows + r], 0 };
        set_row(&row, input, target, a);
    } else {
#if INPUT_IS_LOGITS
        input.top = CAPPED_X((real)top_x(x, n), caps) * (double)(real)(1 / a->input_temperature);
#endif
#if TARGET_IS_LOGITS
        target.top = CAPPED_Y((real)top_y(y, n), caps) * (double)(real)(1 / a->target_temperature);
#endif
        set_row(&row, input, target, a);
#if HAS_APART
        if (fabs(input.top) < INFINITY && fabs(target.top) < INFINITY)
            apart = sum_apart(x, y, n, &row, caps, parameters, a, &input, &target, &sums);
#endif
        if (!apart)
            sum_guarded(x, y, n, &row, caps, parameters, a, &input, &target, &sums);
    }
    row.input_sum_gradient = (real)sums.d_log_q;
    row.target_sum_gradient = (real)sums.d_log_p;
#elif ONE_SWEEP
    sum_and_gradient(x, y, input_gradient, target_gradient, n, row, caps, parameters, (real)(weight * a->scale), &sums);
#else
    sum(x, y, input_gradient, target_gradient, n, row, caps, parameters, 0, &sums);
#endif
    const Finish done = finish(sums.term, parameters);
#if WANT_GRADIENT && !ONE_SWEEP
    const real upstream = (real)(weight * a->scale * done.slope);
#if HAS_APART
    if (apart)
        apart_gradient(x, y, input_gradient, target_gradient, n, row, caps, parameters, upstream, &sums);
    else
#endif
        gradient(x, y, input_gradient, target_gradient, n, row, caps, parameters, upstream, &sums);
#endif
    if (a->loss)
        a->loss[r] = STORE_LOSS((real)(weight * done.loss));
    if (a->state) {
        const double mark = HAS_APART && !apart ? -1 : 1; /* of the input's total: whether the gradient is to be guarded */
        const double parts[] = { input.top, mark * input.total, target.top, target.total,
                                 sums.term, sums.d_log_p, sums.d_log_q };
        for (int k = 0; k < 7; k++)
            a->state[k * a->rows + r] = parts[k];
    }
    return weight * done.loss;
}

/* Rows of one element whose term is the loss (`reduction="none"` of kl_div): a row is a vector lane. */
#define ELEMENTWISE (FINISH_IS_IDENTITY && !NEEDS_NORMS)
#if ELEMENTWISE
NOINLINE static void elementwise(const Arguments *a, int64_t start, int64_t end, Parameters parameters)
{
    const Row row = { 0 };
    const real scale = (real)a->scale;
    LOSS *loss = a->loss;
    const WEIGHT *weights = a->weight;
#if WANT_INPUT
    X *input_gradient = a->input_gradient;
#endif
#if WANT_TARGET
    Y *target_gradient = a->target_gradient;
#endif
    (void)scale;
#pragma omp simd
    for (int64_t i = start; i < end; i++) {
        const Element e = k_element(LOAD_X(a->x[i]), LOAD_Y(a->y[i]), row, parameters);
        const real weight = weights ? (real)weights[i] : (real)1;
        if (loss)
            loss[i] = STORE_LOSS(weight == 0 ? (real)0 : weight * e.term);
#if WANT_INPUT
        input_gradient[i] = STORE_X(weight == 0 ? (real)0 : scale * weight * e.input);
#endif
#if WANT_TARGET
        target_gradient[i] = STORE_Y(weight == 0 ? (real)0 : scale * weight * e.target);
#endif
    }
}
#endif

int64_t kullback_units(int64_t rows, int64_t vocab)
{
    const int64_t rows_per_unit = vocab >= UNIT ? 1 : UNIT / (vocab ? vocab : 1);
    return (rows + rows_per_unit - 1) / rows_per_unit;
}

void kullback_rows(const Arguments *a)
{
    const int64_t rows_per_unit = a->vocab >= UNIT ? 1 : UNIT / (a->vocab ? a->vocab : 1);
    const int64_t units = kullback_units(a->rows, a->vocab);
    Parameters parameters;
    memset(&parameters, 0, sizeof parameters);
    *(real *)&parameters = (real)a->parameters[0];
#pragma omp parallel for schedule(static) num_threads(a->threads) if (units > 1)
    for (int64_t unit = 0; unit < units; unit++) {
        const int64_t first = unit * rows_per_unit;
        const int64_t last = first + rows_per_unit < a->rows ? first + rows_per_unit : a->rows;
#if ELEMENTWISE
        if (a->vocab == 1 && a->input_gradient_stride <= 1 && a->target_gradient_stride <= 1 && !a->partial && !a->state) {
            elementwise(a, first, last, parameters);
            continue;
        }
#endif
        double part = 0;
        for (int64_t r = first; r < last; r++) {
            const int64_t left = a->elements - r * a->vocab;
            part += one_row(a, r, left < a->vocab ? left : a->vocab, parameters);
        }
        if (a->partial)
            a->partial[unit] = part;
    }
}
