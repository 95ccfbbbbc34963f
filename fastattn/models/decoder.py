"""Decoders that normalise before each half of a layer: GPT-2, Llama and their like, and generation with them.

`gpt2.py` and `llama.py` build them: they know the names of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import ops
from fastattn._args import lane_dtype
from fastattn._inputs import as_array, integer, integers
from fastattn.attention import attention
from fastattn.cache import KVCache
from fastattn.models import padding
from fastattn.models.sampling import Sampler
from fastattn.models.weights import token_rows
from fastattn.rope import apply_rope, rope_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike

    from fastattn._args import Array, Ints
    from fastattn.models.text import Text
    from fastattn.packed import PackedLinear
    from fastattn.rope_scaling import RopeFrequencies

NO_TOKEN = -1  # what `generate` yields for a sequence that has ended


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; a bias or norm that it lacks is None."""

    attention_norm: tuple[Array, ...]  # weight, or weight and bias
    qkv: PackedLinear
    qkv_bias: Array | None
    qk_norm: Array | None  # (heads + heads_kv, 1, head_dim): of an RMS norm of each head of q and k
    window: tuple[int, int] | None
    scale: float
    attended: PackedLinear  # the linear map behind attention
    attended_bias: Array | None
    inner_norm: tuple[Array, ...]
    inner: PackedLinear  # a gated pair in Llama
    inner_bias: Array | None
    outer: PackedLinear
    outer_bias: Array | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A language model; call it for the logits of all tokens, or `generate` with it."""

    model_type: str
    hidden_size: int
    heads: int
    heads_kv: int
    head_dim: int
    vocab_size: int
    activation: str
    norm: Callable[..., Array]  # ops.layer_norm or ops.rms_norm
    eps: float
    max_length: int | None  # tokens of a sequence, where a table of positions ends
    tokens: Array | PackedLinear  # (vocab_size, hidden_size); the output layer itself, if the two are tied
    positions: Array | None  # (max_length, hidden_size)
    rope: Callable[[int], RopeFrequencies] | None  # of the length of the sequence
    layers: tuple[Layer, ...]
    final_norm: tuple[Array, ...]
    output: PackedLinear  # hidden_size -> vocab_size
    stop: tuple[int, ...]  # ids that end a text
    dtype: np.dtype[Any]
    text: Text

    def __repr__(self) -> str:
        return f"<{self.model_type}: {len(self.layers)} layers of {self.hidden_size}, {self.dtype}>"

    def __call__(self, ids: ArrayLike, attention_mask: ArrayLike | None = None) -> Array:
        """Logits of the token after each token.

        Parameters
        ----------
        ids : array_like of int, (batch, length) or (length,)
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            Which tokens count. Padding may stand on either side; positions are counted from the first token
            that counts.

        Returns
        -------
        ndarray, (batch, length, vocab_size)
            In the model's dtype. What stands where a token does not count has no meaning.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit; nothing was computed.
        """
        tokens = padding.token_ids(self.model_type, ids, self.vocab_size)
        mask = padding.attended(self.model_type, attention_mask, tokens)
        batch, length = tokens.shape
        padding.require_length(self.model_type, length, self.max_length)
        lengths, order = (None, None) if mask is None else padding.align(mask)
        hidden = self._hidden(padding.reorder(tokens, order), np.arange(length), lengths)
        return padding.restore(self._logits(hidden).reshape(batch, length, self.vocab_size), order)

    def _hidden(
        self,
        ids: Ints,
        positions: Ints,
        lengths: Ints | None,
        caches: Sequence[KVCache] | None = None,
    ) -> Array:
        """Hidden states (batch * length, hidden_size) of ids (batch, length), before the last norm.

        positions is (length,) or (batch, length); the first lengths (batch,) of the ids count. With caches,
        one for each layer, they follow on what is there.
        """
        batch, length = ids.shape
        n, dtype = ids.size, self.dtype
        x = token_rows(self.tokens, ids.reshape(-1), dtype)
        if self.positions is not None:
            rows = x.reshape(batch, length, self.hidden_size)
            rows += self.positions[positions]
        if self.rope is not None:
            frequencies = self.rope(int(positions.max(initial=-1)) + 1)
            cos, sin = rope_tables(positions, frequencies, lane_dtype(dtype))

        # A token alone, the last of its sequence, sees all keys.
        options: dict[str, Any] = {"causal": length > 1, "kv_lengths": lengths, "q_offset": 0}
        buffer = padding.Buffers(n, dtype)
        x_out, y_out = buffer(self.hidden_size), buffer(self.hidden_size)
        qkv_out = buffer((self.heads + 2 * self.heads_kv) * self.head_dim)
        inner_out = buffer(self.layers[0].inner.out_features) if self.layers else None
        heads_out = buffer.heads(batch, length, self.heads, self.head_dim)
        for i, layer in enumerate(self.layers):
            y = self.norm(x, *layer.attention_norm, eps=self.eps, out=y_out)
            qkv = ops.linear(y, layer.qkv, layer.qkv_bias, out=qkv_out)
            qk, v = padding.split_heads(qkv, batch, length, self.heads + self.heads_kv, self.heads_kv)
            if layer.qk_norm is not None:
                qk = ops.rms_norm(qk, eps=self.eps)
                qk *= layer.qk_norm
            if self.rope is not None:
                apply_rope(qk, cos, sin, out=qk)
            q, k = qk[:, : self.heads], qk[:, self.heads :]
            if caches is not None:
                k, v, options["kv_lengths"], options["q_offset"] = caches[i].append(k, v, lengths)
            heads = attention(q, k, v, window=layer.window, scale=layer.scale, out=heads_out, **options)
            context = padding.join_heads(heads)
            x = ops.linear(context, layer.attended, layer.attended_bias, residual=x, out=x_out)
            y = self.norm(x, *layer.inner_norm, eps=self.eps, out=y_out)
            inner = ops.linear(y, layer.inner, layer.inner_bias, activation=self.activation, out=inner_out)
            x = ops.linear(inner, layer.outer, layer.outer_bias, residual=x, out=x_out)
        return x

    def _logits(self, hidden: Array) -> Array:
        """hidden is (n, hidden_size), as `_hidden` gives it; result (n, vocab_size)."""
        return ops.linear(self.norm(hidden, *self.final_norm, eps=self.eps), self.output)

    def generate(
        self,
        ids: ArrayLike | Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        *,
        attention_mask: ArrayLike | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: int | Sequence[int] | None = None,
    ) -> Iterator[Any]:
        """Continue sequences, a token at a time, each as soon as it is known.

        Parameters
        ----------
        ids : array_like of int, (length,) or (batch, length), or a list of lists of different lengths
            The prompts: at least one token in each.
        max_new_tokens : int, default 128
            Where every sequence ends, if it has not before.
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            Which tokens of an array `ids` count; the others, wherever they stand, are left out.
        temperature : float, default 0.0
            What logits are divided by before a token is drawn; at 0 it is not drawn: the best is taken.
        top_k : int, optional
            Draw from the `top_k` best tokens only, and those that equal the last of them.
        top_p : float, optional
            Draw from the fewest best tokens only whose probabilities reach `top_p`; after `top_k`.
        seed : int, optional
            For the same tokens in every run. Each sequence draws from a random generator of its own, whatever
            other sequences there are.
        stop : int or sequence of int, optional
            Ids that end a sequence; by default the `eos_token_id` of the model's folder, none with ``()``.

        Yields
        ------
        int, or ndarray of int64, (batch,)
            The next token of a single prompt (length,), or of each prompt. An id of `stop` is still yielded;
            after it, -1 stands for its sequence until the others have ended, too.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit: at the call, not at the first token.

        Notes
        -----
        A step costs one pass over the weights and over the keys so far. Only the logits of last tokens are
        computed. Keys and values take ``2 * layers * heads_kv * head_dim`` numbers for each token of the
        longest prompt and of `max_new_tokens`, for each sequence.
        """
        single, prompts = self._prompts(ids, attention_mask)
        n_new = integer("generate", "max_new_tokens", max_new_tokens, 0)
        padding.require_length("generate", max(map(len, prompts), default=0) + n_new, self.max_length)
        sampler = Sampler("generate", len(prompts), temperature, top_k, top_p, seed)
        ends = np.atleast_1d(self.stop if stop is None else as_array("generate", "stop", stop))
        ends = integers("generate", "stop", ends if ends.size else ends.astype(np.int64), ends.shape, "(n,)")
        steps = self._steps(prompts, n_new, sampler, ends)
        return (int(tokens[0]) for tokens in steps) if single else steps

    def _prompts(self, ids: Any, attention_mask: Any) -> tuple[bool, list[Ints]]:
        """Whether `ids` is one sequence, and the sequences without what does not count."""
        rows = list(ids) if isinstance(ids, (list, tuple)) and attention_mask is None else []
        if rows and all(np.ndim(row) == 1 for row in rows):
            prompts = [padding.token_ids("generate", row, self.vocab_size)[0] for row in rows]
            single = False
        else:
            tokens = padding.token_ids("generate", ids, self.vocab_size)
            mask = padding.attended("generate", attention_mask, tokens)
            prompts = list(tokens) if mask is None else [row[m] for row, m in zip(tokens, mask, strict=True)]
            single = np.ndim(ids) == 1
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("generate(): ids has a prompt without a token; expected at least one in each")
        return single, prompts

    def _steps(
        self, prompts: list[Ints], max_new_tokens: int, sampler: Sampler, stop: Ints
    ) -> Iterator[Ints]:
        if not prompts or max_new_tokens == 0:
            return
        ids, mask = padding.pad(prompts)
        lengths = mask.sum(axis=1)
        batch, longest = ids.shape
        caches = [KVCache(longest + max_new_tokens - 1) for _ in self.layers]
        hidden = self._hidden(ids, np.arange(longest), lengths, caches)
        hidden = hidden.reshape(batch, longest, -1)[np.arange(batch), lengths - 1]
        running = np.ones(batch, np.bool_)
        for step in range(max_new_tokens):
            tokens = sampler(self._logits(hidden))
            yield np.where(running, tokens, NO_TOKEN)
            running &= ~np.isin(tokens, stop)
            if not running.any() or step == max_new_tokens - 1:
                return
            hidden = self._hidden(tokens[:, None], lengths[:, None], None, caches)
            lengths = lengths + 1
