"""The example in docs/layers.md that defines all its names: it runs, and steps are the full pass."""

from pathlib import Path

import numpy as np

DOCS = Path(__file__).parents[1] / "docs" / "layers.md"


def test_the_padded_example_step_by_step():
    text = DOCS.read_text(encoding="utf-8").split("A whole one, with sources and prompts")[1]
    names = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    model, embed, lengths = names["model"], names["embed"], names["prompt_lengths"]
    padding = names["padding"]
    for b, length in enumerate(lengths):
        ids = np.concatenate([names["prompt"][b, :length], [step[b] for step in names["tokens"]]])[None]
        tgt = embed(ids, np.arange(ids.shape[1])[None])
        memory = names["memory"][b : b + 1]
        mask = padding[b : b + 1]
        full = model.decoder(tgt, memory, memory_key_padding_mask=mask, tgt_is_causal=True)
        np.testing.assert_allclose(names["y"][b], full[0, -1], rtol=0, atol=1e-5)
