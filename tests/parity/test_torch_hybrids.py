"""Hybrid models of transformers with our functions beside their own: results, gradients, generated tokens."""

import importlib
import inspect
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import fastattn.torch as ft
from fastattn.torch import _measure
from fastattn.torch._hybrids import FUNCTIONS

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "full_attention_interval": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16
}  # fmt: skip
MODELS = {  # of each function a family, and of how they call it
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2},
    "zamba": {
        "mamba_d_state": 8, "n_mamba_heads": 2, "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "qwen3_next": DELTA,
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 4},
    "kimi_linear": {**LATENT, "linear_num_heads": 4, "linear_head_dim": 8},
    "glm5_next_text": {
        **LATENT, "qk_rope_head_dim": 0, "q_lora_rank": 16, "linear_num_heads": 4, "linear_head_dim": 8,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64, "index_kpool": 4,
    },
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_functions")


def test_families_have_the_same_functions():
    """A new one of transformers may need a model here."""
    found = {name: set() for name in FUNCTIONS}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        for name in FUNCTIONS:
            found[name].update(re.findall(rf"^(?:class|def) {name}\b.*?(?=^[@#\w])", text, re.DOTALL | re.M))
    assert {name: len(sources) for name, sources in found.items()} == dict.fromkeys(FUNCTIONS, 1)


def tiny(name, dtype=torch.float32):
    """Make a random model; skips where transformers is too old to have it."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{**SMALL, **MODELS[name]})
    headed = type(config) in transformers.AutoModelForCausalLM._model_mapping
    made = transformers.AutoModelForCausalLM if headed else transformers.AutoModel
    return made.from_config(config).to(dtype).eval()


def continued(model, ids):
    """Tokens that a model generates; of one without a head, what it makes of a token after cached ones."""
    if model.can_generate():
        return model.generate(ids, max_new_tokens=12, do_sample=False)
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"  # from transformers 5.24 on, and before
    cache = {name: transformers.DynamicCache(config=model.config)}
    with torch.no_grad():
        model(ids[:, :-1], **cache)
        return model(ids[:, -1:], **cache)[0]


@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_and_texts_are_those_of_transformers(name, calls):
    model = tiny(name)
    ids = torch.randint(3, 97, (2, 37))
    expected = model(ids)[0]
    expected.square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    text = continued(model, ids[:1, :9])
    with ft.register(measure=False):
        got = model(ids)[0]
        got.square().mean().backward()
        forward = set(calls)
        again = continued(model, ids[:1, :9])
    assert "causal_conv1d_fn" in forward
    assert "causal_conv1d_update" in calls
    module = importlib.import_module(type(model).__module__)
    assert {n for n in FUNCTIONS if hasattr(module, n)} == set(calls)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    torch.testing.assert_close(again, text, rtol=0, atol=1e-5 * text.abs().max().item())
    for n, p in model.named_parameters():
        if n in gradients:
            most = gradients[n].abs().max().item()
            torch.testing.assert_close(p.grad, gradients[n], rtol=0, atol=2e-5 * most + 1e-9, msg=n)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "kimi_linear", "lfm2"])
def test_bfloat16_is_as_near_to_float32_as_transformers_own(name):
    model, ids = tiny(name, torch.bfloat16), torch.randint(3, 97, (2, 37))
    with torch.inference_mode():
        theirs = model(ids).logits.float()
        with ft.register(measure=False):
            ours = model(ids).logits.float()
        exact = model.float()(ids).logits
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + 1e-3


def test_optimize_says_that_it_holds_for_the_process_and_undoes_it():
    from transformers.models.mamba2 import modeling_mamba2 as module

    before = module.causal_conv1d_fn
    model, ids = tiny("mamba2"), torch.randint(3, 97, (1, 9))
    with torch.inference_mode():
        expected = model(ids).logits
        change, again = ft.optimize(model, measure=False), ft.optimize(model, measure=False)
        assert "causal_conv1d_fn, causal_conv1d_update, mamba2_chunk_scan" in repr(change)
        assert "replaced in the whole process" in repr(change)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
        change.undo()
        assert module.causal_conv1d_fn is not before
        again.undo()
        assert module.causal_conv1d_fn is before
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)


BORDERS = [0, 5, 6, 20]
PACKED = {"seq_idx": torch.tensor([[0] * 5 + [1] + [2] * 14]), "cu": torch.tensor(BORDERS, dtype=torch.int32)}


def packed_calls(of):
    """A function, its arguments with tokens and their axis, others, and what tells sequences apart."""
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 20, 2, 4), dim=-1)
    v, g, beta = torch.randn(1, 20, 2, 3), -torch.rand(1, 20, 2), torch.rand(1, 20, 2)
    x, b = torch.randn(1, 20, 4, 3), torch.randn(1, 20, 2, 5)
    scan = {"A": -torch.rand(4), "chunk_size": 8, "D": torch.randn(4), "dt_softplus": True}
    idx, cu = {"seq_idx": PACKED["seq_idx"]}, {"cu_seqlens": PACKED["cu"]}
    return {
        "conv": ("causal_conv1d_fn", 2, {"hidden_states": torch.randn(1, 6, 20)},
                 {"weight": torch.randn(6, 4), "activation": "silu"}, {**idx, "cu_seq_lens_q": PACKED["cu"]}),
        "mamba2": ("mamba2_chunk_scan", 1, {"hidden_states": x, "dt": torch.randn(1, 20, 4), "B": b, "C": b},
                   scan, idx),
        "gated": ("torch_chunk_gated_delta_rule", 1, {"query": q, "key": k, "value": v, "g": g, "beta": beta},
                  {"use_qk_l2norm_in_kernel": True}, cu),
        "kimi": ("chunk_kimi_delta_attention", 1,
                 {"query": q, "key": k, "value": v, "g": -torch.rand(1, 20, 2, 4), "beta": beta}, {}, cu),
    }[of]  # fmt: skip


@pytest.mark.parametrize("of", ["conv", "mamba2", "gated", "kimi"])
def test_packed_sequences_are_apart(of):
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.mamba2 import modeling_mamba2 as mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    name, axis, tokens, others, packed = packed_calls(of)
    module = next(m for m in (mamba2, qwen3_next, kimi) if hasattr(m, name))

    def run(given, **more):
        out = getattr(module, name)(**given, **others, **more)
        return out[0] if isinstance(out, tuple) else out

    wanted = [x.requires_grad_() for x in tokens.values()]
    parts = []
    for i, j in pairwise(BORDERS):
        parts.append(run({n: x.narrow(axis, i, j - i) for n, x in tokens.items()}))
    expected = torch.cat(parts, axis)
    dout = torch.randn(expected.shape)
    gradients = torch.autograd.grad(expected, wanted, dout)
    with ft.register():  # which transformers cannot compute is not timed
        with pytest.raises(ValueError, match="packed sequences apart"):
            run({n: x.double() for n, x in tokens.items()}, **packed)
        got = run(tokens, **packed)
        assert not any("less than" in key and name in key for key in ft.measured())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(got, wanted, dout), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid"])
def test_models_keep_packed_sequences_apart(name, monkeypatch):
    kind = "mamba" if name == "granitemoehybrid" else "linear_attention"
    monkeypatch.setitem(MODELS, name, MODELS[name] | {"layer_types": [kind] * 4})
    model, ids = tiny(name), torch.randint(3, 97, (1, 20))
    more = {"seq_idx": PACKED["seq_idx"], "use_cache": False}
    more |= {} if kind == "mamba" else {"cu_seq_lens_q": PACKED["cu"]}
    with torch.no_grad():
        parts = [model(ids[:, i:j], use_cache=False).logits for i, j in pairwise(BORDERS)]
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model(ids, **more)
        with ft.register():
            got = model(ids, **more).logits
    torch.testing.assert_close(got, torch.cat(parts, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of", ["gated", "kimi"])
def test_packed_sequences_go_on_after_states_of_their_own(of):
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    name, _, tokens, others, packed = packed_calls(of)
    states, options = torch.randn(3, 2, 4, 3), {**others, "output_final_state": True}
    with ft.register(measure=False):
        function = getattr({"gated": qwen3_next, "kimi": kimi}[of], name)
        out, after = function(**tokens, **options, **packed, initial_state=states)
        for s, (i, j) in enumerate(pairwise(BORDERS)):
            part = {name: x[:, i:j] for name, x in tokens.items()}
            alone = function(**part, **options, initial_state=states[s : s + 1])
            torch.testing.assert_close((out[:, i:j], after[s : s + 1]), alone, rtol=0, atol=0)


def test_packed_sequences_that_are_not_clear_are_refused():
    from transformers.models.mamba import modeling_mamba as mamba
    from transformers.models.mamba2 import modeling_mamba2 as module

    x, weight = torch.randn(2, 8, 20), torch.randn(8, 4)
    short = torch.zeros(2, 19)
    cu, other = PACKED["cu"], torch.tensor([0, 6, 20])
    with ft.register(measure=False):
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            module.causal_conv1d_fn(x, weight, seq_idx=short)
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            module.causal_conv1d_fn(x[:1], weight, seq_idx=PACKED["seq_idx"], cu_seq_lens_q=other)
        with pytest.raises(NotImplementedError, match="cu_seq_lens_q is given for a batch of 2"):
            module.causal_conv1d_fn(x, weight, cu_seq_lens_q=cu)
        with pytest.raises(ValueError, match="expected 0 to 18, the tokens"):
            module.causal_conv1d_fn(x[:1, :, 2:], weight, cu_seq_lens_q=cu)
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            mamba.mamba_selective_scan(
                x, x, -torch.rand(8, 3), x[:, :3], x[:, :3], seq_idx=torch.zeros(2, 20)
            )
        rows = module.causal_conv1d_fn(x, weight, seq_idx=torch.zeros(2, 20))  # one sequence a row
        torch.testing.assert_close(rows, module.causal_conv1d_fn(x, weight))


def test_updates_of_several_types_keep_the_wider(calls):
    from transformers.models.mamba import modeling_mamba as module

    torch.manual_seed(0)
    x, dt, b = torch.randn(1, 6, dtype=torch.bfloat16), torch.rand(1, 6), torch.randn(1, 4)
    rates, state = -torch.rand(6, 4), torch.randn(1, 6, 4)
    own = state.clone()
    module.mamba_selective_state_update(own, x, dt, rates, b, b)
    with ft.register(measure=False):
        module.mamba_selective_state_update(state, x, dt, rates, b, b)
    assert set(calls) == {"mamba_selective_state_update"}
    torch.testing.assert_close(state, own)


def test_measured_calls_are_as_the_model_makes_them(monkeypatch):
    """Numbers of Mamba-2's heads stay expanded: its updates take no others."""
    timed = []
    monkeypatch.setattr(_measure, "_ratios", {})
    monkeypatch.setattr(_measure, "_measure", lambda pair: timed.extend(call() for call in pair()) or 2.0)
    with ft.register():
        tiny("mamba2").generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    counted = {key: value for key, value in ft.measured().items() if "mamba2_selective_state_update" in key}
    assert timed
    assert list(counted.values()) == ["2.00, fastattn"]


def test_what_does_not_gain_stays_transformers(monkeypatch):
    from transformers.models.mamba2 import modeling_mamba2 as module

    x, weight = torch.randn(2, 8, 5), torch.randn(8, 4)
    for ratio in (0.9, 1.2):
        monkeypatch.setattr(_measure, "_measure", lambda pairs, ratio=ratio: ratio)
        monkeypatch.setattr(_measure, "_ratios", {})
        with torch.inference_mode(), ft.register():
            out = module.causal_conv1d_fn(x, weight)
        assert (out.stride(-1) == 1) is (ratio < 1)
        assert any("causal_conv1d_fn" in key for key in ft.measured())


def test_second_derivatives_are_an_error_and_not_a_part_of_them():
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 4, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(1, 6, 2), torch.rand(1, 6, 2)
    with ft.register(measure=False):
        out, _ = module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a first derivative, no second"):
        first.pow(2).sum().backward()


def test_autograd_sees_that_updates_write_to_their_state():
    from transformers.models.mamba import modeling_mamba as module

    state, weight = torch.randn(2, 6, 5), torch.ones(2, 6, 5, requires_grad=True)
    loss = (state * weight).sum()
    x, rates, b = torch.randn(2, 6), -torch.rand(6, 5), torch.randn(2, 5)
    with ft.register(measure=False), torch.no_grad():
        module.mamba_selective_state_update(state, x, x, rates, b, b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_refused_here_is_transformers():
    from transformers.models.mamba2 import modeling_mamba2 as mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    torch.manual_seed(0)
    x, wide = torch.randn(2, 6, 20), torch.randn(6, 9)
    q, g, beta = torch.randn(1, 5, 2, 4), torch.rand(1, 5, 2), torch.rand(1, 5, 2)  # decays above 1
    rates = -torch.rand(4, 8)[..., None].expand(4, 8, 3)  # not the same in a head
    numbers = torch.randn(2, 4, 8), torch.rand(2, 4, 1).expand(2, 4, 8), rates
    calls = [
        lambda: module.causal_conv1d_fn(x, wide),
        lambda: module.causal_conv1d_fn(x[..., 2:3], wide[:, :4]),
        lambda: module.torch_chunk_gated_delta_rule(q, q, q, g=g, beta=beta)[0],
        lambda: mamba2.mamba2_selective_state_update(
            torch.ones(2, 4, 8, 3), *numbers, *torch.ones(2, 2, 1, 3)
        ),
    ]
    expected = [call() for call in calls]
    for measure in (False, True):
        with torch.no_grad(), ft.register(measure=measure):
            for call, want in zip(calls, expected, strict=True):
                torch.testing.assert_close(call(), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("trace", [torch.jit.trace, lambda f, x: make_fx(f)(x)])
def test_traced_calls_are_transformers(trace, calls):
    from transformers.models.mamba2 import modeling_mamba2 as module

    (x, other), weight = torch.randn(2, 2, 6, 20), torch.randn(6, 4)
    with torch.no_grad(), ft.register(measure=False):
        traced = trace(lambda x: module.causal_conv1d_fn(x, weight), x)
        torch.testing.assert_close(traced(other), module.causal_conv1d_fn(other, weight))
        assert calls


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_arguments_by_position_are_where_transformers_has_them(name):
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    torch.manual_seed(0)
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 6, 2, 4), dim=-1)
    g, beta, state = -torch.rand(1, 6, 2), torch.rand(1, 6, 2), torch.randn(1, 2, 4, 4)
    more = (64, state, True) if "chunk" in name else (state, True)
    expected = getattr(module, name)(q, k, v, g, beta, *more)
    with ft.register(measure=False):
        torch.testing.assert_close(getattr(module, name)(q, k, v, g, beta, *more), expected)
        with pytest.raises(TypeError, match="multiple values"):
            getattr(module, name)(q, k, v, g, beta, *more, beta=beta)
        with pytest.raises(TypeError, match="positional arguments but"):
            getattr(module, name)(q, k, v, g, beta, *more, True, None)


def test_what_is_refused_here_is_reported():
    from transformers.models.mamba2 import modeling_mamba2 as module

    x, weight = torch.randn(2, 6, 20), torch.randn(6, 9)
    with ft.register(measure=False):
        before = dict(ft.measured())
        module.causal_conv1d_fn(x, weight[:, :4])
        assert dict(ft.measured()) == before
        module.causal_conv1d_fn(x, weight)
        module.causal_conv1d_fn(x[:, :5], weight[:5])  # for the same reason
        module.causal_conv1d_fn(x.double(), weight.double())
        with pytest.raises(AttributeError):  # theirs: nothing was computed
            module.causal_conv1d_fn(x, None)
    module.causal_conv1d_fn(x, weight)  # nobody asked for ours
    shape = "(): weight has shape (6, 9); expected (channels, width) = (6, 1 to 8)"
    expected = {
        f"causal_conv1d_fn refused: causal_conv1d{shape}": "2 calls, torch",
        "causal_conv1d_fn refused: a tensor is a Tensor in torch.float64 on cpu": "1 call, torch",
    }
    found = {key: value for key, value in ft.measured().items() if "refused" in key}
    assert found == expected
    assert "2 calls, torch" in repr(ft.measured())


def test_measuring_is_that_of_the_last_change_not_undone():
    from fastattn.torch._modules import measures

    with ft.register(measure=True):
        with ft.register(measure=False):
            assert not measures()
        assert measures()


def test_undo_leaves_what_somebody_else_has_put_there(monkeypatch):
    from transformers.models.mamba2 import modeling_mamba2 as module

    own = module.causal_conv1d_fn
    change = ft.register(measure=False)
    mine = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr(module, "causal_conv1d_fn", mine)
    change.undo()
    assert module.causal_conv1d_fn is mine
    module.causal_conv1d_fn = own
