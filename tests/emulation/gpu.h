/* What a CUDA kernel wants of CUDA, on a CPU: the threads of a cluster's blocks are fibers, switched where they wait for
   each other; clusters run one after another. PTX is in cuda/ptx.cuh. */
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_expect(x, y) (x)

struct Index { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

namespace gpu {
/* BASE: what lies in a block's shared memory before a kernel's dynamic part; so no offset passes for an address. */
enum { MOST_THREADS = 1024, MOST_BLOCKS = 16, STACK = 1 << 16, WARP = 32, BASE = 1152 };

struct Barrier { int arrived, turn; };

/* Of 16 bytes to shared memory. A thread's are done when it waits for their group, and no sooner. */
struct Copy { uint4 *to; const uint4 *from; };
using Copies = std::vector<Copy>;

struct Block {
    jmp_buf fibers[MOST_THREADS];
    bool has_fiber[MOST_THREADS], done[MOST_THREADS];
    Barrier whole, of_lanes[MOST_THREADS], named[16];
    unsigned long long slots[MOST_THREADS];
    Copies asked_for[MOST_THREADS];
    std::vector<Copies> committed[MOST_THREADS];
    alignas(128) unsigned char shared[232448];
};

static jmp_buf host;
static char *stacks;
static Block blocks[MOST_BLOCKS]; /* of the cluster */
static int rank, current, cluster, threads; /* the block that runs, its thread; blocks of a cluster, threads of a block */
static void (*body)();
static Barrier of_cluster;
static Index first, grid;

static Block &own() { return blocks[rank]; }

/* 16 bytes of the block's shared memory, by address */
static uint4 *vector_at(int address)
{
    if (address < BASE || address % 16 || address + 16 > BASE + (int)sizeof own().shared)
        abort();
    return (uint4 *)(own().shared + address - BASE);
}

static void yield()
{
    if (!_setjmp(own().fibers[current]))
        _longjmp(host, 1);
}

static void wait(Barrier &barrier, int count)
{
    const int turn = barrier.turn;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.turn++;
        return;
    }
    while (barrier.turn == turn)
        yield();
}

/* A thread of each launch */
static void fiber()
{
    for (;;) {
        body();
        own().done[current] = true;
        yield();
    }
}

/* Lets the thread run until it waits. Contexts serve to begin with a stack; to switch by them would ask the kernel for signals' masks. */
__attribute__((noinline)) static void resume()
{
    if (_setjmp(host))
        return;
    if (own().has_fiber[current])
        _longjmp(own().fibers[current], 1);
    own().has_fiber[current] = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + ((size_t)rank * MOST_THREADS + (size_t)current) * STACK;
    context.uc_stack.ss_size = STACK;
    makecontext(&context, fiber, 0);
    setcontext(&context);
}

static void begin(Block &block)
{
    memset(block.shared, 0xff, sizeof block.shared); /* NaN: nothing may count on what another block left */
    memset(block.of_lanes, 0, sizeof block.of_lanes);
    memset(block.named, 0, sizeof block.named);
    block.whole = {};
    for (int t = 0; t < threads; t++) {
        block.done[t] = false;
        block.asked_for[t].clear();
        block.committed[t].clear();
    }
}

/* Runs a kernel; false where its threads wait for each other for ever. */
template <typename F> static bool launch(int clusters, int cluster_blocks, int block_threads, F kernel)
{
    static const F *launched;
    launched = &kernel;
    body = [] { (*launched)(); };
    if (!stacks)
        stacks = (char *)malloc((size_t)MOST_BLOCKS * MOST_THREADS * STACK);
    cluster = cluster_blocks;
    threads = block_threads;
    grid.x = (unsigned)(clusters * cluster);
    for (first.x = 0; first.x < grid.x; first.x += (unsigned)cluster) {
        of_cluster = {};
        for (int b = 0; b < cluster; b++)
            begin(blocks[b]);
        long idle = 0;
        for (int left = cluster * threads; left;) {
            if (++idle > 1000000) {
                for (Block &block : blocks) /* whose threads are left where they are */
                    memset(block.has_fiber, 0, sizeof block.has_fiber);
                return false;
            }
            for (rank = 0; rank < cluster; rank++)
                for (current = 0; current < threads; current++)
                    if (!own().done[current]) {
                        resume();
                        left -= own().done[current];
                    }
        }
    }
    return true;
}

/* The lanes of the mask wait for each other. */
static void meet(unsigned mask)
{
    if (!(mask >> current % WARP & 1))
        abort();
    wait(own().of_lanes[current / WARP * WARP + __builtin_ctz(mask)], __builtin_popcount(mask));
}

/* The value that another lane brings; all lanes of the mask call. */
template <typename T> static T from_lane(unsigned mask, T value, int other)
{
    if (!(mask >> other & 1))
        abort();
    auto &slots = own().slots;
    static_assert(sizeof(T) <= sizeof slots[0]);
    memcpy(&slots[current], &value, sizeof value);
    meet(mask);
    T result;
    memcpy(&result, &slots[current / WARP * WARP + other], sizeof result);
    meet(mask);
    return result;
}

/* An array in shared memory: each block of the cluster has its own */
template <typename T, int COUNT> struct PerBlock {
    T of[MOST_BLOCKS][COUNT];
    T &operator[](unsigned i) { return of[rank][i]; }
};

template <typename To, typename From> static To bits_of(From x)
{
    To result;
    memcpy(&result, &x, sizeof result);
    return result;
}
}

#define threadIdx (Index { (unsigned)gpu::current })
#define blockIdx (Index { gpu::first.x + (unsigned)gpu::rank })
#define gridDim gpu::grid
#define __syncthreads() gpu::wait(gpu::own().whole, gpu::threads)
static inline void __syncwarp(unsigned mask = ~0u) { gpu::meet(mask); }
template <typename T> static T __shfl_xor_sync(unsigned mask, T x, int step) { return gpu::from_lane(mask, x, gpu::current % 32 ^ step); }
template <typename T> static T __shfl_sync(unsigned mask, T x, int lane, int width = 32)
{
    return gpu::from_lane(mask, x, gpu::current % 32 / width * width + lane % width);
}
#define __threadfence()
#define __ldcg(p) (*(p))
/* A vector lies on its size: else a device stops. */
template <typename T> static T *aligned(T *p)
{
    if ((uintptr_t)p % sizeof(T))
        abort();
    return p;
}
#define __ldg(p) (*aligned(p))
#define __ldcs(p) (*(p))
#define __stcs(p, value) (*aligned(p) = (value))
#define __float_as_uint(x) gpu::bits_of<unsigned>((float)(x))
#define __uint_as_float(x) gpu::bits_of<float>((unsigned)(x))
#define __int_as_float(x) gpu::bits_of<float>((int)(x))
#define __double_as_longlong(x) gpu::bits_of<long long>((double)(x))
#define __longlong_as_double(x) gpu::bits_of<double>((long long)(x))
#define __fsqrt_rn(x) sqrtf(x)

static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; /* NaN: 0 */ }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by)
{
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31));
}
__attribute__((noinline)) static float __fmul_rn(float x, float y) { return x * y; } /* not contracted */
template <typename T> static T atomicAdd(T *p, T x) { const T before = *p; *p += x; return before; }
static inline unsigned atomicOr(unsigned *p, unsigned x) { const unsigned before = *p; *p |= x; return before; }
static inline unsigned __ballot_sync(unsigned mask, bool x)
{
    const int first = gpu::current / 32 * 32;
    unsigned bits = 0;
    gpu::own().slots[gpu::current] = x;
    gpu::meet(mask);
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            bits |= (unsigned)gpu::own().slots[first + lane] << lane;
    gpu::meet(mask);
    return bits;
}
static inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == mask; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static void __assertfail(const char *message, const char *, unsigned, const char *, size_t) { fputs(message, stderr); abort(); }
using std::max;
using std::min;
