"""Nothing replaces torch's kernels that does not gain: measured once, or left alone, and said."""

import copy
from types import SimpleNamespace

import pytest
import torch
from implementations import COMPILED
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.integrations import sdpa_attention

import fastattn.torch
from fastattn import ops
from fastattn.torch import _hugging_face, _measure, measured, optimize, patch_sdpa, register

pytestmark = pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")
RATIO = _measure.ratio  # before the fixture of these tests replaces it


@pytest.fixture(autouse=True)
def torch_s_time_over_ours(_ours_gains, monkeypatch):
    """A list of one number, which is what every measurement finds: 2, unless a test changes it."""
    found = [2.0]
    monkeypatch.setattr(_measure, "_ratios", {})
    monkeypatch.setattr(_measure, "ratio", lambda *calls: ([call() for call in calls], found[0])[1])
    return found


def layers():
    return torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 24)).eval()


@pytest.mark.parametrize(("ratio", "packed"), [(0.5, 0), (1.0, 0), (1.04, 0), (1.06, 2), (3.0, 2)])
def test_linear_maps_stay_torch_s_where_packing_gains_nothing(ratio, packed, torch_s_time_over_ours):
    torch_s_time_over_ours[:] = [ratio]
    model = layers()
    with optimize(model) as change:
        assert sum("forward" in vars(module) for module in model) == packed
        expected = (
            "2 nn.Linear packed in float32" if packed else
            "2 nn.Linear left alone: torch is as fast or faster here in float32 than packed in float32"
        )  # fmt: skip
        assert expected in repr(change)
        assert any(key.startswith("linear float32") for key in measured())
    assert not any("forward" in vars(module) for module in model)


@pytest.fixture
def spend(monkeypatch):
    """A function that lets time pass, which stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(_measure, "ratio", RATIO)
    monkeypatch.setattr(_measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def slowed(spend, seconds, function):
    """The function, which takes so long; `seconds` may be a function of its arguments."""

    def call(*args, **options):
        spend(seconds(*args) if callable(seconds) else seconds)
        return function(*args, **options)

    return call


@pytest.mark.parametrize(("dtype", "ours", "said", "rows"), [
    (None, {1: 4e-5, 16: 1.5e-5, 256: 2.1e-5},
     "packed in float32; torch computes calls of 1 row and more than 64", [2, 64]),
    (None, {1: 1e-5, 16: 1e-5, 256: 1.9e-5}, "packed in float32\n", [1, 2, 64, 65]),
    # One precision for all numbers of rows, by the geometric mean.
    ("int8", {1: 4e-5, 16: 1e-5, 256: 1e-5}, "packed in int8\n", [1, 2, 64, 65]),
    ("int8", {1: 4e-5, 16: 1.5e-5, 256: 1.5e-5}, "left alone: torch is as fast or faster", []),
    # Less than 5% of a module's call, and a third of the product alone.
    (None, dict.fromkeys((1, 16, 256), 1.95e-5), "left alone: torch is as fast or faster", []),
])  # fmt: skip
def test_linear_maps_are_timed_as_modules_by_number_of_rows(dtype, ours, said, rows, spend, ran):
    model = layers()
    with pytest.MonkeyPatch.context() as timed:
        timed.setattr(torch.nn.functional, "linear", slowed(spend, 2e-5, torch.nn.functional.linear))
        timed.setattr(ops, "linear", slowed(spend, lambda x, *_: ours[len(x)], ops.linear))
        hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: spend(1e-5))
        change = optimize(model, dtype)
        hook.remove()
    with change, torch.no_grad():
        assert said in f"{change}\n"
        for copied in (model, copy.deepcopy(model)):
            found = []
            for n in (1, 2, 64, 65):
                del ran[:]
                copied(torch.randn(n, 24))
                found += [n] * (ran == ["linear"] * 2)
            assert found == rows


def test_attention_is_timed_with_all_that_is_around_it(spend, ran, monkeypatch):
    """And what is torch's is not measured again by a patch below it."""
    module, q = torch.nn.Module(), torch.randn(1, 4, 30, 16)
    names = {"attention_op": 1.5e-5, "_check_keywords": 1e-5}
    for name, seconds in names.items():
        function = getattr(_hugging_face, name)
        monkeypatch.setattr(_hugging_face, name, slowed(spend, seconds, function))
    theirs = slowed(spend, 2e-5, sdpa_attention.sdpa_attention_forward)
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", theirs)
    with patch_sdpa():
        del ran[:]
        for _ in range(2):
            _hugging_face.attention_forward(module, q, q, q, None, is_causal=False)
            found = list(measured().items())
            assert len(found) == 1
            assert found[0][0].startswith("transformers float32 plain head_dim 16 queries < 32 keys < 32 he")
            assert found[0][1] == "0.80, torch"
            assert ran.count("attention") == 6  # all of them in the measurement


def test_everything_is_replaced_on_request(ran, torch_s_time_over_ours):
    torch_s_time_over_ours[:] = [0.1]
    q = torch.randn(2, 4, 30, 16)
    with optimize(layers(), measure=False) as change:
        sdpa(q, q, q)
        assert "2 nn.Linear packed in float32" in repr(change)
    assert ran.count("attention") == 1
    assert not measured()


@pytest.mark.parametrize(("ratio", "ours"), [(0.7, False), (2.0, True)])
@pytest.mark.parametrize("causal", [False, True])
def test_patched_calls(ratio, ours, causal, ran, torch_s_time_over_ours):
    torch_s_time_over_ours[:] = [ratio]
    q, k = torch.randn(3, 4, 700, 16), torch.randn(3, 4, 2100, 16)
    expected = sdpa(q, k, k, is_causal=causal)
    with patch_sdpa() as patch:
        out = sdpa(q, k, k, is_causal=causal)
        del ran[:]
        assert torch.equal(out, sdpa(q, k, k, is_causal=causal))
        assert bool(ran) is ours
        assert ("fastattn" if ours else "torch") in repr(patch).splitlines()[1]
    assert torch.equal(out, expected) or ours
    torch.testing.assert_close(out, expected)


def test_measurements_compare_with_torch_s_own_kernel(ran, monkeypatch):
    """A patch, such as that of optimize, is not measured."""
    register()
    monkeypatch.setattr(_measure, "ratio", lambda torchs, ours: (torchs(), float(not ran) + 1)[1])
    q = torch.randn(1, 4, 30, 16)
    with patch_sdpa(measure=False):
        module = torch.nn.Module()
        fastattn.torch._hugging_face.attention_forward(module, q, q, q, None, is_causal=False)
    assert list(measured().values()) == ["2.00, fastattn"]


@pytest.mark.parametrize(("left", "dtype", "ours"), [
    ((), torch.bfloat16, 2), ((torch.bfloat16,), torch.bfloat16, 0), ((torch.bfloat16,), torch.float32, 2),
])  # fmt: skip
def test_compiled_models_leave_16_bits_to_amx(left, dtype, ours, ran, monkeypatch):
    monkeypatch.setattr(fastattn.torch._hugging_face, "_LEFT", left)
    register()
    torch.compiler.reset()
    q = torch.randn(1, 4, 30, 16).to(dtype)
    module = torch.nn.Module()
    forward = fastattn.torch._hugging_face.attention_forward
    compiled = torch.compile(lambda x: forward(module, x, x, x, None, is_causal=False)[0], backend="eager")
    with torch.inference_mode():
        compiled(q), compiled(q)
    assert len(ran) == ours
    assert not measured()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("options", [{}, {"indices": torch.zeros(1, 30, 2, dtype=torch.int64)}])
def test_traced_calls_are_not_measured(options):
    def forward(q):
        module = torch.nn.Module()
        return fastattn.torch._hugging_face.attention_forward(
            module, q, q, q, None, is_causal=False, **options
        )[0]

    q = torch.randn(1, 4, 30, 16)
    with register():
        make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(q)
        traced = torch.jit.trace(forward, q, check_trace=False)
        assert not measured()
        torch.testing.assert_close(traced(2 * q), forward(2 * q))


def test_a_ratio_is_that_of_times():
    slow, quick = (lambda n=n: sum(range(n)) for n in (200_000, 1000))
    assert RATIO(slow, quick) > 2
    assert RATIO(quick, slow) < 0.5
