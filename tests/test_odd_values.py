"""Values that no argument takes: our own errors, which name the function and the argument."""

import re

import numpy as np
import pytest
import tiny_models as tiny
from tiny_models import CONFIGS
from tiny_tokenizers import WORDS, write_byte_tokenizer, write_tokenizer
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models

import fastattn
from fastattn import functional, layers, masks, models, ops, positions
from fastattn._args.values import short
from fastattn.models import ModelError

X = np.ones((1, 2, 6, 8), np.float32)
ROWS = np.ones((3, 8), np.float32)
WEIGHT = ops.pack(np.ones((5, 8), np.float32))
LAYER = layers.MultiHeadAttention(8, 2, rng=np.random.default_rng(0))
TABLE = np.ones((6, 4), np.float32)
TOKENS = np.ones((1, 6, 8), np.float32)

HUGE = [2**63, 2**64, 2**70, -(2**63) - 1, -(2**70), 10**400, 10**5000, np.uint64(2**63), [2**63], [2**70],
        [1, -(2**70)], np.array([2**64 - 1], np.uint64)]  # fmt: skip
NO_STRINGS = [np.ones((2, 2)), np.zeros(0), np.array(["relu", "x"]), ["relu"], {"relu": 1}, 2**70, 10**5000,
              1.5, b"relu", np.zeros(2, [("a", int)]), [np.ones((2, 2))], "a\0b", "\ud800",
              "x" * 999]  # fmt: skip
NO_FLAGS = [np.ones((2, 2)), np.zeros(0), np.array([True]), ["x"], 1, 2**70, masks.causal()]


def message_of(call, value):
    """The message of the error that `call` raises, or None if it raises none."""
    try:
        call(value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def raises(start, call, value):
    """Tell whether the call fails. An error must be one short line that begins with `start`."""
    message = message_of(call, value)
    if message is None:
        return False
    assert re.match(start, message), message
    assert "expected" in message
    assert "\n" not in message
    assert len(message) < 300
    assert not re.search(r"\b(has|have|returned) of type", message)
    return True


@pytest.mark.parametrize("value", ["x" * 99, ["x"] * 99, {"x" * 99: 1}, np.ones(99), 10**99, "\n" * 99, 3])
def test_messages_show_values_as_nouns(value):
    """They stand after "has" and "returned", not only after "is"."""
    shown = short(value)
    assert len(shown) <= 60
    assert re.match(r"'.*'$|\d|a value of type (list|dict)$|an (array|integer) of ", shown), shown


def decoding_cache(value):
    cache = layers.KVCache()
    cache.append(X, X, lengths=value)


STRINGS = {
    r"linear\(\): activation is": lambda s: ops.linear(ROWS, WEIGHT, activation=s),
    r"activate\(\): activation is": lambda s: ops.activate(ROWS, s),
    r"pack\(\): dtype is": lambda s: ops.pack(ROWS, dtype=s),
    r"attention\(\): backend is": lambda s: fastattn.attention(X, X, X, backend=s),
    r"attention\(\): (an entry of )?stats ": lambda s: fastattn.attention(X, X, X, stats=s),
    r"attention\(\): an entry of stats is": lambda s: fastattn.attention(X, X, X, stats=(s,)),
    r"linear_attention\(\): rule is": lambda s: functional.linear_attention(X, X, X, rule=s),
    r"FeedForward\(\): activation is": lambda s: layers.FeedForward(4, 8, s),
    r"Linear\(\): weights_dtype is": lambda s: layers.Linear(4, 8, weights_dtype=s),
    r"MultiHeadAttention\(\): weights_dtype is": lambda s: layers.MultiHeadAttention(8, 2, weights_dtype=s),
    r"TransformerEncoderLayer\(\): norm is": lambda s: layers.TransformerEncoderLayer(8, 2, norm=s),
    r"Linear.load_state_dict\(\): weights_dtype": lambda s: layers.Linear(4, 8).load_state_dict(
        {}, weights_dtype=s
    ),
    r"rope_frequencies\(\): the type of scaling is": lambda s: positions.rope_frequencies(
        8, scaling={"rope_type": s}
    ),
    r"KVCache\(\): dtype is": lambda s: layers.KVCache(dtype=s),
    r"sinusoidal\(\): dtype is": lambda s: positions.sinusoidal(3, 4, dtype=s),
    r"load\(\): dtype is": lambda s: models.load("there", dtype=s),
    r"load\(\): weights_dtype is": lambda s: models.load("there", weights_dtype=s),
}


@pytest.mark.parametrize("start", STRINGS)
def test_what_is_none_of_the_strings(start):
    for value in NO_STRINGS:
        assert raises(start, STRINGS[start], value), value


INTEGERS = {
    r"attention\(\): kv_lengths ": lambda n: fastattn.attention(X, X, X, kv_lengths=n),
    r"attention\(\): q_offset ": lambda n: fastattn.attention(X, X, X, q_offset=n, causal=True),
    r"attention\(\): window\[1\] ": lambda n: fastattn.attention(X, X, X, window=(None, n)),
    r"attention\(\): row_ranges\[0\] ": lambda n: fastattn.attention(X, X, X, row_ranges=(n, 3)),
    r"attention\(\): num_threads ": lambda n: fastattn.attention(X, X, X, num_threads=n),
    r"disentangled_attention\(\): q_offset ": lambda n: functional.disentangled_attention(
        X, X, X, X[0], q_offset=n
    ),
    r"disentangled_attention\(\): max_distance ": lambda n: functional.disentangled_attention(
        X, X, X, X[0], max_distance=n
    ),
    r"top_k_attention\(\): top_k ": lambda n: functional.top_k_attention(X, X, X, top_k=n),
    r"neighborhood\(\): kernel": lambda n: masks.neighborhood((4,), (n,)),
    r"embedding\(\): ids ": lambda n: ops.embedding(n, ROWS),
    r"rope_frequencies\(\): rotary_dim ": positions.rope_frequencies,
    r"rope_frequencies\(\): seq_len ": lambda n: positions.rope_frequencies(8, seq_len=n),
    r"sinusoidal\(\): length ": lambda n: positions.sinusoidal(n, 4),
    r"sinusoidal\(\): d_model ": lambda n: positions.sinusoidal(4, n),
    r"sinusoidal\(\): offset ": lambda n: positions.sinusoidal(4, 4, offset=n),
    r"alibi_slopes\(\): num_heads ": positions.alibi_slopes,
    r"t5_buckets\(\): len_q ": lambda n: positions.t5_buckets(n, 4),
    r"t5_buckets\(\): len_k ": lambda n: positions.t5_buckets(4, n),
    r"t5_buckets\(\): num_buckets ": lambda n: positions.t5_buckets(4, 4, num_buckets=n),
    r"t5_buckets\(\): max_distance ": lambda n: positions.t5_buckets(4, 4, max_distance=n),
    r"KVCache\(\): capacity ": layers.KVCache,
    r"KVCache.append\(\): lengths ": decoding_cache,
    r"KVCache.append\(\): lengths .": lambda n: LAYER(TOKENS, cache=layers.KVCache(), lengths=n),
    r"Linear\(\): in_features ": lambda n: layers.Linear(n, 4),
    r"LayerNorm\(\): features ": layers.LayerNorm,
    r"MultiHeadAttention\(\): embed_dim ": lambda n: layers.MultiHeadAttention(n, 2),
    r"MultiHeadAttention\(\): num_heads ": lambda n: layers.MultiHeadAttention(8, n),
    r"MultiHeadAttention\(\): head_dim ": lambda n: layers.MultiHeadAttention(8, 2, head_dim=n),
    r"to_array\(\): len_q ": masks.causal().to_array,
    r"to_array\(\): len_k ": lambda n: masks.causal().to_array(3, n),
    r"to_array\(\): num_heads ": lambda n: masks.causal().to_array(3, num_heads=n),
    r"to_array\(\): batch_shape\[0\] ": lambda n: masks.causal().to_array(3, batch_shape=(n,)),
    r"to_array\(\): q_offset ": lambda n: masks.causal().to_array(3, q_offset=n),
    r"compile\(\): shape\[1\] ": lambda n: masks.compile(masks.causal(), (1, n, 4)),
    r"bigbird\(\): window ": lambda n: masks.bigbird(4, n),
    r"swin\(\): (shift|window)": lambda n: masks.swin((8, 8), n, 1),
    r"documents\(\): ids ": masks.documents,
    r"first_keys\(\): n |attention\(\): n of first_keys": lambda n: fastattn.attention(
        X, X, X, mask=masks.first_keys(n)
    ),
}
# Numbers that are only compared may be of any size.
UNBOUNDED = ("window", "stride", "dilation", "top_k", "chunk", "seq_len")


@pytest.mark.parametrize("start", INTEGERS)
def test_integers_beyond_64_bits(start):
    unbounded = any(name in start for name in UNBOUNDED)
    for value in HUGE:
        assert raises(start, INTEGERS[start], value) or unbounded, value


FLAGS = {
    r"layer_norm\(\): return_sum is": lambda x: ops.layer_norm(ROWS, return_sum=x),
    r"rms_norm\(\): return_sum is": lambda x: ops.rms_norm(ROWS, return_sum=x),
    r"MultiHeadAttention\(\): need_weights is": lambda x: LAYER(TOKENS, need_weights=x),
    r"MultiHeadAttention\(\): average_attn_weights is": lambda x: LAYER(TOKENS, average_attn_weights=x),
    r"attention\(\): causal is": lambda x: fastattn.attention(X, X, X, causal=x),
    r"apply_rope\(\): interleaved is": lambda x: positions.apply_rope(X, TABLE, TABLE, interleaved=x),
}


@pytest.mark.parametrize("start", FLAGS)
def test_what_is_neither_true_nor_false(start):
    for value in NO_FLAGS:
        assert raises(start, FLAGS[start], value), value


class Broken:
    """An object that fails when NumPy asks it for its array."""

    def __array__(self, dtype=None, copy=None):
        raise KeyError("no such thing")


@pytest.mark.parametrize("value", [Broken(), np.ma.masked, np.array(1.0)], ids=["broken", "masked", "array"])
def test_objects_that_are_almost_numbers(value):
    numbers = {
        r"attention\(\): scale is": lambda x: fastattn.attention(X, X, X, scale=x),
        r"layer_norm\(\): eps is": lambda x: ops.layer_norm(ROWS, eps=x),
        r"sinusoidal\(\): base is": lambda x: positions.sinusoidal(3, 4, base=x),
    }
    arrays = {
        r"attention\(\): q (is|has)": lambda x: fastattn.attention(x, X, X),
        r"merge_states\(\): outs ": lambda x: fastattn.merge_states(x, x),
        r"TransformerEncoder\(\): layers ": layers.TransformerEncoder,
    }
    for start, call in {**numbers, **arrays}.items():
        assert raises(start, call, value) or isinstance(value, np.ndarray)


def test_options_of_layers():
    known = r"^TransformerDecoderLayer\(\): {} {}; expected .*num_kv_heads, head_dim"
    for name in ("attention", "cross_attention"):
        for value, what in ((ROWS, "is an array of .*"), ([1], r"is \[1\]"), ({"heads": 2}, "has 'heads'")):
            with pytest.raises(TypeError, match=known.format(name, what)):
                layers.TransformerDecoderLayer(8, 2, **{name: value})


def test_sizes_of_numpy_are_integers():
    """Sums and products of large integers do not wrap round."""
    layer = layers.MultiHeadAttention(np.uint8(200), np.int8(4), rng=np.random.default_rng(0))
    assert layer.parameters()["in_proj_weight"].shape == (600, 200)
    wide = layers.FeedForward(np.uint8(16), np.uint8(20), rng=np.random.default_rng(0))
    assert wide(np.ones((3, 16), np.float32)).shape == (3, 16)


def test_ids_and_texts_of_models(tmp_path):
    """Half of a surrogate pair is what a JSON file may hold."""
    config = {**CONFIGS["gpt2"], "vocab_size": 256}
    tiny.write(tmp_path / "gpt2", "gpt2", tiny.tensors("gpt2", config), vocab_size=256)
    write_byte_tokenizer(tmp_path / "gpt2")
    tiny.write(tmp_path / "bert", "bert")
    write_tokenizer(tmp_path / "bert")
    writer, encoder = models.load(tmp_path / "gpt2"), models.load(tmp_path / "bert")

    def generate(ids=((1, 2),), max_new_tokens=2, **options):
        return list(writer.generate(ids, max_new_tokens, **options))

    for start, call, values in (
        (r"bert\(\): input_ids has", encoder, [2**70, [[2**70]], [[2**63]], np.array([[2**63]], np.uint64)]),
        (r"encode\(\): sentences(\[0\])? ", encoder.encode, [3, np.array(3), None, b"text", [b"text"], [3]]),
        (r"encode\(\): sentences\[1\] has '\\ud800'", encoder.encode, [["the cat", "the \ud800"]]),
        (r"encode\(\): texts\[1\] has '\\ud800'", writer.text.encode, [["the cat", "the \ud800"]]),
        (r"generate\(\): ids ", generate, [[[1, [2]], [3]], [[1, 2**70]], [[2**63]], [[None]]]),
        (r"generate\(\): max_new_tokens is", lambda n: generate(max_new_tokens=n), HUGE),
        (r"generate\(\): stop ", lambda n: generate(stop=n), [2**70, [2**70], [1, -(2**70)]]),
        (
            r"decode\(\): sequences ",
            writer.text.decode,
            [3, np.array(3), None, [3], [[[1]]], [[2**70]], [["a"]]],
        ),
        (r"stream\(\): ids ", lambda x: list(writer.text.stream([1], x)), [3, None, [[1]], [2**70], ["a"]]),
        (r"encode\(\): precision is", lambda x: encoder.encode(["a"], precision=x), NO_STRINGS),
        (r"encode\(\): prompt_name is", lambda x: encoder.encode(["a"], prompt_name=x), NO_STRINGS),
        (r"encode\(\): normalize_", lambda x: encoder.encode(["a"], normalize_embeddings=x), NO_FLAGS),
    ):
        for value in values:
            assert raises(start, call, value), value


def test_words_that_a_tokenizer_does_not_know(tmp_path):
    tiny.write(tmp_path, "bert")
    words = {word: i for i, word in enumerate(WORDS) if word != "<unk>"}
    path = tmp_path / "tokenizer.json"
    Tokenizer(tokenizer_models.WordLevel(words, unk_token="<unk>")).save(str(path))
    with pytest.raises(ModelError, match=f"^{re.escape(str(path))} cannot encode a text: WordLevel error"):
        models.load(tmp_path).encode(["a bird"])
