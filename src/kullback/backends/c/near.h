/* An element's log-ratio and √(p·q), in rows whose logits are finite and whose temperatures are one. */

/* NaN where a logit is none that is finite. Two-difference (Knuth): s + rest = y - x exactly */
INLINE real near_ratio_of(real x, real y, const Row *row)
{
    const real scale = row->input_inv_temperature, s = y - x, t = s - y, rest = (y - (s - t)) - (x + t);
    return real_fma(s, scale, -row->log_z_diff_high) + real_fma(rest, scale, -row->log_z_diff_low);
}

/* The same where log_z_diff is short: what y - x is rounded by is a small part of it */
INLINE real short_ratio_of(real x, real y, const Row *row)
{
    return real_fma(y - x, row->input_inv_temperature, -row->log_z_diff_high) - row->log_z_diff_low;
}

INLINE real near_root_of(real x, real y, const Row *row)
{
    const real logits = (y - row->target_max) + (x - row->input_max);
    return mass_exp((real)0.5 * row->input_inv_temperature * logits
                    - (real)0.5 * (row->target_log_sum_exp + row->input_log_sum_exp));
}
