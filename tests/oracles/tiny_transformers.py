"""Models of every family of transformers in a few numbers, random, with their inputs."""

import contextlib
import copy
import inspect
import re

import torch
import transformers

# Sizes of a tiny model, by the names that families give them; the first that fits.
KEPT = r"num_channels|in_channels|num_mel_bins|\w*patch_size|\w*image_size|conv_dim|max_position_embeddings"
SIZES = {
    r"num_hidden_layers|n_layers?|num_layers|\w+_layers|depth|num_blocks|\w+_depth": 2,
    r"\w*(key_value_heads|kv_heads|head_kv)": 2,
    r"\w*(heads?|attention_heads)": 4,
    r"(\w+_)?head_dim|kv_channels|d_kv": 8,
    r"\w*lora_rank": 16,
    r"\w*(hidden_size|d_model|n_embd|dim|width|embedding_size|channels)": 32,
    r"\w*(intermediate_size|n_inner|ffn_hidden_size|d_ff)": 48,
    r"(\w+_)?vocab_size\w*": 90,
    r"\w*experts": 4,
    r"\w*(experts_per_tok|top_k|topk|moe_k|experts_per_token|topk_blocks)": 2,
    r"n_group|topk_group": 1,
    r"\w*window(_size)?": 5,
    r"index_block_size": 4,
}
# Without delta rules, which transformers computes in float32 with errors of 4e-5 of the largest number.
INDEXED = {"layer_types": ["indexed_attention"] * 2}
BY_TYPE = {
    "codegen": {"rotary_dim": 8},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "glm5_next_text": INDEXED | {"index_kpool": 4, "index_topk": 8},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2},
    "qwen2_5_vl_text": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}
    },
    "qwen4_exp_text": INDEXED
    | {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"block_types": ["attention", "recurrent"]},
}
# Where it is None.
UNSET = {"head_dim": 8, "num_key_value_heads": 2, "vocab_size": 90, "num_experts_per_tok": 2}
KINDS = r"\w*layer_types|layers_block_type|indexer_types"
UNCUT = r"dim|width|channels|size|d_model|rank"  # what a second attempt leaves as large as it is


def tiny(config, attempt):
    """A config of a few numbers in each place, changed in place; attempts 1 and 2 leave more as it is."""
    for name, x in list(vars(config).items()):
        if isinstance(x, transformers.PretrainedConfig):
            tiny(x, attempt)
        elif x is None and name in UNSET:
            put(config, name, UNSET[name])
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            put(config, name, x and 3)
        elif type(x) is int and x > 1 and not re.fullmatch(KEPT, name):
            size = next((n for pattern, n in SIZES.items() if re.fullmatch(pattern, name)), x)
            uncut = (attempt > 0 and re.search(UNCUT, name) and "vocab" not in name) or (
                attempt > 1 and "head" in name
            )
            if size < x and not uncut:
                put(config, name, size)
    if getattr(config, "kv_lora_rank", None) and getattr(config, "num_key_value_heads", None):
        put(config, "num_key_value_heads", config.num_attention_heads)
    for name, x in BY_TYPE.get(config.model_type, {}).items():
        put(config, name, x)
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 1, 1]  # of half a head
    lists = [name for name, x in vars(config).items() if re.fullmatch(KINDS, name) and x]
    for name in lists:  # every kind of layer
        kinds = list(dict.fromkeys(getattr(config, name)))
        put(config, "num_hidden_layers", max(getattr(config, "num_hidden_layers", 2), len(kinds)))
        put(config, name, (kinds * 4)[: config.num_hidden_layers])
    for name in lists:
        put(config, name, (getattr(config, name) * 4)[: config.num_hidden_layers])
    return config


def put(config, name, x):
    with contextlib.suppress(AttributeError, TypeError, ValueError):  # it may be computed, or checked
        setattr(config, name, x)


class Unknown(Exception):
    """An input that nothing here makes."""


def side(config):
    size = getattr(config, "image_size", None) or 64
    size = (size["height"], size["width"]) if isinstance(size, dict) else size
    return tuple(size[:2]) if isinstance(size, (list, tuple)) else (size, size)


def first_of(config, *names):
    return next((x for name in names if (x := getattr(config, name, None))), None)


def made(name, config, draw):
    """The input of that name."""
    vision = getattr(config, "vision_config", None) or config
    channels = first_of(vision, "num_channels", "in_channels", "in_chans") or 3
    if name in ("input_ids", "decoder_input_ids", "qformer_input_ids"):
        return torch.randint(5, 90, (2, 17), generator=draw)
    if name == "pixel_values":
        return torch.randn(1, channels, *side(vision), generator=draw)
    if name == "pixel_values_videos":
        frames = first_of(vision, "frames_per_clip") or 4
        return torch.randn(1, frames, channels, *side(vision), generator=draw)
    if name in ("inputs_embeds", "hidden_states", "encoder_hidden_states"):
        return torch.randn(2, 17, first_of(config, "hidden_size", "d_model") or 32, generator=draw)
    if name == "input_features":
        bins = first_of(config, "num_mel_bins", "feature_projection_input_dim") or 80
        if positions := first_of(config, "max_source_positions"):
            return torch.randn(1, bins, 2 * positions, generator=draw)
        return torch.randn(1, 64, bins, generator=draw)
    if name == "input_values":
        return torch.randn(1, 6400, generator=draw)
    raise Unknown(name)


def inputs_of(model):
    draw, config = torch.Generator().manual_seed(0), model.config
    parameters = inspect.signature(model.forward).parameters
    names = [n for n, p in parameters.items() if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    main = model.main_input_name
    main = main[0] if isinstance(main, list) else main
    usual = ("pixel_values", "input_features", "input_values", "inputs_embeds", "hidden_states")
    names.append(main if main in parameters else next((n for n in usual if n in parameters), main))
    inputs = {}
    if "grid_thw" in names:
        patch, frames = config.patch_size, first_of(config, "temporal_patch_size") or 1
        channels = first_of(config, "in_channels", "in_chans", "num_channels") or 3
        inputs["grid_thw"] = torch.tensor([[1, 4, 6]])
        flat = torch.randn(24, channels * frames * patch * patch, generator=draw)
        inputs |= {name: flat for name in ("hidden_states", "pixel_values") if name in names}
    for name in dict.fromkeys(names):
        if name not in inputs and name != "attention_mask":
            inputs[name] = made(name, config, draw)
    if "decoder_input_ids" in parameters:
        rows = len(next(iter(inputs.values())))
        inputs["decoder_input_ids"] = made("decoder_input_ids", config, draw)[:rows, :9]
    first = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if "attention_mask" in parameters and first is not None:
        inputs["attention_mask"] = torch.ones(first.shape[:2], dtype=torch.long)
        inputs["attention_mask"][-1, 13:] = 0
    return inputs


def tensors(x):
    """The results of a model, one after the other."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        yield x
    elif isinstance(x, dict):
        for name in x.keys() - {"past_key_values"}:
            yield from tensors(x[name])
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from tensors(part)


def results(model, inputs):
    torch.manual_seed(1)
    with torch.no_grad():
        out = model(**inputs)
    return list(tensors({name: out[name] for name in sorted(out)} if hasattr(out, "keys") else out))


def random_model(cls, attempt, classes):
    """A tiny model that has a layer of `classes`; None if it has none or would not be tiny."""
    config = tiny(cls.config_class(), attempt)
    with torch.device("meta"):
        probe = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    if sum(x.numel() for x in probe.parameters()) > 8e6:
        return None
    if not classes & {type(x).__name__ for x in probe.modules()}:
        return None
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager").eval()
    for name, x in model.named_parameters():
        if x.ndim > 1:
            torch.nn.init.normal_(x, std=0.3 / max(1, x[0].numel() / 32) ** 0.5)
        elif "bias" in name or "sink" in name:
            torch.nn.init.normal_(x, std=0.3)
    return model


def ready(cls, classes):
    """A model, its inputs, and what it makes of them with "eager"; None if nothing here can run it."""
    for attempt in range(3):
        try:
            if (model := random_model(cls, attempt, classes)) is None:
                continue
            return model, (inputs := inputs_of(model)), results(model, inputs)
        except Exception:  # of any kind: sizes that do not fit each other, a package that is missing
            continue
    return None


def distance(found, expected, inputs):
    """The greatest difference between results, relative to the largest number, without those of padding."""
    worst = 0.0
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        if real is not None and y.shape[:2] == real.shape:
            x, y = x[real], y[real]
        x, y = x[y.isfinite()], y[y.isfinite()]  # a row that attends nothing is 0 here, and NaN there
        if y.numel():
            worst = max(worst, ((x - y).abs().max() / y.abs().max().clamp(min=1e-9)).item())
    return worst
