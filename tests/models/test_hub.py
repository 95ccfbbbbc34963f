"""Models by their names: what is fetched from a server that plays the Hub, and what errors say."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import tiny_gguf
import tiny_models as tiny
import tiny_towers
from implementations import COMPILED, child_environment
from model_folders import change_config, write_parts
from small_hub import small_hub
from tiny_models import CONFIGS
from tiny_routes import write_router
from tiny_tokenizers import TEXTS, write_tokenizer

from fastattn import models
from fastattn.models import ModelError
from fastattn.models._hub import place_of

pytest.importorskip("huggingface_hub")
UNREAD = [
    *("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "onnx/config.json", "README.md", "vocab.txt"),
    *("openvino/model.safetensors", "consolidated.safetensors", "1_Pooling/pytorch_model.bin"),
]


@pytest.fixture
def hub(encoder, tmp_path_factory):
    """A Hub that has a BERT with modules and files of other formats, a Llama in parts, and GGUF files."""
    tiny.write_modules(encoder, "mean")
    change_config(encoder, architectures=["BertModel"])
    for name in UNREAD:
        (encoder / name).parent.mkdir(exist_ok=True)
        (encoder / name).write_bytes(b"never read")
    parts, blocks, old = (tmp_path_factory.mktemp(name) for name in ("parts", "blocks", "old"))
    write_parts(parts, "llama")
    for name, kind in (("a.gguf", "F32"), ("b.gguf", "F16")):
        tiny_gguf.write(blocks / name, "llama", kind)
    tiny.write(old, "bert")
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    folders = {"tiny/bert": encoder, "tiny/parts": parts, "tiny/blocks": blocks, "tiny/old": old}
    with small_hub(folders) as hub:
        yield hub


@pytest.fixture
def run(hub, tmp_path_factory):
    """Run Python's `arguments` with an empty cache, or with that of the calls before; its output or error."""
    home = tmp_path_factory.mktemp("home")
    more = {} if COMPILED else {"FASTATTN_BACKEND": "numpy"}
    more |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def run(*arguments, stdin="", status=0, **variables):
        environment = child_environment(**more) | variables
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


def test_only_what_is_read_is_fetched_and_once(run, hub):
    """By the command line, with the environment's token; later offline."""
    embed = ("-m", "fastattn", "embed", "--model", "tiny/bert")
    vectors = run(*embed, stdin="\n".join(TEXTS), HF_TOKEN="hf_secret")
    expected = models.load(hub.folders["tiny/bert"]).encode(TEXTS)
    got = np.array([json.loads(line) for line in vectors.splitlines()], np.float32)
    np.testing.assert_array_equal(got, expected)
    assert sorted(hub.fetched) == sorted(set(hub.files("tiny/bert")) - set(UNREAD))
    assert "Bearer hf_secret" in hub.tokens
    hub.fetched.clear()
    assert run(*embed, "--revision", "v1", stdin="\n".join(TEXTS)) == vectors
    assert run(*embed, stdin="\n".join(TEXTS), HF_HUB_OFFLINE="1") == vectors
    assert hub.fetched == []


def test_weights_in_parts_and_gguf_files(run, hub):
    """A model in parts is fetched whole; of a repository with GGUF files, the one that is named."""
    run("-c", "from fastattn import models; models.load('tiny/parts')")
    assert set(hub.fetched) == set(hub.files("tiny/parts"))
    hub.fetched.clear()
    run("-c", "from fastattn import models; models.load('tiny/blocks', gguf_file='b.gguf')")
    assert hub.fetched == ["b.gguf"]
    chat = ("-m", "fastattn", "chat", "tiny/blocks", "--gguf-file", "a.gguf")
    run(*chat, stdin="/quit\n")
    assert hub.fetched == ["b.gguf", "a.gguf"]


def towers(folder):
    """The folder that modules.json names has the config and the weights; the outer one has neither."""
    tiny_towers.write(folder / "0_CLIPModel", "clip")
    module = {"path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    (folder / "modules.json").write_text(json.dumps([module]))


def test_adapters_in_separate_files_are_refused(tmp_path):
    tiny.write(tmp_path, "jina_embeddings_v3")
    (tmp_path / "separation").mkdir()
    (tmp_path / "separation/adapter_config.json").write_text("{}")
    message = r"separation.adapter_config.json: an adapter in a separate file"
    with pytest.raises(models.ModelError, match=message):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("write", "call"),
    [(towers, ""), (write_router, ".encode_document('a')")],
)
def test_parts_lie_in_folders(write, call, run, hub, tmp_path_factory):
    folder = hub.folders["tiny/parts"] = tmp_path_factory.mktemp("parts")
    write(folder)
    run("-c", f"from fastattn import models; models.load('tiny/parts'){call}")
    fetched, there = (
        {name for name in names if not (write is write_router and name.endswith("tokenizer.json"))}
        for names in (hub.fetched, hub.files("tiny/parts"))
    )  # one route's is the other's, and there already
    assert fetched == there


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny/blocks"], "tiny/blocks has no config.json; there is a.gguf, b.gguf; gguf_file= takes a GGUF"),
        (["tiny/blocks", "--gguf-file", "c.gguf"], "tiny/blocks has no c.gguf; there is a.gguf, b.gguf; g"),
        (["tiny/old"], "tiny/old has no model.safetensors; there is pytorch_model.bin"),
        (["tiny/none"], "tiny/none is no folder here, and cannot .*: .* Repository Not Found for url: "),
        (["tiny/bert", "--revision", "v2"], "tiny/bert is no .* fetched: .* Revision Not Found for url: "),
        (["tiny/bert", "--gguf-file", "x.bin"], "gguf_file is 'x.bin'; expected a name that ends with .gguf"),
    ],
)  # fmt: skip
def test_what_is_not_there(arguments, expected, run, hub):
    said = run("-m", "fastattn", "embed", "--model", *arguments, status=1)
    assert re.search(expected, said)
    assert "Traceback" not in said
    assert not [name for name in hub.fetched if not name.endswith((".json", ".jinja"))]


def test_a_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub

    library = pytest.importorskip("httpx2")

    def refused(*arguments, **options):
        raise library.ConnectError("Connection refused")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refused)
    message = r"^a/b is no folder here, and cannot be fetched: Connection refused$"
    with pytest.raises(ModelError, match=message):
        place_of("a/b", gguf_file="x.gguf")


def test_offline_without_the_files(run, hub):
    embed = ("-m", "fastattn", "embed", "--model")
    said = run(*embed, "tiny/bert", status=1, HF_HUB_OFFLINE="1")
    assert "tiny/bert is no folder here, and cannot be fetched: " in said
    said = run(*embed, "tiny/blocks", "--gguf-file", "a.gguf", status=1, HF_HUB_OFFLINE="1")
    assert "tiny/blocks has no a.gguf, as far as it was fetched: " in said
    assert hub.fetched == []


def test_without_the_package_the_error_says_what_to_install(run):
    code = "import sys; sys.modules['huggingface_hub'] = None; import fastattn; fastattn.models.load('a/b')"
    said = run("-c", code, status=1)
    assert "a/b is no folder here; as a name of the Hub, models need huggingface_hub: pip" in said


def test_paths_are_paths(tmp_path, monkeypatch):
    """A folder that exists has the name of no model of the Hub; nothing else than organisation/name has."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny/bert").mkdir(parents=True)
    tiny.write(tmp_path / "tiny/bert", "bert")
    write_tokenizer(tmp_path / "tiny/bert")
    assert models.load("tiny/bert").encode(TEXTS).shape == (len(TEXTS), CONFIGS["bert"]["hidden_size"])
    for path in ("nowhere", "./tiny/none", "tiny/none/x", "../none", tmp_path / "x", "~/none"):
        with pytest.raises(ModelError, match=r"is no folder; expected one with config.json"):
            models.load(path)
    for name, given, error, message in (
        ("tiny/x.gguf", {}, ModelError, "x.gguf does not exist"),
        ("tiny/bert", {"gguf_file": "x.gguf"}, ModelError, "x.gguf does not exist"),
        ("tiny/bert", {"revision": "main"}, ValueError, r"^load\(\): revision is given for the pa"),
        ("tiny/none", {"gguf_file": 3}, TypeError, r"^load\(\): gguf_file is of type int; expected a string"),
    ):
        with pytest.raises(error, match=message):
            models.load(name, **given)
    with pytest.raises(ImportError, match="tiny/none is no folder here"):
        place_of("tiny/none")
