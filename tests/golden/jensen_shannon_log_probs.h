#define NEEDS_NORMS 0
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
typedef struct { real input_scale, input_top, input_inverse_total, input_log_total, input_sum_gradient, target_scale, target_top, target_inverse_total, target_log_total, target_sum_gradient, shift_high, shift_low; } Row;
typedef struct { real weight; } Parameters;
typedef struct { real term, d_log_p, d_log_q, input, target, excess; } Element;
typedef struct { double loss, slope; } Finish;

INLINE Element k_element(real x, real y, Row row, Parameters parameters)
{
    const real v0 = (real)1.0 - parameters.weight;
    const real v1 = k_log_difference(y, x);
    const real v3 = k_exp(x);
    const real v4 = k_abs(v1);
    const real v5 = -v4;
    const real v6 = k_small_expm1(v5);
    const real v7 = v3 * v6;
    const real v8 = -v7;
    const real v9 = k_exp(y);
    const real v10 = v9 * v6;
    const real v11 = (v1 < (real)0.0) ? v8 : v10;
    const real v12 = v3 - v9;
    const real v13 = k_near(v1, (real)0.5, v11, v12);
    const real v14 = -v13;
    const real v15 = parameters.weight * v9;
    const real v16 = v0 * v3;
    const real v17 = v15 + v16;
    const real v18 = k_part_of(v14, v17);
    const real v19 = v0 * v18;
    const real v20 = k_small_bregman(v19);
    const real v21 = v17 * v20;
    const real v22 = k_log_blend(v1, parameters.weight, v0);
    const real v23 = -v22;
    const real v24 = (v1 < (real)0.0) ? v1 : (real)0.0;
    const real v25 = v23 + v24;
    const real v26 = k_mass_times(v9, v25);
    const real v27 = v0 * v13;
    const real v28 = v26 + v27;
    const real v29 = k_near(v19, (real)0.3333333333333333, v21, v28);
    const real v30 = parameters.weight * v29;
    const real v31 = parameters.weight * v18;
    const real v32 = -v31;
    const real v33 = k_small_bregman(v32);
    const real v34 = v17 * v33;
    const real v35 = (v1 < (real)0.0) ? (real)0.0 : v1;
    const real v36 = v23 - v35;
    const real v37 = k_mass_times(v3, v36);
    const real v38 = parameters.weight * v13;
    const real v39 = -v38;
    const real v40 = v37 + v39;
    const real v41 = k_near(v32, (real)0.3333333333333333, v34, v40);
    const real v42 = v0 * v41;
    const real v43 = v30 + v42;
    const real v44 = k_mass_times(v15, v25);
    const real v45 = k_mass_times(v16, v36);
    Element result = { v43, v44, v45, v45, v44, v13 };
    return result;
}

INLINE Finish finish(double total, Parameters parameters)
{
    Finish result = { total, (double)1.0 };
    return result;
}
