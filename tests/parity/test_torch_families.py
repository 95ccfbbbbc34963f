"""Every family of transformers that has the attention interface: with "fastattn" as with "eager"."""

import ast
import importlib
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny_transformers import distance, ready, results
from transformers.utils.generic import TransformersKwargs

from fastattn.torch import _hugging_face, register
from fastattn.torch._hugging_face import HARMLESS, attention_forward

ROOT = Path(transformers.__file__).parent / "models"
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*/modeling_*.py"))}
CALL = "attention_interface("
FAMILIES = {path.stem.removeprefix("modeling_"): path for path, text in SOURCES.items() if CALL in text}
KNOWN = HARMLESS | set(inspect.signature(attention_forward).parameters)


@pytest.fixture(autouse=True)
def _quiet():
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torch deprecate what they use
        yield
    transformers.logging.set_verbosity(verbosity)


def calls(tree):
    """The calls of an attention interface in a file, or in a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and f"{ast.unparse(node.func)}(" == CALL:
            yield node


def attention_classes(path):
    tree = ast.parse(SOURCES[path])
    return {x.name for x in tree.body if isinstance(x, ast.ClassDef) and list(calls(x))}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_keyword_that_a_family_passes_is_known(family):
    """A new one may say what is attended: it is obeyed, or found harmless, or refused."""
    passed = {x.arg for call in calls(ast.parse(SOURCES[FAMILIES[family]])) for x in call.keywords}
    assert passed - {None} - KNOWN == set()


def test_every_keyword_of_users_is_known():
    assert set(TransformersKwargs.__annotations__) <= KNOWN


@pytest.mark.parametrize("family", [
    family for family, path in FAMILIES.items() if "def eager_attention_forward(" in SOURCES[path]
])  # fmt: skip
def test_the_eager_function_of_a_family(family):
    """Calls have everything that it takes: masks, position biases, softcaps, sinks."""
    torch.manual_seed(0)
    eager = module_of(family).eager_attention_forward
    source, names = inspect.getsource(eager), inspect.signature(eager).parameters
    groups = 2 if "num_key_value_groups" in source or "n_rep" in source else 1
    query = torch.randn(2, 4, 9, 8)
    key, value = torch.randn(2, 2, 4 // groups, 13, 8)
    module = SimpleNamespace(num_key_value_groups=groups, head_dim=8, sinks=torch.randn(4), training=False)
    extras = {
        "position_bias": torch.randn(1, 4, 9, 13), "softcap": 0.5, "sinks": torch.randn(2, 4, 9, 1),
        "sliding_window": 5,
    }  # fmt: skip
    own = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}
    assert names.keys() - own - extras.keys() == set(), "a parameter that is new here"
    options = {name: x for name, x in extras.items() if name in names} | {"scaling": 0.6}
    seen = torch.rand(2, 1, 9, 13) < 0.6
    seen[..., 0] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    if "+ attention_mask" not in source:
        seen = mask = None
    expected, _ = eager(module, query, key, value, mask, **options)
    sinks = {"s_aux": module.sinks} if "module.sinks" in source else {}
    for given in (seen, mask):
        out, _ = attention_forward(module, query, key, value, given, is_causal=False, **options, **sinks)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)


def module_of(family):
    path = FAMILIES[family]
    return importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")


# Families of which `tiny_transformers` makes no model: only their keywords and eager functions are tested.
NOT_BUILT = {
    "audio_spectrogram_transformer", "bailing_hybrid", "bamba", "chameleon", "cohere_asr", "d_fine", "dbrx",
    "decision_transformer", "deepseek_ocr2", "deformable_detr", "deimv2", "diffusion_gemma", "dots1",
    "edgetam", "edgetam_video", "efficientloftr", "esmc", "esmfold2", "falcon_h1", "florence2", "gemma3n",
    "granite_speech5", "granitemoehybrid", "hrm_text", "idefics", "informer", "kyutai_speech_to_text",
    "lfm2_moe", "lightglue", "longcat_flash", "mimi", "mistral4", "muse_glimmer_assistant", "musicgen",
    "musicgen_melody", "nemotron3_5_transcribe", "nemotron_h", "neomme", "neucodec", "paddleocr_vl",
    "patchtsmixer", "patchtst", "pe_audio", "pe_audio_video", "pe_video", "pix2struct",
    "pocket_tts_audio_tokenizer", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4",
    "pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec", "qwen2_5_omni", "rt_detr", "rt_detr_v2", "sam", "sam2",
    "sam2_video", "sam3_lite_text", "sam3_tracker_video", "sam_hq", "sapiens2", "sew", "speech_to_text",
    "swin", "time_series_transformer", "timesfm", "timesfm2_5", "udop", "unlimited_ocr", "videomae",
    "vivit", "voxtral_realtime", "wav2vec2_bert", "xcodec2", "xmod", "zamba", "zamba2",
}  # fmt: skip
BOUNDS = {"mobilebert": 1e-2}  # layers without norms: rounding errors grow, those of "sdpa" to 6e-4
# transformers takes it for causal where it has no mask, but not in "eager"; so does its own "sdpa".
AS_SDPA = {"Phi4MultimodalVisionModel"}


def models_of(family):
    """The model classes of a family, plain ones first."""
    module = module_of(family)
    found = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    found = [x for x in found if inspect.isclass(x) and issubclass(x, transformers.PreTrainedModel)]
    found = [x for x in found if x.config_class and not x.__name__.endswith("PreTrainedModel")]
    return sorted(found, key=lambda x: ("For" in x.__name__, len(x.__name__), x.__name__))


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in NOT_BUILT])
def test_models_of_a_family(family, monkeypatch):
    missing, ran = attention_classes(FAMILIES[family]), set()

    def watched(module, *args, **kwargs):
        ran.add(type(module).__name__)
        return attention_forward(module, *args, **kwargs)

    monkeypatch.setattr(_hugging_face, "attention_forward", watched)
    register()
    for cls in models_of(family):
        if not missing or (ran and "For" in cls.__name__) or not (built := ready(cls, missing)):
            continue
        model, inputs, expected = built
        if cls.__name__ in AS_SDPA:
            model.set_attn_implementation("sdpa")
            expected = results(model, inputs)
        for name in ("fastattn", "fastattn_flash"):
            model.set_attn_implementation(name)
            assert distance(results(model, inputs), expected, inputs) < BOUNDS.get(family, 1e-4), cls.__name__
        missing -= ran
    assert ran, "no tiny model of it can be made here: see tiny_transformers.py, and last of all NOT_BUILT"


# Packed sequences are not as alone there: attention is not told of them (SigLIP, Kosmos), embeddings, states
# or indexers mix neighbours, or positions are not those of the input.
NOT_PACKED = {
    "align", "clap", "deepseek_v4", "doge", "glm5_next", "glm_moe_dsa", "hy_v4_vl", "inkling",
    "inkling2", "inkling2_loop", "jamba", "kosmos2", "kosmos2_5", "minimax", "minimax_m3_vl",
    "mobilebert", "qwen4_exp", "recurrent_gemma", "siglip", "siglip2", "splinter", "tipsv2",
    "videoprism", "zaya",
}  # fmt: skip


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in NOT_BUILT | NOT_PACKED])
def test_packed_sequences_of_a_family(family):
    """With ``cu_seq_lens_q``, as sentence-transformers passes them; models of images and sounds have none."""
    register()
    for cls in models_of(family)[:3]:
        takes = inspect.signature(cls.forward).parameters
        text = cls.main_input_name == "input_ids" and "position_ids" in takes
        if not text or "For" in cls.__name__ or "Decoder" in cls.__name__:
            continue
        built = ready(cls, attention_classes(FAMILIES[family]))
        if not built or "decoder_input_ids" in built[1]:
            continue
        model, sequences = built[0], [torch.randint(5, 90, (n,)).tolist() for n in (7, 2, 20, 11)]
        padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
        collate = transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, position_ids_start=0 if padding is None else padding + 1
        )
        batch = collate([{"input_ids": ids} for ids in sequences])
        given = {"use_cache": False} if "use_cache" in takes else {}
        with torch.no_grad():
            alone = torch.cat([model(torch.tensor([ids]), **given)[0][0] for ids in sequences])
            model.set_attn_implementation("fastattn_flash")
            named = {name: x for name, x in batch.items() if name != "labels"}
            found = model(**named, **given)[0][0]
        assert (found - alone).abs().max() < 1e-4 * alone.abs().max(), cls.__name__
        return


SMALL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48,
    "vocab_size": 90,
}  # fmt: skip


def reference(query, key, value, seen):
    scores = (query @ key.mT).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num() @ value


@pytest.mark.parametrize("dropout", [0.0, 1e-9])  # with dropout, transformers' own function computes
@pytest.mark.parametrize("masked", [None, "bools", "numbers"])
def test_only_selected_keys_are_attended(masked, dropout):
    """Keys are selected by `indices`, blocks by `block_indices`; -1 selects nothing."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    mask = None if masked is None else torch.rand(2, 1, 9, 9) < 0.8
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    seen = causal if mask is None else mask
    if masked == "numbers":
        mask = torch.zeros(2, 1, 9, 9).masked_fill(~mask, -torch.inf)
    indices = torch.stack([torch.randperm(9)[:5] for _ in range(18)]).reshape(2, 9, 5).int()
    indices[0, :, -1] = -1
    blocks = torch.stack([torch.randperm(3)[:2] for _ in range(36)]).reshape(2, 2, 9, 2)
    blocks[:, 1, :, 0] = -1
    chosen = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    in_blocks = torch.zeros(2, 4, 9, 9, dtype=torch.bool)
    for b in range(2):
        for i in range(9):
            chosen[b, 0, i, [j for j in indices[b, i].tolist() if j >= 0]] = True
            for head in range(4):
                for j in blocks[b, head // 2, i].tolist():
                    in_blocks[b, head, i, 4 * j : 4 * j + 4] = j >= 0
    module = SimpleNamespace(is_causal=True, indexer=SimpleNamespace(block_size=4))
    for options, kept in (({"indices": indices}, chosen), ({"block_indices": blocks}, in_blocks)):
        out, _ = attention_forward(module, query, key, value, mask, dropout, 1.0, **options)
        expected = reference(query, key, value, seen & kept).transpose(1, 2)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_what_is_not_known_is_refused():
    x, module = torch.randn(2, 4, 9, 8), SimpleNamespace(is_causal=False)
    expected, _ = attention_forward(module, x, x, x, None)
    harmless = dict.fromkeys(HARMLESS, torch.ones(1)) | {"segments": None, "output_attentions": False}
    assert torch.equal(attention_forward(module, x, x, x, None, **harmless)[0], expected)
    for name in ("segments", "head_mask"):
        with pytest.raises(NotImplementedError, match=rf"^fastattn: attention is given {name}=, which"):
            attention_forward(module, x, x, x, None, **{name: torch.ones(9)})
    with pytest.raises(ValueError, match=r"sinks has shape \(2, 4, 9\); expected \(batch, 4, 9, 1\), one of"):
        attention_forward(module, x, x, x, None, sinks=torch.zeros(2, 4, 9))


@pytest.mark.parametrize(
    "cls",
    [transformers.BertModel, transformers.LlamaModel, transformers.GPT2Model, transformers.GPTBigCodeModel],
)
def test_weights_are_never_left_out_in_silence(cls):
    register()
    model = cls._from_config(cls.config_class(**SMALL), attn_implementation="fastattn").eval()
    ids = torch.randint(1, 90, (2, 9))
    assert model(ids, output_attentions=False).last_hidden_state.shape == (2, 9, 32)
    with pytest.raises(NotImplementedError, match=r"output_attentions is True.*set_attn_implementation"):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    assert len(model(ids, output_attentions=True).attentions) == 2


def test_masks_of_models_that_are_not_made_for_sdpa():
    """They get numbers to add, others bools, or none where causal is all; compiled, too."""
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5, "dtype": torch.float32}
    torch.compiler.reset()
    compiled = torch.compile(_hugging_face.make_mask, fullgraph=True, backend="aot_eager")
    for make in (_hugging_face.make_mask, compiled):
        mask = make(config=transformers.DeepseekV4Model.config_class(), **sizes)
        assert torch.equal(mask == 0, torch.ones(2, 1, 5, 5, dtype=torch.bool).tril())
        assert make(config=transformers.LlamaModel.config_class(), **sizes) is None
