"""Packed sequences in models of transformers and sentence-transformers: each as it is alone."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import sentence_transformers
import torch
import transformers
from implementations import COMPILED
from packaging.version import Version
from sentence_transformers.sentence_transformer import modules
from tiny_tokenizers import TEXTS
from transformers import DataCollatorWithFlattening
from transformers_folders import SIZES, made, save_tokenizer

import fastattn.torch as ft
from fastattn.torch import _hugging_face, _packed
from fastattn.torch._hugging_face import attention_forward, packed_forward

pytestmark = pytest.mark.usefixtures("quiet")
SMALL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48,
    "vocab_size": 90, "pad_token_id": 1,
}  # fmt: skip
GROUPED = {"head_dim": 8, "num_key_value_heads": 2}
KINDS = {
    "Bert": {},
    "Roberta": {},
    "ModernBert": {"local_attention": 8},
    "Qwen3": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 7},
    "Gemma2": GROUPED | {"sliding_window": 7, "attn_logit_softcapping": 5.0},
    "GptOss": GROUPED | {"sliding_window": 7, "num_local_experts": 4},
    "Persimmon": {},  # whose attention has no position_ids
    "Qwen3Next": GROUPED | {
        "num_experts": 2, "num_experts_per_tok": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
LENGTHS = 5, 1, 30, 12


def tiny(kind, head="Model", **changes):
    cls = getattr(transformers, f"{kind}{head}")
    torch.manual_seed(0)
    config = cls.config_class(**{**SMALL, **KINDS[kind], **changes})
    model = cls._from_config(config, attn_implementation="eager").eval()
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.2)
    return model


def drawn():
    return [torch.randint(2, 90, (n,)).tolist() for n in LENGTHS]


def packed(sequences, kind="", begins=True):
    start = 2 if kind == "Roberta" else 0
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=begins, position_ids_start=start)
    batch = collate([{"input_ids": ids} for ids in sequences])
    return {name: x for name, x in batch.items() if name != "labels"}


@pytest.fixture(autouse=True)
def attended(monkeypatch):
    """The packed calls of attention, each by whether it has a table of pages; nothing is learned yet."""
    found, op = [], _packed.varlen_op

    def watched(*args, **options):
        found.append(args[7] is not None)
        return op(*args, **options)

    monkeypatch.setattr(_packed, "varlen_op", watched)
    monkeypatch.setattr(_packed, "_tells", {})
    ft.register()
    return found


@pytest.mark.parametrize("name", ["fastattn", "fastattn_flash"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_as_alone(kind, name, attended):
    """Positions, windows, softcaps and sinks are those of each sequence; nothing is padded, nor masked."""
    model, sequences = tiny(kind), drawn()
    layers = 1 if kind == "Qwen3Next" else 2
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids]))[0][0] for ids in sequences])
        model.set_attn_implementation(name)
        for _ in range(2):  # before and after it is learned what attention is told
            out = model(**packed(sequences, kind))[0][0]
            torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)
    assert attended == [False] * 2 * layers


@pytest.mark.parametrize("kind", ["Bert", "Qwen3", "Mistral", "Persimmon"])
def test_positions_alone_tell_sequences(kind, attended):
    model, sequences = tiny(kind), drawn()
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids]))[0][0] for ids in sequences])
        model.set_attn_implementation("fastattn_flash")
        for _ in range(2):
            # With a cache, transformers' own masks do not know of packed sequences.
            out = model(**packed(sequences, kind, begins=False), use_cache=kind == "Qwen3")[0][0]
            torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)
    assert len(attended) == (0 if kind == "Persimmon" else 4)  # else a mask keeps them apart


@pytest.mark.parametrize("positions", [
    [5, 6, 7, 0, 1, 2, 0, 1, 2, 3, 4, 5], [3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    [1, 1, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4], [2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    [0, 1, 2, 3, 7, 8, 9, 0, 1, 2, 3, 4],
], ids=str)  # fmt: skip
def test_sequences_begin_where_those_of_sdpa_do(positions, attended):
    model, ids, positions = tiny("Qwen3"), torch.randint(2, 90, (1, 12)), torch.tensor([positions])
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = model(ids, position_ids=positions, use_cache=False)[0]
        model.set_attn_implementation("fastattn_flash")
        for _ in range(2):  # before and after masks are left out
            out = model(ids, position_ids=positions, use_cache=False)[0]
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert len(attended) == 4


def test_masks_are_left_out_that_attention_is_told():
    """A window of one long sequence neither: memory does not grow with the square of its length."""
    model, masks = tiny("Mistral"), []
    model.set_attn_implementation("fastattn_flash")
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda part, args, given: masks.append(given["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        for _ in range(2):
            model(**packed(drawn(), begins=False), use_cache=False)
        long = torch.randint(2, 90, (1, 40))
        out = model(long)[0]
        assert masks[0] is not None
        assert masks[2:] == [None] * 4
        model.set_attn_implementation("eager")
        torch.testing.assert_close(out, model(long)[0], atol=1e-5, rtol=1e-5)
        model.set_attn_implementation("fastattn_flash")
        model(long, attention_mask=torch.ones(1, 40, dtype=torch.long))
        assert masks[-2:] == [None] * 2
        padding = torch.ones(1, 40, dtype=torch.long)
        padding[0, :9] = 0
        out = model(long, attention_mask=padding)[0][:, 9:]
        assert masks[-1].shape == (1, 1, 40, 40)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(out, model(long, attention_mask=padding)[0][:, 9:], atol=1e-5, rtol=1e-5)


def test_gradients_and_dropout(attended):
    model, sequences = tiny("Qwen3"), drawn()
    for ids in sequences:
        model(torch.tensor([ids]))[0].square().sum().backward()
    expected = [x.grad.clone() for x in model.parameters()]
    model.set_attn_implementation("fastattn_flash")
    model.zero_grad()
    model(**packed(sequences))[0].square().sum().backward()
    for x, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(x.grad, grad, atol=1e-4, rtol=1e-4)
    model = tiny("Qwen3", attention_dropout=0.5).train()
    model.set_attn_implementation("fastattn_flash")
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(**packed(sequences))[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])


def test_compiled():
    model, batch = tiny("Bert"), packed(drawn())
    model.set_attn_implementation("fastattn_flash")
    with torch.no_grad():
        expected = model(**batch)[0]
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**batch)[0], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("what", ["mask", "numbers", "position_bias", "sinks", "indices"])
def test_what_is_not_packed_is_masked_and_said_once(what, attended):
    """Windows are those of the mask that is given; of others, arguments."""
    _packed._say.cache_clear()
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 9, 8)
    begins = torch.tensor([0, 4, 9])
    given = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "sliding_window": 3}
    module, mask, options = SimpleNamespace(is_causal=True), None, {}
    if what in ("mask", "numbers"):
        seen = (torch.rand(1, 1, 9, 9) < 0.7) | torch.eye(9, dtype=torch.bool)
        mask = seen if what == "mask" else torch.zeros(1, 1, 9, 9).masked_fill(~seen, -torch.inf)
    elif what == "indices":
        options = {"indices": torch.stack([torch.randperm(9) for _ in range(9)])[None, :, :6]}
    else:
        options = {what: torch.randn((1, 4, 9, 9) if what == "position_bias" else (1, 4, 9, 1))}
    with pytest.warns(UserWarning, match=r"SimpleNamespace has .*, with which sequences are not packed"):
        out, _ = attention_forward(module, query, key, value, mask, **options, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_forward(module, query, key, value, mask, **options, **given)
    assert not attended
    for begin, end in ((0, 4), (4, 9)):
        rows = slice(begin, end)
        away = torch.arange(end - begin) - torch.arange(end - begin)[:, None]
        own = ((away <= 0) & (away > -3))[None, None] if mask is None else mask[..., rows, rows]
        part = {name: x[:, :, rows] for name, x in options.items()}
        if what == "position_bias":
            part = {what: options[what][..., rows, rows]}
        elif what == "indices":
            lists = options[what][:, rows] - begin
            part = {what: lists.masked_fill((lists < 0) | (lists >= end - begin), -1)}
        expected, _ = attention_forward(
            module, *(x[:, :, rows] for x in (query, key, value)), own, is_causal=False, **part
        )
        torch.testing.assert_close(out[:, rows], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("begins", "said"), [([0, 6, 4, 9], "cu_seqlens_q"), ([0, 4], "expected 0 to 9")])
def test_wrong_sequences_are_refused(begins, said):
    x, begins = torch.randn(1, 4, 9, 8), torch.tensor(begins)
    with pytest.raises(ValueError, match=rf"^varlen_attention\(\): .*{said}"):
        packed_forward(SimpleNamespace(is_causal=True), x, x, x, None, cu_seq_lens_q=begins)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Folders of encoders as sentence-transformers writes them."""

    def write(kind, pooling):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "t5":
            sizes = {"d_model": 48, "d_kv": 8, "num_heads": 6, "d_ff": 80, "num_layers": 2, "vocab_size": 13}
            transformers.T5EncoderModel(transformers.T5Config(**sizes)).save_pretrained(folder)
        else:
            made(folder, kind, transformers.AutoModel)
        save_tokenizer(folder)
        first = modules.Transformer(str(folder), max_seq_length=32)
        model = sentence_transformers.SentenceTransformer(
            modules=[first, modules.Pooling(SIZES["hidden_size"], pooling)], device="cpu"
        )
        model.save_pretrained(str(folder / "model"), create_model_card=False)
        return str(folder / "model")

    return write


@pytest.mark.parametrize(("kind", "pooling"), [
    ("bert", "mean"), ("xlm-roberta", "cls"), ("modernbert", "max"), ("qwen3", "lasttoken"), ("gte", "mean"),
])  # fmt: skip
def test_sentence_transformers_packs(kind, pooling, encoders, attended):
    folder = encoders(kind, pooling)
    options = {"model_kwargs": {"attn_implementation": "fastattn_flash"}, "device": "cpu"}
    model = sentence_transformers.SentenceTransformer(folder, **options)
    assert model[0].can_flatten_inputs
    expected = sentence_transformers.SentenceTransformer(folder, device="cpu").encode(TEXTS)
    assert abs(model.encode(TEXTS) - expected).max() <= 1e-5 * abs(expected).max()
    assert attended
    assert not any(attended)
    if COMPILED:
        with ft.optimize(model, measure=False) as change:
            assert "fastattn_flash, as before" in repr(change)
            assert abs(model.encode(TEXTS) - expected).max() <= 1e-5 * abs(expected).max()
    model[0].unpad_inputs = False
    attended.clear()
    assert abs(model.encode(TEXTS) - expected).max() <= 1e-5 * abs(expected).max()
    assert not attended


def test_sentence_transformers_pads_what_it_cannot_pack(encoders, attended, caplog):
    """T5 has a bias of positions; what is asked for and cannot be is said."""
    folder = encoders("t5", "mean")
    options = {"model_kwargs": {"attn_implementation": "fastattn_flash"}, "device": "cpu"}
    model = sentence_transformers.SentenceTransformer(folder, **options)
    model[0].unpad_inputs = True
    assert "Falling back to padded inputs" in caplog.text
    expected = sentence_transformers.SentenceTransformer(folder, device="cpu").encode(TEXTS)
    assert abs(model.encode(TEXTS) - expected).max() <= 1e-5 * abs(expected).max()
    assert not attended


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral", "Gemma2", "GptOss"])
def test_generate_batch_reads_pages(kind, page, attended):
    """Tokens are those of `generate`, with prompts in parts, of which two begin alike."""
    model = tiny(kind, "ForCausalLM", max_position_embeddings=256, sliding_window=19)
    prompts = [torch.randint(2, 90, (n,)).tolist() for n in (5, 40, 70, 33, 17)]
    prompts.append(prompts[2][:64] + prompts[0])
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=1)
    expected = []
    with torch.no_grad():
        for ids in prompts:
            one = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
            expected.append(model.generate(**one, generation_config=config)[0, len(ids) :].tolist())
    model.set_attn_implementation("fastattn_flash")
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=64, page_size=page, max_batch_tokens=48, use_cuda_graph=False
    )
    found = model.generate_batch(
        copy.deepcopy(prompts), generation_config=config, continuous_batching_config=batching
    )
    assert [x.generated_tokens for x in found.values()] == expected
    copies = Version(transformers.__version__) >= Version("5.24")  # before attention is called
    assert any(attended) != (copies or kind == "Mistral")  # all of whose layers have windows


def test_caches_before_transformers_5_24(attended):
    """They come to attention, which writes new keys and reads all of them in their pages."""
    torch.manual_seed(0)
    pages = torch.randn(2, 9, 4, 2, 8)  # keys and values: 9 pages of 4 tokens
    rows = pages.flatten(1, 2)
    old = [[*range(20, 24), *range(8, 12), 0], range(32, 34)]  # rows of pages 5, 2, 0, and of page 8
    read, write = torch.tensor([*old[0], 1, *old[1], 34]), torch.tensor([1, 34])

    def update(key, value, layer, read, write):
        assert not read.numel()
        rows[0, write], rows[1, write] = key, value

    allocator = SimpleNamespace(
        index=0, layer_type="full", supports_block_table=True, update=update,
        get_cache_for_block_table=lambda layer: pages,
    )  # fmt: skip
    module = SimpleNamespace(is_causal=True, layer_idx=3)
    query, key, value = torch.randn(1, 4, 2, 8), *torch.randn(2, 1, 2, 2, 8)
    out, _ = attention_forward(
        module, query, key, value, None, cache=SimpleNamespace(layer_to_allocator={3: allocator}),
        cu_seq_lens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        cu_seq_lens_k={"full": torch.tensor([0, 10, 13], dtype=torch.int32)},
        read_index=[read], write_index=[write],
    )  # fmt: skip
    assert attended == [True]
    for i, own in enumerate((read[:10], read[10:])):
        k, v = (x[own].transpose(0, 1)[None] for x in rows)
        assert torch.equal(k[:, :, -1], key[:, :, i])
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, i : i + 1], k, v, enable_gqa=True
        )
        torch.testing.assert_close(out[:, i : i + 1], expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_pages_that_are_masked(attended):
    """With a position bias, say, keys are copied from their pages, and a mask keeps sequences apart."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 2, 8), *torch.randn(2, 1, 2, 12, 8)
    begins, lengths = torch.tensor([0, 1, 2]), torch.tensor([0, 5, 12])
    cache = SimpleNamespace(update=lambda k, v, layer, given: (key, value))
    module = SimpleNamespace(is_causal=True, layer_idx=0)
    bias = torch.randn(1, 4, 2, 12)
    out, _ = attention_forward(
        module, query, key[:, :, :2], value[:, :, :2], None, position_bias=bias, cache=cache,
        cu_seq_lens_q=begins, cu_seq_lens_k=lengths,
    )  # fmt: skip
    for i, rows in enumerate((slice(0, 5), slice(5, 12))):
        expected, _ = attention_forward(
            module, query[:, :, i : i + 1], key[:, :, rows], value[:, :, rows], None,
            position_bias=bias[:, :, i : i + 1, rows],
        )  # fmt: skip
        torch.testing.assert_close(out[:, i : i + 1], expected, atol=1e-5, rtol=1e-5)
    assert not attended


def test_masks_without_lengths_and_undo():
    assert _packed._window_in({"batch_size": 1}) is None
    _packed._tells[int] = True
    ft.register().undo()
    assert not _packed._tells
    assert "_lazy_imports" in repr(ft.register())


def test_names_of_flash_attention(own_functions):
    """Models that take certain names alone take ours, too, while it is registered."""
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    names = transformers.GptOssForCausalLM._compatible_flash_implementations
    with ft.register():
        assert "fastattn_flash" in transformers.GptOssForCausalLM._compatible_flash_implementations
        ft.register().undo()
    assert transformers.GptOssForCausalLM._compatible_flash_implementations == names
    (_, varlen, *_), _ = lazy_import_flash_attention("fastattn_flash")
    q, begins = torch.randn(9, 4, 8), torch.tensor([0, 4, 9])
    expected, _ = _hugging_face.attention_forward(
        SimpleNamespace(is_causal=True), *[q.transpose(0, 1)[None]] * 3, None, cu_seq_lens_q=begins
    )
    assert torch.equal(varlen(q, q, q, begins, begins, causal=True), expected[0])
