/* What the threads of a row, of all its blocks, tell one another. */

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
    static_assert(COUNT <= KEPT && COUNT * sizeof(float) <= LETTER_BYTES && MAX_CLUSTER <= EACH);
    const unsigned place = (unsigned)found_here(team.lane), lane = place % 32;
    const unsigned rank = own_rank(); /* early: it takes long to answer */
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
    const unsigned exchanges = (unsigned)found_here((int)team.exchanges);
    const unsigned mailbox = (unsigned)team.group * MAILBOXES + exchanges % MAILBOXES;
    float *mail = (float *)((unsigned char *)memory + a.mail + mailbox * letters * LETTER_BYTES);
    mail += min(lane / EACH, COUNT - 1u) * letters; /* of this lane's value */
    const bool is_sent = lane / EACH < COUNT;
#if RESIDENT
    if (size > 1) {
        unsigned long long *arrived = ring.arrived(mailbox);
        if (place == 0)
            expect(arrived, letters * COUNT * (unsigned)sizeof(float));
        if (is_sent && lane % EACH < size)
            send(mail + rank * WARPS + warp, arrived, (float)mine, lane % EACH);
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
    if (lane % EACH < size) { /* a lane reads what a block sent, and merges pairs: one large letter is not to swallow small ones */
        struct alignas(WARPS % 4 == 0 ? 16 : WARPS % 2 == 0 ? 8 : 4) Letters {
            float letter[WARPS];
        };
        const Letters sent = *(const Letters *)(mail + lane % EACH * WARPS);
        WIDE merged[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            merged[w] = sent.letter[w];
#pragma unroll
        for (int step = 1; step < WARPS; step *= 2)
#pragma unroll
            for (int w = 0; w + step < WARPS; w += 2 * step)
                merged[w] = merge(merged[w], merged[w + step]);
        mine = merged[0];
    }
#pragma unroll
    for (int step = MAX_CLUSTER / 2; step; step /= 2)
        mine = merge(mine, shuffled(mine, step));
#endif
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = from_lane((float)mine, k * EACH);
}

/* Σ of terms and of their partial derivatives; or of other things */
struct Sums {
    float term = 0, d_log_p = 0, d_log_q = 0;
    float excess = 0; /* of q's mass over p's: the error of the shift between their norms, to first order */
};

/* Σ p · slope_p and Σ q · slope_q */
struct SlopeSums {
    float p = 0, q = 0;
};

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
