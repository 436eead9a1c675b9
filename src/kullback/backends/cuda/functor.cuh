/* What a printed formula has (printer.py): for whoever opens a file alone. In a kernel the formula of its kind and forms
   stands in this file's place. */
#pragma once

#include "cuda/logits/fast_math.cuh"
#include "cuda/math.cuh"

#define HAS_LOGITS 1
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
#define HAS_MOMENTS 0 /* whether the row's sums follow from moments, and from which */
#define HAS_P_LOG_RATIO 0
#define HAS_Q_LOG_RATIO 0
#define HAS_CHERNOFF 0
#define HAS_NEAR_ELEMENT 1 /* whether the formula serves rows that are near, too, with a log-ratio and one mass; */
#define HAS_D_LOG_Q_SUM 1  /* whether Σ d_log_q may be other than 0 there; whether masses are then to be times 1 - Σ d_log_q */
#define SUM_IN_MASSES 1
#define HAS_TILTED_LSE 1 /* whether the row is finished with log Σ p^a q^(1-a), which counts as far from 0 above this */
#define FAR_TILTED_LSE 0.5f
#define HAS_SLOPES 1 /* whether derivatives over their masses are known, and what they are like */
#define HAS_LOG_FRACTION 0
#define HAS_COUPLING 0
#define SLOPE_IS_LOG 0

namespace kullback {

enum { STATS_INPUT_LSE, STATS_TARGET_LSE, STATS_TERM, STATS_D_LOG_P, STATS_D_LOG_Q, STATS_MODE, STATS_TILTED_LSE, STATS_FIELDS };
enum { SUMS_TERM, SUMS_D_LOG_P, SUMS_D_LOG_Q, SUMS_Q_MINUS_P, SUMS_MODE, SUMS_FIELDS };
enum {
    STATE_INPUT_LSE, STATE_TARGET_LSE, STATE_LOG_Z_DIFF, STATE_D_LOG_P, STATE_D_LOG_Q, STATE_D_LOSS, STATE_MODE,
    STATE_TILTED_LSE, STATE_FIELDS
};
enum { FAST, STABLE, SAFE };
#define IGNORED (-100)
#define VERB_LOSS 0
#define VERB_STATISTICS 1
#define VERB_ACCUMULATE 2
#define VERB_GRADIENT 3

typedef struct {
    real input_inv_temperature, input_max, input_inv_sum_exp, input_log_sum_exp, input_grad_sum;
    real target_inv_temperature, target_max, target_inv_sum_exp, target_log_sum_exp, target_grad_sum;
    real log_z_diff_high, log_z_diff_low, tilted_lse;
} Row;
typedef struct { real term, d_log_p, d_log_q, input, target, q_minus_p; } Element;
typedef struct { double loss, derivative; } Finish;

INLINE Element safe_element(real x, real y, Row row, real parameter) { return {}; }
INLINE Element in_range_element(real x, real y, Row row, real parameter) { return {}; }
INLINE Element stable_element(real x, real y, Row row, real parameter) { return {}; }
INLINE Element fast_element(real x, real y, Row row, real parameter) { return {}; }
INLINE Element finite_element(real x, real y, Row row, real parameter) { return {}; }
INLINE Element near_element(real x, real y, Row row, real parameter) { return {}; }
INLINE Element short_element(real x, real y, Row row, real parameter) { return {}; }
INLINE Finish finish(double total, double tilted_lse, real parameter) { return {}; }

INLINE real safe_log_tilted(real x, real y, Row row, real parameter) { return {}; }
INLINE real chernoff_exponent(real parameter) { return {}; }
INLINE Element from_moments(real p_log_ratio, real q_log_ratio, real chernoff, real parameter) { return {}; }

typedef struct { real factor_p, offset_p, factor_q, offset_q, coupling; } Coefficients;
typedef struct { real p, q, slope_p, slope_q; } Parts;
INLINE Coefficients fast_coefficients(Row row, real parameter) { return {}; }
INLINE Parts fast_parts(real x, real y, Row row, real parameter) { return {}; }
INLINE Parts near_parts(real x, real y, Row row, real parameter) { return {}; }

}
