"""Names that arguments have in other libraries: an error names the right one.

They are of torch, flash-attn, xFormers, JAX, Keras, Hugging Face and sentence-transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from importlib import import_module
from typing import Any

# Other names of each argument. Where a word is of several arguments, all that a function takes are named.
OTHER_NAMES = {
    name: words.split()
    for name, words in {
        "causal": "is_causal use_causal_mask is_decoder",
        "is_causal": "causal use_causal_mask is_decoder",
        "tgt_is_causal": "causal is_causal",
        "mask": "attn_mask attention_mask masking src_mask key_padding_mask padding_mask mask_mod block_mask",
        "kv_lengths": "key_padding_mask padding_mask attention_mask cache_seqlens seqused_k seq_lens lengths"
        " key_value_seq_lengths",
        "key_padding_mask": "attention_mask padding_mask src_key_padding_mask kv_lengths",
        "src_key_padding_mask": "attention_mask padding_mask key_padding_mask kv_lengths",
        "tgt_key_padding_mask": "attention_mask padding_mask key_padding_mask kv_lengths",
        "memory_key_padding_mask": "attention_mask padding_mask key_padding_mask kv_lengths",
        "attn_mask": "mask bias attn_bias position_bias src_mask tgt_mask mask_mod block_mask"
        " key_padding_mask attention_mask padding_mask",
        "src_mask": "mask attn_mask bias attn_bias mask_mod block_mask",
        "tgt_mask": "mask attn_mask src_mask bias attn_bias mask_mod block_mask",
        "memory_mask": "attn_mask",
        "bias": "attn_bias attn_mask position_bias b",
        "window": "window_size sliding_window local_window_size attention_window",
        "scale": "softmax_scale sm_scale scaling",
        "softcap": "logit_cap soft_cap logits_soft_cap attn_logit_softcapping",
        "alibi_slopes": "alibi slopes",
        "sinks": "sink s_aux learnable_sink attention_sinks",
        "q_offset": "query_offset q_start",
        "dropout": "dropout_p dropout_rate p_drop attn_dropout attention_dropout p",
        "dropout_p": "dropout dropout_rate p_drop p",
        "return_lse": "return_softmax_lse return_aux",
        "need_weights": "output_attentions return_attention_scores return_attn_probs return_weights",
        "num_heads": "nhead n_heads heads heads_q num_attention_heads",
        "num_kv_heads": "heads_kv n_kv_heads num_key_value_heads",
        "head_dim": "d_k dim_head",
        "embed_dim": "d_model hidden_size",
        "d_model": "embed_dim hidden_size",
        "dim_feedforward": "intermediate_size d_ff",
        "num_layers": "depth n_layers num_hidden_layers",
        "num_buckets": "n_buckets",
        "top_k": "k_keys topk",
        "layers": "encoder_layer decoder_layer num_layers",
        "features": "normalized_shape",
        "activation": "act hidden_act",
        "activations": "activation_dtype",
        "weight": "w",
        "layer_norm_eps": "eps epsilon",
        "eps": "epsilon",
        "out": "output",
        "rng": "random_state generator seed",
        "seed": "rng random_state generator",
        "begins": "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seq_lens_q seq_idx offsets",
        "state": "initial_state initial_states",
        "return_state": "output_final_state return_final_states return_last_state",
        "dt_bias": "delta_bias",
        "dt_softplus": "delta_softplus",
        "log_decay": "g",
        "logits_processor": "logits_processors logits_warper",
        "state_dict": "state_dicts params",
        "num_threads": "threads n_jobs num_workers",
        "backend": "implementation attn_implementation",
        "dtype": "torch_dtype",
        "weights_dtype": "weight_dtype load_in_8bit load_in_4bit quantization quantization_config",
        "normalize_embeddings": "normalize",
        "truncate_dim": "dim dimensions",
        "show_progress_bar": "progress show_progress",
        "activation_fn": "activation_fct default_activation_function",
        "ids": "input_ids",
        "max_new_tokens": "max_length max_tokens",
        "stop": "eos_token_id",
        "temperature": "do_sample",
    }.items()
}
_WORDS: dict[str, list[str]] = {}
for _name, _others in OTHER_NAMES.items():
    for _word in _others:
        _WORDS.setdefault(_word, []).append(_name)

# What an argument's name does not say to those who know it by another one.
MEANINGS = {
    "kv_lengths": "how many keys of each sequence count",
    "window": "a pair (left, right), None for no bound",
    "bias": "added to the scores",
    "layers": "a sequence of layers, each its own: [{kind}(...) for _ in range(6)]",
    "dropout": "with a seed",
    "dropout_p": "with a seed",
    "weights_dtype": '"int8", "q8", "int4" or "uint4"',
    "temperature": "above 0",
}
_COMPILED = "masks.compile makes one of a function"
_AT_CALLS = {"is_causal", "attn_mask", "key_padding_mask"}  # of layers
_AT_HEADS = {
    "num_kv_heads", "head_dim", "rope", "qk_norm", "sinks", "window", "softcap", "scale", "alibi_slopes",
}  # fmt: skip
_OF_TEXTS = "pool", "chunk_size"
# What there is in the place of arguments that have no counterpart.
_INSTEAD = {
    "enable_gqa": "k and v may have fewer heads than q",
    "use_qk_l2norm_in_kernel": "feature_maps.unit makes queries and keys of length 1",
    "score_mod": "functional.flex_attention takes it",
    **dict.fromkeys(
        ("return_attn_probs", "need_weights", "output_attentions", "return_attention_scores"),
        "fastattn.attention_weights, and need_weights=True of MultiHeadAttention, return the weights",
    ),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "lengths follow from the others"),
    **dict.fromkeys(("block_table", "page_table"), "attention takes a block_table of pages"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "varlen_attention takes it"),
    "deterministic": "the bits are always the same",
    **dict.fromkeys(("enable_nested_tensor", "mask_check"), "rows of padding are left out without it"),
    "batch_first": "the first axis is always the batch",
    **dict.fromkeys(("device", "device_map"), "it computes on CPUs"),
    "convert_to_numpy": "results are NumPy arrays",
    "convert_to_tensor": "results are NumPy arrays; torch.from_numpy makes tensors of them",
    "output_value": "a call of the model, as model(**model.tokenize(texts)), has the vectors of tokens",
    **dict.fromkeys(_OF_TEXTS, "fastattn.dask.embed shares work between processes"),
    **dict.fromkeys(("max_seq_length", "max_length"), "model.max_seq_length = ... sets it"),
    "trust_remote_code": "no code of a folder is run",
    **dict.fromkeys(
        ("cache_folder", "cache_dir", "token", "local_files_only"),
        "HF_HOME, HF_TOKEN and HF_HUB_OFFLINE say it",
    ),
}

# Functions of other libraries, and those in their places.
_FUNCTIONS = {
    **dict.fromkeys(
        ("flash_attn_func", "flash_attn_with_kvcache", "flash_attention", "flash_attn", "sdpa"), ".attention"
    ),
    **dict.fromkeys(("memory_efficient_attention", "dot_product_attention"), ".attention"),
    "flash_attn_varlen_func": ".varlen_attention",
    **{"layer": ".layers", "mask": ".masks"},  # not their base classes
}


def nearest_name(module: str, name: str) -> str:
    """The end of a message to one who asks a public `module` for `name`: the public name most like it."""
    own = module.removeprefix("fastattn")
    modules = ("train", "models", "grad", "positions", "masks", "ops", "layers", "functional")
    asked = [*(f".{m}" for m in modules), "", own]  # of names that are alike, the last one is taken
    public = [f"{m}.{each}" for m in asked for each in import_module(f"fastattn{m}").__all__]
    public.sort(key=lambda each: each.endswith(f".{name}"))
    plain = {each.rpartition(".")[2].replace("_", "").casefold(): each for each in public}
    word = name.replace("_", "").casefold()
    near = {key: each for key, each in plain.items() if each.rpartition(".")[0] == own}
    like = get_close_matches(word, plain, 1, 0.8) or get_close_matches(word, near, 1, 0.7)
    if like:  # not by "attention" alone, which most functions end with
        ours, theirs = (x.removesuffix("attention") or x for x in (word, like[0]))
        like = like if SequenceMatcher(None, ours, theirs).ratio() > 0.5 else []
    found = _FUNCTIONS.get(name) or (plain[like[0]] if like else "")
    return found and f"; expected fastattn{found}"


def not_an_argument(given: Mapping[str, Any], taken: Any, *named: str) -> TypeError:
    """The error for the first of `given` that is no annotated argument of `taken`, a function or a class.

    Beside these, the message lists the arguments `named`.
    """
    names = [name for name in (*taken.__annotations__, *named) if name not in ("return", "more", "others")]
    word = next(name for name in given if name not in names)
    kind = str(taken.__annotations__.get("layers")).partition("[")[2].rstrip("]")  # Sequence[kind]
    instead = _instead(word, names, named).replace("{kind}", kind)
    if not instead:
        expected = get_close_matches(word, names, 1) or [f"one of {', '.join(names)}"]
        instead = f"; expected {expected[0]}"
    return TypeError(f"(): {word} is not an argument{instead}")


def by_position(args: Sequence[Any], taken: Callable[..., Any], options: type | None = None) -> TypeError:
    """The error for more `args` by position than the function `taken` has: it says what the next one may be.

    The class `options` has those of its ``**options``.
    """
    parameters = inspect.signature(taken).parameters
    named = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    others += [] if options is None else options.__annotations__
    x = args[len(named)]
    likely = ["mask"]
    required = [name for name in others if name in parameters and parameters[name].default is inspect._empty]
    if required:
        likely = required
    elif isinstance(x, (bool, float)):
        likely = ["causal"] if isinstance(x, bool) else ["dropout", "scale"]
    elif isinstance(x, int):  # flash-attn's longest lengths
        likely = []
    elif getattr(getattr(x, "dtype", None), "kind", "b") != "b":
        likely = ["bias"]
    likely = [name for name in likely if name in others] or others[:1]
    came = f"{len(args)} arguments are given by position"
    expected = f"{', '.join(named)}, and others by name, as {' or '.join(f'{name}=' for name in likely)}"
    return TypeError(f"(): {came}; expected {expected}")


def _instead(word: str, names: list[str], own: Collection[str]) -> str:
    """Return what stands in the place of `word` in a function with the arguments `names`.

    The meaning of its `own` names may be another than the usual one.
    """
    makes = {"rng", "weights_dtype"} <= set(names)  # a layer
    hides = any(name.endswith("key_padding_mask") for name in names)  # a call of one
    same = _WORDS.get(word, [])
    if makes and _AT_CALLS & {word, *same}:
        return ": calls take is_causal and masks"
    if "attention" in names and (found := _AT_HEADS & {word, *same}):
        return f": attention={{{min(found)!r}: ...}} takes it"
    expected = []
    for name in same:
        meaning = None if name in own else MEANINGS.get(name)
        if name.endswith("mask"):
            floats = "" if name == "mask" and not hides else ", floats are added"
            meaning = f"True {'hides' if hides else 'attends'}{floats}"
            if word in ("mask_mod", "block_mask") and not floats:
                meaning = _COMPILED
        if name in names:
            expected.append(f"{name} ({meaning})" if meaning else name)
    expected = [each for each in expected if "key_padding_mask" in each] or expected
    if expected:
        return f"; expected {' or '.join(expected)}"
    if (makes or hides) and {"dropout", "dropout_p"} & {word, *same}:
        return ": grad.vjp takes dropout=, where gradients are made"
    if word in _OF_TEXTS and "batch_size" not in names:
        return ""
    return f": {_INSTEAD[word]}" if word in _INSTEAD else ""
