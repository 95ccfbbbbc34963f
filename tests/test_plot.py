"""Pictures: what is drawn, and where."""

import sys

import numpy as np
import pytest

from fastattn import masks, plot

matplotlib = pytest.importorskip("matplotlib", reason="of the extras [plot] and [test]")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - after the choice of what draws

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot.close("all")


def drawn(ax):
    (image,) = ax.images
    return np.asarray(image.get_array())


def test_one_map():
    weights = RNG.random((3, 5)).astype(np.float32)
    ax = plot.attention_map(weights, tokens=list("abcde"))
    np.testing.assert_array_equal(drawn(ax), weights)
    assert [label.get_text() for label in ax.get_xticklabels()] == list("abcde")
    assert [label.get_text() for label in ax.get_yticklabels()] != list("abc")
    same = plot.attention_map(RNG.random((2, 2)), tokens=["x", "y"], ax=ax)
    assert same is ax
    assert [label.get_text() for label in ax.get_yticklabels()] == ["x", "y"]


@pytest.mark.parametrize("heads", [1, 2, 5, 12])
def test_heads_in_a_grid(heads):
    weights = RNG.random((heads, 4, 4))
    axes = plot.attention_map(weights)
    assert axes.shape == (heads,)
    for ax, of_head in zip(axes, weights, strict=True):
        np.testing.assert_array_equal(drawn(ax), of_head)
    assert len(axes[0].figure.axes) == heads
    figure, given = pyplot.subplots(1, heads)
    assert all(ax.figure is figure for ax in plot.attention_map(weights, ax=given))
    axes[0].figure.canvas.draw()


def test_mask_block_by_block():
    attend = RNG.random((10, 7)) < 0.5
    ax = plot.mask(attend, 10, 7, block=4)
    expected = [[attend[i : i + 4, j : j + 4].mean() for j in (0, 4)] for i in (0, 4, 8)]
    np.testing.assert_allclose(drawn(ax), expected)
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 7), (10, 0))
    structure = masks.causal() & masks.window(3)
    np.testing.assert_array_equal(drawn(plot.mask(structure, 20)), structure.to_array(20))
    assert drawn(plot.mask(structure, 1000)).shape == (125, 125)
    np.testing.assert_array_equal(
        drawn(plot.mask(masks.causal(), 3, 5, q_offset=0)), masks.causal().to_array(3, 5, q_offset=0)
    )


def test_entropy():
    entropies = RNG.random((6, 4))
    ax = plot.entropy(entropies)
    np.testing.assert_array_equal(drawn(ax), entropies)
    assert (ax.get_xlabel(), ax.get_ylabel(), len(ax.figure.axes)) == ("head", "layer", 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plot.attention_map(np.ones(3)), ValueError, r"^attention_map\(\): weights has shape \(3,\)"),
        (lambda: plot.attention_map(np.ones((0, 3))), ValueError, r"weights has shape \(0, 3\)"),
        (lambda: plot.attention_map([["a"]]), TypeError, "weights has dtype <U1; expected real numbers"),
        (
            lambda: plot.attention_map(np.ones((2, 3)), tokens="ab"),
            ValueError,
            "tokens has length 2; expected 3",
        ),
        (lambda: plot.attention_map(np.ones((2, 3)), tokens=3), TypeError, "tokens is of type int; expected"),
        (lambda: plot.attention_map(np.ones((2, 3)), ax=3), ValueError, "ax is 3; expected an Axes"),
        (lambda: plot.attention_map(np.ones((2, 3, 3)), ax=[3]), ValueError, r"ax is \[3\]; expected 2 Axes"),
        (lambda: plot.mask(np.ones((3, 3)), 3), TypeError, "mask has dtype float64; expected bool or a mask"),
        (lambda: plot.mask(np.ones((3, 3), bool), 3, 4), ValueError, r"expected \(len_q, len_k\) = \(3, 4\)"),
        (lambda: plot.mask(masks.causal, 3), TypeError, r"mask is causal; expected .* masks.causal\(\)"),
        (lambda: plot.mask(masks.documents([1]), 3), ValueError, r"^mask\(\): ids of documents\(\) has"),
        (lambda: plot.mask(masks.causal(), 3, q_offset="a"), TypeError, r"^mask\(\): q_offset has dtype"),
        (lambda: plot.mask(masks.causal(), 0), ValueError, "len_q is 0; expected at least 1"),
        (lambda: plot.mask(masks.causal(), 5, block=0), ValueError, "block is 0; expected at least 1"),
        (lambda: plot.entropy(np.ones(3)), ValueError, r"^entropy\(\): entropies has shape \(3,\)"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"entropy\(\): drawing needs matplotlib: pip install matplotlib"):
        plot.entropy(np.ones((2, 2)))


def test_selected_keys():
    lists = np.array([[2, 0, -1], [1, 1, 1], [4, 2, -1]])
    ax = plot.selected(lists, 9, block_size=2)
    np.testing.assert_allclose(drawn(ax), [[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 1]])
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 9), (3, 0))
    many = np.broadcast_to(np.arange(0, 1000, 2), (300, 500))
    np.testing.assert_allclose(drawn(plot.selected(many, 1000))[:100], 0.5)
    for bad, message in (
        (lists + 3, r"selected\(\): selected has 7; expected -1 to 4"),
        (lists - 1.0, r"selected\(\): selected has dtype float64"),
        (lists[0], r"selected\(\): selected has shape \(3,\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            plot.selected(bad, 9, block_size=2)
