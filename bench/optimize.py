"""The suite "optimize": models of torch after `fastattn.torch.optimize`, and what its operators cost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fastattn
from bench import files
from bench.suite import Request, Suite
from fastattn._bench import runtimes
from fastattn._bench.attention import shape_of
from fastattn._bench.cases import Array, make_inputs
from fastattn._bench.harness import FOR_GOOD, Engine, Problem, Sections, Unsupported, Way
from fastattn._engine import settings

# Arguments of `optimize` by variant, and how far hidden states may be from float64.
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-3),
    "bfloat16 weights": ({"weights_dtype": "bfloat16"}, 0.3),
    "int8 by int8": ({"weights_dtype": "int8", "activations": "int8"}, 1.0),
}
DTYPES = ("float32", "bfloat16")
CALL = "call"  # the kind of one tiny call of attention
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}


class TorchShape(NamedTuple):
    """ids is (batch, length)."""

    name: str
    kind: str  # "minilm", "llama" or `CALL`
    batch: int
    length: int


@dataclass(frozen=True)
class TorchProblem(Problem):
    """Hidden states of a model of transformers whose attention is "sdpa", or a tiny call of attention."""

    shape: TorchShape
    scratch: str = ""  # folder for the files that the bench writes

    name = property(lambda self: f"{self.shape.name}, {self.variant}")

    @property
    def tolerance(self) -> float:
        return 0.3 if self.dtype == "bfloat16" else OPTIONS[self.variant][1]

    @property
    def work(self) -> float:
        """Numbers of hidden states: speeds of models compare with themselves only."""
        return float(self.shape.batch * self.shape.length)

    def ids(self, words: int = 30000) -> Array:
        return self.rng(0).integers(1000, words, (self.shape.batch, self.shape.length))

    def arrays(self) -> tuple[Array, Array, Array]:
        """Q, k and v of the tiny call."""
        return make_inputs(shape_of(1, 2, 4, 4, 16), self.dtype, self.rng(1))

    def model(self, dtype: Any) -> Any:
        """The model, whose weights are the same in every process."""
        os.environ["HF_HUB_OFFLINE"] = "1"
        torch, transformers = import_module("torch"), import_module("transformers")
        options = {"attn_implementation": "sdpa"}
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if self.shape.kind == "minilm":
            kind, folder = transformers.BertModel, files.minilm(Path(self.scratch))
            return kind.from_pretrained(folder, add_pooling_layer=False, **options).to(dtype).eval()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**LLAMA, num_hidden_layers=8, vocab_size=32000, **options)
        return transformers.LlamaModel(config).to(dtype).eval()

    def hidden(self, model: Any) -> Any:
        """A call of the model."""
        torch: Any = import_module("torch")
        ids = torch.from_numpy(self.ids())
        return partial(model, input_ids=ids, attention_mask=torch.ones_like(ids))

    def reference(self) -> tuple[Array, Array]:
        """The last rows, by torch in float64."""
        if self.shape.kind == CALL:
            out = fastattn.attention(*(x.astype(float) for x in self.arrays()), backend="numpy")
        else:
            torch: Any = import_module("torch")
            with torch.inference_mode():
                out = self.hidden(self.model(torch.float64))().last_hidden_state.numpy()
        out = out.reshape(-1, out.shape[-1])
        return np.arange(len(out))[-16:], out[-16:]


def _model(problem: TorchProblem, threads: int, *, optimised: bool) -> Way:
    torch = runtimes.torch_inference(threads)
    model = problem.model(getattr(torch, problem.dtype))
    if optimised:
        import_module("fastattn.torch").optimize(model, **OPTIONS[problem.variant][0])
    return Way(problem.hidden(model), lambda result: runtimes.read_tensor(result.last_hidden_state))


def _own(problem: TorchProblem, threads: int) -> Way:
    FOR_GOOD.enter_context(settings.forced(num_threads=threads))
    if problem.shape.kind != CALL:
        return _model(problem, threads, optimised=True)
    return Way(partial(fastattn.attention, *problem.arrays()))


def _torch(problem: TorchProblem, threads: int) -> Way:
    if problem.shape.kind != CALL:
        return _model(problem, threads, optimised=False)
    torch = runtimes.torch_inference(threads)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return Way(partial(sdpa, *runtimes.tensors(torch, *problem.arrays())), runtimes.read_tensor)


def _operator(how: str, problem: TorchProblem, threads: int) -> Way:
    """fastattn's operator of torch on tensors; `how`: "plain", "inference", or "learning" of gradients."""
    if problem.shape.kind != CALL:
        raise Unsupported("is a single call")
    torch: Any = import_module("torch")
    import_module("fastattn.torch")
    torch.set_num_threads(threads)
    tensors = runtimes.tensors(torch, *problem.arrays())
    if how == "learning":
        tensors = [x.requires_grad_() for x in tensors]
    call = partial(torch.ops.fastattn.attention, *tensors)

    def inference() -> Any:
        with torch.inference_mode():
            return call()

    return Way(inference if how == "inference" else call, lambda x: runtimes.read_tensor(x.detach()))


_PACKAGES = ("torch", "transformers")
_OWN = ("fastattn", *_PACKAGES)
ENGINES = {
    **(
        {
            "fastattn": Engine(_OWN, _own, "the model after optimize(); attention itself"),
            "operator": Engine(_OWN, partial(_operator, "plain"), "torch.ops.fastattn.attention"),
            "inference": Engine(_OWN, partial(_operator, "inference"), "the same in inference_mode"),
            "learning": Engine(_OWN, partial(_operator, "learning"), "the same, gradients wanted"),
        }
        if fastattn.show_config()["isas_available"]
        else {}
    ),
    "torch": Engine(_PACKAGES, _torch, "the model as it is; scaled_dot_product_attention"),
}
MINILM = tuple(TorchShape(f"MiniLM {b},{n}", "minilm", b, n) for b, n in ((1, 16), (32, 128)))
PREFILL = TorchShape("Llama 1,2048", "llama", 1, 2048)
TINY = TorchShape("1,2,4,4,16", CALL, 1, 4)


def plan(request: Request) -> Sections:
    """Both models, in every way to optimise them, or with fewer rows MiniLM as it is; and a tiny call."""
    found: Sections = {}
    made = partial(TorchProblem, scratch=str(request.folder))
    for dtype in DTYPES if request.dtype is None else (request.dtype,):
        shapes = (*MINILM, PREFILL) if request.full else MINILM
        variants = OPTIONS if request.full else ("plain",)
        found |= request.section(made, "hidden states", shapes, dtype, variants)
        found |= request.section(made, "a tiny call", [TINY], dtype)
    return found


SUITE = Suite(ENGINES, plan, DTYPES, "batch, length of ids", "about ten minutes")
