"""``python -m bench``: whole suites, records of them, and other measurements, from a checkout."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import fastattn
from bench import SUITES
from bench.suite import NoRows, Request, run, text
from fastattn._bench.harness import brief
from fastattn._regular_files import replaced

ENGINES = tuple(dict.fromkeys(name for suite in SUITES.values() for name in suite.engines))
DTYPES = tuple(dict.fromkeys(dtype for suite in SUITES.values() for dtype in suite.dtypes))
# Modules that have other options.
OTHERS = {
    "record": "rows of docs/performance.md on this CPU, to bench/results/",
    "report": "docs/performance.md and its picture, from bench/results/",
    "ratios": "variants, statistics and masks beside plain attention",
    "measure": "shares of the peak and of the bandwidth on one thread, and of Python in a layer",
    "products": "ops.linear in every type, many rows and few",
    "gguf": "language models of GGUF files, beside llama.cpp",
    "quality": "what narrow weights cost: perplexity, cosines, retrieval",
    "mteb": "MTEB tasks whose data is on disk, in several precisions",
}


def main() -> int:
    """Run the command line; returns the exit status."""
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
        return 0
    kinds = "\n".join(f"  {name:12} {suite.minutes}" for name, suite in SUITES.items())
    others = "\n".join(f"  {name:13} {what}" for name, what in OTHERS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Time fastattn beside other libraries. Suites, and how long each takes:\n{kinds}",
        epilog=f"Other commands, each with a --help:\n{others}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("suites", nargs="*", metavar="SUITE", help="what is timed (all suites)")
    option(
        "--peers", nargs="+", choices=ENGINES, metavar="NAME", help="other engines (all that are installed)"
    )
    option("--seconds", type=int, metavar="N", help="only the first rows, in about so long")
    option("--dtype", choices=DTYPES, help="of inputs or of weights, by suite")
    option("--only", default="", metavar="TEXT", help="of all rows those whose title or name contains it")
    option("--threads", type=int, default=fastattn.get_num_threads(), metavar="N", help="of every engine")
    option(
        "--json",
        type=Path,
        metavar="FILE",
        help="write everything that was measured; a list of it, of suites",
    )
    option(
        "--seed", type=int, default=secrets.randbelow(10**6), metavar="N", help="of inputs and fresh shapes"
    )
    options = parser.parse_args()
    names = options.suites or list(SUITES)
    for name in names:
        if name not in SUITES:
            parser.error(f"no suite {name!r}; there are {', '.join(SUITES)}")
        if options.dtype not in (None, *SUITES[name].dtypes):
            parser.error(f"{name} has no {options.dtype}: {', '.join(SUITES[name].dtypes)}")
    results = []
    for name in names:
        time = SUITES[name].minutes if options.seconds is None else f"about {options.seconds} seconds"
        print(f"{name} takes {time}.", flush=True)
        with TemporaryDirectory() as folder:
            full = options.seconds is None or options.only != ""
            request = Request(options.dtype, full, options.seed, Path(folder))
            try:
                results.append(
                    run(
                        name, SUITES[name], request, only=options.only, peers=options.peers or (),
                        effort=brief(options.seconds) if options.seconds else None, threads=options.threads,
                    )
                )  # fmt: skip
            except NoRows as error:
                parser.error(str(error))
        print(text(results[-1]))
    if options.json:
        with replaced(options.json) as file:
            file.write_text(json.dumps(results if len(results) > 1 else results[0], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
