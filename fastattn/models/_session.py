"""A sequence that a language model keeps between calls: its tokens, their keys and values, and states."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from threading import RLock
from typing import Any

import numpy as np

from fastattn import _safetensors
from fastattn._args.cache import require_blocks
from fastattn._args.dtypes import dtype_choice
from fastattn._args.errors import named, wrong_type
from fastattn._args.packed import PackedLinear
from fastattn._args.types import INT4, Ints, dtype_name, shape_of
from fastattn._args.values import integer, integers, one_of
from fastattn.layers._mixers import Kind
from fastattn.models._embeddings import Frequencies, of_length
from fastattn.models._model import Model
from fastattn.models._model_cache import EVERY, KeyHeads, ModelCache

_FORMAT = 3
_KEY = "fastattn.session"  # of the values in a file's header
_NOT_OF_KEYS = ("text", "origin", "stop")  # fields of a model on which keys do not depend
_LONG = 2**24  # tokens


class Session:
    """Tokens of one sequence with their keys and values, for ``generate(cache=)``.

    `Decoder.session` creates it, and `Decoder.load_session` loads it from a file. A call of `generate` keeps
    the tokens that the session shares with the start of the prompt, drops the others, and computes the rest
    of the prompt. The answer is kept, too, so the next turn of a conversation computes only its new tokens.
    One call uses a session at a time, in any thread: when another call starts, the earlier one raises an
    error at its next token. A call that is interrupted, or not read to its end, leaves all complete tokens.

    States of recurrent layers and convolutions cannot be cut back to an arbitrary token. They are copied at
    the end of each prompt and after every 256 tokens. If a prompt differs, computation resumes from the last
    copy before the difference. Copies are dropped as the text grows, but never so that more tokens are
    recomputed than are dropped, or 256.

    Keys of layers with a window are dropped some thousand tokens after they leave it. If a prompt differs
    before the keys that are left, it is computed from the start.
    """

    def __init__(
        self, model: Model, frequencies: Sequence[Frequencies], cache: ModelCache, ids: Sequence[int] = ()
    ):
        self._model, self._frequencies, self._cache, self._ids = model, frequencies, cache, list(ids)
        self._turn: object = None  # of the call of `generate` that may add tokens
        self._prompt = 0  # tokens of its prompt
        self._rotated: str | None = None  # a hash of the frequencies by which keys are rotated
        self.lock = RLock()  # of who reads or changes the cache

    def __repr__(self) -> str:
        return f"<Session of {self._model.model_type}: {len(self._ids)} tokens, {self.nbytes} bytes>"

    @property
    def ids(self) -> list[int]:
        """Tokens whose keys and values are stored."""
        return self._ids.copy()

    @property
    def nbytes(self) -> int:
        """Bytes of memory of keys, values, states and copies of states."""
        return self._cache.nbytes

    @named("Session.copy")
    def copy(self, length: int | None = None) -> Session:
        """Copy the session, or its first `length` tokens; the copy shares no memory with it."""
        with self.lock:
            most = None if length is None else integer("length", length, 0, len(self._ids))
            cache, ids = self._settled(most)
            cache.own()
            session = Session(self._model, self._frequencies, cache, ids)
            session._rotated = self._rotated
        return session

    def __copy__(self) -> Session:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Session:
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError("a Session belongs to its model; save() writes it, and load_session() reads it")

    @named("Session.save")
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a safetensors file for `Decoder.load_session`.

        The file also contains a hash of the model's weights, which takes about as long as reading them.

        Raises
        ------
        ValueError
            If the session is empty.
        ImportError
            Without the safetensors package.
        """
        with self.lock:
            cache, ids = self._settled()
            if not ids:
                raise ValueError("(): the session is empty; expected one that a prompt has been given")
            arrays = {"ids": np.array(ids, np.int64), **cache._arrays()}
            values = {"format": _FORMAT, "model": digest(self._model), "rotated": self._rotated}
            values["digest"] = _digest([self._rotated, sorted(arrays.items())])
            _safetensors.write(path, arrays, values, _KEY)

    def _begin(self, prompt: Ints, longest: int) -> tuple[int, object]:
        """Keep what `prompt` begins with; return the number of these tokens, and a turn for `add`.

        Scalings of rotary positions may depend on `longest`, the number of tokens.
        """
        self._prompt = len(prompt)
        rotated = _digest([of_length(x, longest) for x in self._frequencies])
        count = min(len(self._ids), len(prompt) - 1)  # logits are needed of the last token
        differs = np.flatnonzero(np.array(self._ids[:count], np.int64) != prompt[:count])
        count = self._cache.reachable(int(differs[0]) if differs.size else count)
        if self._rotated not in (None, rotated):
            count = 0
        self._rotated, self._turn = rotated, object()
        self._ids = self._ids[:count]
        if self._cache.batch is not None:
            self._cache.truncate(count)
        return count, self._turn

    def _parts(self, new: Ints) -> list[Ints]:
        """The tokens `new` of a prompt, which follow those that are here, up to each copy of states."""
        if not self._cache.kinds:
            return [new]
        begin = len(self._ids)
        return np.split(new, range(EVERY - begin % EVERY, len(new), EVERY))

    def _require(self, turn: object) -> None:
        """Raise if another call has begun since `turn`."""
        if turn is not self._turn:
            came = "cache has been given to another call meanwhile"
            raise RuntimeError(f"generate(): {came}; expected one answer at a time")

    def _add(self, tokens: Ints, turn: object) -> None:
        """Count tokens whose keys and values, and states, are in the cache."""
        self._require(turn)
        self._ids += tokens.tolist()
        length = len(self._ids)
        if self._cache.kinds and (length == self._prompt or not length % EVERY):
            self._cache.take_snapshot()

    def _settled(self, length: int | None = None) -> tuple[ModelCache, list[int]]:
        """The cache without keys of other tokens: a call may still come to them, or was interrupted.

        It shares the memory. With it, the tokens, up to `length`: none after the last states that are here.
        """
        length = self._cache.reachable(len(self._ids) if length is None else length)
        cache = copy.copy(self._cache)
        if cache.batch is not None:
            cache.truncate(length)
        return cache, self._ids[:length]


def kept_as(given: Any, dtype: np.dtype[Any], key_heads: Sequence[KeyHeads]) -> str | None:
    """The argument `cache_dtype` of a model of `dtype`, checked."""
    if given is None:
        return None
    why = "" if dtype == np.float32 else f" of a model in {dtype}"
    chosen = dtype_choice("cache_dtype", given, cache_dtypes(dtype), why)
    for heads in key_heads if chosen == "int4" else ():
        require_blocks("the model has a head_dim of", heads.head_dim, INT4)
    return chosen


def cache_dtypes(dtype: np.dtype[Any]) -> tuple[str, ...]:
    """Types in which a model of `dtype` may keep its keys and values, beside its own."""
    return ("int8", "int4", "bfloat16", "float16") if dtype == np.float32 else ("int8", "int4")


def require_fit(session: Any, model: Model, prompts: int, cache_dtype: Any) -> None:
    """Raise unless a call of `model.generate` may use `session`."""
    if not isinstance(session, Session):
        raise wrong_type("cache", session, "what session() makes")
    if cache_dtype is not None:
        raise ValueError("(): cache_dtype is given with a cache; expected it in session()")
    if session._model is not model:
        came = f"cache is a session of another {session._model.model_type}"
        raise ValueError(f"(): {came}; expected one that this model's session() made")
    if prompts != 1:
        raise ValueError(f"(): cache is given with {prompts} prompts; expected one")


def load(
    path: str | os.PathLike[str],
    model: Model,
    frequencies: Sequence[Frequencies],
    key_heads: Sequence[KeyHeads],
    states: Sequence[Sequence[Kind]],
) -> Session:
    """Read what `Session.save` wrote, of the same model, whose layers have these `key_heads` together."""
    arrays, values = _safetensors.read(path, _KEY, "session", _FORMAT)
    where = os.fsdecode(path)
    if values.get("model") != digest(model):
        raise ValueError(
            f"(): {where} is a session of another model, or of other weights; expected {model!r}"
        )
    if values.get("digest") != _digest([values.get("rotated"), sorted(arrays.items())]):
        raise ValueError(f"(): {where} is damaged; expected the ids and keys that were written")
    ids = arrays.pop("ids", np.zeros(0))
    cache = ModelCache.of(key_heads, states, arrays, where)
    if ids.dtype != np.int64 or cache.lengths.tolist() != [ids.size]:
        came = f"ids {ids.shape} in {ids.dtype} and keys of {cache.lengths.tolist()} tokens"
        raise ValueError(f"(): {where} has {came}; expected as many of one sequence, in int64")
    dtypes = [model.dtype.name, *cache_dtypes(model.dtype)]
    for heads, first, group in zip(key_heads, cache.firsts, cache.groups, strict=True):
        k, v = group._held[:2]
        kept = dtype_name(k.dtype)
        shape = 1, heads.heads_kv, ids.size - first, heads.head_dim
        if not shape_of(k) == shape_of(v) == shape or kept not in dtypes:
            came = f"keys and values {shape_of(k)} and {shape_of(v)} in {kept}"
            raise ValueError(f"(): {where} has {came}; expected {shape} in {one_of(dtypes)}")
    integers(f"{where}'s ids", ids, low=0, high=model.vocab_size - 1)
    session = Session(model, frequencies, cache, ids.tolist())
    session._rotated = values.get("rotated")
    return session


def digest(model: Model) -> str:
    """A hash of all that keys and values depend on: sizes, types and packed weights."""
    return _digest([getattr(model, each.name) for each in fields(model) if each.name not in _NOT_OF_KEYS])


def _digest(x: Any) -> str:
    """SHA-256 of arrays, packed weights, dataclasses and lists of them."""
    found = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, np.ndarray):
            found.update(f"{x.dtype}{x.shape}".encode())
            found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
        elif isinstance(x, PackedLinear):
            add([getattr(x, name) for name in sorted(PackedLinear.__slots__)])
        elif is_dataclass(x):
            add([getattr(x, field.name) for field in fields(x) if not field.name.startswith("_")])
        elif isinstance(x, (list, tuple)):
            for part in x:
                add(part)
        elif callable(x):  # frequencies that depend on the length
            add([of_length(x, length) for length in (1, _LONG)])
        else:
            found.update(f"{type(x).__name__} {x!r};".encode())

    add(x)
    return found.hexdigest()
