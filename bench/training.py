"""The suite "training": gradients of attention, and steps of training."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastattn
from bench import plain
from bench.attention import MaskedProblem
from bench.suite import PREFILL, Request, Suite, grouped, has_bfloat16, peak_memory, refuse_dense, scores
from examples.language_model import LanguageModel
from fastattn import train
from fastattn._bench import runtimes
from fastattn._bench.attention import NUMBERS, AttentionProblem, shape_of
from fastattn._bench.cases import DTYPES, STRUCTURES, Array, Shape
from fastattn._bench.harness import Engine, Sections, Unsupported, Way, Ways, own_engines
from fastattn.functional import attention_backward

# Layers and vocabulary: a model of characters, and two layers of GPT-2.
MODELS = {"characters": (6, 96), "GPT-2": (2, 50257)}
STEP = "step"
RATE, MAX_NORM = 1e-4, 1.0  # AdamW's learning rate; the gradients are clipped to this norm


class StepProblem(AttentionProblem):
    """`variant` is "step" and one of `MODELS`; batch, heads, length and head_dim stand in the shape."""

    alone = True

    def quality(self, got: Array, want: Array) -> dict[str, float]:
        return peak_memory()

    @property
    def name(self) -> str:
        return f"{self.variant} {self.shape.name}"

    @property
    def width(self) -> int:
        return self.shape.heads_q * self.shape.head_dim

    @property
    def model(self) -> tuple[int, int]:
        """Layers and vocabulary."""
        return MODELS[self.variant.split()[1]]

    def tokens(self) -> tuple[Array, Array]:
        """Ids and targets, (B, L)."""
        ids = self.rng(0).integers(0, self.model[1], (self.shape.batch, self.shape.len_q + 1))
        return ids[:, :-1].copy(), ids[:, 1:].copy()

    def weights(self) -> dict[str, Array]:
        """Arrays by torch's names; the embedding also makes the logits."""
        rng, width = self.rng(1), self.width
        n_layers, vocabulary = self.model

        def normal(*shape: int) -> Array:
            return np.float32(0.02) * rng.standard_normal(shape, np.float32)

        weights = {
            "token_embedding.weight": normal(vocabulary, width),
            "position_embedding.weight": normal(self.shape.len_q, width),
        }
        shapes = {
            "self_attn.in_proj_weight": (3 * width, width), "self_attn.in_proj_bias": (3 * width,),
            "self_attn.out_proj.weight": (width, width), "self_attn.out_proj.bias": (width,),
            "linear1.weight": (4 * width, width), "linear1.bias": (4 * width,),
            "linear2.weight": (width, 4 * width), "linear2.bias": (width,),
        }  # fmt: skip
        for i in range(n_layers):
            weights |= {f"encoder.layers.{i}.{name}": normal(*shape) for name, shape in shapes.items()}
            for norm in ("norm1", "norm2"):
                weights |= unit_norm(f"encoder.layers.{i}.{norm}", width)
        return weights | unit_norm("encoder.norm", width)

    def reference(self) -> tuple[Array, Array]:
        """The loss before the step, in float64 by plain NumPy, a sequence at a time."""
        weights = plain.Widened(self.weights(), "", np.float64)
        ids, targets = self.tokens()
        losses = [self._loss(weights, x, y) for x, y in zip(ids, targets, strict=True)]
        return np.array([0]), np.array([[np.mean(losses)]])

    def _loss(self, weights: plain.Weights, ids: Array, targets: Array) -> float:
        table = weights["token_embedding.weight"]
        x = (table[ids] + weights["position_embedding.weight"])[None]
        for i in range(self.model[0]):
            layer = plain.Widened(weights, f"encoder.layers.{i}.", np.float64)
            y = plain.layer_norm(x, layer, "norm1")
            x = x + plain.multi_head(y, y, layer, "self_attn", self.shape.heads_q, causal=True)
            y = plain.gelu(plain.linear(plain.layer_norm(x, layer, "norm2"), layer, "linear1"))
            x = x + plain.linear(y, layer, "linear2")
        logits = plain.layer_norm(x, weights, "encoder.norm")[0] @ table.T
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(targets)), targets]
        return float(np.mean(np.log(np.exp(logits).sum(-1)) - chosen))

    @property
    def unit(self) -> str:
        return "flops"

    @property
    def work(self) -> float:
        """Operations of the matrix products: three for each weight and token, and seven of attention."""
        n_layers, vocabulary = self.model
        weights = 12 * n_layers * self.width**2 + vocabulary * self.width
        pairs = scores(self.shape) / 2 * n_layers
        return 6.0 * weights * self.shape.batch * self.shape.len_q + 14.0 * pairs * self.shape.head_dim


def unit_norm(name: str, width: int) -> dict[str, Array]:
    """The parameters of a new norm."""
    return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}


def own_step(problem: StepProblem) -> Way:
    """The example's model and `train.AdamW`, which keeps float32 weights beside narrower ones."""
    (n_layers, vocabulary), shape, weights = problem.model, problem.shape, problem.weights()
    model: Any = LanguageModel(
        vocabulary, shape.len_q, problem.width, shape.heads_q, n_layers, weights_dtype=problem.dtype
    )
    model.table, model.positions = (weights.pop(f"{x}_embedding.weight") for x in ("token", "position"))
    model.encoder.load_state_dict({name.removeprefix("encoder."): x for name, x in weights.items()})
    optimizer = train.AdamW(model.parameters, lr=RATE)
    ids, targets = problem.tokens()

    def step() -> float:
        loss, grads = model.loss_and_gradients(ids, targets)
        optimizer.step(grads, max_norm=MAX_NORM)
        return float(loss)

    return Way(step, read_loss)


def torch_step(problem: StepProblem, threads: int) -> dict[str, Way]:
    """The step in torch's eager mode, as a Transformer is written by hand: one call an operation.

    In bfloat16 under autocast, whose weights are float32.
    """
    import torch

    torch.set_num_threads(threads)
    functional: Any = torch.nn.functional
    ids, targets = (torch.from_numpy(x) for x in problem.tokens())
    shape, width, n_layers = problem.shape, problem.width, problem.model[0]

    def way(fused: bool) -> Way:
        weights = {name: torch.from_numpy(x).requires_grad_() for name, x in problem.weights().items()}
        optimizer = torch.optim.AdamW(weights.values(), lr=RATE, fused=fused)

        def linear(x: Any, name: str) -> Any:
            return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

        def norm(x: Any, name: str) -> Any:
            return functional.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"])

        def attend(x: Any, name: str) -> Any:
            qkv = functional.linear(x, weights[f"{name}.in_proj_weight"], weights[f"{name}.in_proj_bias"])
            q, k, v = qkv.view(*x.shape[:2], 3, shape.heads_q, shape.head_dim).permute(2, 0, 3, 1, 4)
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return linear(context.transpose(1, 2).reshape(x.shape), f"{name}.out_proj")

        def loss_of() -> Any:
            table = weights["token_embedding.weight"]
            x = functional.embedding(ids, table) + weights["position_embedding.weight"]
            for i in range(n_layers):
                layer = f"encoder.layers.{i}"
                x = x + attend(norm(x, f"{layer}.norm1"), f"{layer}.self_attn")
                inner = functional.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.linear1"))
                x = x + linear(inner, f"{layer}.linear2")
            logits = norm(x, "encoder.norm") @ table.T
            return functional.cross_entropy(logits.view(-1, len(table)), targets.view(-1))

        def step() -> float:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=problem.dtype == "bfloat16"):
                loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
            optimizer.step()
            return float(loss)

        return Way(step, read_loss)

    return {"fused AdamW": way(True), "AdamW": way(False)}


def read_loss(loss: float) -> Array:
    """A loss as the rows of a result."""
    return np.array([[loss]])


BACKWARD, BOTH = "backward", "both"
_CHOSEN = 8  # rows of dq, dk and dv that are compared


class GradientProblem(AttentionProblem):
    """Gradients of q, k and v. `variant` is "backward" or "both" passes, and the variant of attention."""

    alone = True

    @property
    def kind(self) -> str:
        """Passes that are timed."""
        return self.variant.split()[0]

    @property
    def attention(self) -> MaskedProblem:
        """The forward pass."""
        return MaskedProblem(self.shape, self.variant.split()[1], self.dtype, self.seed)

    @property
    def name(self) -> str:
        return f"{self.variant} {self.shape.name}"

    def dout(self) -> Array:
        """The gradient that comes in, (B, H, Lq, Dv)."""
        dout = self.rng(2).standard_normal(self.attention.out_shape, np.float32)
        return dout.astype(self.arrays()[0].dtype)

    def reference(self) -> tuple[Array, Array]:
        """Some rows of dq, dk and dv of the last key head, as `joined` counts rows, by the fallback."""
        s, group = self.shape, self.attention.group
        q, k, v = (x[-1:, -n:].astype(float) for x, n in zip(self.arrays(), (group, 1, 1), strict=True))
        dout = self.dout()[-1:, -group:].astype(float)
        options = {name: of_heads(x, group) for name, x in self.attention.options().items()}
        if (attended := self.attention.attended()) is not None:
            options = {"mask": attended}
        options["backend"] = "numpy"
        out, lse = fastattn.attention(q, k, v, return_lse=True, **options)
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse, **options)
        keys = np.random.default_rng(self.seed).permutation(s.len_k)[:_CHOSEN]
        rows = np.random.default_rng(self.seed).permutation(s.len_q)[:_CHOSEN]
        heads_q, heads_kv = s.batch * s.heads_q, s.batch * s.heads_kv
        of_q = ((heads_q - group + np.arange(group))[:, None] * s.len_q + rows).ravel()
        of_k = heads_q * s.len_q + (heads_kv - 1) * s.len_k + keys
        indices = np.concatenate([of_q, of_k, of_k + heads_kv * s.len_k])
        return indices, np.concatenate(
            [dq[0, :, rows].swapaxes(0, 1).reshape(-1, s.head_dim), dk[0, 0, keys], dv[0, 0, keys]]
        )

    def quality(self, got: Array, want: Array) -> dict[str, float]:
        return peak_memory()

    @property
    def tolerance(self) -> float:
        """A bound for sums over all queries: the rounding of a result in 16 bits grows with its size."""
        return float(super().tolerance) * (16 if self.dtype in ("float16", "bfloat16") else 1)

    @property
    def unit(self) -> str:
        return "flops"

    @property
    def work(self) -> float:
        """Operations of the five products of the backward pass, and of the two of the forward pass."""
        return self.attention.work * (2.5 if self.kind == BACKWARD else 3.5)


def of_heads(x: Any, group: int) -> Any:
    """An option of attention as the last `group` query heads have it."""
    if not isinstance(x, np.ndarray) or not x.ndim:
        return x
    return x[-group:] if x.ndim in (1, 3) else x


def joined(gradients: Any) -> Array:
    """dq, dk and dv, one after another, as rows; head_dim_v is head_dim here."""
    return np.concatenate([np.asarray(x).reshape(-1, x.shape[-1]) for x in gradients])


MASKED = ("sliding_window", "packed_documents", "block_sparse")
MODIFIED = ("bias_heads", "softcap", "alibi")
PAIRS = ("amx", "avx512bf16", "neonbf16")  # instruction sets that multiply bfloat16
LONG = shape_of(1, 8, 2048, 2048, 64)
STRUCTURED = shape_of(1, 4, 4096, 4096, 64)
CHARACTERS, GPT2 = shape_of(16, 6, 256, 256, 64), shape_of(4, 12, 256, 256, 64)


def plan(request: Request) -> Sections:
    """Short texts, or with `full` all shapes, masks and modifiers; float32 unless `dtype` says otherwise."""
    main = request.dtype or "float32"

    def section(title: str, shapes: list[Shape], *variants: str, dtype: str = main) -> Sections:
        return request.section(GradientProblem, title, shapes, dtype, variants)

    def steps(*models: tuple[Shape, str]) -> Sections:
        problems = [StepProblem(shape, f"{STEP} {name}", main, request.seed) for shape, name in models]
        return {f"steps, {main}": problems} if main in ("float32", "bfloat16") else {}

    def both(variant: str) -> tuple[str, str]:
        return f"{BACKWARD} {variant}", f"{BOTH} {variant}"

    if not request.full:
        narrow = request.dtype is None and (fastattn.show_config()["isa"] or "") in PAIRS and has_bfloat16()
        return {
            **section("no mask", [PREFILL[0], PREFILL[2], LONG], *both("plain")),
            **section("causal", [LONG], *both("causal")),
            **(section("no mask", [LONG], *both("plain"), dtype="bfloat16") if narrow else {}),
            **steps((CHARACTERS, "characters")),
        }
    found = {
        **section("no mask", PREFILL, *both("plain")),
        **section("causal", PREFILL, *both("causal")),
        **section("grouped heads", [grouped(LONG), grouped(PREFILL[4])], *both("plain"), *both("causal")),
        **section("masks", [STRUCTURED], *(f"{BACKWARD} {name}" for name in ("plain", *MASKED))),
        **section("modifiers", [LONG], *(f"{BACKWARD} {name}" for name in ("plain", *MODIFIED))),
    }
    if request.dtype is None and has_bfloat16():
        long = [shape for shape in PREFILL if shape.len_q >= 512]
        found |= section("no mask", long, *both("plain"), dtype="bfloat16")
        found |= section("causal", [LONG], *both("causal"), dtype="bfloat16")
    return found | steps((CHARACTERS, "characters"), (GPT2, "GPT-2"))


def torch_autograd(problem: GradientProblem | StepProblem, threads: int) -> Ways:
    """torch's fused attention on (B, H, L, D) tensors in the arrays' memory, and torch.autograd.grad."""
    if isinstance(problem, StepProblem):
        return torch_step(problem, threads)
    import torch

    torch.set_num_threads(threads)
    forward, shape = problem.attention, problem.shape
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {}
    if forward.variant == "causal":
        options["is_causal"] = True
    elif forward.variant in STRUCTURES:
        options["attn_mask"] = torch.from_numpy(forward.attended())
    elif forward.variant == "bias_heads":
        options["attn_mask"] = torch.from_numpy(forward.options()["bias"])[None]
    elif forward.variant != "plain":
        raise Unsupported(f"has no {forward.variant} in its fused attention")
    if shape.heads_q != shape.heads_kv:
        options["enable_gqa"] = True

    *inputs, dout = runtimes.tensors(torch, *problem.arrays(), problem.dout())
    for x in inputs:
        x.requires_grad_()

    def read(gradients: Any) -> Array:
        return joined([runtimes.read_tensor(x) for x in gradients])

    if problem.kind == BACKWARD:
        out = sdpa(*inputs, **options)
        return Way(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), read)
    return Way(lambda: torch.autograd.grad(sdpa(*inputs, **options), inputs, dout), read)


def jax_vjp(problem: GradientProblem | StepProblem, threads: int) -> Way:
    """jax.nn.dot_product_attention on (B, L, H, D), its gradient compiled; it holds every score at once."""
    if isinstance(problem, StepProblem):
        raise Unsupported("is asked for gradients of attention only")
    import jax

    forward = problem.attention
    if forward.variant not in ("plain", "causal"):
        raise Unsupported("is asked without masks or causal only")
    if problem.dtype in ("float16", "float64"):
        raise Unsupported(f"computes {problem.dtype} in another type")
    refuse_dense(problem.shape, problem.dtype, 4)
    if problem.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    causal = forward.variant == "causal"

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")

    arrays = [jax.device_put(x.swapaxes(1, 2).copy()) for x in (*problem.arrays(), problem.dout())]
    *inputs, dout = arrays

    def read(gradients: Any) -> Array:
        return joined([np.asarray(x).swapaxes(1, 2).copy() for x in gradients])

    if problem.kind == BACKWARD:
        pullback: Any = jax.jit(lambda *inputs: jax.vjp(attention, *inputs)[1])(*inputs)
        backward = jax.jit(lambda pullback, dout: pullback(dout))
        return Way(lambda: jax.block_until_ready(backward(pullback, dout)), read)
    both = jax.jit(lambda dout, *inputs: jax.vjp(attention, *inputs)[1](dout))
    return Way(lambda: jax.block_until_ready(both(dout, *inputs)), read)


def _own(problem: GradientProblem | StepProblem, backend: str) -> Way:
    if isinstance(problem, StepProblem):
        return own_step(problem)
    arrays, dout, options = problem.arrays(), problem.dout(), problem.attention.options()
    into = tuple(np.empty_like(x) for x in arrays)

    def forward() -> Any:
        return fastattn.attention(*arrays, return_lse=True, **options)

    def backward(out: Any, lse: Any) -> Any:
        return attention_backward(dout, *arrays, out, lse, into=into, **options)

    if problem.kind == BACKWARD:
        out, lse = forward()
        return Way(lambda: backward(out, lse), joined)
    return Way(lambda: backward(*forward()), joined)


ENGINES = {
    **own_engines(_own),
    "torch": Engine(("torch",), torch_autograd, "torch's SDPA and its gradient by autograd"),
    "jax": Engine(("jax",), jax_vjp, "jax.nn.dot_product_attention and jax.vjp, compiled"),
}


SUITE = Suite(ENGINES, plan, DTYPES, NUMBERS, "about ten minutes")
