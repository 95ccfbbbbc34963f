"""Models with sparse indexers: the same results as transformers', and no scores of all keys."""

import contextlib
import importlib
from typing import NamedTuple

import pytest
import torch
import transformers
from tiny_transformers import ready
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastattn.torch as ft
from fastattn.torch import _indexers

pytestmark = pytest.mark.usefixtures("own_functions")
FAMILIES = [
    "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "AXK2ForCausalLM", "MistralLarge4TextModel",
    "HYV4ForCausalLM", "DeepseekV4ForCausalLM", "Glm5NextTextModel",
]  # fmt: skip
# Families to whose attention transformers gives a mask of floats: of these, only indexers are watched.
MASKS = ("HYV4ForCausalLM", "DeepseekV4ForCausalLM", "Glm5NextTextModel")


class Largest(TorchFunctionMode):
    """The most numbers of a tensor of floats that some function returns."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.most = max(self.most, x.numel())
        return result


@pytest.fixture
def selected(monkeypatch):
    """How often keys were selected here."""
    found, select = [], _indexers._select
    monkeypatch.setattr(_indexers, "_select", lambda *args: found.append(1) or select(*args))
    return found


def model_of(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    cls = getattr(transformers, name)
    attentions = {x for x in vars(importlib.import_module(cls.__module__)) if x.endswith("Attention")}
    return ready(cls, attentions)[0]


class Chosen(NamedTuple):
    """A result of topk."""

    values: torch.Tensor
    indices: torch.Tensor


@pytest.fixture(autouse=True)
def first_of_equal(monkeypatch):
    """Let torch take the first of equal scores, as ours does: after ReLU many are 0."""

    def topk(x, k, dim=-1, **_):
        values, indices = x.sort(dim=dim, descending=True, stable=True)
        return Chosen(values.narrow(dim, 0, k), indices.narrow(dim, 0, k))

    monkeypatch.setattr(torch.Tensor, "topk", topk)


def test_indexers_are_transformers_where_a_mode_records(selected):
    model, ids = model_of("DeepseekV32ForCausalLM"), torch.arange(5, 55)[None]
    with ft.register(measure=False):
        with FlopCounterMode(display=False):
            run(model, "fastattn", ids)
        assert not selected
        run(model, "fastattn", ids)
        assert selected


def assert_near(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def run(model, implementation, *args, **options):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(*args, use_cache=False, **options)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_results_without_all_scores(name, selected):
    model, length = model_of(name), 400
    ids = torch.randint(5, 90, (1, length), generator=torch.Generator().manual_seed(0))
    expected = run(model, "eager", ids)
    largest = Largest()
    indexers = [x for x in model.modules() if type(x).__name__.endswith("Indexer")]
    for part in indexers if name in MASKS else [model]:
        part.register_forward_pre_hook(lambda *_: largest.__enter__() and None)
        part.register_forward_hook(lambda *_: largest.__exit__(None, None, None))
    with ft.register():
        got = run(model, "fastattn", ids)
    assert selected
    assert_near(got, expected)
    assert 0 < largest.most < length * length


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_and_other_implementations(name, selected):
    """Right padding leaves the first keys; left padding is computed as the model says."""
    model = model_of(name)
    ids = torch.randint(5, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    for pad in (slice(30, 40), slice(0, 9)):
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[1, pad] = 0
        some = mask.bool()
        for implementation in ("eager", "fastattn"):
            expected = run(model, "eager", ids, attention_mask=mask)
            with ft.register():
                got = run(model, implementation, ids, attention_mask=mask)
            assert_near(got[some], expected[some])
    assert selected


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name, selected):
    model = model_of(name)
    model.set_attn_implementation("eager")
    wanted, found = [x for x in model.parameters() if x.ndim > 1], []
    ids = torch.randint(5, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    for use in (contextlib.nullcontext, ft.register):
        with use():
            loss = model(ids, use_cache=False)[0].square().mean()
        found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
    assert selected
    for theirs, ours in zip(*found, strict=True):
        if theirs is None:
            assert ours is None
        else:
            assert_near(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast_is_transformers(name, selected):
    model = model_of(name)
    ids = torch.randint(5, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(model, "eager", ids)
        with ft.register():
            got = run(model, "eager", ids)
    assert not selected
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.endswith("CausalLM")])
def test_generation(name, selected):
    model = model_of(name)
    ids = torch.randint(5, 90, (2, 17), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    model.set_attn_implementation("eager")
    expected = model.generate(ids, output_logits=True, **options).logits
    with ft.register():
        model.set_attn_implementation("fastattn")
        got = model.generate(ids, output_logits=True, **options).logits
    assert selected
    for x, y in zip(got, expected, strict=True):
        assert_near(x, y)


def test_what_is_timed_beside_ours_makes_scores_each_time(monkeypatch):
    made, found = [], []
    computed = _indexers._Scores._computed
    monkeypatch.setattr(_indexers._Scores, "_computed", lambda self: made.append(1) or computed(self))

    def gains(key, pair):
        (theirs, ours), before = pair(), len(made)
        theirs(), theirs(), ours()
        found.append(len(made) - before)
        return True

    monkeypatch.setattr(_indexers, "gains", gains)
    model, ids = model_of("DeepseekV32ForCausalLM"), torch.randint(5, 90, (1, 40))
    with ft.register():
        run(model, "eager", ids)
    assert set(found) == {2}
    assert len(made) == sum(found)


def test_what_else_is_asked_of_a_promise():
    """It becomes the tensor that it stands for."""
    torch.manual_seed(0)
    q, k, weights = torch.randn(2, 5, 3, 8), torch.randn(2, 1, 8, 7), torch.rand(2, 5, 1, 3)
    scores = torch.matmul(q, k)
    early, late = torch.ones(1, 5, 7, dtype=torch.bool).triu(2), torch.rand(2, 1, 3, 7) < 0.3
    with _indexers._Promising(False):
        made = torch.matmul(q, k)
        assert type(made) is _indexers._Scores
        assert made.shape == scores.shape
        for function in (
            lambda x: x[:, 1], lambda x: x - 1.0, lambda x: 2 * x, lambda x: x / 2.0, lambda x: -x,
            lambda x: x > 0, lambda x: x.amax(-1), lambda x: torch.softmax(x, -1), lambda x: x + 1.0,
            lambda x: x * weights[:, :, 0, :, None], lambda x: (x.relu() * 0.5).sum(2),
            lambda x: x.transpose(1, 2), lambda x: x.topk(2).values,
            lambda x: torch.matmul(weights, x).squeeze(-2), lambda x: x == 0, lambda x: x != 0,
            lambda x: x**2,
            lambda x: torch.softmax(input=x, dim=-1), lambda x: torch.cat([x, x], -1), lambda x: x.squeeze(),
            lambda x: torch.relu(input=x), lambda x: x.topk(1)[1], lambda x: torch.stack((x,)),
            lambda x: torch.matmul(weights, x.relu()).squeeze(-2) + 1.0,
            lambda x: torch.matmul(weights, torch.relu(x)).topk(1).values,
            lambda x: x.relu() * 0.5 * weights.mT, lambda x: (x * 0.5 * 0.5).relu(),
            lambda x: (x.relu() * 0.5 * weights.mT).sum(dim=2) + 1.0, lambda x: x.relu().sum(2),
            lambda x: (x.relu() * weights.mT).sum(dim=2).masked_fill(early, torch.finfo(x.dtype).min) + 0.0,
            lambda x: (x.relu() * weights.mT).sum(dim=2).masked_fill(early, 0.5).topk(2).values,
            lambda x: x.view(2, 5, 21), lambda x: torch.nn.functional.pad(x, (0, 1)),
            lambda x: x.masked_fill(late, 0.5).amax(2),
        ):  # fmt: skip
            torch.testing.assert_close(function(made), function(scores))
        with pytest.raises(RuntimeError):  # there are 7 keys
            torch.matmul(weights, made.relu()).squeeze(-2).topk(8)


def test_what_is_written_to_a_promise_stays():
    torch.manual_seed(0)
    q, k, weights = torch.randn(1, 6, 2, 8), torch.randn(1, 1, 8, 6), torch.rand(1, 6, 1, 2)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)[None]

    def forward(leaks=False):
        scores = torch.matmul(weights, torch.relu(torch.matmul(q, k))).squeeze(-2)
        if leaks:
            return scores
        scores.masked_fill_(hidden, -torch.inf)
        scores[:, 0, 0] = 9.0
        return scores.topk(2).values

    ours = _indexers.with_promises(forward, lambda: False)
    torch.testing.assert_close(ours(), forward())
    assert type(ours(leaks=True)) is torch.Tensor
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(), forward(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        _indexers.with_promises(lambda: torch.matmul(q, k[:, :, 1:]), lambda: False)()
