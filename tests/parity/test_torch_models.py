"""Changes to models of torch: the attention interface of transformers, patch_sdpa, optimize."""

import copy
import pickle
import platform
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from implementations import COMPILED
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fastattn._engine import settings
from fastattn.torch import Undo, _hugging_face, _memory, optimize, patch_sdpa, register

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 90, "pad_token_id": 0}
CONFIGS = {
    "bert": transformers.BertConfig(**SIZES, vocab_size=90),
    "llama": transformers.LlamaConfig(**DECODER),
    "gemma2": transformers.Gemma2Config(**DECODER, sliding_window=5, attn_logit_softcapping=0.5),
}  # fmt: skip
# Without C++ code, which takes long to compile: that is in test_torch_ops.py.
compiled_whole = partial(torch.compile, fullgraph=True, backend="aot_eager")
needs_kernels = pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.compiler.reset()  # who recompiles too often fails, and it counts all tests
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torch deprecate what they use
        yield


def model_of(name):
    """A model whose scores differ enough for masks and caps to show."""
    model = transformers.AutoModel.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokens(padded=False):
    ids = torch.randint(1, 90, (2, 17))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_gradients_of_a_model():
    """Gradients of the parameters agree, softcap and sliding window included."""
    register()
    model, inputs = model_of("gemma2"), tokens()
    grads = []
    for implementation in ("eager", "fastattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**inputs).last_hidden_state.square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert grads[0]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_compiled_model():
    register()
    model, inputs = model_of("llama"), tokens()
    expected = model(**inputs).last_hidden_state
    model.set_attn_implementation("fastattn")
    compiled = compiled_whole(model)
    torch.testing.assert_close(compiled(**inputs).last_hidden_state, expected, atol=2e-5, rtol=2e-5)


def forward(x, *rest, **options):
    module = torch.nn.Module()
    return _hugging_face.attention_forward(module, x, x, x, None, *rest, is_causal=False, **options)[0]


def test_what_transformers_computes_itself(ran):
    x = torch.randn(2, 4, 9, 16)
    torch.testing.assert_close(forward(x), sdpa(x, x, x).transpose(1, 2))
    assert ran == ["attention"]
    dropped = forward(x, 0.5)
    assert not torch.allclose(dropped, forward(x))
    del ran[:]
    torch.manual_seed(1)
    found = forward(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(found, sdpa(x, x, x, dropout_p=0.5).transpose(1, 2))
    assert forward(x.to("meta")).shape == (2, 9, 4, 16)
    nested = torch.nested.nested_tensor(
        [x[0].transpose(0, 1), x[1, :, :5].transpose(0, 1)], layout=torch.jagged
    )
    with pytest.raises((RuntimeError, ValueError, AttributeError, TypeError)):
        forward(nested.transpose(1, 2))  # "sdpa" of transformers reshapes what it gets
    with pytest.raises(NotImplementedError, match="sinks does not support dropout"):
        forward(x, 0.5, s_aux=torch.zeros(4))
    assert ran == []


CALLS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "mask": {"attn_mask": torch.arange(9 * 13).reshape(9, 13) % 5 > 1},
    "empty row": {"attn_mask": (torch.arange(9)[:, None] > 0).expand(9, 13)},
    "bias": {"attn_mask": torch.linspace(-1, 1, 13).expand(2, 1, 9, 13)},
}


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_patched_sdpa(call, dtype, ran):
    options = dict(CALLS[call])
    if call == "bias":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    inputs = [torch.randn(2, 4, n, 16).to(dtype).requires_grad_() for n in (9, 13, 13)]
    expected = sdpa(*inputs, **options)
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    with patch_sdpa():
        out = sdpa(*inputs, **options)
        grads = torch.autograd.grad(out.square().sum(), inputs)
    assert ran[0] == "attention"
    assert out.stride() == expected.stride()
    tolerance = {"atol": 16 * torch.finfo(dtype).eps, "rtol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, expected, **tolerance)
    for x, y in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(x, y, atol=4 * tolerance["atol"], rtol=4 * tolerance["rtol"])
    del ran[:]
    assert torch.equal(sdpa(*inputs, **options), expected)
    assert ran == []


@needs_kernels
def test_patched_sdpa_leaves_torch_what_is_not_covered(ran):
    x = torch.randn(2, 4, 9, 16)
    bias = torch.randn(9, 9, requires_grad=True)
    nested = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (3, 5)], layout=torch.jagged)
    calls = {
        "dropout": lambda: sdpa(x, x, x, dropout_p=0.5),
        "three dimensions": lambda: sdpa(x[0], x[0], x[0]),
        "values of another width": lambda: sdpa(x, x, x[..., :8]),
        "gradient of a mask": lambda: torch.autograd.grad(sdpa(x, x, x, bias).square().sum(), bias)[0],
    }
    with patch_sdpa():
        for name, call in calls.items():
            torch.manual_seed(1)
            out = call()
            torch.manual_seed(1)
            assert ran == [], name
            torch.testing.assert_close(out, call())
        assert sdpa(*[x.to("meta")] * 3).shape == x.shape
        assert sdpa(*[nested.transpose(1, 2)] * 3).is_nested
        with settings.forced(backend="numpy"):
            sdpa(x, x, x)
        assert ran == []


@needs_kernels
def test_patches_are_counted(ran):
    x = torch.randn(1, 2, 4, 8)
    first, second = patch_sdpa(), patch_sdpa()
    first.undo()
    first.undo()
    sdpa(x, x, x)
    assert ran == ["attention"]
    second.undo()
    sdpa(x, x, x)
    assert ran == ["attention"]


def test_patch_sdpa_needs_kernels():
    with (
        settings.forced(backend="numpy"),
        pytest.raises(RuntimeError, match=r"^patch_sdpa\(\): this process"),
    ):
        patch_sdpa()


@needs_kernels
def test_patched_sdpa_in_compiled_code(ran):
    x = torch.randn(2, 4, 9, 16, requires_grad=True)

    def f(x):
        return sdpa(x * 2, x, x, is_causal=True).square().sum()

    (expected,) = torch.autograd.grad(f(x), x)
    with patch_sdpa():
        (found,) = torch.autograd.grad(compiled_whole(f)(x), x)
    assert ran
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@needs_kernels
def test_optimize_and_undo(ran):
    model, inputs = model_of("bert"), tokens(padded=True)
    names, frozen = list(model.state_dict()), model.pooler.dense
    frozen.requires_grad_(False)
    with torch.inference_mode():
        expected = model(**inputs)
        change = optimize(model)
        out = model(**inputs)
        assert ran.count("linear") == 13
        assert ran.count("attention") == 2
        torch.testing.assert_close(out.pooler_output, expected.pooler_output, atol=1e-5, rtol=1e-5)
        assert str(change).splitlines() == [
            "scaled_dot_product_attention on CPUs: fastattn, if faster; measured at the first call of a kind",
            "attention of BertModel: eager -> fastattn",
            "13 nn.Linear packed in float32",
        ]
        assert list(model.state_dict()) == names
        assert not model.encoder.layer[0].output.dense.weight.requires_grad
        change.undo()
        assert str(change).endswith("(undone)")
        del ran[:]
        assert torch.equal(model(**inputs).pooler_output, expected.pooler_output)
    assert ran == []
    assert model.config._attn_implementation == "eager"
    assert model.encoder.layer[0].output.dense.weight.requires_grad
    assert not frozen.weight.requires_grad


def layers(**options):
    return torch.nn.Sequential(torch.nn.Linear(40, 24, **options), torch.nn.GELU(), torch.nn.Linear(24, 7))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("weights_dtype", "activations", "error"), [
    (None, None, 0), ("bfloat16", None, 0.02), ("int8", None, 0.02), (np.int8, "int8", 0.04),
    ("int4", None, 0.2),
])  # fmt: skip
def test_weights_of_other_types(weights_dtype, activations, error, dtype):
    model, x = layers(bias=False).to(dtype), torch.randn(5, 3, 40).to(dtype)
    expected = model.double()(x.double()).detach()
    model = model.to(dtype)
    bound = (error + 4 * torch.finfo(dtype).eps) * expected.abs().max()
    with torch.no_grad(), optimize(model, weights_dtype, activations=activations):
        out = model(x)
        assert out.dtype is dtype
        assert (out.double() - expected).abs().max() < bound
        assert out.shape == (5, 3, 7)


@needs_kernels
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told")
def test_freed_memory_is_kept(python):
    """Pages of a model's results are cleared once, not in every call; `undo` gives them back."""
    done = python(
        """
import resource, torch, fastattn.torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        model(x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

model = torch.nn.Sequential(torch.nn.Linear(16, 4096), torch.nn.GELU()).eval()
with torch.inference_mode():
    x = torch.randn(2304, 16)  # two results of 38 MB each
    first = faults()
    with fastattn.torch.optimize(model, keep_freed=True):
        faults()
        print(first, faults(), open("/proc/self/statm").read().split()[1], end=" ")
    print(open("/proc/self/statm").read().split()[1])
"""
    )
    assert done.returncode == 0, done.stderr
    first, kept, before, after = map(int, done.stdout.split())
    assert kept < 0.25 * first  # a block of the heap may move, once
    assert before - after > 0.1 * first  # pages, of 6 results


@needs_kernels
@pytest.mark.parametrize("most", [2**31 - 1, 32 << 20])  # of blocks, in newer and older versions of glibc
def test_the_allocator_is_told_once_and_on_request_alone(most, monkeypatch):
    calls = []

    class Libc:
        def mallopt(self, which, size):
            calls.append((which, size))
            return which == -1 or size <= most

        def malloc_trim(self, pad):
            calls.append("trimmed")

    monkeypatch.setattr(_memory.ctypes, "CDLL", lambda name: Libc())
    with optimize(layers()) as change:
        assert "freed memory" not in str(change)
    assert not calls
    one, two = (optimize(layers(), keep_freed=True) for _ in range(2))
    assert str(two).splitlines()[-1] == "freed memory: kept by the process, up to 2 GB"
    kept = [(-1, 2**31 - 1), (-3, 2**31 - 1)]
    assert calls == kept + [(-3, 32 << 20)] * (most < 2**31 - 1)
    two.undo()
    two.undo()
    assert len(calls) <= 3
    one.undo()
    assert calls[-3:] == [(-1, 64 << 20), (-3, 32 << 20), "trimmed"]
    monkeypatch.setattr(_memory.ctypes, "CDLL", lambda name: object())  # as with other allocators
    with optimize(layers(), keep_freed=True) as change:
        assert str(change).splitlines()[-1].startswith("freed memory: returned to the system")


def load_assigned(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def replace_data(model, other):
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = new.data.clone()


def train_fused(model, other):
    """A fused optimizer does not count what it writes; the weights go through a forward pass before."""
    model.requires_grad_()
    model(torch.randn(3, 40)).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    model.requires_grad_(False)
    other.load_state_dict(model.state_dict())


@needs_kernels
@pytest.mark.parametrize("write", [
    lambda model, other: model.load_state_dict(other.state_dict()), load_assigned, replace_data, train_fused,
])  # fmt: skip
def test_a_written_weight_is_packed_again(write, ran):
    model, other, x = layers(), layers(), torch.randn(3, 40)
    with optimize(model):
        model(x)
        write(model, other)
        with torch.no_grad():
            del ran[:]
            expected = other(x)
            torch.testing.assert_close(model(x), expected)
            assert ran.count("linear") == 2
            model[2].bias.add_(1)
            torch.testing.assert_close(model(x), expected + 1)
    assert all(p.requires_grad for p in model.parameters())


@needs_kernels
def test_new_memory_never_has_the_address_of_what_was_packed():
    model = torch.nn.Linear(64, 64)
    with torch.no_grad(), optimize(model):
        memory = StorageWeakRef(model.weight.untyped_storage())
        model.weight.data = torch.zeros(64, 64)
        assert not memory.expired()
        assert torch.equal(model(torch.ones(1, 64)), model.bias[None])
        assert memory.expired()


@needs_kernels
def test_weights_that_are_lent():
    """functional_call computes with the weights it is given, compiled or not."""
    model, other, x = layers(), layers(), torch.randn(3, 40)
    given = [dict(other.named_parameters()), {name: p.detach() for name, p in other.named_parameters()}]

    def f(weights):
        return torch.func.functional_call(model, weights, x)

    with torch.no_grad(), optimize(model):
        own = model(x)
        for weights in given:
            torch.testing.assert_close(f(weights), other(x))
            compiled = compiled_whole(f)
            torch.testing.assert_close(compiled(weights), other(x))
            assert torch.equal(model(x), own)
        other.requires_grad_(False)
        torch.testing.assert_close(f(given[0]), other(x))
        torch.testing.assert_close(model(x), own)


@needs_kernels
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_has_the_weights(strict):
    model, x = layers(), torch.randn(3, 40)
    with torch.no_grad(), optimize(model):
        exported = torch.export.export(model, (x,), strict=strict)
        assert not any("fastattn" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(x), model(x))


class Attending(torch.nn.Module):
    """A linear map and attention, which torch.jit.script reads."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.inner(x)
        return sdpa(x, x, x)


def recorded(**options):
    return lambda model, x: make_fx(model, _allow_non_fake_inputs=True, **options)(x)


@needs_kernels
@pytest.mark.parametrize("trace", [
    torch.jit.trace, lambda model, x: torch.jit.script(model), recorded(), recorded(pre_dispatch=True),
    recorded(tracing_mode="fake"), recorded(tracing_mode="symbolic"),
])  # fmt: skip
def test_traced_models_compute_with_what_they_are_given(trace):
    model, x, other = Attending(), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    with torch.no_grad():
        expected = model(other)
        with optimize(model, measure=False):
            torch.testing.assert_close(trace(model, x)(other), expected)


def test_values_of_masks_decide_nothing_in_traces():
    """Lists of keys may be attended in place of a mask that adds nothing; another one may add numbers."""
    x, lists = torch.randn(1, 2, 6, 8), torch.randn(1, 6, 6).topk(3).indices

    def f(mask):
        module = torch.nn.Module()
        return _hugging_face.attention_forward(module, x, x, x, mask, is_causal=False, indices=lists)[0]

    mask = torch.randn(1, 1, 6, 6)
    torch.testing.assert_close(torch.jit.trace(f, torch.zeros(1, 1, 6, 6))(mask), f(mask))


def outcome(call):
    """The result, or type and text of the error."""
    try:
        return call()
    except (RuntimeError, TypeError) as error:
        return type(error), str(error)


@needs_kernels
@pytest.mark.parametrize("x", [
    torch.ones(2, 5), torch.ones(()), torch.ones(2, 4).int(), None, torch.eye(4).to_sparse(),
    torch.complex(torch.ones(2, 4), torch.ones(2, 4)).conj().imag,
])  # fmt: skip
def test_what_no_kernel_takes_is_torch_s(x):
    model = torch.nn.Linear(4, 3)
    calls = [lambda: model(x), lambda: model(input=x), lambda: torch.compile(model, backend="eager")(x)]
    with torch.no_grad():
        expected = [outcome(call) for call in calls[:2]]
        with optimize(model, measure=False):
            found = [outcome(call) for call in calls[:2]]
            assert outcome(calls[2])[0] is not ValueError
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two) if isinstance(two, torch.Tensor) else one == two


@needs_kernels
def test_refused_attention_is_torch_s(ran):
    x = torch.randn(1, 2, 5, 8)
    calls = [lambda: sdpa(x, x[:, :, :3], x), lambda: sdpa(x, x, x, scale=torch.nan)]
    calls += [lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, attn_mask=x[0])[0]]
    expected = [outcome(call) for call in calls]
    for measure in (False, True):
        with patch_sdpa(measure=measure):
            for call, want in zip(calls, expected, strict=True):
                found = outcome(call)
                assert torch.equal(found, want) if isinstance(want, torch.Tensor) else found == want
    assert not ran


@needs_kernels
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_weights_of_their_own(copied, ran):
    model, x = layers(), torch.randn(3, 40)
    with torch.no_grad(), optimize(model, "bfloat16"):
        twin = copied(model)
        expected = model(x)
        compiled = compiled_whole(model)(x)  # its GELU may round otherwise
        assert torch.equal(twin(x), expected)
        twin[0].weight.zero_()
        twin[2].bias.zero_()
        del ran[:]
        for call in (twin, compiled_whole(twin)):
            assert not torch.allclose(call(x), expected)
            torch.testing.assert_close(call(x), twin[2](twin[1](twin[0].bias.expand(3, -1))))
        assert ran.count("linear") == 10
        assert torch.equal(compiled_whole(model)(x), compiled)


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_derivatives_in_forward_mode_are_torchs():
    model, x = layers(), torch.randn(3, 40)
    expected = torch.func.jvp(model, (x,), (x,))
    sliced = torch.func.vmap(model)(x)
    with optimize(model), torch.no_grad():
        torch.testing.assert_close(torch.func.jvp(model, (x,), (x,)), expected)
        compiled = compiled_whole(lambda x: torch.func.jvp(model, (x,), (x,)))
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(torch.func.vmap(model)(x), sliced)


@needs_kernels
def test_linears_that_compute_as_before(ran):
    model = layers()
    x = torch.randn(3, 40, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    with optimize(model):
        assert torch.equal(torch.autograd.grad(model(x).square().sum(), x)[0], expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x.detach()).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match=r"meta|device"):
            model(x.to("meta"))
        parts = torch.nested.nested_tensor([x[:2].detach(), x[2:].detach()], layout=torch.jagged)
        for rows, part in zip(model(parts).unbind(), (x[:2], x[2:]), strict=True):
            torch.testing.assert_close(rows, model(part).detach())
        assert "linear" not in ran
        model(x.detach())
        assert ran.count("linear") == 2
        with torch.no_grad():
            model(x)
        assert ran.count("linear") == 4
        model[0].bias.requires_grad_()
        model[2].weight.requires_grad_()
        model(x.detach()).sum().backward()
        assert ran.count("linear") == 4
        assert model[0].bias.grad is not None
        assert model[2].weight.grad is not None
        with pytest.raises(RuntimeError, match="same dtype"):
            model(x.detach().bfloat16())
        torch.nn.utils.parametrizations.weight_norm(model[0])
        with pytest.raises(RuntimeError, match=r"^optimize\(\): the weight or bias of an nn.Linear is no"):
            model(x)


@needs_kernels
def test_what_is_left_alone():
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.ModuleList([
        torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4, device="meta"),
        Special(4, 4), torch.nn.MultiheadAttention(8, 2), torch.nn.Linear(4, 4),
    ])  # fmt: skip
    model[-1].weight = torch.nn.Parameter(torch.eye(4).to_sparse())
    with optimize(model) as change, optimize(model[0]) as again:
        assert str(change).splitlines()[1:] == [
            "1 nn.Linear packed in float32",
            "1 nn.Linear left alone: its weight is in torch.float64",
            "1 nn.Linear left alone: its weight is a Parameter on meta",
            "1 nn.Linear left alone: a Special is more than that",
            "1 nn.Linear left alone: nn.MultiheadAttention reads its weight itself",
            "1 nn.Linear left alone: its weight is torch.sparse_coo",
            "nn.MultiheadAttention, nn.TransformerEncoderLayer: torch's fast path in evaluation mode; without"
            " it after torch.backends.mha.set_fastpath_enabled(False)",
        ]
        why = "its forward pass has been replaced"
        assert str(again).splitlines()[1:] == [f"1 nn.Linear left alone: {why}"]


@needs_kernels
@pytest.mark.parametrize("dynamic", [False, True])
def test_optimized_and_compiled(dynamic):
    model = layers()
    compiled = compiled_whole(model, dynamic=dynamic)
    with torch.no_grad(), optimize(model):
        for rows in (3, 6):
            x = torch.randn(rows, 40)
            torch.testing.assert_close(compiled(x), model(x))


def test_errors():
    with pytest.raises(TypeError, match=r"^optimize\(\): model is .*; expected a torch.nn.Module"):
        optimize("model")
    with pytest.raises(
        ValueError, match=r"^optimize\(\): weights_dtype is 'int3'; expected one of float32, bf"
    ):
        optimize(layers(), "int3")
    with pytest.raises(ValueError, match=r"^optimize\(\): activations is 'int8' for weights in"):
        optimize(layers(), "bfloat16", activations="int8")
    with pytest.raises(ValueError, match=r"^optimize\(\): activations is 'int8' for weights in"):
        optimize(layers(), activations="int8")


@needs_kernels
def test_changes_are_undone_in_any_order():
    """Functions may have been wrapped or set before."""
    register()
    bert, model, x = model_of("bert"), layers(), torch.randn(3, 40)
    whole = torch.nn.ModuleList([bert, model])
    expected = model(x).detach()
    first, second = optimize(whole, "int8"), optimize(whole)
    assert str(second).splitlines()[1] == "attention of BertModel 0: fastattn, as before"
    packed = model[0].forward
    model[0].forward = lambda x: packed(x)  # as a tool does that wraps what it finds
    model[2].forward = model[2].forward  # its own again
    del model[2].forward
    first.undo()
    second.undo()
    assert bert.config._attn_implementation == "eager"
    assert torch.equal(model(x).detach(), expected)
    assert all(p.requires_grad for p in whole.parameters())


def test_undo_goes_on_where_a_step_fails():
    done = []
    change = Undo([lambda: done.append("first"), lambda: done.append(1 / 0), lambda: done.append("last")])
    with pytest.raises(ZeroDivisionError):
        change.undo()
    assert done == ["last", "first"]


@needs_kernels
def test_a_refused_change_leaves_nothing(ran):
    """A weight that is not finite cannot be packed in int8; what went before is undone."""
    model, bert, x = layers(), model_of("bert"), torch.randn(1, 2, 4, 8)
    with torch.no_grad():
        model[2].weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="finite"):
        optimize(torch.nn.ModuleList([bert, model]), "int8")
    assert bert.config._attn_implementation == "eager"
    assert "forward" not in vars(model[0])
    assert model[0].weight.requires_grad
    sdpa(x, x, x)
    assert "attention" not in ran
