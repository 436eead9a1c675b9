/* What blocks of a cluster, and threads of a block, tell one another through shared memory (sm_90 and later):
   bulk copies that arrive at a barrier, and words sent to a neighbour's shared memory. */

INLINE unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

INLINE unsigned cluster_rank()
{
    unsigned result;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(result));
    return result;
}

INLINE unsigned cluster_size()
{
    unsigned result;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(result));
    return result;
}

INLINE unsigned cluster_index()
{
    unsigned result;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(result));
    return result;
}

INLINE unsigned cluster_count()
{
    unsigned result;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(result));
    return result;
}

INLINE void synchronize_cluster()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

INLINE void initialize(unsigned long long *barrier, unsigned arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

INLINE void arrive(unsigned long long *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

INLINE void expect(unsigned long long *barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

/* The hint, in nanoseconds, keeps a warp that waits from polling: those polls took issue slots from the others. */
INLINE void await(unsigned long long *barrier, unsigned parity)
{
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 1000000;\n"
                 "\t@!done bra again;\n\t}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

/* The same for what other blocks sent */
INLINE void await_cluster(unsigned long long *barrier, unsigned parity)
{
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1, 1000000;\n"
                 "\t@!done bra again;\n\t}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

/* To be loaded again by `fetched` */
INLINE void put(int place, uint4 value)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(place), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

/* What this thread wrote to shared memory, before copies that are told of it by a barrier */
INLINE void order_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* bytes: a multiple of 16; both addresses too */
INLINE void copy(void *to, const void *from, unsigned bytes, unsigned long long *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

/* To the second-level cache alone, of where `copy` will take them from */
INLINE void foresee(const void *from, unsigned bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

/* To the same place in the shared memory of that block of the cluster; counted by the barrier there */
INLINE void send(float *place, unsigned long long *barrier, float value, unsigned rank)
{
    asm volatile("{\n\t.reg .b32 place, barrier;\n"
                 "\tmapa.shared::cluster.u32 place, %0, %2;\n"
                 "\tmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "\tst.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %3, [barrier];\n\t}"
                 :: "r"(shared_address(place)), "r"(shared_address(barrier)), "r"(rank), "r"(__float_as_uint(value))
                 : "memory");
}
