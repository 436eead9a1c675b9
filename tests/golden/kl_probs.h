#define NEEDS_NORMS 0
#define FINISH_IS_LINEAR 1
#define FINISH_IS_IDENTITY 1
typedef struct { real input_scale, input_top, input_inverse_total, input_log_total, input_sum_gradient, target_scale, target_top, target_inverse_total, target_log_total, target_sum_gradient, shift_high, shift_low; } Row;
typedef struct { real none; } Parameters;
typedef struct { real term, d_log_p, d_log_q, input, target, excess; } Element;
typedef struct { double loss, slope; } Finish;

INLINE Element k_element(real x, real y, Row row, Parameters parameters)
{
    const real v0 = k_log_quotient(y, x);
    const real v1 = k_mass_times(y, v0);
    const real v2 = v1 + y;
    const real v3 = -y;
    const real v4 = k_ratio_or_zero(v3, x);
    const real v5 = k_ratio_or_zero(v2, y);
    const real v6 = x - y;
    Element result = { v1, v2, v3, v4, v5, v6 };
    return result;
}

INLINE Finish finish(double total, Parameters parameters)
{
    Finish result = { total, (double)1.0 };
    return result;
}
