/* Element types: what lies in memory, and how it becomes a `real` and back (round to nearest, ties to even). */

typedef uint16_t bfloat16;
typedef uint16_t float16;

INLINE float float_of(uint32_t x)
{
    float result;
    memcpy(&result, &x, sizeof x);
    return result;
}

INLINE uint32_t word_of(float x)
{
    uint32_t result;
    memcpy(&result, &x, sizeof x);
    return result;
}

INLINE real load_float(float x) { return (real)x; }
INLINE real load_double(double x) { return (real)x; }
INLINE real load_bfloat16(bfloat16 x) { return (real)float_of((uint32_t)x << 16); }

INLINE real load_float16(float16 x)
{
    /* The exponent is raised by 112, and that of infinities and NaN once more. Beside 2^-14 a subnormal half's bits are a
       float's: no float is subnormal on the way, which processors take a hundred times as long for. */
    const uint32_t magnitude = x & 0x7fffu, shifted = magnitude << 13, raise = 112u << 23;
    const uint32_t subnormal = word_of(float_of(shifted + (113u << 23)) - 0x1p-14f);
    const uint32_t normal = shifted + raise + (magnitude >= 0x7c00u ? raise : 0);
    return (real)float_of((magnitude < 0x400u ? subnormal : normal) | (uint32_t)(x & 0x8000u) << 16);
}

/* Many at once */
#define LOADS(type)                                              \
    INLINE void load_##type##s(const type *x, int64_t n, real *to) \
    {                                                            \
        _Pragma("omp simd")                                      \
        for (int64_t i = 0; i < n; i++)                          \
            to[i] = load_##type(x[i]);                           \
    }
LOADS(float)
LOADS(double)
LOADS(bfloat16)

#if defined(__F16C__) && !REAL_IS_DOUBLE
#include <immintrin.h>

/* Compilers do not find the instruction in the above. */
INLINE void load_float16s(const float16 *x, int64_t n, float *to)
{
    enum { WIDTH = 8 };
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    for (; i < n; i++)
        to[i] = load_float16(x[i]);
}
#else
LOADS(float16)
#endif
#undef LOADS

INLINE float store_float(real x) { return (float)x; }
INLINE double store_double(double x) { return x; }

INLINE bfloat16 store_bfloat16(real x)
{
    const uint32_t word = word_of((float)x);
    const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    return (bfloat16)((word & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

INLINE float16 store_float16(real x)
{
    const uint32_t word = word_of((float)x), magnitude = word & 0x7fffffffu;
    const uint32_t sign = (word >> 16) & 0x8000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* added to 0.5 a subnormal half's bits end at the last bit of the float */
    const uint32_t subnormal = word_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t small = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t finite = magnitude >= 0x47800000u ? 0x7c00u : small;
    return (float16)((magnitude > 0x7f800000u ? 0x7e00u : finite) | sign);
}
