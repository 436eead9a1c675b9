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
    /* scaled by 2^112 the half's bits are the float's, subnormal ones too; its sign was shifted in from above */
    const uint32_t word = ((uint32_t)(int16_t)x << 13) & 0x8fffe000u, special = 0x0f800000u;
    const uint32_t finite = word_of(float_of(word) * 0x1p112f);
    return (real)float_of(finite | ((word & special) == special ? 0x7f800000u : 0));
}

INLINE float store_float(real x) { return (float)x; }
INLINE double store_double(real x) { return (double)x; }

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
