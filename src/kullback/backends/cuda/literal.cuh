/* Rows of a divergence whose elements stand alone (probabilities, log-probabilities): each tensor is read once; gradients
   are written in the same pass where both are wanted.

   Results depend on the launch shape, which depends on the device and the tensors' layout alone. */
#pragma once

#include "cuda/block.cuh"
#include "cuda/functor.cuh"
#include "cuda/vector.cuh"

#ifndef VERB
#define VERB VERB_LOSS
#define KNOWN 0 /* whether the rows' states are known: for a gradient whose finish is not linear */
#endif

namespace kullback {

/* Which elements of a row a thread takes */
struct Lane {
    long long first, step; /* tiles of a row that the threads of the row take: first, first + step, ... */
    int index;             /* of the thread among those */
};

/* A row, or what the threads that share it see of it */
struct View {
    const X *x;
    const Y *y;
    X *d_input;
    Y *d_target;
    long long vocab;
};

template <bool SUM, bool GRADIENT> INLINE real one(const View &view, long long i, real parameter, real grad_out)
{
    const Row row = {};
    const Element e = safe_element(to_real(view.x[i]), to_real(view.y[i]), row, parameter);
    if (GRADIENT && WANT_INPUT)
        view.d_input[i] = rounded<X>(e.input * grad_out);
    if (GRADIENT && WANT_TARGET)
        view.d_target[i] = rounded<Y>(e.target * grad_out);
    return SUM ? e.term : 0;
}

template <bool SUM, bool GRADIENT>
INLINE real many(const View &view, long long i, const Packed<X> &x, const Packed<Y> &y, real parameter,
                 real grad_out)
{
    const Row row = {};
    Packed<X> input;
    Packed<Y> target;
    real sum = 0;
    ubits highest_x = 0, highest_y = 0;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        const real xk = to_real(x.element[k]), yk = to_real(y.element[k]);
        const Element e = in_range_element(xk, yk, row, parameter);
        highest_x = max(highest_x, RANGE_OFFSET(xk, X_LOW));
        highest_y = max(highest_y, RANGE_OFFSET(yk, Y_LOW));
        if (GRADIENT && WANT_INPUT)
            input.element[k] = rounded<X>(e.input * grad_out);
        if (GRADIENT && WANT_TARGET)
            target.element[k] = rounded<Y>(e.target * grad_out);
        if (SUM)
            sum += e.term;
    }
    if (highest_x >= RANGE_OFFSET(X_HIGH, X_LOW) || highest_y >= RANGE_OFFSET(Y_HIGH, Y_LOW)) {
        sum = 0; /* once more, with guards; read again, so that the usual way keeps its registers */
#pragma unroll 1
        for (int k = 0; k < WIDTH; k++)
            sum += one<SUM, GRADIENT>(view, i + k, parameter, grad_out);
        return sum;
    }
    if (GRADIENT && WANT_INPUT)
        store(view.d_input + i, input);
    if (GRADIENT && WANT_TARGET)
        store(view.d_target + i, target);
    return sum;
}

/* This thread's part of a row. A tile's terms are added in `real`, tiles in double. */
template <bool SUM, bool GRADIENT>
INLINE double sweep(const View &view, const Lane &lane, real parameter, real grad_out)
{
    double sum = 0;
    long long head = 0, body = 0; /* vectors cover [head, head + body) */
#if LANES > 1
    const long long misaligned = ((unsigned long long)view.x % VECTOR_BYTES) / sizeof(X);
    head = misaligned ? (long long)(VECTOR_BYTES / sizeof(X)) - misaligned : 0;
    const bool together = head <= view.vocab && is_aligned(view.y + head)
        && (!GRADIENT || !WANT_INPUT || is_aligned(view.d_input + head))
        && (!GRADIENT || !WANT_TARGET || is_aligned(view.d_target + head));
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
                part += many<SUM, GRADIENT>(view, head + (start + u * LANES) * WIDTH, x[u], y[u], parameter, grad_out);
        } else {
            for (long long v = start; v < vectors; v += LANES) {
                const long long i = head + v * WIDTH;
                part += many<SUM, GRADIENT>(view, i, load(view.x + i), load(view.y + i), parameter, grad_out);
            }
        }
        sum += (double)part;
    }
#endif
    /* what no vector covers: either end, or the whole of a row whose tensors are not aligned together */
    for (long long j = lane.first * LANES + lane.index; j < view.vocab - body; j += lane.step * LANES)
        sum += (double)one<SUM, GRADIENT>(view, j < head ? j : j + body, parameter, grad_out);
    return sum;
}

INLINE void clear(const View &view, const Lane &lane)
{
    for (long long i = lane.first * LANES + lane.index; i < view.vocab; i += lane.step * LANES) {
        if (WANT_INPUT)
            view.d_input[i] = rounded<X>(0);
        if (WANT_TARGET)
            view.d_target[i] = rounded<Y>(0);
    }
}

/* Over the threads that share a row */
INLINE double row_sum(double value)
{
    return LANES > WARP ? block_sum(value) : warp_sum<LANES>(value);
}

/* Packed numbers of a row: found[field * rows + row] */
INLINE void keep_row(double *found, long long rows, long long r, double sum, double d_loss)
{
#pragma unroll 1 /* for fewer registers */
    for (int field = 0; field < (VERB == VERB_ACCUMULATE ? (int)SUMS_FIELDS : (int)STATE_FIELDS); field++)
        found[field * rows + r] = 0;
    if (VERB == VERB_ACCUMULATE)
        found[SUMS_TERM * rows + r] = sum;
    else
        found[STATE_D_LOSS * rows + r] = d_loss;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kullback_literal(const X *x, const Y *y, const WEIGHT *row_weight, const double *known, double *found, LOSS *loss,
                 LOSS *total, X *d_input, Y *d_target, double *partial, unsigned *ticket, long long rows,
                 long long vocab, long long x_stride, long long y_stride, long long d_input_stride,
                 long long d_target_stride, double scale, double parameter)
{
    const real of_kind = (real)parameter;
    const int groups = FLAT ? 1 : THREADS / LANES;
    const Lane lane = { FLAT ? blockIdx.x : 0, FLAT ? gridDim.x : 1, (int)threadIdx.x % LANES };
    const long long first = FLAT ? 0 : (long long)blockIdx.x * groups + threadIdx.x / LANES;
    const long long step = FLAT ? 1 : (long long)gridDim.x * groups;
    double result = 0;
    /* rows that share a warp leave the loop together: their sums are shuffles of the whole warp */
    for (long long base = first; base - threadIdx.x / LANES * !FLAT < rows; base += step) {
        const bool exists = base < rows;
        const long long r = exists ? base : 0;
        const double weight = !exists ? 0 : row_weight ? (double)row_weight[r] : 1;
        const View view = { x + r * x_stride, y + r * y_stride, d_input + r * d_input_stride,
                            d_target + r * d_target_stride, exists ? vocab : 0 };
        const bool skipped = weight == 0; /* not read: garbage in it cannot leak */
        double sum = 0;
        if (skipped)
            clear(view, lane);
        else if (KNOWN)
            sweep<false, true>(view, lane, of_kind, (real)(weight * scale * known[STATE_D_LOSS * rows + r]));
        else if (WANT_SUM || !FINISH_IS_LINEAR)
            sum = sweep<true, FINISH_IS_LINEAR && (WANT_INPUT || WANT_TARGET)>(view, lane, of_kind, (real)(weight * scale));
        else
            sweep<false, true>(view, lane, of_kind, (real)(weight * scale));
        if (FINISH_IS_IDENTITY && total) { /* the grid's sum is all that is asked for */
            result += weight * sum;
            continue;
        }
        if (KNOWN || (!WANT_SUM && FINISH_IS_LINEAR))
            continue;
        const double row_total = row_sum(sum);
        const Finish done = finish(row_total, 0, of_kind);
        if (!FINISH_IS_LINEAR && (WANT_INPUT || WANT_TARGET) && !skipped)
            sweep<false, true>(view, lane, of_kind, (real)(weight * scale * done.derivative));
        if (lane.index == 0 && exists) {
            if (VERB == VERB_ACCUMULATE || (!FINISH_IS_LINEAR && !WANT_INPUT && !WANT_TARGET && found))
                keep_row(found, rows, r, skipped ? 0 : row_total, skipped ? 0 : done.derivative);
            if (VERB == VERB_ACCUMULATE)
                continue;
            const double row_loss = skipped ? 0 : weight * done.loss;
            result += row_loss;
            if (loss)
                loss[r] = rounded<LOSS>((real)row_loss);
        }
    }
    if (WANT_SUM && total) {
        double sum;
        if (grid_sum(result, partial, ticket, &sum) && threadIdx.x == 0)
            *total = rounded<LOSS>((real)(sum * scale));
    }
}

}
