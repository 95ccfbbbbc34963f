/* Activations on vectors. NaN stays NaN. */

#ifdef FA_LANE_F64
INLINE v_t v_erf(v_t x)
{
    UNROLL_FOR(int i = 0; i < LANES; i++) x[i] = erf(x[i]); /* of libm: rare enough in double */
    return x;
}
#else
/* erf(x) = x p(x^2) / q(x^2) up to ERF_MAX, from where on it is 1 in float32. Coefficients: tools/polynomials.py;
 * they leave 1.2e-8, relative, a fifth of a unit in the last place. */
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

/* 1 / (1 + e^-x), by e^-|x|, which cannot overflow. */
INLINE v_t v_sigmoid(v_t x)
{
    const v_t e = v_exp(-v_abs(x));
    return v_select(x < 0, e, v_splat(1)) / (1 + e);
}

INLINE v_t v_activate(fa_activation activation, v_t x)
{
    const lane half = 0.5;
    switch (activation) {
    case FA_RELU: return v_max(v_splat(0), x);
    case FA_GELU: return half * x * (1 + v_erf(x * (lane)0.70710678118654752440));
    case FA_GELU_TANH: { /* Hendrycks & Gimpel 2016: sqrt(2 / pi) (x + 0.044715 x^3) */
        const v_t cubic = v_fma(x * x * (lane)0.044715, x, x);
        return half * x * (1 + v_tanh(cubic * (lane)0.79788456080286535588));
    }
    case FA_SILU: return x * v_sigmoid(x);
    case FA_SIGMOID: return v_sigmoid(x);
    default: return x;
    }
}
