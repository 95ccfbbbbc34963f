"""Language models: logits of the next token, their gradients, and generation step by step over a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fastattn._args import key_ranges
from fastattn._args.errors import named, wrong_shape, wrong_type
from fastattn._args.options import SamplingOptions
from fastattn._args.types import Array, ArrayLike, DTypeLike, Ints, Unpack, lane_dtype
from fastattn._args.values import as_array, flag, integers
from fastattn._engine.program import Program
from fastattn._engine.slots import Slots
from fastattn._engine.steps import Sequences
from fastattn.grad import Pullback, cross_entropy
from fastattn.grad._loss import targets_of
from fastattn.layers._block import Window, visible
from fastattn.layers._mixers import Kind
from fastattn.models import _gguf, _model, _session
from fastattn.models._embeddings import Embeddings, Frequencies, of_length
from fastattn.models._files import is_gguf, usual_sampling
from fastattn.models._generation import answers
from fastattn.models._model import Recorded, pulled
from fastattn.models._model_cache import KeyHeads, ModelCache
from fastattn.models._prompts import Messages, encoded, is_conversation, values_of
from fastattn.models._sampling import Sampling
from fastattn.models._scores import Score, scores
from fastattn.models._session import Session, kept_as
from fastattn.positions import rope_tables


class QueryGrowth(NamedTuple):
    """Growth of queries with their positions p: they are times ``1 + beta log(1 + floor(p / length))``."""

    beta: float
    length: int

    def __call__(self, positions: Ints) -> Array:
        """The factors of queries."""
        found: Array = 1 + self.beta * np.log1p(positions // self.length)
        return found


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Decoder(_model.Model):
    """Language model: call it for the logits of all tokens; `generate` continues texts."""

    num_kv_heads: int
    head_dim: int
    key_heads: tuple[KeyHeads, ...]  # of all layers together that have keys
    states: tuple[tuple[Kind, ...], ...]  # of a sequence, in each of the layers that carry some
    frequencies: tuple[Frequencies, ...]  # of which each attention may have one
    windows: tuple[Window, ...]  # of which each attention has one: see `program_of_blocks`
    logits: Program
    stop: tuple[int, ...]  # ids that end a text
    logits_cap: float | None = None  # logits x become ``cap * tanh(x / cap)``
    query_growth: QueryGrowth | None = None  # queries then have a rotation after the `frequencies`' own
    layer_embeddings: Embeddings | None = None  # `Sequences.inputs` of tokens

    @property
    def has_gradients(self) -> bool:
        """Whether `vjp`, and what trains a model, take it."""
        return self.program.has_gradients and self.logits_cap is None and self.layer_embeddings is None

    @named("{self.model_type}")
    def __call__(self, ids: ArrayLike, attention_mask: ArrayLike | None = None) -> Array:
        """Compute logits of the token after each token.

        Parameters
        ----------
        ids, attention_mask
            As in a call of `Encoder`.

        Returns
        -------
        ndarray, (batch, length, vocab_size)
            In the model's dtype, as from `Encoder`.
        """
        tokens, lengths, mask = self._tokens(ids, attention_mask, self.max_length)
        counted = (tokens if mask is None else tokens[mask]).reshape(-1)
        hidden = self._hidden(counted, lengths, int(lengths.max(initial=0)))
        logits = self._capped(self.logits.run(hidden, Sequences(1)))
        return _model.unpacked(logits, mask, (*tokens.shape, self.vocab_size))

    @named("generate")
    def generate(
        self,
        ids: ArrayLike | Sequence[Sequence[int]] | str | Messages,
        max_new_tokens: int = 128,
        *,
        attention_mask: ArrayLike | None = None,
        stop: int | str | Sequence[int | str] | None = None,
        cache: Session | None = None,
        cache_dtype: DTypeLike | None = None,
        template_values: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        logprobs: int | None = None,
        grammar: Mapping[str, Any] | str | None = None,
        speculate: Literal["lookup"] | Decoder | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Any]:
        """Continue sequences token by token, and yield each token as soon as it is known.

        Parameters
        ----------
        ids : array_like of int, (length,) or (batch, length), or a list of lists of different lengths
            Prompts of at least one token. Or a text; or messages, ``[{"role": "user", "content": "a
            question"}]``, formatted by the model's chat template; or a list of texts and conversations. For
            texts and messages, the answer is yielded as `Piece` objects; `index` is the prompt's number.
        max_new_tokens : int, default 128
            Maximum number of new tokens. In a model with a table of positions (GPT-2), the longest prompt and
            these must fit into the table.
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            True or 1 for tokens of an array `ids` that count. Other tokens are ignored, wherever they are.
        stop : int, str or sequence of these, optional
            Ids that end a sequence; by default the `eos_token_id` of the model's folder, and for messages
            also the tokens with which the chat template ends a turn; none with ``()``. Ids replace the
            default. For a text or messages, strings are allowed, too: the answer ends before the first of
            them, however it is tokenized. Without ids, strings add to the default. The `ids` of the last
            piece include the tokens of a stop string.
        cache : Session, optional
            Result of `session`, for one prompt. Tokens that it shares with the start of the prompt are not
            computed again, and new tokens are added to it. The answer is the same but for rounding, since
            fewer tokens are computed together. If a scaling of rotary positions depends on the length, a
            session whose keys were rotated for another length is computed from the start.
        cache_dtype : {"int8", "int4", "bfloat16", "float16"}, optional
            Store keys and values in this type, as `KVCache` does, instead of the model's dtype. int8 takes a
            quarter of the memory of float32, half of bfloat16. int4 takes half of int8, requires head
            dimensions that are multiples of 32, and costs quality: docs/attention.md. The 16-bit types
            require a model in float32.
            Prompts attend the stored values, too.
        template_values : mapping of str, optional
            Variables of the chat template beside the messages, such as ``{"enable_thinking": False}``; their
            names depend on the model.
        tools : sequence of mappings, optional
            Functions that the answer may call, as JSON schemas for the chat template: ``{"type": "function",
            "function": {"name": ..., "description": ..., "parameters": ...}}``. A call is yielded as a
            `Piece` with a `tool_call`.
        logprobs : int, optional
            Add log-probabilities to each `Piece`: of its tokens, and of this many best tokens.
        grammar : mapping or str, optional
            JSON schema, or grammar in Lark's format, that each answer follows until an id of `stop` ends it;
            see the documentation of the package llguidance, which implements both. The next token is the best
            of the allowed ones, or sampled from them. An answer cut by `max_new_tokens` is incomplete.
        speculate : {"lookup"} or Decoder, optional
            Speculative decoding for one prompt: tokens are proposed, and several are computed in one step.
            "lookup" proposes what followed the last tokens at their previous occurrence, for answers that
            repeat parts of the prompt; a smaller model with the same vocabulary proposes its own
            continuation. The answer is unchanged, to the bit.
        temperature : float, default 0.0
            Divisor of the logits before sampling. 0 takes the best token; options that restrict sampling are
            an error then.
        top_k : int, optional
            Sample from the `top_k` best tokens only, and ties with the last of them; 0: all.
        top_p : float, optional
            Of these, sample from the smallest set of best tokens whose probability reaches `top_p`; 1: all.
        min_p : float, optional
            Then only from tokens with at least `min_p` times the probability of the best one; 0: all.
        repetition_penalty : float, default 1.0
            Factor for tokens in the prompt or the answer so far: it divides their positive logits, and
            multiplies their negative ones [1]_.
        presence_penalty, frequency_penalty : float, default 0.0
            Subtracted from the logit of each such token: once, and once for each occurrence.
        logit_bias : mapping of int to float, optional
            Added to the logits of these ids before anything else; -inf forbids a token.
        logits_processor : callable, optional
            ``logits_processor(ids, logits)`` returns new logits (vocab_size,) for a sequence with tokens
            `ids` (n,), including its prompt. It is called for each sequence, after penalties and before the
            temperature, and may write to `logits`.
        seed : int or numpy.random.SeedSequence, optional
            Seed for reproducible answers. A prompt (length,) uses the seed itself; prompt i of several uses
            its i-th child, ``SeedSequence(seed).spawn(n)[i]``, so that its answer does not depend on the
            others. But where a scaling of rotary positions depends on the length ("dynamic", "longrope"), the
            longest sequence of a step determines the frequencies of all.

        Yields
        ------
        int, ndarray of int64, (batch,), or Piece
            The next token of a single prompt (length,), or of each prompt. An id of `stop` is still yielded;
            later tokens of its sequence are -1 until all sequences have ended. ``text.stream`` decodes
            the tokens of a single prompt, ``text.decode`` collected ones. For a text or messages, the next
            piece of text; the `finish_reason` of the last one is set.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit: at the call, not at the first token.

        Notes
        -----
        Each step reads the weights and the keys so far once, for the sequences that have not ended. Keys and
        values take ``2 * num_layers * num_kv_heads * head_dim`` numbers per token, and each sequence takes
        the memory of the longest; layers that attend another layer's keys store none. Memory is allocated for
        256 new tokens at first, and doubles when it is full.

        References
        ----------
        .. [1] N. S. Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
           Generation", 2019, arXiv:1909.05858.
        """
        named = "ids", "max_new_tokens", "attention_mask", "stop", "cache", "cache_dtype", "template_values"
        options = Sampling(sampling, *named, "tools", "logprobs", "grammar", "speculate")
        of_texts = {"template_values": template_values, "tools": tools, "logprobs": logprobs}
        how: Any = {"stop": stop, "cache": cache, "cache_dtype": cache_dtype, "grammar": grammar, **of_texts}
        how |= {"attention_mask": attention_mask, "speculate": speculate}
        return answers(self, ids, max_new_tokens, options, **how)

    @named("score")
    def score(
        self, prompt: str | ArrayLike, continuations: Sequence[str] | Sequence[ArrayLike]
    ) -> list[Score]:
        """Compute log-probabilities of continuations of a prompt, for evaluations and multiple choice.

        Parameters
        ----------
        prompt : str, or array_like of int, (length,)
            At least one token.
        continuations : sequence of str, or of array_like of int, (length,)
            At least one token in each. A text is tokenized together with the prompt; the tokens after the
            prompt's count as its own. Trailing spaces of the prompt belong to the continuations, as in
            lm-evaluation-harness.

        Returns
        -------
        list of Score
            One for each continuation.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.

        Notes
        -----
        Common first tokens are computed once, unless a scaling of rotary positions depends on the length. The
        score of a continuation depends on the others only by rounding.
        """
        return scores(self, prompt, continuations)

    @named("usual_sampling")
    def usual_sampling(self) -> dict[str, Any]:
        """Return options of `generate` that the model's files recommend: `temperature`, `top_k` and others.

        They come from generation_config.json, options of sampling only if `do_sample` is true; or from
        ``general.sampling`` in a GGUF file. Empty without a recommendation: greedy decoding.
        """
        folder = self.text.folder
        return _gguf.usual_sampling(folder) if is_gguf(folder) else usual_sampling(folder)

    @named("conversation_ids")
    def conversation_ids(
        self,
        messages: Messages,
        template_values: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Tokenize a conversation with the model's chat template, up to the start of the answer.

        Parameters
        ----------
        messages : list of mappings
            Each with a `role` and the fields that the template reads, mostly `content`.
        template_values, tools : optional
            As for `generate`, which takes these ids, or a list with the ids of several conversations.

        Returns
        -------
        list of int
        """
        if not is_conversation(messages):
            expected = "a list of one or more messages, as [{'role': 'user', 'content': 'a question'}]"
            raise wrong_type("messages", messages, expected)
        return encoded(self.text, messages, values_of(template_values, tools) or {})[0]

    @named("session")
    def session(self, cache_dtype: DTypeLike | None = None) -> Session:
        """Create an empty session for ``generate(cache=)``; `cache_dtype` is as for `generate`."""
        kept = kept_as(cache_dtype, self.dtype, self.key_heads)
        return Session(self, self.frequencies, self._cache(dtype=kept))

    @named("load_session")
    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Load a session that `Session.save` wrote.

        Raises
        ------
        FileNotFoundError, ValueError
            If the file is missing, or is not a session of this model with the same weights and types.
        """
        return _session.load(path, self, self.frequencies, self.key_heads, self.states)

    @named("loss_and_gradients")
    def loss_and_gradients(
        self,
        ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        *,
        targets: ArrayLike | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> tuple[float, dict[str, Array]]:
        """Compute the mean cross-entropy of the next tokens, and its gradients.

        Parameters
        ----------
        ids, attention_mask
            As in a call.
        targets : array_like of int, (batch, length), optional
            Next token of each token, or `ignore_index`; by default the next token that counts, and
            `ignore_index` for the last one.
        ignore_index, label_smoothing
            As for `fastattn.grad.cross_entropy`, which never stores all logits.
        checkpoint, dropout, seed
            As in `fastattn.grad.vjp`.

        Returns
        -------
        loss : float
        gradients : dict of str to ndarray
            Gradients of the tensors, by name.
        """
        tokens, lengths, mask = self._tokens(ids, attention_mask, self.max_length)
        ignored = int(integers("ignore_index", ignore_index, (), "one number"))
        flat = (tokens if mask is None else tokens[mask]).reshape(-1)
        if targets is None:
            expected = np.append(flat[1:], ignored)[: len(flat)]
            expected[np.cumsum(lengths)[lengths > 0] - 1] = ignored
        else:
            given = as_array("targets", targets)
            given = np.atleast_2d(integers("targets", given if given.size else given.astype(np.int64)))
            if given.shape != tokens.shape:
                raise wrong_shape("targets", given, f"ids', {tokens.shape}")
            expected = (given if mask is None else given[mask]).reshape(-1)
        targets_of(expected, flat.shape, self.vocab_size, ignore_index, label_smoothing)
        recorded = self._normed(flat, lengths, checkpoint, dropout, seed)
        output: Any = self.logits.steps[-1]
        how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        found: Any = cross_entropy(recorded.out.array, output.weight, expected, bias=output.bias, **how)
        loss, dhidden, *others = found
        for parameter, gradient in zip((output.weight, output.bias), others, strict=False):
            recorded.tape.gradients.add(parameter, gradient)
        return float(loss), recorded.gradients(dhidden)

    def _vjp(
        self,
        ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        *,
        logits: bool = True,
        checkpoint: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Array, Pullback]:
        """Logits, or the hidden states that the output layer maps to them; and their pullback."""
        tokens, lengths, mask = self._tokens(ids, attention_mask, self.max_length)
        counted = tokens if mask is None else tokens[mask]
        recorded = self._normed(counted.reshape(-1), lengths, checkpoint, dropout, seed)
        if flag("logits", logits):
            output: Any = self.logits.steps[-1]
            recorded.out = recorded.tape.linear(recorded.out, output.weight, output.bias, output.activations)
        return pulled(recorded, mask, (*tokens.shape, recorded.out.array.shape[1]))

    def _normed(
        self, tokens: Ints, lengths: Ints, checkpoint: bool, dropout: float, seed: int | None
    ) -> Recorded:
        """Hidden states after the last norm, on a tape, of sequences end to end."""
        call, positions = self._sequences(lengths, int(lengths.max(initial=0)))
        recorded = self._record(tokens, positions, None, call, checkpoint, dropout, seed)
        norm: Any = self.logits.steps[0]
        recorded.out = recorded.tape.norm(recorded.out, norm.kind, norm.weight, norm.bias, norm.eps)
        return recorded

    def _hidden(
        self,
        tokens: Ints,
        lengths: Ints,
        longest: int,
        cache: ModelCache | None = None,
        program: Program | None = None,
    ) -> Array:
        """Hidden states (n, hidden_size) of new tokens (n,), before the last norm.

        Those of sequences are end to end, `lengths` (batch,) of each. A cache, one of `_cache`, holds the
        heads and states of all layers, and they follow the tokens in it. `longest` is the length of the
        longest sequence then: some scalings of rotary positions depend on it. A
        `program` in place of the model's is that of `by_rows`.
        """
        call, positions = self._sequences(lengths, longest, cache)
        x = self.embeddings(tokens, positions, None, self.dtype)
        if self.layer_embeddings is not None:
            call = call._replace(inputs=self.layer_embeddings(tokens, positions, None, self.dtype))
        if not self.num_layers:
            return x
        hidden = (program or self.program).run(x, call)
        if cache is not None and self.states:
            cache.keep()
        return hidden

    def _cache(self, capacity: int = 0, dtype: DTypeLike | None = None) -> ModelCache:
        """An empty cache for `_hidden`."""
        return ModelCache(self.key_heads, capacity, dtype, self.states)

    def _sequences(
        self, lengths: Ints, longest: int, cache: ModelCache | None = None
    ) -> tuple[Sequences, Ints]:
        """`Sequences` of new tokens, and their positions (n,) in the table of positions, if there is one."""
        batch, length = len(lengths), int(lengths.max(initial=0))
        starts = 0 if cache is None else cache.offset
        begins = np.append(0, np.cumsum(lengths))
        ragged = begins[-1] != batch * length
        if ragged:
            positions = np.arange(begins[-1]) - np.repeat(begins[:-1] - starts, lengths)
        else:  # (length,), or (batch, length) where sequences begin at different positions
            positions = np.asarray(starts)[..., None] + np.arange(length)
        rotations = []
        for frequencies in self.frequencies:
            tables = rope_tables(positions, of_length(frequencies, longest), lane_dtype(self.dtype))
            rotations.append((tables[0][..., None, :, :], tables[1][..., None, :, :]))
        if self.query_growth is not None:
            growth = self.query_growth(positions)[..., None, :, None].astype(lane_dtype(self.dtype))
            cos, sin = rotations[0]
            rotations.append((cos * growth, sin * growth))
        slots: tuple[Slots, ...] = ()
        ends, len_k = None, length
        if cache is not None and self.num_layers:
            slots = cache.extend(batch, length, self.dtype, lengths if ragged else None)
            ends, len_k = slots[0].ends, cache.length
            if ends is not None:
                ends = ends + cache.firsts[0]
        if ragged:  # each sequence has its own keys alone
            ranges = visible(self.windows, positions, True, (), np.repeat(lengths + starts, lengths))
        else:
            # A token alone, the last of its sequence, sees all keys without being causal.
            shared = () if ends is None else (key_ranges.lengths(ends),)
            ranges = visible(self.windows, positions[..., None, :], length > 1, shared, len_k)
        if cache is not None:
            ranges = cache.ranges(ranges, self.windows)
        call = Sequences(batch, ranges, tuple(rotations), slots, begins if ragged else None)
        if cache is not None and self.states:
            call = call._replace(states=cache.carried(batch))
        if not ragged and self.embeddings.positions is not None:
            positions = np.broadcast_to(positions, (batch, length)).reshape(-1)
        return call, positions

    def _capped(self, logits: Array) -> Array:
        """The logits, which it may overwrite, kept within `logits_cap`."""
        if self.logits_cap is None:
            return logits
        cap = lane_dtype(logits.dtype).type(self.logits_cap)
        wide = logits.astype(cap.dtype, copy=False)
        np.divide(wide, cap, out=wide)
        np.tanh(wide, out=wide)
        np.multiply(wide, cap, out=wide)
        return wide.astype(logits.dtype, copy=False)
