/* Where a row's logits lie, and loops over a thread's part of them. */

/* Largest logits; NaN, if there is one */
struct alignas(8) Tops {
    float x, y;
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
    const int ends = (int)share.a.vocab - found_here(share.body);
#pragma unroll 1
    for (int i = team.lane; i < ends; i += LANES)
        if (own_rank() == 0) /* asked last: it takes long to answer, and most rows have no ends */
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
