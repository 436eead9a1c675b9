/* Element types, and WIDTH of them at a time in 16-byte accesses: read-only loads, streaming stores. */
#pragma once

#include "cuda/math.cuh"

namespace kullback {

typedef struct { unsigned short bits; } bfloat16;
typedef struct { unsigned short bits; } float16;

INLINE real to_real(float x) { return (real)x; }
INLINE real to_real(double x) { return (real)x; }
INLINE real to_real(bfloat16 x) { return (real)__uint_as_float((unsigned)x.bits << 16); }
INLINE real to_real(float16 x) { return (real)cvt_f32_f16(x.bits); }

INLINE void from_real(real x, float &result) { result = (float)x; }
INLINE void from_real(real x, double &result) { result = (double)x; }
INLINE void from_real(real x, bfloat16 &result) { result.bits = cvt_rn_bf16_f32((float)x); }
INLINE void from_real(real x, float16 &result) { result.bits = cvt_rn_f16_f32((float)x); }

template <typename T> INLINE T rounded(real x)
{
    T result;
    from_real(x, result);
    return result;
}

/* WIDTH elements as they lie in memory: in 16-byte accesses, or in one smaller */
template <typename T> struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Packed {
    T element[WIDTH];
};

template <typename T> INLINE real at(const Packed<T> &values, int k) { return to_real(values.element[k]); }

/* by 32 bits: half of them takes two instructions to come by */
INLINE real at(const Packed<bfloat16> &values, int k)
{
    const unsigned pair = ((const unsigned *)&values)[k / 2];
    return (real)__uint_as_float(k % 2 ? pair & 0xffff0000u : pair << 16);
}

enum { VECTOR_BYTES = 16 };

template <typename T> INLINE Packed<T> load(const T *p)
{
    Packed<T> result;
    uint4 *parts = (uint4 *)&result;
#pragma unroll
    for (int i = 0; i < (int)sizeof result / VECTOR_BYTES; i++)
        parts[i] = __ldg((const uint4 *)p + i);
    return result;
}

template <typename T> INLINE void store(T *p, const Packed<T> &value)
{
    if (sizeof value < VECTOR_BYTES) {
        __stcs((unsigned long long *)p, *(const unsigned long long *)&value);
        return;
    }
    const uint4 *parts = (const uint4 *)&value;
#pragma unroll
    for (int i = 0; i < (int)sizeof value / VECTOR_BYTES; i++)
        __stcs((uint4 *)p + i, parts[i]);
}

/* From shared memory, in whole vectors: element by element threads would meet at the same banks. */
template <typename T> INLINE Packed<T> ld_shared(int address)
{
    Packed<T> result;
    uint4 *parts = (uint4 *)&result;
#pragma unroll
    for (int i = 0; i < (int)sizeof result / VECTOR_BYTES; i++)
        parts[i] = ld_shared_v4(address + i * VECTOR_BYTES);
    return result;
}

template <typename T> INLINE bool is_aligned(const T *p)
{
    return ((unsigned long long)p & (VECTOR_BYTES - 1)) == 0;
}

/* Elements of a row before its first vector */
template <typename T> INLINE long long head_of(const T *x, long long vocab)
{
    const long long head = (VECTOR_BYTES - ((unsigned long long)x & (VECTOR_BYTES - 1))) / sizeof(T) & (WIDTH - 1);
    return head < vocab ? head : vocab;
}

}
