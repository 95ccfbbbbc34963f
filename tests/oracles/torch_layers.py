"""Layers of torch with random weights, which go over to ours through the state dict; and masks of both."""

import numpy as np
import pytest
import torch

BATCH, LEN_Q, LEN_K, WIDTH, HEADS = 3, 7, 9, 48, 4
DTYPES = {"float32": torch.float32, "float64": torch.float64}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
QUIET = [
    pytest.mark.usefixtures("quiet_torch"),
    pytest.mark.filterwarnings("ignore:.*mismatched.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning"),
]


def randomized(module, dtype):
    """`module` in eval mode with every parameter random: torch begins some as zeros and ones."""
    module = module.to(DTYPES[dtype]).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.5))
    return module


def load(layer, module):
    layer.load_state_dict({name: x.numpy() for name, x in module.state_dict().items()})
    saved = layer.state_dict()
    assert list(saved) == list(module.state_dict())
    for name, x in module.state_dict().items():
        np.testing.assert_array_equal(saved[name], x.numpy(), strict=True)
    return layer


def draw(rng, *shape, dtype="float32"):
    return rng.standard_normal(shape).astype(dtype)


def t(x):
    return None if x is None else torch.tensor(x)


def masks_of(kind, rng, len_q, len_k, dtype, heads=HEADS):
    """(attn_mask, key_padding_mask); no row is without any key."""
    hide = rng.random((len_q, len_k)) < 0.4
    hide[:, 0] = False
    hide_heads = rng.random((BATCH * heads, len_q, len_k)) < 0.4
    hide_heads[:, :, 0] = False
    padding = np.arange(len_k) >= np.array([len_k, len_k - 4, 2])[:, None]
    bias = draw(rng, len_q, len_k, dtype=dtype)
    return {
        "none": (None, None),
        "bool": (hide, None),
        "bool of heads": (hide_heads, None),
        "float": (np.where(hide, -np.inf, bias).astype(dtype), None),
        "float of heads": (draw(rng, BATCH * heads, len_q, len_k, dtype=dtype), None),
        "padding": (None, padding),
        "left padding": (None, padding[:, ::-1].copy()),
        "float padding": (None, np.where(padding, -np.inf, 0.3).astype(dtype)),
        "bool, padding": (hide, padding),
        "float, padding": (bias, padding),
        "float of heads, float padding": (
            draw(rng, BATCH * heads, len_q, len_k, dtype=dtype),
            np.where(padding, -np.inf, 0.0).astype(dtype),
        ),
    }[kind]
