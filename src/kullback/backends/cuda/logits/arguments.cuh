/* The kernel's arguments. logits/__init__.py reads these structs: of their fields, in order, the signature is printed and a
   call is made. */
#pragma once

#include "cuda/logits/config.cuh"

namespace kullback {

/* What a launch reads and writes; first the tensors of a record `Rows`, in its order */
struct Operands {
    const X *x;
    const Y *y;
    const WEIGHT *row_weight; /* [rows], or 0: 1 */
    const long long *labels;  /* [rows]: a token of the row, IGNORED, or negative: of another's slice; or 0 */
    const double *known;      /* [fields, rows]: statistics to accumulate with, or the state of a gradient; or 0 */
    double *found;            /* [fields, rows]: a loss's state, statistics, or sums; or 0 */
    LOSS *loss;               /* [rows], or 0 */
    LOSS *total;              /* or 0 */
    DX *d_input;
    DY *d_target;
    double *figures;          /* [2, rows]: of the input its log-sum-exp and its entropy; or 0 */
    float *exponents;         /* [rows, warps that share a row]: what the entropies are found from; or 0 */
    double *summaries;        /* [rows, SUMMARY_DOUBLES]: what is found of rows when all have been read (summary.cuh); or 0 */
    double *partial;          /* [blocks] */
    unsigned *ticket;
    unsigned rows, vocab; /* at most 2^30 each */
    long long x_stride, y_stride, d_input_stride, d_target_stride;
    double scale;
};

/* What is the same in every launch for such tensors */
struct Setup {
    float input_inv_temperature, target_inv_temperature;
    float input_softcap, target_softcap;
    float divergence_weight, label_weight, z_weight, label_smoothing; /* of what a row's loss is a sum of (labels.py) */
    real parameter;
    long long series[SERIES_TERMS]; /* each two floats, factors of a power of the log-ratio: of term, above of d_log_q - d_log_p */
    /* Likewise: of term, from r² on, or from |r| on; above of the slope as it is cached, from r on, or of its sign */
    long long near[MOST_TERMS], narrow[MOST_TERMS];
    long long fine[MOST_FINE_TERMS]; /* of term, from r² on; above of d_log_q - d_log_p, from r on */
    int stages, stage_vectors, tile_vectors; /* of the pipeline; of a stage and of its tile, vectors of either tensor */
    int slice_vectors, row_tiles; /* vectors of a row that a block has, at most, and tiles that they take */
    int exchange_offset, header_offset; /* in shared memory; an exchange slot is [cluster · WARPS, 4] floats */
};

/* Where ranks have slices of the rows: how they exchange numbers (ranks.cuh) */
struct Ranks {
    unsigned long long *const *buffers; /* [ranks]: each one's, as this device sees it */
    const long long *launches;            /* so far, this one included */
    unsigned rank, ranks, buffer_rows;
    unsigned timeout; /* of 2^20 ns */
};

struct Arguments : Operands, Setup, Ranks {
    float exponent; /* of the Chernoff coefficient that statistics sum */
};

INLINE bool has_one_temperature(const Arguments &a) { return a.input_inv_temperature == a.target_inv_temperature; }

INLINE float term_factor(const Arguments &a, int power) { return opaque(__int_as_float((int)a.series[power - 1])); }

INLINE float difference_factor(const Arguments &a, int power)
{
    return opaque(__int_as_float((int)(a.series[power - 1] >> 32)));
}

template <bool NARROW> INLINE float near_factor(const Arguments &a, int k)
{
    return opaque(__int_as_float((int)(NARROW ? a.narrow : a.near)[k]));
}
template <bool NARROW> INLINE float near_slope_factor(const Arguments &a, int k)
{
    return opaque(__int_as_float((int)((NARROW ? a.narrow : a.near)[k] >> 32)));
}

INLINE float fine_term_factor(const Arguments &a, int k) { return opaque(__int_as_float((int)a.fine[k])); }

INLINE float fine_difference_factor(const Arguments &a, int k) { return opaque(__int_as_float((int)(a.fine[k] >> 32))); }

/* What an element of the input counts as, and of the target */
INLINE float input_of(const Arguments &a, float x) { return INPUT_IS_CAPPED ? softcapped(x, a.input_softcap) : x; }
INLINE float target_of(const Arguments &a, float y) { return TARGET_IS_CAPPED ? softcapped(y, a.target_softcap) : y; }

/* What a row's divergence counts in its loss, and its label's cross-entropy */
INLINE double divergence_weight(const Arguments &a) { return HAS_AUXILIARY ? (double)a.divergence_weight : 1; }
INLINE float label_weight(const Arguments &a) { return HAS_AUXILIARY ? a.label_weight : 0; }

INLINE double weight_of(const Arguments &a, unsigned r) { return a.row_weight ? (double)a.row_weight[r] : 1; }

/* Packed numbers of a row */
INLINE double known(const Arguments &a, int field, unsigned r) { return a.known[(long long)field * a.rows + r]; }
INLINE void keep(const Arguments &a, int field, unsigned r, double value) { a.found[(long long)field * a.rows + r] = value; }

}
