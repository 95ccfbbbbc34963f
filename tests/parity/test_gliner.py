"""GLiNER against the library `gliner`: tiny models that it makes and saves."""

import gliner.config
import gliner.model
import numpy as np
import pytest
import tiny_gliner as tiny
import torch
from transformers import PreTrainedTokenizerFast

from fastattn import models

LABELS = ["city", "a thing", "the_name"]
TEXTS = [
    "the city, Paris.",
    "",
    "x",
    "a-b the city_of the best " * 8,
    " \n",
    "the the city is no city!",
    "é 中文 the",
]


def saved(folder, **changes):
    """The library's model, which has written its folder."""
    base = folder / "base"
    base.mkdir()
    encoder = {**tiny.ENCODER, "vocab_size": len(tiny.VOCAB), "pos_att_type": ["p2c", "c2p"]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny.write_tokenizer(base, ()),
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    tokenizer.save_pretrained(base)
    config = {"hidden_size": 16, "max_width": 3, "max_len": 25, "encoder_config": encoder, **changes}
    config = gliner.config.UniEncoderSpanConfig(model_name=str(base), **config)
    model = gliner.model.UniEncoderSpanGLiNER.load_from_config(config, backbone_from_pretrained=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            scale = 0.3 if name.startswith("token") else 1.0 if name.startswith("rnn") else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape) * (0.2 if "bias" in name else 1))
            if name.endswith("LayerNorm.weight"):
                parameter += 1
    model.eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_rnn_layers": 0, "embed_ent_token": False, "max_width": 12},
        {"num_rnn_layers": 2, "hidden_size": 24, "max_len": 5},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Sentence of length")
def test_entities_and_scores(changes, tmp_path):
    theirs = saved(tmp_path, **changes)
    ours = models.load(tmp_path)
    many = 0
    for flat in (True, False):
        for multi_label in (True, False):
            for threshold in (0.1, 0.5, 0.9):
                how = {"threshold": threshold, "multi_label": multi_label}
                expected = theirs.inference(TEXTS, LABELS, flat_ner=flat, batch_size=3, **how)
                found = ours.entities(TEXTS, LABELS, flat=flat, **how)
                for entities, own in zip(expected, found, strict=True):
                    names = [
                        tuple(each[key] for key in ("start", "end", "text", "label")) for each in entities
                    ]
                    assert [each[:4] for each in own] == names
                    scores = [each["score"] for each in entities]
                    np.testing.assert_allclose([each.score for each in own], scores, rtol=0, atol=1e-5)
                    many += len(names)
    assert many > 50
