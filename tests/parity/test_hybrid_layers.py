"""Layers of hybrid models against transformers' modules, whose state dicts they take."""

import importlib

import numpy as np
import pytest
import torch
import transformers
from torch_layers import draw, load, randomized
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastattn import layers
from fastattn.grad import vjp

pytestmark = pytest.mark.usefixtures("quiet_torch")

WIDTH, LENGTH = 32, 70  # more tokens than a chunk of transformers has
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 1}
DELTA = {
    "linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention"],
}  # fmt: skip
HEADS = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16
}  # fmt: skip
MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 16, "chunk_size": 16}
MODULES = {
    "Lfm2ShortConv": (
        {"layer_types": ["conv"]},
        lambda c: layers.ShortConvolution(WIDTH, c.conv_bias, kernel_size=c.conv_L_cache),
    ),
    "Qwen3NextGatedDeltaNet": (
        DELTA, lambda c: layers.GatedDeltaNet(WIDTH, 6, 2, 16, 8, eps=c.rms_norm_eps)
    ),
    "Qwen3_5GatedDeltaNet": (
        DELTA, lambda c: layers.GatedDeltaNet(WIDTH, 6, 2, 16, 8, eps=c.rms_norm_eps, names="qwen3_5")
    ),
    "OlmoHybridGatedDeltaNet": (
        {**DELTA, "linear_num_key_heads": 6, "layer_types": ["linear_attention", "full_attention"],
         "num_hidden_layers": 2},
        lambda c: layers.GatedDeltaNet(WIDTH, 6, 6, 16, 8, eps=1e-5, beta_scale=2, names="olmo_hybrid"),
    ),
    "BambaMixer": (HEADS, lambda c: layers.Mamba2(WIDTH, 8, 8, 16, 2, eps=c.rms_norm_eps)),
    "GraniteMoeHybridMambaLayer": (HEADS, lambda c: layers.Mamba2(WIDTH, 8, 8, 16, 2, eps=c.rms_norm_eps)),
    "Zamba2MambaMixer": (
        {"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 16,
         "layers_block_type": ["mamba"]},
        lambda c: layers.Mamba2(WIDTH, 8, 8, 16, 2, dt_limits=(0.0, np.inf)),
    ),
    "NemotronHMamba2Mixer": (
        {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
        lambda c: layers.Mamba2(WIDTH, 8, 8, 16, 2, eps=c.layer_norm_epsilon),
    ),
    "BailingHybridDeltaAttention": (
        {"linear_num_heads": 3, "linear_head_dim": 8, "layer_group_size": 2},
        lambda c: layers.KimiDeltaAttention(
            WIDTH, 3, 8, eps=c.rms_norm_eps, lowest_decay=-5, names="bailing_hybrid"
        ),
    ),
    "Mamba2Mixer": ({**MAMBA2, "n_groups": 2}, lambda c: layers.Mamba2(WIDTH, 8, 8, 16, 2)),
    "Mamba2Mixer, bias": (
        {**MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "time_step_limit": (0.2, 0.7)},
        lambda c: layers.Mamba2(WIDTH, 8, 8, 16, 1, True, conv_bias=False, dt_limits=(0.2, 0.7)),
    ),
    "MambaMixer": ({"state_size": 8}, lambda c: layers.Mamba(WIDTH, state_size=8)),
    "KimiLinearDeltaAttention": (
        {"linear_num_heads": 3, "linear_head_dim": 8, "layer_types": ["linear_attention"]},
        lambda c: layers.KimiDeltaAttention(WIDTH, 3, 8, eps=c.rms_norm_eps),
    ),
}  # fmt: skip
FAMILIES = {
    "Lfm2": "lfm2", "Qwen3N": "qwen3_next", "Qwen3_5": "qwen3_5_text", "Olmo": "olmo_hybrid",
    "Mamba2": "mamba2", "MambaM": "mamba", "Bamba": "bamba", "Granite": "granitemoehybrid",
    "Zamba2": "zamba2", "Nemotron": "nemotron_h", "Kimi": "kimi_linear", "Bailing": "bailing_hybrid",
}  # fmt: skip
every_module = pytest.mark.parametrize("name", MODULES)


def pair(name):
    """Our layer, transformers' module with the same random parameters, and its config; skips without one."""
    family = next(family for begin, family in FAMILIES.items() if name.startswith(begin))
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    options, make = MODULES[name]
    config = CONFIG_MAPPING[family](**{**SMALL, **options})
    place = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{place}.modeling_{place}")
    theirs = randomized(getattr(module, name.partition(",")[0])(config, 0), "float32")
    return load(make(config), theirs), theirs, config


@every_module
def test_results_and_gradients(name, implementation):
    ours, theirs, _ = pair(name)
    rng = np.random.default_rng(0)
    for length in (LENGTH, 37):
        x, dout = (draw(rng, 2, length, WIDTH) for _ in range(2))
        tensor = torch.from_numpy(x).requires_grad_()
        out = theirs(tensor)
        out.backward(torch.from_numpy(dout))
        expected = {"out": out, "x": tensor.grad, **{n: p.grad for n, p in theirs.named_parameters()}}
        _, pullback = vjp(ours, x)
        dx, grads = pullback(dout)
        assert grads.keys() == expected.keys() - {"out", "x"}
        for n, got in {"out": ours(x), "x": dx, **grads}.items():
            right = expected[n].detach().numpy()
            bound = (1e-5 if n == "out" else 2e-5) * abs(right).max()
            np.testing.assert_allclose(got, right, rtol=0, atol=bound, err_msg=n)
        theirs.zero_grad()


@every_module
def test_token_by_token(name):
    """Both go on after a prompt, from the states that each has kept."""
    ours, theirs, config = pair(name)
    x = draw(np.random.default_rng(0), 2, 12, WIDTH)
    cache, state = transformers.DynamicCache(config=config), layers.RecurrentState()
    for part in np.split(x, [9, 10, 11], axis=1):
        with torch.inference_mode():
            expected = theirs(torch.from_numpy(part), cache).numpy()
        found = ours(part, state=state)
        if part.shape[1] > 1 or "time_step_limit" not in MODULES[name][0]:  # which tokens alone do not heed
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())
