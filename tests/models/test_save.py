"""Models that are saved give the same results from folders and GGUF files, which the package gguf reads."""

import json

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_gpt_oss
import tiny_models as tiny
from model_folders import change_config, write_modules, write_parts
from tiny_tokenizers import write_byte_tokenizer, write_tokenizer

from fastattn import models
from fastattn._formats import FORMATS, feedback_of
from fastattn.grad import vjp
from fastattn.models import ModelError
from fastattn.models._calibration import moments
from fastattn.models._to_gguf import _calibrated

IDS = np.arange(40).reshape(2, 20) % 29
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
NORMALISED = {"qwen3_moe": {"norm_topk_prob": True}}


def loaded(folder, kind="llama", **changes):
    tiny.write(folder, kind, **{**NORMALISED.get(kind, {}), **changes})
    return models.load(folder)


def wide(kind="llama"):
    """Sizes whose rows are whole blocks, heads of 64."""
    return {
        key: x
        for key, x in tiny_gguf.config(kind).items()
        if key not in tiny.CONFIGS[kind] or x != tiny.CONFIGS[kind][key]
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_has_the_same_logits_to_the_bit(kind, tmp_path):
    """From a folder, from a file, and back to a folder."""
    model = loaded(tmp_path / "model", kind)
    models.save(model, tmp_path / "model.gguf")
    read = models.load(tmp_path / "model.gguf", weights_dtype="float32")
    np.testing.assert_array_equal(read(IDS), model(IDS))
    assert list(read.generate([1, 2, 3], 8)) == list(model.generate([1, 2, 3], 8))
    models.save(read, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    models.save(read, tmp_path / "folder")
    folder = models.load(tmp_path / "folder")
    np.testing.assert_array_equal(folder(IDS), model(IDS))
    expected = model.state_dict()
    assert {name: x.shape for name, x in folder.state_dict().items()} == {
        n: x.shape for n, x in expected.items()
    }
    assert sorted(x.name for x in tmp_path.iterdir()) == ["again.gguf", "folder", "model", "model.gguf"]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3-causal", "gemma4_text", "lfm2"])
def test_tensors_that_a_folder_has_otherwise(kind, tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", kind, "F32")
    model = models.load(tmp_path / "model.gguf")
    models.save(model, tmp_path / "again.gguf")
    np.testing.assert_array_equal(models.load(tmp_path / "again.gguf")(IDS), model(IDS))
    with pytest.raises(
        ModelError, match=r"holds a .*, whose tensors are not as in a folder of floats; expected path to end"
    ):
        models.save(model, tmp_path / "folder")


@pytest.mark.parametrize("kind", [*tiny.DECODERS, *tiny.ENCODERS])
def test_a_folder_of_any_family(kind, tmp_path):
    tiny.write(tmp_path / "model", kind)
    model = models.load(tmp_path / "model")
    models.save(model, tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    np.testing.assert_array_equal(again(IDS), model(IDS))
    expected = model.state_dict()
    state = again.state_dict()
    assert state.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(state[name], x)
    changed = model.with_state_dict({name: 1.5 * x for name, x in expected.items()})
    models.save(changed, tmp_path / "saved")  # over the one that is there
    np.testing.assert_array_equal(models.load(tmp_path / "saved")(IDS), changed(IDS))


def test_a_folder_in_another_type_and_from_parts(tmp_path):
    (tmp_path / "model").mkdir()
    write_parts(tmp_path / "model", "llama")
    change_config(tmp_path / "model", torch_dtype="float32")
    model = models.load(tmp_path / "model")
    for dtype in ("float16", "bfloat16"):
        models.save(model, tmp_path / dtype, dtype=dtype)
        rounded = {n: x.astype(dtype).astype(np.float32) for n, x in model.state_dict().items()}
        again = models.load(tmp_path / dtype)
        np.testing.assert_array_equal(again(IDS), model.with_state_dict(rounded)(IDS))
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == dtype
        assert not (tmp_path / dtype / "model.safetensors.index.json").exists()
    models.save(model, tmp_path / "model")  # over its own folder
    np.testing.assert_array_equal(models.load(tmp_path / "model")(IDS), model(IDS))


def test_modules_and_tokenizers_come_along(tmp_path):
    folder = tmp_path / "model"
    tiny.write(folder, "bert")
    write_tokenizer(folder)
    write_modules(folder, ("Normalize", None))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    model = models.load(folder)
    models.save(model, tmp_path / "saved")
    texts = ["the cat sat", "a dog"]
    np.testing.assert_array_equal(models.load(tmp_path / "saved").encode(texts), model.encode(texts))
    assert not (tmp_path / "saved/pytorch_model.bin").exists()


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0", "q6_k", "q4_k", "q4_1", "q4_0"])
def test_the_package_gguf_reads_the_same_numbers(dtype, kind, tmp_path):
    model = loaded(tmp_path / "model", kind, **wide(kind))
    path = tmp_path / "model.gguf"
    models.save(model, path, dtype=dtype)
    read = models.load(path, weights_dtype="float32")
    state, expected = read.state_dict(), model.state_dict()
    tensors = {x.name: x for x in gguf.GGUFReader(path).tensors}
    llama = kind in ("llama", "mistral", "mixtral")
    kinds = set()
    for name, x in expected.items():
        own = tiny_gguf.name_of(name, kind)
        tensor = tensors[own]
        kinds.add(tensor.tensor_type.name)
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".experts." in name:
            number = name.split(".experts.")[1].split(".")[0]
            numbers, own = numbers[int(number)], own.replace("_exps.", f"_exps.{number}.")
        if llama and ("q_proj" in name or "k_proj" in name):
            numbers = tiny_gguf.halves(numbers, 64)
        np.testing.assert_array_equal(state[own], numbers)
        assert np.abs(numbers - x).max() <= (0.3 if "4" in dtype else 0.03) * np.abs(x).max()
    expected = {"F32", {"float16": "F16", "bfloat16": "BF16"}.get(dtype, dtype.upper())}
    assert kinds == expected | ({"Q6_K"} if dtype == "q4_k" else set())  # of the output layer


def test_rows_that_are_not_whole_blocks(tmp_path):
    model = loaded(
        tmp_path / "model", hidden_size=96, intermediate_size=256, num_attention_heads=6, head_dim=10
    )
    for dtype, kinds in (
        ("q4_k", {"F32": "o", "Q4_1": "q", "Q4_K": "down", "Q8_0": None}),
        ("q6_k", {"F32": "o", "Q8_0": "q", "Q6_K": "down"}),
        ("q8_0", {"F32": "o", "Q8_0": "q"}),
    ):
        models.save(model, tmp_path / "model.gguf", dtype=dtype)
        tensors = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
        assert set(tensors.values()) == set(kinds)
        names = {"o": "blk.1.attn_output", "q": "blk.1.attn_q", "down": "blk.1.ffn_down", None: "output"}
        assert all(tensors[f"{names[part]}.weight"] == kind for kind, part in kinds.items())
        state = models.load(tmp_path / "model.gguf", weights_dtype="float32").state_dict()
        for name, x in model.state_dict().items():
            np.testing.assert_allclose(state[tiny_gguf.name_of(name)], x, rtol=0, atol=0.15 * np.abs(x).max())


def test_scalings_of_positions(tmp_path):
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 500.0,
    }  # fmt: skip
    linear = {"rope_type": "linear", "factor": 3.0}
    for said in ({"rope_scaling": llama3}, {"rope_parameters": llama3}, {"rope_scaling": linear}):
        model = loaded(tmp_path / "model", max_position_embeddings=64, **said)
        models.save(model, tmp_path / "model.gguf")
        got, expected = models.load(tmp_path / "model.gguf")(IDS), model(IDS)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for scaling in (
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    ):
        model = loaded(tmp_path / "model", max_position_embeddings=64, rope_scaling=scaling)
        with pytest.raises(
            ModelError, match=r"'rope_scaling' is .*; expected one that scales frequencies alone"
        ):
            models.save(model, tmp_path / "other.gguf")
    assert not (tmp_path / "other.gguf").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {}, r"config.json: 'model_type' is 'gpt2'; expected one of llama, mistral"),
        ("gemma3-causal", {}, "'model_type' is 'gemma3_text'; expected one of llama"),
        ("llama", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; expected silu for a GGUF file"),
        ("llama", {"eos_token_id": [1, 2, 3]}, "has 3 ids that end a text; expected at most 2"),
        ("qwen3_moe", {"norm_topk_prob": False}, "'norm_topk_prob' is False; expected true for a GGUF"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "'sliding_window' is 4; expected none in a GGUF file of a qwen2",
        ),
    ],
)
def test_models_that_are_refused(kind, changes, message, tmp_path):
    tiny.write(tmp_path / "model", kind, **changes)
    with pytest.raises(ModelError, match=message):
        models.save(models.load(tmp_path / "model"), tmp_path / "model.gguf")
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_biases_of_maps(tmp_path):
    config = {"attention_bias": True, "num_hidden_layers": 1}
    weights = tiny.tensors("llama", {**tiny.CONFIGS["llama"], "num_hidden_layers": 1})
    rng = np.random.default_rng(0)
    for part, size in (("q", 24), ("k", 12), ("v", 12), ("o", 24)):
        weights[f"model.layers.0.self_attn.{part}_proj.bias"] = rng.standard_normal(size).astype(np.float32)
    tiny.write(tmp_path / "model", "llama", weights, **config)
    model = models.load(tmp_path / "model")
    models.save(model, tmp_path / "model.gguf")
    np.testing.assert_array_equal(models.load(tmp_path / "model.gguf")(IDS), model(IDS))
    weights |= {
        f"model.layers.0.mlp.{x}_proj.bias": np.ones(n, np.float32)
        for x, n in (("gate", 40), ("up", 40), ("down", 24))
    }
    tiny.write(tmp_path / "model", "llama", weights, **config, mlp_bias=True)
    model = models.load(tmp_path / "model")
    models.save(model, tmp_path / "biased.gguf")
    np.testing.assert_array_equal(models.load(tmp_path / "biased.gguf")(IDS), model(IDS))


def test_arguments_that_are_refused(tmp_path):
    model = loaded(tmp_path / "model")
    for wrong, error, message in (
        ({"model": 5}, TypeError, r"save\(\): model is of type int; expected a model of load"),
        ({"path": 5}, TypeError, r"save\(\): path is of type int; expected a path"),
        (
            {"dtype": "q5_k"},
            ValueError,
            r"save\(\): dtype is 'q5_k'; expected one of float32, float16, bfloat16, q8_0",
        ),
        (
            {"path": tmp_path / "x", "dtype": "q4_k"},
            ValueError,
            r"dtype is 'q4_k'; expected one of float32, float16, bfloat16$",
        ),
        ({"path": tmp_path / "none/x.gguf"}, FileNotFoundError, "the folder .* is missing"),
    ):
        given = {"model": model, "path": tmp_path / "x.gguf", **wrong}
        with pytest.raises(error, match=message):
            models.save(given.pop("model"), given.pop("path"), **given)
    tiny.write(tmp_path / "bert", "bert")
    with pytest.raises(
        TypeError, match=r"save\(\): model is of type Encoder; expected a Decoder for a GGUF file"
    ):
        models.save(models.load(tmp_path / "bert"), tmp_path / "x.gguf")
    state = model.state_dict()
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e30
    for path, dtype in (
        (tmp_path / "x.gguf", "q8_0"),
        (tmp_path / "x.gguf", "float16"),
        (tmp_path / "x", "float16"),
    ):
        big = model.with_state_dict(state)
        if dtype == "q8_0":
            big = loaded(tmp_path / "big", hidden_size=32)
            state_of = big.state_dict()
            state_of["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e30
            big = big.with_state_dict(state_of)
        with pytest.raises(
            ValueError, match=r"save\(\): 'model.layers.1.mlp.up_proj.weight' has values that are not"
        ):
            models.save(big, path, dtype=dtype)
    assert {x.name for x in tmp_path.iterdir()} == {"model", "bert", "big"}


MERGES = ("t h", "th e", "Ġ the", "i n", "1 2")
SPECIAL = ["<s>", "</s>"]
TEXTS = ["the thin 123 <s> in</s>é the\n\n the", "", "  12  the"]


def with_tokenizer(folder, change=None, vocab=270, kind="llama", **config):
    """A folder whose tokenizer merges bytes; `change` works on the JSON of it."""
    tiny.write(folder, kind, vocab_size=vocab, **{"eos_token_id": 262, **config})
    tokenizer = write_byte_tokenizer(folder, MERGES)
    tokenizer.add_special_tokens(SPECIAL)
    said = json.loads(tokenizer.to_str())
    if change is not None:
        change(said)
    (folder / "tokenizer.json").write_text(json.dumps(said))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return models.load(folder)


def qwen(said):
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    pattern += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    said["normalizer"] = {"type": "NFC"}
    said["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte]}


def digits(said):
    byte = said["pre_tokenizer"]
    said["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte],
    }


def begun(said):
    """<s> before texts."""
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<s>": {"id": "<s>", "ids": [261], "tokens": ["<s>"]}}
    said["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "special_tokens": tokens,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "pre"), [(None, "gpt-2"), (digits, "smollm"), (qwen, "qwen2"), (begun, "gpt-2")]
)
def test_a_tokenizer_of_bytes(change, pre, tmp_path):
    model = with_tokenizer(tmp_path / "model", change)
    models.save(model, tmp_path / "model.gguf")
    read = models.load(tmp_path / "model.gguf")
    assert read.text.encode(TEXTS) == model.text.encode(TEXTS)
    assert read.text.decode(model.text.encode(TEXTS)) == model.text.decode(model.text.encode(TEXTS))
    assert read.stop == model.stop == (262,)
    messages = [{"role": "user", "content": "the"}]
    assert read.conversation_ids(messages) == model.conversation_ids(messages) == [261, 257]
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == pre
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 270
    models.save(read, tmp_path / "folder")
    again = models.load(tmp_path / "folder")
    assert again.text.encode(TEXTS) == model.text.encode(TEXTS)
    assert again.conversation_ids(messages) == [261, 257]
    assert again.stop == (262,)


def scored(said):
    """A tokenizer of SentencePiece, as transformers has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁the", "he", "th", "▁the"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    said["model"] = {
        "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": ids,
        "merges": ["h e", "t h"],
    }  # fmt: skip
    said["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }  # fmt: skip
    said["pre_tokenizer"] = None
    each = said["added_tokens"][0]
    said["added_tokens"] = [{**each, "id": i, "content": pieces[i]} for i in range(3)]
    said["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }  # fmt: skip


def test_a_tokenizer_of_scores(tmp_path):
    model = with_tokenizer(tmp_path / "model", scored, eos_token_id=2)
    models.save(model, tmp_path / "model.gguf")
    read = models.load(tmp_path / "model.gguf")
    texts = ["the hé", "", " the  the", "</s>the"]
    assert read.text.encode(texts) == model.text.encode(texts)
    assert read.text.decode(model.text.encode(texts)) == model.text.decode(model.text.encode(texts))


def other_words(said):
    said["pre_tokenizer"] = {"type": "Whitespace"}


def lower_case(said):
    said["normalizer"] = {"type": "Lowercase"}


def stripped(said):
    said["added_tokens"][0]["lstrip"] = True


def words(said):
    said["model"] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}


def two_marks(said):
    begun(said)
    said["post_processor"]["single"].insert(0, said["post_processor"]["single"][0])


def other_order(said):
    scored(said)
    said["model"]["vocab"]["▁h"] = 300
    said["model"]["vocab"] = {piece: i for i, piece in enumerate(said["model"]["vocab"])}
    said["model"]["merges"].append("▁ h")
    del said["model"]["merges"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_words,
            "has a 'pre_tokenizer' .*Whitespace.*; expected one of a model in GGUF, or path without",
        ),
        (lower_case, "has a 'pre_tokenizer'"),
        (stripped, "has '<s>', which takes spaces or whole words"),
        (words, "has a model 'WordLevel'; expected BPE"),
        (two_marks, "around a text; expected at most one token before it"),
        (other_order, "has other 'merges' than a GGUF file can say"),
    ],
)
def test_tokenizers_that_are_refused(change, message, tmp_path):
    model = with_tokenizer(tmp_path / "model", change, vocab=300)
    with pytest.raises(ModelError, match=message):
        models.save(model, tmp_path / "model.gguf")
    small = with_tokenizer(tmp_path / "small", vocab=262)
    with pytest.raises(ModelError, match="has the id 262; expected less than the model's 'vocab_size', 262"):
        models.save(small, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


CALIBRATE = ["the thin 123 in the", "in the 12 12 the thin", "x" * 700]


def calibrated_model(folder, kind="llama", **more):
    return with_tokenizer(folder, None, kind=kind, **{**wide(kind), **NORMALISED.get(kind, {}), **more})


def test_moments_are_those_of_the_inputs_of_maps(tmp_path):
    """First layer and output, by NumPy; all maps have some, but for those of experts."""
    model = calibrated_model(tmp_path / "model")
    found, state = moments(model, CALIBRATE), model.state_dict()
    assert found.keys() == model.origin.parameters.maps()
    ids = np.concatenate(model.text.encode(CALIBRATE))
    x = state["model.embed_tokens.weight"][ids]
    x = (
        x
        / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
        * state["model.layers.0.input_layernorm.weight"]
    )
    for part in "qkv":
        got = found[f"model.layers.0.self_attn.{part}_proj.weight"]
        np.testing.assert_allclose(got, x.T @ x, rtol=1e-4, atol=1e-3 * np.abs(got).max())
    pieces = [each[begin : begin + 512] for each in model.text.encode(CALIBRATE) for begin in (0, 512)]
    hidden = np.concatenate([vjp(model, each, logits=False)[0][0] for each in pieces if each])
    got = found["lm_head.weight"]
    np.testing.assert_allclose(got, hidden.T @ hidden, rtol=1e-4, atol=1e-4 * np.abs(got).max())
    experts = calibrated_model(tmp_path / "experts", "qwen3_moe")
    assert {name for name in experts.origin.parameters.maps() if ".experts." not in name} == set(
        moments(experts, CALIBRATE)
    )


@pytest.mark.parametrize("dtype", ["q4_0", "q4_1", "q4_k"])
def test_calibration_brings_logits_nearer(dtype, tmp_path):
    model = calibrated_model(tmp_path / "model", num_hidden_layers=1)
    ids = model.text.encode([*CALIBRATE[:2], "the thin in 12"])
    errors = []
    for calibrate in (None, iter(CALIBRATE)):
        models.save(model, tmp_path / "model.gguf", dtype=dtype, calibrate=calibrate)
        read = models.load(tmp_path / "model.gguf", weights_dtype="float32")
        errors.append(sum(((read(each) - model(each)) ** 2).sum() for each in ids))
    assert errors[1] < 0.9 * errors[0]
    kinds = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["output.weight"] == ("Q6_K" if dtype == "q4_k" else dtype.upper())
    read = models.load(tmp_path / "model.gguf", weights_dtype="float32")
    models.save(read, tmp_path / "again.gguf", dtype=dtype, calibrate=CALIBRATE)


def test_calibrations_that_are_refused(tmp_path):
    model = calibrated_model(tmp_path / "model", num_hidden_layers=1)
    for path, given, error, message in (
        ("x", {"calibrate": ["the"]}, ValueError, "calibrate is given for a folder; expected None"),
        (
            "x.gguf",
            {"calibrate": ["the"]},
            ValueError,
            "calibrate is given for dtype 'float32'; expected None",
        ),
        ("x.gguf", {"calibrate": [], "dtype": "q4_k"}, ValueError, "calibrate has no text with a token"),
        (
            "x.gguf",
            {"calibrate": "the", "dtype": "q4_k"},
            TypeError,
            "calibrate is of type str; expected several",
        ),
    ):
        with pytest.raises(error, match=rf"^save\(\): {message}"):
            models.save(model, tmp_path / path, **given)
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_weights_in_any_type_are_written_as_they_were_read(tmp_path):
    """Not as they are packed; tensors of a run that was trained are those of `state_dict`."""
    loaded(tmp_path / "model")
    model = models.load(tmp_path / "model", dtype="bfloat16", weights_dtype="int8")
    models.save(model, tmp_path / "saved")
    np.testing.assert_array_equal(models.load(tmp_path / "saved")(IDS), models.load(tmp_path / "model")(IDS))
    exact = models.load(tmp_path / "model", dtype="float64")
    models.save(exact, tmp_path / "exact.gguf")
    np.testing.assert_array_equal(
        models.load(tmp_path / "exact.gguf")(IDS), models.load(tmp_path / "model")(IDS)
    )


def test_blocks_of_a_folder_are_not_made_floats(tmp_path):
    """Its config.json would say otherwise; nothing is written, in its own place either."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    blocks, _ = tiny_gpt_oss.in_mxfp4(tiny.tensors("gpt_oss", {**tiny.CONFIGS["gpt_oss"], **sizes}))
    tiny.write(tmp_path, "gpt_oss", blocks, **sizes)
    model, before = models.load(tmp_path), (tmp_path / "model.safetensors").read_bytes()
    for target in (tmp_path, tmp_path / "other"):
        with pytest.raises(ModelError, match="holds a gpt_oss, whose tensors are not as in a folder"):
            models.save(model, target)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dtype", ["q4_0", "q4_k", "q6_k"])
def test_calibration_is_left_where_it_is_worse(dtype):
    """Rows of numbers at the ends of a scale's range, whose errors could not be made up for."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 512)).astype(np.float32)
    rows = np.stack([np.full(512, 3.3), np.tile([1.0, -1.0], 256), rng.standard_normal(512)]).astype("f4")
    block, products = FORMATS[dtype.upper()], x.T @ x
    plain, got = block.encoded(rows), _calibrated(block, products, feedback_of(products), rows)
    numbers = (block.decoded(np.ascontiguousarray(y).reshape(-1).view("u1")) for y in (plain, got))
    before, after = (((y.reshape(3, 512) - rows) @ x.T).astype(float) ** 2 for y in numbers)
    assert (after.sum(axis=1) <= before.sum(axis=1) * 1.001).all()
    assert after[2].sum() < 0.9 * before[2].sum()
