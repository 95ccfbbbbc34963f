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
    from fastattn.models.weights import Precision
    from fastattn.packed import PackedLinear
    from fastattn.rope_scaling import RopeFrequencies

# Tokens to make room for in the cache before they are there; it doubles when they are more.
_ROOM = 256


@dataclass(frozen=True, slots=True, eq=False)
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


@dataclass(frozen=True, slots=True, eq=False)
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
    precision: Precision
    text: Text

    @property
    def dtype(self) -> np.dtype[Any]:
        """What is computed in."""
        return self.precision.dtype

    @property
    def weights_dtype(self) -> str:
        """How the weights of linear maps are kept."""
        return self.precision.weights

    def __repr__(self) -> str:
        return f"<{self.model_type}: {len(self.layers)} layers of {self.hidden_size}, {self.precision}>"

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
            In the model's dtype; one sequence (length,) is a batch of one. What stands where a token does not
            count has no meaning.

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
        longest = length if lengths is None else int(lengths.max(initial=0))
        hidden = self._hidden(padding.reorder(tokens, order), np.arange(length), longest, lengths)
        return padding.restore(self._logits(hidden).reshape(batch, length, self.vocab_size), order)

    def _hidden(
        self,
        ids: Ints,
        positions: Ints,
        longest: int,
        lengths: Ints | None,
        caches: Sequence[KVCache] | None = None,
    ) -> Array:
        """Hidden states (batch * length, hidden_size) of ids (batch, length), before the last norm.

        positions is (length,) or (batch, length); the first lengths (batch,) of the ids count. With caches,
        one for each layer, they follow on what is there. The longest sequence has `longest` tokens by then,
        padding left out: some scalings of rotary positions depend on it.
        """
        batch, length = ids.shape
        n, dtype = ids.size, self.dtype
        x = token_rows(self.tokens, ids.reshape(-1), dtype)
        if self.positions is not None:
            rows = x.reshape(batch, length, self.hidden_size)
            rows += self.positions[positions]
        if self.rope is not None:
            cos, sin = rope_tables(positions, self.rope(longest), lane_dtype(dtype))

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
            Where every sequence ends, if it has not before. Where the model has a table of positions (GPT-2),
            they have to fit into it behind the longest prompt.
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            Which tokens of an array `ids` count; the others, wherever they stand, are left out.
        temperature : float, default 0.0
            What logits are divided by before a token is drawn; at 0 it is not drawn: the best is taken.
        top_k : int, optional
            Draw from the `top_k` best tokens only, and those that equal the last of them. This, `top_p` and
            `seed` need a temperature above 0.
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
            after it, -1 stands for its sequence until the others have ended, too. ``text.stream`` makes text
            of the one, ``text.decode`` of what has been collected of the other.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit: at the call, not at the first token.

        Notes
        -----
        A step costs one pass over the weights and over the keys so far, of the sequences that have not ended.
        Only the logits of last tokens are computed. Keys and values take ``2 * layers * heads_kv * head_dim``
        numbers for each token of the longest prompt and behind it, for each sequence; at first there is room
        for 256 new ones, and the room doubles when it is full.
        """
        single, prompts = self._prompts(ids, attention_mask)
        n_new = integer("generate", "max_new_tokens", max_new_tokens, 0)
        longest = max(map(len, prompts), default=0)
        if self.max_length is not None and longest + n_new > self.max_length:
            raise ValueError(
                f"generate(): max_new_tokens is {n_new} behind a prompt of {longest} tokens; expected at most"
                f" {self.max_length} together"
            )
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
        caches = [KVCache(longest + min(max_new_tokens - 1, _ROOM)) for _ in self.layers]
        hidden = self._hidden(ids, np.arange(longest), longest, lengths, caches)
        hidden = hidden.reshape(batch, longest, -1)[np.arange(batch), lengths - 1]
        running = np.arange(batch)  # sequences that have not ended; the others are computed no more
        for step in range(1, max_new_tokens + 1):
            tokens = sampler(self._logits(hidden))
            yielded = np.full(batch, padding.NO_TOKEN)
            yielded[running] = tokens
            yield yielded
            kept = np.flatnonzero(~np.isin(tokens, stop))
            if not kept.size or step == max_new_tokens:
                return
            if kept.size < len(running):
                running, tokens, lengths = running[kept], tokens[kept], lengths[kept]
                sampler.select(kept)
                for cache in caches:
                    cache.select(kept)
            hidden = self._hidden(tokens[:, None], lengths[:, None], longest + step, None, caches)
            lengths = lengths + 1
