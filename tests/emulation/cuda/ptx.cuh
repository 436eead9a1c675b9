/* cuda/ptx.cuh on a CPU: the special functions are libm's, barriers are counters, copies come at once. What a copy engine would
   refuse, or a barrier count wrongly, aborts. */
#pragma once

#include <ctime>

#include "gpu.h"

#define INLINE inline

namespace kullback {

#define SHARED_ARRAY(type, name, count) static gpu::PerBlock<type, count> name

INLINE unsigned char *dynamic_shared() { return gpu::own().shared; }

INLINE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x; }
INLINE float ex2_approx(float x) { return exp2f(x); }
INLINE float ex2_approx_ftz(float x) { return flushed(exp2f(flushed(x))); }
/* with the mean error of an H200's that grows with the logarithm (docs/numerics.md): kernels take it off */
INLINE float lg2_approx_ftz(float x) { return (float)(log2(flushed(x)) * (1 - 4.6e-8)); }
INLINE float rcp_approx_ftz(float x) { return flushed(1 / flushed(x)); }
INLINE float sqrt_approx_ftz(float x) { return sqrtf(flushed(x)); }
INLINE float max_nan(float x, float y) { return x != x ? x : y != y ? y : x > y ? x : y; }
INLINE float mul_ftz(float x, float y) { return flushed(flushed(x) * flushed(y)); }
INLINE float cvt_f32_f16(unsigned short x) { return (float)gpu::bits_of<_Float16>(x); }
INLINE unsigned short cvt_rn_f16_f32(float x) { return gpu::bits_of<unsigned short>((_Float16)x); }
INLINE unsigned short cvt_rn_bf16_f32(float x)
{
    const unsigned word = gpu::bits_of<unsigned>(x);
    return x != x ? 0x7fff : (unsigned short)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
INLINE unsigned max_nan_bf16x2(unsigned a, unsigned b)
{
    const auto real = [](unsigned x) { return gpu::bits_of<float>(x); };
    const unsigned low = gpu::bits_of<unsigned>(max_nan(real(a << 16), real(b << 16)));
    return gpu::bits_of<unsigned>(max_nan(real(a & 0xffff0000u), real(b & 0xffff0000u))) | low >> 16;
}
INLINE unsigned max_nan_f16x2(unsigned a, unsigned b)
{
    const auto real = [](unsigned x) { return cvt_f32_f16((unsigned short)x); };
    const unsigned low = cvt_rn_f16_f32(max_nan(real(a), real(b)));
    return (unsigned)cvt_rn_f16_f32(max_nan(real(a >> 16), real(b >> 16))) << 16 | low;
}
INLINE unsigned cvt_rn_satfinite_f16x2(float high, float low)
{
    const auto half = [](float x) { return (unsigned)cvt_rn_f16_f32(x > 65504 ? 65504 : x < -65504 ? -65504 : x); };
    return half(high) << 16 | half(low);
}

template <typename T> INLINE T opaque(T x)
{
    asm volatile("" : "+m"(x));
    return x;
}

template <int COUNT> INLINE void bar_sync(int barrier) { gpu::wait(gpu::own().named[barrier], COUNT); }

INLINE unsigned shared_address(const void *p) { return (unsigned)((const unsigned char *)p - gpu::own().shared) + gpu::BASE; }
INLINE uint4 ld_shared_v4(int address) { return *gpu::vector_at(address); }
INLINE void st_shared_v4(int address, uint4 value) { *gpu::vector_at(address) = value; }

template <int BYTES> INLINE void cp_async(int to, const void *from)
{
    for (int i = 0; i < BYTES; i += 16)
        gpu::own().asked_for[gpu::current].push_back({ gpu::vector_at(to + i), aligned((const uint4 *)((const char *)from + i)) });
}
INLINE void cp_async_commit()
{
    gpu::Copies &copies = gpu::own().asked_for[gpu::current];
    gpu::own().committed[gpu::current].push_back(copies);
    copies.clear();
}
template <int COUNT> INLINE void cp_async_wait()
{
    auto &groups = gpu::own().committed[gpu::current];
    for (; groups.size() > COUNT; groups.erase(groups.begin()))
        for (const gpu::Copy &copy : groups[0])
            *copy.to = *copy.from;
}

INLINE unsigned cluster_ctarank() { return (unsigned)gpu::rank; }
INLINE unsigned cluster_nctarank() { return (unsigned)gpu::cluster; }
INLINE unsigned clusterid() { return gpu::first.x / cluster_nctarank(); }
INLINE unsigned nclusterid() { return gridDim.x / cluster_nctarank(); }
INLINE void barrier_cluster() { gpu::wait(gpu::of_cluster, gpu::cluster * gpu::threads); }

struct Mbarrier {
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
    void complete(unsigned count)
    {
        bytes -= (int)count;
        settle();
    }
};
static_assert(sizeof(Mbarrier) == 8);

INLINE void mbarrier_init(Mbarrier *barrier, unsigned arrivals) { *barrier = { (short)arrivals, (short)arrivals, 0, 0 }; }
INLINE void mbarrier_arrive(Mbarrier *barrier) { barrier->arrive(0); }
INLINE void mbarrier_arrive_expect_tx(Mbarrier *barrier, unsigned bytes) { barrier->arrive((int)bytes); }
INLINE void mbarrier_wait(Mbarrier *barrier, unsigned phase)
{
    while (barrier->phase == phase)
        gpu::yield();
}
INLINE void mbarrier_wait_cluster(Mbarrier *barrier, unsigned phase) { mbarrier_wait(barrier, phase); }
INLINE void fence_proxy_async() {}
INLINE bool elect_sync()
{
    __syncwarp();
    return threadIdx.x % 32 == 0;
}

/* Another process may be the other rank. */
INLINE void st_relaxed_sys(unsigned long long *address, unsigned long long x) { __atomic_store_n(address, x, __ATOMIC_RELAXED); }
INLINE unsigned long long ld_relaxed_sys(const unsigned long long *address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }
INLINE unsigned long long globaltimer() { return (unsigned long long)time(nullptr) * 1000000000; }

INLINE void trap() { abort(); }

INLINE unsigned long long createpolicy_evict_first() { return 0; }
INLINE unsigned long long createpolicy_evict_normal() { return 0; }
INLINE void cp_async_bulk(void *to, const void *from, unsigned bytes, Mbarrier *barrier, unsigned long long)
{
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16)
        abort();
    memcpy(to, from, bytes);
    barrier->complete(bytes);
}
INLINE void cp_async_bulk_prefetch_L2(const void *from, unsigned bytes)
{
    if ((uintptr_t)from % 16 || bytes % 16)
        abort();
}
INLINE void st_async(float4 *address, Mbarrier *barrier, float4 value, unsigned rank)
{
    unsigned char *there = gpu::blocks[rank].shared - gpu::BASE;
    *(float4 *)(there + shared_address(address)) = value;
    ((Mbarrier *)(there + shared_address(barrier)))->complete(sizeof value);
}

}
