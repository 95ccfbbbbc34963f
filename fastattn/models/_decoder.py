"""Language models: decoders that generate text."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastattn._args.errors import named, wrong_type
from fastattn._args.values import as_array, integer, integers, several, short
from fastattn._engine.steps import Sequences
from fastattn.models import _gguf, _gguf_config, _model, _session
from fastattn.models._answers import Parts
from fastattn.models._chat import conversation
from fastattn.models._files import usual_sampling
from fastattn.models._generation import (
    Score,
    Step,
    Writer,
    checked,
    is_conversation,
    parted,
    pieces,
    prompts_of,
    score_of,
    values_of,
)
from fastattn.models._grammar import Matcher, matchers
from fastattn.models._model import one_sequence
from fastattn.models._sampling import Sampler, Sampling
from fastattn.models._session import Session
from fastattn.models._speculation import proposals_of
from fastattn.models._steps import Stepping, one_at_a_time
from fastattn.models._text import NO_TOKEN, Said, strings
from fastattn.positions import RopeFrequencies

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, DTypeLike
    from typing_extensions import Unpack

    from fastattn._args.options import SamplingOptions
    from fastattn._args.types import Array, Ints
    from fastattn.models._generation import Messages

# Continuations that `score` computes together: each has a copy of the prompt's keys.
_SCORED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Decoder(Stepping):
    """A language model; call it for the logits of all tokens, or `generate` with it."""

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
        """Continue sequences, a token at a time, and yield each token as soon as it is known.

        Parameters
        ----------
        ids : array_like of int, (length,) or (batch, length), or a list of lists of different lengths
            The prompts: at least one token in each. Or a text; or messages, ``[{"role": "user", "content":
            "a question"}]``, which the model's chat template writes; or a list of these: then `Piece` by
            `Piece` of the answers comes, and `index` says of which.
        max_new_tokens : int, default 128
            Where every sequence ends, if it has not before. In a model with a table of positions (GPT-2), the
            longest prompt and these must fit into it.
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            True or 1: which tokens of an array `ids` count. The others are left out, wherever they are.
        stop : int, str or sequence of these, optional
            Ids that end a sequence; by default the `eos_token_id` of the model's folder, and after messages
            also the tokens with which the chat template ends a turn; none with ``()``.
            Ids replace that default. After a text or messages also texts, which end the answer before they
            begin, in any tokens, and beside the default where there are no ids; `ids` of the last piece
            include theirs.
        cache : Session, optional
            Of one prompt: what `session` made. Its tokens with which the prompt begins are not computed
            again, and the new ones stay in it. The answer is that without it, but for rounding: the tokens of
            a prompt are computed with fewer others. A session whose keys were rotated for another length,
            by a scaling that depends on it, begins anew.
        cache_dtype : {"int8", "bfloat16", "float16"}, optional
            Keep keys and values in this type, as `KVCache` does, instead of the model's dtype: int8 is a
            quarter of the memory of float32 that a step reads, half of bfloat16's. The types of 16 bits are
            of models in float32. Prompts attend what is kept, too.
        template_values : mapping of str, optional
            What the chat template sees beside the messages: what models have their own names for, such as
            ``{"enable_thinking": False}``.
        tools : sequence of mappings, optional
            Functions that the answer may call, which the chat template writes: JSON schemas, as ``{"type":
            "function", "function": {"name": ..., "description": ..., "parameters": ...}}``. A call comes as a
            `Piece` with a `tool_call`.
        logprobs : int, optional
            Put the logarithms of probabilities into each `Piece`: of its tokens, and of so many best ones.
        grammar : mapping or str, optional
            A JSON schema, or a grammar in Lark's form, which each answer follows up to its end, an id of
            `stop`; by the package llguidance, whose documentation has both. Of the tokens that may follow the
            best is taken, or one is drawn. Where `max_new_tokens` ends it, an answer is not whole.
        speculate : {"lookup"} or Decoder, optional
            Propose tokens of one prompt's answer, and compute several in a step: "lookup", what followed the
            last tokens where they occurred before, for answers that repeat parts of their prompt; or what a
            smaller model with the same tokens writes. The answer stays the same, to the bit.
        temperature : float, default 0.0
            What logits are divided by before a token is drawn. At 0 the best token is taken, and options that
            choose what may be drawn are an error.
        top_k : int, optional
            Draw from the `top_k` best tokens only, and those that equal the last of them; 0 is all.
        top_p : float, optional
            Of these, draw only from the fewest best tokens whose probabilities reach `top_p`; 1 is all.
        min_p : float, optional
            Then only from those that have at least `min_p` times the best one's probability; 0 is all.
        typical_p : float, optional
            Then only from those whose surprise is nearest to its mean, the fewest that reach this share [1]_.
        repetition_penalty : float, default 1.0
            What the logits of tokens that are in the prompt or were generated are divided by where they are
            above 0, and multiplied by elsewhere [2]_.
        presence_penalty, frequency_penalty : float, default 0.0
            Taken from the logit of each such token, and of the latter as often as it was there.
        logit_bias : mapping of int to float, optional
            Added to the logits of these ids, before all else; -inf forbids one.
        logits_processor : callable, optional
            ``logits_processor(ids, logits)`` returns the logits (vocab_size,) of a sequence that has tokens
            `ids` (n,), its prompt included: after penalties and before the temperature, for each sequence by
            itself. It may write to `logits`.
        seed : int or numpy.random.SeedSequence, optional
            For the same tokens in every run. A prompt (length,) draws from it, number i of several from its
            i-th child, ``SeedSequence(seed).spawn(n)[i]``, whatever other sequences there are. But where a
            scaling of rotary positions depends on the length ("dynamic", "longrope"), the longest sequence of
            a step decides the frequencies of all.

        Yields
        ------
        int, ndarray of int64, (batch,), or Piece
            The next token of a single prompt (length,), or of each prompt. An id of `stop` is still yielded;
            after it, -1 stands for its sequence until the others have ended, too. ``text.stream`` turns the
            former into text, ``text.decode`` what has been collected of the latter. After a text or messages,
            the next piece of text; the last one says why the text ends.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit: at the call, not at the first token.

        Notes
        -----
        A step reads the weights and the keys so far once, for the sequences that have not ended. Keys and
        values take ``2 * num_layers * num_kv_heads * head_dim`` numbers a token, as many tokens a sequence as
        the longest has; layers that attend another's keys have none. At first there is room for 256 new
        tokens; the room doubles when it is full.

        References
        ----------
        .. [1] C. Meister et al., "Locally Typical Sampling", 2022, arXiv:2202.00666.
        .. [2] N. S. Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
           Generation", 2019, arXiv:1909.05858.
        """
        named = "ids", "max_new_tokens", "attention_mask", "stop", "cache", "cache_dtype", "template_values"
        options = Sampling(sampling, *named, "tools", "logprobs", "grammar", "speculate")
        texts: list[str] = []
        parts: list[Parts | None] = []
        turns: list[int] = []
        written = prompts_of(ids)
        if written is None:
            for name, x in {"template_values": template_values, "tools": tools, "logprobs": logprobs}.items():
                if x is not None:
                    came = f"{name} {'is' if name == 'logprobs' else 'are'} given with ids"
                    raise ValueError(f"(): {came}; expected a text or messages, or None")
            single, prompts = self._prompts(ids, attention_mask)
        else:
            if attention_mask is not None:
                raise ValueError("(): attention_mask is given with a text; expected None")
            single, prompts, parts, turns = self._encoded(*written, values_of(template_values, tools))
            stop, texts = parted(stop)
        if cache is not None:
            _session.require_fit(cache, self, len(prompts), cache_dtype)
        cache_dtype = self._kept_as(cache_dtype)
        proposals = proposals_of(speculate, self, prompts)
        n_new = integer("max_new_tokens", max_new_tokens, 0)
        longest = max(map(len, prompts), default=0)
        if self.max_length is not None and longest + n_new > self.max_length:
            asked = f"max_new_tokens is {short(n_new)} after a prompt of {longest} tokens"
            raise ValueError(f"(): {asked}; expected at most {self.max_length} together")
        ends = np.atleast_1d((*self.stop, *turns) if stop is None else as_array("stop", stop))
        ends = ends if ends.size else np.zeros(0, np.int64)
        known = {} if stop is None else {"low": 0, "high": self.vocab_size - 1}
        ends = integers("stop", ends, (ends.size,), "(n,)", **known)
        follow: list[Matcher] = []
        if grammar is not None:
            follow = matchers(grammar, self.text, self.vocab_size, ends.tolist(), len(prompts))
        sampler = Sampler(prompts, self.vocab_size, options, single, follow)
        ended = np.zeros(len(prompts), np.bool_)
        steps = self._steps(prompts, n_new, sampler, ends, ended, cache_dtype, cache, proposals)
        steps = one_at_a_time(steps, cache)
        if written is None:
            return _tokens(steps, len(prompts), single)
        ending = set(ends.tolist())
        writers = [
            Writer(Said(self.text, prompt.tolist()), ending, texts, i, logprobs is not None, own)
            for i, (prompt, own) in enumerate(zip(prompts, parts, strict=True))
        ]
        best = None if logprobs is None else integer("logprobs", logprobs, 0, self.vocab_size)
        return pieces(steps, writers, ended, best)

    def _encoded(
        self, single: bool, written: list[str | Messages], values: dict[str, Any] | None
    ) -> tuple[bool, list[Ints], list[Parts | None], list[int]]:
        """Whether there is one prompt, the ids of each text and conversation, and the parts of its answer.

        Also the ids with which the chat template ends a turn.
        """
        if values is not None and all(isinstance(each, str) for each in written):
            came = "tools" if set(values) == {"tools"} else "template_values"
            raise ValueError(f"(): {came} are given with a text; expected messages, or None")
        found: list[list[int]] = []
        parts: list[Parts | None] = []
        turns: list[int] = []
        for each in written:
            if isinstance(each, str):
                found.append(self.text.encode([each])[0])
                parts.append(None)
            else:
                ids, own, turns = self._conversation(each, values or {})
                found.append(ids)
                parts.append(own)
        _, prompts = self._prompts(found, None)
        return single, prompts, parts, turns

    def _conversation(self, messages: Messages, values: dict[str, Any]) -> tuple[list[int], Parts, list[int]]:
        """The ids of a conversation, the parts of its answer, and the ids with which a turn ends."""
        said, template, ends = conversation(self.text.folder, checked(messages), values)
        if values.get("tools") and "tools" not in template:
            came = f"tools are given, and the chat template of {self.text.folder} writes none"
            raise ValueError(f"(): {came}; expected None, and what the model is to know of them in a message")
        (encoding,) = self.text.encodings([said], special=False)
        turns = [i for text in ends if (i := self.text.tokenizer.token_to_id(text)) is not None]
        return encoding.ids, Parts(template, said, bool(values.get("tools"))), turns

    @named("score")
    def score(
        self, prompt: str | ArrayLike, continuations: Sequence[str] | Sequence[ArrayLike]
    ) -> list[Score]:
        """Log-probabilities of what may follow a prompt, as evaluations and multiple choice need them.

        Parameters
        ----------
        prompt : str, or array_like of int, (length,)
            At least one token.
        continuations : sequence of str, or of array_like of int, (length,)
            At least one token in each. A text is split into tokens together with the prompt; its own are
            those after as many as the prompt has alone. Spaces at the prompt's end count to the texts, as in
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
        Tokens with which all begin are computed once, but where a scaling of rotary positions depends on the
        length. What a continuation gets depends on the others in rounding alone.
        """
        wholes, begin = self._continued(prompt, continuations)
        longest = max(map(len, wholes), default=0)
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(f"(): {longest} tokens in a sequence; expected at most {self.max_length}")
        scaled = not all(isinstance(each, RopeFrequencies) for each in self.frequencies)
        cache, common, size = self._cache(), 0, 1 if scaled else _SCORED_AT_ONCE

        def logits(rows: Array) -> Array:
            return self._capped(self.logits.run(rows, Sequences(1)))

        if wholes and not scaled:
            rows = np.stack([whole[: begin - 1] for whole in wholes])
            common = int((rows == rows[0]).all(axis=0).cumprod().sum())
            if common:
                self._hidden(wholes[0][:common], np.array([common]), common, cache)
        found: list[Score] = []
        for first in range(0, len(wholes), size):
            group = wholes[first : first + size]
            own = copy.copy(cache)
            if common and self.num_layers:
                own.select(np.zeros(len(group), np.int64))
            lengths = np.array([len(whole) - 1 - common for whole in group])
            new = np.concatenate([whole[common:-1] for whole in group])
            hidden = self._hidden(new, lengths, int(lengths.max()) + common, own)
            for whole, end in zip(group, np.cumsum(lengths).tolist(), strict=True):
                ids = whole[begin:]
                rows = hidden[end - len(ids) : end]
                found.append(score_of(ids, rows, logits))
        return found

    def _continued(self, prompt: Any, continuations: Any) -> tuple[list[Ints], int]:
        """The ids of the prompt with each continuation, and how many of them are the prompt's."""
        if is_conversation(prompt):
            expected = "a text or ids, as conversation_ids(messages) makes them"
            raise TypeError(f"(): prompt is a list of messages; expected {expected}")
        if isinstance(prompt, str):
            texts = list(strings("continuations", continuations))
            said = prompt.rstrip() or prompt  # a space before a word is part of the word's token
            texts = [prompt[len(said) :] + text for text in texts]
            encodings = list(self.text.encodings([said, *(said + text for text in texts)]))
            if any(each.overflowing for each in encodings):
                came = f"a text has more than {self.text.limit} tokens with its prompt"
                raise ValueError(f"(): {came}; expected at most so many")
            start, *found = (np.array(each.ids, np.int64) for each in encodings)
        else:
            start = one_sequence("prompt", prompt, self.vocab_size)
            given = several("continuations", continuations, "several, as [ids]")
            found = [
                np.append(start, one_sequence(f"continuations[{i}]", ids, self.vocab_size))
                for i, ids in enumerate(given)
            ]
        if not start.size:
            raise ValueError("(): prompt has no token; expected at least one")
        for i, whole in enumerate(found):
            if len(whole) <= start.size:
                came = f"continuations[{i}] adds no token to the prompt, with whose end it becomes one"
                raise ValueError(f"(): {came}; expected at least one, or ids")
        return found, start.size

    @named("usual_sampling")
    def usual_sampling(self) -> dict[str, Any]:
        """Options of `generate` that the model's files recommend: `temperature`, `top_k`, `top_p` and others.

        Those of generation_config.json, of a draw if it says `do_sample`; or of a GGUF file's
        ``general.sampling``. Empty where they recommend none: the best token.
        """
        folder = self.text.folder
        return _gguf_config.usual_sampling(folder) if _gguf.is_file(folder) else usual_sampling(folder)

    @named("conversation_ids")
    def conversation_ids(
        self,
        messages: Messages,
        template_values: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a conversation as the model's chat template writes it, up to where its answer begins.

        Parameters
        ----------
        messages : list of mappings
            Each with a `role` and what the template reads, mostly `content`.
        template_values, tools : optional
            As of `generate`, which takes these ids, and those of several conversations as a list of lists.

        Returns
        -------
        list of int
        """
        if not is_conversation(messages):
            expected = "a list of one or more messages, as [{'role': 'user', 'content': 'a question'}]"
            raise wrong_type("messages", messages, expected)
        return self._conversation(messages, values_of(template_values, tools) or {})[0]

    def _prompts(self, ids: Any, attention_mask: Any) -> tuple[bool, list[Ints]]:
        """Return whether `ids` is one sequence, and the sequences without tokens that do not count."""
        rows = ids if isinstance(ids, (list, tuple)) and attention_mask is None else ()
        if rows and all(_is_row(row) for row in rows):
            prompts = [_model.token_ids(row, self.vocab_size)[0] for row in rows]
            single = False
        else:
            tokens = _model.token_ids(ids, self.vocab_size)
            mask = _model.attended(attention_mask, tokens)
            prompts = list(tokens) if mask is None else [row[m] for row, m in zip(tokens, mask, strict=True)]
            single = np.ndim(ids) == 1
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("generate(): ids has a prompt without a token; expected at least one in each")
        return single, prompts


def _tokens(steps: Iterator[Step], batch: int, single: bool) -> Iterator[Any]:
    """The tokens of each step: an int of a single prompt, or (batch,), -1 for sequences that have ended."""
    for running, tokens, _ in steps:
        if single:
            yield int(tokens[0])
        else:
            yielded = np.full(batch, NO_TOKEN)
            yielded[running] = tokens
            yield yielded


def _is_row(x: Any) -> bool:
    """Tell whether `x` is one sequence; `np.ndim` raises for lists of different lengths."""
    try:
        return np.ndim(x) == 1
    except ValueError:
        return False
