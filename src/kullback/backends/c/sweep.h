/* One pass over a row of a divergence, or over a part of it: its sums, its gradients, or both. Pasted above rows.c. */

/* While a span is computed the next one is fetched; short spans keep the fetches from coming all at once. */
enum { CACHE_LINE = 64 };

typedef struct { double term, d_log_p, d_log_q, q_minus_p; } Sums;
/* What is upstream of a row's divergence, and what all its logits have less of a smoothed label, before they are scaled and capped */
typedef struct { real loss, everywhere; } GradOut;
#define NO_GRADIENT (GradOut) { 0, 0 }

/* SPAN elements of one sweep; `element` is the formula in one of its modes. */
#define SWEEP_SPAN(element)                                                                                          \
    _Pragma("omp simd reduction(+: term, d_log_p, d_log_q, q_minus_p) reduction(max: highest_x, highest_y)")         \
    for (int64_t i = start; i < end; i++) {                                                                          \
        const real xi = COUNTED_X(LOAD_X(x[i])), yi = COUNTED_Y(LOAD_Y(y[i]));                                       \
        const Element e = element(xi, yi, row, parameter);                                                          \
        const ubits high_x = RANGE_OFFSET(xi, X_LOW), high_y = RANGE_OFFSET(yi, Y_LOW);                              \
        highest_x = high_x > highest_x ? high_x : highest_x;                                                         \
        highest_y = high_y > highest_y ? high_y : highest_y;                                                         \
        if (want_sum) {                                                                                              \
            term += e.term;                                                                                          \
            if (HAS_LOGITS) {                                                                                        \
                d_log_p += e.d_log_p;                                                                                \
                d_log_q += e.d_log_q;                                                                                \
            }                                                                                                        \
            if (INPUT_IS_LOGITS && TARGET_IS_LOGITS && !fast)                                                        \
                q_minus_p += e.q_minus_p;                                                                            \
        }                                                                                                            \
        if (WANT_INPUT && want_slopes)                                                                               \
            d_input[i] = STORE_DX(e.d_log_q);                                                                        \
        if (WANT_INPUT && want_gradient)                                                                             \
            d_input[i] = STORE_DX((e.input * of_input - everywhere) * (INPUT_IS_CAPPED ? softcap_grad(xi, softcaps.input) : 1)); \
        if (WANT_TARGET && want_gradient)                                                                            \
            d_target[i] = STORE_DY((e.target * of_target) * (TARGET_IS_CAPPED ? softcap_grad(yi, softcaps.target) : 1)); \
    }

/* One pass over a row: its sums, its gradients, or both. A span is tried with the formula in range and done again with
   the safe one if something was out of it. Logits say nothing of their masses, which may be 0: of them a whole row is
   fast, or safe. */
INLINE void sweep(const X *x, const Y *y, DX *d_input, DY *d_target, int64_t n, Row row, Softcaps softcaps,
                  real parameter, GradOut grad_out, Sums *sums, int fast, int want_sum, int want_gradient, int want_slopes)
{
    const real of_input = INPUT_IS_LOGITS ? grad_out.loss * row.input_inv_temperature : grad_out.loss;
    const real of_target = TARGET_IS_LOGITS ? grad_out.loss * row.target_inv_temperature : grad_out.loss;
    const real everywhere = INPUT_IS_LOGITS ? grad_out.everywhere * row.input_inv_temperature : 0;
    (void)of_input, (void)of_target, (void)everywhere, (void)softcaps;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real term = 0, d_log_p = 0, d_log_q = 0, q_minus_p = 0;
        ubits highest_x = 0, highest_y = 0;
        const int64_t next_end = end + SPAN < n ? end + SPAN : n;
        for (int64_t i = end; i < next_end; i += CACHE_LINE / sizeof(X))
            __builtin_prefetch(x + i);
        for (int64_t i = end; i < next_end; i += CACHE_LINE / sizeof(Y))
            __builtin_prefetch(y + i);
#if HAS_FAST
        if (fast) {
            SWEEP_SPAN(fast_element)
        } else
#elif !HAS_LOGITS
        SWEEP_SPAN(in_range_element)
        if (highest_x >= RANGE_OFFSET(X_HIGH, X_LOW) || highest_y >= RANGE_OFFSET(Y_HIGH, Y_LOW))
#endif
        {
            term = d_log_p = d_log_q = q_minus_p = 0;
            SWEEP_SPAN(safe_element)
        }
        if (want_sum) {
            sums->term += term;
            sums->d_log_p += d_log_p;
            sums->d_log_q += d_log_q;
            sums->q_minus_p += q_minus_p;
        }
    }
    (void)fast;
}

#define SWEEP(name, fast, want_sum, want_gradient, want_slopes) \
    NOINLINE static void name(const X *x, const Y *y, DX *d_input, DY *d_target, int64_t n, Row row, Softcaps softcaps, \
                              real parameter, GradOut grad_out, Sums *sums) \
    { sweep(x, y, d_input, d_target, n, row, softcaps, parameter, grad_out, sums, fast, want_sum, want_gradient, \
            want_slopes); }

/* A gradient that needs no sum of its row is written while the row is summed. */
#define ONE_SWEEP (FINISH_IS_LINEAR && !HAS_LOGITS)
#if ONE_SWEEP
SWEEP(sum_and_gradient, 0, 1, 1, 0)
#endif
SWEEP(sum, 0, 1, 0, 0)
SWEEP(gradient, 0, 0, 1, 0)
#if HAS_FAST
SWEEP(fast_sum, 1, 1, 0, 0)
SWEEP(fast_gradient, 1, 0, 1, 0)
#if KEEPS_SLOPES
SWEEP(fast_sum_and_slopes, 1, 1, 0, 1)

/* From the slopes that are in its place */
NOINLINE static void gradient_of_slopes(const X *x, DX *d_input, int64_t n, Row row, Softcaps softcaps, GradOut grad_out)
{
    const real of_input = grad_out.loss * row.input_inv_temperature;
    const real everywhere = grad_out.everywhere * row.input_inv_temperature;
    (void)softcaps;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const real xi = COUNTED_X(LOAD_X(x[i]));
        const real q = fast_logit_mass(xi, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
        const real d_x = (real)d_input[i] - q * row.input_grad_sum;
        d_input[i] = STORE_DX((d_x * of_input - everywhere) * (INPUT_IS_CAPPED ? softcap_grad(xi, softcaps.input) : 1));
    }
}
#endif
#endif
