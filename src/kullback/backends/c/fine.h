/* Rows that are near: over √(p·q) an element's term and d_log_q - d_log_p are polynomials of its log-ratio r (near.py), which lose
   nothing however small they are. Spans that have a longer log-ratio take the safe formula. Pasted above the sweeps' callers, with the macros

   FINE_TERMS, FINE_TERM_STEP               how many powers of a term, from r² on, and from one that is wanted to the next
   FINE_DIFFERENCES, FINE_DIFFERENCE_STEP   of d_log_q - d_log_p, from r on
   FINE_RADIUS                              how far they reach */

typedef struct { real term[FINE_TERMS], difference[FINE_DIFFERENCES]; } Fine;

INLINE real polynomial(const real *factors, int count, int step, real r)
{
    const real by = step == 2 ? r * r : r;
    real sum = factors[(count - 1) / step * step];
    UNROLL_LOOP
    for (int k = (count - 1) / step * step - step; k >= 0; k -= step)
        sum = sum * by + factors[k];
    return sum;
}

/* The longest log-ratio of some elements, or NaN */
INLINE real longest_ratio(const X *x, const Y *y, int64_t n, const Row *row, Softcaps softcaps)
{
    ubits longest = 0; /* as bits, of which those of NaN are more than any number's */
    (void)softcaps;
#pragma omp simd reduction(max: longest)
    for (int64_t i = 0; i < n; i++) {
        const ubits size = to_bits(safe_abs(near_ratio_of(COUNTED_X(LOAD_X(x[i])), COUNTED_Y(LOAD_Y(y[i])), row)));
        longest = size > longest ? size : longest;
    }
    return from_bits((bits)longest);
}

NOINLINE static void near_sum(const X *x, const Y *y, int64_t n, Row row, Softcaps softcaps, real parameter, Fine fine,
                              Sums *sums)
{
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        real term = 0, difference = 0, excess = 0; /* of p over q, to the first order: where it counts r is small */
        ubits longest = 0;
#pragma omp simd reduction(+: term, difference, excess) reduction(max: longest)
        for (int64_t i = start; i < end; i++) {
            const real xi = COUNTED_X(LOAD_X(x[i])), yi = COUNTED_Y(LOAD_Y(y[i]));
            const real r = near_ratio_of(xi, yi, &row), product = near_root_of(xi, yi, &row) * r;
            const ubits size = to_bits(safe_abs(r));
            longest = size > longest ? size : longest;
            excess += product;
            term += product * r * polynomial(fine.term, FINE_TERMS, FINE_TERM_STEP, r);
            difference += product * polynomial(fine.difference, FINE_DIFFERENCES, FINE_DIFFERENCE_STEP, r);
        }
        if (from_bits((bits)longest) < FINE_RADIUS) {
            sums->term += term;
            sums->q_minus_p -= excess;
            sums->d_log_p += 0.5 * ((double)term - difference); /* their sum is term: Euler's */
            sums->d_log_q += 0.5 * ((double)term + difference);
        } else {
            sum(x + start, y + start, 0, 0, end - start, row, softcaps, parameter, NO_GRADIENT, sums);
        }
    }
}

/* Over √(p·q), as powers of r: d_log_q - q·Σ d_log_q, and the same of p */
enum { NEAR_GRADIENTS = FINE_DIFFERENCES + 1 > FINE_TERMS + 2 ? FINE_DIFFERENCES + 1 : FINE_TERMS + 2 };
typedef struct { real input[NEAR_GRADIENTS], target[NEAR_GRADIENTS]; } NearGradients;

static NearGradients near_gradients(Fine fine, Row row, real of_input, real of_target)
{
    NearGradients result;
    double exponential = 1; /* of e^(r/2) */
    for (int k = 0; k < NEAR_GRADIENTS; k++) {
        const double term = k >= 2 && k - 2 < FINE_TERMS ? fine.term[k - 2] : 0;
        const double difference = k >= 1 && k - 1 < FINE_DIFFERENCES ? fine.difference[k - 1] : 0;
        const double of_q = k % 2 ? -exponential : exponential;
        result.input[k] = (real)((double)of_input * (0.5 * (term + difference) - of_q * (double)row.input_grad_sum));
        result.target[k] = (real)((double)of_target * (0.5 * (term - difference) - exponential * (double)row.target_grad_sum));
        exponential /= 2 * (k + 1);
    }
    return result;
}

NOINLINE static void near_gradient(const X *x, const Y *y, DX *d_input, DY *d_target, int64_t n, Row row, Softcaps softcaps,
                                   real parameter, GradOut grad_out, Fine fine)
{
    const real everywhere = grad_out.everywhere * row.input_inv_temperature;
    const real of_input = grad_out.loss * row.input_inv_temperature, of_target = grad_out.loss * row.target_inv_temperature;
    const NearGradients factors = near_gradients(fine, row, of_input, of_target);
    Sums none = { 0 };
    (void)everywhere;
    for (int64_t start = 0; start < n; start += SPAN) {
        const int64_t end = start + SPAN < n ? start + SPAN : n;
        /* before gradients may take the logits' place */
        if (!(longest_ratio(x + start, y + start, end - start, &row, softcaps) < FINE_RADIUS)) {
            gradient(x + start, y + start, d_input + start, d_target + start, end - start, row, softcaps, parameter, grad_out, &none);
            continue;
        }
#pragma omp simd
        for (int64_t i = start; i < end; i++) {
            const real xi = COUNTED_X(LOAD_X(x[i])), yi = COUNTED_Y(LOAD_Y(y[i]));
            const real r = near_ratio_of(xi, yi, &row), root = near_root_of(xi, yi, &row);
#if WANT_INPUT
            const real d_x = root * polynomial(factors.input, NEAR_GRADIENTS, 1, r) - everywhere;
            d_input[i] = STORE_DX(INPUT_IS_CAPPED ? d_x * softcap_grad(xi, softcaps.input) : d_x);
#endif
#if WANT_TARGET
            const real d_y = root * polynomial(factors.target, NEAR_GRADIENTS, 1, r);
            d_target[i] = STORE_DY(TARGET_IS_CAPPED ? d_y * softcap_grad(yi, softcaps.target) : d_y);
#endif
        }
    }
}
