#define NEEDS_NORMS 1
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
typedef struct { real input_scale, input_top, input_inverse_total, input_log_total, input_sum_gradient, target_scale, target_top, target_inverse_total, target_log_total, target_sum_gradient, shift_high, shift_low; } Row;
typedef struct { real none; } Parameters;
typedef struct { real term, d_log_p, d_log_q, input, target; } Element;
typedef struct { double loss, slope; } Finish;

INLINE Element k_element(real x, real y, Row row, Parameters parameters)
{
    const real v0 = k_logit_difference(y, row.target_scale, x, row.input_scale, row.shift_high, row.shift_low);
    const real v1 = k_abs(v0);
    const real v3 = y - row.target_top;
    const real v4 = v3 * row.target_scale;
    const real v5 = k_exp(v4);
    const real v6 = v5 * row.target_inverse_total;
    const real v7 = k_gap(v0);
    const real v8 = v6 * v7;
    const real v9 = k_mass_times(v6, v0);
    const real v10 = -v0;
    const real v11 = k_expm1(v10);
    const real v12 = v6 * v11;
    const real v13 = x - row.input_top;
    const real v14 = v13 * row.input_scale;
    const real v15 = k_exp(v14);
    const real v16 = v15 * row.input_inverse_total;
    const real v17 = v16 - v6;
    const real v18 = (v1 < (real)0.5) ? v12 : v17;
    const real v19 = v9 + v18;
    const real v20 = (v1 < (real)0.5) ? v8 : v19;
    const real v21 = v16 * row.input_sum_gradient;
    const real v22 = v18 - v21;
    const real v23 = v22 * row.input_scale;
    const real v24 = v6 * row.target_sum_gradient;
    const real v25 = v9 - v24;
    const real v26 = v25 * row.target_scale;
    Element result = { v20, v9, v18, v23, v26 };
    return result;
}

INLINE Finish finish(double total, Parameters parameters)
{
    Finish result = { total, (double)1.0 };
    return result;
}
