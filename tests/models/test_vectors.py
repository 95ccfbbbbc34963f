"""Vectors after encoding: fewer bits, similarities."""

import numpy as np
import pytest
import tiny_models as tiny
from model_folders import write_settings

from fastattn import models
from fastattn.models import quantize_embeddings

RNG = np.random.default_rng(1)
ROW = np.zeros((1, 3))


@pytest.fixture
def folder(tmp_path):
    """The folder of a tiny BERT."""
    tiny.write(tmp_path, "bert")
    return tmp_path


def test_quantize_embeddings():
    x = np.array([[0.0, 1.0], [255.0, 1.0], [127.5, 1.0]], np.float32)
    np.testing.assert_array_equal(quantize_embeddings(x, "uint8"), [[0, 0], [255, 0], [127, 0]])
    np.testing.assert_array_equal(quantize_embeddings(x, "int8"), [[-128, -128], [127, -128], [-1, -128]])
    ranges = [[100.0, 0.0], [227.5, 2.0]]  # what lies beyond is clipped
    got = quantize_embeddings(x, "uint8", ranges)
    np.testing.assert_array_equal(got, [[0, 127], [255, 127], [55, 127]])
    np.testing.assert_array_equal(quantize_embeddings(x[0], "uint8", ranges), got[0])
    np.testing.assert_array_equal(quantize_embeddings(x, "uint8", calibration_embeddings=ranges), got)
    np.testing.assert_array_equal(quantize_embeddings(x[:1], "uint8", calibration_embeddings=ranges), got[:1])
    bits = np.array([[1.0, -1, 0, 2, -3, 4, -5, -6, 7], [-1] * 8 + [0]])
    np.testing.assert_array_equal(quantize_embeddings(bits, "ubinary"), [[0b10010100, 0b10000000], [0, 0]])
    np.testing.assert_array_equal(quantize_embeddings(bits, "binary"), [[20, 0], [-128, -128]])
    assert quantize_embeddings(x.astype(np.float64), "float32").dtype == np.float32


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, r"embeddings has dtype int64; expected float32", {"embeddings": [[1, 2]]}),
        (ValueError, r"embeddings has shape \(1, 1, 1\); expected \(n, fea", {"embeddings": [[[1.0]]]}),
        (ValueError, r"precision is 'int4'; expected one of float32, int8", {"precision": "int4"}),
        (ValueError, r"embeddings has one item for precision 'int8'", {"embeddings": [[1.0, 2.0]]}),
        (ValueError, r"embeddings has one item for precision 'int8'", {"embeddings": [1.0, 2.0]}),
        (ValueError, r"ranges has shape \(1, 2\); expected \(2, 2\)", {"ranges": [[1.0, 2.0]]}),
        (ValueError, r"ranges has a minimum above the maximum", {"ranges": [[1.0, 2.0], [2.0, 1.0]]}),
        (ValueError, r"ranges has values that are not finite", {"ranges": [[1.0, np.nan], [2.0, 1.0]]}),
        (ValueError, r"embeddings has values that are not f", {"embeddings": [[1.0, np.inf], [2.0, 1.0]]}),
        (ValueError, r"calibration_embeddings has shape \(2,\)", {"calibration_embeddings": [1.0, 2.0]}),
        (ValueError, r"calibration_embeddings has shape \(2, 1", {"calibration_embeddings": [[1.0], [2.0]]}),
        (ValueError, r"calibration_embeddings has one item for", {"calibration_embeddings": [[1.0, 2.0]]}),
        (ValueError, r"expected one of them",
            {"calibration_embeddings": [[1.0, 2.0]] * 2, "ranges": [[1.0, 2.0]] * 2}),
        (ValueError, r"ranges is given for binary", {"precision": "binary", "ranges": [[1.0, 2.0]] * 2}),
    ],
)  # fmt: skip
def test_quantize_embeddings_refuses(error, message, arguments):
    with pytest.raises(error, match=r"^quantize_embeddings\(\): .*" + message):
        quantize_embeddings(**{"embeddings": [[1.0, 2.0], [0.0, 1.0]], "precision": "int8", **arguments})


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(kind, folder, implementation):
    write_settings(folder, similarity_fn_name=kind)
    model = models.load(folder)
    a, b = RNG.standard_normal((5, 24)), RNG.standard_normal((3, 24))
    formula = {
        "cosine": lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y),
        "dot": lambda x, y: x @ y,
        "euclidean": lambda x, y: -np.linalg.norm(x - y),
        "manhattan": lambda x, y: -np.abs(x - y).sum(),
    }[kind]
    expected = np.array([[formula(x, y) for y in b] for x in a])
    np.testing.assert_allclose(model.similarity(a, b), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(model.similarity(b, a), expected.T, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(model.similarity(a[0], b), expected[:1], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(model.similarity_pairwise(a[:3], b), np.diag(expected), rtol=1e-10, atol=1e-12)
    assert model.similarity_pairwise(a[0], b[0]) == pytest.approx(expected[0, 0])
    np.testing.assert_array_equal(model.similarity(a.astype(">f8"), b), model.similarity(a, b))
    assert model.similarity(a.astype(np.float32), b.astype(np.float16)).dtype == np.float32
    assert model.similarity(a[:0], b).shape == (0, 3)
    codes = quantize_embeddings(a, "int8")
    whole = np.array([[formula(x, y) for y in codes.astype(float)] for x in codes.astype(float)])
    np.testing.assert_allclose(model.similarity(codes, codes), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("n", [2, 9])
def test_numbers_that_are_not_finite_stay_with_their_vectors(folder, n, odd):
    model = models.load(folder)
    x, y = RNG.standard_normal((5, 24), np.float32), RNG.standard_normal((n, 24), np.float32)
    expected = model.similarity(x, y)
    y[1, 3] = odd
    got = model.similarity(x, y)
    assert np.isnan(got[:, 1]).all()
    np.testing.assert_array_equal(np.delete(got, 1, 1), np.delete(expected, 1, 1))


def test_similarities_refuse(folder):
    model = models.load(folder)
    for call, a, b, error, message in (
        (
            "similarity",
            ROW,
            np.zeros((2, 4)),
            ValueError,
            r"embeddings2 has shape \(2, 4\); expected \(m, 3\)",
        ),
        ("similarity_pairwise", ROW, np.zeros((2, 3)), ValueError, r"embeddings2 has shape \(2, 3\); exp"),
        ("similarity", [[[1.0]]], [[1.0]], ValueError, r"embeddings1 has shape \(1, 1, 1\); expected \(n, f"),
        ("similarity", ["x"], [[1.0]], TypeError, r"embeddings1 has dtype <U1; expected"),
    ):
        with pytest.raises(error, match=rf"{call}\(\): {message}"):
            getattr(model, call)(a, b)


def test_python_s_own_errors_name_the_model(folder):
    """And not the private class that has the method."""
    model = models.load(folder)
    with pytest.raises(TypeError, match=r"^Encoder\.similarity\(\) missing 1 required"):
        model.similarity(ROW)
    with pytest.raises(TypeError, match=r"^Encoder\.encode_query\(\) takes 2 positional"):
        model.encode_query("a", "query")
