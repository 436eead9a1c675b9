#define NEEDS_NORMS 0
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
typedef struct { real input_scale, input_top, input_inverse_total, input_log_total, input_sum_gradient, target_scale, target_top, target_inverse_total, target_log_total, target_sum_gradient, shift_high, shift_low; } Row;
typedef struct { real weight; } Parameters;
typedef struct { real term, d_log_p, d_log_q, input, target; } Element;
typedef struct { double loss, slope; } Finish;

INLINE Element k_element(real x, real y, Row row, Parameters parameters)
{
    const real v0 = k_exp(y);
    const real v1 = parameters.weight * v0;
    const real v2 = (real)1.0 - parameters.weight;
    const real v3 = k_exp(x);
    const real v4 = v2 * v3;
    const real v5 = v1 + v4;
    const real v6 = k_log_difference(y, x);
    const real v7 = -v6;
    const real v8 = k_expm1(v7);
    const real v9 = v0 * v8;
    const real v10 = v3 - v0;
    const real v11 = k_near(v6, (real)0.5, v9, v10);
    const real v12 = -v11;
    const real v13 = k_part_of(v12, v5);
    const real v14 = v2 * v13;
    const real v16 = (v14 < (real)-1.0) ? (real)-1.0 : v14;
    const real v17 = k_bregman(v16);
    const real v18 = parameters.weight * v17;
    const real v19 = parameters.weight * v13;
    const real v20 = -v19;
    const real v22 = (v20 < (real)-1.0) ? (real)-1.0 : v20;
    const real v23 = k_bregman(v22);
    const real v24 = v2 * v23;
    const real v25 = v18 + v24;
    const real v26 = v5 * v25;
    const real v27 = k_log1p(v16);
    const real v28 = k_abs(v5);
    const real v30 = k_log_quotient(v0, v5);
    const real v31 = (v28 < (real)1e-45) ? (real)0.0 : v30;
    const real v32 = k_near(v16, (real)0.25, v27, v31);
    const real v33 = k_mass_times(v0, v32);
    const real v34 = parameters.weight * v33;
    const real v35 = k_log1p(v22);
    const real v36 = k_log_quotient(v3, v5);
    const real v37 = (v28 < (real)1e-45) ? (real)0.0 : v36;
    const real v38 = k_near(v22, (real)0.25, v35, v37);
    const real v39 = k_mass_times(v3, v38);
    const real v40 = v2 * v39;
    Element result = { v26, v34, v40, v40, v34 };
    return result;
}

INLINE Finish finish(double total, Parameters parameters)
{
    Finish result = { total, (double)1.0 };
    return result;
}
