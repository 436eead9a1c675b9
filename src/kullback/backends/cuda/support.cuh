/* A row on a few of its elements, its ids, and on all others in one; and the gradient back from there. A block takes
   a row; which elements are among the ids is told by a bit each, in shared memory. Ids are distinct, or -1.
   Macros: X (element type), IS_LOGITS, IS_PROBS, IS_CAPPED, THREADS, WIDTH, UNROLL. */

typedef struct { real top, total; } LogSumExp; /* of probabilities: total alone */

enum { WARP = 32, WARPS = THREADS / WARP };
#define NOTHING (IS_PROBS ? (real)0 : -K_INFINITY)

extern __shared__ unsigned marks[];

/* An element as it counts */
INLINE real counted(X x, real scale, real cap)
{
    const real value = to_real(x);
    return IS_LOGITS ? (IS_CAPPED ? k_capped(value, cap) : value) * scale : value;
}

/* d counted / dx */
INLINE real slope_of(real value, real scale, real cap)
{
    return IS_LOGITS ? (IS_CAPPED ? cap_slope(value / scale, cap) : (real)1) * scale : (real)1;
}

INLINE real power(real d)
{
#if REAL_IS_DOUBLE
    return exp(d);
#else
    real result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(d * 1.44269504f));
    return result;
#endif
}

/* What exponents are taken against: -inf - -inf would be NaN where nothing is. */
INLINE real against(real top) { return top == -K_INFINITY ? (real)0 : top; }

/* The bits of WIDTH elements from the i-th on */
INLINE unsigned marks_at(long long i)
{
    return __funnelshift_r(marks[i >> 5], marks[(i >> 5) + 1], (unsigned)i & 31);
}

INLINE LogSumExp merged(LogSumExp a, LogSumExp b)
{
    if (IS_PROBS)
        return { 0, a.total + b.total };
    const real top = a.top > b.top ? a.top : b.top, base = against(top);
    return { top, a.total * power(a.top - base) + b.total * power(b.top - base) };
}

INLINE void add(LogSumExp &sum, const real *values, int count)
{
    if (IS_PROBS) {
#pragma unroll
        for (int j = 0; j < count; j++)
            sum.total += values[j];
        return;
    }
    real top = sum.top;
#pragma unroll
    for (int j = 0; j < count; j++)
        top = values[j] > top ? values[j] : top;
    const real base = against(top);
    if (top > sum.top)
        sum = { top, sum.total * power(sum.top - base) };
    real part = 0;
#pragma unroll
    for (int j = 0; j < count; j++)
        part += power(values[j] - base);
    sum.total += part;
}

INLINE void mark(const long long *ids, long long k, bool set)
{
    for (long long j = threadIdx.x; j < k; j += THREADS)
        if (ids[j] >= 0) {
            if (set)
                atomicOr(&marks[ids[j] >> 5], 1u << (ids[j] & 31));
            else
                marks[ids[j] >> 5] = 0;
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

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kullback_gather(const X *x, const long long *ids, real *held, long long rows, long long vocab, long long k,
                long long width, long long x_stride, double by, double softcap)
{
    const real scale = (real)by, cap = (real)softcap;
    __shared__ LogSumExp parts[WARPS];
    const bool has_rest = width > k;
    if (has_rest)
        clear_marks(vocab);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *from = x + row * x_stride;
        const long long *own = ids + row * k;
        for (long long j = threadIdx.x; j < k; j += THREADS)
            held[row * width + j] = own[j] < 0 ? NOTHING : counted(from[own[j]], scale, cap);
        if (!has_rest)
            continue;
        mark(own, k, true);
        __syncthreads();
        LogSumExp sum = { -K_INFINITY, 0 };
        const long long head = head_of(from, vocab), vectors = (vocab - head) / WIDTH;
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
                    const unsigned among = marks_at(head + (v + u * THREADS) * WIDTH);
                    real values[WIDTH];
#pragma unroll
                    for (int j = 0; j < WIDTH; j++)
                        values[j] = among >> j & 1 ? NOTHING : counted(loaded[u].element[j], scale, cap);
                    add(sum, values, WIDTH);
                }
        }
        const long long tail = vocab - head - vectors * WIDTH;
        for (long long i = threadIdx.x; i < head + tail; i += THREADS) {
            const long long at = i < head ? i : i + vectors * WIDTH;
            const real value = marks_at(at) & 1 ? NOTHING : counted(from[at], scale, cap);
            add(sum, &value, 1);
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            const LogSumExp other = { __shfl_xor_sync(~0u, sum.top, step), __shfl_xor_sync(~0u, sum.total, step) };
            sum = merged(sum, other);
        }
        if (threadIdx.x % WARP == 0)
            parts[threadIdx.x / WARP] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < WARPS; w++)
                sum = merged(sum, parts[w]);
            /* +inf among them made a NaN of inf - inf */
            const bool infinite = !IS_PROBS && sum.top == K_INFINITY;
            held[row * width + k] = IS_PROBS ? sum.total : infinite ? sum.top : against(sum.top) + k_log(sum.total);
        }
        mark(own, k, false);
        __syncthreads();
    }
}

INLINE real share(X x, real scale, real cap, real rest, real d_rest)
{
    if (IS_PROBS)
        return d_rest;
    const real value = counted(x, scale, cap);
    return d_rest * (power(value - rest) * slope_of(value, scale, cap));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kullback_scatter(const X *x, const long long *ids, const real *held, const real *d_held, X *out, long long rows,
                 long long vocab, long long k, long long width, long long x_stride, long long out_stride, double by,
                 double softcap)
{
    const real scale = (real)by, cap = (real)softcap;
    const bool has_rest = width > k;
    if (has_rest)
        clear_marks(vocab);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *from = x + row * x_stride;
        X *to = out + row * out_stride;
        const long long *own = ids + row * k;
        const real rest = has_rest ? against(held[row * width + k]) : (real)0;
        const real d_rest = has_rest ? d_held[row * width + k] : (real)0;
        if (d_rest != 0)
            mark(own, k, true);
        __syncthreads();
        const long long head = head_of(to, vocab);
        const bool in_phase = head_of(from, vocab) == head;
        const long long vectors = in_phase ? (vocab - head) / WIDTH : 0;
        for (long long v = threadIdx.x; v < vectors; v += THREADS) {
            const long long at = head + v * WIDTH;
            Packed<X> values = {};
            if (d_rest != 0) {
                values = load(from + at);
                const unsigned among = marks_at(at);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) {
                    const real part = share(values.element[j], scale, cap, rest, d_rest);
                    values.element[j] = rounded<X>(among >> j & 1 ? (real)0 : part);
                }
            }
            store(to + at, values);
        }
        const long long scalars = vocab - vectors * WIDTH;
        for (long long i = threadIdx.x; i < scalars; i += THREADS) {
            const long long at = i < head ? i : i + vectors * WIDTH;
            const bool none = d_rest == 0 || marks_at(at) & 1;
            to[at] = rounded<X>(none ? (real)0 : share(from[at], scale, cap, rest, d_rest));
        }
        __syncthreads();
        for (long long j = threadIdx.x; j < k; j += THREADS)
            if (own[j] >= 0) {
                const real d = d_held[row * width + j];
                to[own[j]] = rounded<X>(d == 0 ? (real)0 : d * slope_of(held[row * width + j], scale, cap));
            }
        if (d_rest != 0)
            mark(own, k, false);
        __syncthreads();
    }
}
