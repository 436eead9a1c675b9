/* Rows of a divergence of which a side or both are logits: a row is normalised, summed, and its gradients written.
   The formula is pasted above as `k_element`, where both sides are logits also as `apart_element`, `close_element` and,
   if it has slopes, `apart_parts`, and as `finish`; so are the macros

   X, Y, WEIGHT, LOSS               element types of input, target, row weights, losses
   INPUT_IS_LOGITS, TARGET_IS_LOGITS
   INPUT_IS_CAPPED, TARGET_IS_CAPPED  whether a logit x counts as cap · tanh(x / cap)
   WANT_SUM, WANT_INPUT, WANT_TARGET  what to compute
   KNOWN                            whether the rows' states are known
   RESIDENT                         whether rows stay on chip (sm_90 and later), or are read again for each pass
   HAS_SERIES, POWERS, REACH        whether the kind is a series in powers of the log-ratio near p = q (series.py), so many,
                                    and how far it reaches
   KEEPS_SLOPES                     whether the sweep that sums a row that is apart leaves masses and slopes in its place
   LANES, GROUPS                    threads of a block that share a row; rows that a block has in hand at once
   WIDTH, MIN_BLOCKS                elements of a 16-byte access; blocks of a multiprocessor
   HELD                             vectors of a row that a thread keeps in registers: all that it has; or 0
   TO_Y                             bytes of shared memory from a slot's part of x to that of y, where vectors are alike
   MAILBOXES, LETTER_BYTES          for what warps tell one another of a row: of each group; at most, each

   A resident row is spread over the blocks of a cluster. In each, one more warp fetches pieces of rows into a ring
   of slots in shared memory, by bulk copies, as far ahead as the ring allows. The groups take rows in turn: while
   one waits for the others of its row, another computes. Results depend on the launch shape, which depends on the
   device, the vocabulary and the tensors' layout alone. */

enum { WARPS = LANES / 32, WANT_GRADIENT = WANT_INPUT || WANT_TARGET };
enum { X_BYTES = sizeof(Packed<X>), Y_BYTES = sizeof(Packed<Y>) }; /* of a vector */
enum { APART, CLOSE, GUARDED }; /* vocabularies, in the order in which they are tried */
#define HAS_APART (INPUT_IS_LOGITS && TARGET_IS_LOGITS)
#if !HAS_APART
#define HAS_LOG_PART 0
#endif
/* Whether the row's sums follow from what is found while it is normalised */
#if HAS_APART && HAS_MOMENTS
#define IS_SURVEYED 1
#else
#define IS_SURVEYED 0
#define HAS_CROSS_P 0
#define HAS_CROSS_Q 0
#define HAS_OVERLAP 0
#endif
/* Whether the log-ratio's mean among the words that q chooses says what to try first, so that rows that are close need not
   be summed as if apart, and with its variance what to expect of slopes that are kept */
#define IS_FORETOLD (HAS_SERIES && !IS_SURVEYED)
#define HAS_SQUARE_Q (IS_FORETOLD && KEEPS_SLOPES)
#if IS_FORETOLD
#undef HAS_CROSS_Q
#define HAS_CROSS_Q 1
#endif
#define IS_CROSSED (HAS_CROSS_P || HAS_CROSS_Q)
enum { CROSS_P = 0, CROSS_Q = HAS_CROSS_P, OVERLAP = CROSS_Q + HAS_CROSS_Q, SQUARE_Q = OVERLAP + HAS_OVERLAP };
enum { MOMENTS = SQUARE_Q + HAS_SQUARE_Q };
/* Of a row whose sum is below the first, distributions count as close: 6e-8, which an element's term may be wrong
   by, would be more than 3e-6 of it; of 1 - overlap the rounding of a whole sum is left. A sum above the second was no
   number. */
#define LEAST_APART (HAS_OVERLAP ? 0.04f : 0.02f)
#define MOST 1e15f
/* A log-ratio to base 2, as far as it foretells something, and a variance of such that is believed */
#define MOST_BITS 10.0f
#define MOST_VARIED 16.0f
/* An exponent of no mass, and a number after any factor */
#define NO_MASS -1e4f
/* Whether tops are found and not guessed: short rows of float32, of which that is seen */
#define IS_EXACT (!IS_NARROW && LANES == 32)
/* In nats, of a row's largest logit above a sample's; and totals that are taken: those of smaller ones have lost masses that
   underflowed, those of larger have exponents that are rounded by too much */
#define USUAL_RANGE (IS_NARROW ? 12.0f : 8.0f)
#define LEAST_TOTAL 1e-20f
#define MOST_TOTAL (IS_NARROW ? MOST : 65536.0f)
/* No logit, but all that are masked by the least float lie below it */
#define NO_TOP -1e30f

INLINE float maximum(float a, float b) /* NaN stays */
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

INLINE float shuffled(float x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE double shuffled(double x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE float from_lane(float x, unsigned lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }

/* What is the same in all threads of a warp, said so that the compiler knows */
INLINE bool agreed(bool condition) { return __all_sync(0xffffffffu, condition); }

template <typename T> INLINE T sum_of_warp(T x)
{
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += shuffled(x, step);
    return x;
}

/* Not to be found, with what follows from it, before a loop: registers would keep it in there. */
INLINE float found_here(float x)
{
    asm volatile("" : "+f"(x));
    return x;
}
INLINE int found_here(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}
template <typename T> INLINE T *found_here(T *p)
{
    asm volatile("" : "+l"(p));
    return p;
}
INLINE Parameters found_here(Parameters parameters)
{
    *(float *)&parameters = found_here(*(float *)&parameters);
    return parameters;
}

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
    long long x_stride, y_stride, input_gradient_stride, target_gradient_stride;
    double scale;
    float input_scale, target_scale; /* 1 / temperature */
    float input_cap, target_cap;
    float exponent;                  /* of the overlap that a survey sums */
    long long series[POWERS];        /* each two floats, factors of a power of the log-ratio: of term, above of d_log_q - d_log_p */
    int slots, slot_vectors, share, pieces; /* of the ring; vectors of a slot, of a block's share of a row; slots that it takes */
    int mail, barriers;                     /* offsets; in a mailbox of the mail: [values, size · WARPS] floats */
};

INLINE float term_factor(const Arguments &a, int power) { return found_here(__int_as_float((int)a.series[power - 1])); }
INLINE float difference_factor(const Arguments &a, int power) { return found_here(__int_as_float((int)(a.series[power - 1] >> 32))); }

/* What an element of the input counts as, and of the target */
INLINE float input_of(const Arguments &a, float x) { return INPUT_IS_CAPPED ? k_capped(x, a.input_cap) : x; }
INLINE float target_of(const Arguments &a, float y) { return TARGET_IS_CAPPED ? k_capped(y, a.target_cap) : y; }

/* What a row holds, each side's masses measured against a top: 2^(x·factor - top·factor), where a factor is binary(scale)
   and the second product is rounded. */
struct Survey {
    float x_top = 0, y_top = 0, x_total = 0, y_total = 0;
    float moments[MOMENTS + !MOMENTS] = {}; /* of divergences.py those that are wanted, and Σ q log²(p/q); to base 2 */

    /* The tops as exponents */
    struct Lows {
        float x, y;
    };
    INLINE Lows lows(const Arguments &a) const { return { product(x_top, binary(a.input_scale)), product(y_top, binary(a.target_scale)) }; }

    template <int COUNT, typename F, typename G> INLINE void take(F x, G y, const Arguments &a, const Lows &low) /* x(k), y(k) */
    {
        const float x_factor = binary(a.input_scale), y_factor = binary(a.target_scale);
        float x_part = 0, y_part = 0, parts[MOMENTS + !MOMENTS]; /* for a sum of few parts is more exact */
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const auto add = [=](float &part, float more) { part = k ? part + more : more; };
            const float x_power = fmaf(x(k), x_factor, -low.x), y_power = fmaf(y(k), y_factor, -low.y);
            const float q = power_of_2(x_power), p = power_of_2(y_power);
            if (INPUT_IS_LOGITS)
                add(x_part, q);
            if (TARGET_IS_LOGITS)
                add(y_part, p);
#if IS_CROSSED
            const float ratio = y_power - x_power;
            if (HAS_CROSS_P)
                add(parts[CROSS_P], p * bounded(ratio));
            if (HAS_SQUARE_Q)
                add(parts[SQUARE_Q], q * ratio * ratio);
            if (HAS_CROSS_Q) /* where p alone is 0 this is to be no number, however small q; foretold, where either is */
                add(parts[CROSS_Q], q * (IS_FORETOLD || ratio == ratio ? ratio : 0));
#endif
#if HAS_OVERLAP
            add(parts[OVERLAP], power_of_2(fmaf(a.exponent, y_power, (1 - a.exponent) * bounded(x_power))));
#endif
        }
        x_total += x_part;
        y_total += y_part;
#pragma unroll
        for (int m = 0; m < MOMENTS; m++)
            moments[m] += parts[m];
    }
};

/* Largest logits; NaN, if there is one */
struct alignas(8) Tops {
    float x, y;
};

/* Σ of terms and of their partial derivatives; or of other things */
struct Sums {
    float term = 0, d_log_p = 0, d_log_q = 0;
    float excess = 0; /* of q's mass over p's: the error of the shift between their norms, to first order */
};

/* Σ p · slope_p and Σ q · slope_q */
struct SlopeSums {
    float p = 0, q = 0;
};

/* This block's part of a row: whole vectors, and for the first block of a cluster the ends that no vector covers.
   Pointers are found when they are wanted: kept, they would cost registers. */
struct Share {
    const Arguments &a;
    unsigned row;
    int head, first, vectors; /* ours are [first, first + vectors) of those that begin at head */
    int body;                 /* elements that vectors cover */

    INLINE const X *x() const { return a.x + (unsigned)found_here((int)row) * a.x_stride; }
    INLINE const Y *y() const { return a.y + (unsigned)found_here((int)row) * a.y_stride; }
    INLINE X *input_gradient() const { return a.input_gradient + row * a.input_gradient_stride; }
    INLINE Y *target_gradient() const { return a.target_gradient + row * a.target_gradient_stride; }
};

#if RESIDENT
/* The slots' parts of x; at TO_Y those of y; then every group's mail; then the barriers: full and empty of each slot, arrivals
   of each group; then likely tops, of each slot. */
extern __shared__ __align__(128) unsigned char memory[];
#else
__shared__ __align__(16) unsigned char memory[GROUPS * MAILBOXES * WARPS * LETTER_BYTES];
#endif

#if RESIDENT
/* Offsets instead of pointers, and counts: what a thread keeps has to fit its registers. */
struct Ring {
    int count, vectors; /* slots; vectors of a slot, of each tensor */
    int pieces;         /* slots that a row takes: as many in each block, whether or not vectors are left for all */
    int barriers;       /* their offset */
    int at;             /* the next row's first slot */
    unsigned parity;    /* of its barriers */

    INLINE void advance(int pieces) /* as many as there are slots, at most */
    {
        at += pieces;
        turn();
    }
    INLINE void advance_rows(int rows) /* as many as there are groups, at most: two turns (plan.py) */
    {
        at += rows * pieces;
        turn();
        turn();
    }
    INLINE void turn()
    {
        parity ^= at >= count;
        at -= at >= count ? count : 0;
    }
    INLINE const X *x() const { return (const X *)memory + at * vectors * WIDTH; }
    INLINE const Y *y() const { return (const Y *)(memory + TO_Y) + at * vectors * WIDTH; }
    INLINE unsigned long long *barrier(int i) const { return (unsigned long long *)((unsigned char *)memory + barriers) + i; }
    INLINE unsigned long long *full() const { return barrier(at); }
    INLINE unsigned long long *empty() const { return barrier(count + at); }
    INLINE unsigned long long *arrived(unsigned mailbox) const { return barrier(2 * count + mailbox); }
    INLINE Tops *tops() const { return (Tops *)barrier(2 * count + GROUPS * MAILBOXES + at); } /* of the row that begins here */
};
#else
struct Ring { /* of one row, in registers */
    Packed<X> x[HELD + !HELD];
    Packed<Y> y[HELD + !HELD];
};
#endif

__shared__ double results[GROUPS]; /* each of its group's first thread */

struct Team { /* the threads that share a row */
    int lane, group;
    unsigned size; /* of the cluster, in blocks */
    unsigned exchanges : 2, turn : 30; /* of its mailboxes' turns, modulo 2; of rows that were read so far, of the warp that
                                          fetches of all. Together: a register more would spill. */
};

/* This block's place in the cluster, asked for each time: kept, it would spill. */
#if RESIDENT
INLINE unsigned own_rank() { return cluster_rank(); }
#else
INLINE unsigned own_rank() { return 0; }
#endif

/* All threads of the group have come here. */
INLINE void synchronize_group(const Team &team)
{
    asm volatile("bar.sync %0, %1;" :: "r"(team.group + 1), "n"(LANES) : "memory");
}

struct Add {
    static INLINE float nothing() { return 0; }
    template <typename T> INLINE T operator()(T a, T b) const { return a + b; }
};
struct Highest {
    static INLINE float nothing() { return -K_INFINITY; }
    INLINE float operator()(float a, float b) const { return maximum(a, b); }
};

/* Every thread gives values, and gets each merged over the row's threads, in the same order. Lanes share the work: of the
   values each keeps one, after as many halvings. Two mailboxes are enough: who writes to one for the second time has got the
   others' letters of the exchange between, and they had read it by then. WIDE: what is merged in; letters are floats. */
template <typename WIDE, int COUNT, typename F>
INLINE void exchange(const Arguments &a, const Ring &ring, Team &team, float (&values)[COUNT], F merge)
{
    enum { KEPT = COUNT > 2 ? 4 : 2, EACH = 32 / KEPT }; /* lanes of a value */
    static_assert(COUNT <= KEPT && COUNT * sizeof(float) <= LETTER_BYTES);
    const unsigned place = (unsigned)found_here(team.lane), lane = place % 32;
    WIDE parts[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        parts[k] = values[min(k, COUNT - 1)];
#pragma unroll
    for (int step = 16, count = KEPT / 2; step; step /= 2, count /= 2) {
        const bool is_upper = lane & step;
#pragma unroll
        for (int k = 0; k < count; k++)
            parts[k] = merge(is_upper ? parts[k + count] : parts[k], shuffled(is_upper ? parts[k] : parts[k + count], step));
        if (count == 0)
            parts[0] = merge(parts[0], shuffled(parts[0], step));
    }
    WIDE mine = parts[0];
#if LANES > 32
    const unsigned size = team.size, warp = place / 32, letters = size * WARPS;
    const unsigned exchanges = (unsigned)found_here((int)team.exchanges), mailbox = (unsigned)team.group * MAILBOXES + exchanges % MAILBOXES;
    float *mail = (float *)((unsigned char *)memory + a.mail + mailbox * letters * LETTER_BYTES);
    mail += min(lane / EACH, COUNT - 1u) * letters; /* of this lane's value */
    const bool is_sent = lane / EACH < COUNT;
#if RESIDENT
    if (size > 1) {
        unsigned long long *arrived = ring.arrived(mailbox);
        if (place == 0)
            expect(arrived, letters * COUNT * (unsigned)sizeof(float));
        if (is_sent && lane % EACH < size)
            send(mail + own_rank() * WARPS + warp, arrived, (float)mine, lane % EACH);
        await_cluster(arrived, exchanges / MAILBOXES % 2);
    } else
#endif
    {
        if (is_sent && lane % EACH == 0)
            mail[warp] = (float)mine;
        synchronize_group(team);
    }
    team.exchanges++;
    mine = merge.nothing();
#pragma unroll 1
    for (unsigned e = lane % EACH; e < letters; e += 32) { /* as many as there are likely to be, on their way at once */
        float letter[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            letter[k] = e + k * EACH < letters ? mail[e + k * EACH] : merge.nothing();
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            mine = merge(mine, (WIDE)letter[k]);
    }
#pragma unroll
    for (int step = EACH / 2; step; step /= 2)
        mine = merge(mine, shuffled(mine, step));
#endif
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = from_lane((float)mine, k * EACH);
}

INLINE Sums exchanged(const Arguments &a, const Ring &ring, Team &team, Sums sums)
{
    float values[] = { sums.term, sums.d_log_p, sums.d_log_q, sums.excess };
    exchange<double>(a, ring, team, values, Add());
    return { values[0], values[1], values[2], values[3] };
}

INLINE SlopeSums exchanged(const Arguments &a, const Ring &ring, Team &team, SlopeSums sums)
{
    float values[] = { sums.p, sums.q };
    exchange<float>(a, ring, team, values, Add());
    return { values[0], values[1] };
}

INLINE Tops exchanged(const Arguments &a, const Ring &ring, Team &team, Tops tops)
{
    float values[] = { tops.x, tops.y };
    exchange<float>(a, ring, team, values, Highest());
    return { values[0], values[1] };
}

INLINE Survey exchanged(const Arguments &a, const Ring &ring, Team &team, Survey survey)
{
    float values[2 + MOMENTS] = { survey.x_total, survey.y_total };
#pragma unroll
    for (int m = 0; m < MOMENTS; m++)
        values[2 + m] = survey.moments[m];
    exchange<float>(a, ring, team, values, Add());
    survey.x_total = values[0];
    survey.y_total = values[1];
#pragma unroll
    for (int m = 0; m < MOMENTS; m++)
        survey.moments[m] = values[2 + m];
    return survey;
}

/* In whole words: element by element lanes would meet at the same banks. */
template <typename T> INLINE Packed<T> fetched(int place)
{
    Packed<T> result;
    uint4 *words = (uint4 *)&result;
#pragma unroll
    for (int i = 0; i < (int)sizeof result / VECTOR_BYTES; i++)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w)
                     : "r"(place + i * VECTOR_BYTES));
    return result;
}

#if RESIDENT
/* Calls f(the ring at the piece's slot, its first vector of the share, its vectors) for the pieces of a share. */
template <typename F> INLINE void each_piece(const Share &share, Ring ring, F f)
{
    for (int piece = 0, start = 0; piece < ring.pieces; piece++, start += ring.vectors) {
        f(ring, start, min(ring.vectors, share.vectors - start));
        ring.advance(1);
    }
}

/* Barriers count turns of the ring modulo 2, and this group may be a turn ahead of another: first the turn before has to be
   over. */
INLINE void await_piece(const Ring &slot)
{
    await(slot.empty(), slot.parity ^ 1);
    await(slot.full(), slot.parity);
}

INLINE void release(const Ring &ring, const Team &team)
{
    if (KEEPS_SLOPES) /* what we wrote there comes before what the next copy writes */
        order_before_copies();
    __syncwarp();
    if (team.lane % 32 == 0)
        arrive(ring.empty());
}
#endif

/* The row is not read again. */
INLINE void release_row(const Share &share, const Ring &ring, const Team &team)
{
#if RESIDENT
    each_piece(share, ring, [&](const Ring &slot, int, int) { release(slot, team); });
#endif
}

#if RESIDENT
/* In shared memory a slot's vectors of x, by addresses: one register counts and points. */
INLINE int first_place(const Ring &slot) { return (int)shared_address(slot.x()); }
INLINE int last_place(const Ring &slot, int count) { return first_place(slot) + max(count, 0) * X_BYTES; }

/* Of y, where that of x is there */
INLINE int beside(int place)
{
    const int before = place - (int)shared_address(memory);
    return place + TO_Y + (X_BYTES == Y_BYTES ? 0 : before / X_BYTES * Y_BYTES - before);
}
#endif

#if !RESIDENT
/* The vectors of the row that a thread keeps */
INLINE void hold(const Share &share, Ring &ring, const Team &team)
{
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (team.lane + i * LANES < share.vectors) {
            const int first = share.head + (team.lane + i * LANES) * WIDTH;
            ring.x[i] = load(share.x() + first);
            ring.y[i] = load(share.y() + first);
        }
}
#endif

/* Calls f(x vector, y vector, bytes of the row's vectors of x before it, the place of its x on chip) for this thread's vectors.
   FIRST: all but the first piece may still be on their way; LAST: the row is not read again; SHORT: f is, so that it may stand
   there once for each vector held. */
template <bool FIRST, bool LAST, bool SHORT, typename F> INLINE void each_vector(const Share &share, Ring &ring, const Team &team, F f)
{
#if RESIDENT
    each_piece(share, ring, [&](const Ring &slot, int start, int count) {
        if (FIRST && start) /* the first has been awaited */
            await_piece(slot);
        const long long elsewhere = (share.first + start) * (long long)X_BYTES - first_place(slot); /* than `place`, in the row */
#pragma unroll 1
        for (int place = first_place(slot) + team.lane * X_BYTES; place < last_place(slot, count); place += LANES * X_BYTES)
            f(fetched<X>(place), fetched<Y>(beside(place)), elsewhere + (unsigned)place, place);
        if (LAST)
            release(slot, team);
    });
#else
    const X *x = share.x() + share.head;
    const Y *y = share.y() + share.head;
    if (HELD && SHORT) {
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (team.lane + i * LANES < share.vectors)
                f(ring.x[i], ring.y[i], (team.lane + i * LANES) * (long long)X_BYTES, 0);
        return;
    }
#pragma unroll 1
    for (int v = team.lane; v < share.vectors; v += LANES)
        f(load(x + v * WIDTH), load(y + v * WIDTH), v * (long long)X_BYTES, 0);
#endif
}

#if KEEPS_SLOPES
static_assert((int)X_BYTES == (int)Y_BYTES);

/* Of each element its mass, rounded as x is, in x's place, and in y's its slope in half precision, less what is to be expected
   of it: a gradient is a small difference from the row's mean slope, near which halves are to be fine. A slope of no mass may
   be longer than halves are: it stays finite, for the product to be 0. */
INLINE void keep(int place, const float *masses, const float *slopes)
{
    Packed<X> mass;
    unsigned slope[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        const float *s = slopes + 2 * i;
        mass.element[2 * i] = rounded<X>(masses[2 * i]);
        mass.element[2 * i + 1] = rounded<X>(masses[2 * i + 1]);
        asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(slope[i]) : "f"(s[1]), "f"(s[0]));
    }
    put(place, *(const uint4 *)&mass);
    put(beside(place), *(const uint4 *)slope);
}

INLINE float kept_slope(const Packed<Y> &y, int k)
{
    return to_real(float16 { (unsigned short)(((const unsigned *)&y)[k / 2] >> k % 2 * 16) });
}
#endif

/* Calls f(x, y, k) for the elements of this thread's first vector, which has arrived: for a sample of the row. */
template <typename F> INLINE void each_first(const Share &share, const Ring &ring, const Team &team, F f)
{
    if (team.lane >= share.vectors)
        return;
#if RESIDENT
    const Packed<X> x = fetched<X>(first_place(ring) + team.lane * X_BYTES);
    const Packed<Y> y = fetched<Y>(beside(first_place(ring) + team.lane * X_BYTES));
#else
    const int i = share.head + team.lane * WIDTH;
    const Packed<X> x = load(share.x() + i);
    const Packed<Y> y = load(share.y() + i);
#endif
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        f(at(x, k), at(y, k), k);
}

/* And f(index in the row) for the elements that no vector covers. */
template <typename F> INLINE void each_end(const Share &share, const Team &team, F f)
{
    const int ends = own_rank() == 0 ? (int)share.a.vocab - found_here(share.body) : 0;
#pragma unroll 1
    for (int i = team.lane; i < ends; i += LANES)
        f(i < share.head ? i : i + share.body);
}

/* Calls f(x, y, index in the row) for each of this thread's elements: for what is rare or slow. */
template <bool LAST, typename F> INLINE void each_element(const Share &share, const Ring &ring, const Team &team, F f)
{
    const int first = share.head + share.first * WIDTH;
#if RESIDENT
    each_piece(share, ring, [&](const Ring &slot, int start, int count) {
        const X *x = slot.x();
        const Y *y = slot.y();
#pragma unroll 1
        for (int i = team.lane; i < count * WIDTH; i += LANES)
            f(to_real(x[i]), to_real(y[i]), first + start * WIDTH + i);
        if (LAST)
            release(slot, team);
    });
#else
#pragma unroll 1
    for (int i = first + team.lane; i < first + share.vectors * WIDTH; i += LANES)
        f(to_real(share.x()[i]), to_real(share.y()[i]), i);
#endif
    each_end(share, team, [&](int i) { f(to_real(share.x()[i]), to_real(share.y()[i]), i); });
}

INLINE float usual_range(float scale) { return fminf(USUAL_RANGE, tame_ratio_or_zero(USUAL_RANGE, found_here(scale))); }
INLINE bool is_usual(float total) { return total > LEAST_TOTAL && total < MOST_TOTAL; }
INLINE bool is_top(float top) { return top > NO_TOP && top < K_INFINITY; }

/* Whether a side's number is such, of each side that is logits */
INLINE bool are(bool (*is_such)(float), float x, float y)
{
    return agreed((!INPUT_IS_LOGITS || is_such(x)) && (!TARGET_IS_LOGITS || is_such(y)));
}

/* The whole row's survey, against these tops; FIRST: as of `each_vector`. */
template <bool FIRST> INLINE Survey surveyed(const Arguments &a, const Share &share, Ring &ring, Team &team, Tops tops)
{
    Survey survey;
    survey.x_top = tops.x;
    survey.y_top = tops.y;
    const Survey::Lows low = survey.lows(a);
    each_vector<FIRST, false, FIRST>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
        survey.take<WIDTH>([&](int k) { return input_of(a, at(x, k)); }, [&](int k) { return target_of(a, at(y, k)); }, a, low);
    });
    each_end(share, team, [&](int i) {
        const float x = input_of(a, to_real(share.x()[i])), y = target_of(a, to_real(share.y()[i]));
        survey.take<1>([=](int) { return x; }, [=](int) { return y; }, a, low);
    });
    return exchanged(a, ring, team, survey);
}

/* What the row's tops may be: the largest of a sample, and so much that most rows have little above. */
struct Likely {
    Tops tops = { NO_TOP, NO_TOP };

    INLINE void see(const Arguments &a, X x, Y y)
    {
        tops = { fmaxf(tops.x, input_of(a, to_real(x))), fmaxf(tops.y, target_of(a, to_real(y))) };
    }
    INLINE Tops raised(const Arguments &a) const { return { tops.x + usual_range(a.input_scale), tops.y + usual_range(a.target_scale) }; }
};

/* `part` of so many in the row, seldom two at one place of a mask that repeats itself */
INLINE unsigned sample_place(const Arguments &a, unsigned part, unsigned parts) { return min((a.vocab / parts + 1) * part, a.vocab - 1); }

/* Of some rows at once, each eight lanes' */
struct Sample {
    enum { PARTS = 8, ROWS = 32 / PARTS };
    X x;
    Y y;

    INLINE void take(const Arguments &a, unsigned row)
    {
        const unsigned place = sample_place(a, threadIdx.x % PARTS, PARTS);
        x = (a.x + row * a.x_stride)[place];
        y = (a.y + row * a.y_stride)[place];
    }
    INLINE Tops likely_tops(const Arguments &a) const
    {
        Likely likely;
        likely.see(a, x, y);
#pragma unroll
        for (int step = PARTS / 2; step; step /= 2)
            likely.tops = { fmaxf(likely.tops.x, shuffled(likely.tops.x, step)), fmaxf(likely.tops.y, shuffled(likely.tops.y, step)) };
        return likely.raised(a);
    }
};

/* Of one row: by what all its threads read, for then none waits for another lane */
INLINE Tops likely_tops(const Arguments &a, const Share &share)
{
    Likely likely;
#pragma unroll
    for (unsigned i = 0; i < 4; i++)
        likely.see(a, share.x()[sample_place(a, i, 4)], share.y()[sample_place(a, i, 4)]);
    return likely.raised(a);
}

INLINE Tops found_tops(const Arguments &a, const Share &share, Ring &ring, Team &team)
{
    Tops tops = { -K_INFINITY, -K_INFINITY };
    const auto see = [&](float x, float y) { tops = { maximum(tops.x, input_of(a, x)), maximum(tops.y, target_of(a, y)) }; };
    each_vector<false, false, IS_EXACT>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            see(at(x, k), at(y, k));
    });
    each_end(share, team, [&](int i) { see(to_real(share.x()[i]), to_real(share.y()[i])); });
    return exchanged(a, ring, team, tops);
}

/* The whole row's survey: of finite logits, -inf among them, in one sweep beside that which finds tops; where likely tops are
   far from what they are, in two. Of rows that hold +inf, NaN, or nothing above NO_TOP, totals are of exp((x - top)·scale),
   terms are not summed, and the result is false. */
INLINE bool normalize(const Arguments &a, const Share &share, Ring &ring, Team &team, Survey &survey)
{
#if RESIDENT
    await_piece(ring);
    Tops tops = *ring.tops();
#else
    hold(share, ring, team);
    Tops tops = IS_EXACT ? found_tops(a, share, ring, team) : likely_tops(a, share);
#endif
    survey = surveyed<true>(a, share, ring, team, tops);
    if (are(is_usual, survey.x_total, survey.y_total))
        return true;
    if (!IS_EXACT) {
        tops = found_tops(a, share, ring, team);
        if (are(is_top, tops.x, tops.y)) {
            survey = surveyed<false>(a, share, ring, team, tops);
            if (are(is_usual, survey.x_total, survey.y_total))
                return true;
        }
    }
    double x_total = 0, y_total = 0;
    each_element<false>(share, ring, team, [&](float x, float y, int) {
        x_total += (double)k_exp((input_of(a, x) - tops.x) * a.input_scale);
        y_total += (double)k_exp((target_of(a, y) - tops.y) * a.target_scale);
    });
    const Sums totals = exchanged(a, ring, team, Sums { (float)x_total, (float)y_total });
    survey.x_top = tops.x;
    survey.y_top = tops.y;
    survey.x_total = totals.term;
    survey.y_total = totals.d_log_p;
    return false;
}

/* The error of top · binary(scale), rounded: every power in a survey's total has it. */
INLINE double rounding_of(float top, float scale)
{
    const float factor = binary(scale);
    return (double)product(top, factor) - (double)top * (double)factor;
}

/* log(y / x); exchanging them changes the sign and not a bit */
INLINE float log_quotient_of(float y, float x) { return y < x ? -logf(x / y) : logf(y / x); }
INLINE double log_quotient_of(double y, double x) { return y < x ? -log(x / y) : log(y / x); }

/* A row's norm as an exponent, and what its masses sum to when that was rounded */
INLINE float norm_of(float top, float total, float scale) { return product(top, binary(scale)) + log2_of(total); }
INLINE float whole_of(float top, float total, float scale)
{
    return total * power_of_2(product(top, binary(scale)) - norm_of(top, total, scale));
}

/* log-normaliser of y less that of x, as floats found it */
INLINE double shift_of(const Arguments &a, const Survey &survey, bool usual)
{
    const double rounding = usual ? rounding_of(survey.y_top, a.target_scale) - rounding_of(survey.x_top, a.input_scale) : 0;
    return (double)survey.y_top * (double)found_here(a.target_scale) - (double)survey.x_top * (double)found_here(a.input_scale)
        + rounding * (double)LN2 + (double)log_quotient_of(survey.y_total, survey.x_total);
}

/* What elements want to know of their row. Each vocabulary's is found where it is used, so that nothing is that is
   not. A mass of `k_` is exp((x - top)·scale) / total; one of the others has the rounding in it, as a usual total. */
template <int VOCABULARY> INLINE Row row_of(const Arguments &a, const Survey &survey, const Sums &sums, bool usual, float correction)
{
    Row row;
    row.input_scale = a.input_scale;
    row.target_scale = a.target_scale;
    row.input_top = VOCABULARY == APART && IS_NARROW ? norm_of(survey.x_top, survey.x_total, a.input_scale) : survey.x_top;
    row.target_top = VOCABULARY == APART && IS_NARROW ? norm_of(survey.y_top, survey.y_total, a.target_scale) : survey.y_top;
    const double x_rounding = usual && INPUT_IS_LOGITS ? rounding_of(survey.x_top, a.input_scale) : 0;
    const double y_rounding = usual && TARGET_IS_LOGITS ? rounding_of(survey.y_top, a.target_scale) : 0;
    row.input_inverse_total = 1 / (VOCABULARY == GUARDED ? survey.x_total * power_of_2((float)x_rounding) : survey.x_total);
    row.target_inverse_total = 1 / (VOCABULARY == GUARDED ? survey.y_total * power_of_2((float)y_rounding) : survey.y_total);
    row.input_log_total = logf(survey.x_total) + (float)x_rounding * LN2;
    row.target_log_total = logf(survey.y_total) + (float)y_rounding * LN2;
    const double shift = shift_of(a, survey, usual) + found_here(correction);
    row.shift_high = (float)shift;
    row.shift_low = (float)(shift - (double)row.shift_high);
    row.input_sum_gradient = sums.d_log_q;
    row.target_sum_gradient = sums.d_log_p;
    return row;
}

INLINE Survey found_here(Survey survey)
{
    survey.x_top = found_here(survey.x_top);
    survey.y_top = found_here(survey.y_top);
    survey.x_total = found_here(survey.x_total);
    survey.y_total = found_here(survey.y_total);
    return survey;
}

template <typename T> INLINE void exchange_halves(Packed<T> &values)
{
    enum { WORDS = sizeof(Packed<T>) / sizeof(unsigned) };
    unsigned *word = (unsigned *)&values;
#pragma unroll
    for (int i = 0; i < WORDS / 2; i++) {
        const unsigned kept = word[i];
        word[i] = word[i + WORDS / 2];
        word[i + WORDS / 2] = kept;
    }
}

/* Calls f(k) for the elements of vectors. Of the long formulas half of them at a time, the vectors being turned round
   between: all at once would not fit the registers. */
template <int VOCABULARY, typename F, typename... VECTORS> INLINE void each_of(F f, VECTORS &...vectors)
{
    enum { PARTS = VOCABULARY == APART ? 1 : 2 };
#pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int k = 0; k < WIDTH / PARTS; k++)
            f(k);
        if (PARTS == 2)
            (exchange_halves(vectors), ...);
    }
}

/* A logit as log_part takes it, of a row whose norm is in the exponent: -inf has an exponent too. */
INLINE float bounded_logit(float x, float top, float scale)
{
    return HAS_LOG_PART && IS_NARROW ? fmaxf(x, (top + NO_MASS) / binary(scale)) : x;
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

#if HAS_SERIES
/* Of a row that is close, the elements whose log-ratio r is below REACH: powers of r, times √(p·q), which is the same when p
   and q are exchanged. Where scales differ, or powers do not reach the parameters, the shift is infinite and none is. */
struct Near {
    float half, less; /* of the exponent of √(p·q): half · (x + y) - less */
    float rest;       /* what less was rounded by, as a factor of them all */
    float x_top, y_top, scale, shift, shift_low;

    INLINE Near(const Arguments &a, const Survey &survey, bool usual, float correction)
    {
        const float factor = binary(a.input_scale);
        const double shift_found = shift_of(a, survey, usual) + found_here(correction);
        double found = 0.5 * ((double)product(survey.x_top, factor) + (double)product(survey.y_top, factor))
            + 0.5 * (double)(log2f(survey.x_total) + log2f(survey.y_total));
        if (!IS_NARROW)
            found -= 0.5 * (double)factor * ((double)survey.x_top + (double)survey.y_top);
        half = 0.5f * factor;
        less = (float)found;
        rest = power_of_2((float)((double)less - found));
        x_top = survey.x_top;
        y_top = survey.y_top;
        scale = a.input_scale;
        const bool applies = a.input_scale == a.target_scale && term_factor(a, 2) != 0;
        shift = applies ? (float)shift_found : K_INFINITY;
        shift_low = (float)(shift_found - (double)shift);
    }

    INLINE float ratio(float x, float y) const
    {
        if (IS_NARROW)
            return fmaf(y - x, scale, -shift) - shift_low;
        return k_logit_difference(y, scale, x, scale, shift, shift_low);
    }
    INLINE float root(float x, float y) const
    {
        return power_of_2(fmaf(IS_NARROW ? x + y : (x - x_top) + (y - y_top), half, -less));
    }
    static INLINE bool holds(float ratio) { return fabsf(ratio) < REACH; }

    /* Whether the others are few enough to be taken one by one, by a sample of what this warp has of the row */
    INLINE bool serves(const Share &share, const Ring &ring, const Team &team) const
    {
        float others = 0;
        each_first(share, ring, team, [&](float x, float y, int) {
            others += holds(ratio(input_of(share.a, x), target_of(share.a, y))) ? 0 : 1;
        });
        return agreed(sum_of_warp(others) <= WIDTH / 2); /* of 32 · WIDTH */
    }
};

/* Calls f(x, y, index, row()) for the elements of vectors that have a bit in `far`: the vector `index(steps from the end)` has
   the lowest bit where that is 1. */
template <typename I, typename F, typename R> INLINE void each_far(const Share &share, unsigned far, I index, F f, R row)
{
    if (!far)
        return;
    const Row found = row();
    for (; far; far &= far - 1) {
        const int start = share.head + index(__ffs((int)far)) * WIDTH;
#pragma unroll 1
        for (int i = start; i < start + WIDTH; i++)
            f(to_real(share.x()[i]), to_real(share.y()[i]), i, found);
    }
}

/* Calls in_powers(x vector, y vector, bytes of x before it) for this thread's vectors, and otherwise(x, y, index, row()) for
   the elements of those where it was false: many vectors later, and read from memory, so that threads have such at the same
   time. LAST: the row is not read again. */
template <bool LAST, typename F, typename G, typename R>
INLINE void each_close(const Share &share, Ring &ring, const Team &team, F in_powers, G otherwise, R row)
{
#if RESIDENT
    unsigned far = 0; /* a thread has at most 32 vectors of a row on chip */
    each_vector<false, LAST, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long before, int) {
        far = 2 * far + !in_powers(x, y, before);
    });
    each_far(share, far, [&](int steps) {
        const int lane = found_here(team.lane), each = (ring.vectors - lane + LANES - 1) / LANES, whole = share.vectors / ring.vectors;
        const int i = whole * each + (share.vectors - whole * ring.vectors - lane + LANES - 1) / LANES - steps;
        return share.first + i / each * ring.vectors + lane + i % each * LANES;
    }, otherwise, row);
#else
#pragma unroll 1
    for (int v = team.lane; v < share.vectors;) {
        unsigned far = 0;
#pragma unroll 1
        for (const int end = min(share.vectors, v + 32 * LANES); v < end; v += LANES) {
            const int i = share.head + v * WIDTH;
            far = 2 * far + !in_powers(load(share.x() + i), load(share.y() + i), v * (long long)X_BYTES);
        }
        each_far(share, far, [&](int steps) { return v - steps * LANES; }, otherwise, row);
    }
#endif
    if (share.body < (int)share.a.vocab) {
        const Row found = row();
        each_end(share, team, [&](int i) { otherwise(to_real(share.x()[i]), to_real(share.y()[i]), i, found); });
    }
}

/* Σ √(p·q) · r^k */
struct Powers {
    float sum[POWERS] = {};

    INLINE void add(float root, float r)
    {
        const float square = r * r;
        float odd = root * r;
#pragma unroll
        for (int k = 0; k < POWERS; k += 2) {
            sum[k] += odd;
            if (k + 1 < POWERS)
                sum[k + 1] = fmaf(odd, r, sum[k + 1]);
            odd *= square;
        }
    }
    INLINE void add_to(Sums &sums, const Arguments &a, float rest) const
    {
        float term = 0, difference = 0, excess = 0, of_excess = -1; /* of -2·sinh(r/2) */
#pragma unroll
        for (int k = POWERS; k >= 1; k--) {
            term += term_factor(a, k) * sum[k - 1];
            difference += difference_factor(a, k) * sum[k - 1];
        }
#pragma unroll
        for (int k = 1; k <= POWERS; k += 2) {
            excess += of_excess * sum[k - 1];
            of_excess /= 4 * (k + 1) * (k + 2);
        }
        sums.term += rest * term;
        sums.d_log_p += 0.5f * rest * (term - difference); /* their sum is term: Euler's */
        sums.d_log_q += 0.5f * rest * (term + difference);
        sums.excess += rest * excess;
    }
};
#endif

template <int VOCABULARY> INLINE void add(Sums &sums, const Element &e)
{
    sums.term += e.term;
    sums.d_log_p += e.d_log_p;
    sums.d_log_q += e.d_log_q;
    if (VOCABULARY == CLOSE)
        sums.excess += e.excess;
}

/* Of this thread's elements; where they are not apart */
template <int VOCABULARY>
INLINE Sums own_sums(const Arguments &a, const Share &share, Ring &ring, const Team &team, const Survey &survey, bool usual,
                     float correction, Parameters parameters)
{
    Sums sums;
    const Row row = row_of<VOCABULARY>(a, survey, sums, usual, correction);
    const auto take = [&](float x, float y) {
        add<VOCABULARY>(sums, element<VOCABULARY>(input_of(a, x), target_of(a, y), row, parameters));
    };
    if (VOCABULARY == GUARDED) {
        each_element<false>(share, ring, team, [&](float x, float y, int) { take(x, y); });
    } else {
        each_vector<false, false, false>(share, ring, team, [&](Packed<X> x, Packed<Y> y, long long, int) {
            each_of<VOCABULARY>([&](int k) { take(at(x, k), at(y, k)); }, x, y);
        });
        each_end(share, team, [&](int i) { take(to_real(share.x()[i]), to_real(share.y()[i])); });
    }
    return sums;
}

#if HAS_SERIES
/* The same of a row that is close, in powers */
INLINE Sums own_sums_in_powers(const Arguments &a, const Share &share, Ring &ring, const Team &team, const Near &near,
                               const Survey &survey, bool usual, float correction, Parameters parameters)
{
    Powers powers;
    Sums sums;
    each_close<false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long) {
        bool all = true;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float q = input_of(a, at(x, k)), p = target_of(a, at(y, k)), r = near.ratio(q, p);
            powers.add(near.root(q, p), near.holds(r) ? r : 0);
            all &= near.holds(r);
        }
        return all;
    }, [&](float x, float y, int i, const Row &row) {
        const float q = input_of(a, x), p = target_of(a, y);
        const bool is_added = near.holds(near.ratio(q, p)) && i >= share.head && i < share.head + share.body;
        if (!is_added)
            add<CLOSE>(sums, close_element(q, p, row, parameters));
    }, [&] { return row_of<CLOSE>(a, found_here(survey), {}, usual, correction); });
    powers.add_to(sums, a, near.rest);
    return sums;
}
#endif

template <int VOCABULARY>
INLINE Sums summed(const Arguments &a, const Share &share, Ring &ring, Team &team, const Survey &survey, bool usual, float correction,
                   Parameters parameters)
{
#if HAS_SERIES
    if (VOCABULARY == CLOSE) {
        const Near near(a, found_here(survey), usual, correction);
        const Sums sums = near.serves(share, ring, team)
            ? own_sums_in_powers(a, share, ring, team, near, survey, usual, correction, parameters)
            : own_sums<CLOSE>(a, share, ring, team, survey, usual, correction, parameters);
        return exchanged(a, ring, team, sums);
    }
#endif
    return exchanged(a, ring, team, own_sums<VOCABULARY>(a, share, ring, team, survey, usual, correction, parameters));
}

#if HAS_APART && !IS_SURVEYED
#if !HAS_SLOPE
#error "A kind has moments or slopes."
#endif
/* Whether all exponents are finite: a mass of 0 times an infinite ratio is no number. */
INLINE bool is_finite(const Survey &survey) { return IS_FORETOLD && fabsf(survey.moments[CROSS_Q]) < MOST; }

/* Of log2(p/q) among the words that q chooses: the mean is less than 0 by the divergence of p from q. */
struct Ratios {
    float mean, variance;
};

/* Where one is infinite, or they are known to vary so much that few words may be why, once more with each bounded. (So
   bounded, too, the mean's divergence is more than 2.8 times jensen_shannon.) */
INLINE Ratios foretold(const Arguments &a, const Share &share, Ring &ring, Team &team, const Survey &survey)
{
    if (!IS_FORETOLD)
        return {};
    const float inverse = tame_ratio_or_zero(1, survey.x_total), shift = log2_of(survey.x_total) - log2_of(survey.y_total);
    float mean = survey.moments[CROSS_Q] * inverse, variance = HAS_SQUARE_Q ? survey.moments[SQUARE_Q] * inverse - mean * mean : 0;
    mean += shift;
    if (!(fabsf(mean) < MOST && variance < MOST_VARIED)) {
        const float x_factor = binary(a.input_scale), y_factor = binary(a.target_scale);
        const float x_low = product(survey.x_top, x_factor), y_low = product(survey.y_top, y_factor);
        SlopeSums sums;
        const auto add = [&](float x, float y) {
            const float x_power = fmaf(x, x_factor, -x_low), ratio = fmaf(y, y_factor, -y_low) - x_power + shift;
            const float bounded = fminf(fmaxf(ratio, -MOST_BITS), MOST_BITS), part = power_of_2(x_power) * bounded;
            sums.p += part;
            if (HAS_SQUARE_Q)
                sums.q = fmaf(part, bounded, sums.q);
        };
        each_vector<false, false, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                add(input_of(a, at(x, k)), target_of(a, at(y, k)));
        });
        each_end(share, team, [&](int i) { add(input_of(a, to_real(share.x()[i])), target_of(a, to_real(share.y()[i]))); });
        sums = exchanged(a, ring, team, sums);
        mean = sums.p * inverse;
        variance = sums.q * inverse - mean * mean;
    }
    return { mean, fmaxf(variance, 0) };
}

/* The mean slope_q, were those log-ratios normally distributed: by the Gauss-Hermite rule of three nodes. It is never less
   than 0: of jensen_shannon it is the divergence of the mixture from q, of skew_kl (1 - Σ p·q/m) / (1 - a), and p·q/m is at
   most (1-a)·p + a·q. */
INLINE float expected_slope(const Arguments &a, Ratios ratios, const Row &row, Parameters parameters)
{
    const float deviation = apart_sqrt(3 * ratios.variance), mean = ratios.mean;
    const float inverse = tame_ratio_or_zero(1, binary(a.input_scale)); /* scales are equal */
    const auto slope = [&](float ratio) { /* where q's mass is 1 */
        return apart_parts(row.input_top * inverse, (row.target_top + ratio) * inverse, row, parameters).slope_q;
    };
    return fmaxf((slope(mean - deviation) + 4 * slope(mean) + slope(mean + deviation)) * (1 / 6.0f), 0);
}

/* The sums of a row that is apart, of a kind that has slopes; they are kept, if they are to be, less what is expected.
   FINITE: all exponents are. */
template <bool FINITE>
INLINE Sums summed_by_slopes(const Arguments &a, const Share &share, Ring &ring, Team &team, const Survey &survey, bool usual,
                             float expected, Parameters parameters)
{
    SlopeSums by_slope;
    const Row row = row_of<APART>(a, survey, {}, usual, 0);
    /* From a product what is expected is taken in the same instruction, and sums are of what is left. From a logarithm it is
       not, and not in sums: exchanging p and q is to exchange them, to the bit. */
    const float less = SLOPE_IS_LOG ? 0 : expected, lean = apart_affinity(row, parameters).lean;
    const auto add = [&](float x, float y) {
        Parts parts = FINITE ? apart_parts(x, y, row, parameters)
                             : apart_parts(bounded_logit(x, row.input_top, a.input_scale),
                                           bounded_logit(y, row.target_top, a.target_scale), row, parameters);
        parts.slope_q -= less;
        by_slope.p += parts.p * (HAS_LEAN ? fmaf(lean, parts.slope_q, parts.slope_p) : parts.slope_p);
        by_slope.q += parts.q * parts.slope_q;
        return parts;
    };
    each_vector<false, false, false>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long, int place) {
        float masses[WIDTH], slopes[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const float q = input_of(a, at(x, k));
            const Parts parts = add(q, target_of(a, at(y, k)));
            masses[k] = INPUT_IS_CAPPED ? parts.q * cap_slope(q, a.input_cap) : parts.q;
            slopes[k] = parts.slope_q - (expected - less);
        }
#if KEEPS_SLOPES
        keep(place, masses, slopes);
#endif
    });
    each_end(share, team, [&](int i) { add(input_of(a, to_real(share.x()[i])), target_of(a, to_real(share.y()[i]))); });
    by_slope = exchanged(a, ring, team, by_slope);
    if (IS_NARROW) { /* of masses as they were there */
        const Survey again = found_here(survey);
        by_slope.p = tame_ratio_or_zero(by_slope.p, whole_of(again.y_top, again.y_total, a.target_scale));
        by_slope.q = tame_ratio_or_zero(by_slope.q, whole_of(again.x_top, again.x_total, a.input_scale));
    }
    const Affinity common = apart_affinity(row, found_here(parameters));
    Sums sums;
    sums.d_log_p = common.factor_p * (by_slope.p + (HAS_LEAN ? common.lean * less : 0)) + common.offset_p;
    sums.d_log_q = common.factor_q * (by_slope.q + less) + common.offset_q;
    sums.term = sums.d_log_p + sums.d_log_q; /* Euler's */
    return sums;
}
#endif

/* What is upstream of a row's logits */
struct Upstream {
    float input, target;

    INLINE Upstream(const Arguments &a, float loss)
        : input(INPUT_IS_LOGITS ? loss * a.input_scale : loss), target(TARGET_IS_LOGITS ? loss * a.target_scale : loss) {}
};

template <int VOCABULARY>
INLINE void differentiate(const Arguments &a, float x, float y, const Row &row, Parameters parameters, Upstream upstream, X &input, Y &target)
{
    float q = input_of(a, x), p = target_of(a, y);
    if (VOCABULARY == APART) {
        q = bounded_logit(q, row.input_top, a.input_scale);
        p = bounded_logit(p, row.target_top, a.target_scale);
    }
    const Element e = element<VOCABULARY>(q, p, row, parameters);
    input = rounded<X>(e.input * (INPUT_IS_CAPPED ? upstream.input * cap_slope(q, a.input_cap) : upstream.input));
    target = rounded<Y>(e.target * (TARGET_IS_CAPPED ? upstream.target * cap_slope(p, a.target_cap) : upstream.target));
}

INLINE void write_element(const Share &share, X input, Y target, int i)
{
    if (WANT_INPUT)
        share.input_gradient()[i] = input;
    if (WANT_TARGET)
        share.target_gradient()[i] = target;
}

/* Where the row's vectors of gradients begin; in registers where these are to be had */
struct Places {
    X *input;
    Y *target;

    INLINE Places(const Share &share)
        : input(WANT_INPUT ? share.input_gradient() + share.head : 0), target(WANT_TARGET ? share.target_gradient() + share.head : 0)
    {
        if (RESIDENT && WANT_INPUT)
            input = found_here(input);
        if (RESIDENT && WANT_TARGET)
            target = found_here(target);
    }
    INLINE void write(const Packed<X> &input_vector, const Packed<Y> &target_vector, long long before) const
    {
        if (WANT_INPUT)
            store((X *)((unsigned char *)input + before), input_vector);
        if (WANT_TARGET)
            store((Y *)((unsigned char *)target + (X_BYTES == Y_BYTES ? before : before / X_BYTES * Y_BYTES)), target_vector);
    }
};

template <int VOCABULARY>
INLINE void write_gradients(const Arguments &a, const Share &share, Ring &ring, const Team &team, const Survey &survey, const Sums &sums,
                            bool usual, float correction, float expected, Parameters parameters, Upstream upstream)
{
    const Row row = row_of<VOCABULARY>(a, survey, sums, usual, correction);
    const auto one = [&](float x, float y, int i, const Row &row) {
        X input;
        Y target;
        differentiate<VOCABULARY>(a, x, y, row, parameters, upstream, input, target);
        write_element(share, input, target, i);
    };
    if (VOCABULARY == GUARDED) {
        each_element<true>(share, ring, team, [&](float x, float y, int i) { one(x, y, i, row); });
        return;
    }
    const Places places(share);
    each_vector<false, true, VOCABULARY == APART>(share, ring, team, [&](Packed<X> x, Packed<Y> y, long long before, int) {
        Packed<X> input;
        Packed<Y> target;
#if KEEPS_SLOPES
        if (VOCABULARY == APART) {
            const Affinity common = apart_affinity(row, found_here(parameters));
            const float of_slope = upstream.input * common.factor_q;
            const float less = upstream.input * (common.factor_q * expected + common.offset_q - row.input_sum_gradient);
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                input.element[k] = rounded<X>(flushed_product(at(x, k), fmaf(kept_slope(y, k), of_slope, less)));
        } else
#endif
            each_of<VOCABULARY>([&](int k) {
                differentiate<VOCABULARY>(a, at(x, k), at(y, k), row, parameters, upstream, input.element[k], target.element[k]);
            }, x, y, input, target);
        places.write(input, target, before);
    });
    if (share.body < (int)a.vocab) { /* where slopes are kept, nothing else wants all of the row's constants */
        const Row at_end = KEEPS_SLOPES ? row_of<VOCABULARY>(a, found_here(survey), sums, usual, correction) : row;
        each_end(share, team, [&](int i) { one(to_real(share.x()[i]), to_real(share.y()[i]), i, at_end); });
    }
}

#if HAS_SERIES
/* The same of a row that is close, in powers */
INLINE void write_gradients_in_powers(const Arguments &a, const Share &share, Ring &ring, const Team &team, const Near &near,
                                      const Survey &survey, const Sums &sums, bool usual, float correction, Parameters parameters,
                                      Upstream upstream)
{
    /* Over √(p·q), as powers of r from the 0th on: d_log_q - q·Σ d_log_q, and the same of p. 16-bit gradients need fewer. */
    enum { TERMS = IS_NARROW ? 6 : POWERS + 1 };
    float input_factor[TERMS], target_factor[TERMS], exponential = 1; /* of e^(±r/2) */
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        const float term = k ? term_factor(a, k) : 0, difference = k ? difference_factor(a, k) : 0;
        const float of_q = 0.5f * (term + difference), of_p = 0.5f * (term - difference);
        input_factor[k] = near.rest * upstream.input * (of_q - sums.d_log_q * (k % 2 ? -exponential : exponential));
        target_factor[k] = near.rest * upstream.target * (of_p - sums.d_log_p * exponential);
        exponential /= 2 * (k + 1);
    }
    const auto polynomial = [](const float *factor, float r) {
        float sum = factor[TERMS - 1];
#pragma unroll
        for (int k = TERMS - 2; k >= 0; k--)
            sum = fmaf(sum, r, factor[k]);
        return sum;
    };
    const auto differentiate_near = [&](float q, float p, X &input, Y &target) {
        const float r = near.ratio(q, p), root = near.root(q, p);
        input = rounded<X>(root * polynomial(input_factor, r) * (INPUT_IS_CAPPED ? cap_slope(q, a.input_cap) : 1));
        target = rounded<Y>(root * polynomial(target_factor, r) * (TARGET_IS_CAPPED ? cap_slope(p, a.target_cap) : 1));
        return near.holds(r);
    };
    const Places places(share);
    each_close<true>(share, ring, team, [&](const Packed<X> &x, const Packed<Y> &y, long long before) {
        Packed<X> input;
        Packed<Y> target;
        bool all = true;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            all &= differentiate_near(input_of(a, at(x, k)), target_of(a, at(y, k)), input.element[k], target.element[k]);
        if (all) /* else logits are to be read again, which the gradient may be written over */
            places.write(input, target, before);
        return all;
    }, [&](float x, float y, int i, const Row &row) {
        X input;
        Y target;
        if (!differentiate_near(input_of(a, x), target_of(a, y), input, target))
            differentiate<CLOSE>(a, x, y, row, parameters, upstream, input, target);
        write_element(share, input, target, i);
    }, [&] { return row_of<CLOSE>(a, found_here(survey), sums, usual, correction); });
}
#endif

INLINE void write_close_gradients(const Arguments &a, const Share &share, Ring &ring, const Team &team, const Survey &survey,
                                  const Sums &sums, bool usual, float correction, Parameters parameters, Upstream upstream)
{
#if HAS_SERIES
    const Near near(a, found_here(survey), usual, correction);
    if (near.serves(share, ring, team)) {
        write_gradients_in_powers(a, share, ring, team, near, survey, sums, usual, correction, parameters, upstream);
        return;
    }
#endif
    write_gradients<CLOSE>(a, share, ring, team, survey, sums, usual, correction, 0, parameters, upstream);
}

/* The row again, where masses and slopes have taken its place */
INLINE void restore(const Share &share, const Ring &ring, const Team &team)
{
#if KEEPS_SLOPES
    const X *x = share.x() + share.head + share.first * WIDTH;
    const Y *y = share.y() + share.head + share.first * WIDTH;
    each_piece(share, ring, [&](const Ring &slot, int start, int count) {
        for (int v = team.lane; v < count; v += LANES) {
            const int place = first_place(slot) + v * X_BYTES;
            put(place, *(const uint4 *)(x + (start + v) * WIDTH));
            put(beside(place), *(const uint4 *)(y + (start + v) * WIDTH));
        }
    });
    synchronize_group(team);
#endif
}

INLINE bool is_number(const Sums &sums)
{
    return fabsf(sums.term) < MOST && fabsf(sums.d_log_p) < MOST && fabsf(sums.d_log_q) < MOST;
}

INLINE Share share_of(const Arguments &a, unsigned r, unsigned rank)
{
    Share share = { a, r };
    const int misaligned = (int)((unsigned long long)share.x() % sizeof(Packed<X>) / sizeof(X)), vocab = (int)a.vocab;
    share.head = misaligned ? WIDTH - misaligned : 0;
    /* rows that are not aligned alike have no vectors; they are not resident */
    const bool together = RESIDENT || (share.head <= vocab && (unsigned long long)(share.y() + share.head) % VECTOR_BYTES == 0
        && (!WANT_INPUT || is_aligned(share.input_gradient() + share.head))
        && (!WANT_TARGET || is_aligned(share.target_gradient() + share.head)));
    const int vectors = together ? (vocab - share.head) / WIDTH : 0;
    share.body = vectors * WIDTH;
    share.first = min(vectors, a.share * (int)rank);
    share.vectors = min(vectors - share.first, a.share);
    return share;
}

#if RESIDENT
INLINE unsigned first_row(int) { return cluster_index(); }
INLINE unsigned row_step() { return cluster_count(); }
#else
INLINE unsigned first_row(int group) { return blockIdx.x * GROUPS + group; }
INLINE unsigned row_step() { return gridDim.x * GROUPS; }
#endif

INLINE double weight_of(const Arguments &a, unsigned r) { return a.weights ? (double)a.weights[r] : 1; }

/* Every `step`th row of this cluster (of this group), in order; f(row, whether it is read). A whole warp calls. */
template <typename F> INLINE void each_row(const Arguments &a, unsigned first, unsigned step, F f)
{
    for (unsigned r = first; r < a.rows; r += step * row_step()) {
        const bool is_read = agreed(weight_of(a, r) != 0);
        f(r, is_read);
    }
}

INLINE void one_row(const Arguments &a, Ring &ring, Team &team, unsigned r, Parameters parameters)
{
    const Share share = share_of(a, r, own_rank());
    Survey survey;
    Sums sums;
    int vocabulary = GUARDED;
    float correction = 0; /* of the shift between the norms */
    float expected = 0;   /* of slopes that are kept */
    const auto is_apart = [&] { /* what is left of 1 - overlap is in both partial derivatives */
        const float least = HAS_OVERLAP ? fminf(fabsf(sums.d_log_p), fabsf(sums.d_log_q)) : fabsf(sums.term);
        return agreed(least > LEAST_APART && is_number(sums));
    };
    const bool one_scale = a.input_scale == a.target_scale;
#if KNOWN
    const double *known = a.known_state + r;
    survey.x_top = (float)(known[0] / (double)a.input_scale);
    survey.x_total = (float)fabs(known[a.rows]);
    survey.y_top = (float)(known[2ll * a.rows] / (double)a.target_scale);
    survey.y_total = (float)known[3ll * a.rows];
    sums = { (float)known[4ll * a.rows], (float)known[5ll * a.rows], (float)known[6ll * a.rows] };
    if (HAS_APART && known[a.rows] > 0) {
        vocabulary = one_scale && is_apart() ? APART : CLOSE;
        /* to the bit what the sums were found with */
        survey.x_total = (float)(known[a.rows] / exp2(rounding_of(survey.x_top, a.input_scale)));
        survey.y_total = (float)(known[3ll * a.rows] / exp2(rounding_of(survey.y_top, a.target_scale)));
    }
    const bool usual = vocabulary != GUARDED;
    if (vocabulary == CLOSE)
        correction = (float)(known[2ll * a.rows] - known[0] + log_quotient_of(known[3ll * a.rows], known[a.rows]) - shift_of(a, survey, usual));
#else
    const bool usual = normalize(a, share, ring, team, survey);
#if HAS_APART
    if (usual) {
#if IS_SURVEYED
        const float x_inverse = 1 / survey.x_total, y_inverse = 1 / survey.y_total;
        const float shift = log2f(survey.x_total * y_inverse);
        /* 1 - overlap is to keep its digits */
        const float overlap_norm = a.exponent == 0.5f ? sqrtf(survey.x_total / survey.y_total) : power_of_2(a.exponent * shift);
        const float *moments = survey.moments;
        const Element whole = of_moments(HAS_CROSS_P ? y_inverse * (moments[CROSS_P] + survey.y_total * shift) * LN2 : 0,
                                         HAS_CROSS_Q ? x_inverse * (moments[CROSS_Q] + survey.x_total * shift) * LN2 : 0,
                                         HAS_OVERLAP ? moments[OVERLAP] / survey.x_total * overlap_norm : 0, parameters);
        sums = { whole.term, whole.d_log_p, whole.d_log_q };
        if (is_apart())
            vocabulary = one_scale ? APART : CLOSE;
#else
        /* To leading order the kind is 2·c₂ of the divergence that the mean is; jensen_shannon is never more than 2.8·c₂ of
           it, so that exchanging p and q changes no row's vocabulary. */
        const Ratios ratios = foretold(a, share, ring, team, survey);
        const bool seems_close = IS_FORETOLD && -3 * LN2 * term_factor(a, 2) * ratios.mean < LEAST_APART && term_factor(a, 2) != 0;
        if (one_scale && !seems_close) {
            if (KEEPS_SLOPES && IS_FORETOLD)
                expected = expected_slope(a, ratios, row_of<APART>(a, survey, {}, usual, 0), parameters);
            sums = is_finite(survey)
                ? summed_by_slopes<true>(a, share, ring, team, survey, usual, expected, parameters)
                : summed_by_slopes<false>(a, share, ring, team, survey, usual, expected, parameters);
            if (is_apart())
                vocabulary = APART;
            else
                restore(share, ring, team);
        }
#endif
        if (vocabulary == GUARDED && agreed(is_number(sums))) {
            /* The floats' shift is wrong by the excess. Smooth kinds have its square, and seldom too much of it;
               total_variation has it as it is. */
#pragma unroll 1
            for (bool again = true; again;) {
                sums = summed<CLOSE>(a, share, ring, team, survey, usual, correction, parameters);
                const float wrong = fabsf(sums.excess) * fmaxf(fabsf(sums.d_log_p), fabsf(sums.d_log_q));
                again = correction == 0 && agreed(wrong > 1e-6f * fabsf(sums.term) && is_number(sums));
                if (again)
                    correction = -sums.excess;
            }
            vocabulary = agreed(is_number(sums)) ? CLOSE : GUARDED;
        }
    }
#endif
    if (vocabulary == GUARDED)
        sums = summed<GUARDED>(a, share, ring, team, survey, usual, correction, parameters);
    if (!WANT_GRADIENT && a.state && team.lane == 0 && own_rank() == 0) { /* now, so that nothing of it is kept any longer */
        const double x_top = (double)survey.x_top * (double)a.input_scale, y_top = (double)survey.y_top * (double)a.target_scale;
        double x_total = survey.x_total * (usual ? exp2(rounding_of(survey.x_top, a.input_scale)) : 1);
        double y_total = survey.y_total * (usual ? exp2(rounding_of(survey.y_top, a.target_scale)) : 1);
        if (vocabulary == CLOSE) { /* half each: so that their quotient is the shift that was used, whichever is which */
            const double half = 0.5 * (shift_of(a, survey, usual) + correction - (y_top - x_top) - log_quotient_of(y_total, x_total));
            x_total *= exp(-half);
            y_total *= exp(half);
        }
        a.state[r] = x_top;
        /* Backward is to take guards where forward did; of the other vocabularies it finds its own. */
        a.state[a.rows + r] = HAS_APART && vocabulary == GUARDED ? -x_total : x_total;
        a.state[2ll * a.rows + r] = y_top;
        a.state[3ll * a.rows + r] = y_total;
        a.state[4ll * a.rows + r] = sums.term;
        a.state[5ll * a.rows + r] = sums.d_log_p;
        a.state[6ll * a.rows + r] = sums.d_log_q;
    }
#endif
    const Finish done = finish(sums.term, parameters);
    const double weight = weight_of(a, r); /* read again, so that no register holds it till now */
    if (team.lane == 0 && own_rank() == 0) {
        const double loss = weight * done.loss;
        results[threadIdx.x / LANES] += loss; /* the group, found again: so no register holds it */
        if (a.losses)
            a.losses[r] = rounded<LOSS>((real)loss);
    }
    if (WANT_GRADIENT) {
        const Upstream upstream(a, (float)(weight * a.scale * done.slope));
        if (vocabulary == APART)
            write_gradients<APART>(a, share, ring, team, survey, sums, usual, correction, expected, parameters, upstream);
        else if (vocabulary == CLOSE)
            write_close_gradients(a, share, ring, team, survey, sums, usual, correction, parameters, upstream);
        else
            write_gradients<GUARDED>(a, share, ring, team, survey, sums, usual, correction, 0, parameters, upstream);
    } else {
        release_row(share, ring, team);
    }
}

/* A row of weight 0 is not read: garbage in it cannot leak. */
INLINE void clear(const Arguments &a, const Team &team, unsigned r)
{
    for (unsigned i = own_rank() * LANES + team.lane; i < a.vocab; i += team.size * LANES) {
        if (WANT_INPUT)
            a.input_gradient[r * a.input_gradient_stride + i] = rounded<X>(0);
        if (WANT_TARGET)
            a.target_gradient[r * a.target_gradient_stride + i] = rounded<Y>(0);
    }
    if (team.lane == 0 && own_rank() == 0) {
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
                long long rows, long long vocab, long long x_stride, long long y_stride, long long input_gradient_stride,
                long long target_gradient_stride, double scale, double input_scale, double target_scale, double input_cap,
                double target_cap, double parameter, long long series_1, long long series_2, long long series_3,
                long long series_4, long long series_5, long long series_6, long long series_7, long long slots,
                long long slot_vectors, long long share, long long pieces, long long mail, long long barriers)
{
    Parameters parameters;
    *(real *)&parameters = (real)parameter;
    Arguments a = { x, y, input_gradient, target_gradient, weights, known_state, state, losses, total, partial, ticket,
                          (unsigned)rows, (unsigned)vocab, x_stride, y_stride, input_gradient_stride, target_gradient_stride, scale, (float)input_scale, (float)target_scale,
                    (float)input_cap, (float)target_cap, 0,
                          { series_1, series_2, series_3, series_4, series_5, series_6, series_7 },
                          (int)slots, (int)slot_vectors, (int)share, (int)pieces, (int)mail, (int)barriers };
#if IS_SURVEYED
    a.exponent = overlap_exponent(parameters);
#endif
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / LANES, 0); /* so that the compiler sees it uniform */
    Team team = { (int)threadIdx.x % LANES, group, 1 };
    Ring ring = {};
    if (threadIdx.x < GROUPS)
        results[threadIdx.x] = 0;
#if RESIDENT
    team.size = cluster_size();
    ring.count = a.slots;
    ring.vectors = a.slot_vectors;
    ring.pieces = a.pieces;
    ring.barriers = a.barriers;
    if (threadIdx.x == 0) /* full and arrived: the one that says what to expect; empty: each warp that has read */
        for (int i = 0; i < 2 * a.slots + GROUPS * MAILBOXES; i++)
            initialize(ring.barrier(i), i / a.slots == 1 ? WARPS : 1);
    synchronize_cluster();
    if (group == GROUPS) { /* the warp that fetches */
        /* Of so many rows likely tops are found at once, from logits that were asked for as many rows before: memory that is
           busy takes longer to answer than a row does. */
        Sample next = {};
        Tops tops = {};
        const unsigned lane = threadIdx.x % 32;
        const auto take_next = [&](unsigned first) {
            const unsigned r = first + lane / Sample::PARTS * row_step();
            if (r < a.rows && weight_of(a, r) != 0)
                next.take(a, r);
        };
        take_next(first_row(group));
        each_row(a, first_row(group), 1, [&](unsigned r, bool is_read) {
            const unsigned turn = team.turn++ % Sample::ROWS;
            if (turn == 0) {
                tops = next.likely_tops(a);
                take_next(r + Sample::ROWS * row_step());
            }
            if (!is_read)
                return;
            const Share share = share_of(a, r, own_rank());
            const X *x = share.x() + share.head + share.first * WIDTH;
            const Y *y = share.y() + share.head + share.first * WIDTH;
            const bool is_first = lane == 0;
            /* While the row's slots are not empty yet; of rows that are read once that is too soon. */
            if ((WANT_GRADIENT || !IS_SURVEYED) && is_first && share.vectors > 0) {
                foresee(x, (unsigned)share.vectors * (unsigned)sizeof(Packed<X>));
                foresee(y, (unsigned)share.vectors * (unsigned)sizeof(Packed<Y>));
            }
            const Tops own = { from_lane(tops.x, turn * Sample::PARTS), from_lane(tops.y, turn * Sample::PARTS) };
            if (is_first)
                each_piece(share, ring, [&](const Ring &slot, int start, int count) {
                    await(slot.empty(), slot.parity ^ 1);
                    if (start == 0)
                        *slot.tops() = own;
                    expect(slot.full(), (unsigned)max(count, 0) * (unsigned)(sizeof(Packed<X>) + sizeof(Packed<Y>)));
                    if (count > 0) {
                        copy((void *)slot.x(), x + start * WIDTH, (unsigned)count * (unsigned)sizeof(Packed<X>), slot.full());
                        copy((void *)slot.y(), y + start * WIDTH, (unsigned)count * (unsigned)sizeof(Packed<Y>), slot.full());
                    }
                });
            __syncwarp();
            ring.advance(ring.pieces);
        });
    } else {
        /* Where all rows are read, a group goes straight to its own; else it has to count those before. */
        const int step = a.weights ? 1 : GROUPS, behind = a.weights ? 0 : group;
        ring.advance_rows(behind);
        each_row(a, first_row(group) + behind * row_step(), step, [&](unsigned r, bool is_read) {
            if (!is_read) {
                if (r / row_step() % GROUPS == group)
                    clear(a, team, r);
                return;
            }
            if (step == GROUPS || team.turn++ % GROUPS == group)
                one_row(a, ring, team, r, parameters);
            ring.advance_rows(step);
        });
    }
#else
    __syncthreads(); /* results are cleared */
    each_row(a, first_row(group), 1, [&](unsigned r, bool is_read) {
        if (!is_read)
            clear(a, team, r);
        else
            one_row(a, ring, team, r, parameters);
    });
#endif
#if RESIDENT
    synchronize_cluster(); /* none leaves while another may still write to it */
#else
    __syncthreads();
#endif
    if (!WANT_SUM || !a.total || own_rank() != 0 || threadIdx.x >= 32)
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
    sum = sum_of_warp(sum);
    if (threadIdx.x == 0) {
        *a.total = rounded<LOSS>((real)(sum * a.scale));
        *a.ticket = 0;
    }
}
