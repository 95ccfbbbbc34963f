"""fastattn under ONNX's reference evaluator: eight operators of a model are computed by its kernels.

``ReferenceEvaluator(model, new_ops=OPERATORS)`` takes them, and keeps its own of all others. They pass
ONNX's own tests of these operators, see tests/parity/test_onnx.py, in their versions of opsets 17 to 28.

    pip install onnx ml_dtypes
    python examples/onnx_operators.py
"""

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import fastattn
from fastattn.functional import linear_attention
from fastattn.ops import activate, causal_conv1d, layer_norm, rms_norm
from fastattn.positions import apply_rope


def split(x, heads):
    """(batch, length, heads * head_dim) as (batch, heads, length, head_dim); other arrays as they are."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) if x.ndim == 3 else x


def join(x):
    """The inverse of `split`."""
    return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)


class Attention(OpRun):
    op_domain = ""

    def _run(
        self, q, k, v, mask=None, past_key=None, past_value=None, lengths=None, *, scale=None, is_causal=0,
        q_num_heads=None, kv_num_heads=None, qk_matmul_output_mode=0, softcap=0.0, softmax_precision=None,
        left_window_size=-1, right_window_size=-1,
    ):  # fmt: skip
        dtype, joined = q.dtype, q.ndim == 3
        q, k, v = split(q, q_num_heads), split(k, kv_num_heads), split(v, kv_num_heads)
        if past_key is not None:
            k, v = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
        present = k, v
        options = {"scale": scale, "softcap": softcap or None, "causal": bool(is_causal)}
        if max(left_window_size, right_window_size) >= 0:
            options["window"] = tuple(None if n < 0 else n for n in (left_window_size, right_window_size))
        if "window" in options or is_causal:  # the position of the first query among the keys
            options["q_offset"] = 0 if past_key is None else past_key.shape[2]
            if lengths is not None:
                options["q_offset"] = lengths - q.shape[2]
        if lengths is not None:
            options["kv_lengths"] = lengths
        double = softmax_precision == onnx.TensorProto.DOUBLE or np.float64 in (q.dtype, v.dtype)
        wide = np.float64 if double else np.float32  # for the softmax, and for what is not of one type
        if mask is not None:  # it may be shorter than the keys: nobody attends the others
            bools = mask.dtype == bool
            mask = mask if bools else mask.astype(wide)  # it may have integers, too, to be added
            missing = [(0, 0)] * (mask.ndim - 1) + [(0, k.shape[2] - mask.shape[-1])]
            mask = np.pad(mask, missing, constant_values=False if bools else -np.inf)
            options["mask" if bools else "bias"] = mask
        if double or v.dtype != dtype:
            q, k, v = (x.astype(wide, copy=False) for x in (q, k, v))
        out = fastattn.attention(q, k, v, **options).astype(dtype, copy=False)
        results = [join(out) if joined else out, *present]
        if len(self.output) > 3:
            if qk_matmul_output_mode != 3:
                raise NotImplementedError(
                    "fused: scores are never written to memory, only probabilities can be"
                )
            results.append(fastattn.attention_weights(q, k, **options).astype(dtype, copy=False))
        return tuple(results[: len(self.output)])


class RotaryEmbedding(OpRun):
    op_domain = ""

    def _run(self, x, cos, sin, ids=None, *, interleaved=0, num_heads=0, rotary_embedding_dim=0):
        if ids is not None:
            cos, sin = cos[ids], sin[ids]
        out = apply_rope(split(x, num_heads), cos, sin, interleaved=bool(interleaved))
        return (join(out) if x.ndim == 3 else out,)


def rows(x, axis):
    """X as rows of what is normalised together, from `axis` on."""
    return x.reshape(*x.shape[:axis], -1)


class RMSNormalization(OpRun):
    op_domain = ""

    def _run(self, x, weight, *, axis=-1, epsilon=1e-5, stash_type=1):
        axis %= x.ndim
        return (rms_norm(rows(x, axis), weight.reshape(-1), eps=epsilon).reshape(x.shape),)


class LayerNormalization(OpRun):
    op_domain = ""

    def _run(self, x, weight, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
        axis %= x.ndim
        bias = None if bias is None else bias.reshape(-1)
        out = layer_norm(rows(x, axis), weight.reshape(-1), bias, eps=epsilon).reshape(x.shape)
        axes, wide = tuple(range(axis, x.ndim)), np.float64 if x.dtype == np.float64 else np.float32
        mean = x.mean(axes, wide, keepdims=True)  # the two that only training reads are NumPy's
        deviation = 1 / np.sqrt(x.var(axes, wide, keepdims=True) + wide(epsilon))
        return out, mean, deviation


class LinearAttention(OpRun):
    op_domain = ""

    def _run(
        self, q, k, v, state=None, decay=None, beta=None, *, q_num_heads, kv_num_heads, chunk_size=64,
        scale=0.0, update_rule="gated_delta",
    ):  # fmt: skip
        dtype = q.dtype if state is None else state.dtype
        if state is not None:
            state = state.astype(np.float32, copy=False)
        if decay is not None:
            decay = split(decay, kv_num_heads)  # (batch, heads, length, 1 or head_dim)
        if beta is not None:
            beta = split(beta, beta.shape[-1])[..., 0]
            beta = np.broadcast_to(beta, (len(k), kv_num_heads, k.shape[1]))
        q, k, v = split(q, q_num_heads), split(k, kv_num_heads), split(v, kv_num_heads)
        if update_rule == "gated":
            decay = np.broadcast_to(decay, k.shape)
        elif update_rule == "gated_delta":
            if decay.shape[-1] == 1:
                decay = decay[..., 0]
            else:
                update_rule = "kimi_delta"
        out, state = linear_attention(
            q, k, v, rule=update_rule, log_decay=decay, beta=beta, scale=scale or None, state=state,
            return_state=True,
        )  # fmt: skip
        return join(out), state.astype(dtype, copy=False)


class CausalConvWithState(OpRun):
    op_domain = ""

    def _run(self, x, weight, bias=None, state=None, *, activation="none"):
        out, state = causal_conv1d(
            x.swapaxes(1, 2), weight[:, 0], bias, state=None if state is None else state.swapaxes(1, 2),
            activation=None if activation == "none" else "silu", return_state=True,
        )  # fmt: skip
        return out.swapaxes(1, 2), state.swapaxes(1, 2)


def swish(x, alpha, up=None):
    """``x * sigmoid(alpha * x)``, times `up`: silu of alpha x, over alpha."""
    if alpha == 1:
        return activate(x, "silu", up=up)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    y = x.astype(wide)
    y = activate(y * wide(alpha), "silu") / wide(alpha) if alpha else y / 2
    return (y if up is None else y * up.astype(wide)).astype(x.dtype)


class SwiGLU(OpRun):
    op_domain = ""

    def _run(self, a, b, *, alpha=1.0):
        return (swish(a, alpha, b),)


class Swish(OpRun):
    op_domain = ""

    def _run(self, x, *, alpha=1.0):
        return (swish(x, alpha),)


OPERATORS = [
    Attention, RotaryEmbedding, RMSNormalization, LayerNormalization, LinearAttention, CausalConvWithState,
    SwiGLU, Swish,
]  # fmt: skip


def main():
    """A node of attention, grouped heads and causal, by the evaluator's own operator and by ours."""
    names = ["q", "k", "v"]
    shapes = [(1, 100, 8 * 64), (1, 100, 2 * 64), (1, 100, 2 * 64)]
    node = onnx.helper.make_node("Attention", names, ["out"], q_num_heads=8, kv_num_heads=2, is_causal=1)
    floats = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info(n, floats, s) for n, s in zip(names, shapes, strict=True)]
    output = onnx.helper.make_tensor_value_info("out", floats, shapes[0])
    graph = onnx.helper.make_graph([node], "attention", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in zip(names, shapes, strict=True)}
    (expected,) = ReferenceEvaluator(model).run(None, arrays)
    (out,) = ReferenceEvaluator(model, new_ops=OPERATORS).run(None, arrays)
    print(f"{out.shape}, greatest difference {np.abs(out - expected).max():.1e}")


if __name__ == "__main__":
    main()
