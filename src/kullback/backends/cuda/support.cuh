/* A row on a few of its elements, its ids, and on all others in one; and the gradient back from there. A block takes
   a row; which elements are among the ids is told by a bit each, in shared memory. Ids are distinct, or -1.
   Macros: X (element type), IS_LOGITS, IS_PROBS, IS_CAPPED, THREADS, WIDTH, UNROLL. */

/* Of logits Σ exp((x - top) · scale), the top as it was before the temperature; of probabilities the sum. */
typedef struct { real top, total; } LogSumExp;

enum { WARP = 32, WARPS = THREADS / WARP };
#define NOTHING (IS_PROBS ? (real)0 : -K_INFINITY)
#define MOST (real)1e15 /* of a vector's total against an earlier top */

extern __shared__ unsigned marks[];

/* An element as it counts, but for the temperature */
INLINE real counted(real x, real cap) { return IS_CAPPED ? k_capped(x, cap) : x; }

/* d (counted · scale) / dx, from what it counts as */
INLINE real slope_of(real value, real scale, real cap)
{
    return IS_LOGITS ? (IS_CAPPED ? cap_slope(value / scale, cap) : (real)1) * scale : (real)1;
}

/* e^(d · scale) = power(d · unit(scale)) */
INLINE real unit(real scale) { return REAL_IS_DOUBLE ? scale : scale * (real)1.44269504; }

INLINE real power(real d)
{
#if REAL_IS_DOUBLE
    return exp(d);
#else
    real result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(d));
    return result;
#endif
}

/* What exponents are taken against: -inf - -inf would be NaN where nothing is. */
INLINE real against(real top) { return top == -K_INFINITY ? (real)0 : top; }

INLINE LogSumExp merged(LogSumExp a, LogSumExp b, real factor)
{
    if (IS_PROBS)
        return { 0, a.total + b.total };
    const real top = a.top > b.top ? a.top : b.top, base = against(top);
    return { top, a.total * power((a.top - base) * factor) + b.total * power((b.top - base) * factor) };
}

/* Measured against the top of what came before, until it would grow too large for that. */
template <int COUNT> INLINE void add(LogSumExp &sum, const real *values, real factor)
{
    real part = 0;
    if (IS_PROBS) {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            part += values[j];
        sum.total += part;
        return;
    }
    const auto measure = [&](real base) {
        part = 0;
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            part += power((values[j] - base) * factor);
    };
    measure(sum.top);
    if (__builtin_expect(!(part < MOST), 0)) {
        real top = sum.top;
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            top = values[j] > top ? values[j] : top;
        const real base = against(top);
        sum = { top, sum.total * power((sum.top - base) * factor) };
        measure(base);
    }
    sum.total += part;
}

/* Bits lie so that those of a vector are side by side in one word. */
INLINE long long place(long long i, long long head) { return i + (WIDTH - head) % WIDTH; }
INLINE unsigned marks_at(long long at) { return marks[at >> 5] >> (at & 31); }

INLINE void mark(const long long *ids, long long k, long long head, bool set)
{
    for (long long j = threadIdx.x; j < k; j += THREADS)
        if (ids[j] >= 0) {
            const long long at = place(ids[j], head);
            if (set)
                atomicOr(&marks[at >> 5], 1u << (at & 31));
            else
                marks[at >> 5] = 0;
        }
}

INLINE void clear_marks(long long vocab)
{
    for (long long i = threadIdx.x; i <= (vocab + 31) / 32; i += THREADS)
        marks[i] = 0;
    __syncthreads();
}

/* Elements of a row before its first vector */
INLINE long long head_of(const X *x, long long vocab)
{
    const long long head = (VECTOR_BYTES - ((unsigned long long)x & (VECTOR_BYTES - 1))) / sizeof(X) & (WIDTH - 1);
    return head < vocab ? head : vocab;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4 - 2 * REAL_IS_DOUBLE)
kullback_gather(const X *x, const long long *ids, real *held, real *target, long long rows, long long vocab, long long k,
                long long width, long long x_stride, double by, double softcap, double negligible)
{
    const real scale = IS_LOGITS ? (real)by : (real)1, cap = (real)softcap, factor = unit(scale);
    __shared__ LogSumExp parts[WARPS];
    const bool has_rest = width > k;
    if (has_rest)
        clear_marks(vocab);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *from = x + row * x_stride;
        const long long *own = ids + row * k;
        for (long long j = threadIdx.x; j < k; j += THREADS)
            held[row * width + j] = own[j] < 0 ? NOTHING : counted(to_real(from[own[j]]), cap) * scale;
        if (!has_rest)
            continue;
        const long long head = head_of(from, vocab), vectors = (vocab - head) / WIDTH;
        mark(own, k, head, true);
        __syncthreads();
        LogSumExp sum = { -K_INFINITY, 0 };
        const X *aligned = from + head;
        for (long long v = threadIdx.x; v < vectors; v += THREADS * UNROLL) {
            Packed<X> loaded[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (v + u * THREADS < vectors)
                    loaded[u] = load(aligned + (v + u * THREADS) * WIDTH);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (v + u * THREADS < vectors) {
                    const unsigned among = marks_at(place(head + (v + u * THREADS) * WIDTH, head));
                    real values[WIDTH];
#pragma unroll
                    for (int j = 0; j < WIDTH; j++)
                        values[j] = counted(at(loaded[u], j), cap);
                    if (__builtin_expect(among & ((1u << WIDTH) - 1), 0))
#pragma unroll
                        for (int j = 0; j < WIDTH; j++)
                            values[j] = among >> j & 1 ? NOTHING : values[j];
                    add<WIDTH>(sum, values, factor);
                }
        }
        const long long tail = vocab - head - vectors * WIDTH;
        for (long long i = threadIdx.x; i < head + tail; i += THREADS) {
            const long long end = i < head ? i : i + vectors * WIDTH;
            const real value = marks_at(place(end, head)) & 1 ? NOTHING : counted(to_real(from[end]), cap);
            add<1>(sum, &value, factor);
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            const LogSumExp other = { __shfl_xor_sync(~0u, sum.top, step), __shfl_xor_sync(~0u, sum.total, step) };
            sum = merged(sum, other, factor);
        }
        if (threadIdx.x % WARP == 0)
            parts[threadIdx.x / WARP] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < WARPS; w++)
                sum = merged(sum, parts[w], factor);
            /* +inf among them made a NaN of inf - inf */
            const bool infinite = !IS_PROBS && sum.top == K_INFINITY;
            const real rest = IS_PROBS ? sum.total : infinite ? sum.top : against(sum.top) * scale + k_log(sum.total);
            held[row * width + k] = rest;
            if (target && rest == NOTHING && target[row * width + k] <= (real)negligible)
                target[row * width + k] = -K_INFINITY;
        }
        mark(own, k, head, false);
        __syncthreads();
    }
}

/* The gradient of an element outside the ids */
INLINE real share(real x, real scale, real cap, real rest, real d_rest)
{
    if (IS_PROBS)
        return d_rest;
    const real value = counted(x, cap), part = d_rest * power(unit(k_fma(value, scale, -rest)));
    return IS_LOGITS ? part * slope_of(value * scale, scale, cap) : part;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4 - 2 * REAL_IS_DOUBLE)
kullback_scatter(const X *x, const long long *ids, const real *held, const real *d_held, X *out, long long rows,
                 long long vocab, long long k, long long width, long long x_stride, long long out_stride, double by,
                 double softcap)
{
    const real scale = IS_LOGITS ? (real)by : (real)1, cap = (real)softcap;
    const bool has_rest = width > k;
    if (has_rest)
        clear_marks(vocab);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *from = x + row * x_stride;
        X *to = out + row * out_stride;
        const long long *own = ids + row * k;
        const real rest = has_rest ? against(held[row * width + k]) : (real)0;
        const real d_rest = has_rest ? d_held[row * width + k] : (real)0;
        const long long head = head_of(to, vocab);
        if (d_rest != 0)
            mark(own, k, head, true);
        __syncthreads();
        const bool in_phase = head_of(from, vocab) == head;
        const long long vectors = in_phase ? (vocab - head) / WIDTH : 0;
        for (long long v = threadIdx.x; v < vectors; v += THREADS * UNROLL) {
            Packed<X> values[UNROLL] = {};
            if (d_rest != 0)
#pragma unroll
                for (int u = 0; u < UNROLL; u++)
                    if (v + u * THREADS < vectors)
                        values[u] = load(from + head + (v + u * THREADS) * WIDTH);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (v + u * THREADS < vectors) {
                    const long long first = head + (v + u * THREADS) * WIDTH;
                    if (d_rest != 0) {
                        const unsigned among = marks_at(place(first, head));
                        real parts[WIDTH];
#pragma unroll
                        for (int j = 0; j < WIDTH; j++)
                            parts[j] = share(at(values[u], j), scale, cap, rest, d_rest);
                        if (__builtin_expect(among & ((1u << WIDTH) - 1), 0))
#pragma unroll
                            for (int j = 0; j < WIDTH; j++)
                                parts[j] = among >> j & 1 ? (real)0 : parts[j];
#pragma unroll
                        for (int j = 0; j < WIDTH; j++)
                            values[u].element[j] = rounded<X>(parts[j]);
                    }
                    store(to + first, values[u]);
                }
        }
        const long long scalars = vocab - vectors * WIDTH;
        for (long long i = threadIdx.x; i < scalars; i += THREADS) {
            const long long end = i < head ? i : i + vectors * WIDTH;
            const bool none = d_rest == 0 || marks_at(place(end, head)) & 1;
            to[end] = rounded<X>(none ? (real)0 : share(to_real(from[end]), scale, cap, rest, d_rest));
        }
        __syncthreads();
        for (long long j = threadIdx.x; j < k; j += THREADS)
            if (own[j] >= 0) {
                const real d = d_held[row * width + j];
                to[own[j]] = rounded<X>(d == 0 ? (real)0 : d * slope_of(held[row * width + j], scale, cap));
            }
        if (d_rest != 0)
            mark(own, k, head, false);
        __syncthreads();
    }
}
