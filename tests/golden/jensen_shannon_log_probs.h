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
    const real v7 = k_abs(v6);
    const real v9 = -v6;
    const real v10 = k_expm1(v9);
    const real v11 = v0 * v10;
    const real v12 = v3 - v0;
    const real v13 = (v7 < (real)0.5) ? v11 : v12;
    const real v14 = -v13;
    const real v15 = k_part_of(v14, v5);
    const real v16 = v2 * v15;
    const real v18 = (v16 < (real)-1.0) ? (real)-1.0 : v16;
    const real v19 = k_bregman(v18);
    const real v20 = parameters.weight * v19;
    const real v21 = parameters.weight * v15;
    const real v22 = -v21;
    const real v24 = (v22 < (real)-1.0) ? (real)-1.0 : v22;
    const real v25 = k_bregman(v24);
    const real v26 = v2 * v25;
    const real v27 = v20 + v26;
    const real v28 = v5 * v27;
    const real v29 = k_abs(v18);
    const real v31 = k_log1p(v18);
    const real v32 = k_abs(v5);
    const real v34 = k_log_quotient(v0, v5);
    const real v35 = (v32 < (real)1e-45) ? (real)0.0 : v34;
    const real v36 = (v29 < (real)0.25) ? v31 : v35;
    const real v37 = k_mass_times(v0, v36);
    const real v38 = parameters.weight * v37;
    const real v39 = k_abs(v24);
    const real v41 = k_log1p(v24);
    const real v42 = k_log_quotient(v3, v5);
    const real v43 = (v32 < (real)1e-45) ? (real)0.0 : v42;
    const real v44 = (v39 < (real)0.25) ? v41 : v43;
    const real v45 = k_mass_times(v3, v44);
    const real v46 = v2 * v45;
    Element result = { v28, v38, v46, v46, v38 };
    return result;
}

INLINE Finish finish(double total, Parameters parameters)
{
    Finish result = { total, (double)1.0 };
    return result;
}
