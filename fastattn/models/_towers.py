"""Two towers, one of texts and one of images, whose vectors can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Any

import numpy as np

from fastattn import ops
from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import Activation, Array, ArrayLike, Ints, Unpack, lane_dtype
from fastattn._args.values import real_array
from fastattn._engine.program import Program
from fastattn.functional._attention import attention
from fastattn.layers._block import Norm, Projection
from fastattn.models._embeddings import SequenceRules
from fastattn.models._encode_calls import EncodeOptions, EncodeSettings, at_once, calls, model_of
from fastattn.models._encoder import Encoder
from fastattn.models._files import ModelError, tokenizer_config
from fastattn.models._images import EXPECTED, Images, checked, is_pillow
from fastattn.models._similarity import similarities
from fastattn.models._text import each_checked, string
from fastattn.models._tokenizers import SIDES


def mapped(x: Array, linear: Projection, activation: Activation | None = None) -> Array:
    """``activation(linear(x))`` of rows."""
    weight, bias, rounded = linear
    return ops.linear(x, weight, bias, activation=activation, activations=rounded)


@dataclass(frozen=True, slots=True, eq=False)
class ClassToken:
    """The vector of an image is the row of its class token, normed and mapped."""

    norm: Norm
    linear: Projection

    def __call__(self, rows: Array) -> Array:
        """The vectors (n, features) of rows (n, length, hidden), in the lane type."""
        first = np.ascontiguousarray(rows[:, 0]).astype(lane_dtype(rows.dtype), copy=False)
        return mapped(ops.layer_norm(first, self.norm.weight, self.norm.bias, eps=self.norm.eps), self.linear)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The vector of an image is what one learned query finds in its rows, and a feed-forward of it."""

    q: Array  # (heads, 1, head_dim)
    kv: Projection
    attended: Projection
    norm: Norm
    inner: Projection
    activation: Activation
    outer: Projection

    def __call__(self, rows: Array) -> Array:
        """Make the vectors, as `ClassToken` does."""
        n, length, hidden = rows.shape
        heads = mapped(rows, self.kv).reshape(n, length, 2, len(self.q), -1).transpose(2, 0, 3, 1, 4)
        found = attention(self.q.astype(rows.dtype, copy=False), *heads).reshape(n, hidden)
        x = mapped(found.astype(lane_dtype(rows.dtype), copy=False), self.attended)
        normed = ops.layer_norm(x, self.norm.weight, self.norm.bias, eps=self.norm.eps)
        y: Array = x + mapped(mapped(normed, self.inner, self.activation), self.outer)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """Vision transformer: squares of pixels become rows, as words of a text do, and rows a vector."""

    image_size: int
    patch_size: int
    patches: Projection  # from the pixels of a square, (3, height, width), to a row
    token: Array | None  # the class token's row, before all others
    positions: Array  # (patches, hidden), added to the others
    program: Program
    sequence_rules: SequenceRules
    head: ClassToken | Probe

    @property
    def length(self) -> int:
        """Rows of an image."""
        return len(self.positions) + (self.token is not None)

    def __call__(self, pixels: Sequence[Array] | Array, dtype: np.dtype[Any]) -> Array:
        """The vectors (n, features), in the lane type, of pixels (n, 3, size, size); computed in `dtype`."""
        n, size = len(pixels), self.patch_size
        pixels = np.asarray(pixels)
        side = self.image_size // size
        whole = pixels[:, :, : side * size, : side * size].astype(dtype, copy=False)  # a rest is left out
        squares = whole.reshape(n, -1, side, size, side, size).transpose(0, 2, 4, 1, 3, 5)
        found = mapped(squares.reshape(n, side * side, -1), self.patches)
        x = np.empty((n, self.length, found.shape[-1]), dtype)
        before = self.length - side * side
        np.add(found, self.positions, out=x[:, before:])
        if self.token is not None:
            x[:, 0] = self.token
        sequences, _ = self.sequence_rules(np.full(n, self.length), dtype)
        rows = self.program.run(x.reshape(n * self.length, -1), sequences)
        return self.head(rows.reshape(x.shape))


# Which token's row the vector of a text is made of, by its ids and an id.
ENDS: dict[str, Callable[[Ints, int], int]] = {
    "last": lambda ids, end: len(ids) - 1,
    "largest": lambda ids, end: int(ids.argmax()),
    "first": lambda ids, end: int((ids == end).argmax()),  # of this id; the first token if it is not there
}


@dataclass(frozen=True, slots=True, eq=False)
class TextHead:
    """Text head: a linear map of the hidden state of one token."""

    linear: Projection
    end: str  # of `ENDS`
    end_id: int
    pad_id: int | None  # of the tokens that fill a text up; None: nothing does

    def __call__(self, rows: Array, cu_seqlens: Ints, sequences: Sequence[Ints]) -> Array:
        """The vectors (n, features) in the lane type; a text without tokens counts as zeros."""
        pooled = np.zeros((len(sequences), rows.shape[1]), lane_dtype(rows.dtype))
        for vector, begin, ids in zip(pooled, cu_seqlens.tolist(), sequences, strict=False):
            if len(ids):
                vector[:] = rows[begin + ENDS[self.end](ids, self.end_id)]
        return mapped(pooled, self.linear)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TwoTowers(Encoder):
    """CLIP or SigLIP: `encode` makes vectors of texts and of images, which `similarity` compares.

    Other methods of `Encoder` run the text tower; a call returns its hidden states.
    """

    vision: Vision
    text_head: TextHead
    images: Images | None  # None: the folder does not say what is done with images
    scale: Array  # one number, its logarithm, as in the file
    shift: Array | None

    @property
    def logit_scale(self) -> float:
        """Logarithm of the factor of `logits`."""
        return float(self.scale.item())

    @property
    def logit_bias(self) -> float:
        """Offset of `logits`."""
        return 0.0 if self.shift is None else float(self.shift.item())

    @named("{self.model_type}")
    def text_features(self, ids: ArrayLike, attention_mask: ArrayLike | None = None) -> Array:
        """Make vectors of texts given as token ids, as `get_text_features` of transformers.

        Parameters
        ----------
        ids : array_like of int, (batch, length) or (length,)
            SigLIP expects texts padded to the full length.
        attention_mask : array_like of bool or of 0 and 1, (batch, length), optional
            True or 1 for tokens that count; the others are left out.

        Returns
        -------
        ndarray, (batch, features)
            float32, or float64 for a model in float64; not scaled.
        """
        tokens, _, mask = self._tokens(ids, attention_mask, self.max_length)
        kept = tokens if mask is None else (ids[counts] for ids, counts in zip(tokens, mask, strict=True))
        return self._of_ids(list(kept))

    @named("{self.model_type}")
    def image_features(self, pixels: ArrayLike) -> Array:
        """Make vectors of images given as pixels, as `get_image_features` of transformers.

        Parameters
        ----------
        pixels : array_like, (batch, 3, height, width) or (3, height, width)
            ``pixel_values`` of transformers: of the model's size, normalized.

        Returns
        -------
        ndarray, (batch, features)
            float32, or float64 for a model in float64; not scaled.
        """
        x, size = real_array("pixels", pixels), self.vision.image_size
        if x.ndim not in (3, 4) or x.shape[-3:] != (3, size, size):
            raise wrong_shape("pixels", x, f"(batch, 3, {size}, {size})")
        x = x.reshape(-1, 3, size, size)
        count = at_once(self.vision.length)
        parts = [self.vision(x[i : i + count], self.dtype) for i in range(0, len(x), count)]
        features = self.text_head.linear.weight.out_features
        return np.concatenate([np.empty((0, features), lane_dtype(self.dtype)), *parts])

    @named("logits")
    def logits(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Array:
        """``exp(logit_scale) * cosine + logit_bias`` of vectors (n, features) and (m, features): (n, m).

        With images first and texts second, this is ``logits_per_image`` of transformers. Probabilities are
        the softmax over texts for CLIP, and the sigmoid for SigLIP.
        """
        cosine = similarities("cosine", embeddings1, embeddings2, pairwise=False)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.exp(cosine.dtype.type(self.logit_scale))
            return np.asarray(cosine * scale + cosine.dtype.type(self.logit_bias))

    @named("encode")
    def encode(self, sentences: Any, *, task: str | None = None, **options: Unpack[EncodeOptions]) -> Array:
        """Make a vector of each text or image.

        Parameters
        ----------
        sentences : str, image, or iterable of them
            An image is a Pillow image or an array (height, width, 3), of uint8 or of floats from 0 to 1; an
            array with a further leading axis is a batch. Images of other sizes than the model's are resized
            by Pillow, in integers, as the folder says.
        task, **options
            As in `Encoder.encode`; prompts are put before texts only.

        Returns
        -------
        ndarray, (n, features), or (features,) for one str or image
            As in `Encoder.encode`.

        Raises
        ------
        ModelError
            If the folder has no tokenizer.json for texts, or no preprocessor_config.json for images.
        ImportError
            If Pillow is needed and missing.
        """
        return model_of(self, task)._encode(sentences, options)

    def _of_ids(self, sequences: Sequence[Ints]) -> Array:
        return self.text_head(*self.hidden(sequences), sequences)

    def _inputs(self, sentences: Any) -> tuple[bool, Iterable[Any]]:
        """Return whether `sentences` is one text or image, and the checked ones."""

        def each(name: str, x: Any) -> Any:
            return string(name, x) if isinstance(x, str) else self._image(name, x)

        if isinstance(sentences, str) or is_pillow(sentences) or getattr(sentences, "ndim", 0) == 3:
            return True, [each("sentences", sentences)]
        expected = f"a string, {EXPECTED}, or several of them, as a list"
        return False, each_checked("sentences", sentences, expected, each)

    def _image(self, name: str, image: Any) -> Any:
        """`image`, the argument `name`, checked."""
        image = checked(name, image)
        if self.images is None:
            there = f"{self.text.folder} has no preprocessor_config.json and no processor_config.json"
            raise ModelError(f"{there}; expected one that says how images become pixels")
        return image

    def _encoded(self, texts: Iterable[str]) -> Iterator[list[int]]:
        if self.text_head.pad_id is None:
            yield from self.text.encoded(texts)
            return
        config, length = tokenizer_config(self.text.folder), self.text.limit or 0
        token = config.token("pad_token")
        found = None if token is None else self.text.tokenizer.token_to_id(token)
        pad = self.text_head.pad_id if found is None else int(found)
        left = config.one_of("padding_side", SIDES, "right") == "left"
        for ids in self.text.encoded(texts):
            fill = [pad] * (length - len(ids))
            yield fill + ids if left else ids + fill

    def _vectors(self, texts: Iterable[Any], call: EncodeSettings) -> Iterator[Array]:
        """Vectors of texts and images; those of one kind in a row go through the layers together."""
        for is_text, run in groupby(texts, lambda x: isinstance(x, str)):
            for features in self._of_texts(run, call) if is_text else self._of_images(run, call):
                yield call.finished(self.sentences.after_pooling(features))

    def _of_texts(self, texts: Iterable[str], call: EncodeSettings) -> Iterator[Array]:
        encoded = self._encoded(call.prompt + text for text in texts)
        return map(self._of_ids, calls(encoded, call.batch_size))

    def _of_images(self, images: Iterable[Any], call: EncodeSettings) -> Iterator[Array]:
        assert self.images is not None
        count, lane = at_once(self.vision.length), lane_dtype(self.dtype)
        count = min(count, call.batch_size or count)
        left = iter(images)
        for first in left:
            some = chain([first], islice(left, count - 1))
            yield self.vision([self.images(image, lane) for image in some], self.dtype)
