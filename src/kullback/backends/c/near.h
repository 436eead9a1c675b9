/* Rows whose logits are finite, at one temperature: an element's log-ratio and √(p·q), as near rows have them. */

#define ARE_16_BIT (sizeof(X) == 2 && sizeof(Y) == 2 && !INPUT_IS_CAPPED && !TARGET_IS_CAPPED)

/* No finite number where a logit is none. Two-difference (Knuth): s + rest = y - x exactly; of 16-bit logits s alone is, where they
   are near */
INLINE real near_ratio_of(real x, real y, const Row *row)
{
    const real scale = row->input_inv_temperature, s = y - x;
    if (ARE_16_BIT)
        return real_fma(s, scale, -row->log_z_diff_high) - row->log_z_diff_low;
    const real t = s - y, rest = (y - (s - t)) - (x + t);
    return real_fma(s, scale, -row->log_z_diff_high) + real_fma(rest, scale, -row->log_z_diff_low);
}

INLINE real near_root_of(real x, real y, const Row *row)
{
    const real logits = (y - row->target_max) + (x - row->input_max);
    return mass_exp((real)0.5 * row->input_inv_temperature * logits
                    - (real)0.5 * (row->target_log_sum_exp + row->input_log_sum_exp));
}
