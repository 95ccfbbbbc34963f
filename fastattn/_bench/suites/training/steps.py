"""Steps of training: a decoder-only Transformer from nothing, forward and backward pass, and AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn import layers, train
from fastattn._bench import plain
from fastattn._bench.cases import Array
from fastattn._bench.suite import CallProblem
from fastattn._bench.ways import Way

# Layers and vocabulary: a model of characters, and two layers of GPT-2.
MODELS = {"characters": (6, 96), "GPT-2": (2, 50257)}
STEP = "step"
RATE, MAX_NORM = 1e-4, 1.0  # AdamW's learning rate; the gradients are clipped to this norm


class StepProblem(CallProblem):
    """`variant` is "step" and one of `MODELS`; batch, heads, length and head_dim stand in the shape."""

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
        """By the names of `layers.LanguageModel`; the embedding also makes the logits."""
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
        scores = self.shape.scores / 2 * n_layers
        return 6.0 * weights * self.shape.batch * self.shape.len_q + 14.0 * scores * self.shape.head_dim


def unit_norm(name: str, width: int) -> dict[str, Array]:
    """The parameters of a new norm."""
    return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}


def own_step(problem: StepProblem) -> Way:
    """`layers.LanguageModel` and `train.AdamW`."""
    (n_layers, vocabulary), shape = problem.model, problem.shape
    model = layers.LanguageModel(vocabulary, shape.len_q, problem.width, shape.heads_q, n_layers)
    model.load_state_dict(problem.weights())
    optimizer = train.AdamW(model, lr=RATE)
    ids, targets = problem.tokens()

    def step() -> float:
        loss, grads = model.loss_and_gradients(ids, targets)
        optimizer.step(grads, max_norm=MAX_NORM)
        return loss

    return Way(step, read_loss)


def torch_step(problem: StepProblem, threads: int) -> dict[str, Way]:
    """The same in torch's eager mode, as a Transformer is written by hand: one call an operation."""
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

        def step() -> float:
            optimizer.zero_grad()
            table = weights["token_embedding.weight"]
            x = functional.embedding(ids, table) + weights["position_embedding.weight"]
            for i in range(n_layers):
                layer = f"encoder.layers.{i}"
                x = x + attend(norm(x, f"{layer}.norm1"), f"{layer}.self_attn")
                inner = functional.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.linear1"))
                x = x + linear(inner, f"{layer}.linear2")
            logits = norm(x, "encoder.norm") @ table.T
            loss = functional.cross_entropy(logits.view(-1, len(table)), targets.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
            optimizer.step()
            return float(loss)

        return Way(step, read_loss)

    return {"fused AdamW": way(True), "AdamW": way(False)}


def read_loss(loss: float) -> Array:
    """A loss as the rows of a result."""
    return np.array([[loss]])
