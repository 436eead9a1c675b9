#define HAS_LOGITS 0
#define HAS_MOMENTS 0
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
#define HAS_TILTED_LSE 0
#define FAR_TILTED_LSE 0.5f
typedef struct { real input_inv_temperature, input_max, input_inv_sum_exp, input_log_sum_exp, input_grad_sum, target_inv_temperature, target_max, target_inv_sum_exp, target_log_sum_exp, target_grad_sum, log_z_diff_high, log_z_diff_low, tilted_lse; } Row;
typedef struct { real term, d_log_p, d_log_q, input, target, q_minus_p; } Element;
typedef struct { double loss, derivative; } Finish;

INLINE Element safe_element(real x, real y, Row row, real parameter)
{
    const real v0 = safe_log_quotient(y, x);
    const real v1 = safe_mass_times(y, v0);
    const real v2 = v1 + y;
    const real v3 = -y;
    const real v4 = safe_ratio_or_zero(v3, x);
    const real v5 = safe_ratio_or_zero(v2, y);
    const real v6 = x - y;
    Element result = { v1, v2, v3, v4, v5, v6 };
    return result;
}

INLINE Finish finish(double total, double tilted_lse, real parameter)
{
    Finish result = { total, (double)1.0 };
    return result;
}
