/* What threads of a warp tell one another, and what the compiler is told of registers. */

INLINE float maximum(float a, float b) /* NaN stays */
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

INLINE float shuffled(float x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE double shuffled(double x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
INLINE float from_lane(float x, unsigned lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }

/* What is the same in all threads of a warp, said so that the compiler knows */
INLINE bool agreed(bool condition) { return __all_sync(0xffffffffu, condition); }

template <typename T> INLINE T sum_of_warp(T x)
{
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += shuffled(x, step);
    return x;
}

/* Not to be found, with what follows from it, before a loop: registers would keep it in there. */
INLINE float found_here(float x)
{
    asm volatile("" : "+f"(x));
    return x;
}
INLINE int found_here(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}
template <typename T> INLINE T *found_here(T *p)
{
    asm volatile("" : "+l"(p));
    return p;
}
INLINE Parameters found_here(Parameters parameters)
{
    *(float *)&parameters = found_here(*(float *)&parameters);
    return parameters;
}
