/* Labels: each is a token, or IGNORED; and rows' logits there, as they count. A thread takes a row. */
#pragma once

#include "cuda/vector.cuh"

namespace kullback {

extern "C" __global__ void __launch_bounds__(THREADS)
kullback_labels(const long long *labels, const X *x, double *logits, long long rows, long long vocab, long long x_stride,
                double inv_temperature, double softcap)
{
    for (long long r = (long long)blockIdx.x * THREADS + threadIdx.x; r < rows; r += (long long)gridDim.x * THREADS) {
        const long long label = labels[r];
        const bool is_token = label >= 0 && label < vocab;
        if (!is_token && label != IGNORED)
            __assertfail("labels must lie from 0 to vocab - 1, or be -100", "kullback", 0, "labels", 1);
        if (!logits)
            continue;
        const real own = is_token ? to_real(x[r * x_stride + label]) : REAL_INFINITY - REAL_INFINITY;
        logits[r] = (double)(softcap == 0 ? own : softcapped(own, (real)softcap)) * (real)inv_temperature;
    }
}

}
