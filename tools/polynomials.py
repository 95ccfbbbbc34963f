"""Derive the coefficients of exp2, tanh, erf, gelu and log1p in src/; print them with their errors.

    python tools/polynomials.py

Each polynomial interpolates its function at the Chebyshev nodes of an interval. It is solved in 60 digits and
rounded to the lane type. Its error is within a factor of two of that of the minimax polynomial of its degree,
here far below one unit in the last place. That of gelu for results in bfloat16 is the minimax polynomial.
Needs mpmath.
"""

import mpmath as mp

mp.mp.dps = 60


def interpolate(function, low, high, degree):
    """Coefficients, lowest first, of the polynomial through `function` at the degree + 1 Chebyshev nodes."""
    n = degree + 1
    nodes = [(low + high) / 2 + (high - low) / 2 * mp.cos(mp.pi * (2 * i + 1) / (2 * n)) for i in range(n)]
    return through([(x, function(x)) for x in nodes])


def through(points):
    """Coefficients, lowest first, of the polynomial through some points."""
    n = len(points)
    matrix = mp.matrix(n, n)
    for i, (x, _) in enumerate(points):
        for j in range(n):
            matrix[i, j] = x**j
    return list(mp.lu_solve(matrix, mp.matrix([y for _, y in points])))


def worst(function, polynomial, low, high, samples=2000):
    """Largest relative error of `polynomial` against `function` on the interval."""
    points = [low + (high - low) * mp.mpf(i) / samples for i in range(samples + 1)]
    return max(abs(polynomial(x) / function(x) - 1) for x in points if x)


def show(name, coefficients, error):
    """Print one table, lowest power first."""
    print(f"{name}: relative error {mp.nstr(error, 3)}")
    print("    " + ", ".join(mp.nstr(c, 20) for c in coefficients))


def rest_of_tanh(z):
    """Return h of tanh(x) = x + x z h(z), z = x^2."""
    x = mp.sqrt(z)
    return (mp.tanh(x) / x - 1) / z if z else -mp.mpf(1) / 3


def show_rational(name, p, q, function, bound):
    """Print p and q of function(x) = x p(x^2) / q(x^2) on [0, bound]."""
    ratio = lambda z: mp.polyval(p[::-1], z) / mp.polyval(q[::-1], z)  # noqa: E731
    error = worst(function, lambda x: x * ratio(x**2), mp.mpf(0), bound)
    show(f"{name}, numerator", p, error)
    show(f"{name}, denominator", q, error)


def tanh_over_x(z):
    """Return tanh(x) / x, z = x^2."""
    return mp.tanh(mp.sqrt(z)) / mp.sqrt(z) if z else mp.mpf(1)


def log1p_over_x(x):
    """Return log(1 + x) / x."""
    return mp.log1p(x) / x if x else mp.mpf(1)


def erf_over_x(z):
    """Return erf(x) / x, z = x^2."""
    x = mp.sqrt(z)
    return mp.erf(x) / x if z else 2 / mp.sqrt(mp.pi)


def rational(function, high, p_degree, q_degree, power=2):
    """p and q, q[0] = 1, with p(z) / q(z) through `function`; z = x^power, x Chebyshev nodes of [0, high]."""
    n = p_degree + q_degree + 1
    nodes = [(high / 2 * (1 + mp.cos(mp.pi * (2 * i + 1) / (2 * n)))) ** power for i in range(n)]
    matrix = mp.matrix(n, n)
    for i, z in enumerate(nodes):
        for j in range(p_degree + 1):
            matrix[i, j] = z**j
        for j in range(1, q_degree + 1):
            matrix[i, p_degree + j] = -function(z) * z**j
    solved = list(mp.lu_solve(matrix, mp.matrix([function(z) for z in nodes])))
    return solved[: p_degree + 1], [mp.mpf(1), *solved[p_degree + 1 :]]


def minimax(function, powers, high, samples=500):
    """Coefficients of `powers` of x, closest to `function` on [0, high], and the error: Remez exchange."""
    n = len(powers) + 1
    points = [high / 2 * (1 - mp.cos(mp.pi * (i + 1) / n)) for i in range(n)]
    grid = [high * mp.mpf(i) / samples for i in range(1, samples + 1)]
    for _ in range(8):
        matrix = mp.matrix([[*(x**power for power in powers), (-1) ** i] for i, x in enumerate(points)])
        *solved, _ = mp.lu_solve(matrix, mp.matrix([function(x) for x in points]))
        errors = [(function(x) - sum(c * x**k for c, k in zip(solved, powers, strict=True)), x) for x in grid]
        peaks = [errors[0]]  # the largest of each run of one sign
        for error in errors:
            if error[0] * peaks[-1][0] < 0:
                peaks.append(error)
            elif abs(error[0]) > abs(peaks[-1][0]):
                peaks[-1] = error
        points = [x for _, x in peaks[-n:]]
    return solved, max(abs(error) for error, _ in errors)


def main():
    half = mp.mpf(1) / 2
    for name, degree in (("exp2 float", 6), ("exp2 double", 11), ("exp2 in bytes", 3)):
        # exp2(f) = 1 + f g(f): the leading 1 stays exact, so that exp2(0) is exactly 1
        g = interpolate(lambda f: mp.expm1(f * mp.log(2)) / f if f else mp.log(2), -half, half, degree - 1)
        error = worst(lambda f: mp.power(2, f), lambda f, g=g: 1 + f * mp.polyval(g[::-1], f), -half, half)
        show(name, g, error)
    # For probabilities in bfloat16: 2^(f / 16), and what 2^(i / 16) adds to the bits of 1 in float32.
    sixteenth = lambda f: mp.power(2, f / 16)  # noqa: E731
    g = interpolate(lambda f: (sixteenth(f) - 1) / f if f else mp.log(2) / 16, -half, half, 1)
    error = worst(sixteenth, lambda f, g=g: 1 + f * mp.polyval(g[::-1], f), -half, half)
    show("exp2 of a sixteenth", g, error)
    print("    " + ", ".join(f"{int(mp.nint((sixteenth(i) - 1) * 2**23)):#08x}" for i in range(16)))
    # The same beside tiles, of f from 0 to 1: rounding to the integer below is one instruction there. As 1 is
    # exact, 0 is the first of six Chebyshev nodes, of an interval that begins a little below it.
    edge = mp.cos(mp.pi / 12)
    nodes = [(edge + mp.cos(mp.pi * (2 * i + 1) / 12)) / (1 + edge) for i in range(5)]
    g = through([(f, (mp.power(2, f) - 1) / f) for f in nodes])
    power = lambda f: mp.power(2, f)  # noqa: E731
    error = worst(power, lambda f, g=g: 1 + f * mp.polyval(g[::-1], f), mp.mpf(0), mp.mpf(1))
    show("exp2 beside tiles", g, error)
    bound = mp.mpf(5) / 8  # as in Cephes tanhf: beyond it, (1 - e) / (1 + e) loses no digits
    for name, degree in (("tanh float", 5), ("tanh double", 13)):
        h = interpolate(rest_of_tanh, mp.mpf(0), bound**2, degree - 1)
        error = worst(mp.tanh, lambda x, h=h: x + x**3 * mp.polyval(h[::-1], x**2), mp.mpf(0), bound)
        show(name, h, error)
    bound = mp.mpf(85) / 10  # 1 - tanh(8.5) is 8e-8: a soft cap's tanh may end there
    p, q = rational(tanh_over_x, bound, 4, 4)
    show_rational("soft cap", p, q, mp.tanh, bound)
    bound = mp.mpf(392) / 100  # 1 - erf(3.92) is 3e-8: from there on erf is 1 in float32
    p, q = rational(erf_over_x, bound, 6, 5)
    show_rational("erf float", p, q, mp.erf, bound)
    # x (Phi(x) - 1/2) as x^2 p(x^2). At the bound x p exceeds 1/2, and is clamped: so gelu ends at 0 or x.
    bound = mp.mpf(44) / 10
    p, error = minimax(lambda x: x * (mp.ncdf(x) - half), range(2, 20, 2), bound)
    assert bound * mp.polyval(p[::-1], bound**2) > half
    print(f"gelu in bfloat16: absolute error {mp.nstr(error, 3)}")
    print("    " + ", ".join(mp.nstr(c, 12) for c in p))
    p, q = rational(log1p_over_x, mp.mpf(1), 3, 3, power=1)  # of e^-|x|, for softplus
    ratio = lambda x: mp.polyval(p[::-1], x) / mp.polyval(q[::-1], x)  # noqa: E731
    error = worst(log1p_over_x, ratio, mp.mpf(0), mp.mpf(1))
    show("log1p float, numerator", p, error)
    show("log1p float, denominator", q, error)


if __name__ == "__main__":
    main()
