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
    const real v1 = k_logit_mass(y, row.target_top, row.target_scale, row.target_inverse_total);
    const real v2 = k_gap(v0);
    const real v3 = v1 * v2;
    const real v4 = k_mass_times(v1, v0);
    const real v5 = -v0;
    const real v6 = k_expm1(v5);
    const real v7 = v1 * v6;
    const real v8 = k_logit_mass(x, row.input_top, row.input_scale, row.input_inverse_total);
    const real v9 = v8 - v1;
    const real v10 = k_near(v0, (real)0.5, v7, v9);
    const real v11 = v4 + v10;
    const real v12 = k_near(v0, (real)0.5, v3, v11);
    const real v13 = v8 * row.input_sum_gradient;
    const real v14 = v10 - v13;
    const real v15 = v14 * row.input_scale;
    const real v16 = v1 * row.target_sum_gradient;
    const real v17 = v4 - v16;
    const real v18 = v17 * row.target_scale;
    Element result = { v12, v4, v10, v15, v18 };
    return result;
}

INLINE Finish finish(double total, Parameters parameters)
{
    Finish result = { total, (double)1.0 };
    return result;
}
