/* Rows of logits on a CPU: their softmaxes, and what elements know of them. Wanted before it: `Row`, and the macros
   INPUT_IS_CAPPED, TARGET_IS_CAPPED. */

#define NOINLINE __attribute__((noinline))

/* Sums are taken in `real` over so many elements, and in double from there. */
enum { SPAN = 256, LONG_SPAN = 1024 }; /* the second where many are summed at once, whose lanes then seldom meet */

typedef struct { real input, target; } Softcaps;
#define COUNTED_X(x) (INPUT_IS_CAPPED ? softcapped(x, softcaps.input) : (x))
#define COUNTED_Y(y) (TARGET_IS_CAPPED ? softcapped(y, softcaps.target) : (y))

/* The largest scaled logit, or a number near it, and Σ exp(scaled - max) */
typedef struct { double max, sum_exp; } Softmax;
typedef struct { double input, target; } Temperatures;

/* Σ exp(exponent), how many exponents are 0, Σ exp of the others, and Σ exponent·exp(exponent) */
typedef struct { double sum, maxima, rest, moment; } Exponentials;

/* log Σ exp less the mean of what it is of */
INLINE double entropy(Exponentials of)
{
    return (of.maxima == 1 ? log1p(of.rest) : log(of.sum)) - of.moment / of.sum;
}

/* -inf of a piece without mass */
INLINE double lse(Softmax softmax) { return softmax.max == -INFINITY ? softmax.max : softmax.max + log(softmax.sum_exp); }

INLINE double log_z_diff(Softmax input, Softmax target)
{
    return (target.max - input.max) + (log(target.sum_exp) - log(input.sum_exp));
}

INLINE void set_log_z_diff(Row *row, double difference)
{
    row->log_z_diff_high = (real)difference;
    row->log_z_diff_low = (real)(difference - (double)row->log_z_diff_high);
}

INLINE void set_softmaxes(Row *row, Softmax input, Softmax target, double difference, Temperatures temperatures)
{
    /* The maxima are of the scaled row, with the scale as rounded to `real`; elements want the row's own. */
    row->input_inv_temperature = (real)(1 / temperatures.input);
    row->input_max = (real)(input.max / (double)row->input_inv_temperature);
    row->input_inv_sum_exp = (real)(1 / input.sum_exp);
    row->input_log_sum_exp = (real)log(input.sum_exp);
    row->target_inv_temperature = (real)(1 / temperatures.target);
    row->target_max = (real)(target.max / (double)row->target_inv_temperature);
    row->target_inv_sum_exp = (real)(1 / target.sum_exp);
    row->target_log_sum_exp = (real)log(target.sum_exp);
    set_log_z_diff(row, difference);
}
