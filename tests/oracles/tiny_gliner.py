"""A tiny GLiNER: its folder, and the probabilities of spans by their definition in float64."""

import json
import re

import numpy as np
import tiny_encoders
from safetensors.numpy import save_file
from tiny_numpy import linear
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

NO_TOKEN = "\u200b"  # a word that a normalizer which cleans drops
MARKS = ("<<ENT>>", "<<SEP>>")
LETTERS = "abcdefghijklmnopqrstuvwxyzP.,-_!"
VOCAB = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "city"]
ENCODER = {
    **tiny_encoders.CONFIGS["deberta-v2"], "model_type": "deberta-v2", "vocab_size": len(VOCAB) + len(MARKS)
}  # fmt: skip
CONFIG = {
    "model_type": "gliner_uni_encoder_span", "encoder_config": ENCODER, "hidden_size": 16, "max_width": 3,
    "max_len": 20, "num_rnn_layers": 1, "span_mode": "markerV0", "class_token_index": len(VOCAB),
    "embed_ent_token": True, "subtoken_pooling": "first", "words_splitter_type": "whitespace",
}  # fmt: skip
SCALE = 0.2
ENCODER_PREFIX, SPANS = "token_rep_layer.bert_layer.model.", "span_rep_layer.span_rep_layer."


def tensors(config, seed=9):
    """Draw all tensors; of other seeds, all probabilities may be near 0 or 1."""
    h, encoder = config["hidden_size"], config["encoder_config"]
    rng, shapes = np.random.default_rng(seed), {}
    for name, shape in tiny_encoders.shapes("deberta-v2", encoder).items():
        shape = (encoder["vocab_size"], *shape[1:]) if "word_embeddings" in name else shape
        shapes[ENCODER_PREFIX + name] = shape
    if encoder["hidden_size"] != h:
        shapes["token_rep_layer.projection.weight"] = (h, encoder["hidden_size"])
        shapes["token_rep_layer.projection.bias"] = (h,)
    for end in (f"l{i}{way}" for i in range(config["num_rnn_layers"]) for way in ("", "_reverse")):
        shapes |= {f"rnn.lstm.weight_ih_{end}": (2 * h, h), f"rnn.lstm.weight_hh_{end}": (2 * h, h // 2)}
        shapes |= {f"rnn.lstm.bias_ih_{end}": (2 * h,), f"rnn.lstm.bias_hh_{end}": (2 * h,)}
    for name, n in (("project_start", h), ("project_end", h), ("out_project", 2 * h), ("", h)):
        name = f"{SPANS}{name}" if name else "prompt_rep_layer"
        shapes |= {f"{name}.0.weight": (4 * h, n), f"{name}.0.bias": (4 * h,)}
        shapes |= {f"{name}.3.weight": (h, 4 * h), f"{name}.3.bias": (h,)}
    drawn = {}
    for name, shape in shapes.items():
        # Of the last maps, so that some probabilities are neither 0 nor 1; and of states that differ.
        scale = 0.3 if name.startswith(ENCODER_PREFIX) else 1.0 if name.startswith("rnn.") else SCALE
        scale = scale if "weight" in name else 0.05
        is_norm = name.endswith("LayerNorm.weight")
        drawn[name] = (is_norm + scale * rng.standard_normal(shape)).astype(np.float32)
    return drawn


def write(folder, **changes):
    """Write the folder, and return its values and its tensors."""
    config = {**CONFIG, **changes}
    drawn = tensors(config)
    folder.mkdir(exist_ok=True)
    (folder / "gliner_config.json").write_text(json.dumps(config))
    save_file(drawn, folder / "model.safetensors")
    write_tokenizer(folder)
    return config, drawn


def write_tokenizer(folder, marks=MARKS):
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=special)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def words_of(text, config):
    return list(re.finditer(r"\w+(?:[-_]\w+)*|\S", text))[: config["max_len"]]


def probabilities(config, weights, text, labels):
    """Probabilities (words, widths, labels), 0 of spans that do not fit; a word without a token is 0."""
    t = {name: x.astype(np.float64) for name, x in weights.items()}
    words, ids, starts, marks = [word[0] for word in words_of(text, config)], [1], [], []
    for label in labels:
        marks.append(len(ids) + (not config["embed_ent_token"]))
        ids += [len(VOCAB), *pieces(label)]
    ids.append(len(VOCAB) + 1)
    for word in words:
        starts.append(len(ids) if word != NO_TOKEN else -1)
        ids += pieces(word.replace(NO_TOKEN, ""))
    inner = {name.removeprefix(ENCODER_PREFIX): x for name, x in t.items()}
    x = tiny_encoders.result("deberta-v2", config["encoder_config"], inner, np.array([*ids, 2]))
    if config["encoder_config"]["hidden_size"] != config["hidden_size"]:
        x = linear(x, t, "token_rep_layer.projection")
    prompts, h = mapped(x[marks], t, "prompt_rep_layer"), np.append(x, 0 * x[:1], axis=0)[starts]
    for layer in range(config["num_rnn_layers"]):
        ways = lstm(h, t, f"l{layer}"), lstm(h[::-1], t, f"l{layer}_reverse")[::-1]
        h = np.concatenate(ways, axis=1)
    first, last = (mapped(h, t, f"{SPANS}{name}") for name in ("project_start", "project_end"))
    found = np.zeros((len(words), min(config["max_width"], len(words)), len(labels)))
    for i in range(len(words)):
        for width in range(min(config["max_width"], len(words) - i)):
            both = np.maximum(np.concatenate([first[i], last[i + width]]), 0)
            found[i, width] = 1 / (1 + np.exp(-prompts @ mapped(both, t, f"{SPANS}out_project")))
    return found


def pieces(text):
    """The ids of words of LETTERS."""
    found = []
    for word in re.findall(r"\w+|[^\w\s]", text.replace("_", " _ ")):
        names = [word] if word in ("the", "city") else [word[0], *(f"##{letter}" for letter in word[1:])]
        found += map(VOCAB.index, names)
    return found


def mapped(x, t, name):
    return linear(np.maximum(linear(x, t, f"{name}.0"), 0), t, f"{name}.3")


def lstm(x, t, end):
    """The states of a recurrent layer along the rows of x."""
    state = cell = np.zeros(t[f"rnn.lstm.weight_hh_{end}"].shape[1])
    out = []
    for row in x:
        gates = t[f"rnn.lstm.weight_ih_{end}"] @ row + t[f"rnn.lstm.bias_ih_{end}"]
        gates += t[f"rnn.lstm.weight_hh_{end}"] @ state + t[f"rnn.lstm.bias_hh_{end}"]
        i, f, g, o = np.split(gates, 4)
        cell = cell / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        state = np.tanh(cell) / (1 + np.exp(-o))
        out.append(state)
    return np.array(out).reshape(len(x), len(state))
