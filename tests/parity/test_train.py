"""A model's training against torch's modules and AdamW."""

import numpy as np
import pytest
import torch
from language_model import LanguageModel

from fastattn import train

RNG = np.random.default_rng(1)


class Theirs(torch.nn.Module):
    """The example's model of torch's modules."""

    def __init__(self, vocab_size, max_length, d_model, num_heads, num_layers):
        super().__init__()
        self.token_embedding = torch.nn.Embedding(vocab_size, d_model)
        self.position_embedding = torch.nn.Embedding(max_length, d_model)
        layer = torch.nn.TransformerEncoderLayer(
            d_model, num_heads, 4 * d_model, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = torch.nn.LayerNorm(d_model)
        self.encoder = torch.nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False)

    def forward(self, ids, targets):
        length = ids.shape[1]
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(length))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        logits = self.encoder(x, mask=mask, is_causal=True) @ self.token_embedding.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_is_torch_s(dtype):
    """One step to 1e-5 (float64: 1e-12) of the largest weight, and the losses of 50 to 1e-3."""
    sizes = 23, 32, 48, 4, 2
    ours = LanguageModel(*sizes, weights_dtype=dtype, rng=0)
    state = ours.encoder.state_dict().items()
    ours.encoder.load_state_dict(
        {name: x + 0.1 * RNG.standard_normal(x.shape) * (x.ndim == 1) for name, x in state}
    )
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = train.AdamW(ours.parameters, **options, decay_vectors=True)
    names = {"table": "token_embedding.weight", "positions": "position_embedding.weight"}

    def state_dict():
        return {names.get(name, name): x.copy() for name, x in optimizer.parameters.items()}

    theirs = Theirs(*sizes).to(getattr(torch, dtype))
    theirs.load_state_dict({name: torch.tensor(x) for name, x in state_dict().items()})
    other = torch.optim.AdamW(theirs.parameters(), **options)
    schedule = train.Schedule("cosine", 50, warmup=5)
    text = np.cumsum(RNG.integers(1, 4, 4000)) % sizes[0]
    losses = []
    for step in range(50):
        begins = RNG.integers(len(text) - 33, size=8)[:, None] + np.arange(33)
        ids, targets = text[begins[:, :-1]], text[begins[:, 1:]]
        before = state_dict()
        loss, grads = ours.loss_and_gradients(ids, targets)
        optimizer.step(grads, factor=schedule(step), max_norm=1.0)
        other.zero_grad()
        their_loss = theirs(torch.tensor(ids), torch.tensor(targets))
        their_loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in other.param_groups:
            group["lr"] = options["lr"] * schedule(step)
        other.step()
        losses.append((loss, their_loss.item()))
        if step == 0:
            after = state_dict()
            exact = 1e-5 if dtype == "float32" else 1e-12
            for name, x in theirs.state_dict().items():
                largest = max(abs(after[name]).max(), abs(before[name]).max())
                difference = abs(after[name] - x.numpy())
                if name.endswith("in_proj_bias"):
                    # The gradient of the keys' bias is 0. AdamW makes steps of what rounding leaves of it.
                    difference[48:96] = 0
                assert difference.max() <= exact * largest, name
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-3)
    assert losses[-1][0] < 0.6 * losses[0][0]
