/* Numbers of twice a float's digits, as sums of two (Dekker 1971): few devices have units for doubles, and conversions queue with
   exponentials. */
#pragma once

#include "cuda/logits/fast_math.cuh"

namespace kullback {

/* high is the sum, rounded. */
struct TwoFloats {
    float high, low; /* to be given both: NVRTC leaves the second undefined otherwise */

    INLINE double whole() const { return (double)high + (double)low; }
};

INLINE float add_rn(float x, float y) { return __fadd_rn(x, y); } /* not contracted with a product */

/* Exact (Knuth) */
INLINE TwoFloats two_sum(float x, float y)
{
    const float sum = add_rn(x, y), of_y = add_rn(sum, -x), of_x = add_rn(sum, -of_y);
    return { sum, add_rn(add_rn(x, -of_x), add_rn(y, -of_y)) };
}
INLINE TwoFloats two_product(float x, float y)
{
    const float product = mul_rn(x, y);
    return { product, fmaf(x, y, -product) };
}
INLINE TwoFloats two_floats(double x) { return { (float)x, (float)(x - (double)(float)x) }; }

INLINE TwoFloats operator+(TwoFloats x, TwoFloats y)
{
    const TwoFloats sum = two_sum(x.high, y.high);
    return two_sum(sum.high, add_rn(sum.low, add_rn(x.low, y.low)));
}
INLINE TwoFloats operator*(float power_of_2, TwoFloats x) { return { power_of_2 * x.high, power_of_2 * x.low }; }
INLINE TwoFloats operator-(TwoFloats x) { return { -x.high, -x.low }; }
INLINE TwoFloats operator-(TwoFloats x, TwoFloats y) { return x + -y; }

}
