"""The three classes, each over the model of `fastattn.models` with the same task."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import models
from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import lane_dtype
from fastattn._args.values import choice, integer
from fastattn.models import _sparse
from fastattn.models._encode_calls import calls, one_or_several, watched
from fastattn.models._files import require
from fastattn.models._routes import model_of
from fastattn.models._vectors import PRECISIONS
from fastattn.sentence_transformers._base import (
    Base,
    Options,
    Vectors,
    as_asked,
    compared,
    is_tensor,
    renamed,
    torch_of,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Unpack

    from fastattn._args.types import Array

_VECTORS, _TOKENS = "sentence_embedding", "token_embeddings"
_INSTRUCTOR = tuple(f"hkunlp/instructor-{size}" for size in ("base", "large", "xl"))  # leave out prompts
_OLD = {"sentences": "inputs", "activation_fct": "activation_fn"}


class SentenceTransformer(Vectors):
    """`sentence_transformers.SentenceTransformer` for inference, over `fastattn.models.Encoder`.

    Parameters
    ----------
    model_name_or_path, **options
        As in `_base.Base`; names without an organisation are of sentence-transformers.
    similarity_fn_name : {"cosine", "dot", "euclidean", "manhattan"}, optional
        Measure of `similarity`; by default as the folder says.
    truncate_dim : int, optional
        Number of features to keep; by default as the folder says. Both can be set later.
    """

    _kinds = (models.Encoder, models.TwoTowers)
    _organization = "sentence-transformers"

    @renamed(tokenizer_kwargs="processor_kwargs", use_auth_token="token")
    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | None = None,
        *,
        similarity_fn_name: Any = None,
        truncate_dim: int | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(model_name_or_path, options, similarity_fn_name)
        settings = self.model.sentences
        given = settings.truncate_dim if truncate_dim is None else truncate_dim
        self.truncate_dim: int | None = None if given is None else integer("truncate_dim", given, 1)
        if model_name_or_path in _INSTRUCTOR:
            self.set_pooling_include_prompt(False)

    def get_embedding_dimension(self) -> int:
        """Features of a vector."""
        features: int = self.model.sentences.features
        return min(features, self.truncate_dim or features)

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Set `truncate_dim` within a block."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings

    def set_pooling_include_prompt(self, include_prompt: bool) -> None:
        """Include a prompt's tokens in pooling, or leave them out."""
        settings = self.model.sentences
        pooling = replace(settings.pooling, include_prompt=include_prompt)
        object.__setattr__(self.model, "sentences", replace(settings, pooling=pooling))

    @renamed(sentences="inputs")
    @named("encode")
    def encode(
        self,
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = _VECTORS,
        precision: str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
        **others: Any,
    ) -> Any:
        """Make a vector of each text, or of each of its tokens.

        Parameters
        ----------
        inputs : str, or list of str
            {"text": str} is a text, too. Models of images take images, as `fastattn.models.TwoTowers.encode`.
        prompt_name, prompt, batch_size, show_progress_bar, precision, normalize_embeddings : optional
            As in `fastattn.models.Encoder.encode`.
        output_value : {"sentence_embedding", "token_embeddings", None}
            "token_embeddings" returns a list of arrays (tokens, features), None a dict of both for each text.
        convert_to_numpy, convert_to_tensor : bool
            Return tensors of torch, one or a list, if the second is true, or the first is false.
        truncate_dim : int, optional
            By default the attribute.
        device, pool, chunk_size, task : optional
            "cpu"; without effect, as one process uses all CPUs; the route of a model that has several.

        Returns
        -------
        ndarray, (n, features), or (features,) for one str
            Or as the arguments say; (0,) for no texts.
        """
        call = self._call(
            SentenceTransformer.encode, prompt_name, prompt, batch_size, show_progress_bar, device, others
        )
        precision = choice("precision", precision or "float32", PRECISIONS)
        one, texts = self._texts(inputs)
        model = model_of(self.model, others.get("task"), optional=True)
        if output_value != _VECTORS:
            outputs = (_VECTORS, _TOKENS)
            choice("output_value", _TOKENS if output_value is None else output_value, outputs)
            if precision != "float32":
                raise ValueError(f"(): precision is {precision} for vectors of tokens; expected float32")
            found: Any = self._of_tokens(model, texts, truncate_dim, **call)
            if convert_to_tensor or not convert_to_numpy:
                torch = torch_of("convert_to_tensor=True")
                found = ({name: torch.from_numpy(x) for name, x in each.items()} for each in found)
            found = [each if output_value is None else each[output_value] for each in found]
            return found[0] if one else found
        vectors = model.encode(
            texts[0] if one else texts,
            precision=precision,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=self._dim(truncate_dim),
            **call,
        )
        return as_asked(vectors, one, convert_to_numpy, convert_to_tensor)

    def _compared(self, a: Any, b: Any, pairwise: bool) -> Any:
        return compared(self.similarity_fn_name, a, b, pairwise)

    def _dim(self, given: int | None) -> int:
        """Features that are kept."""
        features: int = self.model.sentences.features
        dim = self.truncate_dim if given is None else given
        return features if dim is None else integer("truncate_dim", dim, 1)

    def _texts(self, inputs: Any) -> tuple[bool, Any]:
        """Return whether `inputs` is one, and the list of them."""
        if isinstance(inputs, dict):
            inputs = _content(inputs)
        elif isinstance(inputs, (list, tuple)):
            inputs = [_content(each) for each in inputs]
        images = isinstance(self.model, models.TwoTowers)
        one, texts = self.model._inputs(inputs) if images else one_or_several(inputs, "inputs")
        return one, list(texts)

    def _of_tokens(
        self,
        model: Any,
        texts: Any,
        dim: int | None,
        prompt: str,
        batch_size: int,
        show_progress_bar: bool | None,
    ) -> Iterator[dict[str, Array]]:
        """Yield the ids, the vectors of tokens and the vector of each text."""
        if isinstance(model, models.TwoTowers):
            raise ValueError("(): output_value is for texts of models without images; expected the usual one")
        settings, dim = model.sentences, self._dim(dim)
        skipped = 0 if settings.pooling.include_prompt or not prompt else model.text.prompt_length(prompt)
        encoded = calls(model.text.encoded(prompt + text for text in texts), batch_size)
        for ids in watched(encoded, bool(show_progress_bar), texts):
            rows, cu_seqlens = model.hidden(ids)
            vectors = settings.vectors(rows, cu_seqlens, skipped)[:, :dim]
            rows = rows.astype(lane_dtype(rows.dtype), copy=False)
            for each, vector, (begin, end) in zip(ids, vectors, pairwise(cu_seqlens.tolist()), strict=True):
                mask = np.ones(len(each), np.int64)
                found = {"input_ids": each, "attention_mask": mask, _TOKENS: rows[begin:end].copy()}
                yield {**found, _VECTORS: vector}


def _content(x: Any) -> Any:
    """The text of {"text": text}, the image of {"image": image}; anything else as it is."""
    if not isinstance(x, dict):
        return x
    if len(x) != 1 or not x.keys() <= {"text", "image"}:
        there = ", ".join(map(str, x))
        raise ValueError(f"(): inputs has a dict with {there}; expected 'text' or 'image' alone")
    return next(iter(x.values()))


class SparseEncoder(Vectors):
    """`sentence_transformers.SparseEncoder` for inference, over `fastattn.models.SparseEncoder`.

    Parameters
    ----------
    model_name_or_path, **options
        As in `_base.Base`.
    similarity_fn_name : {"cosine", "dot", "euclidean", "manhattan"}, optional
        Measure of `similarity`; by default as the folder says.
    max_active_dims : int, optional
        Number of weights to keep in each vector; by default as the folder says. Both can be set later.
    """

    _kinds = (models.SparseEncoder,)

    @renamed(tokenizer_kwargs="processor_kwargs")
    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | None = None,
        *,
        similarity_fn_name: Any = None,
        max_active_dims: int | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(model_name_or_path, options, similarity_fn_name)
        most = self.model.pooling.most if max_active_dims is None else max_active_dims
        self.max_active_dims: int | None = most

    @renamed(sentences="inputs")
    @named("encode")
    def encode(
        self,
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool | None = None,
        convert_to_sparse_tensor: bool = True,
        save_to_cpu: bool = False,
        device: Any = None,
        max_active_dims: int | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
        **others: Any,
    ) -> Any:
        """Make a sparse vector of each text.

        Parameters
        ----------
        inputs, prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size
            As in `SentenceTransformer.encode`.
        convert_to_tensor, convert_to_sparse_tensor : bool, optional
            By default the result is an array of scipy. With `convert_to_tensor` True it is a tensor of torch,
            with False a list of tensors; dense ones where `convert_to_sparse_tensor` is false.
        save_to_cpu : bool, optional
            No effect.
        max_active_dims : int, optional
            By default the attribute.

        Returns
        -------
        scipy.sparse.csr_array, (n, vocab_size), or coo_array, (vocab_size,) for one str
            Or tensors of torch.
        """
        call = self._call(
            SparseEncoder.encode, prompt_name, prompt, batch_size, show_progress_bar, device, others
        )
        most = self.max_active_dims if max_active_dims is None else max_active_dims
        most = self.get_embedding_dimension() if most is None else most
        one, texts = one_or_several(inputs, "inputs")
        model = model_of(self.model, others.get("task"), optional=True)
        found = model.encode(texts, max_active_dims=most, **call)
        if convert_to_tensor is None and convert_to_sparse_tensor:
            return _row(found) if one else found
        tensor = _tensor(found if found.shape[0] else found[:, :0], convert_to_sparse_tensor)
        if one:
            return tensor[0]
        return list(tensor) if convert_to_tensor is False else tensor

    @named("decode")
    def decode(self, embeddings: Any, top_k: int | None = None) -> Any:
        """Tokens of each vector and their weights, largest first; one list for one vector."""
        rows, one, _ = _rows(embeddings)
        found = self.model.decode(rows, top_k if top_k is None else integer("top_k", top_k, 1))
        return found[0] if one else found

    @staticmethod
    @named("sparsity")
    def sparsity(embeddings: Any) -> dict[str, float]:
        """Mean number of nonzero weights, "active_dims", and fraction of zeros, "sparsity_ratio"."""
        rows, _, _ = _rows(embeddings)
        if 0 in rows.shape:
            return {"active_dims": 0.0, "sparsity_ratio": 1.0}
        active = float(rows.count_nonzero() / rows.shape[0])
        return {"active_dims": active, "sparsity_ratio": 1.0 - active / rows.shape[1]}

    @staticmethod
    @named("intersection")
    def intersection(embeddings_1: Any, embeddings_2: Any) -> Any:
        """Elementwise product of one sparse vector with another one, or with several."""
        (x, one, first), (y, single, second) = _rows(embeddings_1), _rows(embeddings_2)
        if not one or x.shape[1] != y.shape[1]:
            raise wrong_shape("embeddings_1", x, f"({y.shape[1]},)")
        found = require("scipy.sparse").csr_array(y.multiply(np.asarray(x.toarray())))
        found.eliminate_zeros()
        if first or second:
            tensor = _tensor(found, True)
            return tensor[0] if single else tensor
        return _row(found) if single else found

    def _compared(self, a: Any, b: Any, pairwise: bool) -> Any:
        (x, one, first), (y, other, second) = _rows(a), _rows(b)
        found = _sparse.compared(self.similarity_fn_name, x, y, pairwise)
        found = found[0] if pairwise and one and other else found
        return torch_of("a tensor").as_tensor(found) if first or second else found


def _row(found: Any) -> Any:
    """The only row of a csr_array, as a vector (features,)."""
    place = (found.data, (found.indices,))
    return require("scipy.sparse").coo_array(place, shape=found.shape[1:])


def _rows(x: Any) -> tuple[Any, bool, bool]:
    """Vectors of any library as a csr_array (n, features); whether `x` was one, and whether of torch."""
    sparse, of_torch = require("scipy.sparse"), is_tensor(x)
    if isinstance(x, (list, tuple)):
        parts = [_rows(each) for each in x]
        rows = sparse.vstack([part[0] for part in parts], format="csr") if parts else sparse.csr_array((0, 0))
        return sparse.csr_array(rows), False, any(part[2] for part in parts)
    if of_torch:
        x = x.detach().cpu()
        if x.is_sparse:
            x = x.coalesce()
            x = sparse.coo_array((x.values().numpy(), tuple(x.indices().numpy())), shape=tuple(x.shape))
        else:
            x = x.to_dense().numpy()
    if x.ndim not in (1, 2):
        raise wrong_shape("embeddings", x, "(n, vocab_size) or (vocab_size,)")
    one = x.ndim == 1
    return sparse.csr_array(x.reshape(1, -1) if one else x), one, of_torch


def _tensor(found: Any, sparse: bool) -> Any:
    """Rows of scipy as a tensor of torch."""
    torch, rows = torch_of("convert_to_tensor=True"), found.tocoo()
    if not found.shape[1]:  # as sentence-transformers makes it of no texts
        return torch.tensor([]).to_sparse() if sparse else torch.tensor([])
    places = torch.from_numpy(np.stack([rows.row, rows.col]).astype(np.int64))
    values = torch.from_numpy(rows.data)
    tensor = torch.sparse_coo_tensor(places, values, found.shape, is_coalesced=True)
    return tensor if sparse else tensor.to_dense()


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
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
    ) -> list[dict[str, Any]]:
        """Rank documents by their score with a query, as `fastattn.models.CrossEncoder.rank`.

        The last three arguments are of version 5 and have no effect: scores are floats of one label.
        """
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
