"""Models of transformers with our deformable attention beside their own: results, gradients, undoing."""

import copy
import importlib
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import fastattn.torch as ft
from fastattn.torch import _measure

pytestmark = pytest.mark.usefixtures("own_functions")
STAGES = ["stage1", "stage2", "stage3", "stage4"]
WIDTH = {"encoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_ffn_dim": 32, "decoder_layers": 2,
         "decoder_attention_heads": 4, "d_model": 32, "num_queries": 12, "num_labels": 5}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4}
PYRAMID = {**WIDTH, "encoder_hidden_dim": 32, "encoder_in_channels": [8, 16, 16], "num_denoising": 0,
           "decoder_in_channels": [32, 32, 32]}  # fmt: skip
GROUNDED = {**WIDTH, "encoder_layers": 2, "fusion_droppath": 0.0, "dropout": 0.0, "max_text_len": 16}
SEGMENTED = {"hidden_dim": 32, "encoder_feedforward_dim": 32, "encoder_layers": 2, "decoder_layers": 3,
             "num_attention_heads": 4, "dim_feedforward": 32, "num_queries": 12, "num_labels": 5}  # fmt: skip


def config(model_type, **more):
    return CONFIG_MAPPING[model_type](**more)


def resnet(model_type):
    return config(model_type, **RESNET, layer_type="basic", out_features=STAGES[1:])


def swin(stages=STAGES[1:]):
    return config("swin", image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=4,
                  out_features=stages)  # fmt: skip


def text():
    return config("bert", vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                  intermediate_size=32, max_position_embeddings=64)  # fmt: skip


# Of each function a family; others have the same ones: see test_torch_hybrids.py.
MODELS = {
    "deformable_detr": lambda: {**WIDTH, "encoder_layers": 2, "backbone_config": resnet("resnet")},
    "rt_detr_v2": lambda: {**PYRAMID, "backbone_config": resnet("rt_detr_resnet")},
    "d_fine": lambda: {**PYRAMID, "backbone_config": resnet("rt_detr_resnet"), "decoder_n_points": [3, 6, 3]},
    "grounding-dino": lambda: {**GROUNDED, "backbone_config": swin(), "text_config": text()},
    "mask2former": lambda: {
        **SEGMENTED, "backbone_config": swin(STAGES), "feature_size": 32, "mask_feature_size": 32,
    },
}  # fmt: skip


def tiny(name, **more):
    """Make a random model; skips where transformers is too old to have it."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    module = importlib.import_module(f"transformers.models.{name.replace('-', '_')}")
    (kind,) = {n for n in dir(module) if n.endswith(("ForObjectDetection", "ForUniversalSegmentation"))}
    model = getattr(module, kind)(config(name, **{**MODELS[name](), **more})).eval()
    with torch.no_grad():  # else points lie on lines between pixels, where rounding decides about a gradient
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def inputs(name):
    torch.manual_seed(1)
    texts = {"input_ids": torch.randint(5, 59, (2, 8))} if "grounding" in name else {}
    return {"pixel_values": torch.randn(2, 3, 64, 64), **texts}


def results(model, name):
    """All results that are floats, in the model's type."""
    given = {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in inputs(name).items()}
    for cache in (x for n, x in vars(model).items() if "cache" in n):  # of texts' vectors
        cache.cache.clear()
    found = model(**given)
    return {n: x for n, x in found.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}


def loss(found):
    return sum(x[x.isfinite()].square().mean() for x in found.values() if x.requires_grad)


def results_and_gradients(model, name):
    model.zero_grad()
    found = results(model, name)
    loss(found).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {n: x.detach() for n, x in found.items()}, gradients


def assert_as_near(got, expected, exact, bound):
    assert got.keys() == expected.keys() == exact.keys()
    largest = max(x[x.isfinite()].abs().max().item() for x in expected.values())
    for n, x in expected.items():
        finite = x.isfinite()
        most, off = (y[finite].abs().max().item() for y in (x, x - exact[n]))
        least = 1e-8 if exact[n].abs().max() < 1e-14 * largest else 1e-9  # of nothing but rounding
        torch.testing.assert_close(got[n], x, rtol=0, atol=bound * most + 4 * off + least * largest, msg=n)


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_transformers(name, calls):
    """To a bound, and as near as transformers' own are to float64: some gradients are rounding alone."""
    model = tiny(name)
    expected, gradients = results_and_gradients(model, name)
    with ft.register(measure=False):
        assert not calls
        got, found = results_and_gradients(model, name)
    assert sum(calls.values()) >= 2
    exact, slopes = results_and_gradients(model.double(), name)
    assert_as_near(got, expected, exact, 1e-5)
    assert any("sampling_offsets" in n and gradient.any() for n, gradient in gradients.items())
    assert_as_near(found, gradients, slopes, 2e-5)


@pytest.mark.parametrize("name", ["rt_detr_v2", "d_fine"])
def test_discrete_places(name, calls):
    model = tiny(name, decoder_method="discrete")
    expected = results(model, name)
    with ft.register(measure=False):
        got = results(model, name)
    assert calls["multi_scale_deformable_attention_v2"] == 2
    for n, x in expected.items():
        torch.testing.assert_close(got[n], x, rtol=1e-5, atol=1e-5, msg=n)


def arguments(dtype=torch.float32, queries=7):
    torch.manual_seed(0)
    value = torch.randn(2, 4 * 5 + 6, 3, 8).to(dtype)
    locations = (torch.rand(2, queries, 3, 2, 4, 2) * 1.4 - 0.2).to(dtype)
    weights = torch.rand(2, queries, 3, 2, 4).to(dtype)
    sides = [(4, 5), (2, 3)]
    return value, torch.tensor(sides), sides, torch.tensor([0, 20]), locations, weights, 64


def test_functions_of_parts_made_before_and_while_in_use():
    from transformers.models.d_fine import modeling_d_fine as module

    kind, own = module.DFineMultiscaleDeformableAttention, module.multi_scale_deformable_attention_v2
    part = kind(config("d_fine", **MODELS["d_fine"]()))
    with ft.register(measure=False):
        assert part.ms_deformable_attn_core is not own
        other = kind(config("d_fine", **MODELS["d_fine"]()))
        assert pickle.loads(pickle.dumps(part)).ms_deformable_attn_core is part.ms_deformable_attn_core
        mine = lambda *args: None  # noqa: E731
        copied = copy.deepcopy(part)
        copied.ms_deformable_attn_core = mine
        assert copied.ms_deformable_attn_core is mine
    assert "ms_deformable_attn_core" not in vars(kind)
    assert part.ms_deformable_attn_core is other.ms_deformable_attn_core is own
    assert copied.ms_deformable_attn_core is mine


def test_a_kernel_of_the_hub_stays():
    """It is put into a part of a model, and not into its class."""
    from transformers.models.deformable_detr import modeling_deformable_detr as module

    part = module.MultiScaleDeformableAttention()
    part.forward = lambda *args: "of the hub"
    with ft.register(measure=False):
        assert part(*arguments()) == "of the hub"


LATER = """
import torch, transformers
import fastattn.torch as ft
change = ft.register(measure=False)
from transformers.models.mask2former import modeling_mask2former as module
from transformers.models.rt_detr import modeling_rt_detr as other
names = lambda: [hasattr(f, "_of_fastattn") for f in (
    module.multi_scale_deformable_attention, other.MultiScaleDeformableAttention.forward)]
assert names() == [True, True]
change.undo()
assert names() == [False, False]
print("fine")
"""


def test_modules_that_are_imported_later_have_them_too():
    run = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=False)
    assert run.stdout == "fine\n", run.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_as_near_to_float64_as_transformers_own(dtype, calls):
    from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention

    part, given = MultiScaleDeformableAttention(), arguments(dtype)
    exact = part(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given))
    theirs = part(*given)
    with ft.register(measure=False):
        ours = part(*given)
    assert calls
    assert ours.dtype is dtype
    assert ours.stride() == theirs.stride()
    assert (ours - exact).abs().max() <= (theirs - exact).abs().max() + 1e-6


def test_what_does_not_gain_or_fit_stays_transformers(monkeypatch, calls):
    from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention

    part, given = MultiScaleDeformableAttention(), arguments()
    expected = part(*given)
    for ratio in (0.9, 1.2):
        monkeypatch.setattr(_measure, "_measure", lambda pairs, ratio=ratio: ratio)
        monkeypatch.setattr(_measure, "_ratios", {})
        with torch.inference_mode(), ft.register():
            torch.testing.assert_close(part(*given), expected)
        assert bool(calls) is (ratio > 1)
        assert any("MultiScaleDeformableAttention" in key for key in ft.measured())
    with ft.register():  # another number of queries is another kind of call
        part(*arguments(queries=70))
        part(*arguments(torch.bfloat16))  # torch's own may read what is not its own
    assert len(ft.measured()) == 2
    calls.clear()
    with ft.register(measure=False):
        double = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]
        part(*double)
        with pytest.raises(RuntimeError, match="split"):
            part(*given[:2], [(4, 5), (2, 2)], *given[3:])
        compiled = torch.compile(part, backend="eager")
        torch.testing.assert_close(compiled(*given), expected)
    assert not calls
