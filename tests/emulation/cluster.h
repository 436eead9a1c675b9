/* What cluster.cuh is: its barriers as counters, its copies at once. What a copy engine would refuse, or a barrier count
   wrongly, aborts. */

INLINE unsigned cluster_rank() { return (unsigned)gpu::rank; }
INLINE unsigned cluster_size() { return (unsigned)gpu::cluster; }
INLINE unsigned cluster_index() { return gpu::first.x / cluster_size(); }
INLINE unsigned cluster_count() { return gridDim.x / cluster_size(); }
INLINE void synchronize_cluster() { gpu::wait(gpu::of_cluster, gpu::cluster * gpu::threads); }

struct Barrier {
    short pending, arrivals;
    int bytes : 31;
    unsigned phase : 1;

    void settle()
    {
        if (pending == 0 && bytes == 0) {
            pending = arrivals;
            phase ^= 1;
        }
    }
    void arrive(int expected)
    {
        if (pending-- <= 0)
            abort();
        bytes += expected;
        settle();
    }
};
static_assert(sizeof(Barrier) == sizeof(unsigned long long));

INLINE void initialize(unsigned long long *barrier, unsigned arrivals)
{
    *(Barrier *)barrier = { (short)arrivals, (short)arrivals, 0, 0 };
}
INLINE void arrive(unsigned long long *barrier) { ((Barrier *)barrier)->arrive(0); }
INLINE void expect(unsigned long long *barrier, unsigned bytes) { ((Barrier *)barrier)->arrive((int)bytes); }
INLINE void await(unsigned long long *barrier, unsigned parity)
{
    while (((Barrier *)barrier)->phase == parity)
        gpu::yield();
}
INLINE void await_cluster(unsigned long long *barrier, unsigned parity) { await(barrier, parity); }

INLINE unsigned shared_address(const void *p) { return (unsigned)((const unsigned char *)p - gpu::own().shared) + gpu::BASE; }
INLINE void put(int place, uint4 value) { *gpu::vector_at(place) = value; }
INLINE void order_before_copies() {}
INLINE void copy(void *to, const void *from, unsigned bytes, unsigned long long *barrier)
{
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16)
        abort();
    memcpy(to, from, bytes);
    ((Barrier *)barrier)->bytes -= (int)bytes;
    ((Barrier *)barrier)->settle();
}
INLINE void foresee(const void *from, unsigned bytes)
{
    if ((uintptr_t)from % 16 || bytes % 16)
        abort();
}
INLINE void send(float *place, unsigned long long *barrier, float value, unsigned rank)
{
    unsigned char *there = gpu::blocks[rank].shared - gpu::BASE;
    *(float *)(there + shared_address(place)) = value;
    Barrier *counter = (Barrier *)(there + shared_address(barrier));
    counter->bytes -= (int)sizeof value;
    counter->settle();
}
