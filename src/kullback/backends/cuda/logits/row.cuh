/* One row: which mode serves it, and what is found of it: loss, state, statistics, sums, gradients.

   A row is normalised, and summed in the fast mode where its kind and what is foreseen allow. A sum that is too small (the row
   is near, or close) is found again: by polynomials of log-ratios, by the stable formula for heavy tokens, or in the stable
   mode, by power series where most elements are near; one that is no number, in the safe mode. Gradients are written in the
   mode of the sums. */
#pragma once

#include "cuda/logits/near_term.cuh"
#include "cuda/logits/series.cuh"
#include "cuda/logits/summary.cuh"

namespace kullback {

/* Of Σ p^a q^(1-a) against maxima: smaller ones have lost terms that underflowed. */
#define MIN_CHERNOFF 1e-25f

SHARED_ARRAY(double, group_losses, GROUPS); /* each of its group's first thread */
/* Each warp's own: of rows whose loss nobody waits for, and of what is found when all are read */
SHARED_ARRAY(double, warp_losses, GROUPS *WARPS);

enum { EQUAL = SAFE + 1 }; /* of a row whose sides are the same: it loses 0, and its gradients are 0 */

/* What is found of a row before its gradients are written */
struct Found {
    RowStats stats;
    Sums sums;
    int mode = SAFE;
    bool defers_term = false; /* whether sums are those of moments, for gradients, and the term is still to be summed */
    bool few_are_far = false; /* hardly an element of it */
    bool is_sure = false;    /* whether it is less than moments show, so that sure tokens' gradients want correction */
    SlopeScale cached = { 1, 0 };
};

/* For a finish: what follows from it alone is found for each row: kept, it would take registers. */
INLINE float finish_parameter(const Arguments &a) { return FINISH_IS_IDENTITY ? a.parameter : opaque(a.parameter); }

INLINE bool is_finite(const Sums &sums)
{
    return fabsf(sums.term) < MAX_SUM && fabsf(sums.d_log_p) < MAX_SUM && fabsf(sums.d_log_q) < MAX_SUM;
}

/* What is left of 1 - Σ p^a q^(1-a) is in both partial derivatives. */
INLINE bool is_well_conditioned(const Sums &sums, float least = MIN_FAST_SUM)
{
    const float found = HAS_CHERNOFF ? fminf(fabsf(sums.d_log_p), fabsf(sums.d_log_q)) : fabsf(sums.term);
    return warp_all(found > least && is_finite(sums));
}

template <int MODE> INLINE Sums row_sums(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats)
{
#if HAS_FINE
    if (MODE == STABLE && !IS_COARSE) {
        const FineElements elements(slice.a, opaque(stats), {});
        if (elements.serve(slice.a))
            return row_sums_of(elements, slice, pipeline, group);
        return all_reduced(slice.a, pipeline, group, thread_sums<STABLE>(slice, pipeline, group, stats));
    }
#endif
#if HAS_SERIES
    if (MODE == STABLE) {
        const Series series(slice.a, opaque(stats));
        const Sums sums = series.serves(slice, pipeline, group)
            ? thread_sums_by_series(slice, pipeline, group, series, stats)
            : thread_sums<STABLE>(slice, pipeline, group, stats);
        return all_reduced(slice.a, pipeline, group, sums);
    }
#endif
    return all_reduced(slice.a, pipeline, group, thread_sums<MODE>(slice, pipeline, group, stats));
}

INLINE TermSums write_stable_gradients(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats,
                                       const Sums &sums, bool is_sure, GradOut grad_out)
{
#if HAS_FINE
    if (!IS_COARSE) {
        const FineElements elements(slice.a, opaque(stats), sums);
        if (!elements.serve(slice.a))
            return write_gradients<STABLE>(slice, pipeline, group, stats, sums, {}, grad_out);
        write_gradients_of(elements, slice, pipeline, group, grad_out);
        return {};
    }
#endif
#if HAS_SERIES
    const Series series(slice.a, opaque(stats));
#if HAS_SURE_ROWS
    if (is_sure && !HAS_NEAR && !HAS_NEAR_ELEMENT) { /* few of its tokens are apart, of all warps' */
        RowTerms<true> found;
        write_gradients_by_series<false>(found, slice, pipeline, group, series, stats, sums, grad_out);
        return found;
    }
#endif
    if (series.serves(slice, pipeline, group)) {
        RowTerms<false> found;
        write_gradients_by_series<true>(found, slice, pipeline, group, series, stats, sums, grad_out);
        return found;
    }
#endif
    return write_gradients<STABLE>(slice, pipeline, group, stats, sums, {}, grad_out);
}

#if HAS_NORMALISERS
/* From a log-sum-exp: the number next to it that logits can hold, and Σ exp against that, which is 1 where a double keeps
   nothing of it */
INLINE void set_softmax(double lse, float inv_temperature, bool in_range, float &max, float &sum_exp)
{
    max = (float)(lse / (double)inv_temperature);
    const double rest = lse - (double)max * (double)inv_temperature;
    const double log_sum_exp = rest - (in_range ? scaling_error(max, inv_temperature) * (double)LN2 : 0);
    sum_exp = (float)exp(fabs(log_sum_exp) > 80 ? 0 : log_sum_exp);
}

INLINE RowStats known_stats(const Arguments &a, unsigned r, int input_lse, int target_lse)
{
    RowStats stats;
    const double x = INPUT_IS_LOGITS ? known(a, input_lse, r) : 0, y = TARGET_IS_LOGITS ? known(a, target_lse, r) : 0;
    stats.set_in_range(fabs(x) < 8 * MAX_EXPONENT && fabs(y) < 8 * MAX_EXPONENT); /* longer ones are of rows in the safe mode */
    if (INPUT_IS_LOGITS)
        set_softmax(x, a.input_inv_temperature, stats.in_range(), stats.x_max, stats.x_sum_exp);
    if (TARGET_IS_LOGITS)
        set_softmax(y, a.target_inv_temperature, stats.in_range(), stats.y_max, stats.y_sum_exp);
    return stats;
}
#endif

#if KNOWN
INLINE Found sum_row(const Slice &slice, Pipeline &, RowGroup &)
{
    const Arguments &a = slice.a;
    Found found;
    found.stats = known_stats(a, slice.row, STATE_INPUT_LSE, STATE_TARGET_LSE);
    found.stats.log_z_diff = known(a, STATE_LOG_Z_DIFF, slice.row);
    found.sums.d_log_p = (float)known(a, STATE_D_LOG_P, slice.row);
    found.sums.d_log_q = (float)known(a, STATE_D_LOG_Q, slice.row);
    found.mode = HAS_FAST ? (int)known(a, STATE_MODE, slice.row) : SAFE;
#if HAS_TILTED_LSE
    found.stats.tilted_lse = (float)known(a, STATE_TILTED_LSE, slice.row);
#endif
    return found;
}
#elif VERB == VERB_ACCUMULATE
INLINE Found sum_row(const Slice &slice, Pipeline &pipeline, RowGroup &group)
{
    const Arguments &a = slice.a;
    Found found;
    found.stats = known_stats(a, slice.row, STATS_INPUT_LSE, STATS_TARGET_LSE);
    found.stats.log_z_diff = known(a, STATS_TARGET_LSE, slice.row) - known(a, STATS_INPUT_LSE, slice.row);
#if HAS_TILTED_LSE
    found.stats.tilted_lse = (float)known(a, STATS_TILTED_LSE, slice.row);
#endif
#if HAS_FAST
    found.sums = row_sums<STABLE>(slice, pipeline, group, found.stats);
    if (warp_all(is_finite(found.sums)))
        found.mode = STABLE;
#endif
    if (found.mode == SAFE)
        found.sums = row_sums<SAFE>(slice, pipeline, group, found.stats);
    return found;
}
#else
#if HAS_TILTED_LSE
/* The log-sum-exp of the row's tilted masses. Where it is far from 0, sums are 0 against it; else they are still to be found. */
INLINE void sum_tilted(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found)
{
    const Arguments &a = slice.a;
    const Row row = row_constants<SAFE>(a, found.stats, {});
    const auto log_tilted = [&](float x, float y) { return safe_log_tilted(input_of(a, x), target_of(a, y), row, a.parameter); };
    RowMax top = { -REAL_INFINITY, 0 };
    each_element<false>(slice, pipeline, group, [&](float x, float y, int) { top.x = max_nan(top.x, log_tilted(x, y)); });
    top = all_reduced(a, pipeline, group, top);
    double sum_exp[1] = {};
    each_element<false>(slice, pipeline, group, [&](float x, float y, int) { sum_exp[0] += (double)safe_exp(log_tilted(x, y) - top.x); });
    row_all_reduce(a, pipeline, group, sum_exp, Add());
    const float lse = top.x == REAL_INFINITY ? top.x : top.x + logf((float)sum_exp[0]);
    found.mode = SAFE;
    found.sums = {};
    if (warp_all(fabsf(lse) >= FAR_TILTED_LSE && lse > -REAL_INFINITY))
        found.stats.tilted_lse = lse;
}
#endif

#if HAS_FAST && THREADS_PER_ROW > 32
/* Whether the row's sides are the same */
INLINE bool is_equal(const Slice &slice, Pipeline &pipeline, RowGroup &group)
{
    const Arguments &a = slice.a;
    bool differs = false;
    const auto see = [&](float x, float y) { differs |= input_of(a, x) != target_of(a, y); };
    each_vector<false, false>(slice, pipeline, group, [&](const Packed<X> &x, const Packed<Y> &y, long long, int) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            see(at(x, k), at(y, k));
    });
    each_edge(slice, group, [&](int i) { see(to_real(slice.x()[i]), to_real(slice.y()[i])); });
    return warp_all(all_reduced(a, pipeline, group, differs ? 1.0f : 0.0f) == 0);
}

/* The same, asked of rows whose normalisers are the same. Such a row loses 0, and its gradients are 0. Where its state is wanted, or
   labels count, it is a row as others are. */
INLINE bool has_equal_sides(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats)
{
    const Arguments &a = slice.a;
    return VERB == VERB_LOSS && !HAS_AUXILIARY && !KNOWN && (WANT_GRADIENT || !KEEPS_NUMBERS) && has_one_temperature(a)
        && warp_all(stats.x_max == stats.y_max && stats.x_sum_exp == stats.y_sum_exp) && is_equal(slice, pipeline, group);
}
#endif

#if SUMS_FROM_MOMENTS && HAS_SERIES
/* Σ √(p·q)·r² of rows whose gradients are written by their moments. These are off by up to 1e-6, which 16 bits show where
   squares are less, but for 0. Rows of more are near, or no longer close in all but few tokens. */
#define MIN_SQUARES 1e-4f
#define MAX_SQUARES 6e-3f

/* Whether the token that a maximum was estimated by has so much of the row that its log-ratio says nothing of others' */
INLINE bool is_most(float sum_exp, float inv_temperature)
{
    return sum_exp * ex2(max_margin(inv_temperature) * base_2(inv_temperature)) < 2;
}

/* Whether a row's moments are good for the gradients, where it is close: they are exact enough, and no token has all of them while
   the others' slopes are as small as the error. Then those of a sample are near, and move alike. shift: the log-ratio of the
   tokens that maxima were estimated by, log2. */
INLINE bool foresees(const Slice &slice, Pipeline &pipeline, RowGroup &group, const RowStats &stats, const Sums &sums, float shift)
{
    const Arguments &a = slice.a;
    const float curvature = term_factor(a, 2), squares = in_range_ratio_or_zero(sums.term, curvature);
    if (warp_all(squares > MIN_SQUARES && squares < MAX_SQUARES)) {
        const bool is_near = fabsf(shift) * LN2 < LONG_RATIO && !is_most(stats.x_sum_exp, a.input_inv_temperature)
            && !is_most(stats.y_sum_exp, a.target_inv_temperature);
        return warp_all(is_near) && are_few_apart(slice, pipeline, group, stats);
    }
    /* A Chernoff coefficient is rounded to 1 of other rows too. */
    return warp_all(curvature != 0 && sums.term == 0 && sums.d_log_p == 0 && sums.d_log_q == 0)
        && (!HAS_CHERNOFF || is_equal(slice, pipeline, group));
}
#endif

#if SUMS_FROM_MOMENTS
/* A row's sum is what is left of a moment and the difference of log-sum-exps. Of these 1.5e-7 is rounded, of the difference against the
   maxima that were estimated, log2: less than so much of it counts as near. Where a token has most mass, 3e-7 is rounded of any
   row, and in float32 up to 1e-6. A larger least sum would cost 16 bits much time, and a mean nothing: roundings of rows even out
   there. Where rows' losses are written it halves the errors of the worst. */
#define LEAST_OF_SHIFT (THREADS_PER_ROW > 32 && HAS_LOG_RATIOS ? 0.1f : 0)
#define LEAST_OF_MOMENTS \
    (LEAST_OF_SHIFT == 0 || HAS_CHERNOFF ? MIN_FAST_SUM : !IS_16_BIT ? 0.2f : WRITES_LOSSES ? 0.4f : 0.05f)
/* Rows of a sure token (sure.cuh): the least sum that moments show; the least of which the fast formula's gradients are so little off
   that they can be corrected; and the largest of which they want that */
#define LEAST_CLOSE_SUM (HAS_CHERNOFF ? 2e-6f : 4e-7f)
#define LEAST_SURE_SUM (HAS_CHERNOFF ? 1e-5f : 4e-6f)
#define MAX_SURE_SUM (HAS_CHERNOFF ? 0 : 1e-3f)

INLINE void sum_fast(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found)
{
    const Arguments &a = slice.a;
    const RowStats &stats = found.stats;
    const float x_inverse = 1 / stats.x_sum_exp, y_inverse = 1 / stats.y_sum_exp;
    const float shift = log2f(stats.x_sum_exp / stats.y_sum_exp); /* 0 where they are equal */
    /* 1 - Σ p^a q^(1-a) is to keep its digits */
    const float norm = a.exponent == 0.5f ? sqrtf(stats.x_sum_exp / stats.y_sum_exp) : ex2(a.exponent * shift);
    const float *moments = stats.moments;
    const Element whole = from_moments(HAS_P_LOG_RATIO ? y_inverse * (moments[P_LOG_RATIO] + stats.y_sum_exp * shift) * LN2 : 0,
                                       HAS_Q_LOG_RATIO ? x_inverse * (moments[Q_LOG_RATIO] + stats.x_sum_exp * shift) * LN2 : 0,
                                       HAS_CHERNOFF ? moments[CHERNOFF] / stats.x_sum_exp * norm : 0, a.parameter);
    found.sums = { whole.term, whole.d_log_p, whole.d_log_q };
    const float smaller = fminf(fabsf(a.exponent), fabsf(1 - a.exponent));
    const float of_powers = HAS_CHERNOFF ? fmaxf(1, in_range_ratio_or_zero(0.5f, smaller)) : 1; /* sums are 1 - c over that */
    float least = LEAST_OF_MOMENTS;
    if (LEAST_OF_SHIFT > 0 && has_one_temperature(a))
        least = fmaxf(least, LEAST_OF_SHIFT * fabsf(shift));
    const auto is_foreseen = [&] {
#if HAS_SERIES
        return SUMS_WHILE_WRITING && has_one_temperature(a) && warp_all(is_finite(found.sums))
            && foresees(slice, pipeline, group, stats, found.sums, shift);
#else
        return false;
#endif
    };
    const auto seems_near = [&] { return REFINES_HEAVY && has_one_temperature(a) && is_well_conditioned(found.sums, MIN_NEAR_SUM); };
    const auto defer_term = [&](bool few_are_far = false, bool is_sure = false, int mode = FAST) {
        found.mode = mode;
        found.defers_term = true;
        found.few_are_far = few_are_far;
        found.is_sure = is_sure;
    };
    const auto are_few = [&] { return are_few_apart(slice, pipeline, group, stats); };
    /* Elements of no vector are not on chip: where gradients are written over logits, none would be left to find one again. */
    const auto may_be_sure = [&] { return warp_all(slice.body == (int)a.vocab); };
    if (is_well_conditioned(found.sums, least))
        found.mode = has_one_temperature(a) ? FAST : STABLE;
#if HAS_NEAR_ELEMENT
    else if (REFINES_HEAVY && !are_few() && seems_near())
        defer_term(false, warp_all(fabsf(found.sums.term) < MAX_SURE_SUM) && may_be_sure());
    else if (REFINES_HEAVY && warp_all(found.sums.term != 0) && is_in_reach(slice, pipeline, stats) && (seems_near() || is_foreseen()))
        defer_term(true);
    else if (HAS_FINE_NEAR && is_well_conditioned(found.sums, MIN_NEAR_SUM) && are_few() && may_be_sure()
             && is_in_reach(slice, pipeline, stats))
        defer_term(true, true); /* what gradients sum to tells what log-sum-exps and moments are off by, too */
#endif
    else if (is_foreseen())
        found.mode = STABLE;
    else if (seems_near())
        defer_term(false, warp_all(fabsf(found.sums.term) < MAX_SURE_SUM) && may_be_sure());
#if HAS_SURE_ROWS
    else if (IS_COARSE && (WANT_GRADIENT || !KEEPS_NUMBERS) && has_one_temperature(a) && may_be_sure()
             && is_well_conditioned(found.sums, LEAST_CLOSE_SUM * (1 + fabsf(shift)) * of_powers)) {
        const bool few_are_far = are_few();
#if HAS_NEAR_ELEMENT
        const bool by_ratios = few_are_far && is_in_reach(slice, pipeline, stats), by_powers = false;
#else
        const bool by_ratios = HAS_NEAR, by_powers = few_are_far && !HAS_NEAR && SUMS_WHILE_WRITING;
#endif
        /* Light tokens have a part of the sum as large as their mass; the fast formula rounds of it what it does of any row's. */
        const auto are_light_exact = [&] {
            return is_well_conditioned(found.sums, LEAST_SURE_SUM * (1 + fabsf(shift)))
                && is_well_conditioned(found.sums, MIN_NEAR_SUM * light_mass(slice, pipeline, group, stats));
        };
        if (by_ratios || by_powers || (!few_are_far && are_light_exact()))
            defer_term(few_are_far, true, by_powers ? STABLE : FAST);
    }
#endif
#if HAS_TILTED_LSE
    const float lse = logf(moments[CHERNOFF] / stats.x_sum_exp * norm);
    if (warp_all(fabsf(lse) < FAR_TILTED_LSE))
        return;
    if (found.mode != SAFE && warp_all(moments[CHERNOFF] > MIN_CHERNOFF)) {
        found.stats.tilted_lse = lse;
        found.sums = {};
    } else {
        sum_tilted(slice, pipeline, group, found);
    }
#endif
}
#elif HAS_FAST_SUM
/* What either side has beside the one thread that may have nearly all of it; else nearly 1 */
INLINE float spread_mass(const RowStats &stats)
{
    if (!OVERLAP_SHARED)
        return 1;
    const float shared = in_range_ratio_or_zero(in_range_ratio_or_zero(stats.overlap, stats.x_sum_exp), stats.y_sum_exp);
    return 1 - fast_sqrt(fminf(shared, 1));
}

/* Of light tokens the fast formula rounds the more, the more mass they have. With a corner it serves rows of less than others: what
   masses are off by alike is known (sum_by_slopes). */
#define LEAST_CORNER_SUM (HAS_CORNER ? 2e-4f : 0)
INLINE float least_near_sum(const RowStats &stats) { return fmaxf(MIN_NEAR_SUM * spread_mass(stats), LEAST_CORNER_SUM); }
INLINE float least_far_sum(const RowStats &stats)
{
    return HAS_CORNER && IS_COARSE ? fmaxf(0.004f * spread_mass(stats), LEAST_CORNER_SUM) : MIN_FAST_SUM;
}

/* With a corner: whether the exponents' difference of log-sum-exps is that of two logits but for what those round, so that of a token of
   such logits a rounding would decide which mass is larger. Differences of 16-bit logits above 1/2 are multiples of 2⁻⁸. */
INLINE bool may_tie(const Arguments &a, const RowStats &stats)
{
    const float inv_temperature = a.input_inv_temperature; /* of both */
    const double log_z_diff = log_z_diff_of_exponents(a, log2_z(stats.x_max, stats.x_sum_exp, inv_temperature),
                                                      log2_z(stats.y_max, stats.y_sum_exp, inv_temperature));
    const float steps = (float)(256 * log_z_diff / (double)inv_temperature);
    return HAS_CORNER && warp_all(fabsf(steps - rintf(steps)) * inv_temperature < 256 * 4e-6f);
}

/* By its sample: were log-ratios normally distributed, their neighbours would differ by 2/√π deviations, and the total variation
   be 0.4 of one, of what mass a sure token leaves. */
INLINE bool seems_near(const Slice &slice, const RowGroup &group, const RowStats &stats)
{
    const float sampled = HAS_PEERS ? stats.sampled : (float)sampled_pairs(slice, group);
    const float apart = 0.35f * slice.a.input_inv_temperature * stats.spread * spread_mass(stats);
    return SAMPLES_SPREAD && (warp_all(apart < least_far_sum(stats) * sampled) || may_tie(slice.a, stats));
}

/* Of slopes that are cached by the fast formula */
INLINE SlopeScale fast_scale(const Arguments &a, const RowStats &stats, float predicted)
{
    const Coefficients common = fast_coefficients(row_constants<FAST>(a, opaque(stats), {}), a.parameter);
    return { common.factor_q, fmaf(common.factor_q, predicted, common.offset_q) };
}

/* Whether the row's sums are found as of one that is far; else it is as it was. */
INLINE bool sum_far(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found, float predicted)
{
    found.sums = has_finite_exponents(found.stats)
        ? sum_by_slopes<true, false>(slice, pipeline, group, found.stats, predicted)
        : sum_by_slopes<false, false>(slice, pipeline, group, found.stats, predicted);
    if (is_well_conditioned(found.sums, least_far_sum(found.stats))) {
        found.mode = FAST;
        found.cached = fast_scale(slice.a, found.stats, predicted);
        return true;
    }
    reload_row(slice, pipeline, group);
    return false;
}

/* The sums of a row that is not far. is_close: whether its sum is less than masses and slopes show */
INLINE bool sum_near_row(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found, float predicted, bool is_close)
{
    const bool is_caching = CACHES_SLOPES;
#if HAS_NEAR
    const FewBeyond reach = reach_of(slice, pipeline, group, found.stats);
    if (reach != NO_REACH) {
        const float mean = fast_scale(slice.a, found.stats, predicted).offset;
        predicted = FORESEES_CLOSE && is_caching && fabsf(mean) > 1e-5f ? mean : 0; /* of equal sides a rounding */
        found.sums = NARROW_TERMS && reach == NARROW_REACH
            ? sum_near<NARROW_TERMS != 0>(slice, pipeline, group, found.stats, predicted)
            : sum_near<false>(slice, pipeline, group, found.stats, predicted);
        found.cached = slope_scale(slice.a, predicted);
        const bool is_served = is_well_conditioned(found.sums, LEAST_CACHED_SUM) || warp_all(found.sums.term == 0);
        /* Where slopes are not cached, the fast formula finds gradients, and is too coarse if the row is close. */
        if (is_served)
            found.mode = is_caching || is_well_conditioned(found.sums, MIN_NEAR_SUM) ? FAST : STABLE;
        else
            reload_row(slice, pipeline, group);
        return is_served;
    }
#endif
    if (is_close || (FORESEES_CLOSE && !has_finite_exponents(found.stats)))
        return false;
    found.sums = sum_by_slopes<FORESEES_CLOSE, REFINES_HEAVY>(slice, pipeline, group, found.stats, predicted);
    found.cached = fast_scale(slice.a, found.stats, predicted);
    const bool is_served = is_well_conditioned(found.sums, least_near_sum(found.stats));
    if (is_served)
        found.mode = FAST;
    else
        reload_row(slice, pipeline, group);
    return is_served;
}

INLINE void sum_fast(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found)
{
    const Arguments &a = slice.a;
    if (!has_one_temperature(a))
        return;
    /* To leading order the kind is 2·c₂ of the KL(q‖p) that the mean is; its factor says how much more it may be. */
    const Ratios ratios = predicted_ratios(slice, pipeline, group, found.stats);
    const bool is_foreseen = FORESEES_CLOSE && term_factor(a, 2) != 0;
    const float most = is_foreseen ? -REVERSE_KL_FACTOR * LN2 * term_factor(a, 2) * ratios.mean : REAL_INFINITY;
    const float predicted = PREDICTS_SLOPE ? predicted_slope(a, ratios, row_constants<FAST>(a, found.stats, {})) : 0;
    if (!REFINES_HEAVY) {
        if (most >= MIN_FAST_SUM && !seems_near(slice, group, found.stats))
            sum_far(slice, pipeline, group, found, predicted);
        return;
    }
    const bool is_far_first = SAMPLES_SPREAD ? !seems_near(slice, group, found.stats) : most >= 1.5f * MIN_FAST_SUM;
    if (is_far_first && (sum_far(slice, pipeline, group, found, predicted) || !warp_all(is_finite(found.sums))))
        return;
    const bool is_close = is_far_first ? !is_well_conditioned(found.sums, 0.5f * least_near_sum(found.stats))
                                         : most < REVERSE_KL_FACTOR * MIN_NEAR_SUM;
    const bool is_served = sum_near_row(slice, pipeline, group, found, predicted, is_close);
    /* The sum decides, and not what is foreseen of it: exchanging p and q changes nothing of a symmetric kind's. */
    if (FORESEES_CLOSE && is_served && !is_far_first && is_well_conditioned(found.sums)) {
        found.mode = SAFE;
        reload_row(slice, pipeline, group);
        sum_far(slice, pipeline, group, found, predicted);
    }
}
#else
INLINE void sum_fast(const Slice &, Pipeline &, RowGroup &, Found &) {}
#endif

#if HAS_FAST
/* A row that one token has, but for M: of a loss of M·r² an excess of 3e-6·r·√M would hide what the gradient has, M·r. */
INLINE bool seems_peaked(const Sums &sums)
{
    return sums.squares > 0.99999f && sums.q_minus_p * sums.q_minus_p > 1e-11f * fabsf(sums.term) && is_finite(sums);
}

/* Whether one token has all of both sides but what a float does not show beside 1: the gradient is as small as the rest. Then
   log-sum-exps are taken to differ as the token's logits do, so that its log-ratio is 0, not a rounding that is more than
   that. */
INLINE bool align_at_peak(const Slice &slice, Pipeline &pipeline, RowGroup &group, RowStats &stats)
{
    const Arguments &a = slice.a;
    const RowMax row_max = exact_max(slice, pipeline, group);
    const auto against = [](float highest, float max, float sum_exp, float inv_temperature) {
        return sum_exp * ex2(mul_rn(max, base_2(inv_temperature)) - mul_rn(highest, base_2(inv_temperature)));
    };
    const auto is_one = [](float highest, float sum_exp, float inv_temperature) {
        return fabsf(sum_exp + (float)scaling_error(highest, inv_temperature) * LN2 - 1) < 1e-6f;
    };
    const float x_sum_exp = against(row_max.x, stats.x_max, stats.x_sum_exp, a.input_inv_temperature);
    const float y_sum_exp = against(row_max.y, stats.y_max, stats.y_sum_exp, a.target_inv_temperature);
    if (!warp_all(is_one(row_max.x, x_sum_exp, a.input_inv_temperature)
                  && is_one(row_max.y, y_sum_exp, a.target_inv_temperature)))
        return false;
    stats.x_max = row_max.x;
    stats.y_max = row_max.y;
    stats.x_sum_exp = x_sum_exp;
    stats.y_sum_exp = y_sum_exp;
    stats.correction = REAL_INFINITY;
    return true;
}

INLINE void sum_stable(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found)
{
    /* The difference of log-sum-exps that floats found is wrong by the excess. Smooth kinds have its square, and seldom too
       much of it; one with a corner has it as it is. */
    bool may_be_peaked = HANDLES_PEAKED;
    const auto restore = [&] {
        if (CACHES_DERIVATIVES)
            reload_row(slice, pipeline, group);
    };
#pragma unroll 1
    for (bool again = true; again;) {
        found.sums = row_sums<STABLE>(slice, pipeline, group, found.stats);
        if (may_be_peaked && found.stats.correction == 0 && warp_all(seems_peaked(found.sums))) {
            may_be_peaked = false;
            restore();
            again = align_at_peak(slice, pipeline, group, found.stats) || CACHES_DERIVATIVES;
            if (again)
                continue;
        }
        const float slope = HAS_CORNER ? 0.5f : fmaxf(fabsf(found.sums.d_log_p), fabsf(found.sums.d_log_q)); /* else 0 at a tie */
        const float wrong = fabsf(found.sums.q_minus_p) * slope;
        again = found.stats.correction == 0 && warp_all(wrong > 1e-6f * fabsf(found.sums.term) && is_finite(found.sums));
        if (again) {
            found.stats.correction = -found.sums.q_minus_p;
#if HAS_CORNER
            /* Of tokens whose sign it may turn, the mass beside that of the rarer sign: gradients are as small as that. */
            const float excess = found.sums.q_minus_p, rarer = 0.5f - fabsf(found.sums.d_log_q);
            if (warp_all(fabsf(excess) <= TIE && found.sums.ties <= 1e-6f * rarer)) {
                found.sums.term = without_excess(found.sums.term, found.sums.d_log_q, excess);
                found.sums.d_log_p = found.sums.term - found.sums.d_log_q;
                break;
            }
#endif
            restore();
        }
    }
    found.mode = warp_all(is_finite(found.sums)) ? STABLE : SAFE;
    if (found.mode == SAFE)
        restore();
}
#endif

INLINE Found sum_row(const Slice &slice, Pipeline &pipeline, RowGroup &group)
{
    Found found;
    const bool in_range = normalise(slice, pipeline, group, found.stats);
    found.stats.set_in_range(in_range);
    if (VERB == VERB_STATISTICS && !SUMS_FROM_MOMENTS)
        return found;
#if HAS_FAST && THREADS_PER_ROW > 32
    if (in_range && has_equal_sides(slice, pipeline, group, found.stats)) {
        found.mode = EQUAL;
        return found;
    }
#endif
#if HAS_FAST
    if (in_range) {
        sum_fast(slice, pipeline, group, found);
        if (warp_all(found.stats.tilted_lse == 0) && found.mode == SAFE && warp_all(is_finite(found.sums)))
            sum_stable(slice, pipeline, group, found);
        found.defers_term |= SUMS_WHILE_WRITING && found.mode == STABLE;
    }
#endif
#if HAS_TILTED_LSE
    if (!in_range)
        sum_tilted(slice, pipeline, group, found);
#endif
    if (warp_all(found.stats.tilted_lse == 0) && found.mode == SAFE)
        found.sums = row_sums<SAFE>(slice, pipeline, group, found.stats);
    return found;
}
#endif

INLINE double input_lse(const Arguments &a, const RowStats &stats)
{
    return INPUT_IS_LOGITS ? lse_of(stats.x_max, stats.x_sum_exp, a.input_inv_temperature, stats.in_range()) : 0;
}
INLINE double target_lse(const Arguments &a, const RowStats &stats)
{
    return TARGET_IS_LOGITS ? lse_of(stats.y_max, stats.y_sum_exp, a.target_inv_temperature, stats.in_range()) : 0;
}

INLINE void keep_state(const Arguments &a, unsigned r, const Found &found, double d_loss)
{
    keep(a, STATE_INPUT_LSE, r, input_lse(a, found.stats));
    keep(a, STATE_TARGET_LSE, r, target_lse(a, found.stats));
    keep(a, STATE_LOG_Z_DIFF, r, HAS_FAST ? log_z_diff_of(a, found.stats) : 0);
    keep(a, STATE_D_LOG_P, r, found.sums.d_log_p);
    keep(a, STATE_D_LOG_Q, r, found.sums.d_log_q);
    keep(a, STATE_D_LOSS, r, d_loss);
    keep(a, STATE_MODE, r, found.mode);
#if HAS_TILTED_LSE
    keep(a, STATE_TILTED_LSE, r, found.stats.tilted_lse);
#endif
}

/* What is known to be wrong with the difference of log-sum-exps is taken off, a half from each. */
INLINE void keep_statistics(const Arguments &a, unsigned r, const Found &found)
{
    const double x = input_lse(a, found.stats), y = target_lse(a, found.stats);
    const double half = SUMS_FROM_MOMENTS && found.mode == STABLE ? 0.5 * (log_z_diff_of(a, found.stats) - (y - x)) : 0;
    keep(a, STATS_INPUT_LSE, r, x - half);
    keep(a, STATS_TARGET_LSE, r, y + half);
    keep(a, STATS_TERM, r, found.sums.term);
    keep(a, STATS_D_LOG_P, r, found.sums.d_log_p);
    keep(a, STATS_D_LOG_Q, r, found.sums.d_log_q);
    keep(a, STATS_MODE, r, found.mode);
#if HAS_TILTED_LSE
    keep(a, STATS_TILTED_LSE, r, found.stats.tilted_lse);
#endif
}

INLINE void keep_sums(const Arguments &a, unsigned r, const Found &found)
{
    keep(a, SUMS_TERM, r, found.sums.term);
    keep(a, SUMS_D_LOG_P, r, found.sums.d_log_p);
    keep(a, SUMS_D_LOG_Q, r, found.sums.d_log_q);
    keep(a, SUMS_Q_MINUS_P, r, found.sums.q_minus_p);
    keep(a, SUMS_MODE, r, found.mode);
}

#if SUMS_FROM_MOMENTS && !KNOWN
/* A row whose moments lack its term: that is summed and gradients are written in one sweep, which releases the row. False where
   nobody waits for its loss: that is added here, and the row is done. */
INLINE bool add_term(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found, float labelled)
{
    const Arguments &a = slice.a;
    const unsigned r = slice.row;
    const double derivative = WANT_GRADIENT ? finish(found.sums.term, found.stats.tilted_lse, finish_parameter(a)).derivative : 0;
    const double d_loss = dividing(a, pipeline, found.stats, derivative);
    const GradOut grad_out = grad_out_of(a, pipeline, WANT_GRADIENT ? weight_of(a, r) : 0, d_loss);
#if HAS_AUXILIARY
    if (WANT_GRADIENT)
        shift_sum(a, pipeline, found.stats, found.sums, (float)d_loss);
#endif
    TermSums term;
    if (SUMS_WHILE_WRITING && found.mode == STABLE)
        term = write_stable_gradients(slice, pipeline, group, found.stats, found.sums, found.is_sure, grad_out);
    if (found.mode == FAST)
        term = near_term<WANT_GRADIENT, VERB == VERB_LOSS>(slice, pipeline, group, found.stats, found.sums, found.few_are_far,
                                                           found.is_sure, grad_out);
#if VERB == VERB_LOSS && FINISH_IS_LINEAR && FINISH_IS_IDENTITY && !HAS_PEERS && !WRITES_LOSSES && !KEEPS_NUMBERS
    const float mine = warp_sum(term.light + term.heavy) * (float)divergence_weight(a) + labelled;
    if (threadIdx.x % LOGICAL_WARP == 0)
        warp_losses[threadIdx.x / LOGICAL_WARP] += weight_of(a, r) * (double)mine;
#if HAS_AUXILIARY
    if (WANT_GRADIENT)
        write_label(slice, group, true);
#endif
    return false;
#else
    const TermSums whole = all_reduced(a, pipeline, group, term);
    found.sums.term = found.stats.tilted_lse == 0 ? whole.light + whole.heavy : 0;
    return true;
#endif
}
#endif

#if VERB != VERB_STATISTICS && VERB != VERB_ACCUMULATE
/* The wanted gradients; without any the row is released. */
INLINE void write_row(const Slice &slice, Pipeline &pipeline, RowGroup &group, Found &found, double weight, double d_loss)
{
    if (found.defers_term) { /* what was to be written is, and the row is released */
#if HAS_AUXILIARY
        if (WANT_GRADIENT)
            write_label(slice, group, true);
#endif
        return;
    }
    if (WANT_GRADIENT && found.mode == EQUAL) {
        write_zeros(slice, pipeline, group);
    } else if (WANT_GRADIENT) {
        const GradOut grad_out = grad_out_of(slice.a, pipeline, weight, d_loss);
#if HAS_AUXILIARY
        shift_sum(slice.a, pipeline, found.stats, found.sums, (float)d_loss);
#endif
        if (found.mode == FAST)
            write_gradients<FAST>(slice, pipeline, group, found.stats, found.sums, found.cached, grad_out);
        else if (!SUMS_WHILE_WRITING && found.mode == STABLE)
            write_stable_gradients(slice, pipeline, group, found.stats, found.sums, false, grad_out);
        else
            write_gradients<SAFE>(slice, pipeline, group, found.stats, found.sums, {}, grad_out);
#if HAS_AUXILIARY
        write_label(slice, group, found.mode != SAFE);
#endif
    } else {
        release_row(slice, pipeline, group);
    }
}
#endif

INLINE void process_row(const Slice &slice, Pipeline &pipeline, RowGroup &group)
{
    const Arguments &a = slice.a;
    const unsigned r = slice.row;
#if RESIDENT
    pipeline.lead = slice.lead;
#endif
#if HAS_PEERS
    group.row = r;
    group.sent = 0;
#endif
#if HAS_AUXILIARY
    read_label(slice, pipeline, group);
#endif
    Found found = sum_row(slice, pipeline, group);
    float labelled = 0;
#if WANT_FIGURES
    if (is_first_thread(group)) /* before the label's place is another row's */
        keep_summary(a, pipeline, r, found.stats);
#elif HAS_AUXILIARY
    if (!KNOWN && is_first_thread(group))
        labelled = labelled_loss(a, label_of(pipeline).token, label_of(pipeline).x, found.stats);
#endif
#if SUMS_FROM_MOMENTS && !KNOWN
    if (found.defers_term && !add_term(slice, pipeline, group, found, labelled))
        return;
#endif
#if VERB == VERB_STATISTICS || VERB == VERB_ACCUMULATE
    if (is_first_thread(group)) {
        if (VERB == VERB_STATISTICS)
            keep_statistics(a, r, found);
        else
            keep_sums(a, r, found);
    }
    release_row(slice, pipeline, group);
#else
    const Finish done = KNOWN ? Finish { 0, known(a, STATE_D_LOSS, r) } : finish(found.sums.term, found.stats.tilted_lse, finish_parameter(a));
    if (!WANT_GRADIENT && KEEPS_NUMBERS && is_first_thread(group)) /* now, so that nothing of it is kept any longer */
        keep_state(a, r, found, done.derivative);
    const double weight = weight_of(a, r); /* read again, so that no register holds it till now */
    if (!KNOWN && is_first_thread(group)) {
        const double loss = weight * (divergence_weight(a) * done.loss + labelled);
        group_losses[threadIdx.x / THREADS_PER_ROW] += loss; /* the group, found again: so no register holds it */
        if (WRITES_LOSSES)
            write_loss(a, r, loss);
    }
    write_row(slice, pipeline, group, found, weight, dividing(a, pipeline, found.stats, done.derivative));
#endif
}

/* A row of weight 0 is not read: garbage in it cannot leak. */
INLINE void clear_row(const Arguments &a, const RowGroup &group, unsigned r)
{
    for (unsigned i = cta_rank() * THREADS_PER_ROW + group.thread; i < a.vocab; i += group.cluster * THREADS_PER_ROW) {
        if (WANT_INPUT)
            a.d_input[r * a.d_input_stride + i] = rounded<DX>(0);
        if (WANT_TARGET)
            a.d_target[r * a.d_target_stride + i] = rounded<DY>(0);
    }
    if (is_first_thread(group)) {
        if (WRITES_LOSSES)
            a.loss[r] = rounded<LOSS>(0);
        if (WANT_FIGURES)
            a.figures[r] = a.figures[a.rows + r] = 0;
        const int fields = VERB == VERB_STATISTICS ? (int)STATS_FIELDS : VERB == VERB_ACCUMULATE ? (int)SUMS_FIELDS : (int)STATE_FIELDS;
        if (KEEPS_NUMBERS)
            for (int field = 0; field < fields; field++)
                keep(a, field, r, 0);
    }
}

}
