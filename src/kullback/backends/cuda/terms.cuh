/* What printer.print_terms and print_order print, of no kind: for whoever opens a file alone. */
#pragma once

#include "cuda/math.cuh"

namespace kullback {

#define EACH_KIND(apply) apply(kind)
#define KINDS kind
#define WITH_CORNER kind
#define NEAR_RADIUS 2.5f
#define EACH_NEAR_SUM(apply) apply(s0)
#define NEAR_SUMS s0

typedef struct {
    real input_inv_temperature, input_max, input_inv_sum_exp, input_log_sum_exp, input_grad_sum;
    real target_inv_temperature, target_max, target_inv_sum_exp, target_log_sum_exp, target_grad_sum;
    real log_z_diff_high, log_z_diff_low, tilted_lse;
} Row;
typedef struct { real kind, q_minus_p, slope; } Terms;

INLINE Terms safe_terms(real x, real y, Row row) { return {}; }
typedef struct { real s0; } NearSums;
INLINE NearSums near_sums(real r, real root) { return {}; }
INLINE Terms near_terms(NearSums sums) { return {}; }
INLINE Terms light_terms(real x, real y, Row row) { return {}; }

enum { NUMBER_LSE, NUMBER_ENTROPY, NUMBER_TARGET_LSE, NUMBER_TARGET_ENTROPY, NUMBER_KINDS };
enum { TOKEN_TOP_TOKEN, TOKEN_LABEL_RANK, TOKEN_TARGET_TOP_TOKEN, TOKEN_TARGET_LABEL_RANK };

}
