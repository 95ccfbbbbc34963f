"""Optimizers against torch's, with clipped gradients and a schedule."""

import numpy as np
import pytest
import torch

from fastattn import train

RNG = np.random.default_rng(1)
DECAY = {"lr": 3e-3, "weight_decay": 0.1}
OPTIMIZERS = {
    "AdamW": {**DECAY, "betas": (0.9, 0.95), "eps": 1e-6},
    "SGD": {**DECAY, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torch_s(name, dtype):
    options = OPTIMIZERS[name]
    weights = {
        "map": RNG.standard_normal((30, 40)).astype(dtype),
        "bias": RNG.standard_normal(7).astype(dtype),
    }
    tensors = [torch.tensor(x, requires_grad=True) for x in weights.values()]
    ours = getattr(train, name)(weights, **options, decay_vectors=True)
    theirs, schedule = getattr(torch.optim, name)(tensors, **options), train.Schedule("cosine", 20, warmup=5)
    for step in range(20):
        grads = {key: 3 * RNG.standard_normal(x.shape).astype(dtype) for key, x in weights.items()}
        ours.step(grads, factor=schedule(step), max_norm=1.0)
        for tensor, grad in zip(tensors, grads.values(), strict=True):
            tensor.grad = torch.tensor(grad)
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        theirs.param_groups[0]["lr"] = options["lr"] * schedule(step)
        theirs.step()
    for x, tensor in zip(weights.values(), tensors, strict=True):
        bound = 1e-5 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(x, tensor.detach().numpy(), rtol=0, atol=bound)
