"""GGUF files of tiny models: random blocks of any type, and the same numbers as a folder in safetensors."""

from functools import cache, partial

import gguf
import numpy as np
import tiny_gguf_hybrid as hybrid
import tiny_models as tiny

BLOCK = 256  # the most features of a block
EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3-causal": "gemma3",
    "gemma4_text": "gemma4", "gpt_oss": "gpt-oss", "ministral3": "mistral3", "olmo3": "olmo2",
    **{kind: gguf.MODEL_ARCH_NAMES[x] for kind, x in hybrid.ARCHITECTURES.items()},
}  # fmt: skip
NUMBERS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where they lie


def byte_tokens():
    """The tokens of single bytes, as GPT-2 writes them, in the order of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(i if i in shown else next(others)) for i in range(256)]


def typed(x):
    """A value with its type, for `write`."""
    kind = gguf.GGUFValueType
    if isinstance(x, list):
        return x, kind.ARRAY
    kinds = {bool: kind.BOOL, str: kind.STRING, float: kind.FLOAT32}
    return x, kinds.get(type(x), kind.UINT32)


def config(kind, vocab=None):
    """config.json of a model whose rows are whole blocks."""
    sizes = {"hidden_size": BLOCK, "intermediate_size": 2 * BLOCK, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    if kind == "qwen3_moe":
        sizes |= {"moe_intermediate_size": BLOCK, "norm_topk_prob": True}
    if kind == "smollm3":
        sizes |= {"no_rope_layer_interval": 4, "num_hidden_layers": 4}  # as files of it have it
    if kind == "gpt_oss":
        sizes["swiglu_limit"] = 7.0  # files do not say it
    more = {} if vocab is None else {"vocab_size": vocab}
    if kind == "gemma4_text":
        sizes |= {"global_head_dim": 128, "hidden_size_per_layer_input": BLOCK}
    sizes |= hybrid.SIZES.get(kind, {})
    return {**tiny.CONFIGS[kind], **sizes, **more, "max_position_embeddings": 64, "head_dim": 64}


def random_blocks(name, rows, features, seed=0):
    """Bytes of a matrix, its scales about 0.01."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows * features // block, size), dtype=np.uint8)
    if name == "MXFP4":
        data[:, 0] = rng.integers(118, 122, len(data))
    for at in () if name == "MXFP4" else SCALES.get(name, (0, 2) if name in ("Q4_1", "Q5_1") else (0,)):
        scales = rng.uniform(-0.01, 0.01, len(data)).astype("<f2")
        data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


@cache
def names_of(architecture):
    return gguf.get_tensor_name_map(NUMBERS[architecture], 64)  # layers at most


def name_of(name, kind="llama"):
    """A tensor's name in GGUF, as llama.cpp's converter has it; those of all experts are one tensor."""
    stem, _, last = name.rpartition(".")
    if ".experts." in name:
        return f"blk.{name.split('.')[2]}.{EXPERTS[stem.rpartition('.')[2]]}.{last}"
    found = names_of(ARCHITECTURES.get(kind, kind)).get_name(name, try_suffixes=(".weight", ".bias"))
    return found + ".weight" * name.endswith((".sinks", ".layer_scalar"))


def interleaved(x, head_dim):
    """Rows of each head as the architecture "llama" has them: those of both halves in turn."""
    return x.reshape(-1, 2, head_dim // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def halves(x, head_dim):
    """The inverse of `interleaved`."""
    return x.reshape(-1, head_dim // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write_experts(writer, name, x, stored, seed):
    """Write experts of GPT-OSS, which have gate and up in turns, and return what transformers has of them."""
    block, maps = f"blk.{name.split('.')[2]}", ("gate", "up") if "gate_up" in name else ("down",)
    if name.endswith("_bias"):
        for i, part in enumerate(maps):
            writer.add_tensor(f"{block}.ffn_{part}_exps.bias", np.ascontiguousarray(x[:, i :: len(maps)]))
        return x
    count, n_in, n_out = x.shape
    kind = gguf.GGMLQuantizationType[stored]
    data = np.float32(x).swapaxes(1, 2)
    if stored != "F32":
        data = random_blocks(stored, count * n_out, n_in, seed).reshape(count, n_out, -1)
    for i, part in enumerate(maps):
        rows = np.ascontiguousarray(data[:, i :: len(maps)])
        writer.add_tensor(f"{block}.ffn_{part}_exps.weight", rows, raw_dtype=kind)
    return np.ascontiguousarray(gguf.quants.dequantize(data, kind).swapaxes(1, 2))


def write_sizes(writer, settings):
    """The sizes of Gemma 4: those of layers with a window by their own names, others for each layer."""
    near = [each == "sliding_attention" for each in settings["layer_types"]]
    shared, inner = settings["num_kv_shared_layers"], settings["intermediate_size"]
    heads = [settings["num_key_value_heads" if x else "num_global_key_value_heads"] for x in near]
    wide = [inner * (1 if i < len(near) - shared else 2) for i in range(len(near))]
    writer.add_array("gemma4.attention.sliding_window_pattern", near)
    for key, value in {"attention.head_count_kv": heads, "feed_forward_length": wide}.items():
        writer.kv_data[0].pop(f"gemma4.{key}")
        writer.add_array(f"gemma4.{key}", value)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        writer.kv_data[0].pop(f"gemma4.{key}")
        writer.add_uint32(f"gemma4.{key}", settings["global_head_dim"])
        writer.add_uint32(f"gemma4.{key}_swa", settings["head_dim"])
    writer.add_uint32("gemma4.attention.shared_kv_layers", shared)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", settings["hidden_size_per_layer_input"])
    writer.add_float32("gemma4.rope.freq_base_swa", 500.0)
    ropes = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}
    ropes["full_attention"]["rope_theta"] = settings["rope_theta"]
    settings["rope_parameters"] = {
        **ropes,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }


def write(path, kind, stored, vocab=None, more=None, queries=None, without=(), **metadata):
    """Write a model whose maps are `stored`, those of queries as `queries`, `without` some keys.

    `metadata` are other keys, those that begin with a dot of the architecture, by their values, or these and
    their types.
    Returns its tensors and its config as transformers has them.
    """
    settings = config(kind, vocab)
    architecture = ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
        "attention.value_length": "head_dim", "context_length": "max_position_embeddings",
        "rope.dimension_count": "head_dim",
    }  # fmt: skip
    for key, name in keys.items():
        share = settings.get("partial_rotary_factor", 1) if key.startswith("rope") else 1
        writer.add_uint32(f"{architecture}.{key}", int(settings[name] * share))
    if kind == "lfm2":
        writer.kv_data[0].pop("lfm2.attention.head_count_kv")
        heads = [0 if own == "conv" else settings["num_key_value_heads"] for own in settings["layer_types"]]
        writer.add_array("lfm2.attention.head_count_kv", heads)
        writer.add_uint32("lfm2.shortconv.l_cache", 3)
        settings["norm_eps"] = settings["rms_norm_eps"]
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", settings["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", settings["rope_theta"])
    if kind in tiny.EXPERTS:
        writer.add_uint32(f"{architecture}.expert_used_count", settings["num_experts_per_tok"])
        count = settings.get("num_experts") or settings["num_local_experts"]
        writer.add_uint32(f"{architecture}.expert_count", count)
    if kind in hybrid.ARCHITECTURES:
        hybrid.write_keys(writer, kind, settings)
    if kind == "qwen3_moe":
        writer.add_uint32("qwen3moe.expert_feed_forward_length", settings["moe_intermediate_size"])
    if kind.startswith("gemma") or kind in ("gpt_oss", "olmo3"):
        writer.add_uint32(f"{architecture}.attention.sliding_window", settings["sliding_window"])
    if kind == "olmo3":
        slides = [each == "sliding_attention" for each in settings["layer_types"]]
        writer.add_array("olmo2.attention.sliding_window_pattern", slides)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in settings:
            writer.add_float32(f"{architecture}.{key}", settings[key])
    of_granite = {
        "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }  # fmt: skip
    for key, name in of_granite.items():
        if name in settings:
            writer.add_float32(f"{architecture}.{key}", settings[name])
    if kind == "ministral3":
        rope = settings["rope_parameters"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_float32("mistral3.attention.temperature_scale", rope["llama_4_scaling_beta"])
    if kind == "mistral":
        writer.add_uint32("llama.attention.sliding_window", settings["sliding_window"])
    if kind == "gemma4_text":
        write_sizes(writer, settings)
        pairs = settings["global_head_dim"] // 2
        more = {
            "rope_freqs.weight": np.where(np.arange(pairs) < pairs // 2, 1, 1e30).astype(np.float32),
            **(more or {}),
        }
    for key in without:
        del writer.kv_data[0][f"{architecture}.{key}"]
    for key, value in metadata.items():
        key = f"{architecture}{key}" if key.startswith(".") else key
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, *(value if isinstance(value, tuple) else typed(value)))
    tensors: dict = {}
    of_experts: dict = {}  # by name in GGUF: those of all experts of a layer are one tensor
    for i, (name, x) in enumerate(tiny.tensors(kind, settings).items()):
        if x.ndim == 3 and kind == "lfm2":  # of a convolution
            tensors[name] = x
            writer.add_tensor(name_of(name, kind), x[:, 0])
            continue
        if kind in hybrid.ARCHITECTURES and ".experts." not in name:
            blocks = partial(random_blocks, stored, seed=i)
            tensors[name] = hybrid.write(writer, kind, settings, name, x, stored, blocks)
            continue
        if kind == "gpt_oss" and ".experts." in name:
            tensors[name] = write_experts(writer, name, x, stored, i)
            continue
        heads = architecture in ("granite", "llama", "mistral3", "smollm3") and (
            "q_proj" in name or "k_proj" in name
        )
        if x.ndim == 1 or (stored == "F32" and ".experts." not in name):
            tensors[name] = x.astype(np.float32)
            written = interleaved(x.astype(np.float32), 64) if heads else tensors[name]
            if x.ndim == 1 and kind in ("gemma2", "gemma3-causal"):  # files of Gemma have 1 added to norms
                written = written + np.float32(1)
                tensors[name] = written - np.float32(1)  # what is left of it
            writer.add_tensor(name_of(name, kind), written)
            continue
        its_type = queries if queries and "q_proj" in name else stored
        quantized = gguf.GGMLQuantizationType[its_type]
        if its_type in ("F32", "F16", "BF16"):
            data = gguf.quants.quantize(x.astype(np.float32), quantized)
        else:
            data = random_blocks(its_type, *x.shape, seed=i)
        numbers = gguf.quants.dequantize(data, quantized)
        tensors[name] = halves(numbers, 64) if heads else numbers
        if ".experts." in name:
            of_experts.setdefault(name_of(name), []).append(data)
        elif ".gate." in name or ".router." in name:  # it stays in float32
            tensors[name] = x.astype(np.float32)
            writer.add_tensor(name_of(name, kind), tensors[name])
        else:
            writer.add_tensor(name_of(name, kind), data, raw_dtype=quantized)
    for name, parts in of_experts.items():
        writer.add_tensor(name, np.stack(parts), raw_dtype=quantized)
    for name, x in (more or {}).items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors, settings
