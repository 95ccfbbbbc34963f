"""CLIP and SigLIP against transformers: tiny towers with random weights, and what becomes of images."""

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from fastattn import models

VOCAB, LENGTH, SIZE = 97, 24, 36
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "bos_token_id": 1, "pad_token_id": 0}
RNG = np.random.default_rng(4)
PIXELS = RNG.standard_normal((7, 3, SIZE, SIZE)).astype(np.float32)
IDS = np.array(RNG.integers(3, VOCAB, (4, 11)))
IDS[:, 6] = 90
IDS[1, 3] = 90

# The class, and changes of the whole, the texts' and the images' tower.
TOWERS = {
    "clip": ("CLIP", {"projection_dim": 40}, {"eos_token_id": 90}, {}),
    "clip with another size": (
        "CLIP", {}, {"eos_token_id": 90, "hidden_size": 36, "hidden_act": "gelu"}, {"patch_size": 7},
    ),
    "old clip": ("CLIP", {}, {"eos_token_id": 2}, {"hidden_act": "gelu", "num_hidden_layers": 1}),
    "siglip": ("Siglip", {}, {"eos_token_id": 2}, {}),
    "siglip with another size": (
        "Siglip", {}, {"eos_token_id": 2, "hidden_size": 36, "projection_size": 48},
        {"patch_size": 7, "hidden_act": "gelu"},
    ),
}  # fmt: skip


def towers(name, **more):
    """A model of transformers, whose parameters are all random; `more` changes the tower of texts."""
    kind, changes, text, vision = TOWERS[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, **text, **more},
        vision_config={**SIZES, "image_size": SIZE, "patch_size": 6, **vision},
        **changes,
    )
    model = getattr(transformers, f"{kind}Model")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    return model


def same(got, expected, bound=1e-5):
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    size = np.abs(expected).max()
    assert size > 0.1
    assert np.abs(got - expected).max() <= bound * max(1, size)


@pytest.mark.parametrize("name", TOWERS)
def test_vectors_and_logits(name, tmp_path):
    theirs = towers(name)
    theirs.save_pretrained(tmp_path)
    ours = models.load(tmp_path)
    ids, pixels = torch.tensor(IDS), torch.tensor(PIXELS)
    texts, images = ours.text_features(IDS), ours.image_features(PIXELS)
    with torch.no_grad():
        same(texts, theirs.get_text_features(input_ids=ids).pooler_output)
        same(images, theirs.get_image_features(pixel_values=pixels).pooler_output)
        same(ours.logits(images, texts), theirs(input_ids=ids, pixel_values=pixels).logits_per_image)
        same(ours(IDS), theirs.text_model(input_ids=ids).last_hidden_state)
    for options, bound in (({"dtype": "bfloat16"}, 0.05), ({"weights_dtype": "int8"}, 0.08)):
        narrow = models.load(tmp_path, **options)
        same(narrow.text_features(IDS), torch.tensor(texts), bound)
        same(narrow.image_features(PIXELS), torch.tensor(images), bound)


def drawn(height, width):
    """An image with edges and noise."""
    small = RNG.integers(0, 200, (height // 5 + 1, width // 5 + 1, 3), np.uint8)
    large = np.kron(small, np.ones((5, 5, 1), np.uint8))[:height, :width]
    return large + RNG.integers(0, 50, large.shape, np.uint8)


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789!'"


MERGES = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>"), ("o", "n")]
LINES = ["The cat sat  on\na dog's mat!", "it'll cost 42, isn't it", "", "caf\u00e9 " * 20, "a<|endoftext|>b"]


def write_clip(folder):
    """A folder as clip-ViT-B-32 is, with the module CLIPModel; the tokenizer of transformers."""
    inner = folder / "0_CLIPModel"
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *map("".join, MERGES)]
    tokens = ["<|startoftext|>", *dict.fromkeys(tokens), "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = towers("clip", vocab_size=len(vocab), eos_token_id=vocab["<|endoftext|>"])
    tokenizer = transformers.CLIPTokenizer(vocab, MERGES, model_max_length=LENGTH)
    for part in (model, tokenizer, CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=SIZE)):
        part.save_pretrained(inner)
    modules = [{"idx": 0, "name": "0", "path": inner.name, "type": "sentence_transformers.models.CLIPModel"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (inner / "vocab.json").write_text(json.dumps(vocab))
    (inner / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, MERGES)]))
    return inner, tokenizer


def test_the_tokenizer_of_clip(tmp_path):
    """Folders have tokenizer.json, or vocab.json and merges.txt, as the first ones."""
    inner, theirs = write_clip(tmp_path)
    expected = theirs(LINES, truncation=True)["input_ids"]
    assert models.load(tmp_path).text.encode(LINES) == expected
    (inner / "tokenizer.json").unlink()
    assert models.load(tmp_path).text.encode(LINES) == expected
    assert max(map(len, expected)) == LENGTH


def test_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    write_clip(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = library.SentenceTransformer(str(tmp_path), device="cpu")
        ours = models.load(tmp_path)
        images = [Image.fromarray(drawn(40, 67)), Image.fromarray(drawn(36, 36))]
        for inputs in (LINES, images, LINES[0], images[0]):
            same(ours.encode(inputs), torch.tensor(theirs.encode(inputs)))
