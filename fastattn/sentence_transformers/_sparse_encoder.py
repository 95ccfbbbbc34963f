"""The class SparseEncoder, over the model of `fastattn.models` with the same name."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fastattn import models
from fastattn._args.errors import named, wrong_shape
from fastattn._args.types import Unpack
from fastattn._args.values import integer
from fastattn.models import _sparse
from fastattn.models._encode_calls import model_of, one_or_several
from fastattn.models._files import require
from fastattn.sentence_transformers._base import (
    Options,
    Vectors,
    is_tensor,
    renamed,
    torch_of,
)


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
