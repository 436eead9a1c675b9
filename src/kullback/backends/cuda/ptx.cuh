/* PTX instructions under PTX's names, and how shared memory is declared. The only file with assembly: on a CPU
   tests/emulation/cuda/ptx.cuh takes its place. What only some architectures have is used by their kernels alone. */
#pragma once

#define INLINE __device__ __forceinline__

namespace kullback {

#define SHARED_ARRAY(type, name, count) __shared__ type name[count]

/* The block's dynamic shared memory */
INLINE unsigned char *dynamic_shared()
{
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}

INLINE float ex2_approx(float x)
{
    float result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float ex2_approx_ftz(float x)
{
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float lg2_approx_ftz(float x)
{
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float rcp_approx_ftz(float x)
{
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float sqrt_approx_ftz(float x)
{
    float result;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float max_nan(float a, float b) /* NaN stays */
{
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a > b || a != a ? a : b;
#endif
}

INLINE float mul_ftz(float a, float b)
{
    float result;
    asm("mul.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

INLINE float cvt_f32_f16(unsigned short x)
{
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
    return result;
}

INLINE unsigned short cvt_rn_f16_f32(float x)
{
    unsigned short result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
    return result;
}

INLINE unsigned short cvt_rn_bf16_f32(float x)
{
#if __CUDA_ARCH__ >= 800
    unsigned short result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(x));
    return result;
#else
    const unsigned word = __float_as_uint(x), rounded = (word + 0x7fffu + (word >> 16 & 1)) >> 16;
    return (unsigned short)(x != x ? 0x7fffu : rounded);
#endif
}

/* The larger ones of two pairs; NaN stays */
INLINE unsigned max_nan_bf16x2(unsigned a, unsigned b)
{
#if __CUDA_ARCH__ >= 800
    unsigned result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    const float low = max_nan(__uint_as_float(a << 16), __uint_as_float(b << 16));
    const float high = max_nan(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u));
    return __float_as_uint(high) | __float_as_uint(low) >> 16;
#endif
}

INLINE unsigned max_nan_f16x2(unsigned a, unsigned b)
{
#if __CUDA_ARCH__ >= 800
    unsigned result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    const float low = max_nan(cvt_f32_f16((unsigned short)a), cvt_f32_f16((unsigned short)b));
    const float high = max_nan(cvt_f32_f16((unsigned short)(a >> 16)), cvt_f32_f16((unsigned short)(b >> 16)));
    return (unsigned)cvt_rn_f16_f32(high) << 16 | cvt_rn_f16_f32(low);
#endif
}

/* Two halves, which stay finite */
INLINE unsigned cvt_rn_satfinite_f16x2(float high, float low)
{
#if __CUDA_ARCH__ >= 800
    unsigned result;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    const auto finite = [](float x) { return x > 65504 ? 65504 : x < -65504 ? -65504 : x; };
    return (unsigned)cvt_rn_f16_f32(finite(high)) << 16 | cvt_rn_f16_f32(finite(low));
#endif
}

/* The same number, but not to be computed, with what follows from it, before a loop: registers would keep it in there. */
INLINE float opaque(float x)
{
    asm volatile("" : "+f"(x));
    return x;
}

INLINE int opaque(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

template <typename T> INLINE T *opaque(T *p)
{
    asm volatile("" : "+l"(p));
    return p;
}

/* A barrier of so many threads of a block, one of sixteen */
template <int COUNT> INLINE void bar_sync(int barrier)
{
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(COUNT) : "memory");
}

INLINE unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

INLINE uint4 ld_shared_v4(int address)
{
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address));
    return x;
}

INLINE void st_shared_v4(int address, uint4 x)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

/* From global to shared memory, so many bytes, a multiple of 16 as both addresses are; before sm_80 at once */
template <int BYTES> INLINE void cp_async(int to, const void *from)
{
#pragma unroll
    for (int i = 0; i < BYTES; i += 16)
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + i), "l"((const char *)from + i) : "memory");
#else
        st_shared_v4(to + i, __ldg((const uint4 *)((const char *)from + i)));
#endif
}

INLINE void cp_async_commit()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Until all but so many of the groups that were committed are there */
template <int COUNT> INLINE void cp_async_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(COUNT) : "memory");
#endif
}

/* Blocks of a cluster, from sm_90 on */

INLINE unsigned cluster_ctarank()
{
    unsigned result;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(result));
    return result;
}

INLINE unsigned cluster_nctarank()
{
    unsigned result;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(result));
    return result;
}

INLINE unsigned clusterid()
{
    unsigned result;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(result));
    return result;
}

INLINE unsigned nclusterid()
{
    unsigned result;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(result));
    return result;
}

INLINE void barrier_cluster()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Barriers in shared memory */

typedef unsigned long long Mbarrier;

INLINE void mbarrier_init(Mbarrier *barrier, unsigned arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

INLINE void mbarrier_arrive(Mbarrier *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

INLINE void mbarrier_arrive_expect_tx(Mbarrier *barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

/* Without a hint of how long to sleep: with one, each copy that arrives wakes a warp, and its polls take a tenth of all issue slots
   (docs/lab-notebook.md). */
INLINE void mbarrier_wait(Mbarrier *barrier, unsigned phase)
{
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "\t@!done bra again;\n\t}"
                 :: "r"(shared_address(barrier)), "r"(phase)
                 : "memory");
}

/* The same for what other blocks stored */
INLINE void mbarrier_wait_cluster(Mbarrier *barrier, unsigned phase)
{
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "\t@!done bra again;\n\t}"
                 :: "r"(shared_address(barrier)), "r"(phase)
                 : "memory");
}

/* What this thread wrote to shared memory comes before bulk copies into it that a barrier orders after. */
INLINE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* To and from memory that several devices see */
INLINE void st_relaxed_sys(unsigned long long *address, unsigned long long x)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(address), "l"(x) : "memory");
}

INLINE unsigned long long ld_relaxed_sys(const unsigned long long *address)
{
    unsigned long long result;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(result) : "l"(address) : "memory");
    return result;
}

INLINE unsigned long long globaltimer() /* nanoseconds */
{
    unsigned long long result;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(result));
    return result;
}

INLINE void trap() { asm volatile("trap;"); }

/* How long the second-level cache is to keep what is read */
INLINE unsigned long long createpolicy_evict_first()
{
    unsigned long long result;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(result));
    return result;
}

INLINE unsigned long long createpolicy_evict_normal()
{
    unsigned long long result;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(result));
    return result;
}

/* From global to shared memory; bytes and both addresses are multiples of 16. */
INLINE void cp_async_bulk(void *to, const void *from, unsigned bytes, Mbarrier *barrier, unsigned long long policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

/* True of one thread of the warp, all of which have come here. The compiler knows that it is one: a bulk copy's operands need no loop
   over threads. */
INLINE bool elect_sync()
{
    unsigned is_elected;
    asm volatile("{\n\t.reg .pred elected;\n\telect.sync _|elected, 0xffffffff;\n\tselp.u32 %0, 1, 0, elected;\n\t}" : "=r"(is_elected));
    return is_elected;
}

/* To the second-level cache alone */
INLINE void cp_async_bulk_prefetch_L2(const void *from, unsigned bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

/* To the same address in the shared memory of that block of the cluster; counted by the barrier there */
INLINE void st_async(float4 *address, Mbarrier *barrier, float4 value, unsigned rank)
{
    asm volatile("{\n\t.reg .b32 place, barrier;\n"
                 "\tmapa.shared::cluster.u32 place, %0, %2;\n"
                 "\tmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "\tst.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [place], {%3, %4, %5, %6}, [barrier];\n\t}"
                 :: "r"(shared_address(address)), "r"(shared_address(barrier)), "r"(rank), "r"(__float_as_uint(value.x)),
                    "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)), "r"(__float_as_uint(value.w))
                 : "memory");
}

}
