"""A model's folder while it is read: config.json, the tensors, and the parameters that are made of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fastattn._args.ops import integer_activations
from fastattn._args.packed import PackedLinear
from fastattn._args.types import Array, Shape
from fastattn._formats import FORMATS
from fastattn.models._files import Config, ModelError, is_gguf, require
from fastattn.models._parameters import (
    OF_FILE,
    Computed,
    Maker,
    Origin,
    Packed,
    Parameters,
    Precision,
    Vector,
    Whole,
)
from fastattn.models._tensors import SHOWN, Part, Tensors

_Made = TypeVar("_Made")
_FLOATS = ("F32", "F16", "BF16")  # as safetensors calls them
_READ = (*_FLOATS, *FORMATS)  # and as GGUF calls its blocks
NOTHING = re.compile("(?!)")  # matches no name


class Rows(NamedTuple):
    """Rows of the tensor of a name, which has this shape, from `begin` on: so many, or all."""

    name: str
    shape: Shape
    begin: int = 0
    number: int | None = None

    def part(self, begin: int, number: int) -> Rows:
        """Rows among these."""
        return self._replace(begin=begin, number=number)

    def halves(self, gate_first: bool) -> tuple[list[Rows], list[Rows]]:
        """Rows that are the maps of a gated pair, up and gate."""
        n = self.shape[0] // 2
        first, second = [self.part(0, n)], [self.part(n, n)]
        return (second, first) if gate_first else (first, second)


class Source:
    """A folder, open until `stack` closes its files.

    Tensors have the names of the files at first; `rename` and `drop_prefix` give them others.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        precision: Precision,
        stack: ExitStack,
        outer: Path | None = None,
        tensors: Tensors | None = None,  # by default those of the folder's files
        route: str | None = None,
    ):
        self.folder, self.config, self.precision = folder, config, precision
        self.outer = outer or folder  # the folder of modules.json, in which `folder` may be
        self.route = route  # of its Router, if it has one
        self.tensors = tensors or Tensors.of_folder(folder, precision.weights, stack)
        self.tokenizer: Callable[[Path], Any] | None = None  # makes one where no tokenizer.json is
        self.parameters = Parameters()
        self._stored = {name: name for name in self.tensors.names}
        self._prefix = ""
        self._plans: list[dict[str, Shape]] = []  # shapes that `checked` hears of: also of copies

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, of which some tensors are not as in a folder."""
        return is_gguf(self.folder)

    def with_config(self, config: Config) -> Source:
        """Return this source with a part of config.json in place of the whole."""
        source = copy(self)
        source.config = config
        return source

    @property
    def is_planning(self) -> bool:
        """Whether `checked` hears of tensors, whose sizes may be wrong."""
        return bool(self._plans)

    @property
    def has_modules(self) -> bool:
        """Whether modules.json says what becomes of hidden states."""
        return (self.outer / "modules.json").exists()

    def origin(self) -> Origin:
        """Origin of the parameters, which the model keeps."""
        return Origin(self.folder, self.precision, self.parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> list[str]:
        """The names of the tensors, as they are called now."""
        return list(self._stored)

    def add(self, pairs: Mapping[str, tuple[Array, Array]]) -> None:
        """Add to tensors (n, m) the products of such matrices, (n, rank) and (rank, m), by their names."""
        lacking = [name for name in pairs if name not in self._stored]
        if lacking:
            raise ModelError(
                f"{self.tensors.where} has no {lacking[0]!r}; expected it, as an adapter changes it"
            )
        self.tensors = self.tensors.adapted({self._stored[name]: pair for name, pair in pairs.items()})

    def rename(self, new: Callable[[str], str]) -> None:
        """Give each tensor another name."""
        renamed: dict[str, str] = {}
        for name, stored in self._stored.items():
            other = renamed.setdefault(new(name), stored)
            if other != stored:
                both = f"{other!r} and {stored!r}"
                raise ModelError(f"{self.tensors.where}: {both} name one tensor; expected one of them")
        self._stored = renamed

    def drop_prefix(self, *prefixes: str) -> None:
        """Drop a prefix from all names that have it: the first of `prefixes` that any name has."""
        found = (prefix for prefix in prefixes if any(name.startswith(prefix) for name in self._stored))
        self._prefix = next(found, "")
        self.rename(lambda name: name.removeprefix(self._prefix))

    def tied(self, name: str, other: str, said: bool = True) -> str:
        """The name of the tensor that is to be `other`: `name`, if the model ties the two, as is `said`.

        As in transformers: where the file has one of them, it is both; where both differ, they are not tied.
        """
        found = [self._stored[x] for x in (name, other) if x in self._stored]
        if not said or (len(found) == 2 and not self.tensors.same(*found)):
            return other
        if found:
            self._stored[name] = found[0]
        return name

    def depth(self, key: str) -> int:
        """The number of layers that config.json has under `key`; each is several tensors.

        More layers than tensors are refused at once: making names for all of them could fill the memory.
        """
        config = self.config
        depth = config.size(key, low=0)
        if depth > len(self._stored):
            held = f"the {len(self._stored)} tensors of {Path(self.tensors.where).name} allow"
            raise config.wrong(key, depth, f"no more layers than {held}")
        return depth

    def checked(
        self,
        read: Callable[[], _Made],
        ignored: re.Pattern[str] = NOTHING,
        own: tuple[str, ...] | None = None,
        also: tuple[str, ...] = (),
        others: tuple[str, ...] = (),
    ) -> _Made:
        """What `read` makes of tensors, of which it tells names and shapes: all are checked before.

        It is called twice. At first parameters are made of nothing: they have their sizes alone. Names that
        begin with one of `own` are all known; by default these are the first parts of those that it reads and
        `also` these, but not `others`. See `_require` for `ignored`.
        """
        plan: dict[str, Shape] = {}
        self._plans.append(plan)
        try:
            read()
        finally:
            self._plans.pop()
        if own is None:
            firsts = dict.fromkeys(f"{name.partition('.')[0]}." for name in plan)
            own = (*also, *(first for first in firsts if first not in others))
        self._require(plan, own, ignored)
        return read()

    def _require(self, shapes: Mapping[str, Shape], own: tuple[str, ...], ignored: re.Pattern[str]) -> None:
        """Raise one error with all tensors that are missing, of another shape, or not floating.

        A name that begins with one of `own` but is not in `shapes` is an error, too, as the computation would
        leave it out; unless `ignored` matches, whose tensors were not learned.
        """
        wrong, tensors = [], self.tensors
        # Those outside of blocks first: of many, a message shows a few.
        in_block = re.compile(r"\.\d+\.").search
        for name, shape in sorted(shapes.items(), key=lambda each: in_block(each[0]) is not None):
            if name not in self._stored:
                wrong.append(f"{(self._prefix if name.startswith(own) else '') + name!r} is missing")
                continue
            stored = self._stored[name]
            kind = tensors.kind(stored)
            if tensors.shape(stored) != shape:
                wrong.append(f"{stored!r} has shape {tensors.shape(stored)}; expected {shape}")
            elif kind not in _READ:
                wrong.append(f"{stored!r} has dtype {kind}; expected one of {', '.join(_FLOATS)}")
            elif kind == "BF16":
                require("ml_dtypes")
        wrong += [
            f"{stored!r} is not known"
            for name, stored in self._stored.items()
            if name.startswith(own) and name not in shapes and not ignored.search(name)
        ]
        if wrong:
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            said_by = "config.json" if self.folder.is_dir() else "its keys"
            raise ModelError(f"{tensors.where} does not fit {said_by}: {'; '.join(wrong[:SHOWN])}{more}")

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        return self.tensors.shape(self._stored[name])

    def table(self, rows: str | Rows) -> Array:
        """A tensor as it is, in its own type."""
        array: Array = self._make(Whole(), (rows,))
        return array

    def vector(
        self,
        *rows: str | Rows,
        shape: Shape | None = None,
        dtype: np.dtype[Any] | None = None,
        offset: float = 0.0,
        added: str | None = None,
        scale: float = 1.0,
        of_rates: bool = False,
    ) -> Array:
        """Rows end to end, by default in the type that the kernels compute in.

        The `offset` is added, and the first row of the tensor `added`; the sum is times `scale`. Rows
        ``-exp(x)``, if they are `of_rates`, become x.
        """
        parts = self._parts(rows)
        whole = (sum(part.rows for part in parts), *parts[0].shape[1:])
        added = None if added is None else self._stored.get(added, added)
        dtype = self.precision.lane if dtype is None else dtype
        shape = whole if shape is None else shape
        array: Array = self._make(Vector(shape, dtype, offset, added, scale, of_rates), rows)
        return array

    def pack(
        self,
        *maps: Sequence[str | Rows],
        transposed: bool = False,
        stored: str | None = None,
        tiles: tuple[int, int] = (1, 1),
    ) -> PackedLinear:
        """Rows of a linear map, end to end, or of a gated pair, up and gate, packed.

        Tensors that are `transposed` are (in, out). They are `stored` as the model's weights are, or as this
        says. All axes but the first count as one, as of a convolution; `tiles` says how a file has them: see
        `PackArgs`.
        """
        rows = [each for names in reversed(maps) for each in names]
        parts = self._parts(rows, transposed)
        shape = parts[0].shape
        n_in = shape[0] if transposed else math.prod(shape[1:])
        n_out = sum(part.rows for part in parts) // len(maps)
        if stored is None and self.precision.weights != OF_FILE:
            integer_activations(self.precision.activations, self.precision.weights, n_in)
        stored = stored or self.precision.weights
        if stored == OF_FILE and not self._plans:
            stored = self.tensors.own_dtype(parts, self.precision.dtype.name)
        weight: PackedLinear = self._make(Packed(n_in, n_out, len(maps), stored, tiles), rows, transposed)
        return weight

    def computed(self, function: Callable[..., Any], *rows: str | Rows) -> Any:
        """Parameter that ``function(tensors, *stored)`` makes; pickle must find the function."""
        return self._make(Computed(function), rows)

    def _make(self, maker: Maker, rows: Sequence[str | Rows], transposed: bool = False) -> Any:
        parts = self._parts(rows, transposed)
        if not self._plans:
            return self.parameters.make(maker, parts, self.tensors)
        self._plans[-1].update((part.name, part.shape) for part in parts)
        sized: Any = None if isinstance(maker, Computed) else maker
        if isinstance(maker, (Whole, Vector)):
            shape, dtype = (maker.shape, maker.dtype) if isinstance(maker, Vector) else (parts[0].shape, "f4")
            sized = np.broadcast_to(np.zeros((), dtype), shape)
        return sized

    def _parts(self, rows: Sequence[str | Rows], transposed: bool = False) -> list[Part]:
        """Parts of a parameter, in which these rows follow one another, by the names in the files."""
        parts: list[Part] = []
        first = 0
        for each in rows:
            name, shape, begin, count = Rows(each, self.shape(each)) if isinstance(each, str) else each
            if count is None:
                count = (math.prod(shape[1:]) if transposed else shape[0] if shape else 1) - begin
            stored = name if self._plans else self._stored[name]
            parts.append(Part(stored, shape, count, first, begin, transposed))
            first += count
        return parts
