"""A decoder-only Transformer from token ids to logits, as GPT-2, which can be trained from nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import grad, ops
from fastattn._args.attention import dropout_of
from fastattn._args.errors import named, put_name, wrong_shape
from fastattn._args.types import Array, ArrayLike, Ints
from fastattn._args.values import MOST_SIZE, as_array, choice, flag, integer, integers, short
from fastattn.cache import KVCache
from fastattn.grad._linear import TRAINED
from fastattn.grad._loss import targets_of
from fastattn.layers._rotary import Rope
from fastattn.layers._sampling import Sampler, Sampling
from fastattn.layers._stacks import TransformerEncoder, layer_numbers
from fastattn.layers._state import Layer, Parameter, constant, lane_of, normal
from fastattn.layers._transformer import TransformerEncoderLayer, require_head_options
from fastattn.positions import rope_frequencies

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastattn._args.options import SamplingOptions
    from fastattn.layers._attention_parameters import HeadOptions
    from fastattn.layers._state import Fields, Taken

POSITIONS = ("learned", "rope")
_DEVIATION = 0.02  # of GPT-2's weights


@dataclass(eq=False)
class LanguageModel(Layer):
    """Token embedding, positions, causal pre-norm layers, a norm, and logits of the next token.

    Parameters
    ----------
    vocab_size : int
    max_length : int
        The most tokens of a sequence.
    d_model, num_heads, num_layers : int, default 384, 6 and 6
    dim_feedforward : int, optional
        By default ``4 * d_model``.
    activation : str, default "gelu"
        One of `FeedForward`, gated ones included.
    positions : {"learned", "rope"}
        A table of vectors that are added to the tokens', or rotated queries and keys.
    tie_word_embeddings : bool, default True
        Whether the embedding is also the matrix that makes the logits.
    norm, layer_norm_eps, bias, attention, weights_dtype
        As in `TransformerEncoderLayer`.
    keys_from : sequence of int, optional
        As in `TransformerEncoder`; the layers that attend another's keys are built to.
    rng : Generator or int, optional
        Draws the parameters as GPT-2's: normal ones of deviation 0.02, of what is added to the residual
        ``0.02 / sqrt(2 * num_layers)``; biases are 0.

    Notes
    -----
    Parameters are ``token_embedding.weight``, ``position_embedding.weight`` if learned, ``encoder.*``, and
    ``head.weight`` if not tied.
    """

    vocab_size: int
    max_length: int
    d_model: int = 384
    num_heads: int = 6
    num_layers: int = 6
    dim_feedforward: int | None = None
    activation: str = "gelu"
    _: KW_ONLY
    positions: str = "learned"
    tie_word_embeddings: bool = True
    norm: str = "layer_norm"
    layer_norm_eps: float = 1e-5
    bias: bool = True
    attention: HeadOptions | None = None
    keys_from: Sequence[int] | None = None
    weights_dtype: str = "float32"
    rng: InitVar[np.random.Generator | int | None] = None
    encoder: TransformerEncoder = field(init=False, repr=False)
    embedding: Array = field(init=False, repr=False)  # in the lane type: rows are looked up in it
    head: ops.PackedLinear = field(init=False, repr=False)
    position_table: Array | None = field(init=False, default=None, repr=False)

    _parts = ("encoder",)
    _vjp = None  # type: ignore[assignment]  # its input has no gradient: `loss_and_gradients`
    _vectors = (("position_embedding.weight", "position_table"),)

    def __post_init__(self, rng: np.random.Generator | int | None) -> None:
        for name in ("vocab_size", "max_length", "d_model", "num_heads", "num_layers"):
            setattr(self, name, integer(name, getattr(self, name), 1, MOST_SIZE))
        if self.dim_feedforward is None:
            self.dim_feedforward = 4 * self.d_model
        self.dim_feedforward = integer("dim_feedforward", self.dim_feedforward, 1, MOST_SIZE)
        choice("positions", self.positions, POSITIONS)
        flag("tie_word_embeddings", self.tie_word_embeddings)
        require_head_options("attention", self.attention)
        attention: HeadOptions = {**(self.attention or {})}
        if self.positions == "rope":
            if attention.get("rope") is None:
                given = attention.get("head_dim")
                head_dim = max(1, self.d_model // self.num_heads) if given is None else given
                if integer("head_dim", head_dim, 1, MOST_SIZE) % 2:
                    raise ValueError(f"(): head_dim is {head_dim}; expected an even one for rope")
                attention["rope"] = Rope(rope_frequencies(head_dim))
        elif attention.get("rope") is not None:
            raise ValueError("(): attention has rope; expected positions='rope' with it")
        if attention.get("query_only"):
            raise ValueError("(): attention has query_only; expected keys_from, which says of which layers")
        shares, numbers = self.keys_from is not None, range(self.num_layers)
        sources = layer_numbers("keys_from", self.keys_from, len(numbers)) if shares else numbers
        layers = [
            TransformerEncoderLayer(
                self.d_model,
                self.num_heads,
                self.dim_feedforward,
                self.activation,
                norm_first=True,
                norm=self.norm,
                layer_norm_eps=self.layer_norm_eps,
                bias=self.bias,
                attention={**attention, "query_only": i != source} if shares else attention,
                weights_dtype=self.weights_dtype,
            )
            for i, source in enumerate(sources)
        ]
        self.encoder = TransformerEncoder(layers, layers[0]._new_norm(), self.keys_from)
        self._set_up(None)
        source = self._source(rng)
        if source is not None:
            drawn = {name: p.drawn(name, source) for name, p in self._gpt2_draws().items()}
            self.load_state_dict(drawn)

    def _gpt2_draws(self) -> dict[str, Parameter]:
        """Draw all parameters as GPT-2's."""
        draws = {}
        for name, parameter in self.parameters().items():
            draw = parameter.draw
            if len(parameter.shape) == 2:
                last = name.endswith(("out_proj.weight", "linear2.weight"))  # they add to the residual
                draw = normal(_DEVIATION / (2 * self.num_layers) ** 0.5 if last else _DEVIATION)
            elif name.endswith("bias"):
                draw = constant(0.0)
            draws[name] = parameter._replace(draw=draw)
        return draws

    def _parameters(self) -> dict[str, Parameter]:
        draw, shape = normal(_DEVIATION), (self.vocab_size, self.d_model)
        parameters = {"token_embedding.weight": Parameter(shape, draw)}
        if self.positions == "learned":
            parameters["position_embedding.weight"] = Parameter((self.max_length, self.d_model), draw)
        if not self.tie_word_embeddings:
            parameters["head.weight"] = Parameter(shape, draw)
        return parameters

    def _pack(self, arrays: Mapping[str, Array], weights_dtype: str) -> Fields:
        table = arrays["token_embedding.weight"]
        return {
            "embedding": np.array(table, lane_of(weights_dtype)),
            "head": ops.pack(arrays.get("head.weight", table), dtype=weights_dtype),
            **super()._pack(arrays, weights_dtype),
        }

    def _named(self, plain: Taken) -> dict[str, Array]:
        arrays = super()._named(plain)
        if (table := plain(self.embedding)) is not None:
            arrays["token_embedding.weight"] = table
        if not self.tie_word_embeddings and (head := plain(self.head)) is not None:
            arrays["head.weight"] = head
        return arrays

    @named("{cls}")
    def __call__(self, ids: ArrayLike, *, cache: Sequence[KVCache] | None = None) -> Array:
        """Logits (..., length, vocab_size) of what follows each of `ids`, (length,) or (batch, length).

        With a cache of `new_cache`, `ids` follow those of earlier calls.
        """
        tokens = self._tokens("ids", ids, cache)
        return self._logits(self.encoder(self._embedded(tokens, cache), is_causal=True, cache=cache))

    def new_cache(self, capacity: int = 0) -> Any:
        """Empty caches, one for each layer with keys of its own: see `KVCache`."""
        return self.encoder.new_cache(capacity)

    def _logits(self, hidden: Array) -> Array:
        return ops.linear(hidden, self.head)

    def _tokens(self, name: str, ids: Any, cache: Sequence[KVCache] | None = None) -> Ints:
        """`ids`, checked, of sequences that are short enough."""
        given = as_array(name, ids)
        tokens = integers(
            name, given if given.size else given.astype(np.int64), low=0, high=self.vocab_size - 1
        )
        if tokens.ndim not in (1, 2):
            raise wrong_shape(name, tokens, "(length,) or (batch, length)")
        before = _length(cache)
        if before + tokens.shape[-1] > self.max_length:
            came = f"{tokens.shape[-1]} tokens" + (f" behind {before} in the cache" if before else "")
            raise ValueError(f"(): {name} has {came}; expected at most {self.max_length} in all")
        return tokens

    def _embedded(self, tokens: Ints, cache: Sequence[KVCache] | None = None) -> Array:
        x = ops.embedding(tokens, self.embedding)
        if self.position_table is not None:
            before = _length(cache)
            x += self.position_table[before : before + tokens.shape[-1]]
        return x

    @named("{cls}.loss")
    def loss(
        self, ids: ArrayLike, targets: ArrayLike, *, ignore_index: int = -100, label_smoothing: float = 0.0
    ) -> float:
        """The mean of ``-log(probability of target)``: see `loss_and_gradients`."""
        tokens = self._tokens("ids", ids)
        targets_of(targets, tokens.shape, self.vocab_size, ignore_index, label_smoothing, "ids")
        hidden = self.encoder(self._embedded(tokens), is_causal=True)
        how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        found: Any = grad.cross_entropy(hidden, self.head, targets, need=(), **how)
        return float(found[0])

    @named("{cls}.loss_and_gradients")
    def loss_and_gradients(
        self,
        ids: ArrayLike,
        targets: ArrayLike,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> tuple[float, dict[str, Array]]:
        """The mean loss of all tokens, and the gradients of all parameters by their names.

        Parameters
        ----------
        ids : array_like of int, (batch, length) or (length,)
        targets : array_like of int, of the same shape
            The next token of each: ``text[1:]`` for ``text[:-1]``.
        ignore_index : int, default -100
            Tokens with this target do not count: padding, on the right.
        label_smoothing : float, default 0
            As in `fastattn.grad.cross_entropy`.
        checkpoint : bool, default False
            Keep only the input of each layer, and keys that layers share, and compute the rest again: less
            memory, a third more time.
        dropout, seed
            As in `fastattn.grad.vjp`; a seed of its own for each step.

        Returns
        -------
        loss : float
        grads : dict of str to ndarray
            As an optimizer of `fastattn.train` takes them.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit, or the weights are in a type without gradients.
        """
        tokens = self._tokens("ids", ids)
        targets_of(targets, tokens.shape, self.vocab_size, ignore_index, label_smoothing, "ids")
        if self.weights_dtype not in TRAINED:
            came = f"the weights are kept in {self.weights_dtype}, which has no gradients"
            raise ValueError(f"(): {came}; expected {', '.join(TRAINED)}")
        flag("checkpoint", checkpoint)
        dropout_of(dropout, seed)
        x = self._embedded(tokens)
        training: Any = {"checkpoint": checkpoint, "dropout": dropout, "seed": seed}
        hidden, pullback = grad.vjp(self.encoder, x, is_causal=True, **training)
        how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        found: Any = grad.cross_entropy(hidden, self.head, targets, need=("dx", "dweight"), **how)
        loss, dhidden, dhead = found
        dx, inner = pullback(dhidden)
        grads = {f"encoder.{name}": x for name, x in inner.items()}
        if self.tie_word_embeddings:
            grads["token_embedding.weight"] = grad.embedding(dx, tokens, self.vocab_size, add_to=dhead)
        else:
            grads["token_embedding.weight"] = grad.embedding(dx, tokens, self.vocab_size)
            grads["head.weight"] = dhead
        if self.position_table is not None:
            table = np.zeros_like(self.position_table)
            each = dx if dx.ndim == 3 else dx[None]
            np.sum(each, axis=0, dtype=table.dtype, out=table[: each.shape[1]])
            grads["position_embedding.weight"] = table
        return float(loss), {name: grads[name] for name in self.parameters() if name in grads}

    @named("{cls}.generate")
    def generate(
        self,
        ids: ArrayLike,
        max_new_tokens: int = 128,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Any]:
        """Continue sequences, a token at a time, and yield each token as soon as it is known.

        Parameters
        ----------
        ids : array_like of int, (length,) or (batch, length)
            At least one token.
        max_new_tokens : int, default 128
            At most so many that all fit into `max_length`.
        **sampling
            temperature, top_k, top_p, min_p, typical_p, repetition_penalty, presence_penalty,
            frequency_penalty, logit_bias, logits_processor, seed: as in `fastattn.models.Decoder.generate`.

        Yields
        ------
        int, or ndarray of int64, (batch,)
        """
        options = Sampling(sampling, "ids", "max_new_tokens")
        tokens = self._tokens("ids", ids)
        num_new = integer("max_new_tokens", max_new_tokens, 0)
        if tokens.shape[-1] == 0:
            raise ValueError("(): ids has no tokens; expected at least one")
        if tokens.shape[-1] + num_new > self.max_length:
            asked = f"max_new_tokens is {short(num_new)} behind {tokens.shape[-1]} tokens"
            raise ValueError(f"(): {asked}; expected at most {self.max_length} together")
        batch = tokens[None] if tokens.ndim == 1 else tokens
        sampler = Sampler(list(batch), self.vocab_size, options, tokens.ndim == 1)
        steps = self._steps(batch, num_new, sampler)
        return (int(each[0]) for each in steps) if tokens.ndim == 1 else steps

    def _steps(self, tokens: Ints, count: int, sampler: Sampler) -> Iterator[Ints]:
        cache = self.new_cache(tokens.shape[1] + count)
        for _ in range(count):
            x = self.encoder(self._embedded(tokens, cache), is_causal=True, cache=cache)
            try:
                best = sampler(self._logits(x[:, -1]))
            except Exception as error:
                put_name(f"{type(self).__name__}.generate", error, "generate")
                raise
            yield best
            tokens = best[:, None]


def _length(cache: Any) -> int:
    """Number of tokens in a cache of all layers; the encoder checks what it is."""
    first = cache[0] if isinstance(cache, (list, tuple)) and cache else None
    return first.length if isinstance(first, KVCache) else 0
