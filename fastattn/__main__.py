"""``python -m fastattn``: what is installed, whether it computes correctly, and how fast it is."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import fastattn
from fastattn import _cli_models, _cli_texts
from fastattn._args.errors import FULL, naming
from fastattn._args.types import ROUNDINGS
from fastattn._engine.cpus import CPUS
from fastattn._regular_files import irregular, replaced
from fastattn.models._parameters import DTYPES as MODEL_DTYPES
from fastattn.models._parameters import WEIGHT_DTYPES

_SIGNALLED = 128  # a shell adds it to the number of the signal that ended a command


def _info(options: argparse.Namespace) -> int:
    """Print the configuration: instruction set, threads, compiler, backend; or what is in a GGUF file."""
    if options.model is None:
        print(fastattn.show_config())
        return 0
    return _cli_models.info(options)


def _selftest(options: argparse.Namespace) -> int:
    """Test every instruction set and the fallback against float64; the exit status is the verdict."""
    from fastattn._bench import selftest

    return selftest.main(options.cases, options.seed)


def _bench(options: argparse.Namespace) -> int:
    """Time attention beside NumPy, the fallback and every other library that is installed, for a minute."""
    from fastattn._bench import attention, harness, report

    print(f"This takes about {options.seconds} seconds.", flush=True)
    result = harness.run(
        attention.ENGINES,
        attention.plan(),
        harness.brief(options.seconds),
        options.threads or fastattn.get_num_threads(),
        suite="attention",
        full=False,
        seed=0,
        shapes=attention.NUMBERS,
    )
    print(report.text(result))
    if options.json:
        with naming(options.json), replaced(options.json) as file:
            file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fastattn", description="FlashAttention for CPUs.")
    parser.add_argument("--version", action="version", version=f"fastattn {fastattn.__version__}")
    natural, positive, threads = _whole(0), _whole(1), _whole(1, len(CPUS))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[[argparse.Namespace], int]) -> Callable[..., argparse.Action]:
        name, text = function.__name__.lstrip("_"), function.__doc__
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=function, parser=sub)
        return sub.add_argument

    option = command(_info)
    option("model", type=Path, nargs="?", metavar="MODEL.gguf", help="print what this file says of itself")

    option = command(_selftest)
    option("--cases", type=positive, default=300, metavar="N", help="how many random calls (300)")
    option("--seed", type=natural, default=0, metavar="N", help="which calls (0)")

    option = command(_bench)
    option("--seconds", type=positive, default=60, metavar="N", help="about how long (60)")
    option("--threads", type=threads, metavar="N", help="of every engine (as many as fastattn uses)")
    option("--json", type=_file, metavar="FILE", help="write everything that was measured")

    def model_options(option: Callable[..., argparse.Action], placed: bool = False) -> None:
        text = "a folder of config.json and model.safetensors, a GGUF file, or a name of the Hub"
        if placed:
            option("model", metavar="MODEL", help=text)
        else:
            option("--model", required=True, metavar="MODEL", help=text)
        option("--revision", metavar="NAME", help="branch, tag or commit of a model of the Hub")
        option("--gguf-file", metavar="NAME", help="a GGUF file in that folder or repository")
        option("--dtype", choices=MODEL_DTYPES, default="float32", help="what is computed in (float32)")
        option(
            "--weights-dtype",
            choices=(*WEIGHT_DTYPES, "file"),
            help="how weights are kept in memory (as --dtype; file: as a GGUF file has them, its default)",
        )
        text = "round the inputs of linear maps, for weights in int8 or in blocks (they are not rounded)"
        option("--activations", choices=ROUNDINGS, help=text)

    option = command(_cli_models.embed)
    model_options(option)
    text = "lines of text, or .jsonl, .csv or .parquet (lines from the standard input)"
    option("file", type=Path, nargs="?", metavar="FILE", help=text)
    option("--column", metavar="NAME", help="of the texts in files that have columns (text)")
    option("--output", type=_vectors, metavar="FILE", help=".npy, .jsonl or .parquet (JSON lines, printed)")
    option("--prompt-name", metavar="NAME", help="of a prompt in the model's folder, put before each text")
    option("--prompt", metavar="TEXT", help="put before each text")
    option("--task", metavar="NAME", help="of a model that computes vectors in several ways: one of them")
    option("--batch-size", type=positive, metavar="N", help="texts at a time at most (of about 768 tokens)")
    text = "to length 1, even if the model's folder does not say so"
    option("--normalize", dest="normalize_embeddings", action="store_true", help=text)
    option("--truncate-dim", type=positive, metavar="N", help="keep the first N features of a vector")
    text = "of a feature: a float, or a bit (float32)"
    option("--precision", choices=("float32", "binary", "ubinary"), default="float32", help=text)

    def scored_options(option: Callable[..., argparse.Action]) -> None:
        text = "lines of text, or .jsonl, .csv or .parquet (lines from the standard input)"
        option("file", type=Path, nargs="?", metavar="FILE", help=text)
        option("--column", metavar="NAME", help="of the texts in files that have columns (text)")
        option("--prompt-name", metavar="NAME", help="of a prompt in the model's folder")
        option("--prompt", metavar="TEXT", help="put before the query, or before the first text of a pair")
        option("--batch-size", type=positive, metavar="N", help="at a time at most (of about 768 tokens)")

    option = command(_cli_models.rerank)
    model_options(option)
    option("query", metavar="QUERY", help="what the texts are ranked by")
    scored_options(option)
    option("--top-k", type=positive, metavar="K", help="the best K texts (all)")

    option = command(_cli_models.predict)
    model_options(option)
    scored_options(option)
    option("--pair", metavar="NAME", help="of the column with the second text of each pair")

    def writing_options(
        option: Callable[..., argparse.Action], most: int, usual: str, placed: bool = False
    ) -> None:
        model_options(option, placed)
        option("--max-new-tokens", type=natural, default=most, metavar="N", help=f"where to end ({most})")
        option("--temperature", type=float, metavar="T", help=f"0 takes the best token ({usual})")
        needs = "(needs --temperature)"
        option("--top-k", type=positive, metavar="K", help=f"draw from the K best tokens {needs}")
        option("--top-p", type=float, metavar="P", help=f"draw from the best that have probability P {needs}")
        option("--min-p", type=float, metavar="P", help=f"and at least P times the best one's {needs}")
        option("--typical-p", type=float, metavar="P", help=f"draw from the typical that have P {needs}")
        option("--repetition-penalty", type=float, metavar="R", help="of tokens that were there (1)")
        option("--presence-penalty", type=float, metavar="R", help="taken from their logits (0)")
        option("--frequency-penalty", type=float, metavar="R", help="as often as they were (0)")
        option("--seed", type=natural, metavar="N", help="of the draws, else a new one")
        option("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
        option(
            "--cache-dtype",
            choices=("int8", "bfloat16", "float16"),
            help="how keys and values are kept (as --dtype)",
        )
        text = "several tokens a step where the text repeats itself; the answer stays the same"
        option("--speculate", choices=("lookup",), help=text)

    option = command(_cli_models.generate)
    writing_options(option, 128, "0")
    option("prompt", metavar="PROMPT", help="the text to continue; -: the standard input")

    option = command(_cli_models.chat)
    writing_options(option, 1024, "as the model's files say, and other options", placed=True)
    option("--system", metavar="TEXT", help="what the model is told first")
    return parser


def _whole(least: int, cpus: int | None = None) -> Callable[[str], int]:
    """Parser of an integer of at least `least`.

    Threads are at most `cpus`: with more of them, engines would wait for their own threads.
    """
    expected = f"{least} to {cpus}, the CPUs of this process" if cpus else f"an integer of at least {least}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (cpus is not None and int(text) > cpus):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return int(text)

    return read


def _file(text: str) -> Path:
    """Refuse a file that cannot be written now, not after minutes of measuring."""
    path = Path(text)
    if kind := irregular(path):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is {kind}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: its folder does not exist")
    return path


def _vectors(text: str) -> Path:
    if not text.endswith(tuple(_cli_texts.WRITERS)):
        suffixes = ", ".join(_cli_texts.WRITERS)
        raise argparse.ArgumentTypeError(f"expected a name that ends in one of {suffixes}, got {text!r}")
    return _file(text)


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of the package, while it was imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return _run()
        finally:  # what is still to be written, also by --help
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return _SIGNALLED + 2  # Ctrl-C
    except BrokenPipeError:  # who read has read enough, and other commands end by SIGPIPE then
        _drop_the_rest()
        return _SIGNALLED + 13
    except OSError as error:
        text = str(error)
        if error.filename is None and error.errno in FULL:  # of files, errors have the name
            text = f"{error}: the standard output"
            _drop_the_rest()
        print(f"error: {text}", file=sys.stderr)
        return 1


def _drop_the_rest() -> None:
    """Keep Python from writing to the standard output once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run() -> int:
    parser = _parser()
    if len(sys.argv) == 1:
        parser.print_help(sys.stderr)
        return 2
    options, unknown = parser.parse_known_args()
    if unknown:  # name the options only: a value behind an unknown option is not the mistake
        named = [argument for argument in unknown if argument.startswith("-")] or unknown
        options.parser.error(f"not known: {' '.join(named)}")
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
