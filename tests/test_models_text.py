"""From texts to vectors and on: tokenizers, pooling, and the two commands, each in a process of its own."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tiny_models as tiny
from conftest import COMPILED, child_environment
from tiny_models import CONFIGS
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

from fastattn import models
from fastattn.models import ModelError
from fastattn.models.pooling import Pooling

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "tree"]
TEXTS = ["the cat sat on the mat", "a dog ran", "", "a tree sat on the cat on the mat on a dog", "the cat"]


def write_tokenizer(folder):
    """Words between spaces, <s> before and </s> after a text."""
    words = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_padding(length=20)  # as some files have it; not wanted here
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_byte_tokenizer(folder, merges=()):
    """One token a byte, 256 of them, and one for each merge of two, "a b": as GPT-2's."""
    pairs = [tuple(merge.split()) for merge in merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(tokenizer_models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_pooling(folder, config, normalize=False, prefix="sentence_transformers.models"):
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{prefix}.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{prefix}.Pooling"})
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{prefix}.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.fixture
def encoder(tmp_path):
    """The folder of a tiny BERT that knows WORDS."""
    tiny.write(tmp_path, "bert")
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """The folder of a tiny GPT-2 over bytes, which writes them at random."""
    folder = tmp_path_factory.mktemp("gpt2")
    changes = {"vocab_size": 256, "n_positions": 64}
    config = {**CONFIGS["gpt2"], **changes}
    tiny.write(folder, "gpt2", tiny.tensors("gpt2", config), **changes)
    write_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_vectors_are_pooled_hidden_states(mode, encoder, implementation):
    model = models.load(encoder)
    got = model.embed(TEXTS, pooling=mode, batch_size=2)
    assert got.shape == (5, 24)
    assert got.dtype == np.float32
    for text, vector in zip(TEXTS, got, strict=True):
        ids = [1, *(WORDS.index(word) for word in text.split()), 2]
        hidden = model(ids)[0]
        expected = {"mean": hidden.mean(axis=0), "cls": hidden[0], "max": hidden.max(axis=0)}[mode]
        np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-5)


def test_pooling_of_left_padded_and_empty_texts(implementation):
    hidden = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    hidden[~mask] = np.nan
    got = Pooling("mean")(hidden, mask)
    np.testing.assert_allclose(got[0], hidden[0, 2:].mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], hidden[1].mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[2], 0)
    np.testing.assert_array_equal(Pooling("cls")(hidden, mask)[:2], [hidden[0, 2], hidden[1, 0]])
    np.testing.assert_array_equal(Pooling("max")(hidden, mask)[0], hidden[0, 2:].max(axis=0))
    assert np.isfinite(Pooling("mean", normalize=True)(hidden, mask)).all()


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True, "include_prompt": True}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": False}, "max"),
        ({"pooling_mode": "cls", "embedding_dimension": 24}, "cls"),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_folder_says_how_to_pool(config, mode, normalize, encoder):
    write_pooling(encoder, config, normalize)
    model = models.load(encoder)
    assert model.pooling == Pooling(mode, normalize)
    got = model.embed(TEXTS)
    np.testing.assert_array_equal(got, model.embed(TEXTS, pooling=mode, normalize=normalize))
    assert np.allclose(np.linalg.norm(got, axis=1), 1) == normalize


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"pooling_mode_lasttoken": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode": ["mean"]},
    ],
)
def test_a_pooling_that_is_not_known(config, encoder):
    write_pooling(encoder, config)
    with pytest.raises(ModelError, match=r"1_Pooling/config.json says .*; expected one of"):
        models.load(encoder)


@pytest.mark.parametrize("path", ["..", ".", "../..", "/etc", "a/b", "1_Pooling/../..", None])
def test_a_pooling_outside_of_the_folder(path, encoder):
    modules = [{"type": "sentence_transformers.models.Pooling", "path": path}]
    (encoder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"modules.json: .* of Pooling is .*; expected a folder beside it"):
        models.load(encoder)


def test_texts_as_the_folder_says(encoder):
    """Prompt, strip, lower: as sentence-transformers does it."""
    plain = models.load(encoder).embed(TEXTS)
    np.testing.assert_array_equal(models.load(encoder).embed([f" \n{text}\t" for text in TEXTS]), plain)
    upper = [text.upper() for text in TEXTS]
    assert (models.load(encoder).embed(upper) != plain).any()
    (encoder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    np.testing.assert_array_equal(models.load(encoder).embed(upper), plain)
    path = encoder / "config_sentence_transformers.json"
    path.write_text('{"prompts": {"query": "The dog "}, "default_prompt_name": null}')
    np.testing.assert_array_equal(models.load(encoder).embed(upper), plain)
    path.write_text('{"prompts": {"query": "The dog "}, "default_prompt_name": "query"}')
    prompted = models.load(encoder).embed(upper)
    path.unlink()
    model = models.load(encoder)
    np.testing.assert_array_equal(prompted, model.embed([f"the dog {text}" for text in TEXTS]))
    path.write_text('{"default_prompt_name": "query"}')
    with pytest.raises(ModelError, match=r"'default_prompt_name' is 'query'; expected one of 'prompts'"):
        models.load(encoder)
    path.write_text('{"prompts": {"query": "the "}, "default_prompt_name": "query"}')
    write_pooling(encoder, {"pooling_mode": "mean", "include_prompt": False})
    with pytest.raises(ModelError, match=r"'include_prompt' is False; only True is supported where there is"):
        models.load(encoder)


def test_a_module_that_is_not_known(encoder):
    path = encoder / "modules.json"
    path.write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]))
    with pytest.raises(ModelError, match=r"modules.json has a module 'Dense'; expected Transformer, Pooling"):
        models.load(encoder)
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"modules.json holds a dict; expected a list"):
        models.load(encoder)
    path.write_text('[{"type": "a.Pooling", "path": "elsewhere"}]')
    with pytest.raises(ModelError, match=r"elsewhere/config.json is missing"):
        models.load(encoder)


def test_long_texts_are_cut(encoder):
    model = models.load(encoder)
    long = "the cat " * 50
    assert [len(ids) for ids in model.text.encode([long, "the cat"])] == [32, 4]  # special tokens included
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    model = models.load(encoder)
    assert [len(ids) for ids in model.text.encode([long, "the cat"])] == [9, 4]
    assert np.isfinite(model.embed([long])).all()
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": "9"}')
    with pytest.raises(ModelError, match=r"'max_seq_length' is '9'; expected an integer of at least 1"):
        models.load(encoder).embed(["the"])


def test_embed_refuses(encoder):
    model = models.load(encoder)
    for function in (model.embed, model.text.encode):
        with pytest.raises(TypeError, match=r"texts is of type str; expected several, as"):
            function("one text")
        with pytest.raises(TypeError, match=r"texts is of type NoneType; expected several"):
            function(None)
        with pytest.raises(TypeError, match=r"texts has one of type int; expected strings"):
            function(["one", 2])
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        model.embed(["one"], batch_size=0)
    with pytest.raises(ValueError, match="pooling is 'last'; expected one of mean, cls, max"):
        model.embed(["one"], pooling="last")
    assert model.embed([]).shape == (0, 24)
    assert model.embed(text for text in TEXTS).shape == (5, 24)


def test_progress_is_told(encoder):
    done = []
    models.load(encoder).embed(TEXTS, batch_size=2, progress=done.append)
    assert done == [2, 2, 1]


def test_tokenizers_that_are_none(encoder):
    model = models.load(encoder)
    (encoder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer.json is no tokenizer"):
        model.embed(["one"])
    (encoder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        model.embed(["one"])


@pytest.mark.parametrize("text", ["plain", "Grüße an 日本 und 😀!", " two  spaces ", "\n\n"])
def test_text_is_streamed_in_whole_characters(text, writer):
    """One token a byte: nothing comes before the last byte of a character, and then it comes at once."""
    model = models.load(writer)
    prompt, ids = model.text.encode(["Once ", text])
    assert len(ids) == len(text.encode())
    taken = 0

    def counted():
        nonlocal taken
        for token in ids:
            taken += 1
            yield token

    seen = ""
    for piece in model.text.stream(prompt, counted()):
        seen += piece
        assert len(seen.encode()) == taken
    assert seen == text


def test_bytes_that_are_no_text_do_not_hold_back_what_follows(writer):
    model = models.load(writer)
    ids = model.text.encode(["é"])[0][:1] * 9 + model.text.encode(["end"])[0]
    pieces = list(model.text.stream([], ids))
    assert "".join(pieces).endswith("end")
    assert len(pieces) >= 5


def test_streams_of_any_bytes_are_their_text(tmp_path):
    """Valid characters, cut ones and stray bytes in any order, in tokens of one byte and of several."""
    tiny.write(tmp_path, "gpt2")
    tokenizer = write_byte_tokenizer(tmp_path, ["Ã ©", "ð Ł", "ĺ Ģ", "a ð", "© ð"])
    rng = np.random.default_rng(0)
    alphabet = tokenizer.get_vocab()
    pieces = [tokenizer.encode(text).ids for text in ("é", "😀", "日", "a", "éa", "é😀")]
    stray = [[i] for byte, i in alphabet.items() if len(byte) > 1 or tokenizer.decode([i]) == "\ufffd"]
    text = models.load(tmp_path).text
    for _ in range(1000):
        chosen = [pieces[i] if i < len(pieces) else stray[rng.integers(len(stray))] for i in
                  rng.integers(0, len(pieces) + 3, rng.integers(1, 12))]  # fmt: skip
        ids = [token for piece in chosen for token in piece][: int(rng.integers(1, 30))]
        assert "".join(text.stream([], ids)) == tokenizer.decode(ids)


def test_ids_become_texts(writer):
    model = models.load(writer)
    texts = ["Once, a café", "", "日本"]
    ids = model.text.encode(texts)
    assert model.text.decode(ids) == texts
    assert model.text.decode([]) == []
    prompts = model.text.encode(["Once", "a"])
    free = np.stack(list(model.generate(prompts, 8, stop=())), axis=1)
    batch = np.stack(list(model.generate(prompts, 8, stop=free[0, 2])), axis=1)
    assert (batch == -1).any()
    rows = [row[row >= 0].tolist() for row in batch]
    assert model.text.decode(batch) == [model.text.tokenizer.decode(row) for row in rows]
    pieces, wanted = (list(model.text.stream(prompts[0], ids)) for ids in (batch[0], rows[0]))
    assert pieces == wanted
    with pytest.raises(TypeError, match=r"decode\(\): sequences is no list of sequences of ids"):
        model.text.decode(ids[0])
    with pytest.raises(ValueError, match=r"decode\(\): sequences is -2; expected -1 to 4294967295"):
        model.text.decode([[1, -2]])
    with pytest.raises(TypeError, match=r"stream\(\): ids has an array of shape \(2,\); expected ids of one"):
        list(model.text.stream(prompts[0], model.generate(prompts, 8)))


def test_a_words_space_is_kept_between_prompt_and_text(encoder):
    """Decoders drop a space at the beginning; what follows on a prompt is no beginning."""
    text = models.load(encoder).text
    prompt, ids = text.encode(["the cat", "sat on"])
    assert "".join(text.stream(prompt[:-1], ids[1:-1])) == " sat on"


def test_a_missing_library_is_named(encoder, monkeypatch):
    model = models.load(encoder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"models need tokenizers: pip install 'fastattn\[models\]'"):
        model.embed(["one"])


def environment():
    """Of a child that does not warn of the fallback where nothing was compiled."""
    return child_environment() if COMPILED else child_environment(FASTATTN_BACKEND="numpy")


def run(*arguments, stdin="", status=0):
    """`python -m fastattn` with `arguments`; its standard output."""
    command = [sys.executable, "-W", "error", "-m", "fastattn", *map(str, arguments)]
    done = subprocess.run(
        command, input=stdin.encode(), capture_output=True, env=environment(), timeout=120, check=False
    )
    assert done.returncode == status, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done.stdout.decode() if status == 0 else done.stderr.decode()


def test_the_command_embed(encoder, tmp_path):
    expected = models.load(encoder).embed(TEXTS)
    lines = tmp_path / "lines.txt"
    lines.write_bytes("\n".join(TEXTS).encode() + b"\n")
    printed = run("embed", "--model", encoder, lines)
    vectors = [json.loads(line) for line in printed.splitlines()]
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
    assert run("embed", "--model", encoder, stdin="\r\n".join(TEXTS) + "\n") == printed
    assert run("embed", "--model", encoder, lines, "--output", tmp_path / "out.jsonl") == ""
    assert (tmp_path / "out.jsonl").read_text() == printed
    assert run("embed", "--model", encoder, lines, "--output", tmp_path / "out.npy") == ""
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    options = ["--pooling", "cls", "--normalize", "--batch-size", 2, "--weights-dtype", "bfloat16"]
    run("embed", "--model", encoder, lines, "--output", tmp_path / "out.npy", *options)
    model = models.load(encoder, weights_dtype="bfloat16")
    wanted = model.embed(TEXTS, pooling="cls", normalize=True, batch_size=2)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), wanted)
    run("embed", "--model", encoder, lines, "--output", tmp_path / "out.npy", "--dtype", "float64")
    assert np.load(tmp_path / "out.npy").dtype == np.float64
    assert run("embed", "--model", encoder, stdin="") == ""


def test_the_command_embed_refuses(encoder, writer, tmp_path):
    assert "expected a model of the BERT family" in run("embed", "--model", writer, status=1)
    assert run("embed", "--model", tmp_path / "nowhere", status=1).startswith("error: ")
    wrong = run("embed", "--model", encoder, "the cat sat", status=1)
    assert "FILE 'the cat sat' cannot be read, No such file or directory; expected a file of lines" in wrong
    wrong = run("embed", "--model", encoder, "--normalise", "lines.txt", status=2)
    assert wrong.startswith("usage: python -m fastattn embed ")
    assert wrong.endswith("error: not known: --normalise\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "latin.txt is not UTF-8" in run("embed", "--model", encoder, tmp_path / "latin.txt", status=1)
    assert "ends in .npy or .jsonl" in run("embed", "--model", encoder, "--output", "out.txt", status=2)
    assert "its folder does not exist" in run(
        "embed", "--model", encoder, "--output", tmp_path / "no" / "out.npy", status=2
    )


def test_the_command_generate(writer):
    model = models.load(writer)
    prompt = model.text.encode(["Once, a café"])[0]
    assert len(prompt) == 13  # bytes
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 3}
    tokens = list(model.generate(prompt, 40, **options))
    expected = "".join(model.text.stream(prompt, tokens))
    printed = run("generate", "--model", writer, "Once, a café", "--max-new-tokens", 40, "--temperature", 0.9,
                  "--top-k", 50, "--top-p", 0.95, "--seed", 3)  # fmt: skip
    assert printed == expected + "\n"
    assert len(printed) > 10
    greedy = run("generate", "--model", writer, "Once", "--max-new-tokens", 5)
    assert greedy == run("generate", "--model", writer, "Once", "--max-new-tokens", 5)
    assert run("generate", "--model", writer, "Once", "--max-new-tokens", 0) == "\n"


def test_the_command_generate_refuses(encoder, writer, tmp_path):
    assert "expected a decoder" in run("generate", "--model", encoder, "the", status=1)
    assert "PROMPT has no token" in run("generate", "--model", writer, "", status=1)
    wrong = run("generate", "--model", writer, "--tempreature", 0.8, "Once", status=2)
    assert wrong.startswith("usage: python -m fastattn generate ")
    assert wrong.endswith("error: not known: --tempreature\n")
    wrong = run("generate", "--model", writer, "Once", "--max-new-tokens", 5, "--top-k", 3, status=1)
    assert "top_k is 3 and temperature 0" in wrong
    help_text = run("generate", "--help")
    assert "needs --temperature" in help_text
    too_long = run("generate", "--model", writer, "Once", "--max-new-tokens", 61, status=1)
    assert "max_new_tokens is 61 behind a prompt of 4 tokens; expected at most 64 together" in too_long
    wrong = ["--max-new-tokens", 5, "--temperature", -1]
    assert "temperature is -1.0" in run("generate", "--model", writer, "Once", *wrong, status=1)
    assert run("generate", "--model", tmp_path / "nowhere", "Once", status=1).startswith("error: ")


def test_the_command_line_alone_lists_its_commands():
    listed = run(status=2)
    assert all(f"    {name} " in listed for name in ("info", "selftest", "bench", "embed", "generate"))


def test_the_command_line_survives_a_closed_pipe(writer):
    command = f"{sys.executable} -m fastattn generate --model {writer} Once --max-new-tokens 60 | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, env=environment(), timeout=120, check=True
    )
    assert done.stderr == b""
