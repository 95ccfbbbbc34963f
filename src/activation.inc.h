/* Activations on vectors. NaN stays NaN.
 *
 * Literals  activation: any fa_activation. With a literal in a loop, one formula is left of all.
 * Exports   v_activate, v_slope; v_erf, v_sigmoid, v_sigmoid_slope, v_gelu_tanh, v_gelu_tanh_slope (of the formulas). */
#pragma once
#include "softmax.inc.h"

#ifdef FA_LANE_F64
INLINE v_t v_erf(v_t x)
{
    UNROLL_FOR(int i = 0; i < LANES; i++) x[i] = erf(x[i]); /* libm's: in double it is rarely asked for */
    return x;
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

INLINE v_t v_erf(v_t x)
{
    x = v_max(v_splat(-ERF_MAX), x);
    x = -v_max(v_splat(-ERF_MAX), -x);
    const v_t z = x * x;
    return x * v_horner(erf_p, COUNT(erf_p), z) / v_horner(erf_q, COUNT(erf_q), z);
}
#endif

/* 1 / (1 + e^-x), computed from e^-|x|, which cannot overflow. */
INLINE v_t v_sigmoid(v_t x)
{
    const v_t e = v_exp(-v_abs(x));
    return v_select(x < 0, e, v_splat(1)) / (1 + e);
}

/* gelu_tanh is x sigmoid(y) with y = 2 sqrt(2 / pi) (x + 0.044715 x^3): 1 + tanh(y / 2) would lose the digits of
 * negative y. */
#define GELU_ROOT ((lane)1.59576912160573071176)
#define GELU_CUBIC ((lane)0.07135481627260025)
INLINE v_t v_gelu_tanh(v_t x) { return x * v_sigmoid(x * v_fma(x * x, v_splat(GELU_CUBIC), v_splat(GELU_ROOT))); }

INLINE v_t v_activate(fa_activation activation, v_t x)
{
    switch (activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: return formula;
#include "activations.inc"
    default: return x;
    }
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
    return v_fma(bounded * slope, v_sigmoid_slope(y), v_sigmoid(y));
}

/* The derivative. NaN stays NaN. */
INLINE v_t v_slope(fa_activation activation, v_t x)
{
    switch (activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: return slope;
#include "activations.inc"
    default: return v_splat(1);
    }
}
