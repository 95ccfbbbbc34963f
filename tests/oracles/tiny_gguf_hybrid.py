"""Tensors and keys of tiny hybrid models in GGUF files, as llama.cpp's converter makes them of folders."""

import gguf
import numpy as np

ARCHITECTURES = {"qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT}
SIZES = {
    "qwen3_next": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 64, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    },
}  # fmt: skip


def write_keys(writer, kind, c):
    """Write the sizes of mixers, and which layers have them."""
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(c["linear_key_head_dim"])
    writer.add_ssm_group_count(c["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
    writer.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    writer.add_full_attention_interval(2)
    if kind != "qwen3_5_text":
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])


def write(writer, kind, c, name, x, stored, blocks):
    """Write a tensor, in blocks if `blocks` makes those of its shape; return what a folder has of it."""
    x = x.astype(np.float32)
    parts = rows(kind, name, c, len(x))
    if x.ndim != 2 or stored == "F32" or name.endswith("gate.weight"):
        for new, which in parts.items():
            writer.add_tensor(new, np.ascontiguousarray(plain(kind, name, x)[which]))
        return x
    data = blocks(*x.shape)
    raw = gguf.GGMLQuantizationType[stored]
    for new, which in parts.items():
        writer.add_tensor(new, data[which], raw_dtype=raw)
    return gguf.quants.dequantize(data, raw)


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
    return {name_of(kind, name, c): slice(None)}


def name_of(kind, name, c):
    """A tensor's name in a file."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], c["num_hidden_layers"])
    return names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
