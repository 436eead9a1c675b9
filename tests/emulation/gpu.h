/* What a CUDA kernel wants of the GPU, on a CPU: a block's threads are fibers, switched where they wait for each other;
   blocks run one after another. For kernels without clusters. Numbers of the special-function unit are libm's. */

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_expect(x, y) (x)

struct Index { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };

namespace gpu {
enum { MOST_THREADS = 1024, STACK = 1 << 16, WARP = 32 };

struct Barrier { int arrived, turn; };

static ucontext_t host, fibers[MOST_THREADS];
static char *stacks;
static bool done[MOST_THREADS];
static int current, threads;
static void (*body)();
static Barrier of_block, of_warp[MOST_THREADS / WARP], named[16];
static unsigned long long slots[MOST_THREADS];
alignas(128) static unsigned char shared[232448];
static Index block, grid;

static void yield() { swapcontext(&fibers[current], &host); }

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

static void fiber()
{
    body();
    done[current] = true;
    swapcontext(&fibers[current], &host);
}

/* Runs a kernel; false where its threads wait for each other for ever. */
template <typename F> static bool launch(int blocks, int block_threads, F kernel)
{
    static const F *launched;
    launched = &kernel;
    body = [] { (*launched)(); };
    if (!stacks)
        stacks = (char *)malloc((size_t)MOST_THREADS * STACK);
    threads = block_threads;
    grid.x = (unsigned)blocks;
    for (int b = 0; b < blocks; b++) {
        block.x = (unsigned)b;
        memset(shared, 0xff, sizeof shared); /* NaN: nothing may count on what another block left */
        memset(of_warp, 0, sizeof of_warp);
        memset(named, 0, sizeof named);
        of_block = {};
        for (int t = 0; t < threads; t++) {
            done[t] = false;
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = stacks + (size_t)t * STACK;
            fibers[t].uc_stack.ss_size = STACK;
            fibers[t].uc_link = &host;
            makecontext(&fibers[t], fiber, 0);
        }
        long idle = 0;
        for (int left = threads; left;) {
            if (++idle > 1000000)
                return false;
            for (int t = 0; t < threads; t++)
                if (!done[t]) {
                    current = t;
                    swapcontext(&host, &fibers[t]);
                    left -= done[t];
                }
        }
    }
    return true;
}

/* The value that another lane brings; all lanes of the warp call. */
template <typename T> static T from_lane(T value, int other)
{
    static_assert(sizeof(T) <= sizeof slots[0]);
    const int first = current / WARP * WARP;
    memcpy(&slots[current], &value, sizeof value);
    wait(of_warp[current / WARP], WARP);
    T result;
    memcpy(&result, &slots[first + other], sizeof result);
    wait(of_warp[current / WARP], WARP);
    return result;
}

template <typename To, typename From> static To bits_of(From x)
{
    To result;
    memcpy(&result, &x, sizeof result);
    return result;
}
}

#define threadIdx (Index { (unsigned)gpu::current })
#define blockIdx gpu::block
#define gridDim gpu::grid
#define __syncthreads() gpu::wait(gpu::of_block, gpu::threads)
#define __syncwarp() gpu::wait(gpu::of_warp[gpu::current / 32], 32)
#define __shfl_xor_sync(mask, x, step) gpu::from_lane(x, gpu::current % 32 ^ (step))
#define __shfl_sync(mask, x, lane) gpu::from_lane(x, lane)
#define __threadfence()
#define __ldcg(p) (*(p))
#define __ldg(p) (*(p))
#define __stcs(p, value) (*(p) = (value))
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
static inline bool __all_sync(unsigned, bool x)
{
    for (int step = 16; step; step /= 2)
        x = x & __shfl_xor_sync(0, x, step);
    return x;
}
static void __assertfail(const char *message, const char *, unsigned, const char *, size_t) { fputs(message, stderr); abort(); }
using std::max;
using std::min;

/* Instructions that kernels name themselves */
static inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x; }
static inline float ptx_ex2_approx_f32(float x) { return exp2f(x); }
static inline float ptx_ex2_approx_ftz_f32(float x) { return flushed(exp2f(flushed(x))); }
/* with the mean error of an H200's that grows with the logarithm (docs/numerics.md): kernels take it off */
static inline float ptx_lg2_approx_ftz_f32(float x) { return (float)(log2(flushed(x)) * (1 - 4.6e-8)); }
static inline float ptx_rcp_approx_ftz_f32(float x) { return flushed(1 / flushed(x)); }
static inline float ptx_sqrt_approx_ftz_f32(float x) { return sqrtf(flushed(x)); }
static inline float ptx_max_NaN_f32(float x, float y) { return x != x ? x : y != y ? y : x > y ? x : y; }
static inline float ptx_mul_ftz_f32(float x, float y) { return flushed(flushed(x) * flushed(y)); }
static inline float ptx_cvt_f32_f16(unsigned short x) { return (float)gpu::bits_of<_Float16>(x); }
static inline unsigned short ptx_cvt_rn_f16_f32(float x) { return gpu::bits_of<unsigned short>((_Float16)x); }
static inline unsigned halves_of(float high, float low)
{
    const auto half = [](float x) { return (unsigned)ptx_cvt_rn_f16_f32(x > 65504 ? 65504 : x < -65504 ? -65504 : x); };
    return half(high) << 16 | half(low);
}
static inline unsigned short ptx_cvt_rn_bf16_f32(float x)
{
    const unsigned word = gpu::bits_of<unsigned>(x);
    return x != x ? 0x7fff : (unsigned short)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
