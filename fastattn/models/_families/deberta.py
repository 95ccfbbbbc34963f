"""DeBERTa, versions 2 and 3 (He et al. 2020): the names of its tensors, and the keys of its config.json.

It is BERT whose scores depend on the distance of two tokens, and on what stands at either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.types import Array, Ints, ModifiersArgs
from fastattn._engine.steps import AttendStep, Sequences, Step, Values
from fastattn._engine.tape import Tape
from fastattn.functional import disentangled_attention
from fastattn.functional._relative import deberta_buckets
from fastattn.models._blocks import Blocks
from fastattn.models._encoder import Encoder
from fastattn.models._families.bert import BERT
from fastattn.models._families.shared import read_encoder
from fastattn.models._files import Config, ModelError
from fastattn.models._source import Rows, Source
from fastattn.models._tensors import Tensors

_NAMES = BERT._replace(
    positions=None,
    block=BERT.block._replace(
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
    ),
    prefixes=("deberta.",),
    ignored=re.compile(r"^embeddings\.position_ids$"),  # 0, 1, 2, ...; old files hold them
)
_RELATIVE, _NORM = "encoder.rel_embeddings.weight", "encoder.LayerNorm"
_MOST_READY = 4096  # tokens of a sequence whose distances are made before a call
# Maps of the relative positions, to keys (content to position) and to queries (position to content): those of
# the tokens where they are shared, or else their own.
_MAPS = {"c2p": ("key_proj", "pos_key_proj"), "p2c": ("query_proj", "pos_query_proj")}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DisentangledStep(AttendStep):
    """`disentangled_attention` in place of `attention`."""

    op = "disentangled"
    has_gradients = False

    position_keys: Array | None  # (heads, 2 span, head_dim), lane type
    position_queries: Array | None
    max_distance: int | None
    longest: int  # sequence that is usual: longer ones cost a little more

    def rows(self, longest: int) -> Ints:
        """The row of these arrays for each distance from 1 - longest to longest - 1."""
        some = self.position_keys if self.position_keys is not None else self.position_queries
        assert some is not None
        return deberta_buckets(np.arange(1 - longest, longest), some.shape[1] // 2, self.max_distance)

    def run(self, tape: Tape, values: Values, call: Sequences, out: Array | None = None) -> Array:
        x, out = values[self.x], values[self.out] if out is None else out
        begins = call.begins if call.begins is not None else range(0, len(x) + 1, len(x) // call.batch)
        for begin, end in pairwise(begins):
            if begin == end:
                continue
            q, k, v = x[begin:end].reshape(end - begin, 3, self.heads, self.head_dim).transpose(1, 2, 0, 3)
            tables = self.position_keys, self.position_queries
            attended = disentangled_attention(q, k, v, *tables, max_distance=self.max_distance)
            out[begin:end] = attended.swapaxes(0, 1).reshape(end - begin, -1)
        return out


def deberta(source: Source) -> Encoder:
    """Build DeBERTa."""
    config = source.config
    longest = config.size("max_position_embeddings", 512)
    config.refuse(embedding_size=config.size("hidden_size"), conv_kernel_size=0)
    if not config.get("relative_attention", bool, False):
        raise ModelError(f"{config.path}: 'relative_attention' is false; only true is supported")
    blocks = Blocks.of(source, _NAMES.block, eps=1e-7)
    absolute = config.get("position_biased_input", bool, True)
    heads, hidden, lane = blocks.heads, blocks.hidden, source.precision.lane
    kinds, shared = _kinds(config), config.get("share_att_key", bool, False)
    normed = "layer_norm" in config.get("norm_rel_ebd", str, "none").lower().split("|")
    farthest = _size(config, "max_relative_positions") or longest
    buckets = _size(config, "position_buckets")
    span, max_distance = buckets or farthest, farthest if buckets else None
    if blocks.eps > float(np.finfo(lane).max):
        raise config.wrong("layer_norm_eps", blocks.eps, f"a number above 0 that {lane} holds")
    if buckets == 1:
        raise config.wrong("position_buckets", buckets, "at least 2")
    if buckets and farthest < (least := span // 2 + 2):
        came = f"'max_relative_positions' is {farthest} with {buckets} 'position_buckets'"
        raise ModelError(f"{config.path}: {came}; expected at least {least}")
    norms = [Rows(f"{_NORM}.{part}", (hidden,)) for part in ("weight", "bias") if normed]
    vectors, tables = [Rows(_RELATIVE, (2 * span, hidden)), *norms], list[dict[str, Array]]()
    make = partial(_mapped, heads, blocks.eps, lane)

    def table(prefix: str, kind: str) -> Array:
        name = f"{prefix}attention.self.{_MAPS[kind][0 if shared else 1]}"
        found: Array = source.computed(
            make, Rows(f"{name}.weight", (hidden, hidden)), Rows(f"{name}.bias", (hidden,)), *vectors
        )
        return found

    def read() -> dict[str, Any]:
        prefixes = map(_NAMES.block.prefix.format, range(blocks.num_layers))
        tables[:] = [{kind: table(prefix, kind) for kind in kinds} for prefix in prefixes]
        return {}

    def disentangled(step: Step) -> Step:
        if not isinstance(step, AttendStep):
            return step
        own = tables[step.first_kv // step.heads_kv]
        return DisentangledStep(
            step.x,
            step.out,
            step.heads,
            step.heads_kv,
            step.head_dim,
            ModifiersArgs((step.head_dim * (1 + len(own))) ** -0.5),
            position_keys=own.get("c2p"),
            position_queries=own.get("p2c"),
            max_distance=max_distance,
            longest=min(longest, _MOST_READY),
        )

    encoder = read_encoder(
        _NAMES._replace(positions=BERT.positions) if absolute else _NAMES,
        blocks,
        types=config.size("type_vocab_size", 0, low=0),
        positions=longest,
        longest=longest,
        others=read,
    )
    steps = tuple(map(disentangled, encoder.program.steps))
    return replace(encoder, program=replace(encoder.program, steps=steps))


def _mapped(heads: int, eps: float, lane: np.dtype[Any], tensors: Tensors, *names: str) -> Array:
    """Vectors of positions for each head, (heads, 2 span, head_dim): mapped, and normed before if asked."""
    weight, bias, vectors, *norm = (tensors.whole(name).astype(lane, copy=False) for name in names)
    if norm:
        vectors = ops.layer_norm(vectors, *norm, eps=eps)
    mapped = (vectors @ weight.T + bias).reshape(len(vectors), heads, -1)
    return np.ascontiguousarray(mapped.swapaxes(0, 1))


def _kinds(config: Config) -> list[str]:
    """The kinds of attention by positions: a list, or a string with | between them."""
    value: Any = config.values.get("pos_att_type")
    kinds = [kind.strip() for kind in value.split("|")] if isinstance(value, str) else value
    if not isinstance(kinds, list) or not kinds or any(kind not in list(_MAPS) for kind in kinds):
        raise config.wrong("pos_att_type", value, f"one of {', '.join(_MAPS)}, or both")
    return sorted(set(kinds))


def _size(config: Config, name: str) -> int | None:
    """A size; None if it is 0 or less."""
    value = config.values.get(name)
    return None if isinstance(value, int) and value < 1 else config.optional_size(name)
