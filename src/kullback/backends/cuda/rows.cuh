/* Rows of a divergence whose elements stand alone (probabilities, log-probabilities): each tensor is read
   once; gradients are written in the same pass where both are wanted. The formula is pasted above as
   `k_element` and `finish`; so are the macros

   X, Y, WEIGHT, LOSS               element types of input, target, row weights, losses
   WANT_SUM, WANT_INPUT, WANT_TARGET  what to compute
   FLAT                             one row, shared by the whole grid
   LANES                            threads that share a row: 1, 8, 32 or THREADS (always THREADS if FLAT)
   THREADS, WIDTH, UNROLL           of a block; elements of a 16-byte access; accesses in flight a thread

   X_LOW, X_HIGH, Y_LOW, Y_HIGH     the tame ranges

   Results depend on the launch shape, which depends on the device and the tensors' layout alone. */

struct Lane {
    long long first, step; /* tiles of a row that the group takes: first, first + step, ... */
    int index;             /* of the thread in its group */
};

/* A row, or what the group's threads see of it */
struct View {
    const X *x;
    const Y *y;
    X *input_gradient;
    Y *target_gradient;
    long long vocab;
};

template <bool SUM, bool GRADIENT> INLINE real one(const View &view, long long i, Parameters parameters, real upstream)
{
    const Row row = {};
    const Element e = k_element(to_real(view.x[i]), to_real(view.y[i]), row, parameters);
    if (GRADIENT && WANT_INPUT)
        view.input_gradient[i] = rounded<X>(e.input * upstream);
    if (GRADIENT && WANT_TARGET)
        view.target_gradient[i] = rounded<Y>(e.target * upstream);
    return SUM ? e.term : 0;
}

template <bool SUM, bool GRADIENT>
INLINE real many(const View &view, long long i, const Packed<X> &x, const Packed<Y> &y, Parameters parameters,
                 real upstream)
{
    const Row row = {};
    Packed<X> input;
    Packed<Y> target;
    real sum = 0;
    ubits wildest_x = 0, wildest_y = 0;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        const real xk = to_real(x.element[k]), yk = to_real(y.element[k]);
        const Element e = tame_element(xk, yk, row, parameters);
        wildest_x = max(wildest_x, WILDNESS(xk, X_LOW));
        wildest_y = max(wildest_y, WILDNESS(yk, Y_LOW));
        if (GRADIENT && WANT_INPUT)
            input.element[k] = rounded<X>(e.input * upstream);
        if (GRADIENT && WANT_TARGET)
            target.element[k] = rounded<Y>(e.target * upstream);
        if (SUM)
            sum += e.term;
    }
    if (wildest_x >= WILDNESS(X_HIGH, X_LOW) || wildest_y >= WILDNESS(Y_HIGH, Y_LOW)) {
        sum = 0; /* once more, guarded; read again, so that the usual path keeps its registers */
#pragma unroll 1
        for (int k = 0; k < WIDTH; k++)
            sum += one<SUM, GRADIENT>(view, i + k, parameters, upstream);
        return sum;
    }
    if (GRADIENT && WANT_INPUT)
        store(view.input_gradient + i, input);
    if (GRADIENT && WANT_TARGET)
        store(view.target_gradient + i, target);
    return sum;
}

/* This thread's share of a row. A tile's terms are added in `real`, tiles in double. */
template <bool SUM, bool GRADIENT>
INLINE double sweep(const View &view, const Lane &lane, Parameters parameters, real upstream)
{
    double sum = 0;
    long long head = 0, body = 0; /* vectors cover [head, head + body) */
#if LANES > 1
    const long long misaligned = ((unsigned long long)view.x % VECTOR_BYTES) / sizeof(X);
    head = misaligned ? (long long)(VECTOR_BYTES / sizeof(X)) - misaligned : 0;
    const bool together = head <= view.vocab && is_aligned(view.y + head)
        && (!GRADIENT || !WANT_INPUT || is_aligned(view.input_gradient + head))
        && (!GRADIENT || !WANT_TARGET || is_aligned(view.target_gradient + head));
    const long long vectors = together ? (view.vocab - head) / WIDTH : 0;
    body = vectors * WIDTH;
    for (long long t = lane.first; t * LANES * UNROLL < vectors; t += lane.step) {
        const long long start = t * LANES * UNROLL + lane.index;
        real part = 0;
        if ((t + 1) * LANES * UNROLL <= vectors) {
            Packed<X> x[UNROLL];
            Packed<Y> y[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                x[u] = load(view.x + head + (start + u * LANES) * WIDTH);
                y[u] = load(view.y + head + (start + u * LANES) * WIDTH);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                part += many<SUM, GRADIENT>(view, head + (start + u * LANES) * WIDTH, x[u], y[u], parameters, upstream);
        } else {
            for (long long v = start; v < vectors; v += LANES) {
                const long long i = head + v * WIDTH;
                part += many<SUM, GRADIENT>(view, i, load(view.x + i), load(view.y + i), parameters, upstream);
            }
        }
        sum += (double)part;
    }
#endif
    /* what no vector covers: either end, or the whole of a row whose tensors are not aligned together */
    for (long long j = lane.first * LANES + lane.index; j < view.vocab - body; j += lane.step * LANES)
        sum += (double)one<SUM, GRADIENT>(view, j < head ? j : j + body, parameters, upstream);
    return sum;
}

INLINE void clear(const View &view, const Lane &lane)
{
    for (long long i = lane.first * LANES + lane.index; i < view.vocab; i += lane.step * LANES) {
        if (WANT_INPUT)
            view.input_gradient[i] = rounded<X>(0);
        if (WANT_TARGET)
            view.target_gradient[i] = rounded<Y>(0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kullback_rows(const X *x, const Y *y, X *input_gradient, Y *target_gradient, const WEIGHT *weights, LOSS *losses,
              LOSS *total, double *partial, unsigned *ticket, long long rows, long long vocab, long long x_stride,
              long long y_stride, long long input_gradient_stride, long long target_gradient_stride, double scale,
              double parameter)
{
    Parameters parameters;
    *(real *)&parameters = (real)parameter;
    const int groups = FLAT ? 1 : THREADS / LANES;
    const Lane lane = { FLAT ? blockIdx.x : 0, FLAT ? gridDim.x : 1, (int)threadIdx.x % LANES };
    const long long first = FLAT ? 0 : (long long)blockIdx.x * groups + threadIdx.x / LANES;
    const long long step = FLAT ? 1 : (long long)gridDim.x * groups;
    double result = 0;
    /* groups that share a warp leave the loop together: their sums are shuffles of the whole warp */
    for (long long base = first; base - threadIdx.x / LANES * !FLAT < rows; base += step) {
        const bool exists = base < rows;
        const long long r = exists ? base : 0;
        const double weight = !exists ? 0 : weights ? (double)weights[r] : 1;
        const View view = { x + r * x_stride, y + r * y_stride, input_gradient + r * input_gradient_stride,
                            target_gradient + r * target_gradient_stride,
                            exists ? vocab : 0 };
        const bool skipped = weight == 0; /* not read: garbage in it cannot leak */
        double sum = 0;
        if (skipped)
            clear(view, lane);
        else if (WANT_SUM || !FINISH_IS_LINEAR)
            sum = sweep<true, FINISH_IS_LINEAR && (WANT_INPUT || WANT_TARGET)>(view, lane, parameters, (real)(weight * scale));
        else
            sweep<false, true>(view, lane, parameters, (real)(weight * scale));
        if (FINISH_IS_IDENTITY && total) { /* the grid's sum is all that is asked for */
            result += weight * sum;
            continue;
        }
        if (!WANT_SUM && FINISH_IS_LINEAR)
            continue;
        const Finish done = finish(sum_group(sum), parameters);
        if (!FINISH_IS_LINEAR && (WANT_INPUT || WANT_TARGET) && !skipped)
            sweep<false, true>(view, lane, parameters, (real)(weight * scale * done.slope));
        if (lane.index == 0 && exists) {
            const double loss = skipped ? 0 : weight * done.loss;
            result += loss;
            if (losses)
                losses[r] = rounded<LOSS>((real)loss);
        }
    }
    if (WANT_SUM && total) {
        double sum;
        if (sum_grid(result, partial, ticket, &sum) && threadIdx.x == 0)
            *total = rounded<LOSS>((real)(sum * scale));
    }
}
