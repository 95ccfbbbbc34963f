"""The suite "flash": what programs of torch get by flash-attn's names, by block masks, and packed models."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

import fastattn
from bench.embeddings import ARRIVAL, COUNT, TextProblem, several
from bench.suite import Request, Suite
from fastattn._bench import runtimes
from fastattn._bench.attention import AttentionProblem, shape_of
from fastattn._bench.cases import Array
from fastattn._bench.harness import FOR_GOOD, Engine, Problem, Sections, Unsupported, Way
from fastattn._engine import settings

DTYPES = ("float32", "bfloat16")
SHAPES = [shape_of(1, 8, n, n, 64) for n in (512, 1024, 2048)]
PACKED, PADDED = "fastattn_flash", "fastattn"  # attn_implementation
BATCH = 32  # texts in order of arrival
# Of SmolLM2-135M.
LLAMA = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


class FlashProblem(AttentionProblem):
    """`flash_attn_func`, with or without `causal`."""


MODS = "causal", "window", "documents", "prefix"


def mask_mod(name: str, length: int) -> Callable[..., Any]:
    """A documented pattern of FlexAttention, for tensors."""
    torch = import_module("torch")
    document = torch.from_numpy(np.sort(np.random.default_rng(1).integers(0, 8, length)))
    mods: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, i, j: j <= i,
        "window": lambda b, h, i, j: (j <= i) & (i - j < 256),
        "documents": lambda b, h, i, j: document[i] == document[j],
        "prefix": lambda b, h, i, j: (j <= i) | (j < 512),
    }
    return mods[name]


class FlexProblem(AttentionProblem):
    """`flex_attention` with a mask_mod; the block mask is made outside the timed call."""

    name = property(lambda self: f"flex_attention {self.variant} {self.shape.name}")

    @property
    def attended(self) -> Array:
        torch = import_module("torch")
        rows = torch.arange(self.shape.len_q)
        found: Array = mask_mod(self.variant, self.shape.len_k)(0, 0, rows[:, None], rows).numpy()
        return found

    def options(self) -> dict[str, Any]:
        return {"mask": self.attended}

    @property
    def work(self) -> float:
        return float(4.0 * self.attended.sum() * self.shape.heads_q * self.shape.head_dim)


class PackedProblem(TextProblem):
    """The vectors of texts by sentence-transformers, `BATCH` at a time as they arrive."""

    name = property(lambda self: f"{self.shape.name}, packed")


class PromptShape(NamedTuple):
    """Prompts of `least` to `most` tokens, and as many new tokens each."""

    name: str
    batch: int
    least: int
    most: int
    new: int
    makes: str = "prompts"


class GenerateProblem(Problem):
    """`generate_batch` of a Llama with random weights, checked against `generate` of each prompt."""

    shape: PromptShape
    tolerance = property(lambda self: 0.0)

    @property
    def work(self) -> float:
        """Tokens that are computed: speeds compare with themselves only."""
        return float(sum(map(len, self.prompts())) + self.shape.batch * self.shape.new)

    def prompts(self) -> list[list[int]]:
        rng, s = self.rng(0), self.shape
        lengths = rng.integers(s.least, s.most + 1, s.batch)
        return [rng.integers(2, LLAMA["vocab_size"], n).tolist() for n in lengths]

    def model(self, implementation: str) -> Any:
        """The model, whose weights are the same in every process."""
        torch, transformers = import_module("torch"), import_module("transformers")
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**LLAMA, attn_implementation=implementation)
        return transformers.LlamaForCausalLM(config).to(getattr(torch, self.dtype)).eval()

    def generation(self) -> Any:
        """Greedy, without an end."""
        kind = import_module("transformers").GenerationConfig
        return kind(max_new_tokens=self.shape.new, do_sample=False, eos_token_id=-1, pad_token_id=1)

    def reference(self) -> tuple[Array, Array]:
        torch, model, options = import_module("torch"), self.model("sdpa"), self.generation()
        found = []
        for ids in self.prompts():
            one = torch.tensor([ids])
            out = model.generate(one, attention_mask=torch.ones_like(one), generation_config=options)
            found.append(out[0, len(ids) :].numpy())
        return np.arange(self.shape.batch), np.stack(found).astype(float)


def _set_up(threads: int, implementation: str = "") -> Any:
    torch = import_module("torch")
    torch.set_num_threads(threads)
    if implementation in (PACKED, PADDED):
        FOR_GOOD.enter_context(settings.forced(num_threads=threads))
        import_module("fastattn.torch").register()
    return torch


def _encoder(problem: PackedProblem, implementation: str, threads: int) -> Way:
    """SentenceTransformer, which packs by the name of the implementation."""

    @cache
    def loaded() -> Any:
        _set_up(threads, implementation)
        os.environ["HF_HUB_OFFLINE"] = "1"
        import_module("transformers").logging.set_verbosity_error()
        kind = import_module("sentence_transformers").SentenceTransformer
        options = {"attn_implementation": implementation, "torch_dtype": problem.dtype}
        return kind(str(problem.folder()), device="cpu", model_kwargs=options)

    chosen = problem.texts()
    batches = [chosen[start : start + BATCH] for start in range(0, len(chosen), BATCH)]

    def call() -> Array:
        return np.concatenate(
            [loaded().encode(x, batch_size=BATCH, show_progress_bar=False) for x in batches]
        )

    return Way(call, lambda x: np.asarray(x, np.float32), loaded)


def _generator(problem: GenerateProblem, implementation: str, threads: int) -> Way:
    transformers = import_module("transformers")
    torch, options, prompts = _set_up(threads, implementation), problem.generation(), problem.prompts()
    with torch.inference_mode(False):  # its thread writes to tensors that are made here
        model = problem.model(implementation)
    batching = transformers.ContinuousBatchingConfig(num_blocks=128, page_size=256, use_cuda_graph=False)

    def call() -> Any:
        given = [list(ids) for ids in prompts]
        with torch.inference_mode(False):
            return model.generate_batch(given, generation_config=options, continuous_batching_config=batching)

    def read(found: Any) -> Array:
        return np.array([x.generated_tokens for x in found.values()], float)

    return Way(call, read)


def _heads_inside(problem: AttentionProblem, threads: int) -> list[Any]:
    """Q, k and v as flash-attn has them, (B, L, H, D)."""
    torch = runtimes.torch_inference(threads)
    return [x.transpose(1, 2).contiguous() for x in runtimes.tensors(torch, *problem.arrays())]


def _blocks(problem: FlexProblem) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = problem.shape.len_q, problem.shape.len_k
    return create_block_mask(mask_mod(problem.variant, lengths[1]), None, None, *lengths, device="cpu")


def _own(problem: Any, threads: int) -> Way:
    if isinstance(problem, PackedProblem):
        return _encoder(problem, PACKED, threads)
    if isinstance(problem, GenerateProblem):
        return _generator(problem, PACKED, threads)
    FOR_GOOD.enter_context(settings.forced(num_threads=threads))
    if isinstance(problem, FlexProblem):
        q, k, v = runtimes.tensors(runtimes.torch_inference(threads), *problem.arrays())
        flex = import_module("fastattn.torch").flex_attention
        return Way(partial(flex, q, k, v, block_mask=_blocks(problem)), runtimes.read_tensor)
    call = import_module("fastattn.flash_attn").flash_attn_func
    given = _heads_inside(problem, threads)
    return Way(
        partial(call, *given, causal=problem.causal), lambda x: runtimes.read_tensor(x.transpose(1, 2))
    )


def _torch(problem: Any, threads: int) -> Way:
    """The same models with "sdpa"; scaled_dot_product_attention on its own layout; FlexAttention compiled."""
    if isinstance(problem, PackedProblem):
        return _encoder(problem, "sdpa", threads)
    if isinstance(problem, GenerateProblem):
        return _generator(problem, "sdpa", threads)
    torch = runtimes.torch_inference(threads)
    q, k, v = runtimes.tensors(torch, *problem.arrays())
    if isinstance(problem, FlexProblem):
        flex = torch.compile(import_module("torch.nn.attention.flex_attention").flex_attention)
        return Way(partial(flex, q, k, v, block_mask=_blocks(problem)), runtimes.read_tensor)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return Way(partial(sdpa, q, k, v, is_causal=problem.causal), runtimes.read_tensor)


def _products(problem: Any, threads: int) -> Way:
    """Torch's matmul, softmax and matmul."""
    if not isinstance(problem, FlashProblem):
        raise Unsupported("is plain attention")
    torch = runtimes.torch_inference(threads)
    q, k, v = runtimes.tensors(torch, *problem.arrays())
    scale = problem.shape.head_dim**-0.5
    keep = torch.ones(problem.shape.len_q, problem.shape.len_k, dtype=torch.bool).tril()

    def call() -> Any:
        scores = (q @ k.transpose(-1, -2)).mul_(scale)
        if problem.causal:
            scores.masked_fill_(~keep, float("-inf"))
        return torch.softmax(scores, -1) @ v

    return Way(call, runtimes.read_tensor)


def _padded(problem: Any, threads: int) -> Way:
    """Fastattn's attention in a model that pads."""
    if not isinstance(problem, PackedProblem):
        raise Unsupported("is of texts")
    return _encoder(problem, PADDED, threads)


ENGINES = {
    **(
        {
            "fastattn": Engine(("fastattn", "torch"), _own, "by flash-attn's names, flex_attention, packed"),
            "padded": Engine(("fastattn", "sentence_transformers"), _padded, "fastattn, texts padded"),
        }
        if fastattn.show_config()["isas_available"]
        else {}
    ),
    "products": Engine(("torch",), _products, "torch's matmul, softmax, matmul"),
    "torch": Engine(("torch", "transformers", "sentence_transformers"), _torch, 'torch\'s own, and "sdpa"'),
}
PROMPTS = PromptShape("16 prompts of 64 to 511 tokens, 32 new", 16, 64, 511, 32)


def plan(request: Request) -> Sections:
    """Functions in both types; masks, texts and prompts in float32, of which brief runs have none."""
    found: Sections = {}
    for dtype in DTYPES if request.dtype is None else (request.dtype,):
        shapes = SHAPES if request.full else SHAPES[:1]
        for variant, title in (("plain", "flash_attn_func"), ("causal", "flash_attn_func causal")):
            found |= request.section(FlashProblem, title, shapes, dtype, [variant])
        if dtype == "float32" and request.full:
            found |= request.section(FlexProblem, "block mask", SHAPES[-1:], dtype, MODS)
            packed = partial(PackedProblem, scratch=str(request.folder))
            found |= request.section(packed, "MiniLM", [several(ARRIVAL, COUNT)], dtype)
            found |= request.section(GenerateProblem, "generate_batch", [PROMPTS], dtype)
    return found


NUMBERS = "batch, heads, queries, keys, head_dim"
SUITE = Suite(ENGINES, plan, DTYPES, NUMBERS, "about five minutes")
