#define NEEDS_NORMS 1
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
typedef struct { real input_scale, input_top, input_inverse_total, input_log_total, input_sum_gradient, target_scale, target_top, target_inverse_total, target_log_total, target_sum_gradient, shift_high, shift_low; } Row;
typedef struct { real none; } Parameters;
typedef struct { real term, d_log_p, d_log_q, input, target, excess; } Element;
typedef struct { double loss, slope; } Finish;

INLINE Element k_element(real x, real y, Row row, Parameters parameters)
{
    const real v0 = k_logit_difference(y, row.target_scale, x, row.input_scale, row.shift_high, row.shift_low);
    const real v1 = k_logit_mass(y, row.target_top, row.target_scale, row.target_inverse_total);
    const real v2 = k_small_gap(v0);
    const real v3 = v1 * v2;
    const real v4 = k_mass_times(v1, v0);
    const real v6 = k_logit_mass(x, row.input_top, row.input_scale, row.input_inverse_total);
    const real v7 = k_abs(v0);
    const real v8 = -v7;
    const real v9 = k_small_expm1(v8);
    const real v10 = v6 * v9;
    const real v11 = -v10;
    const real v12 = v1 * v9;
    const real v13 = (v0 < (real)0.0) ? v11 : v12;
    const real v14 = v6 - v1;
    const real v15 = k_near(v0, (real)0.5, v13, v14);
    const real v16 = v4 + v15;
    const real v17 = k_near(v0, (real)0.5, v3, v16);
    const real v18 = v6 * row.input_sum_gradient;
    const real v19 = v15 - v18;
    const real v20 = v1 * row.target_sum_gradient;
    const real v21 = v4 - v20;
    Element result = { v17, v4, v15, v19, v21, v15 };
    return result;
}

INLINE Finish finish(double total, Parameters parameters)
{
    Finish result = { total, (double)1.0 };
    return result;
}
