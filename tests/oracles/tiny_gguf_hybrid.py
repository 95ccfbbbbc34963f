"""Tensors and keys of tiny hybrid models in GGUF files, as llama.cpp's converter makes them of folders."""

import gguf
import numpy as np

ARCHITECTURES = {
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
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
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_state": 16, "shared_intermediate_size": 256, "time_step_limit": None,
        "position_embedding_type": "nope",
    },
}  # fmt: skip


def write_keys(writer, kind, c):
    """Write the sizes of mixers, and which layers have them."""
    if kind == "granitemoehybrid":
        write_keys_of_granite(writer, c)
        return
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


def write_keys_of_granite(writer, c):
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(c["mamba_d_state"])
    writer.add_ssm_group_count(c["mamba_n_groups"])
    writer.add_ssm_inner_size(2 * c["hidden_size"])
    writer.add_ssm_time_step_rank(c["mamba_n_heads"])
    attends = [own == "attention" for own in c["layer_types"]]
    writer.kv_data[0].pop("granitehybrid.attention.head_count_kv")
    writer.add_head_count_kv([c["num_key_value_heads"] * x for x in attends])
    writer.add_rope_scaling_finetuned(c["position_embedding_type"] == "rope")
    writer.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    writer.add_expert_count(c["num_local_experts"])
    writer.add_expert_used_count(c.get("num_experts_per_tok", 0))


def write(writer, kind, c, name, x, stored, blocks):
    """Write a tensor, in blocks if `blocks` makes those of its shape; return what a folder has of it."""
    x = x.astype(np.float32)
    parts = rows(kind, name, c, len(x))
    turned = name.endswith("out_proj.weight") and kind.startswith("qwen3_5")
    if "_moe." in name and x.ndim == 3:
        return write_experts(writer, name, x, stored, blocks)
    if x.ndim != 2 or stored == "F32" or name.endswith(("gate.weight", "router.layer.weight")):
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


def write_experts(writer, name, x, stored, blocks):
    """Write the tensors of all experts of a layer of Granite, gate and up apart."""
    raw, block = gguf.GGMLQuantizationType[stored], f"blk.{name.split('.')[2]}"
    data = x if stored == "F32" else blocks(x.shape[0] * x.shape[1], x.shape[2]).reshape(*x.shape[:2], -1)
    parts = ("gate", "up") if "input_linear" in name else ("down",)
    for part, each in zip(parts, np.split(data, len(parts), axis=1), strict=True):
        writer.add_tensor(f"{block}.ffn_{part}_exps.weight", np.ascontiguousarray(each), raw_dtype=raw)
    return gguf.quants.dequantize(data, raw)


def tiled(x, c):
    """Rows of value heads, the first of each key head, then the second of each, and so on."""
    heads, groups = c["linear_num_value_heads"], c["linear_num_key_heads"]
    return x.reshape(groups, heads // groups, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def plain(kind, name, x):
    """Numbers of a tensor that is in float32."""
    if name.endswith("A_log"):
        return -np.exp(x) if kind != "granitemoehybrid" else -np.exp(x)[:, None]
    if name.endswith(".D"):
        return x[:, None]
    if name.endswith("mamba.norm.weight"):
        return x.reshape(2, -1)
    if "conv1d.weight" in name:
        return x[:, 0]
    if kind == "granitemoehybrid":
        return x
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
    which, halves = np.arange(count), {"gate": slice(None, count // 2), "up": slice(count // 2, None)}
    if name.endswith("shared_mlp.input_linear.weight"):
        end = "_shexp" if c["num_local_experts"] else ""
        return {f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight": x for part, x in halves.items()}
    if kind == "granitemoehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):
        which = which.reshape(-1, 2, c["head_dim"] // 2).swapaxes(1, 2).reshape(-1)
    if name.endswith("mamba.norm.weight"):
        which = slice(None)
    if kind.startswith("qwen3_5") and name.endswith(("qkv.weight", "conv1d.weight")):
        keys = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
        which = np.concatenate([which[:keys], tiled(which[keys:], c)])
    elif kind.startswith("qwen3_5") and name.endswith(
        ("_z.weight", "_a.weight", "_b.weight", "A_log", "dt_bias")
    ):
        which = tiled(which, c)
    return {name_of(kind, name, c): which}


def name_of(kind, name, c):
    """A tensor's name in a file."""
    if name.endswith("shared_mlp.output_linear.weight") and not c["num_local_experts"]:
        return f"blk.{name.split('.')[2]}.ffn_down.weight"
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], c["num_hidden_layers"])
    return names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
