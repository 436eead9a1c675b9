/* Rows of a divergence of which a side or both are logits: a row is normalised, summed, and its gradients written.
   The formula is pasted above as `k_element`, where both sides are logits also as `apart_element` and
   `close_element`, and as `finish`; so are the macros

   X, Y, WEIGHT, LOSS               element types of input, target, row weights, losses
   INPUT_IS_LOGITS, TARGET_IS_LOGITS
   WANT_SUM, WANT_INPUT, WANT_TARGET  what to compute
   KNOWN                            whether the rows' states are known
   RESIDENT                         whether rows stay on chip (sm_90 and later), or are read again for each pass
   LANES, GROUPS                    threads of a block that share a row; rows that a block has in hand at once
   WIDTH, MIN_BLOCKS                elements of a 16-byte access; blocks of a multiprocessor

   A resident row is spread over the blocks of a cluster. In each, one more warp fetches pieces of rows into a ring
   of slots in shared memory, by bulk copies, as far ahead as the ring allows. The groups take rows in turn: while
   one waits for the others of its row, another computes. Results depend on the launch shape, which depends on the
   device, the vocabulary and the tensors' layout alone. */

enum { WARPS = LANES / 32, WANT_GRADIENT = WANT_INPUT || WANT_TARGET };
enum { APART, CLOSE, GUARDED }; /* vocabularies, in the order in which they are tried */
enum { NORMS, TOPS, TOTALS, SUMS, EXCHANGES = SUMS + 3 };
#define HAS_APART (INPUT_IS_LOGITS && TARGET_IS_LOGITS)

/* Of a row whose sum is below the first, distributions count as close: 6e-8, which an element's term may be wrong
   by, would be more than 3e-6 of it. A sum above the second was no number. */
#define LEAST_APART 0.02f
#define MOST 1e15f
/* No logit, but all that are masked by the least float lie below it */
#define NO_TOP -1e30f

struct Norm { float top, total; }; /* Σ exp((x - top)·scale); a factor is binary(scale) */
struct Totals { double term, d_log_p, d_log_q; };

INLINE float maximum(float a, float b) /* NaN stays */
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

INLINE Norm merged(Norm a, Norm b, float factor)
{
    const float top = fmaxf(a.top, b.top);
    /* symmetric to the bit: lanes that merge the same two in either order must agree */
    return { top, product(a.total, power_of_2((a.top - top) * factor)) + product(b.total, power_of_2((b.top - top) * factor)) };
}

template <typename T> INLINE float at(const Packed<T> &values, int k) { return to_real(values.element[k]); }

/* by words: half a word takes two instructions to come by */
INLINE float at(const Packed<bfloat16> &values, int k)
{
    const unsigned word = ((const unsigned *)&values)[k / 2];
    return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
}

/* A later vector is measured against the top of an earlier one until its total would grow too large for that. */
template <typename T> INLINE void take(Norm &norm, const Packed<T> &values, float factor)
{
    const auto part = [&] {
        float result = 0;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            result += power_of_2((at(values, k) - norm.top) * factor);
        return result;
    };
    float more = part();
    if (!(more < 1e15f)) {
        float top = norm.top;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            top = fmaxf(top, at(values, k));
        norm.total *= power_of_2((norm.top - top) * factor);
        norm.top = top;
        more = part();
    }
    norm.total += more;
}

#if HAS_APART && HAS_RESCALED
#define IS_SURVEYED 1
/* A part's masses, each side measured against its own top, and the sum of their terms. */
struct Survey {
    Norm x, y;
    float total;

    INLINE void rescale(float x_top, float y_top, float x_factor, float y_factor, float x_scale, float y_scale)
    {
        const float x_rescale = power_of_2((x.top - x_top) * x_factor), y_rescale = power_of_2((y.top - y_top) * y_factor);
        total = rescaled(total, y.total, x.total, y_rescale, x_rescale, (y.top - y_top) * y_scale - (x.top - x_top) * x_scale).term;
        x.total *= x_rescale;
        y.total *= y_rescale;
        x.top = x_top;
        y.top = y_top;
    }

    INLINE void take(const Packed<X> &xs, const Packed<Y> &ys, float x_scale, float y_scale)
    {
        const float x_factor = binary(x_scale), y_factor = binary(y_scale);
        float x_part, y_part, part;
        const auto find = [&] {
            x_part = y_part = part = 0;
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                const float from_x = at(xs, k) - x.top, from_y = at(ys, k) - y.top;
                const float q = power_of_2(from_x * x_factor), p = power_of_2(from_y * y_factor);
                x_part += q;
                y_part += p;
                part += mass_term(p, q, bounded((from_y - from_x) * y_scale));
            }
        };
        find();
        if (!(x_part < 1e15f && y_part < 1e15f)) {
            float x_top = x.top, y_top = y.top;
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                x_top = fmaxf(x_top, at(xs, k));
                y_top = fmaxf(y_top, at(ys, k));
            }
            rescale(x_top, y_top, x_factor, y_factor, x_scale, y_scale);
            find();
        }
        x.total += x_part;
        y.total += y_part;
        total += part;
    }
};
#else
#define IS_SURVEYED 0
#endif

struct Arguments {
    const X *x;
    const Y *y;
    X *input_gradient;
    Y *target_gradient;
    const WEIGHT *weights;     /* of each row; 0: 1 */
    const double *known_state; /* [7, rows], or 0 */
    double *state;             /* [7, rows], or 0 */
    LOSS *losses;              /* [rows], or 0 */
    LOSS *total;               /* or 0 */
    double *partial;           /* [clusters] */
    unsigned *ticket;
    unsigned rows, vocab; /* at most 2^30 each */
    long long x_stride, y_stride;
    double scale, parameter;
    float input_scale, target_scale; /* 1 / temperature */
    int slots, slot_vectors;
};

/* This block's part of a row: whole vectors, and for the first block of a cluster the ends that no vector covers.
   Pointers are found when they are wanted: kept, they would cost registers. */
struct Share {
    const Arguments &a;
    unsigned row;
    int head, first, vectors; /* ours are [first, first + vectors) of those that begin at head */
    int ends, body;           /* elements that no vector covers, ours; that vectors cover */

    INLINE const X *x() const { return a.x + row * a.x_stride; }
    INLINE const Y *y() const { return a.y + row * a.y_stride; }
    INLINE X *input_gradient() const { return a.input_gradient + (unsigned long long)row * a.vocab; }
    INLINE Y *target_gradient() const { return a.target_gradient + (unsigned long long)row * a.vocab; }
};

#if RESIDENT
/* The ring's slots; then every group's mail; then the barriers: full and empty of each slot, arrivals of each group. */
extern __shared__ __align__(128) unsigned char memory[];
#else
__shared__ float4 memory[GROUPS * EXCHANGES * WARPS];
#endif

/* Offsets instead of pointers, and counts: what a thread keeps has to fit its registers. */
struct Ring {
    int count, vectors; /* slots; vectors of a slot, of each tensor */
    int barriers;       /* their offset */
    int at;             /* the next row's first slot */
    unsigned parity;    /* of its barriers */

    INLINE void advance(int pieces)
    {
        at += pieces;
        while (at >= count) {
            at -= count;
            parity ^= 1;
        }
    }
    INLINE const X *x(int slot) const { return (const X *)(memory + slot * vectors * (int)(sizeof(Packed<X>) + sizeof(Packed<Y>))); }
    INLINE const Y *y(int slot) const { return (const Y *)(x(slot) + vectors * WIDTH); }
    INLINE unsigned long long *full(int slot) const { return (unsigned long long *)((unsigned char *)memory + barriers) + slot; }
    INLINE unsigned long long *empty(int slot) const { return full(count + slot); }
};

struct Team { /* the threads that share a row */
    int lane, group;
    unsigned rank, size; /* of the block in the cluster */
    int letters;         /* offset of this group's mail: [EXCHANGES, size · WARPS] */
    unsigned parities;   /* of the barriers of its exchanges */
};

/* Every warp gives a value and gets all: fn(fn(...)) in an order that is the same in every thread. `merge` takes the
   accumulated T and one of the warps' values, or another T. */
template <typename T, typename TAKE, typename MERGE>
INLINE T exchanged(const Ring &ring, Team &team, int which, float4 mine, T nothing, TAKE take_one, MERGE merge)
{
    T result = nothing;
#if LANES == 32
    result = take_one(result, mine);
    return result;
#else
    const int size = (int)team.size, lane = team.lane % 32;
    float4 *mail = (float4 *)((unsigned char *)memory + team.letters) + which * size * WARPS;
#if RESIDENT
    if (size > 1) {
        unsigned long long *arrived = ring.empty(ring.count + team.group * EXCHANGES + which);
        if (team.lane == 0)
            expect(arrived, (unsigned)(size * WARPS * sizeof(float4)));
        if (lane < size)
            send(mail + team.rank * WARPS + team.lane / 32, arrived, mine, (unsigned)lane);
        await(arrived, team.parities >> which & 1);
        team.parities ^= 1u << which;
    } else
#endif
    {
        if (lane == 0)
            mail[team.lane / 32] = mine;
        asm volatile("bar.sync %0, %1;" :: "r"(team.group + 1), "n"(LANES) : "memory");
    }
    for (int e = lane; e < size * WARPS; e += 32)
        result = take_one(result, mail[e]);
    for (int step = 16; step; step /= 2)
        result = merge(result, step);
    return result;
#endif
}

/* In whole words: element by element lanes would meet at the same banks. */
template <typename T> INLINE Packed<T> fetched(const T *p)
{
    Packed<T> result;
    uint4 *words = (uint4 *)&result;
#pragma unroll
    for (int i = 0; i < (int)sizeof result / VECTOR_BYTES; i++)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w)
                     : "r"((unsigned)__cvta_generic_to_shared((const uint4 *)p + i)));
    return result;
}

#if RESIDENT
INLINE void release(const Ring &ring, const Team &team, int slot)
{
    __syncwarp();
    if (team.lane % 32 == 0)
        arrive(ring.empty(slot));
}
#endif

/* Calls f(x vector, y vector, its index in the row) for this thread's vectors. */
template <bool FIRST, bool LAST, int UNROLL = 2, typename F> INLINE void each_vector(const Share &share, const Ring &ring, const Team &team, F f)
{
#if RESIDENT
    int at = ring.at;
    unsigned parity = ring.parity;
    for (int start = 0; start < share.vectors; start += ring.vectors) {
        if (FIRST) {
            /* Barriers count turns of the ring modulo 2, and this group may be a turn ahead of another: first the
               turn before has to be over. */
            await(ring.empty(at), parity ^ 1);
            await(ring.full(at), parity);
        }
        const X *x = ring.x(at);
        const Y *y = ring.y(at);
        const int count = min(ring.vectors, share.vectors - start);
#pragma unroll UNROLL
        for (int v = team.lane; v < count; v += LANES)
            f(fetched(x + v * WIDTH), fetched(y + v * WIDTH), share.first + start + v);
        if (LAST)
            release(ring, team, at);
        if (++at == ring.count) {
            at = 0;
            parity ^= 1;
        }
    }
#else
    const X *x = share.x() + share.head;
    const Y *y = share.y() + share.head;
#pragma unroll UNROLL
    for (int v = team.lane; v < share.vectors; v += LANES)
        f(load(x + v * WIDTH), load(y + v * WIDTH), v);
#endif
}

/* And f(index in the row) for the elements that no vector covers. */
template <typename F> INLINE void each_end(const Share &share, const Team &team, F f)
{
#pragma unroll 1
    for (int i = team.lane; i < share.ends; i += LANES)
        f(i < share.head ? i : i + share.body);
}

/* Calls f(x, y, index in the row) for each of this thread's elements: for what is rare or slow. */
template <bool LAST, typename F> INLINE void each_element(const Share &share, const Ring &ring, const Team &team, F f)
{
    const int first = share.head + share.first * WIDTH;
#if RESIDENT
    int at = ring.at;
    for (int start = 0; start < share.vectors; start += ring.vectors) {
        const X *x = ring.x(at);
        const Y *y = ring.y(at);
        const int count = min(ring.vectors, share.vectors - start) * WIDTH;
#pragma unroll 1
        for (int i = team.lane; i < count; i += LANES)
            f(to_real(x[i]), to_real(y[i]), first + start * WIDTH + i);
        if (LAST)
            release(ring, team, at);
        at = at + 1 == ring.count ? 0 : at + 1;
    }
#else
#pragma unroll 1
    for (int i = first + team.lane; i < first + share.vectors * WIDTH; i += LANES)
        f(to_real(share.x()[i]), to_real(share.y()[i]), i);
#endif
    each_end(share, team, [&](int i) { f(to_real(share.x()[i]), to_real(share.y()[i]), i); });
}

template <typename T> INLINE Packed<T> alone(T value)
{
    Packed<T> result;
#pragma unroll
    for (int k = 1; k < WIDTH; k++)
        result.element[k] = rounded<T>(-K_INFINITY);
    result.element[0] = value;
    return result;
}

INLINE double shuffled(double x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE float shuffled(float x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }

struct Norms { Norm x, y; };

INLINE Norms both(Norms a, Norms b, float x_factor, float y_factor)
{
    Norms result = a;
    if (INPUT_IS_LOGITS)
        result.x = merged(a.x, b.x, x_factor);
    if (TARGET_IS_LOGITS)
        result.y = merged(a.y, b.y, y_factor);
    return result;
}

/* What is the same in all threads of a warp, said so that the compiler knows */
INLINE bool agreed(bool condition) { return __all_sync(0xffffffffu, condition); }

INLINE bool is_usual(Norm norm) { return norm.total > 0 && norm.total < 1e30f; }

/* What the rounding of top · binary(scale) puts into each mass of the apart vocabulary */
INLINE float rounding_of(Norm norm, float scale)
{
    const float factor = binary(scale);
    return power_of_2((float)((double)product(norm.top, factor) - (double)norm.top * (double)factor));
}

/* The row's norms, with totals of exp((x - top) · scale): of finite logits, -inf among them, in one sweep; of rows
   that hold +inf, NaN, or nothing above NO_TOP, in two. False of the latter. */
INLINE bool normalize(const Share &share, const Ring &ring, Team &team, const Row &row, Norms &norms
#if IS_SURVEYED
                      , Survey &survey
#endif
)
{
    const float x_factor = binary(row.input_scale), y_factor = binary(row.target_scale);
    const Norms nothing = { { NO_TOP, 0 }, { NO_TOP, 0 } };
    norms = nothing;
#if IS_SURVEYED
    survey = { { NO_TOP, 0 }, { NO_TOP, 0 }, 0 };
    each_vector<true, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, int) {
        survey.take(x, y, row.input_scale, row.target_scale);
    });
    each_end(share, team, [&](int i) {
        survey.take(alone(share.x()[i]), alone(share.y()[i]), row.input_scale, row.target_scale);
    });
    norms = { survey.x, survey.y };
#else
    each_vector<true, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, int) {
        if (INPUT_IS_LOGITS)
            take(norms.x, x, x_factor);
        if (TARGET_IS_LOGITS)
            take(norms.y, y, y_factor);
    });
    each_end(share, team, [&](int i) {
        if (INPUT_IS_LOGITS)
            take(norms.x, alone(share.x()[i]), x_factor);
        if (TARGET_IS_LOGITS)
            take(norms.y, alone(share.y()[i]), y_factor);
    });
#endif
    const auto shuffle = [=](Norms a, int step) {
        return both(a, { { shuffled(a.x.top, step), shuffled(a.x.total, step) },
                         { shuffled(a.y.top, step), shuffled(a.y.total, step) } }, x_factor, y_factor);
    };
    for (int step = 16; step; step /= 2)
        norms = shuffle(norms, step);
    norms = exchanged(ring, team, NORMS, { norms.x.top, norms.x.total, norms.y.top, norms.y.total }, nothing,
                      [=](Norms a, float4 b) { return both(a, { { b.x, b.y }, { b.z, b.w } }, x_factor, y_factor); }, shuffle);
    if (agreed((!INPUT_IS_LOGITS || is_usual(norms.x)) && (!TARGET_IS_LOGITS || is_usual(norms.y))))
        return true;
    float x_top = -K_INFINITY, y_top = -K_INFINITY;
    each_element<false>(share, ring, team, [&](float x, float y, int) {
        x_top = maximum(x_top, x);
        y_top = maximum(y_top, y);
    });
    const auto highest = [](float2 a, int step) { return float2 { maximum(a.x, shuffled(a.x, step)), maximum(a.y, shuffled(a.y, step)) }; };
    float2 tops = { x_top, y_top };
    for (int step = 16; step; step /= 2)
        tops = highest(tops, step);
    tops = exchanged(ring, team, TOPS, { tops.x, tops.y, 0, 0 }, float2 { -K_INFINITY, -K_INFINITY },
                     [](float2 a, float4 b) { return float2 { maximum(a.x, b.x), maximum(a.y, b.y) }; }, highest);
    double x_total = 0, y_total = 0;
    each_element<false>(share, ring, team, [&](float x, float y, int) {
        x_total += (double)k_exp((x - tops.x) * row.input_scale);
        y_total += (double)k_exp((y - tops.y) * row.target_scale);
    });
    const auto sum = [](double2 a, int step) { return double2 { a.x + shuffled(a.x, step), a.y + shuffled(a.y, step) }; };
    double2 totals = { x_total, y_total };
    for (int step = 16; step; step /= 2)
        totals = sum(totals, step);
    totals = exchanged(ring, team, TOTALS, { (float)totals.x, (float)totals.y, 0, 0 }, double2 { 0, 0 },
                       [](double2 a, float4 b) { return double2 { a.x + b.x, a.y + b.y }; }, sum);
    norms = { { tops.x, (float)totals.x }, { tops.y, (float)totals.y } };
    return false;
}

INLINE void set_row(Row &row, const Norms &norms)
{
    row.input_top = norms.x.top;
    row.input_log_total = logf(norms.x.total);
    row.target_top = norms.y.top;
    row.target_log_total = logf(norms.y.total);
    const double shift = (double)norms.y.top * (double)row.target_scale - (double)norms.x.top * (double)row.input_scale
        + (double)logf(norms.y.total / norms.x.total);
    row.shift_high = (float)shift;
    row.shift_low = (float)(shift - (double)row.shift_high);
}

template <int VOCABULARY> INLINE Element element(float x, float y, const Row &row, Parameters parameters)
{
#if HAS_APART
    if (VOCABULARY == APART)
        return apart_element(x, y, row, parameters);
    if (VOCABULARY == CLOSE)
        return close_element(x, y, row, parameters);
#endif
    return k_element(x, y, row, parameters);
}

/* The row's sums of all threads' */
INLINE Totals gathered(const Ring &ring, Team &team, int which, Totals sums)
{
    const auto shuffle = [](Totals a, int step) {
        return Totals { a.term + shuffled(a.term, step), a.d_log_p + shuffled(a.d_log_p, step), a.d_log_q + shuffled(a.d_log_q, step) };
    };
    for (int step = 16; step; step /= 2)
        sums = shuffle(sums, step);
    return exchanged(ring, team, which, { (float)sums.term, (float)sums.d_log_p, (float)sums.d_log_q, 0 }, Totals { 0, 0, 0 },
                     [](Totals a, float4 b) { return Totals { a.term + b.x, a.d_log_p + b.y, a.d_log_q + b.z }; }, shuffle);
}

template <int VOCABULARY> INLINE Totals summed(const Share &share, const Ring &ring, Team &team, const Row &row, Parameters parameters)
{
    float term = 0, d_log_p = 0, d_log_q = 0;
    const auto add = [&](float x, float y) {
        const Element e = element<VOCABULARY>(x, y, row, parameters);
        if (VOCABULARY != APART) /* else Euler's: the partials' sum */
            term += e.term;
        d_log_p += e.d_log_p;
        d_log_q += e.d_log_q;
    };
    if (VOCABULARY == GUARDED) {
        each_element<false>(share, ring, team, [&](float x, float y, int) { add(x, y); });
    } else {
        each_vector<false, false, VOCABULARY == APART ? 2 : 1>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, int) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                add(at(x, k), at(y, k));
        });
        each_end(share, team, [&](int i) { add(to_real(share.x()[i]), to_real(share.y()[i])); });
    }
    Totals sums = gathered(ring, team, SUMS + VOCABULARY, { (double)term, (double)d_log_p, (double)d_log_q });
    if (VOCABULARY == APART)
        sums.term = sums.d_log_p + sums.d_log_q;
    return sums;
}

template <int VOCABULARY>
INLINE void write_gradients(const Share &share, const Ring &ring, const Team &team, const Row &row, Parameters parameters, float upstream)
{
    const auto one = [&](float x, float y, int i) {
        const Element e = element<GUARDED>(x, y, row, parameters);
        if (WANT_INPUT)
            share.input_gradient()[i] = rounded<X>(e.input * upstream);
        if (WANT_TARGET)
            share.target_gradient()[i] = rounded<Y>(e.target * upstream);
    };
    if (VOCABULARY == GUARDED) {
        each_element<true>(share, ring, team, one);
        return;
    }
    each_vector<false, true, VOCABULARY == APART ? 2 : 1>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, int v) {
        Packed<X> input;
        Packed<Y> target;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const Element e = element<VOCABULARY>(at(x, k), at(y, k), row, parameters);
            input.element[k] = rounded<X>(e.input * upstream);
            target.element[k] = rounded<Y>(e.target * upstream);
        }
        const int i = share.head + v * WIDTH;
        if (WANT_INPUT)
            store(share.input_gradient() + i, input);
        if (WANT_TARGET)
            store(share.target_gradient() + i, target);
    });
    each_end(share, team, [&](int i) { one(to_real(share.x()[i]), to_real(share.y()[i]), i); });
}

INLINE bool is_number(const Totals &sums)
{
    return agreed(fabs(sums.term) < MOST && fabs(sums.d_log_p) < MOST && fabs(sums.d_log_q) < MOST);
}

INLINE Share share_of(const Arguments &a, unsigned r, unsigned rank, unsigned size)
{
    Share share = { a, r };
    const int misaligned = (int)((unsigned long long)share.x() % sizeof(Packed<X>) / sizeof(X)), vocab = (int)a.vocab;
    share.head = misaligned ? WIDTH - misaligned : 0;
    const bool together = share.head <= vocab && (unsigned long long)(share.y() + share.head) % VECTOR_BYTES == 0
        && (!WANT_INPUT || is_aligned(share.input_gradient() + share.head))
        && (!WANT_TARGET || is_aligned(share.target_gradient() + share.head));
    const int vectors = together ? (vocab - share.head) / WIDTH : 0;
    const int each = (vectors + (int)size - 1) / (int)size;
    share.body = vectors * WIDTH;
    share.first = min(vectors, each * (int)rank);
    share.vectors = min(vectors - share.first, each);
    share.ends = rank == 0 ? vocab - share.body : 0;
    return share;
}

#if RESIDENT
INLINE unsigned first_row(int) { return cluster_index(); }
INLINE unsigned row_step() { return cluster_count(); }
#else
INLINE unsigned first_row(int group) { return blockIdx.x * GROUPS + group; }
INLINE unsigned row_step() { return gridDim.x * GROUPS; }
#endif

/* Rows of this cluster (of this group), in order; f(row, weight, whether it is read, how many were before it). A whole
   warp calls. */
template <typename F> INLINE void each_row(const Arguments &a, int group, F f)
{
    unsigned turn = 0;
    for (unsigned r = first_row(group); r < a.rows; r += row_step()) {
        const double weight = a.weights ? (double)a.weights[r] : 1;
        const bool is_read = agreed(weight != 0);
        f(r, weight, is_read, turn);
        turn += is_read;
    }
}

INLINE void one_row(const Arguments &a, const Share &share, const Ring &ring, Team &team, unsigned r, double weight, Parameters parameters, double *result)
{
    Row row = {};
    row.input_scale = a.input_scale;
    row.target_scale = a.target_scale;
    Norms norms;
    Totals sums = {};
    int vocabulary = GUARDED;
    const auto round_masses = [&](bool as_totals) {
        row.input_inverse_total = (as_totals ? rounding_of(norms.x, row.input_scale) : 1) / norms.x.total;
        row.target_inverse_total = (as_totals ? rounding_of(norms.y, row.target_scale) : 1) / norms.y.total;
    };
    const auto is_apart = [&] { return agreed(sums.term > LEAST_APART) && is_number(sums); };
    const bool one_scale = row.input_scale == row.target_scale;
#if KNOWN
    const double *known = a.known_state + r;
    norms = { { (float)(known[0] / (double)row.input_scale), (float)known[a.rows] },
              { (float)(known[2ll * a.rows] / (double)row.target_scale), (float)known[3ll * a.rows] } };
    sums = { known[4ll * a.rows], known[5ll * a.rows], known[6ll * a.rows] };
    set_row(row, norms);
    if (HAS_APART && norms.x.top > NO_TOP && norms.y.top > NO_TOP && is_number(sums))
        vocabulary = one_scale && is_apart() ? APART : CLOSE;
    round_masses(vocabulary != GUARDED);
#else
#if IS_SURVEYED
    Survey survey;
    const bool usual = normalize(share, ring, team, row, norms, survey);
#else
    const bool usual = normalize(share, ring, team, row, norms);
#endif
    set_row(row, norms);
    if (a.state && team.lane == 0 && team.rank == 0) {
        a.state[r] = (double)norms.x.top * (double)row.input_scale;
        a.state[a.rows + r] = norms.x.total;
        a.state[2ll * a.rows + r] = (double)norms.y.top * (double)row.target_scale;
        a.state[3ll * a.rows + r] = norms.y.total;
    }
#if HAS_APART
    if (usual) {
        round_masses(true);
        if (one_scale) {
#if IS_SURVEYED
            const Element part = rescaled(survey.total, survey.y.total, survey.x.total,
                                          power_of_2((survey.y.top - norms.y.top) * binary(row.target_scale)) / norms.y.total,
                                          power_of_2((survey.x.top - norms.x.top) * binary(row.input_scale)) / norms.x.total,
                                          (survey.y.top - norms.y.top) * row.target_scale - (survey.x.top - norms.x.top) * row.input_scale
                                              - logf(norms.y.total / norms.x.total));
            sums = gathered(ring, team, SUMS, { (double)part.term, (double)part.d_log_p, (double)part.d_log_q });
#else
            sums = summed<APART>(share, ring, team, row, parameters);
#endif
            if (is_apart())
                vocabulary = APART;
        }
        if (vocabulary != APART && (!one_scale || is_number(sums))) {
            sums = summed<CLOSE>(share, ring, team, row, parameters);
            if (is_number(sums))
                vocabulary = CLOSE;
        }
    }
#endif
    if (vocabulary == GUARDED) {
        round_masses(false);
        sums = summed<GUARDED>(share, ring, team, row, parameters);
    }
#endif
    row.input_sum_gradient = (float)sums.d_log_q;
    row.target_sum_gradient = (float)sums.d_log_p;
    const Finish done = finish(sums.term, parameters);
    if (WANT_GRADIENT) {
        const float upstream = (float)(weight * a.scale * done.slope);
        if (vocabulary == APART)
            write_gradients<APART>(share, ring, team, row, parameters, upstream);
        else if (vocabulary == CLOSE)
            write_gradients<CLOSE>(share, ring, team, row, parameters, upstream);
        else
            write_gradients<GUARDED>(share, ring, team, row, parameters, upstream);
    } else {
        each_vector<false, true>(share, ring, team, [](const Packed<X> &, const Packed<Y> &, int) {});
    }
    if (team.lane == 0 && team.rank == 0) {
        const double loss = weight * done.loss;
        *result += loss;
        if (a.losses)
            a.losses[r] = rounded<LOSS>((real)loss);
        if (a.state) {
            a.state[4ll * a.rows + r] = sums.term;
            a.state[5ll * a.rows + r] = sums.d_log_p;
            a.state[6ll * a.rows + r] = sums.d_log_q;
        }
    }
}

/* A row of weight 0 is not read: garbage in it cannot leak. */
INLINE void clear(const Arguments &a, const Team &team, unsigned r)
{
    for (unsigned i = team.rank * LANES + team.lane; i < a.vocab; i += team.size * LANES) {
        if (WANT_INPUT)
            a.input_gradient[(unsigned long long)r * a.vocab + i] = rounded<X>(0);
        if (WANT_TARGET)
            a.target_gradient[(unsigned long long)r * a.vocab + i] = rounded<Y>(0);
    }
    if (team.lane == 0 && team.rank == 0) {
        if (a.losses)
            a.losses[r] = rounded<LOSS>(0);
        if (a.state)
            for (int k = 0; k < 7; k++)
                a.state[(long long)k * a.rows + r] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(LANES *GROUPS + 32 * RESIDENT, MIN_BLOCKS)
kullback_logits(const X *x, const Y *y, X *input_gradient, Y *target_gradient, const WEIGHT *weights,
                const double *known_state, double *state, LOSS *losses, LOSS *total, double *partial, unsigned *ticket,
                long long rows, long long vocab, long long x_stride, long long y_stride, double scale,
                double input_scale, double target_scale, double parameter, long long slots, long long slot_vectors)
{
    const Arguments a = { x, y, input_gradient, target_gradient, weights, known_state, state, losses, total, partial, ticket,
                          (unsigned)rows, (unsigned)vocab, x_stride, y_stride, scale, parameter, (float)input_scale, (float)target_scale,
                          (int)slots, (int)slot_vectors };
    Parameters parameters;
    *(real *)&parameters = (real)a.parameter;
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / LANES, 0); /* so that the compiler sees it uniform */
    Team team = { (int)threadIdx.x % LANES, group, 0, 1, group * EXCHANGES * WARPS * (int)sizeof(float4) };
    Ring ring = {};
    __shared__ double results[GROUPS]; /* each of its group's first thread */
    if (team.lane == 0 && group < GROUPS)
        results[group] = 0;
#if RESIDENT
    team.rank = cluster_rank();
    team.size = cluster_size();
    ring.count = a.slots;
    ring.vectors = a.slot_vectors;
    const int letters = EXCHANGES * (int)team.size * WARPS * (int)sizeof(float4);
    const int mail = a.slots * a.slot_vectors * (int)(sizeof(Packed<X>) + sizeof(Packed<Y>));
    team.letters = mail + group * letters;
    ring.barriers = mail + GROUPS * letters;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.slots; i++) {
            initialize(ring.full(i), 1);
            initialize(ring.empty(i), WARPS);
        }
        for (int i = 0; i < GROUPS * EXCHANGES; i++)
            initialize(ring.empty(a.slots + i), 1);
    }
    synchronize_cluster();
    if (group == GROUPS) { /* the warp that fetches */
        each_row(a, group, [&](unsigned r, double, bool is_read, unsigned) {
            if (is_read && threadIdx.x % 32 == 0) {
                const Share share = share_of(a, r, team.rank, team.size);
                const X *x = share.x() + share.head + share.first * WIDTH;
                const Y *y = share.y() + share.head + share.first * WIDTH;
                for (int start = 0; start < share.vectors; start += ring.vectors) {
                    const unsigned count = (unsigned)min(ring.vectors, share.vectors - start);
                    await(ring.empty(ring.at), ring.parity ^ 1);
                    expect(ring.full(ring.at), count * (unsigned)(sizeof(Packed<X>) + sizeof(Packed<Y>)));
                    copy((void *)ring.x(ring.at), x + start * WIDTH, count * (unsigned)sizeof(Packed<X>), ring.full(ring.at));
                    copy((void *)ring.y(ring.at), y + start * WIDTH, count * (unsigned)sizeof(Packed<Y>), ring.full(ring.at));
                    ring.advance(1);
                }
            }
            __syncwarp();
        });
    } else {
        each_row(a, group, [&](unsigned r, double weight, bool is_read, unsigned turn) {
            if (!is_read) {
                if (r / row_step() % GROUPS == group)
                    clear(a, team, r);
                return;
            }
            const Share share = share_of(a, r, team.rank, team.size);
            if (turn % GROUPS == (unsigned)group)
                one_row(a, share, ring, team, r, weight, parameters, results + group);
            ring.advance((share.vectors + ring.vectors - 1) / ring.vectors);
        });
    }
#else
    each_row(a, group, [&](unsigned r, double weight, bool is_read, unsigned) {
        if (!is_read)
            clear(a, team, r);
        else
            one_row(a, share_of(a, r, 0, 1), ring, team, r, weight, parameters, results + group);
    });
#endif
#if RESIDENT
    synchronize_cluster(); /* none leaves while another may still write to it */
#else
    __syncthreads();
#endif
    if (!WANT_SUM || !a.total || team.rank != 0 || threadIdx.x >= 32)
        return;
    /* The last to arrive adds the clusters' sums in order, and resets the ticket for the next launch. */
    const unsigned clusters = gridDim.x / team.size, cluster = blockIdx.x / team.size;
    unsigned before = 0;
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int g = 0; g < GROUPS; g++)
            sum += results[g];
        a.partial[cluster] = sum;
        __threadfence();
        before = atomicAdd(a.ticket, 1u);
    }
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before != clusters - 1)
        return;
    __threadfence();
    double sum = 0;
    for (unsigned c = threadIdx.x; c < clusters; c += 32)
        sum += __ldcg(a.partial + c);
    for (int s = 16; s; s /= 2)
        sum += shuffled(sum, s);
    if (threadIdx.x == 0) {
        *a.total = rounded<LOSS>((real)(sum * a.scale));
        *a.ticket = 0;
    }
}
