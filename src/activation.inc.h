/* Activations on vectors. NaN stays NaN.
 *
 * Literals  activation: any fa_activation. With a literal in a loop, one formula is left of all. to: the dtype of what
 *           becomes of the result. For FA_BF16, which keeps 8 bits, formulas are shorter.
 * Exports   v_activate, v_activate_each, FEW, v_slope; v_erf, v_gelu, v_sigmoid, v_sigmoid_slope, v_gelu_tanh,
 *           v_gelu_tanh_slope (of the formulas). */
#pragma once
#include "activations.h"
#include "softmax.inc.h"

#define FEW 4 /* vectors that v_activate_each takes in step */

#ifdef FA_LANE_F64
INLINE void v_erf_each(int n, v_t *x)
{
    UNROLL_FOR(int u = 0; u < n; u++) {
        v_t y = x[u];
        UNROLL_FOR(int i = 0; i < LANES; i++) y[i] = erf(y[i]); /* libm's: in double it is rarely asked for */
        x[u] = y;
    }
}
#else
/* erf(x) = x p(x^2) / q(x^2) for |x| <= ERF_MAX; beyond, erf is 1 in float32. tools/polynomials.py derives the
 * coefficients. Their relative error is 1.2e-8, a fifth of a unit in the last place. */
#define ERF_MAX 3.92f
static const lane erf_p[] = {1.1283791670955800784f,    0.18672083781244049809f,    0.054063374949626611632f,
                             0.0038494093117275616969f, 0.00036069318080387912003f, 4.1593717566060191427e-6f,
                             -1.0645409370449365281e-8f};
static const lane erf_q[] = {1.0f,
                             0.498810367561872719f,
                             0.11418252936442531759f,
                             0.015400882460508826236f,
                             0.0012815450303985154138f,
                             0.000058075948366488746267f};

INLINE void v_erf_each(int n, v_t *x)
{
    v_t z[FEW], p[FEW], q[FEW];
    UNROLL_FOR(int u = 0; u < n; u++) {
        x[u] = v_min(v_splat(ERF_MAX), v_max(v_splat(-ERF_MAX), x[u]));
        z[u] = x[u] * x[u];
    }
    v_horner_each(erf_p, COUNT(erf_p), n, z, p);
    v_horner_each(erf_q, COUNT(erf_q), n, z, q);
    UNROLL_FOR(int u = 0; u < n; u++) x[u] = x[u] * p[u] / q[u];
}
#endif

INLINE v_t v_erf(v_t x)
{
    v_erf_each(1, &x);
    return x;
}

/* For FA_BF16, x (1/2 + x p(x^2)), where x p(x^2) is Phi(x) - 1/2 for |x| <= GELU_MAX, and beyond exceeds 1/2: clamped,
 * the factor is exactly 0 or 1 there. tools/polynomials.py derives the coefficients. The absolute error is at most
 * 2.5e-5, a hundredth of what bfloat16 rounds numbers near 1 by. Of results below 0.008, those of x from -2.8 down, it is
 * more than they are rounded by: 13% at -3.9, 40% at -4.2, and all from -4.4 down. */
#define GELU_MAX ((lane)4.4)
static const lane gelu_poly[] = {(lane)0.398761911003,    (lane)-0.0660770022311,  (lane)0.00964339563339,
                                 (lane)-0.00105510542869, (lane)8.43120123431e-5,  (lane)-4.72671411292e-6,
                                 (lane)1.74188009467e-7,  (lane)-3.75713604939e-9, (lane)3.57324524198e-11};

INLINE void v_gelu_each(fa_dtype to, int n, v_t *x)
{
    v_t z[FEW], phi[FEW];
    if (to == FA_BF16) {
        UNROLL_FOR(int u = 0; u < n; u++) z[u] = v_min(v_splat(GELU_MAX * GELU_MAX), x[u] * x[u]);
        v_horner_each(gelu_poly, COUNT(gelu_poly), n, z, phi);
        UNROLL_FOR(int u = 0; u < n; u++) {
            phi[u] = v_fma(phi[u], x[u], v_splat((lane)0.5));
            x[u] = x[u] * v_min(v_splat(1), v_max(v_splat(0), phi[u]));
        }
        return;
    }
    UNROLL_FOR(int u = 0; u < n; u++) phi[u] = x[u] * (lane)0.70710678118654752440;
    v_erf_each(n, phi);
    UNROLL_FOR(int u = 0; u < n; u++) x[u] = (lane)0.5 * x[u] * (1 + phi[u]);
}

INLINE v_t v_gelu(fa_dtype to, v_t x)
{
    v_gelu_each(to, 1, &x);
    return x;
}

/* 1 / (1 + e^-x), computed from e^-|x|, which cannot overflow. */
INLINE v_t v_sigmoid(fa_dtype to, v_t x)
{
    if (to == FA_BF16 && V_LOOKUP_ONCE) {
        const v_t e = v_exp_short(-v_abs(x));
        return v_select(x < 0, e, v_splat(1)) * v_recip(1 + e);
    }
    const v_t e = v_exp(-v_abs(x));
    return v_select(x < 0, e, v_splat(1)) / (1 + e);
}

/* gelu_tanh is x sigmoid(y) with y = 2 sqrt(2 / pi) (x + 0.044715 x^3): 1 + tanh(y / 2) would lose the digits of
 * negative y. */
#define GELU_ROOT ((lane)1.59576912160573071176)
#define GELU_CUBIC ((lane)0.07135481627260025)
INLINE v_t v_gelu_tanh(fa_dtype to, v_t x)
{
    return x * v_sigmoid(to, x * v_fma(x * x, v_splat(GELU_CUBIC), v_splat(GELU_ROOT)));
}

INLINE v_t v_activate(fa_activation activation, fa_dtype to, v_t x)
{
    switch (activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: return formula;
#include "activations.inc"
    default: return x;
    }
}

/* The same of n vectors. */
INLINE void v_activate_each(fa_activation activation, fa_dtype to, int n, v_t *x)
{
    if (activation == FA_GELU) v_gelu_each(to, n, x);
    else
        UNROLL_FOR(int u = 0; u < n; u++) x[u] = v_activate(activation, to, x[u]);
}

/* The derivative of sigmoid. 1 - sigmoid(x) would have lost its digits where x is large. */
INLINE v_t v_sigmoid_slope(v_t x)
{
    const v_t e = v_exp(-v_abs(x));
    return e / ((1 + e) * (1 + e));
}

/* The derivative of gelu_tanh. Beyond 30 it is 0 or 1, and x^2 might overflow. */
INLINE v_t v_gelu_tanh_slope(v_t x)
{
    const v_t bounded = v_min(v_splat(30), v_max(v_splat(-30), x)), square = bounded * bounded;
    const v_t root = v_splat(GELU_ROOT), cubic = v_splat(GELU_CUBIC);
    const v_t y = bounded * v_fma(square, cubic, root), slope = v_fma(square, 3 * cubic, root);
    return v_fma(bounded * slope, v_sigmoid_slope(y), v_sigmoid(LANE_DTYPE, y));
}

/* The derivative. NaN stays NaN. */
INLINE v_t v_slope(fa_activation activation, v_t x)
{
    const fa_dtype to = LANE_DTYPE;
    switch (activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: return slope;
#include "activations.inc"
    default: return v_splat(1);
    }
}
