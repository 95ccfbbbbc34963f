/* What is done to scores: the constants of a call, and the formula. */

/* Which modifiers a call has, and their constants. */
typedef struct {
    lane q_factor, s_factor; /* of q and of the product: scale, divided by a softcap */
    lane softcap;            /* or 0 */
    int additive;            /* what the additive tile is made of, a matter of the block */
    int alibi;
} modifiers;

/* A factor above 1 is one of the product, for q times it may overflow where the product does not. `dot`: the kernel
 * applies q_factor to the product in any case. */
static modifiers modifiers_of(const fa_attention_args *a, int dot)
{
    const double exact = a->softcap != 0 ? a->scale / a->softcap : a->scale;
    const lane factor = (lane)fmax(-LANE_MAX, fmin(LANE_MAX, exact)); /* no Inf: that times 0 is NaN */
    const int fold = dot || (-1 <= factor && factor <= 1);
    return (modifiers){
        .q_factor = fold ? factor : 1,
        .s_factor = fold ? 1 : factor,
        .softcap = (lane)a->softcap,
        .alibi = a->alibi_slopes.data != NULL,
    };
}

/* Whether v_modify does anything. */
INLINE int modifies(const modifiers *mods, int edge)
{
    return edge || mods->additive || mods->alibi || mods->softcap != 0 || mods->s_factor != 1;
}

/* One vector of scores: `add` from the additive tile, in which `hides` says that there may be -inf, distance = |position of
 * query - key|, `inside` the lanes within their rows' ranges, at an `edge`. A finite bias never becomes a mask: a sum that
 * overflows is clamped, if it was no -inf before. */
INLINE v_t v_modify(const modifiers *mods, int edge, int hides, v_t s, v_t add, v_t slope, v_t distance, vi_t inside)
{
    const v_t hidden = v_splat(-INFINITY);
    if (mods->s_factor != 1) s *= v_splat(mods->s_factor);
    if (mods->softcap != 0) s = v_softcap(s, v_splat(mods->softcap));
    const v_t least = mods->additive ? v_min(v_splat(-LANE_MAX), s) : s;
    if (mods->additive) s += add;
    if (mods->alibi) s = v_fma(-slope, distance, s);
    if (mods->additive) s = v_max(least, s);
    if (mods->additive && hides) s = v_select(add == hidden, hidden, s);
    if (edge) s = v_select(inside, s, hidden);
    return s;
}
