#define HAS_LOGITS 1
#define HAS_MOMENTS 1
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
#define HAS_TILTED_LSE 0
#define FAR_TILTED_LSE 0.5f
typedef struct { real input_inv_temperature, input_max, input_inv_sum_exp, input_log_sum_exp, input_grad_sum, target_inv_temperature, target_max, target_inv_sum_exp, target_log_sum_exp, target_grad_sum, log_z_diff_high, log_z_diff_low, tilted_lse; } Row;
typedef struct { real term, d_log_p, d_log_q, input, target, q_minus_p; } Element;
typedef struct { double loss, derivative; } Finish;

INLINE Element safe_element(real x, real y, Row row, real parameter)
{
    const real v0 = safe_logit_ratio(y, row.target_max, row.target_inv_temperature, x, row.input_max, row.input_inv_temperature, row.log_z_diff_high, row.log_z_diff_low);
    const real v1 = safe_logit_mass(y, row.target_max, row.target_inv_temperature, row.target_inv_sum_exp);
    const real v2 = safe_small_exp_remainder(v0);
    const real v3 = v1 * v2;
    const real v4 = safe_mass_times(v1, v0);
    const real v6 = safe_logit_mass(x, row.input_max, row.input_inv_temperature, row.input_inv_sum_exp);
    const real v7 = safe_abs(v0);
    const real v8 = -v7;
    const real v9 = safe_small_expm1(v8);
    const real v10 = v6 * v9;
    const real v11 = -v10;
    const real v12 = v1 * v9;
    const real v13 = (v0 < (real)0.0) ? v11 : v12;
    const real v14 = v6 - v1;
    const real v15 = safe_select_near(v0, (real)0.5, v13, v14);
    const real v16 = v4 + v15;
    const real v17 = safe_select_near(v0, (real)0.5, v3, v16);
    const real v18 = v6 * row.input_grad_sum;
    const real v19 = v15 - v18;
    const real v20 = v1 * row.target_grad_sum;
    const real v21 = v4 - v20;
    Element result = { v17, v4, v15, v19, v21, v15 };
    return result;
}

INLINE Finish finish(double total, double tilted_lse, real parameter)
{
    Finish result = { total, (double)1.0 };
    return result;
}
