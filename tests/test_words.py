"""Names that other libraries have for an argument: an error says the right one."""

import re

import numpy as np
import pytest
import tiny_models as tiny
from model_folders import write_reranker, write_settings
from tiny_tokenizers import write_byte_tokenizer, write_tokenizer

import fastattn
from fastattn import functional, layers, masks, models
from fastattn.grad import vjp

Q = np.ones((1, 2, 4, 8), np.float32)
X = np.ones((1, 4, 8), np.float32)
PACKED = (np.ones((4, 2, 8), np.float32),) * 3
HEADS = layers.MultiHeadAttention(8, 2, rng=0)
LAYER = layers.TransformerEncoderLayer(8, 2, 16, rng=0)
STACK = layers.TransformerEncoder([LAYER])
DECODER = layers.TransformerDecoderLayer(8, 2, 16, rng=0)
ATTENDS, HIDES = r"\(True attends", r"\(True hides, floats are added\)"
EACH_OWN = "a sequence of layers, each its own: "
WEIGHTS = ": fastattn.attention_weights, and need_weights=True of MultiHeadAttention, return the weights"

CALLS = {
    "attention": lambda **named: fastattn.attention(Q, Q, Q, **named),
    "scaled_dot_product_attention": lambda **named: fastattn.scaled_dot_product_attention(Q, Q, Q, **named),
    "varlen_attention": lambda **named: fastattn.varlen_attention(*PACKED, [0, 4], [0, 4], **named),
    "attention_weights": lambda **named: fastattn.attention_weights(Q, Q, **named),
    "explain": lambda **named: fastattn.explain(Q, Q, Q, **named),
    "sigmoid_attention": lambda **named: functional.sigmoid_attention(Q, Q, Q, **named),
    "gated_attention": lambda **named: functional.gated_attention(Q, Q, Q, Q, **named),
    "flex_attention": lambda **named: functional.flex_attention(Q, Q, Q, **named),
    "linear_attention": lambda **named: functional.linear_attention(Q, Q, Q, rule="linear", **named),
    "selective_scan": lambda **named: functional.selective_scan(X, X, X[0].T, X, X, **named),
    "attention_backward": lambda **named: functional.attention_backward(Q, Q, Q, Q, Q, Q[..., 0], **named),
    "MultiHeadAttention": lambda **named: HEADS(X, **named),
    "TransformerEncoderLayer": lambda **named: LAYER(X, **named),
    "vjp(TransformerEncoderLayer)": lambda **named: vjp(LAYER, X, **named),
    "TransformerEncoder": lambda **named: STACK(X, **named),
    "vjp(TransformerEncoder)": lambda **named: vjp(STACK, X, **named),
    "TransformerDecoderLayer": lambda **named: DECODER(X, X, **named),
    "made MultiHeadAttention": lambda **named: layers.MultiHeadAttention(8, 2, **named),
    "made TransformerEncoderLayer": lambda **named: layers.TransformerEncoderLayer(8, 2, **named),
    "made TransformerEncoder": lambda **named: layers.TransformerEncoder(LAYER, **named),
    "made TransformerDecoder": lambda **named: layers.TransformerDecoder(DECODER, **named),
    "made LayerNorm": lambda **named: layers.LayerNorm(**named),
}
SAID = {
    "attention": {
        "is_causal": "; expected causal$",
        "attn_mask": rf"; expected mask {ATTENDS}\) or bias \(added to the scores\)$",
        "key_padding_mask": rf"; expected mask {ATTENDS}\) or kv_lengths \(how many keys .* count\)$",
        "mask_mod": r"; expected mask \(masks.compile makes one of a function\)$",
        "score_mod": ": functional.flex_attention takes it$",
        "dropout_p": r"; expected dropout \(with a seed\)$",
        "softmax_scale": "; expected scale$",
        "window_size": r"; expected window \(a pair \(left, right\), None for no bound\)$",
        "logit_cap": "; expected softcap$",
        "enable_gqa": ": k and v may have fewer heads than q$",
        "return_softmax_lse": "; expected return_lse$",
        "return_attn_probs": WEIGHTS,
        "cu_seqlens_q": ": varlen_attention takes it$",
        "no_such_word": "; expected one of q, k, v, mask, .*, stats, num_threads, backend$",
        "others": "; expected one of q,",
        "return": "; expected return_lse$",
        "causl": "; expected causal$",
        "colour": "; expected one of q, k, v, mask, bias, ",
    },
    "selective_scan": {
        "delta_bias": "; expected dt_bias$",
        "delta_softplus": "; expected dt_softplus$",
        "return_last_state": "; expected return_state$",
    },
    "scaled_dot_product_attention": {
        "causal": "; expected is_causal$",
        "mask": rf"; expected attn_mask {ATTENDS}, floats are added\)$",
        "dropout": r"; expected dropout_p \(with a seed\)$",
        "key_padding_mask": "; expected attn_mask",
    },
    "varlen_attention": {
        "is_causal": "; expected causal$",
        "dropout_p": "; expected dropout",
        "alibi": "; .*_slopes$",
        "return_softmax_lse": "; expected return_lse$",
        "no_such_word": "; expected one of causal, .*, return_lse$",
    },
    "attention_weights": {"attn_mask": "; expected mask", "is_causal": "; expected causal$"},
    "explain": {"attn_mask": "; expected mask", "sm_scale": "; expected scale$"},
    "sigmoid_attention": {"is_causal": "; expected causal$", "dropout_p": "; expected one of mask, "},
    "gated_attention": {"is_causal": "; expected causal$", "s_aux": "; expected sinks$"},
    "flex_attention": {"block_mask": r"; expected mask \(masks.compile", "enable_gqa": ": k and v may"},
    "linear_attention": {"is_causal": "; expected causal$", "epsilon": "; expected eps$"},
    "attention_backward": {"attn_mask": "; expected mask", "softmax_scale": "; expected scale$"},
    "MultiHeadAttention": {
        "causal": "; expected is_causal$",
        "need_weight": "; expected need_weights$",
        "mask": f"; expected attn_mask {HIDES}$",
        "attention_mask": f"; expected key_padding_mask {HIDES}$",
        "kv_lengths": f"; expected key_padding_mask {HIDES}$",
        "dropout_p": ": grad.vjp takes dropout=, where gradients are made$",
        "output_attentions": "; expected need_weights$",
    },
    "TransformerEncoderLayer": {
        "causal": "; expected is_causal$",
        "mask": f"; expected src_mask {HIDES}$",
        "attn_mask": f"; expected src_mask {HIDES}$",
        "key_padding_mask": f"; expected src_key_padding_mask {HIDES}$",
    },
    "vjp(TransformerEncoderLayer)": {
        "causal": "; expected is_causal$",
        "dropout_p": ": grad.vjp takes dropout=",
    },
    "TransformerEncoder": {
        "causal": "; expected is_causal$",
        "src_mask": f"; expected mask {HIDES}$",
        "key_padding_mask": f"; expected src_key_padding_mask {HIDES}$",
    },
    "vjp(TransformerEncoder)": {"causal": "; expected is_causal$"},
    "TransformerDecoderLayer": {
        "is_causal": "; expected tgt_is_causal$",
        "mask": f"; expected tgt_mask {HIDES}$",
    },
    "made MultiHeadAttention": {
        "nhead": "; expected num_heads$",
        "num_key_value_heads": "; expected num_kv_heads$",
        "batch_first": ": the first axis is always the batch$",
        "dropout": ": grad.vjp takes dropout=",
        "causal": ": calls take is_causal and masks$",
        "attn_mask": ": calls take is_causal and masks$",
        "device": ": it computes on CPUs$",
    },
    "made TransformerEncoder": {
        **dict.fromkeys(
            ("num_layers", "encoder_layer"),
            rf"; expected layers \({EACH_OWN}\[TransformerEncoderLayer\(...\) for _ in range\(6\)\]\)$",
        ),
        "enable_nested_tensor": ": rows of padding are left out without it$",
    },
    "made TransformerDecoder": {
        "num_layers": rf"; expected layers \({EACH_OWN}\[TransformerDecoderLayer\(...\) for _",
    },
    "made LayerNorm": {"normalized_shape": "; expected features$"},
    "made TransformerEncoderLayer": {
        "nhead": "; expected num_heads$",
        "window": r": attention=\{'window': ...\} takes it$",
        "sliding_window": r": attention=\{'window': ...\} takes it$",
        "no_such_word": "; expected one of d_model, num_heads, ",
    },
}


@pytest.mark.parametrize(
    ("name", "word"), [(name, word) for name, words in SAID.items() for word in words], ids=str
)
def test_the_right_name_is_said(name, word):
    func = name.removeprefix("made ").removeprefix("vjp(").removesuffix(")")
    with pytest.raises(
        TypeError, match=rf"^{re.escape(func)}\(\): {word} is not an argument{SAID[name][word]}"
    ):
        CALLS[name](**{word: None})


@pytest.mark.parametrize("mask", [lambda b, h, i, j: i >= j, masks.causal()], ids=["function", "structure"])
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("scaled_dot_product_attention", "attn_mask"),
        ("MultiHeadAttention", "attn_mask"),
        ("MultiHeadAttention", "key_padding_mask"),
        ("TransformerEncoderLayer", "src_mask"),
        ("TransformerEncoderLayer", "src_key_padding_mask"),
    ],
)
def test_masks_as_torch_has_them_are_arrays(name, argument, mask):
    came = "a function" if callable(mask) else r"causal\(\)"
    expected = r"expected an array \(masks.Mask.to_array makes one\)"
    with pytest.raises(TypeError, match=rf"^{name}\(\): {argument} is {came}; {expected}$"):
        CALLS[name](**{argument: mask})


def test_a_window_without_a_bound_is_none():
    for sides in ((-1,), (3, -1)):
        with pytest.raises(
            ValueError, match=r"^window\(\): .* is -1; expected at least 0, or None for no bound$"
        ):
            masks.window(*sides)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    encoder, pairs, writer = (tmp_path_factory.mktemp(name) for name in ("bert", "pairs", "gpt2"))
    tiny.write(encoder, "bert")
    write_tokenizer(encoder)
    write_settings(encoder)
    write_reranker(pairs)
    tiny.write(
        writer, "gpt2", tiny.tensors("gpt2", {**tiny.CONFIGS["gpt2"], "vocab_size": 256}), vocab_size=256
    )
    write_byte_tokenizer(writer)
    return {"encoder": encoder, "pairs": pairs, "writer": writer}


def test_words_of_sentence_transformers_and_transformers(folders):
    encoder, pairs, writer = (models.load(folder) for folder in folders.values())
    for func, call, said in (
        ("load", lambda **named: models.load(folders["encoder"], **named), {
            "torch_dtype": "; expected dtype$",
            "load_in_8bit": r"; expected weights_dtype \(\"int8\", \"q8\", \"int4\" or \"uint4\"\)$",
            "device": ": it computes on CPUs$",
            "trust_remote_code": ": no code of a folder is run$",
            "cache_folder": ": HF_HOME, HF_TOKEN and HF_HUB_OFFLINE say it$",
            "max_seq_length": ": model.max_seq_length = ... sets it$",
        }),
        ("encode", lambda **named: encoder.encode(["a"], **named), {
            "convert_to_numpy": ": results are NumPy arrays$",
            "convert_to_tensor": ": results are NumPy arrays; torch.from_numpy makes tensors of them$",
            "output_value": ": a call of the model, .* has the vectors of tokens$",
            "device": ": it computes on CPUs$",
            "normalize": "; expected normalize_embeddings$",
            "max_length": ": model.max_seq_length = ... sets it$",
        }),
        ("encode_query", lambda **named: encoder.encode_query(["a"], **named), {
            "convert_to_numpy": ": results are NumPy arrays$",
        }),
        ("predict", lambda **named: pairs.predict([("a", "b")], **named), {
            "convert_to_tensor": ": results are NumPy arrays;",
            "activation_fct": "; expected activation_fn$",
        }),
        ("rank", lambda **named: pairs.rank("a", ["b"], **named), {"convert_to_tensor": ": results are"}),
        ("generate", lambda **named: writer.generate([1], **named), {
            "max_length": "; expected max_new_tokens$",
            "do_sample": r"; expected temperature \(above 0\)$",
            "eos_token_id": "; expected stop$",
            "rng": "; expected seed$",
        }),
    ):  # fmt: skip
        for word, text in said.items():
            with pytest.raises(TypeError, match=rf"^{func}\(\): {word} is not an argument{text}"):
                call(**{word: None})
