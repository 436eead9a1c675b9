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
    const real v0 = safe_exp(y);
    const real v1 = parameter * v0;
    const real v2 = (real)1.0 - parameter;
    const real v3 = safe_exp(x);
    const real v4 = v2 * v3;
    const real v5 = v1 + v4;
    const real v6 = safe_log_difference(y, x);
    const real v8 = safe_abs(v6);
    const real v9 = -v8;
    const real v10 = safe_small_expm1(v9);
    const real v11 = v3 * v10;
    const real v12 = -v11;
    const real v13 = v0 * v10;
    const real v14 = (v6 < (real)0.0) ? v12 : v13;
    const real v15 = v3 - v0;
    const real v16 = safe_select_near(v6, (real)0.5, v14, v15);
    const real v17 = -v16;
    const real v18 = safe_fraction(v17, v5);
    const real v19 = v2 * v18;
    const real v21 = (v19 < (real)-1.0) ? (real)-1.0 : v19;
    const real v22 = safe_bennett(v21);
    const real v23 = parameter * v22;
    const real v24 = parameter * v18;
    const real v25 = -v24;
    const real v27 = (v25 < (real)-1.0) ? (real)-1.0 : v25;
    const real v28 = safe_bennett(v27);
    const real v29 = v2 * v28;
    const real v30 = v23 + v29;
    const real v31 = v5 * v30;
    const real v32 = safe_log1p(v21);
    const real v34 = ((real)0.0 < v16) ? v3 : v0;
    const real v35 = safe_log_quotient(v34, v5);
    const real v36 = v35 + v6;
    const real v37 = ((real)0.0 < v16) ? v36 : v35;
    const real v38 = safe_select_near(v21, (real)0.25, v32, v37);
    const real v39 = safe_mass_times(v0, v38);
    const real v40 = parameter * v39;
    const real v41 = safe_log1p(v27);
    const real v42 = v35 - v6;
    const real v43 = ((real)0.0 < v16) ? v35 : v42;
    const real v44 = safe_select_near(v27, (real)0.25, v41, v43);
    const real v45 = safe_mass_times(v3, v44);
    const real v46 = v2 * v45;
    Element result = { v31, v40, v46, v46, v40, v16 };
    return result;
}

INLINE Finish finish(double total, double tilted_lse, real parameter)
{
    Finish result = { total, (double)1.0 };
    return result;
}
