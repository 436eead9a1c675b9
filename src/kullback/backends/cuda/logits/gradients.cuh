/* A row's gradients, written element by element. */

/* What is upstream of a row's logits */
struct Upstream {
    float input, target;

    INLINE Upstream(const Arguments &a, float loss)
        : input(INPUT_IS_LOGITS ? loss * a.input_scale : loss), target(TARGET_IS_LOGITS ? loss * a.target_scale : loss) {}
};

template <int VOCABULARY>
INLINE void differentiate(const Arguments &a, float x, float y, const Row &row, Upstream upstream, X &input, Y &target)
{
    float q = input_of(a, x), p = target_of(a, y);
    if (VOCABULARY == APART) {
        q = bounded_logit(q, row.input_top, a.input_scale);
        p = bounded_logit(p, row.target_top, a.target_scale);
    }
    const Element e = element<VOCABULARY>(a, q, p, row);
    input = rounded<X>(e.input * (INPUT_IS_CAPPED ? upstream.input * cap_slope(q, a.input_cap) : upstream.input));
    target = rounded<Y>(e.target * (TARGET_IS_CAPPED ? upstream.target * cap_slope(p, a.target_cap) : upstream.target));
}

INLINE void write_element(const Share &share, X input, Y target, int i)
{
    if (WANT_INPUT)
        share.input_gradient()[i] = input;
    if (WANT_TARGET)
        share.target_gradient()[i] = target;
}

/* Where the row's vectors of gradients begin; in registers where these are to be had */
struct Places {
    X *input;
    Y *target;

    INLINE Places(const Share &share)
        : input(WANT_INPUT ? share.input_gradient() + share.head : 0), target(WANT_TARGET ? share.target_gradient() + share.head : 0)
    {
        if (RESIDENT && WANT_INPUT)
            input = found_here(input);
        if (RESIDENT && WANT_TARGET)
            target = found_here(target);
    }
    INLINE void write(const Packed<X> &input_vector, const Packed<Y> &target_vector, long long before) const
    {
        if (WANT_INPUT)
            store((X *)((unsigned char *)input + before), input_vector);
        if (WANT_TARGET)
            store((Y *)((unsigned char *)target + (X_BYTES == Y_BYTES ? before : before / X_BYTES * Y_BYTES)), target_vector);
    }
};

template <int VOCABULARY>
INLINE void write_gradients(const Share &share, Ring &ring, const Team &team, const Survey &survey, const Sums &sums,
                            float expected, Upstream upstream)
{
    const Arguments &a = share.a;
    const Row row = row_of<VOCABULARY>(a, survey, sums);
    const auto one = [&](float x, float y, int i, const Row &row) {
        X input;
        Y target;
        differentiate<VOCABULARY>(a, x, y, row, upstream, input, target);
        write_element(share, input, target, i);
    };
    if (VOCABULARY == GUARDED) {
        each_element<true>(share, ring, team, [&](float x, float y, int i) { one(x, y, i, row); });
        return;
    }
    const Places places(share);
    each_vector<false, true, VOCABULARY == APART>(share, ring, team, [&](Packed<X> x, Packed<Y> y, long long before, int) {
        Packed<X> input;
        Packed<Y> target;
#if KEEPS_SLOPES
        if (VOCABULARY == APART) {
            const Affinity common = apart_affinity(row, found_here(a.parameters));
            const float of_slope = upstream.input * common.factor_q;
            const float less = upstream.input * (common.factor_q * expected + common.offset_q - row.input_sum_gradient);
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                input.element[k] = rounded<X>(flushed_product(at(x, k), fmaf(kept_slope(y, k), of_slope, less)));
        } else
#endif
            each_of<VOCABULARY>([&](int k) {
                differentiate<VOCABULARY>(a, at(x, k), at(y, k), row, upstream, input.element[k], target.element[k]);
            }, x, y, input, target);
        places.write(input, target, before);
    });
    if (share.body < (int)a.vocab) { /* where slopes are kept, nothing else wants all of the row's constants */
        const Row at_end = KEEPS_SLOPES ? row_of<VOCABULARY>(a, found_here(survey), sums) : row;
        each_end(share, team, [&](int i) { one(to_real(share.x()[i]), to_real(share.y()[i]), i, at_end); });
    }
}
