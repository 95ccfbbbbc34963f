"""The class CrossEncoder, over the model of `fastattn.models` with the same name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fastattn import models
from fastattn._args.errors import named
from fastattn._args.types import Array, Unpack
from fastattn.sentence_transformers._base import (
    Base,
    Options,
    as_asked,
    is_tensor,
    renamed,
)

_OLD = {"sentences": "inputs", "activation_fct": "activation_fn"}


class CrossEncoder(Base):
    """`sentence_transformers.CrossEncoder` for inference, over `fastattn.models.CrossEncoder`.

    Parameters
    ----------
    model_name_or_path, **options
        As in `_base.Base`.
    num_labels : int, optional
        Must be the number that the folder's head has.
    max_length : int, optional
        Maximum number of tokens of a pair.
    activation_fn : callable, optional
        Function of the logits; by default as the folder says. Can be set later.
    keep_in_fp32_modules : None
        Not supported.
    """

    _kinds = (models.CrossEncoder,)

    @renamed(tokenizer_kwargs="processor_kwargs")
    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | None = None,
        *,
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Callable[..., Any] | None = None,
        keep_in_fp32_modules: None = None,
        **options: Unpack[Options],
    ):
        if keep_in_fp32_modules:
            raise ValueError("CrossEncoder(): keep_in_fp32_modules is given; expected none")
        if max_length is not None:
            length = {"model_max_length": max_length}
            options["processor_kwargs"] = {**(options.get("processor_kwargs") or {}), **length}
        super().__init__(model_name_or_path, options)
        if num_labels not in (None, self.num_labels):
            expected = f"{self.num_labels}, as its head has"
            raise ValueError(f"CrossEncoder(): num_labels is {num_labels}; expected {expected}")
        self.activation_fn = activation_fn

    @property
    def num_labels(self) -> int:
        """Number of scores of a pair."""
        labels: int = self.model.num_labels
        return labels

    @property
    def max_length(self) -> int | None:
        """`max_seq_length` under its older name."""
        return self.max_seq_length

    @max_length.setter
    def max_length(self, tokens: int) -> None:
        self.max_seq_length = tokens

    @renamed(**_OLD)
    @named("predict")
    def predict(
        self,
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[..., Any] | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: Any = None,
        chunk_size: int | None = None,
        **others: Any,
    ) -> Any:
        """Score pairs of texts.

        `activation_fn` gets a tensor where torch is imported, else an array. For the other arguments, see
        `fastattn.models.CrossEncoder.predict` and `SentenceTransformer.encode`.
        """
        call = self._call(
            CrossEncoder.predict, prompt_name, prompt, batch_size, show_progress_bar, device, others
        )
        function = _of_arrays(self.activation_fn if activation_fn is None else activation_fn)
        scores = self.model.predict(inputs, activation_fn=function, apply_softmax=bool(apply_softmax), **call)
        one = scores.ndim < (1 if self.num_labels == 1 else 2)
        return as_asked(scores, one, convert_to_numpy, convert_to_tensor)

    @renamed(**_OLD)
    @named("rank")
    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[..., Any] | None = None,
        device: Any = None,
        pool: Any = None,
        chunk_size: int | None = None,
    ) -> list[dict[str, Any]]:
        """Rank documents by their score with a query, as `fastattn.models.CrossEncoder.rank`."""
        call = self._call(CrossEncoder.rank, prompt_name, prompt, batch_size, show_progress_bar, device)
        call["activation_fn"] = _of_arrays(self.activation_fn if activation_fn is None else activation_fn)
        found: list[dict[str, Any]] = self.model.rank(query, documents, top_k, return_documents, **call)
        return found


def _of_arrays(function: Callable[..., Any] | None) -> Callable[[Array], Array] | None:
    """A function of arrays, of one that gets tensors where torch is imported."""
    torch: Any = sys.modules.get("torch")
    if function is None or torch is None or not callable(function):
        return function

    def call(logits: Array) -> Array:
        with torch.inference_mode():
            scores: Any = function(torch.from_numpy(logits))
        found: Array = scores.numpy() if is_tensor(scores) else scores
        return found

    return call
