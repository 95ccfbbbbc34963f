"""`CrossEncoder`: scores of pairs of texts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._args.errors import named
from fastattn.models import CrossEncoder as Model
from fastattn.sentence_transformers._base import Base, Options, checked_call, renamed
from fastattn.sentence_transformers._tensors import as_asked, is_tensor

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack

    from fastattn._args.types import Array

_OLD = {"sentences": "inputs", "activation_fct": "activation_fn"}


class CrossEncoder(Base):
    """`sentence_transformers.CrossEncoder` for inference, over `fastattn.models.CrossEncoder`.

    Parameters
    ----------
    model_name_or_path, **options
        As in `_base.Base`.
    num_labels : int, optional
        As many as the folder's head has.
    max_length : int, optional
        The most tokens of a pair.
    activation_fn : callable, optional
        What becomes of the logits; by default as the folder says. It can be set later.
    keep_in_fp32_modules : None
        It is refused.
    """

    _kinds = (Model,)

    @renamed(
        tokenizer_kwargs="processor_kwargs",
        tokenizer_args="processor_kwargs",
        automodel_args="model_kwargs",
        cache_dir="cache_folder",
        model_name="model_name_or_path",
        default_activation_function="activation_fn",
    )
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
        """Scores of a pair."""
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
        """The scores of pairs; arguments are those of sentence-transformers.

        `activation_fn` gets a tensor where torch is imported, else an array. Other arguments are those of
        `fastattn.models.CrossEncoder.predict` and of `SentenceTransformer.encode`.
        """
        size = checked_call(batch_size, device, others, CrossEncoder.predict)
        scores = self.model.predict(
            inputs,
            prompt=self._prompt(prompt, prompt_name),
            batch_size=size,
            show_progress_bar=show_progress_bar,
            activation_fn=_of_arrays(self.activation_fn if activation_fn is None else activation_fn),
            apply_softmax=bool(apply_softmax),
        )
        one = scores.ndim < (1 if self.num_labels == 1 else 2)
        result = as_asked(np.asarray(scores)[None] if one else scores, convert_to_numpy, convert_to_tensor)
        return result[0] if one else result

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
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
    ) -> list[dict[str, Any]]:
        """The documents that fit a query, the best first, as `fastattn.models.CrossEncoder.rank` has them.

        The last three arguments are of version 5, and change nothing: scores are floats of one label.
        """
        found: list[dict[str, Any]] = self.model.rank(
            query,
            documents,
            top_k=top_k,
            return_documents=return_documents,
            prompt=self._prompt(prompt, prompt_name),
            batch_size=checked_call(batch_size, device),
            show_progress_bar=show_progress_bar,
            activation_fn=_of_arrays(self.activation_fn if activation_fn is None else activation_fn),
        )
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
