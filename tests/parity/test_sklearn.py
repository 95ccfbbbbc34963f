"""The transformer of scikit-learn: in pipelines and cross-validations, copied, pickled, with bad input."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tiny_models as tiny
from sklearn.base import clone
from sklearn.exceptions import SkipTestWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models
from fastattn.models import ModelError
from fastattn.sklearn import SentenceVectorizer

LABELS = [0, 1, 0, 1, 0] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(folder, "bert")
    write_tokenizer(folder)
    return folder


def test_vectors_are_those_of_encode(folder):
    encoder = models.load(folder)
    for options in (
        {},
        {"normalize_embeddings": True, "truncate_dim": 5, "batch_size": 2},
        {"prompt": "the cat "},
        {"dtype": "float64"},
    ):
        vectorizer = SentenceVectorizer(folder, **options)
        dtype = options.pop("dtype", "float32")
        expected = (encoder if dtype == "float32" else models.load(folder, dtype=dtype)).encode(
            TEXTS, **options
        )
        for texts in (TEXTS, tuple(TEXTS), np.array(TEXTS), np.array(TEXTS, object), iter(TEXTS)):
            found = vectorizer.fit_transform(texts)
            assert found.dtype == dtype
            assert np.array_equal(found, expected)
        assert np.array_equal(SentenceVectorizer(folder, dtype=dtype, **options).transform(TEXTS), expected)


def test_pipeline_and_cross_validation(folder):
    texts = [f"{text} {'cat' if label else 'tree'}" for text, label in zip(TEXTS * 4, LABELS, strict=True)]
    pipeline = make_pipeline(SentenceVectorizer(folder), LogisticRegression(C=100.0, max_iter=1000))
    assert pipeline.fit(texts, LABELS).score(texts, LABELS) == 1
    scores = cross_val_score(pipeline, texts, LABELS, cv=2)
    assert scores.shape == (2,)
    assert scores.mean() > 0.7
    grid = {
        "sentencevectorizer__normalize_embeddings": [False, True],
        "sentencevectorizer__truncate_dim": [2, None],
    }
    found = GridSearchCV(pipeline, grid, cv=2).fit(texts, LABELS)
    assert set(found.best_params_) == set(grid)


def test_copies_hold_no_weights(folder):
    fitted = SentenceVectorizer(folder, truncate_dim=4).fit(TEXTS)
    expected = fitted.transform(TEXTS)
    size = len(pickle.dumps(models.load(folder).encode(TEXTS)))
    for copied in (clone(fitted), copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        assert copied.get_params() == fitted.get_params()
        assert "_kept" not in vars(copied)
        assert np.array_equal(copied.transform(TEXTS), expected)
    assert len(pickle.dumps(fitted)) < size + 1000
    # A pickle goes by the folder's name: where there is none, the error names it.
    lost = pickle.loads(pickle.dumps(SentenceVectorizer(folder.with_name("lost"))))
    with pytest.raises(ModelError, match=r"lost is no folder"):
        lost.transform(TEXTS)


def test_in_another_process(folder, tmp_path):
    path = tmp_path / "vectorizer.pickle"
    path.write_bytes(pickle.dumps(SentenceVectorizer(folder)))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).transform(['the cat']).shape)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["(1,", "24)"]


def test_a_parameter_that_changes_counts(folder):
    vectorizer = SentenceVectorizer(folder).fit(TEXTS)
    model = vectorizer._kept[1]
    assert vectorizer.set_params(truncate_dim=3).transform(TEXTS).shape == (5, 3)
    assert vectorizer._kept[1] is model
    assert vectorizer.set_params(dtype="float64").transform(TEXTS).dtype == np.float64
    with pytest.raises(ModelError, match="nowhere is no folder"):
        vectorizer.set_params(folder="nowhere").transform(TEXTS)


def test_fit_loads_a_model_that_changed(tmp_path):
    write_tokenizer(tmp_path)
    tiny.write(tmp_path, "bert")
    vectorizer = SentenceVectorizer(tmp_path)
    before = vectorizer.fit_transform(TEXTS)
    tiny.write(tmp_path, "bert", {name: -x for name, x in tiny.tensors("bert", tiny.CONFIGS["bert"]).items()})
    assert np.array_equal(vectorizer.transform(TEXTS), before)  # as it was fitted
    assert np.array_equal(vectorizer.fit(TEXTS).transform(TEXTS), models.load(tmp_path).encode(TEXTS))
    assert not np.array_equal(vectorizer.transform(TEXTS), before)


def test_names_of_features(folder):
    vectorizer = SentenceVectorizer(folder, truncate_dim=2)
    assert vectorizer.get_feature_names_out().tolist() == ["sentencevectorizer0", "sentencevectorizer1"]
    assert len(SentenceVectorizer(folder).get_feature_names_out()) == 24


def test_set_output(folder):
    """A DataFrame, where pandas is installed; scikit-learn's own error where it is not."""
    vectorizer = SentenceVectorizer(folder, truncate_dim=2).set_output(transform="pandas")
    try:
        import pandas as pd
    except ImportError:
        with pytest.raises(ImportError, match="requires pandas"):
            vectorizer.transform(TEXTS)
        return
    column = pd.Series(TEXTS, index=range(10, 15))
    table = vectorizer.fit_transform(column)
    assert table.columns.tolist() == ["sentencevectorizer0", "sentencevectorizer1"]
    assert table.index.tolist() == column.index.tolist()


WRONG = {
    "one text": ("the cat", ValueError, r"X is 'the cat'; expected several texts"),
    "a table": (np.array([["a"], ["b"]]), ValueError, r"X has 2 dimensions; expected several texts"),
    "numbers": ([1, 2], TypeError, r"^transform\(\): X"),
    "a missing one": (["a", None], TypeError, r"^transform\(\): X"),
    "an array of numbers": (np.array([1, 2]), TypeError, r"^transform\(\): X\[0\] is"),
    "an array with a missing one": (
        np.array(["a", None], object),
        TypeError,
        r"^transform\(\): X\[1\] is None",
    ),
    "no text at all": (3, TypeError, r"^transform\(\): X"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_texts(name, folder):
    texts, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        SentenceVectorizer(folder).transform(texts)
    with pytest.raises(error, match=r"^fit\(\): X"):
        SentenceVectorizer(folder).fit(texts)


def test_wrong_parameters(folder, tmp_path):
    for options, message in (
        ({"batch_size": 0}, r"batch_size is 0; expected at least 1"),
        ({"truncate_dim": "all"}, r"truncate_dim is 'all'; expected an integer"),
        ({"prompt_name": "poem"}, r"prompt_name is 'poem'; expected one of"),
        ({"dtype": "int8"}, r"load\(\): dtype is 'int8'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            SentenceVectorizer(folder, **options).fit(TEXTS)
    with pytest.raises(TypeError, match=r"folder is of type int; expected a path"):
        SentenceVectorizer(3).fit(TEXTS)
    tiny.write(tmp_path / "gpt2", "gpt2")
    with pytest.raises(
        TypeError, match=r"^fit\(\): the model of folder is of type Decoder; expected one that makes"
    ):
        SentenceVectorizer(tmp_path / "gpt2").fit(TEXTS)


# scikit-learn's checks of estimators want numbers of every other: they give tables of them, not texts.
CHECKS = (
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_set_params",
    "check_valid_tag_types",
)


@pytest.mark.parametrize("check", CHECKS)
def test_checks_of_estimators(check, folder):
    getattr(estimator_checks, check)("SentenceVectorizer", SentenceVectorizer(str(folder)))


def test_what_check_estimator_runs(folder):
    """All that it has for texts passes."""
    with pytest.warns(SkipTestWarning, match="requires input"):
        found = estimator_checks.check_estimator(SentenceVectorizer(str(folder)))
    assert {check["status"] for check in found} == {"passed"}


def test_it_is_imported_only_when_asked_for():
    code = "import sys, fastattn, fastattn.models; sys.exit('sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys; sys.modules['sklearn.base'] = None; import fastattn.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: fastattn.sklearn needs scikit-learn: pip install scikit-learn" in done.stderr
