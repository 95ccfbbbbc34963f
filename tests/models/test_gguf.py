"""GGUF files: every type of block, models beside the same one in safetensors, tokenizers, malformed files."""

import contextlib
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_gguf_hybrid as hybrid
import tiny_models as tiny

from fastattn import models
from fastattn._args.packed import PackedLinear
from fastattn._formats import FORMATS
from fastattn._gguf import GgufFile
from fastattn.grad import vjp
from fastattn.models import ModelError, _gguf, _gguf_tokenizer, _tensors
from fastattn.positions import rope_frequencies

TYPES = ("F32", "F16", "BF16", *FORMATS)
IDS = np.arange(40).reshape(2, 20) % 29


def written(folder, kind, stored, said=(), **how):
    """The path of a file; and the path of a folder with its numbers, of which config.json also has `said`."""
    path, other = folder / "model.gguf", folder / "model"
    tensors, config = tiny_gguf.write(path, kind, stored, **how)
    tiny.write(other, kind, tensors, **{**config, **dict(said)})
    return path, other


def assert_refused(path, kind, message, **how):
    tiny_gguf.write(path, kind, "F32", **how)
    with pytest.raises(ModelError, match=message):
        models.load(path)


def assert_near(got, expected, bound):
    np.testing.assert_allclose(got(IDS), expected(IDS), rtol=0, atol=bound * np.abs(expected(IDS)).max())


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_decoded_as_gguf_decodes_them(name):
    """To the bit, whatever the bytes are."""
    block, kind = FORMATS[name], gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (block.features, block.nbytes)
    assert int(kind) == block.number
    data = np.random.default_rng(0).integers(0, 256, (5000, block.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind).ravel()
    got = block.decoded(data.reshape(-1))
    assert got.dtype == np.float32
    bits = got.view(np.uint32) == expected.view(np.uint32)
    assert (bits | np.isnan(got) & np.isnan(expected)).all()


@pytest.mark.parametrize("stored", TYPES)
def test_a_model_is_that_of_its_numbers(stored, tmp_path):
    path, folder = written(tmp_path, "llama", stored)
    got = models.load(path, weights_dtype="float32")(IDS)
    np.testing.assert_array_equal(got, models.load(folder)(IDS))


def packed(model):
    return [x.parameter for x in model.origin.parameters if isinstance(x.parameter, PackedLinear)]


@pytest.mark.parametrize("stored", TYPES)
def test_weights_stay_as_the_file_has_them(stored, tmp_path):
    """To the bit but for scales in super-blocks, products that are rounded to float16.

    Some blocks here have neither their lowest nor their highest code.
    """
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, "llama", stored)
    own, wide = models.load(path), models.load(path, weights_dtype="float32")
    assert own.weights_dtype == "file"
    expected = FORMATS[stored].packed if stored in FORMATS else {"BF16": "bfloat16"}.get(stored, "float32")
    in_super_blocks = stored in FORMATS and FORMATS[stored].features == 256
    for narrow, exact in zip(packed(own), packed(wide), strict=True):
        assert narrow.dtype == expected
        weight, got = exact.unpack(), narrow.unpack()
        if in_super_blocks:
            largest = np.abs(weight).max(axis=-1, keepdims=True)  # nearly that of products and of minima
            assert (np.abs(got - weight) <= 3 * 2.0**-11 * largest).all()
        else:
            np.testing.assert_array_equal(got, weight)
        if stored in FORMATS:
            assert narrow.block == FORMATS[stored].layout.shared
            sums = narrow.rows_of(slice(None)).sum(axis=-1, dtype=float)
            np.testing.assert_allclose(narrow.sums, sums, rtol=1e-5, atol=1e-4)
    bound = 1e-5 if not in_super_blocks else 5e-3
    if stored != "BF16":
        np.testing.assert_allclose(own(IDS), wide(IDS), rtol=0, atol=bound * np.abs(wide(IDS)).max())


@pytest.mark.parametrize(
    ("stored", "queries", "dtypes"),
    [
        ("Q4_0", "Q4_1", {"int4", "uint4"}),
        ("Q4_1", "IQ4_NL", {"uint4", "q8"}),
        ("Q8_0", "Q5_1", {"q8"}),
        ("MXFP4", "Q4_0", {"fp4", "q8"}),
    ],
)
def test_maps_of_two_types_are_kept_in_one(stored, queries, dtypes, tmp_path, monkeypatch):
    """Queries in one type beside keys and values in another make one weight, of a type that holds both."""
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, "llama", stored, queries=queries)
    own, wide = models.load(path), models.load(path, weights_dtype="float32")
    assert {x.dtype for x in packed(own)} == dtypes
    for narrow, exact in zip(packed(own), packed(wide), strict=True):
        np.testing.assert_array_equal(narrow.unpack(), exact.unpack())
    monkeypatch.setattr(_tensors, "_PIECE", 10_000)  # several pieces of a weight
    for narrow, exact in zip(packed(models.load(path)), packed(own), strict=True):
        for field in ("panels", "scales", "sums", "minima"):
            np.testing.assert_array_equal(getattr(narrow, field), getattr(exact, field))


@pytest.mark.parametrize("wrong", ["int4", True])
def test_inputs_are_rounded_where_weights_are_integers(wrong, tmp_path):
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, "llama", "Q4_0")
    rounded = models.load(path, activations="int8")
    assert rounded.weights_dtype == "file"
    alike = models.load(path, weights_dtype="int4", activations="int8")
    np.testing.assert_array_equal(rounded(IDS), alike(IDS))
    assert (rounded(IDS) != models.load(path)(IDS)).any()
    with pytest.raises((TypeError, ValueError), match=r"^load\(\): activations is"):
        models.load(path, activations=wrong)
    tiny_gguf.write(path, "llama", "F32")
    with pytest.raises(
        ValueError, match=r"^load\(\): activations is 'int8' for weights in float32; expected"
    ):
        models.load(path, activations="int8")


def test_a_folder_has_no_types_of_its_own(tmp_path):
    tiny.write(tmp_path, "llama")
    with pytest.raises(ValueError, match="weights_dtype is 'file'; expected one of float32, bfloat16, int8"):
        models.load(tmp_path, weights_dtype="file")


@pytest.mark.parametrize("layers", [3, 46, 62])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3-causal"])
def test_gemma(kind, layers, tmp_path, monkeypatch):
    """Norms have 1 added, scores of the largest models another scale, windows the models' pattern."""
    monkeypatch.setitem(tiny.CONFIGS, kind, {**tiny.CONFIGS[kind], "num_hidden_layers": layers})
    config = tiny_gguf.config(kind)
    largest = layers == {"gemma2": 46, "gemma3-causal": 62}[kind]
    scale = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    said = {"sliding_window_pattern": {"gemma2": 2, "gemma3-causal": 6}[kind]}
    said |= {"query_pre_attn_scalar": scale, "rope_local_base_freq": 1e4}
    path, folder = written(tmp_path, kind, "Q4_0", said)
    assert_near(models.load(path, weights_dtype="float32"), models.load(folder), 1e-5)


# How far results may be from those of a folder: not at all, by a file's numbers in float32, or by logarithms
# of rates, and norms with 1 added.
BOUNDS = {
    **dict.fromkeys(("lfm2", "gpt_oss", "mixtral", "qwen3_moe"), 0),
    **dict.fromkeys(("granite", "ministral3", "mistral", "phi3", "smollm3", *tiny.OLMO), 1e-6),
    **dict.fromkeys(("gemma4_text", *hybrid.ARCHITECTURES), 1e-5),
}
APART = ("gemma4_text", "gpt_oss", "lfm2", *hybrid.ARCHITECTURES)  # whose tensors are not a folder's


@pytest.mark.parametrize("stored", ["F32", "Q4_0", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_families(kind, stored, tmp_path):
    path, folder = written(tmp_path, kind, stored)
    got, expected, own = models.load(path, weights_dtype="float32"), models.load(folder), models.load(path)
    assert_near(got, expected, BOUNDS[kind])
    assert own.model_type == expected.model_type
    error = np.abs(own(IDS) - got(IDS)) / np.abs(got(IDS)).max()
    # Scales of super-blocks are rounded, by 5e-4; a folder of such numbers has the bits of this Gemma 4.
    rounded = 3e-2 if kind == "gemma4_text" else 1e-2
    assert error.max() < (rounded if stored == "Q6_K" else 1e-5) or kind in tiny.EXPERTS
    assert len(list(own.generate([1, 2, 3], 4))) == 4
    if kind == "gemma4_text" and stored in FORMATS:
        assert own.layer_embeddings.tokens.dtype == FORMATS[stored].packed
    for step in own.program.steps:
        if type(step).__name__ == "ExpertsStep" and stored in FORMATS:
            assert step.experts.router.dtype == "float32"
            assert {x.dtype for part in step.experts.maps for x in part} == {FORMATS[stored].packed}
    if kind in APART:
        with pytest.raises(ModelError, match=f"holds a {expected.model_type}"):
            models.save(own, tmp_path / "saved")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
def test_weights_in_other_types(kind, weights_dtype, tmp_path):
    got, expected = (models.load(x, weights_dtype=weights_dtype) for x in written(tmp_path, kind, "Q8_0"))
    np.testing.assert_array_equal(got(IDS), expected(IDS))
    assert list(got.generate([1, 2, 3], 8)) == list(expected.generate([1, 2, 3], 8))


@pytest.mark.parametrize("stored", ["F32", "Q4_0"])
@pytest.mark.parametrize("kind", ["rope", "nope"])
def test_experts_beside_recurrent_layers(kind, stored, tmp_path, monkeypatch):
    """Experts of Granite, one of them for every token, with heads that are rotated or not."""
    sizes = {"num_local_experts": 5, "num_experts_per_tok": 3, "position_embedding_type": kind}
    monkeypatch.setitem(hybrid.SIZES, "granitemoehybrid", {**hybrid.SIZES["granitemoehybrid"], **sizes})
    path, folder = written(tmp_path, "granitemoehybrid", stored)
    assert_near(models.load(path, weights_dtype="float32"), models.load(folder), 1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma4_text", {".attention.sliding_window_pattern": [True, False]}, "expected 4 of bool"),
        ("gemma4_text", {".attention.value_length_swa": 32}, "value_length_swa' is 32; only 64 is supported"),
        ("gemma4_text", {".rope.dimension_count_swa": 32}, "dimension_count_swa' is 32; only 64 is"),
        ("gemma4_text", {".attention.head_count_kv": [2, 1]}, "expected a number for each of 4 layers"),
        ("gemma4_text", {".attention.head_count_kv": [2, 1, 1, 1]}, "the same for all layers of sliding"),
        ("gemma4_text", {".feed_forward_length": [512, 512, 512, 1024]}, "the same for all layers, or twice"),
        ("gemma4_text", {".expert_count": 4}, "expert_count' is 4; expected none in a gemma4_text"),
        ("gemma4_text", {".attn_logit_softcapping": 5}, "attn_logit_softcapping' is 5; only None is"),
        ("gemma4_text", {".attention.shared_kv_layers": 3, ".feed_forward_length": 512},
         "'num_kv_shared_layers' is 3; expected a layer of each kind"),
        ("granite", {".rope.scaling.finetuned": False}, "finetuned' is False; only True is supported"),
        ("granitemoehybrid", {".attention.head_count_kv": [2, 1, 0]}, "expected a number for each layer: 0"),
        ("granitemoehybrid", {".ssm.inner_size": 500}, "inner_size' is 500; expected a multiple of"),
        ("granitemoehybrid", {".ssm.dt_b_c_rms": True}, "dt_b_c_rms' is True; only False is supported"),
        ("granitemoehybrid", {".rope.dimension_count": 32}, "rope.dimension_count' is 32; expected 64"),
        ("lfm2", {".attention.head_count_kv": [2, 1, 0]}, "head_count_kv' is .*; expected a number for each"),
        ("lfm2", {".attention.head_count_kv": [0, 0, 0]}, "head_count_kv' is .*; expected a number"),
        ("lfm2", {".attention.sliding_window": 4}, "sliding_window' is 4; only 0 is supported"),
        ("llama", {".expert_count": 8, ".expert_used_count": 2},
         "its keys: 'model.layers.0.block_sparse_moe.gate.weight' is missing; .*experts.0.w1.weight' is mis"),
        ("llama", {".rope.scaling.type": "odd"}, "scaling.type' is 'odd'; expected one"),
        ("llama", {".rope.scaling.attn_factor": 2.0}, "attn_factor' is not known"),
        ("llama", {".logit_scale": 2.0}, "there is a 'llama.logit_scale'"),
        ("llama", {".attention.temperature_scale": 0.1}, "expected a mistral3"),
        ("llama", {".attention.causal": False}, "causal' is False; expected True"),
        ("llama", {"split.count": 3}, "'split.count' is 3; expected a model in one file"),
        ("llama", {"general.architecture": [1]}, "'general.architecture' is"),
        ("llama", {"general.architecture": "mamba"}, "'mamba'; expected one of bert, gemma2, gemma3"),
        ("llama", {".expert_count": [1, 2]}, "'llama.expert_count' is"),
        ("qwen3_5_text", {".rope.dimension_sections": [6, 4, 4, 2]}, "three numbers of pairs, together 16"),
        ("qwen3_5_text", {".nextn_predict_layers": 2}, "predict_layers' is 2; expected fewer than all 2"),
        ("qwen3_moe", {".expert_gating_func": 2}, "expert_gating_func' is 2; only 1 is supported"),
        ("qwen3_moe", {".expert_shared_count": 1}, "expert_shared_count' is 1; only 0 is supported"),
        ("qwen3_moe", {".expert_used_count": 7},
         "'num_experts_per_tok' is 7; expected at most 'num_local_experts', 6"),
        ("qwen3_moe", {".expert_count": 5}, "is not known"),
        ("qwen3_next", {".attention.recurrent_layers": [True, False]}, "only None is supported"),
        ("qwen3_next", {".attention.scale": 1}, "there is a 'qwen3next.attention.scale'; expected none"),
        ("qwen3_next", {".ssm.inner_size": 250}, "inner_size' is 250; expected a multiple of 'qwen3next.ssm"),
        ("qwen3_next", {".ssm.group_count": 0}, "ssm.group_count' is 0; expected an integer of at least 1"),
        ("qwen3_next", {".rope.dimension_count": 65}, "rope.dimension_count' is 65; expected 64"),
        ("qwen3_next", {".expert_weights_norm": False}, "expert_weights_norm' is False; only True is"),
    ],
)  # fmt: skip
def test_keys_that_are_refused(kind, changes, message, tmp_path):
    assert_refused(tmp_path / "model.gguf", kind, message, **changes)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        *(("llama", {name: (3,)}, f"the tensor '{name}' is not known")
          for name in ("output.bias", "blk.0.attn_q.scale", "token_embd_norm.weight")),
        *(("qwen3_next", {name: (4,)}, f"the tensor '{name}' is not known")  # of an older converter
          for name in ("blk.0.ssm_in.weight", "blk.0.ssm_a.weight", "blk.0.ssm_dt")),
        ("gemma4_text", {"rope_freqs.weight": (64,)}, "expected 1 for each pair that is rotated, then 1e30"),
        ("llama", {"blk.0.ffn_gate_exps.weight": (3, 256)}, r"has shape \(3, 256\); expected \(experts"),
        ("llama", {f"blk.{i}.ffn_gate_exps.weight": (4096, 1, 1) for i in range(64)},
         r"has 4096 experts, after \d+ tensors; expected at most 262144"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(kind, more, message, tmp_path):
    tensors = {name: np.full(shape, 3, np.float32) for name, shape in more.items()}
    assert_refused(tmp_path / "model.gguf", kind, message, more=tensors)


def test_rates_that_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, "qwen3_next", "F32")
    data = bytearray(path.read_bytes())
    with GgufFile(path, ModelError) as file:
        at = file._tensors["blk.0.ssm_a"].begin
    data[at : at + 4] = struct.pack("<f", 0.5)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"'blk.0.ssm_a' has numbers that are not below 0; expected -exp"):
        models.load(path)


def test_heads_that_are_no_blocks(tmp_path, monkeypatch):
    """Value heads come in another order, which those within a block cannot be given."""
    path, small = tmp_path / "model.gguf", {"linear_value_head_dim": 16, "linear_num_value_heads": 16}
    monkeypatch.setitem(hybrid.SIZES, "qwen3_5_text", {**hybrid.SIZES["qwen3_5_text"], **small})
    tiny_gguf.write(path, "qwen3_5_text", "Q4_0")
    with pytest.raises(ModelError, match=r"ssm_out.weight' has heads of 16; expected a multiple of 32 for"):
        models.load(path)
    models.load(path, weights_dtype="float32")
    tiny_gguf.write(path, "qwen3_next", "Q4_0")  # where they are in order
    models.load(path)


def test_layers_that_guess_further_tokens(tmp_path):
    """A file has them as further blocks, which are left out."""
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, "qwen3_5_text", "Q4_0")
    expected = models.load(path)(IDS)
    more = {f"blk.2.{name}.weight": np.ones(256, np.float32) for name in ("attn_norm", "nextn.enorm")}
    said = {".block_count": 3, ".nextn_predict_layers": 1}
    tiny_gguf.write(path, "qwen3_5_text", "Q4_0", more=more, **said)
    np.testing.assert_array_equal(models.load(path)(IDS), expected)


def test_gradients_of_tiled_heads(tmp_path):
    """Gradients are of the file's tensors: of rates, and of columns in the file's order."""
    path, folder = tmp_path / "model.gguf", tmp_path / "model"
    tensors, config = tiny_gguf.write(path, "qwen3_5_text", "F32")
    tiny.write(folder, "qwen3_5_text", tensors, **config)
    model, expected = models.load(path), models.load(folder)
    hidden, pullback = vjp(expected, IDS)
    wanted, (_, own) = pullback(hidden), vjp(model, IDS)
    got, layer = own(hidden), "model.layers.0.linear_attn."
    slope = -np.exp(-tensors[f"{layer}A_log"])
    for name, found in (
        ("ssm_a", hybrid.tiled(slope * wanted[f"{layer}A_log"], config)),
        ("ssm_out.weight", hybrid.tiled(wanted[f"{layer}out_proj.weight"].T, config).T),
    ):
        bound = 1e-4 * np.abs(found).max()
        np.testing.assert_allclose(got[f"blk.0.{name}"], found, rtol=0, atol=bound)
    state = {name: 1.01 * x for name, x in model.state_dict().items()}
    again, other = model.with_state_dict(state)(IDS), model.with_state_dict(model.state_dict())(IDS)
    np.testing.assert_array_equal(other, model(IDS))
    assert (again != other).any()


def test_what_a_file_recommends(tmp_path):
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, "llama", "Q4_0")
    assert models.load(path).usual_sampling() == {}
    said = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    tiny_gguf.write(path, "llama", "Q4_0", **said)
    assert models.load(path).usual_sampling() == {"temperature": 0.5, "top_k": 20}
    for key, wrong in (("top_k", "x"), ("temp", float("nan")), ("temp", float("inf")), ("temp", -1.0)):
        tiny_gguf.write(path, "llama", "Q4_0", **{**said, f"general.sampling.{key}": wrong})
        with pytest.raises(ModelError, match=rf"{path}: 'general.sampling.{key}' is {wrong!r}; expected a n"):
            models.load(path).usual_sampling()


def test_rows_of_a_tensor(tmp_path):
    """Any rows, of heads that are interleaved, too."""
    path = tmp_path / "model.gguf"
    tensors, _ = tiny_gguf.write(path, "llama", "Q4_1")
    with GgufFile(path, ModelError) as file:
        name = "blk.1.attn_q.weight"
        plain = file.get_tensor(name)
        file.interleaved[name] = 64
        expected = tensors["model.layers.1.self_attn.q_proj.weight"]
        for begin, end in ((0, 256), (0, 1), (70, 71), (63, 130), (64, 128), (5, 5)):
            np.testing.assert_array_equal(file.rows(name, begin, end), expected[begin:end])
        np.testing.assert_array_equal(file.get_tensor(name), expected)
        assert not np.array_equal(plain, expected)


def test_scaling_of_positions(tmp_path):
    """Factors of Llama 3, a tensor, and a linear one, a key."""
    path, folder = tmp_path / "model.gguf", tmp_path / "model"
    string, number = gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32
    scaling = {"llama.rope.scaling.type": ("linear", string), "llama.rope.scaling.factor": (2.0, number)}
    tensors, config = tiny_gguf.write(path, "llama", "F32", **scaling)
    folder.mkdir()
    tiny.write(folder, "llama", tensors, **config, rope_scaling={"rope_type": "linear", "factor": 2.0})
    np.testing.assert_array_equal(models.load(path)(IDS), models.load(folder)(IDS))
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    scaled = rope_frequencies(64, base=config["rope_theta"], scaling=llama3)
    factors = scaled.inv_freq
    factors = (rope_frequencies(64, base=config["rope_theta"]).inv_freq / factors).astype(np.float32)
    tiny_gguf.write(path, "llama", "F32", more={"rope_freqs.weight": factors})
    tiny.write(folder, "llama", tensors, **config, rope_scaling=llama3)
    np.testing.assert_allclose(models.load(path)(IDS), models.load(folder)(IDS), rtol=0, atol=1e-4)
    tiny_gguf.write(path, "llama", "F32", more={"rope_freqs.weight": factors[:-1]})
    with pytest.raises(ModelError, match=r"'rope_freqs.weight': there are others; expected float32 numbers"):
        models.load(path)


def test_scaling_of_positions_in_phi3(tmp_path):
    """Two tensors of factors, for short and long texts; a window of 0 is none."""
    path, folder = tmp_path / "model.gguf", tmp_path / "model"
    number, whole = gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.UINT32
    factors = {
        f"{name}_factor": np.linspace(1, last, 16, dtype=np.float32)
        for name, last in (("short", 2), ("long", 9))
    }
    more = {f"rope_factors_{name.removesuffix('_factor')}.weight": x for name, x in factors.items()}
    keys = {
        "phi3.rope.scaling.attn_factor": (1.25, number),
        "phi3.rope.scaling.original_context_length": (12, whole),
        "phi3.attention.sliding_window": (0, whole),
    }  # fmt: skip
    tensors, config = tiny_gguf.write(path, "phi3", "F32", more=more, **keys)
    folder.mkdir()
    each = {name: x.tolist() for name, x in factors.items()}
    scaling = {"rope_type": "longrope", "attention_factor": 1.25, "original_max_position_embeddings": 12}
    tiny.write(folder, "phi3", tensors, **config, rope_scaling={**scaling, **each})
    got, expected = models.load(path), models.load(folder)
    for length in (10, 20):
        np.testing.assert_array_equal(got(IDS[:, :length]), expected(IDS[:, :length]))
    del more["rope_factors_long.weight"]
    tiny_gguf.write(path, "phi3", "F32", more=more, **keys)
    with pytest.raises(ModelError, match=r"'rope_factors_long.weight': there are others"):
        models.load(path)


def test_states_of_heads_larger_than_a_piece(tmp_path, monkeypatch):
    """A piece that is read at once ends with a head, so that its rows can be put in order."""
    tensors, _ = tiny_gguf.write(tmp_path / "model.gguf", "llama", "Q6_K")
    model = models.load(tmp_path / "model.gguf")
    monkeypatch.setattr(_tensors, "_PIECE", 100_000)
    state = model.state_dict()
    expected = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(state["blk.0.attn_q.weight"], expected)
    exact = models.load(tmp_path / "model.gguf", weights_dtype="float32")
    np.testing.assert_array_equal(exact.with_state_dict(state)(IDS), exact(IDS))


def test_paths(tmp_path):
    """A file of any name that begins as GGUF; a folder stays a folder, whatever its name."""
    tiny_gguf.write(tmp_path / "model.gguf", "llama", "F32")
    expected = models.load(tmp_path / "model.gguf")(IDS)
    for name in ("model.GGUF", "sha256-0123"):
        (tmp_path / name).write_bytes((tmp_path / "model.gguf").read_bytes())
        np.testing.assert_array_equal(models.load(tmp_path / name)(IDS), expected)
    with pytest.raises(
        ModelError, match=r"has no config.json; expected one, or the path of a GGUF file, as model"
    ):
        models.load(tmp_path)
    tiny.write(tmp_path / "folder.gguf", "llama")
    assert isinstance(models.load(tmp_path / "folder.gguf"), models.Decoder)
    with pytest.raises(ModelError, match="does not exist"):
        models.load("a" * 300 + ".gguf")
    model = models.load(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        model.text.encode(["a"])


BYTES = tiny_gguf.byte_tokens()


def with_tokenizer(path, **changes):
    """A model whose tokens are bytes and a few words, and marks; its table has rows for a few more."""
    found = {
        "model": "gpt2", "pre": "gpt-2", "tokens": [*BYTES, "th", "the", "<s>", "</s>"],
        "token_type": [1] * 258 + [3, 3], "merges": ["t h", "th e"], "bos_token_id": 258,
        "eos_token_id": 259, **changes,
    }  # fmt: skip
    given = {f"tokenizer.ggml.{key}": x for key, x in found.items() if x is not None}
    tiny_gguf.write(path, "llama", "F32", vocab=270, **given)
    return models.load(path)


def test_a_tokenizer_of_bytes(tmp_path):
    path = tmp_path / "model.gguf"
    model = with_tokenizer(path)
    (ids,) = model.text.encode(["the </s>é"])
    assert ids[0] == 257
    assert 259 in ids
    assert model.stop == (259,)
    assert model.text.decode([ids]) == ["the é"]
    for add, marks in ((True, [258]), (False, [])):
        changes = {"add_bos_token": add, "add_eos_token": False}
        assert with_tokenizer(path, **changes).text.encode(["the"]) == [[*marks, 257]]
    both = {"add_bos_token": True, "add_eos_token": True}
    assert with_tokenizer(path, **both).text.encode(["the"]) == [[258, 257, 259]]
    odd = {**both, "tokens": [*BYTES, "th", "the", "$A", "$B:1"]}
    assert with_tokenizer(path, **odd).text.encode(["the"]) == [[258, 257, 259]]
    qwen = with_tokenizer(path, **{"pre": "qwen2"})
    assert qwen.text.encode(["e\u0301"]) == qwen.text.encode(["\u00e9"])
    first, *marks = (BYTES[i] for i in "q\u0301".encode())  # which nothing composes
    tokens = {"tokens": [*BYTES, first + marks[0], "the", "<s>", "</s>"]}
    tokens["merges"] = [f"{first} {marks[0]}"]
    lengths = [
        len(with_tokenizer(path, **tokens, **{"pre": pre}).text.encode(["q\u0301"])[0])
        for pre in ("qwen2", "qwen35")  # a mark is no letter there, and one here
    ]
    assert lengths == [3, 2]
    assert with_tokenizer(path, **{"pre": "falcon3"}).text.encode(["the"]) == [[258, 257]]
    digits = with_tokenizer(path, **{"pre": "smollm"})
    assert len(digits.text.encode(["12"])[0]) == 2


ENDS = [
    "<|eot_id|>", "<|im_end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>",
    "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<|end|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>",
    "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>", "</s>",
]  # fmt: skip


def stop_of(path, texts, kind=3, **keys):
    """The ids that end answers of a model whose last tokens are `texts`, from 258 on."""
    kinds = kind and [1] * 258 + [kind] * len(texts)  # None: the file does not say any
    keys |= {"tokens": [*BYTES, "th", "the", *texts], "token_type": kinds}
    keys = {"eos_token_id": 0, **keys}
    return with_tokenizer(path, **keys).stop


@pytest.mark.parametrize("kind", [1, 3, 4, 6, None])
def test_texts_that_end_answers(kind, tmp_path):
    """Whatever the tokens' type is."""
    for i in range(0, len(ENDS), 10):
        texts = ENDS[i : i + 10]
        ends = range(258, 258 + len(texts))
        assert set(stop_of(tmp_path / "model.gguf", [*texts, "<|start|>"], kind)) == {0, *ends}


@pytest.mark.parametrize(
    ("texts", "stop"),
    [
        ("<|end|> <|return|> <|call|>", (259, 260)),
        ("<|end|> <|return|> <|calls|>", (259, 260)),
        ("<|end|> <|flush|> <|calls|>", (259, 260)),
        ("<|end|> <|return|> <|flush|>", (258, 259, 260)),
        ("<|end|> <|call|> <|calls|>", (258, 259, 260)),
        ("</s> <eos> <|tool_response>", (259, 260)),
    ],
)
def test_ends_of_parts_of_answers(texts, stop, tmp_path):
    """After its reasoning, an answer of GPT-OSS continues; after a tag of HTML, one of Gemma 4."""
    assert stop_of(tmp_path / "model.gguf", texts.split(), eos_token_id=258) == stop


def test_ids_that_end_answers(tmp_path):
    path = tmp_path / "model.gguf"
    for i, name in enumerate(("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"), 1):
        assert stop_of(path, ["x"], **{f"{name}_token_id": i}) == ((1,) if name == "eos" else (0, i))
    assert stop_of(path, ["x"], eos_token_ids=[2, 0, 3], eom_token_id=2**32 - 1) == (0, 2, 3)
    for wrong in ([0, 259], [-1], ["x"]):
        with pytest.raises(
            ModelError, match=r"eos_token_ids' is .*; expected an array of ids of the 259 tokens"
        ):
            stop_of(path, ["x"], eos_token_ids=wrong)


@pytest.mark.parametrize("kind", [1, 4, 6, None])
def test_ends_are_no_part_of_answers(kind, tmp_path):
    path = tmp_path / "model.gguf"
    stop_of(path, ["<|im_end|>", "<tool>"], kind)
    text = models.load(path).text
    assert text.decode([[257, 259, 258]]) == ["the<tool>"]
    assert text.encode(["the<|im_end|>"]) == [[257, 258]]


def test_an_error_of_a_signal_is_not_taken_for_the_tokenizers(tmp_path, monkeypatch):
    def timed_out(*args):
        raise TimeoutError("time is up")

    model = with_tokenizer(tmp_path / "model.gguf")
    monkeypatch.setattr(_gguf_tokenizer, "_made", timed_out)
    with pytest.raises(TimeoutError, match=r"^time is up$"):
        model.text.encode(["the"])


def test_a_tokenizer_of_scores(tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "t", "h", "e", "th", "▁the", "he"]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -2.0, -4.0, -1.0]
    changes = {
        "model": "llama",
        "tokens": pieces,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    model = with_tokenizer(tmp_path / "model.gguf", **changes)
    (ids,) = model.text.encode(["the é"])
    words = [pieces[i] for i in ids]
    assert words == ["<s>", "▁", "t", "he", "▁", "<0xC3>", "<0xA9>"]  # "he" has the best score
    assert model.text.decode([ids]) == ["the é"]


def test_a_tokenizer_of_merges(tmp_path):
    """Gemma 4's: characters with marks for spaces, merged in the file's order, and bytes of all others."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "t", "h", "e", "\n", "th", "he", "the", "▁the", "\n\n"]
    changes = {
        "model": "gemma4",
        "tokens": pieces,
        "token_type": [3, 3, 3, 2, *[6] * 256, *[1] * 10],
        "merges": ["h e", "t he", "t h", "▁ the", "\n \n"],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
    }
    text = with_tokenizer(tmp_path / "model.gguf", **changes).text

    def ids(*tokens):
        return [pieces.index(token) for token in tokens]

    assert text.encode(["the the"]) == [[2, *ids("the", "▁the")]]
    assert text.encode(["\n\n\nth ee"]) == [[2, *ids("\n\n", "\n", "th", "▁", "e", "e")]]
    assert text.encode(["tä"]) == [[2, *ids("t", "<0xC3>", "<0xA4>")]]
    assert text.decode([ids("the", "▁the", "<0xC3>", "<0xA4>")]) == ["the theä"]
    with pytest.raises(ModelError, match="merges' has 't x'; expected two tokens"):
        with_tokenizer(tmp_path / "model.gguf", **{**changes, "merges": ["t x"]}).text.encode(["t"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, r"'tokenizer.ggml.model' is 'rwkv'; expected one of gpt2, llama"),
        ({"pre": "unheard"}, r"'tokenizer.ggml.pre' is 'unheard'; expected one of gpt-2"),
        ({"merges": ["t x y"]}, r"merges' has 't x y'; expected two tokens"),
        ({"token_type": [1]}, r"token_type' has 1 numbers in int32 for 260 tokens"),
        ({"tokens": 5}, r"tokens' is 5; expected an array of strings"),
        ({"token_type": 1}, "token_type' is 1; expected an array of numbers"),
        ({"model": "llama", "scores": [1] * 260}, "scores' has 260 numbers in int32"),
        ({"add_bos_token": True, "bos_token_id": 999}, "'tokenizer.ggml.bos_token_id' is"),
        ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is 1; expected true or false"),
        ({"eos_token_id": 260}, "'tokenizer.ggml.eos_token_id' is 260; expected less .* 260$"),
        ({"eot_token_id": 2**31}, "'tokenizer.ggml.eot_token_id' is 2147483648; expected less"),
        ({"tokens": [*BYTES, *map(str, range(15))]},
         r"tokens' has 271 strings; expected at most 270, the rows of 'token_embd.weight'"),
        (
            {
                "model": "llama",
                "tokens": ["a" * 16 * (i + 1) for i in range(260)],
                "scores": [0.0] * 260,
            },
            r"has strings of 260 lengths up to 4160, \d+ characters to cut for merges; expected at most 67",
        ),
    ],
)  # fmt: skip
def test_tokenizers_that_are_refused(changes, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        with_tokenizer(tmp_path / "model.gguf", **changes).text.encode(["the"])


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_a_number_for_each_layer(kind, tmp_path):
    """Arrays of the same number are that number."""
    path, name = tmp_path / "model.gguf", {"gemma4_text": "gemma4"}.get(kind, kind)
    _, config = tiny_gguf.write(path, kind, "F32")
    expected, layers = models.load(path)(IDS), config["num_hidden_layers"]
    sizes = {"attention.head_count": config["num_attention_heads"]}
    if kind == "llama":
        sizes["feed_forward_length"] = config["intermediate_size"]
        sizes["attention.head_count_kv"] = config["num_key_value_heads"]
    each = {f".{key}": [size] * layers for key, size in sizes.items()}
    tiny_gguf.write(path, kind, "F32", **each)
    np.testing.assert_array_equal(models.load(path)(IDS), expected)
    for key, size in sizes.items():
        for wrong, message in (
            ([size] * (layers + 1), f"a number for each of {layers} layers"),
            ([size + 1, *[size] * (layers - 1)], "for all layers"),
        ):
            message = rf"'{name}.{key}' is .*; expected .*({message})"
            assert_refused(path, kind, message, **{f".{key}": wrong})


@pytest.mark.parametrize("maps", ["attn_q attn_k attn_v", "attn_output", "ffn_down", "ffn_gate ffn_up"])
def test_biases_of_some_maps(maps, tmp_path):
    """Any map of Llama may have one; queries, keys and values have them together."""
    path, folder, rng = tmp_path / "model.gguf", tmp_path / "model", np.random.default_rng(0)
    sizes = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"), 256)
    sizes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), 128)
    sizes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), 512)
    parts = [(f"model.layers.{i}.{part}.bias", n) for i in range(2) for part, n in sizes.items()]
    biases = {name: rng.standard_normal(n, np.float32) for name, n in parts}
    named = {name: tiny_gguf.name_of(name) for name in biases}
    names = {own: name for name, own in named.items()}
    given = {named[name]: x for name, x in biases.items() if named[name].split(".")[2] in maps.split()}
    tensors, config = tiny_gguf.write(path, "llama", "F32", more=given)
    for name, x in biases.items():
        x = tiny_gguf.halves(x, 64) if name.endswith(("q_proj.bias", "k_proj.bias")) else x
        tensors[name] = x if named[name] in given else np.zeros_like(x)
    tiny.write(folder, "llama", tensors, **config, attention_bias=True, mlp_bias=True)
    np.testing.assert_allclose(models.load(path)(IDS), models.load(folder)(IDS), rtol=0, atol=1e-5)
    if " " in maps:
        lacking, _ = given.popitem()
        tiny_gguf.write(path, "llama", "F32", more=given)
        with pytest.raises(
            ModelError, match=f"'{names[lacking]}' is missing; keys and tensors have their names of c"
        ):
            models.load(path)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *((kind, "attention.layer_norm_rms_epsilon") for kind in ("llama", "gemma2", "lfm2", "gpt_oss")),
        *((kind, "expert_used_count") for kind in ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next")),
        *((kind, "attention.sliding_window") for kind in ("gemma3-causal", "gemma4_text", "gpt_oss")),
        ("qwen3_moe", "expert_feed_forward_length"),
        ("granite", "logit_scale"),
    ],
)
def test_keys_that_are_missing(kind, key, tmp_path):
    """Where llama.cpp has no value for them, nothing is guessed."""
    message = rf"'[\w-]+\.{key}' is missing; expected a"
    assert_refused(tmp_path / "model.gguf", kind, message, without=[key])


@pytest.mark.parametrize(
    ("kind", "key", "usual"),
    [
        ("smollm3", "rope.freq_base", {"rope_theta": 1e4}),
        ("mixtral", "rope.freq_base", {"rope_theta": 1e4}),
        ("granite", "attention.scale", {"attention_multiplier": 64**-0.5}),
    ],
)
def test_keys_that_may_be_missing(kind, key, usual, tmp_path):
    """They are as llama.cpp has them, whatever config.json's defaults are."""
    got, expected = map(models.load, written(tmp_path, kind, "F32", usual, without=[key]))
    assert_near(got, expected, 1e-6)


@pytest.mark.parametrize(
    "kind", ["mixtral", "ministral3", "gemma4_text", "gpt_oss", "lfm2", *hybrid.ARCHITECTURES]
)
def test_wrong_keys_and_missing_tensors_are_errors_of_the_file(kind, tmp_path, monkeypatch):
    path, opened_gguf = tmp_path / "model.gguf", _gguf.opened_gguf
    tiny_gguf.write(path, kind, "Q8_0")

    with opened_gguf(path) as file:
        changes = [(key, "metadata", {**file.metadata, key: x}) for key in file.metadata for x in ("x", 3)]
        changes += [(name, "names", dict.fromkeys(x for x in file.names if x != name)) for name in file.names]
    wrong = set()
    for name, field, value in changes:

        def changed(path, field=field, value=value):
            file = opened_gguf(path)
            setattr(file, field, value)
            return file

        monkeypatch.setattr(_gguf, "opened_gguf", changed)
        with contextlib.suppress(ModelError):
            models.load(path)
            continue
        wrong.add(name)
    assert wrong > {
        x for x in file.names if x.endswith(("norm.weight", "ffn_down.weight", "ffn_down_exps.weight"))
    }


def header(*infos, keys=b"", n_keys=0, n_tensors=None, version=3):
    """The bytes of a file's beginning; infos are name, shape, type, offset."""
    found = (
        b"GGUF" + struct.pack("<IQQ", version, len(infos) if n_tensors is None else n_tensors, n_keys) + keys
    )
    for name, shape, kind, offset in infos:
        found += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
        found += struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)
    return found + bytes(-len(found) % 32)


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is truncated: its header needs byte 4 of 0"),
        (b"GGML" + bytes(100), "does not begin with 'GGUF'"),
        (header(version=1), "has version 1; expected 2 or 3"),
        (header(version=3 << 24), "the other order of bytes"),
        (header(n_tensors=2**63), "counts 9223372036854775808 in tensors"),
        (header(n_keys=2**62), "counts 4611686018427387904 in keys"),
        (header((b"x", (8,), 0, 0)), "is truncated: 'x' ends at byte"),
        (header((b"x", (8,), 99, 0)) + bytes(64), "has 'x' of type number 99; expected one of F32, F16"),
        (header((b"x", (8,), 16, 0)) + bytes(64), "has 'x' of type IQ2_XXS"),
        (header((b"x", (8,), 0, 1)) + bytes(64), "has 'x' at 1; expected a multiple of 32"),
        (header((b"x", (8,), 0, 0), (b"y", (8,), 0, 0)) + bytes(64), "'y' at 0, where the tensor before"),
        (header((b"x", (8,), 0, 0), (b"x", (8,), 0, 32)) + bytes(64), "has the tensor 'x' twice"),
        (header((b"x", (8,), 8, 0)) + bytes(64), "has 'x' with rows of 8 in Q8_0; expected multiples of 32"),
        (header((b"x", (), 0, 0)) + bytes(64), "has 'x' with 0 axes; expected 1 to 4"),
        (header((b"x", (8, 0, 4096), 0, 0)) + bytes(64), r"has 'x' with shape \(4096, 0, 8\); expected axes"),
        (header((b"x", (2**63, 2**63), 0, 0)) + bytes(64), "is truncated: 'x' ends at byte"),
        (header((b"\xff", (8,), 0, 0)) + bytes(64), "bytes in the name of a tensor that are no UTF-8"),
        (header((b"a\n", (8,), 0, 0)) + bytes(64), r"has a tensor 'a\\n'; expected a name"),
        (header(keys=key(b"a", 8, struct.pack("<Q", 2**40)), n_keys=1), "is truncated: its header needs"),
        (header(keys=key(b"a", 9, struct.pack("<IQ", 8, 2**40)), n_keys=1), "counts 1099511627776 in 'a'"),
        (header(keys=key(b"a", 9, struct.pack("<IQ", 9, 1)), n_keys=1) + bytes(99), "an array of type 9"),
        (header(keys=key(b"a", 77, b""), n_keys=1), "has 'a' of type 77; expected a number"),
        (header(keys=2 * key(b"a", 0, b"1"), n_keys=2), "has the key 'a' twice"),
        (header(keys=key(b"general.alignment", 4, struct.pack("<I", 3)), n_keys=1), "'general.alignment' 3"),
        (header(keys=key(b"a", 9, struct.pack("<IQQ", 8, 1, 2**40)), n_keys=1), "is truncated: its header"),
    ],
)  # fmt: skip
def test_malformed_files(data, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        models.load(path)
    assert str(path) in str(caught.value)


def array(name, kind, *numbers):
    return key(name, 9, struct.pack(f"<I{len(numbers)}Q", kind, *numbers))


@pytest.mark.parametrize(
    ("keys", "counts", "message"),
    [
        (b"", (0, 2**20), "counts 1048576 in keys; expected at most 4096"),
        (b"", (2**17, 0), "counts 131072 in tensors; expected at most 65536"),
        (struct.pack("<Q", 2**17), (0, 1), "131072 bytes in the name of a key; expected at most 65536"),
        (struct.pack("<Q", 2**17), (1, 0), "131072 bytes in the name of a tensor; expected at most 65536"),
        (key(b"a", 8, struct.pack("<Q", 2**27)), (0, 1), "has a header that needs byte 134217773; expected"),
        (array(b"a", 8, 2, 2**27), (0, 1), "has a header that needs byte 134217785; expected at most"),
        (array(b"a", 8, 10**8), (0, 1), "counts 100000000 in 'a'; expected at most 4194304"),
        (array(b"a", 0, 10**8), (0, 1), "counts 100000000 in 'a'; expected at most 4194304"),
        (array(b"a", 0, 2**22) + bytes(2**22) + array(b"b", 8, 1), (0, 2),
         "counts 1 in 'b'; expected at most 0"),
    ],
)  # fmt: skip
def test_headers_of_files_with_holes(keys, counts, message, tmp_path):
    """Such a file seems to have the bytes for anything."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header(keys=keys, n_tensors=counts[0], n_keys=counts[1]))
        file.truncate(2**34)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message):
        models.load(path)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_a_model_that_people_use(smollm):
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = smollm.text.encode([prompt])
    # As transformers reads them from this file.
    assert ids == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    answer = "".join(smollm.text.stream(ids, smollm.generate(ids, 20)))
    assert answer == "The capital of France is Paris."
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    pieces = list(smollm.generate(messages, 20, template_values={"messages_of": "none"}))
    assert pieces[-1].finish_reason == "stop"
    assert "Paris" in "".join(map(str, pieces))
    cut = list(smollm.generate(messages, 20, stop=["Paris", "Rome"]))
    assert "".join(map(str, cut)) == "".join(map(str, pieces)).partition("Paris")[0]
