/* A sparse teacher's entries, of one id together, and what they leave: its target (sparse.py). A block takes a row; a
   bit of shared memory for each word tells whether an id has come before.
   Macros: X (type of the entries), FROM_LOGITS, FROM_PROBS (what they are), THREADS. */

enum { WARP = 32, WARPS = THREADS / WARP };

extern __shared__ unsigned marks[];

/* Of a row: entries of distinct ids, their mass, and Σ exp(tempered - top) of what the target is normalised by */
struct Row {
    int count;
    double mass;
    real top, total;

    INLINE void merge(Row other)
    {
        const real higher = top > other.top ? top : other.top, base = higher == -K_INFINITY ? (real)0 : higher;
        count += other.count;
        mass += other.mass;
        total = total * k_exp(top - base) + other.total * k_exp(other.top - base);
        top = higher;
    }
};

template <typename T> INLINE T shuffled(T x, int step) { return __shfl_xor_sync(~0u, x, step); }

INLINE real log_of(X value) { return FROM_PROBS ? k_log(to_real(value)) : to_real(value); }

/* log Σ exp over the row's entries of the j-th's id, which stands first there; else -inf, and `first` says so. In order,
   so that it is the same each time. */
INLINE real of_equal(const X *values, const long long *ids, long long k, long long j, bool &first)
{
    real top = -K_INFINITY, total = 0;
    for (long long i = 0; i < k; i++)
        if (ids[i] == ids[j]) {
            if (i < j) {
                first = false;
                return -K_INFINITY;
            }
            const real value = log_of(values[i]);
            top = value > top || value != value ? value : top;
        }
    if (!(k_abs(top) < K_INFINITY))
        return top;
    int count = 0;
    for (long long i = j; i < k; i++)
        if (ids[i] == ids[j]) {
            total += k_exp(log_of(values[i]) - top);
            count++;
        }
    return count == 1 ? top : top + k_log(total);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4 - 2 * REAL_IS_DOUBLE)
kullback_entries(const X *entries, const long long *indices, const unsigned char *skipped, long long *distinct,
                 real *target, long long rows, long long words, long long k, long long width, double temperature,
                 long long keeps_rest, long long normalises, double least)
{
    __shared__ Row parts[WARPS];
    __shared__ int repeats;
    const bool has_rest = width > k;
    for (long long i = threadIdx.x; i <= words / 32; i += THREADS)
        marks[i] = 0;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *values = entries + row * k;
        const long long *ids = indices + row * k;
        long long *own = distinct + row * k;
        real *out = target + row * width;
        const bool counts = !skipped || !skipped[row];
        if (threadIdx.x == 0)
            repeats = 0;
        __syncthreads();
        for (long long j = threadIdx.x; j < k && counts; j += THREADS) {
            if (ids[j] < -1 || ids[j] >= words)
                __assertfail("target_indices must lie from 0 to vocab - 1, or be -1", "kullback", 0, "entries", 1);
            else if (ids[j] >= 0 && atomicOr(&marks[ids[j] >> 5], 1u << (ids[j] & 31)) >> (ids[j] & 31) & 1)
                repeats = 1;
        }
        __syncthreads();
        const bool is_repeated = repeats;
        Row sum = { 0, 0, -K_INFINITY, 0 };
        for (long long j = threadIdx.x; j < k; j += THREADS) {
            bool present = counts && ids[j] >= 0;
            const real log_p = !present ? -K_INFINITY : is_repeated ? of_equal(values, ids, k, j, present) : log_of(values[j]);
            const real known = log_p / (real)temperature;
            own[j] = present ? ids[j] : -1;
            out[j] = known;
            if (present)
                sum.merge({ 1, FROM_LOGITS ? 0 : exp((double)log_p), known, 1 });
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2)
            sum.merge({ shuffled(sum.count, step), shuffled(sum.mass, step), shuffled(sum.top, step), shuffled(sum.total, step) });
        if (threadIdx.x % WARP == 0)
            parts[threadIdx.x / WARP] = sum;
        __syncthreads();
        sum = parts[0];
        for (int w = 1; w < WARPS; w++)
            sum.merge(parts[w]);
        if (!has_rest) { /* a row of no ids is given one outcome */
            if (threadIdx.x == 0 && sum.count == 0)
                out[0] = 0;
        } else {
            const double others = (double)(words - sum.count), left = 1 - sum.mass;
            const double log_others = log(others > 1 ? others : 1);
            /* of equal shares, the choice of largest entropy, tempered */
            real rest = -K_INFINITY;
            if (!FROM_LOGITS && others > 0)
                rest = (real)(log_others + (log(left < least ? least : left) - log_others) / temperature);
            if (normalises) {
                if (!FROM_LOGITS)
                    sum.merge({ 0, 0, rest, 1 });
                const real norm = sum.count == 0 && FROM_LOGITS ? (real)0 : sum.top + k_log(sum.total);
                for (long long j = threadIdx.x; j < k; j += THREADS)
                    out[j] -= norm;
                rest -= norm;
            }
            if (threadIdx.x == 0)
                out[k] = keeps_rest ? rest : -K_INFINITY;
        }
        for (long long j = threadIdx.x; j < k && counts; j += THREADS)
            if (ids[j] >= 0)
                marks[ids[j] >> 5] = 0;
        __syncthreads();
    }
}
