"""Gradients of models, by the names of the tensors in their files; and models with other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.attention import dropout_of
from fastattn._args.errors import wrong_shape, wrong_type
from fastattn._args.ops import like, rows
from fastattn._args.types import lane_dtype
from fastattn._args.values import as_array, flag, integers, is_float, short
from fastattn._engine.tape import Drops, Tape, Value
from fastattn.grad import Pullback, cross_entropy, embedding
from fastattn.grad._loss import targets_of
from fastattn.models._tensors import Tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from fastattn._args.types import Array, Bools, Ints, Shape
    from fastattn.models._decoder import Decoder
    from fastattn.models._origins import Origin


@dataclass(slots=True, eq=False)
class Recorded:
    """A forward pass on a tape, of the tokens that count, end to end."""

    tape: Tape
    out: Value  # hidden states (tokens, hidden_size)
    finish: Callable[[], None]  # adds the gradients of what made the program's input
    origin: Origin

    def gradients(self, dout: Array) -> dict[str, Array]:
        """Those of the tensors, for the gradient of `out`."""
        self.tape.pull(self.out, dout)
        self.finish()
        return self.origin.origins.tensors(self.tape.gradients)


def pullback_of(func: str, recorded: Recorded, mask: Bools | None, shape: Shape) -> Pullback:
    """Map from the gradient of a result of `shape` to those of a model's tensors, by their names.

    It does not read its argument where a token does not count.
    """
    name, dtype = f"pullback of {func}", recorded.out.array.dtype

    def check(dout: ArrayLike) -> tuple[Array]:
        array = like(name, "dout", dout, shape, dtype, "the result")
        if array is None:
            raise TypeError(f"{name}(): dout is None; expected an array")
        return (array,)

    def back(dout: Array) -> dict[str, Array]:
        return recorded.gradients(rows(dout) if mask is None else dout[mask])

    return Pullback(name, check, back)


def required(func: str, origin: Origin | None) -> Origin:
    """`origin`, which models have that `load` made."""
    if origin is None:
        raise ValueError(f"{func}(): the model has no files; expected one that load() made")
    return origin


def state_of(origin: Origin) -> dict[str, Array]:
    """Copies of a model's tensors, in the lane type."""
    names, lane = origin.origins.shapes(), lane_dtype(origin.precision.dtype)
    if origin.state is not None:
        return {name: origin.state[name].astype(lane) for name in names}
    with ExitStack() as stack:
        tensors = Tensors(origin.folder, lane.name, stack)
        return {name: tensors[name].astype(lane, copy=False) for name in names}


def checked_state(
    func: str, origin: Origin, state: Mapping[str, ArrayLike], copy: bool = True
) -> dict[str, Array]:
    """`state` as arrays, `copy`: of their own, or one error with all that does not fit."""
    if not isinstance(state, Mapping):
        expected = "a mapping of names to arrays, as safetensors.numpy.load_file(path) returns"
        raise wrong_type(func, "state_dict", state, expected)
    shapes = origin.origins.shapes()
    arrays = {name: as_array(func, name, x) for name, x in state.items()}
    problems = [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in arrays]
    for name, array in arrays.items():
        if name not in shapes:
            problems.append(f"not known: {short(name)}")
        elif array.shape != shapes[name]:
            problems.append(f"{name}: shape {array.shape}, expected {shapes[name]}")
        elif not is_float(array.dtype):
            problems.append(f"{name}: dtype {array.dtype}, expected a floating type")
    if problems:
        raise ValueError("\n  ".join([f"{func}():", *problems]))
    kept = np.array if copy else np.asarray
    return {name: kept(array, order="C") for name, array in arrays.items()}


def record_decoder(
    model: Decoder, tokens: Ints, lengths: Ints, checkpoint: bool, dropout: float, seed: int | None
) -> Recorded:
    """A decoder's hidden states behind its last norm, on a tape, of sequences end to end."""
    func = model.model_type
    origin, checkpoint = required(func, model.origin), flag(func, "checkpoint", checkpoint)
    flat = tokens.reshape(-1)
    array, call, positions = model._inputs(flat, lengths, int(lengths.max(initial=0)))
    tape, x = Tape(drops=Drops(*dropout_of(func, dropout, seed))), Value(array)
    norm: Any = model.logits.steps[0]
    out = model.program.on(tape, x, call, checkpoint)
    out = tape.norm(out, norm.kind, norm.weight, norm.bias, norm.eps)

    def finish() -> None:
        dx, gradients = x.found(), tape.gradients
        gradients.add(model.tokens, embedding(dx, flat, model.vocab_size))
        if model.positions is not None:
            places = positions
            if places.size != len(flat):  # those of each sequence
                places = np.broadcast_to(positions, (len(lengths), len(positions)))
            gradients.add(model.positions, embedding(dx, places.reshape(-1), len(model.positions)))

    return Recorded(tape, out, finish, origin)


def next_token_loss(
    model: Decoder,
    tokens: Ints,
    lengths: Ints,
    mask: Bools | None,
    targets: ArrayLike | None,
    checkpoint: bool,
    dropout: float,
    seed: int | None,
    how: dict[str, Any],
) -> tuple[float, dict[str, Array]]:
    """`Decoder.loss_and_gradients` of checked tokens; `how` is of `cross_entropy`."""
    func = "loss_and_gradients"
    ignored = int(integers(func, "ignore_index", how["ignore_index"], (), "one number"))
    flat = (tokens if mask is None else tokens[mask]).reshape(-1)
    if targets is None:
        expected = np.append(flat[1:], ignored)[: len(flat)]
        expected[np.cumsum(lengths)[lengths > 0] - 1] = ignored
    else:
        given = as_array(func, "targets", targets)
        given = np.atleast_2d(integers(func, "targets", given if given.size else given.astype(np.int64)))
        if given.shape != tokens.shape:
            raise wrong_shape(func, "targets", given, f"ids', {tokens.shape}")
        expected = (given if mask is None else given[mask]).reshape(-1)
    targets_of(func, expected, flat.shape, model.vocab_size, *how.values())
    recorded = record_decoder(model, flat, lengths, checkpoint, dropout, seed)
    output: Any = model.logits.steps[-1]
    found: Any = cross_entropy(recorded.out.array, output.weight, expected, bias=output.bias, **how)
    loss, dhidden, *others = found
    for parameter, gradient in zip((output.weight, output.bias), others, strict=False):
        recorded.tape.gradients.add(parameter, gradient)
    return float(loss), recorded.gradients(dhidden)
