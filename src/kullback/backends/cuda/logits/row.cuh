/* One row: which vocabulary serves it, its loss, its state, its gradients. */

__shared__ double results[GROUPS]; /* each of its group's first thread */

INLINE double weight_of(const Arguments &a, unsigned r) { return a.weights ? (double)a.weights[r] : 1; }

template <int VOCABULARY>
INLINE Sums summed(const Share &share, Ring &ring, Team &team, const Survey &survey)
{
#if HAS_SERIES
    if (VOCABULARY == CLOSE) {
        const Near near(share.a, found_here(survey));
        const Sums sums = near.serves(share, ring, team)
            ? own_sums_in_powers(share, ring, team, near, survey)
            : own_sums<CLOSE>(share, ring, team, survey);
        return exchanged(share.a, ring, team, sums);
    }
#endif
    return exchanged(share.a, ring, team, own_sums<VOCABULARY>(share, ring, team, survey));
}

INLINE void write_close_gradients(const Share &share, Ring &ring, const Team &team, const Survey &survey, const Sums &sums,
                                  Upstream upstream)
{
#if HAS_SERIES
    const Near near(share.a, found_here(survey));
    if (near.serves(share, ring, team)) {
        write_gradients_in_powers(share, ring, team, near, survey, sums, upstream);
        return;
    }
#endif
    write_gradients<CLOSE>(share, ring, team, survey, sums, 0, upstream);
}

/* What is found of a row before its gradients are written */
struct Found {
    Survey survey;
    Sums sums;
    int vocabulary = GUARDED;
    float expected = 0; /* of slopes that are kept */
};

INLINE bool is_number(const Sums &sums)
{
    return fabsf(sums.term) < MOST && fabsf(sums.d_log_p) < MOST && fabsf(sums.d_log_q) < MOST;
}

INLINE bool are_apart(const Sums &sums) /* what is left of 1 - overlap is in both partial derivatives */
{
    const float least = HAS_OVERLAP ? fminf(fabsf(sums.d_log_p), fabsf(sums.d_log_q)) : fabsf(sums.term);
    return agreed(least > LEAST_APART && is_number(sums));
}

#if KNOWN
/* What `save` wrote */
INLINE Found find(const Share &share, Ring &, Team &)
{
    const Arguments &a = share.a;
    Found found;
    Survey &survey = found.survey;
    const double *known = a.known_state + share.row;
    survey.x_top = (float)(known[0] / (double)a.input_scale);
    survey.x_total = (float)fabs(known[a.rows]);
    survey.y_top = (float)(known[2ll * a.rows] / (double)a.target_scale);
    survey.y_total = (float)known[3ll * a.rows];
    found.sums = { (float)known[4ll * a.rows], (float)known[5ll * a.rows], (float)known[6ll * a.rows] };
    if (HAS_APART && known[a.rows] > 0) {
        found.vocabulary = has_one_scale(a) && are_apart(found.sums) ? APART : CLOSE;
        /* to the bit what the sums were found with */
        survey.x_total = (float)(known[a.rows] / exp2(rounding_of(survey.x_top, a.input_scale)));
        survey.y_total = (float)(known[3ll * a.rows] / exp2(rounding_of(survey.y_top, a.target_scale)));
    }
    survey.is_usual = found.vocabulary != GUARDED;
    if (found.vocabulary == CLOSE)
        survey.correction = SEEKS_ONE_WORD && known[a.rows] == known[3ll * a.rows]
            ? K_INFINITY
            : (float)(known[2ll * a.rows] - known[0] + log_quotient_of(known[3ll * a.rows], known[a.rows]) - shift_of(a, survey));
    return found;
}
#else
#if IS_SURVEYED
INLINE void sum_apart(const Share &share, Ring &, Team &, Found &found)
{
    const Arguments &a = share.a;
    const Survey &survey = found.survey;
    const float x_inverse = 1 / survey.x_total, y_inverse = 1 / survey.y_total;
    const float shift = log2f(survey.x_total * y_inverse);
    /* 1 - overlap is to keep its digits */
    const float overlap_norm = a.exponent == 0.5f ? sqrtf(survey.x_total / survey.y_total) : power_of_2(a.exponent * shift);
    const float *moments = survey.moments;
    const Element whole = of_moments(HAS_CROSS_P ? y_inverse * (moments[CROSS_P] + survey.y_total * shift) * LN2 : 0,
                                     HAS_CROSS_Q ? x_inverse * (moments[CROSS_Q] + survey.x_total * shift) * LN2 : 0,
                                     HAS_OVERLAP ? moments[OVERLAP] / survey.x_total * overlap_norm : 0, a.parameters);
    found.sums = { whole.term, whole.d_log_p, whole.d_log_q };
    if (are_apart(found.sums))
        found.vocabulary = has_one_scale(a) ? APART : CLOSE;
}
#elif HAS_APART
INLINE void sum_apart(const Share &share, Ring &ring, Team &team, Found &found)
{
    const Arguments &a = share.a;
    /* To leading order the kind is 2·c₂ of the divergence that the mean is; jensen_shannon is never more than 2.8·c₂ of
       it, so that exchanging p and q changes no row's vocabulary. */
    const Ratios ratios = foretold(share, ring, team, found.survey);
    const bool seems_close = IS_FORETOLD && -3 * LN2 * term_factor(a, 2) * ratios.mean < LEAST_APART && term_factor(a, 2) != 0;
    if (!has_one_scale(a) || seems_close)
        return;
    if (KEEPS_SLOPES && IS_FORETOLD)
        found.expected = expected_slope(a, ratios, row_of<APART>(a, found.survey, {}));
    found.sums = is_finite(found.survey)
        ? summed_by_slopes<true>(share, ring, team, found.survey, found.expected)
        : summed_by_slopes<false>(share, ring, team, found.survey, found.expected);
    if (are_apart(found.sums))
        found.vocabulary = APART;
    else
        restore(share, ring, team);
}
#endif

#if HAS_APART
/* Of a loss of M·r², of words that have M of the row, a word's excess of 3e-6·r·√M would hide what the gradient has, M·r */
INLINE bool seems_one_word(const Sums &sums) { return sums.excess * sums.excess > 1e-11f * fabsf(sums.term) && is_number(sums); }

/* Whether one word has all of both sides but what a float does not show beside 1: the gradient is as small as the rest. Then
   the norms are taken to differ as the word's logits do, so that its log-ratio is 0, not a rounding that is more than that. */
INLINE bool aligned_at_one_word(const Share &share, Ring &ring, Team &team, Survey &survey)
{
    const Arguments &a = share.a;
    const Tops tops = found_tops(share, ring, team);
    const auto measured_by = [](float highest, float top, float total, float scale) {
        return total * power_of_2(product(top, binary(scale)) - product(highest, binary(scale)));
    };
    const auto is_all = [](float highest, float total, float scale) {
        return fabsf(total + (float)rounding_of(highest, scale) * LN2 - 1) < 1e-6f;
    };
    const float x_total = measured_by(tops.x, survey.x_top, survey.x_total, a.input_scale);
    const float y_total = measured_by(tops.y, survey.y_top, survey.y_total, a.target_scale);
    if (!agreed(is_all(tops.x, x_total, a.input_scale) && is_all(tops.y, y_total, a.target_scale)))
        return false;
    survey.x_top = tops.x;
    survey.y_top = tops.y;
    survey.x_total = x_total;
    survey.y_total = y_total;
    survey.correction = K_INFINITY;
    return true;
}

INLINE void sum_close(const Share &share, Ring &ring, Team &team, Found &found)
{
    /* The floats' shift is wrong by the excess. Smooth kinds have its square, and seldom too much of it; total_variation
       has it as it is. */
#pragma unroll 1
    for (bool again = true; again;) {
        found.sums = summed<CLOSE>(share, ring, team, found.survey);
        again = SEEKS_ONE_WORD && found.survey.correction == 0 && agreed(seems_one_word(found.sums))
            && aligned_at_one_word(share, ring, team, found.survey);
        if (again)
            continue;
        const float wrong = fabsf(found.sums.excess) * fmaxf(fabsf(found.sums.d_log_p), fabsf(found.sums.d_log_q));
        again = found.survey.correction == 0 && agreed(wrong > 1e-6f * fabsf(found.sums.term) && is_number(found.sums));
        if (again)
            found.survey.correction = -found.sums.excess;
    }
    found.vocabulary = agreed(is_number(found.sums)) ? CLOSE : GUARDED;
}
#endif

INLINE Found find(const Share &share, Ring &ring, Team &team)
{
    Found found;
    found.survey.is_usual = normalize(share, ring, team, found.survey);
#if HAS_APART
    if (found.survey.is_usual) {
        sum_apart(share, ring, team, found);
        if (found.vocabulary == GUARDED && agreed(is_number(found.sums)))
            sum_close(share, ring, team, found);
    }
#endif
    if (found.vocabulary == GUARDED)
        found.sums = summed<GUARDED>(share, ring, team, found.survey);
    return found;
}
#endif

/* For a backward pass, which is to find the same masses to the bit */
INLINE void save(const Arguments &a, unsigned r, const Found &found)
{
    const Survey &survey = found.survey;
    const double x_top = (double)survey.x_top * (double)a.input_scale, y_top = (double)survey.y_top * (double)a.target_scale;
    double x_total = survey.x_total * (survey.is_usual ? exp2(rounding_of(survey.x_top, a.input_scale)) : 1);
    double y_total = survey.y_total * (survey.is_usual ? exp2(rounding_of(survey.y_top, a.target_scale)) : 1);
    if (SEEKS_ONE_WORD && found.vocabulary == CLOSE && survey.correction == K_INFINITY) {
        x_total = y_total = sqrt(x_total * y_total); /* equal: so that backward knows */
    } else if (found.vocabulary == CLOSE) { /* half each: so that their quotient is the shift that was used, whichever is which */
        const double half = 0.5 * (shift_of(a, survey) - (y_top - x_top) - log_quotient_of(y_total, x_total));
        x_total *= exp(-half);
        y_total *= exp(half);
    }
    a.state[r] = x_top;
    /* Backward is to take guards where forward did; of the other vocabularies it finds its own. */
    a.state[a.rows + r] = HAS_APART && found.vocabulary == GUARDED ? -x_total : x_total;
    a.state[2ll * a.rows + r] = y_top;
    a.state[3ll * a.rows + r] = y_total;
    a.state[4ll * a.rows + r] = found.sums.term;
    a.state[5ll * a.rows + r] = found.sums.d_log_p;
    a.state[6ll * a.rows + r] = found.sums.d_log_q;
}

INLINE void one_row(const Arguments &a, Ring &ring, Team &team, unsigned r)
{
    const Share share = share_of(a, r, own_rank());
    const Found found = find(share, ring, team);
    if (!WANT_GRADIENT && a.state && team.lane == 0 && own_rank() == 0) /* now, so that nothing of it is kept any longer */
        save(a, r, found);
    const Finish done = finish(found.sums.term, a.parameters);
    const double weight = weight_of(a, r); /* read again, so that no register holds it till now */
    if (team.lane == 0 && own_rank() == 0) {
        const double loss = weight * done.loss;
        results[threadIdx.x / LANES] += loss; /* the group, found again: so no register holds it */
        if (a.losses)
            a.losses[r] = rounded<LOSS>((real)loss);
    }
    if (WANT_GRADIENT) {
        const Upstream upstream(a, (float)(weight * a.scale * done.slope));
        if (found.vocabulary == APART)
            write_gradients<APART>(share, ring, team, found.survey, found.sums, found.expected, upstream);
        else if (found.vocabulary == CLOSE)
            write_close_gradients(share, ring, team, found.survey, found.sums, upstream);
        else
            write_gradients<GUARDED>(share, ring, team, found.survey, found.sums, 0, upstream);
    } else {
        release_row(share, ring, team);
    }
}

/* A row of weight 0 is not read: garbage in it cannot leak. */
INLINE void clear(const Arguments &a, const Team &team, unsigned r)
{
    for (unsigned i = own_rank() * LANES + team.lane; i < a.vocab; i += team.size * LANES) {
        if (WANT_INPUT)
            a.input_gradient[r * a.input_gradient_stride + i] = rounded<X>(0);
        if (WANT_TARGET)
            a.target_gradient[r * a.target_gradient_stride + i] = rounded<Y>(0);
    }
    if (team.lane == 0 && own_rank() == 0) {
        if (a.losses)
            a.losses[r] = rounded<LOSS>(0);
        if (a.state)
            for (int k = 0; k < 7; k++)
                a.state[(long long)k * a.rows + r] = 0;
    }
}
