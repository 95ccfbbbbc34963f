"""Tensors and keys of tiny hybrid models in GGUF files, as llama.cpp's converter makes them of folders."""

import gguf
import numpy as np

ARCHITECTURES = {
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
_DELTAS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 48,
    "linear_value_head_dim": 32,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
SIZES = {
    "qwen3_next": {**_DELTAS, **_EXPERTS},
    "qwen3_5_text": _DELTAS,
    "qwen3_5_moe_text": {**_DELTAS, **_EXPERTS},
}


def write_keys(writer, kind, c):
    """Write the sizes of mixers, and which layers have them."""
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(c["linear_key_head_dim"])
    writer.add_ssm_group_count(c["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
    writer.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    writer.add_full_attention_interval(2)
    if kind != "qwen3_next":
        writer.add_rope_dimension_sections([6, 5, 5, 0])
    if kind != "qwen3_5_text":
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])


def write(writer, kind, c, name, x, stored, blocks):
    """Write a tensor, in blocks if `blocks` makes those of its shape; return what a folder has of it."""
    x = x.astype(np.float32)
    parts = rows(kind, name, c, len(x))
    turned = name.endswith("out_proj.weight") and kind != "qwen3_next"
    if x.ndim != 2 or stored == "F32" or name.endswith("gate.weight"):
        for new, which in parts.items():
            numbers = plain(kind, name, x)
            numbers = tiled(numbers.T, c).T if turned else numbers[which]
            writer.add_tensor(new, np.ascontiguousarray(numbers))
        return x
    data = blocks(*x.shape)
    raw = gguf.GGMLQuantizationType[stored]
    for new, which in parts.items():
        writer.add_tensor(new, data[which], raw_dtype=raw)
    numbers = gguf.quants.dequantize(data, raw)
    if not turned:
        return numbers
    heads, groups = c["linear_num_value_heads"], c["linear_num_key_heads"]
    by_tile = numbers.reshape(len(numbers), heads // groups, groups, -1)
    return np.ascontiguousarray(by_tile.swapaxes(1, 2).reshape(numbers.shape))


def tiled(x, c):
    """Rows of value heads, the first of each key head, then the second of each, and so on."""
    heads, groups = c["linear_num_value_heads"], c["linear_num_key_heads"]
    return x.reshape(groups, heads // groups, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def plain(kind, name, x):
    """Numbers of a tensor that is in float32."""
    if name.endswith("A_log"):
        return -np.exp(x)
    if "conv1d.weight" in name:
        return x[:, 0]
    return x + 1 if name.endswith("norm.weight") and "linear_attn" not in name else x


def rows(kind, name, c, count):
    """The tensors of a file that are made of a folder's, and their rows in it."""
    if name.endswith("in_proj_qkvz.weight"):
        groups, each = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
        key, value = c["linear_key_head_dim"], each * c["linear_value_head_dim"]
        by_group = np.split(np.arange(count).reshape(groups, -1), [key, 2 * key, 2 * key + value], axis=1)
        *qkv, z = (part.reshape(-1) for part in by_group)
        block = f"blk.{name.split('.')[2]}"
        return {f"{block}.attn_qkv.weight": np.concatenate(qkv), f"{block}.attn_gate.weight": z}
    which = np.arange(count)
    if kind != "qwen3_next" and name.endswith(("qkv.weight", "conv1d.weight")):
        keys = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
        which = np.concatenate([which[:keys], tiled(which[keys:], c)])
    elif kind != "qwen3_next" and name.endswith(("_z.weight", "_a.weight", "_b.weight", "A_log", "dt_bias")):
        which = tiled(which, c)
    return {name_of(kind, name, c): which}


def name_of(kind, name, c):
    """A tensor's name in a file."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], c["num_hidden_layers"])
    return names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
