"""Random calls of all that is public, right ones and wrong ones: each gives a right result or a clean error.

    python tests/fuzz                          10,000 calls, of seed 0
    python tests/fuzz --seed 3 --case 1234     one of them, in this process, with what it was
    python tests/fuzz --kind layers            5,000 of one part: gradients, layers or models
    python tests/fuzz --kind files             malformed files of models
    python tests/fuzz --kind gguf              10,000 malformed GGUF files of a tiny model, loaded

A case is drawn from the seed and its number, and from nothing else but this CPU's instruction sets. It is a
problem if it crashes, hangs or warns; raises anything but a TypeError or a ValueError that begins with the
function's name; writes to what it was given to read; returns another shape or type, NaN of moderate numbers,
other bits in one thread, or other numbers than on NumPy. Some are also compared with definitions, and
gradients with difference quotients.
"""

import argparse
import os
import sys
import traceback
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path.append(str(Path(__file__).parents[1] / "oracles"))

import attention  # noqa: F401 - adds its recipes, as others do
import faults
import files
import gguf_files
import gradients  # noqa: F401
import judge
import layer_gradients  # noqa: F401
import layers  # noqa: F401
import model_calls  # noqa: F401
import numpy as np
import operations  # noqa: F401
import pool
import recipes
import recurrent  # noqa: F401
import variants  # noqa: F401
from draw import Draw

import fastattn
from fastattn._engine.cpus import CPUS

PARTS = {  # the files that have their recipes
    "gradients": ("gradients",),
    "layers": ("layers", "layer_gradients"),
    "models": ("model_calls",),
}
KINDS = {
    "calls": recipes.draw,
    **{kind: partial(recipes.draw, files=names) for kind, names in PARTS.items()},
    "files": files.draw,
    "gguf": gguf_files.draw,
    "faults": faults.draw,
}
CASES = {"calls": 10_000, **dict.fromkeys(PARTS, 5_000), "files": 1_000, "gguf": 10_000, "faults": 30}


def made(kind, seed, case):
    """A function that draws the case, always the same one, and the instruction set that it runs on."""
    isas = fastattn.show_config()["isas_available"]
    isa = isas[case % len(isas)] if isas else None
    return lambda: KINDS[kind](Draw(np.random.default_rng([seed, case]))), isa


def one(kind, seed, case):
    """Carry out one case in this process and print what happens."""
    draw, isa = made(kind, seed, case)
    drawn = draw()
    print(f"{drawn.names[0]}, on {isa}: {judge.described(drawn.arguments)}", flush=True)
    for way in judge.ways(isa):
        _, outcome = judge.carried_out(draw, way)
        print(f"\n{way}: {judge.message(outcome.error)}, {judge.described(outcome.arrays)}")
        if outcome.error is not None:
            print("".join(traceback.format_tb(outcome.error.__traceback__)[3:]))
    problem = judge.problem(draw, isa)
    print(f"\n{problem or 'nothing is wrong'}")
    return int(problem is not None)


def main():
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cases",
        type=int,
        help="how many; default 10,000 calls or GGUF files, 5,000 of a part, 1,000 folders",
    )
    parser.add_argument("--case", type=int, help="carry out this one only, and tell what it is")
    parser.add_argument("--only", help="calls of this recipe only, a function of the files here")
    parser.add_argument("--jobs", type=int, default=len(CPUS))
    parser.add_argument("--seconds", type=float, default=60, help="that a case may take; default 60")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kind, seed = options.kind, options.seed
    if options.only:
        recipes.RECIPES[:] = [recipe for recipe in recipes.RECIPES if recipe.__name__ == options.only]
    if options.case is not None:
        return one(kind, seed, options.case)
    if options.child:
        start, stop, step = map(int, options.child.split(":"))
        cases = range(start, stop, step)
        pool.child(cases, lambda case: judge.problem(*made(kind, seed, case)), options.seconds)
        return 0
    cases, n = options.cases or CASES[kind], 0
    which = ["--kind", kind, "--seed", str(seed), *(["--only", options.only] if options.only else [])]
    for case, problem in pool.run([*which, "--seconds", str(options.seconds)], cases, options.jobs):
        n += 1
        print(f"python tests/fuzz {' '.join(which)} --case {case}\n    {problem}")
    print(f"{cases} cases of seed {seed}: {n or 'no'} problems")
    return int(n > 0)


if __name__ == "__main__":
    sys.exit(main())
