"""A transformer of scikit-learn that makes vectors of texts: the extra ``[sklearn]``.

It is imported only when asked for. docs/frameworks.md shows it in a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastattn._args.errors import named, wrong_type
from fastattn._args.types import Array, DTypeLike, Rounding
from fastattn._args.values import short
from fastattn.models import load
from fastattn.models._encoder import Encoder
from fastattn.models._text import strings

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
except ImportError as error:
    raise ImportError(f"fastattn.sklearn needs scikit-learn: pip install scikit-learn ({error})") from error

if TYPE_CHECKING:
    import os


__all__ = ["SentenceVectorizer"]

# What a model is loaded with; the other parameters are those of a call.
_LOADED = ("folder", "dtype", "weights_dtype", "activations")


def __dir__() -> list[str]:
    return __all__


class SentenceVectorizer(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]  # scikit-learn has no types
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """One vector for each text, by a model of sentence-transformers: `models.load` and `encode`.

    There is nothing to learn: `fit` loads the model, so that what is wrong with the folder shows there, and
    so does `transform` where nobody has called `fit`. Pickles and clones hold the folder's name and the other
    parameters, never weights: where they are used, the folder must be.

    Parameters
    ----------
    folder : path
        As `models.load` takes it.
    prompt_name, prompt, batch_size, show_progress_bar, normalize_embeddings, truncate_dim
        As in `models.Encoder.encode`.
    dtype, weights_dtype, activations
        As in `models.load`.

    Notes
    -----
    A text's vector has the same bits alone and beside others, so that it does not depend on how a
    cross-validation splits the texts.

    Examples
    --------
    >>> from fastattn.sklearn import SentenceVectorizer
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> texts, labels = ["good food", "a bad room", "a good room", "bad food"], [1, 0, 1, 0]
    >>> vectorizer = SentenceVectorizer("all-MiniLM-L6-v2")  # a folder
    >>> classifier = make_pipeline(vectorizer, LogisticRegression()).fit(texts, labels)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        dtype: DTypeLike = "float32",
        weights_dtype: DTypeLike | None = None,
        activations: Rounding | None = None,
    ):
        # scikit-learn reads parameters by their names and sets them likewise: nothing is checked here.
        self.folder = folder
        self.prompt_name = prompt_name
        self.prompt = prompt
        self.batch_size = batch_size
        self.show_progress_bar = show_progress_bar
        self.normalize_embeddings = normalize_embeddings
        self.truncate_dim = truncate_dim
        self.dtype = dtype
        self.weights_dtype = weights_dtype
        self.activations = activations

    @named("fit")
    def fit(self, X: Iterable[str], y: Any = None) -> SentenceVectorizer:
        """Load the model, anew in every call, as its files may have changed; the texts are not encoded.

        Parameters
        ----------
        X : list, array or iterator of str
            Its texts are checked, unless it is an iterator: that is left for `transform`.
        y : ignored

        Returns
        -------
        SentenceVectorizer
            Itself.

        Raises
        ------
        ModelError
            If the folder holds no model, see `models.load`.
        TypeError, ValueError
            If a parameter does not fit, the model makes no vectors of texts, or X holds no texts.
        """
        self._checked(X)
        self.__dict__.pop("_kept", None)
        self._model().encode([], **self._options())
        return self

    @named("transform")
    def transform(self, X: Iterable[str]) -> Array:
        """The vectors of the texts.

        Parameters
        ----------
        X : list, array or iterator of str

        Returns
        -------
        ndarray, (n, features)
            float32, or float64 for a model in float64; a DataFrame if `set_output` says so.

        Raises
        ------
        ModelError, TypeError, ValueError
            As `fit`.
        """
        texts = list(self._checked(X))
        return self._model().encode(texts, **self._options())

    @property
    @named("get_feature_names_out")
    def _n_features_out(self) -> int:
        """Number of names that `get_feature_names_out` makes."""
        return int(self._model().encode([], **self._options()).shape[1])

    def _checked(self, X: Any) -> Iterable[str]:
        """The texts of X, which is no table and no text."""
        dims = getattr(X, "ndim", 1)
        if isinstance(X, str) or dims != 1:
            what = f"has {dims} dimensions" if dims != 1 else f"is {short(X)}"
            raise ValueError(f"(): X {what}; expected several texts, such as a list or a column")
        texts = strings("X", X)
        return texts if isinstance(X, Iterator) else list(texts)

    def _options(self) -> dict[str, Any]:
        return {name: x for name, x in self.get_params(deep=False).items() if name not in _LOADED}

    def _model(self) -> Encoder:
        """The model, loaded when it is first used and when a parameter has changed."""
        key = tuple(getattr(self, name) for name in _LOADED)
        kept: tuple[Any, Encoder] | None = vars(self).get("_kept")
        if kept is None or kept[0] != key:
            folder, dtype, weights_dtype, activations = key
            model: Any = load(folder, dtype=dtype, weights_dtype=weights_dtype, activations=activations)
            if not isinstance(model, Encoder):
                raise wrong_type("the model of folder", model, "one that makes a vector of a text")
            self._kept = kept = key, model
        return kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in super().__getstate__().items() if name != "_kept"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array, tags.requires_fit = True, False, False
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return True
