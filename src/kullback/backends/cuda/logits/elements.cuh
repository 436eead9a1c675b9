/* What an element wants to know of its row, and sums over elements, in each vocabulary. */

/* The error of top · binary(scale), rounded: every power in a survey's total has it. */
INLINE double rounding_of(float top, float scale)
{
    const float factor = binary(scale);
    return (double)product(top, factor) - (double)top * (double)factor;
}

/* log(y / x); exchanging them changes the sign and not a bit */
INLINE float log_quotient_of(float y, float x) { return y < x ? -logf(x / y) : logf(y / x); }
INLINE double log_quotient_of(double y, double x) { return y < x ? -log(x / y) : log(y / x); }

/* A row's norm as an exponent, and what its masses sum to when that was rounded */
INLINE float norm_of(float top, float total, float scale) { return product(top, binary(scale)) + log2_of(total); }
INLINE float whole_of(float top, float total, float scale)
{
    return total * power_of_2(product(top, binary(scale)) - norm_of(top, total, scale));
}

/* log-normaliser of y less that of x, as floats found it, and what is known to be wrong with that */
INLINE double shift_of(const Arguments &a, const Survey &survey)
{
    const double rounding = survey.is_usual ? rounding_of(survey.y_top, a.target_scale) - rounding_of(survey.x_top, a.input_scale) : 0;
    const double of_tops = (double)survey.y_top * (double)found_here(a.target_scale) - (double)survey.x_top * (double)found_here(a.input_scale);
    if (SEEKS_ONE_WORD && survey.correction == K_INFINITY) /* to the bit as elements find it of tops */
        return of_tops + (double)k_logit_difference(survey.y_top, a.target_scale, survey.x_top, a.input_scale, (float)of_tops,
                                                    (float)(of_tops - (double)(float)of_tops));
    return of_tops + rounding * (double)LN2 + (double)log_quotient_of(survey.y_total, survey.x_total) + found_here(survey.correction);
}

/* What elements want to know of their row. Each vocabulary's is found where it is used, so that nothing is that is
   not. A mass of `k_` is exp((x - top)·scale) / total; one of the others has the rounding in it, as a usual total. */
template <int VOCABULARY> INLINE Row row_of(const Arguments &a, const Survey &survey, const Sums &sums)
{
    Row row;
    row.input_scale = a.input_scale;
    row.target_scale = a.target_scale;
    row.input_top = VOCABULARY == APART && IS_NARROW ? norm_of(survey.x_top, survey.x_total, a.input_scale) : survey.x_top;
    row.target_top = VOCABULARY == APART && IS_NARROW ? norm_of(survey.y_top, survey.y_total, a.target_scale) : survey.y_top;
    const double x_rounding = survey.is_usual && INPUT_IS_LOGITS ? rounding_of(survey.x_top, a.input_scale) : 0;
    const double y_rounding = survey.is_usual && TARGET_IS_LOGITS ? rounding_of(survey.y_top, a.target_scale) : 0;
    row.input_inverse_total = 1 / (VOCABULARY == GUARDED ? survey.x_total * power_of_2((float)x_rounding) : survey.x_total);
    row.target_inverse_total = 1 / (VOCABULARY == GUARDED ? survey.y_total * power_of_2((float)y_rounding) : survey.y_total);
    row.input_log_total = logf(survey.x_total) + (float)x_rounding * LN2;
    row.target_log_total = logf(survey.y_total) + (float)y_rounding * LN2;
    const double shift = shift_of(a, survey);
    row.shift_high = (float)shift;
    row.shift_low = (float)(shift - (double)row.shift_high);
    row.input_sum_gradient = sums.d_log_q;
    row.target_sum_gradient = sums.d_log_p;
    return row;
}

template <typename T> INLINE void exchange_halves(Packed<T> &values)
{
    enum { WORDS = sizeof(Packed<T>) / sizeof(unsigned) };
    unsigned *word = (unsigned *)&values;
#pragma unroll
    for (int i = 0; i < WORDS / 2; i++) {
        const unsigned kept = word[i];
        word[i] = word[i + WORDS / 2];
        word[i + WORDS / 2] = kept;
    }
}

/* Calls f(k) for the elements of vectors. Of the long formulas half of them at a time, the vectors being turned round
   between: all at once would not fit the registers. */
template <int VOCABULARY, typename F, typename... VECTORS> INLINE void each_of(F f, VECTORS &...vectors)
{
    enum { PARTS = VOCABULARY == APART ? 1 : 2 };
#pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int k = 0; k < WIDTH / PARTS; k++)
            f(k);
        if (PARTS == 2)
            (exchange_halves(vectors), ...);
    }
}

/* A logit as log_part takes it, of a row whose norm is in the exponent: -inf has an exponent too. */
INLINE float bounded_logit(float x, float top, float scale)
{
    return HAS_LOG_PART && IS_NARROW ? fmaxf(x, (top + NO_MASS) / binary(scale)) : x;
}

template <int VOCABULARY> INLINE Element element(const Arguments &a, float x, float y, const Row &row)
{
#if HAS_APART
    if (VOCABULARY == APART)
        return apart_element(x, y, row, a.parameters);
    if (VOCABULARY == CLOSE)
        return close_element(x, y, row, a.parameters);
#endif
    return k_element(x, y, row, a.parameters);
}

template <int VOCABULARY> INLINE void add(Sums &sums, const Element &e)
{
    sums.term += e.term;
    sums.d_log_p += e.d_log_p;
    sums.d_log_q += e.d_log_q;
    if (VOCABULARY == CLOSE)
        sums.excess += e.excess;
}

/* Of this thread's elements; where they are not apart */
template <int VOCABULARY>
INLINE Sums own_sums(const Share &share, Ring &ring, const Team &team, const Survey &survey)
{
    const Arguments &a = share.a;
    Sums sums;
    const Row row = row_of<VOCABULARY>(a, survey, sums);
    const auto take = [&](float x, float y) {
        add<VOCABULARY>(sums, element<VOCABULARY>(a, input_of(a, x), target_of(a, y), row));
    };
    if (VOCABULARY == GUARDED) {
        each_element<false>(share, ring, team, [&](float x, float y, int) { take(x, y); });
    } else {
        each_vector<false, false, false>(share, ring, team, [&](Packed<X> x, Packed<Y> y, long long, int) {
            each_of<VOCABULARY>([&](int k) { take(at(x, k), at(y, k)); }, x, y);
        });
        each_end(share, team, [&](int i) { take(to_real(share.x()[i]), to_real(share.y()[i])); });
    }
    return sums;
}
