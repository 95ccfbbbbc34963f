"""Programs: a model's steps one after another over the same rows, described once and run in one call.

The Python code between two kernels is short, but it has left the caches by the time it runs. Checking and
passing the arguments of one kernel then costs 20 to 80 microseconds, a quarter of a small model's time. A
program keeps what is the same in every call, so that a call only says where the rows are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._engine import settings
from fastattn._engine.memory import keep, scratch
from fastattn._engine.steps import INPUTS, OUT, AttendStep, GateStep, LinearStep, NormStep, Sequences, Step, X
from fastattn._engine.tape import PLAIN, Tape

if TYPE_CHECKING:
    from fastattn._args.types import Array


class Chain(NamedTuple):
    """Steps one after another that need, for a row of a result, one row of each buffer."""

    begin: int
    end: int
    own: dict[str, int]  # widths of the buffers that no other step needs
    weights: int = 0  # bytes


@dataclass(slots=True, eq=False)
class _Layout:
    """Where scratch buffers lie, if the steps of each chain run together, block of rows by block of rows."""

    places: dict[str, tuple[int, int]]  # begin and width of each, in features of a row
    chains: tuple[Chain, ...] = ()
    width: int = field(init=False)  # of all together
    own: int = field(init=False)  # of the buffers of a chain at most, which are the threads'
    weights: int = field(init=False)  # of a chain at most, bytes
    # Parts that run in one call each, and steps that run in Python.
    compiled: list[Any] = field(default_factory=list, init=False)
    in_python: set[str] = field(default_factory=set, init=False)  # buffers that those steps read and write

    def __post_init__(self) -> None:
        self.width = max((begin + width for begin, width in self.places.values()), default=0)
        self.own = max((sum(chain.own.values()) for chain in self.chains), default=0)
        self.weights = max((chain.weights for chain in self.chains), default=0)


@dataclass(slots=True, eq=False)
class Program:
    """Steps over named buffers of shape (batch * length, columns); `build` makes one.

    `X` and `OUT` are the caller's arrays. The other buffers live in scratch memory during a call.
    """

    use: str  # which scratch memory: see `memory.py`
    steps: tuple[Step, ...]
    rounds: bool = False  # of float32 rows, some buffers may be bfloat16: see `_between`
    columns: int = field(init=False)  # of OUT
    between: frozenset[str] = field(init=False)  # these buffers
    # Anew for other steps, of `dataclasses.replace`: what is compiled has the weights of its own.
    _made: tuple[_Layout, _Layout] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self.columns = _widths(self.steps).get(OUT, 0)
        if self.steps and (unwritten := _needed(self.steps)[0] - {X, INPUTS}):
            names = ", ".join(sorted(unwritten))
            raise ValueError(f"fastattn: steps read {names} before anything is there")
        self.between = _between(self.steps) if self.rounds else frozenset()

    @property
    def layouts(self) -> tuple[_Layout, _Layout]:
        """Layouts of the steps one by one and by chains, made when a call first needs them: tapes do not."""
        if self._made is None:
            self._made = _layouts(self.steps)
        return self._made

    @property
    def has_gradients(self) -> bool:
        """Whether a tape can record every step."""
        return all(step.has_gradients for step in self.steps)

    def run_on(self, tape: Tape, x: Any, call: Sequences, checkpoint: bool = False) -> Any:
        """`run` on PLAIN; a tape records step by step, each with an array of its own for its result.

        With `checkpoint`, only the input of each block is kept, and the block runs again for its gradients.
        """
        if not tape.recording:
            return self.run(x, call, tape)
        if call.slots:
            raise ValueError("fastattn: a program with a cache has no gradients")
        if not self.steps:
            return tape.note(x.array, x.put)
        whole = _Segment(X, self.steps, self.steps[-1].out)
        memory = () if call.memory is None else (call.memory,)
        if not checkpoint:
            return whole.run(call, tape, x, *memory)
        given: dict[str, list[Any]] = {}
        for segment in _segments(self.steps):
            taken = [value for name in segment.takes for value in given[name]]
            x = tape.checkpoint(partial(segment.run, call), x, *memory, *taken)
            if segment.gives:
                x, values = x
                given |= _shared_out(segment.gives, values)
        return x

    def run(self, x: Array, call: Sequences, tape: Tape = PLAIN) -> Array:
        """OUT, a new array of x's dtype, in one call of the compiled layer; on another `tape` by steps."""
        n = len(x)
        out = np.empty((n, self.columns), x.dtype)
        compiled = settings.current.backend == "compiled" and tape is PLAIN
        if not out.size:
            if not call.attentions:
                return out
            compiled = False  # layers may have to check what they are given
        threads, rows = settings.get_num_threads(), 0
        one_by_one, chained = self.layouts
        if compiled and chained.chains:
            rows = settings.core.chain_rows(n, chained.own * x.itemsize, chained.weights, threads)
        layout = chained if rows else one_by_one
        memory = scratch(self.use, n, layout.width, x.dtype)
        if compiled:
            # Several threads may make the first call: each one's parts are whole.
            layout.compiled = parts = layout.compiled or self._compile(layout)
            buffers: dict[str, Any] = {}
            for part in parts:
                if isinstance(part, Step):
                    buffers = buffers or self._buffers(layout, layout.in_python, x, out, memory, call)
                    part.run(PLAIN, buffers, call, buffers[part.out])
                else:
                    part.run(x, out, memory, call, threads, rows)
        else:
            buffers = self._buffers(layout, layout.places, x, out, memory, call)
            for step in self.steps:
                step.run(tape, buffers, call, buffers[step.out])
        keep(self.use, memory)
        return out

    def _compile(self, layout: _Layout) -> list[Any]:
        """The steps that run in Python, and those between them as programs."""
        parts: list[Any] = []
        begin = 0
        for in_python, steps in groupby(self.steps, lambda step: step.op is None):
            some = tuple(steps)
            end = begin + len(some)
            if in_python:
                used = {name for step in some for name in (step.out, *step.reads)}
                layout.in_python |= used & layout.places.keys()
            chains = [
                (chain.begin - begin, chain.end - begin, chain.own)
                for chain in layout.chains
                if begin <= chain.begin < end
            ]
            parts += some if in_python else [settings.core.Program(some, layout.places, chains, self.between)]
            begin = end
        return parts

    def _buffers(
        self, layout: _Layout, names: Iterable[str], x: Array, out: Array, memory: Array, call: Sequences
    ) -> dict[str, Any]:
        n, flat, buffers = len(x), memory.reshape(-1), {X: x, OUT: out, INPUTS: call.inputs}
        for name in names:
            begin, width = layout.places[name]
            buffers[name] = flat[n * begin : n * (begin + width)].reshape(n, width)
        return buffers

    def __reduce__(self) -> Any:
        return Program, (self.use, self.steps, self.rounds)


def build(use: str, steps: Sequence[Step], rounds: bool = False) -> Program:
    """A program of `steps`, whose scratch buffers share memory where they are not needed at the same time.

    A buffer is as wide as the widest result that a step writes to it. It is needed from a step that writes it
    to the last step that reads this result. `X` and `INPUTS` are scratch memory, too, if a step writes them.
    With `rounds`, a call without a cache may keep bfloat16 in some: not where another road has to give its
    bits.
    """
    return Program(use, tuple(steps), rounds)


def _widths(steps: tuple[Step, ...]) -> dict[str, int]:
    """Features of each buffer that steps write."""
    widths: dict[str, int] = {}
    for step in steps:
        for name, columns in {step.out: step.columns, **step.scratch}.items():
            widths[name] = max(columns, widths.get(name, 0))
    return widths


def _layouts(steps: tuple[Step, ...]) -> tuple[_Layout, _Layout]:
    """Layouts of steps one by one and by chains."""
    widths = {name: n for name, n in _widths(steps).items() if name not in (X, OUT, INPUTS)}
    needed = _needed(steps)
    chains = _chains(steps, needed, widths)
    each = [Chain(i, i + 1, {}) for i in range(len(steps))]
    inside = {i for chain in chains for i in range(chain.begin, chain.end)}
    groups = [*chains, *(one for one in each if one.begin not in inside)]
    one_by_one = _Layout(_places(steps, needed, widths, each))
    return one_by_one, _Layout(_places(steps, needed, widths, groups), chains)


def _between(steps: Sequence[Step]) -> frozenset[str]:
    """Scratch buffers that products of int8 by int8 write, and that only such products and attention read.

    Their elements err by what those products round, so that bfloat16, which adds up to 2^-9 of an element,
    its bias included, seldom adds much; attention takes half the time where it has a dot product.
    """
    names = {name for step in steps for name in (step.out, *step.reads)} - {X, OUT, INPUTS}
    while True:
        kept = {name for step in steps for name in _exact(step, names)}
        if not kept & names:
            return frozenset(names)
        names -= kept


def _exact(step: Step, between: set[str]) -> set[str]:
    """The buffers of a step that keep their type, if no more than `between` may be of another one."""
    used = {step.out, *step.reads}
    if isinstance(step, LinearStep):
        added = set() if step.residual is None else {step.residual, step.out}
        return used if step.activations is None else added
    if isinstance(step, (AttendStep, GateStep)) or (isinstance(step, NormStep) and step.weight.ndim == 2):
        return set() if used <= between else used
    return used


def _needed(steps: Sequence[Step]) -> list[set[str]]:
    """The buffers that are needed before each step, and after the last one."""
    needed = [{OUT}]
    for step in reversed(steps):
        needed.append(needed[-1].difference((step.out,)).union(step.reads))
    return needed[::-1]


def _chains(steps: Sequence[Step], needed: list[set[str]], widths: dict[str, int]) -> tuple[Chain, ...]:
    """Runs of steps that are compiled and go row by row, two at least."""
    chains, begin = [], 0
    for rowwise, group in groupby(steps, lambda step: step.op is not None and not step.along):
        some = list(group)
        end = begin + len(some)
        if rowwise and len(some) > 1:
            used = {name for step in some for name in (step.out, *step.reads)}
            own = sorted((used & widths.keys()) - needed[begin] - needed[end])
            weights = sum(step.weight.panels.nbytes for step in some if isinstance(step, LinearStep))
            chains.append(Chain(begin, end, {name: widths[name] for name in own}, weights))
        begin = end
    return tuple(chains)


def _places(
    steps: Sequence[Step], needed: list[set[str]], widths: dict[str, int], groups: Sequence[Chain]
) -> dict[str, tuple[int, int]]:
    """Begin and width of each buffer; those that a group of steps uses, or that it leaves, lie apart."""
    neighbours: defaultdict[str, set[str]] = defaultdict(set)  # buffers that are needed at the same time
    for group in groups:
        some = steps[group.begin : group.end]
        used = {name for step in some for name in (step.out, *step.reads, *step.scratch)}
        together = (needed[group.end] | used) - group.own.keys()
        for name in together:
            neighbours[name] |= together
    places: dict[str, tuple[int, int]] = {}
    for name in sorted(widths, key=lambda name: -widths[name]):  # each at the first gap that is wide enough
        if name not in neighbours:
            continue
        begin = 0
        for other, width in sorted(place for n, place in places.items() if n in neighbours[name]):
            if begin + widths[name] <= other:
                break
            begin = max(begin, other + width)
        places[name] = begin, widths[name]
    return places


class _Segment(NamedTuple):
    """Steps that share one buffer with those before them, and one with those after them.

    It also takes keys and values of segments before it, and gives some to those after it.
    """

    x: str
    steps: tuple[Step, ...]
    out: str
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    def run(self, call: Sequences, tape: Tape, x: Any, *taken: Any) -> Any:
        if call.memory is not None:  # of a checkpoint, its own value
            call, taken = call._replace(memory=taken[0]), taken[1:]
        values = {self.x: x, **_shared_out(self.takes, taken)}
        for step in self.steps:
            values[step.out] = step.run(tape, values, call)
        given = tuple(value for name in self.gives for value in values[name])
        return (values[self.out], given) if given else values[self.out]


def _shared_out(names: Sequence[str], values: Sequence[Any]) -> dict[str, list[Any]]:
    """As many of the values for each name."""
    each = len(values) // max(1, len(names))
    return {name: list(values[i * each : (i + 1) * each]) for i, name in enumerate(names)}


def _segments(steps: Sequence[Step]) -> list[_Segment]:
    """Checkpoint segments: one step along the sequences each, cut where one buffer is live."""
    needed, alone = {OUT}, {len(steps): OUT}  # the only buffer that is needed before the step of that number
    for i in range(len(steps) - 1, -1, -1):
        # Keys of another step are no buffer here, but values beside it.
        needed = needed.difference((steps[i].out,)).union(
            {*steps[i].reads} - {getattr(steps[i], "keys", None)}
        )
        if len(needed) == 1:
            (alone[i],) = needed
    cuts, last = [0], None
    for i, step in enumerate(steps):
        if i in alone and i > cuts[-1]:
            last = i
        if step.along:
            if last is not None and any(s.along for s in steps[cuts[-1] : last]):
                cuts.append(last)
            last = None
    cuts.append(len(steps))
    segments = []
    for begin, end in pairwise(cuts):
        takes, gives = list[str](), list[str]()
        for step in steps[begin:end]:
            along: Any = step
            if getattr(step, "keys", None) is not None and along.given not in takes + gives:
                takes.append(along.given)
            elif getattr(step, "gives", False):
                gives.append(along.given)
        own = alone[begin], tuple(steps[begin:end]), alone[end]
        segments.append(_Segment(*own, tuple(takes), tuple(gives)))
    return segments
