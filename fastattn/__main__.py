"""``python -m fastattn``: configuration, self-test, benchmark, and commands that run models."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import fastattn
from fastattn import _cli_models
from fastattn._args.errors import FULL, naming
from fastattn._args.types import ROUNDINGS
from fastattn._args.weight_types import OF_FLOAT32
from fastattn._engine.cpus import CPUS
from fastattn._regular_files import irregular, replaced
from fastattn.models._parameters import DTYPES as MODEL_DTYPES

_SIGNALLED = 128  # a shell adds it to the number of the signal that ended a command


def _info(options: argparse.Namespace) -> int:
    """Print the configuration: instruction set, threads, compiler, backend."""
    print(fastattn.show_config())
    return 0


def _selftest(options: argparse.Namespace) -> int:
    """Test every instruction set and the fallback against float64; the exit status is 0 if all pass."""
    from fastattn._bench import selftest

    return selftest.main(options.cases, options.seed)


def _bench(options: argparse.Namespace) -> int:
    """Compare attention with NumPy, the fallback and every installed peer library, for a minute."""
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

    command(_info)

    option = command(_selftest)
    option("--cases", type=positive, default=300, metavar="N", help="number of random calls (300)")
    option("--seed", type=natural, default=0, metavar="N", help="random seed (0)")

    option = command(_bench)
    option("--seconds", type=positive, default=60, metavar="N", help="approximate duration (60)")
    option("--threads", type=threads, metavar="N", help="threads of every engine (fastattn's default)")
    option("--json", type=_file, metavar="FILE", help="write all measurements as JSON")

    def model_options(option: Callable[..., argparse.Action], placed: bool = False) -> None:
        text = "folder with config.json and model.safetensors, GGUF file, or name on the Hugging Face Hub"
        if placed:
            option("model", metavar="MODEL", help=text)
        else:
            option("--model", required=True, metavar="MODEL", help=text)
        option("--revision", metavar="NAME", help="branch, tag or commit on the Hub")
        option("--gguf-file", metavar="NAME", help="GGUF file in that folder or repository")
        option("--dtype", choices=MODEL_DTYPES, default="float32", help="compute type (float32)")
        text = "storage type of weights; file: as stored in a GGUF file (file for GGUF, else --dtype)"
        option("--weights-dtype", choices=(*OF_FLOAT32, "file"), help=text)
        text = "round inputs of linear maps, for weights in int8 or in blocks (no rounding)"
        option("--activations", choices=ROUNDINGS, help=text)

    def text_options(option: Callable[..., argparse.Action], prompted: str) -> None:
        text = "texts, one per line, or .jsonl (lines of standard input)"
        option("file", type=Path, nargs="?", metavar="FILE", help=text)
        option("--column", metavar="NAME", help="key of the texts in .jsonl (text)")
        option("--prompt-name", metavar="NAME", help="name of a prompt in the model's configuration")
        option("--prompt", metavar="TEXT", help=f"text prepended to {prompted}")
        option("--batch-size", type=positive, metavar="N", help="maximum batch size (about 768 tokens)")

    option = command(_cli_models.embed)
    model_options(option)
    text_options(option, "each text")
    option(
        "--output", type=_vectors, metavar="FILE", help="a .npy file (default: JSON lines on standard output)"
    )
    option("--task", metavar="NAME", help="task, for models with several")
    text = "scale vectors to length 1, even if the model's configuration does not"
    option("--normalize", dest="normalize_embeddings", action="store_true", help=text)
    option("--truncate-dim", type=positive, metavar="N", help="keep the first N features of a vector")

    option = command(_cli_models.rerank)
    model_options(option)
    option("query", metavar="QUERY", help="query that the texts are ranked for")
    text_options(option, "the query")
    option("--top-k", type=positive, metavar="K", help="number of best texts to print (all)")

    def writing_options(
        option: Callable[..., argparse.Action], most: int, usual: str, placed: bool = False
    ) -> None:
        model_options(option, placed)
        option("--max-new-tokens", type=natural, default=most, metavar="N", help=f"most new tokens ({most})")
        option("--temperature", type=float, metavar="T", help=f"sampling temperature, 0: greedy ({usual})")
        needs = "(needs --temperature)"
        option("--top-k", type=positive, metavar="K", help=f"sample from the K most likely tokens {needs}")
        option("--top-p", type=float, metavar="P", help=f"sample from the best tokens of mass P {needs}")
        option("--min-p", type=float, metavar="P", help=f"least share of the highest probability {needs}")
        option("--repetition-penalty", type=float, metavar="R", help="penalty factor of earlier tokens (1)")
        option("--presence-penalty", type=float, metavar="R", help="subtracted from their logits (0)")
        option("--frequency-penalty", type=float, metavar="R", help="subtracted once per occurrence (0)")
        option("--seed", type=natural, metavar="N", help="random seed (a new one)")
        option("--stop", action="append", metavar="TEXT", help="stop before this text; repeatable")
        text = "type of cached keys and values (--dtype)"
        option("--cache-dtype", choices=("int8", "int4", "bfloat16", "float16"), help=text)
        text = "several tokens per step in repetitive text; the answer stays the same"
        option("--speculate", choices=("lookup",), help=text)

    option = command(_cli_models.generate)
    writing_options(option, 128, "0")
    option("prompt", metavar="PROMPT", help="text to continue; -: standard input")

    option = command(_cli_models.chat)
    writing_options(option, 1024, "the model's default, as for other options", placed=True)
    option("--system", metavar="TEXT", help="system message")
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
    if not text.endswith(".npy"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .npy, got {text!r}")
    return _file(text)


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of the package, while it was imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return _run()
        finally:  # also of --help
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
    if unknown:  # name the options only: a value after an unknown option is not the mistake
        named = [argument for argument in unknown if argument.startswith("-")] or unknown
        options.parser.error(f"not known: {' '.join(named)}")
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
