"""The examples in README.md and docs/: each runs alone, as it stands there; those of the tutorial in turn."""

import json
import os
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_models as tiny
import tiny_towers
from implementations import COMPILED
from model_folders import write_reranker
from PIL import Image
from tiny_tokenizers import write_byte_tokenizer, write_tokenizer

from fastattn import functional, layers, masks, ops, positions

ROOT = Path(__file__).parents[1]


def examples():
    """Every Python block of every page, by the page and the line it begins at, with its line numbers."""
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if page.name == "tutorial.md":
            continue
        block = None
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip() == "```python":
                block = f"{page.relative_to(ROOT).as_posix()}:{number}"
                found[block] = "\n" * number
            elif line.startswith("```"):
                block = None
            elif block:
                found[block] += line + "\n"
    return found


EXAMPLES = examples()
# Pages about other packages. They are among those of [parity]; where the gate has these, nothing is skipped.
OF_OTHERS = {"docs/howto/frameworks.md": ("jax", "torch"), "docs/torch.md": ("torch",)}


def run(name):
    """Run an example and return the names that it defines. A traceback shows the page's lines."""
    names = {"__name__": name}
    exec(compile(EXAMPLES[name], ROOT / name.split(":")[0], "exec"), names)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Examples run in this folder. The examples of docs/models.md find tiny models in it."""
    for name in ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tiny.write(tmp_path / name, "bert")
        write_tokenizer(tmp_path / name)
    write_reranker(tmp_path / "ms-marco-MiniLM-L6-v2")
    tokens = tmp_path / "GTE-ModernColBERT-v1"
    tiny.write(tokens, "bert")
    write_tokenizer(tokens)
    (tokens / "1_Mask").mkdir()
    (tokens / "1_Mask/config.json").write_text("{}")
    parts = {"Transformer": "", "MultiVectorMask": "1_Mask"}.items()
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in parts]
    (tokens / "modules.json").write_text(json.dumps(modules))
    config = {**tiny.CONFIGS["qwen3"], "vocab_size": 256}
    tiny.write(tmp_path / "Qwen3-0.6B", "qwen3", tiny.tensors("qwen3", config), vocab_size=256)
    write_byte_tokenizer(tmp_path / "Qwen3-0.6B")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (tmp_path / "Qwen3-0.6B" / "chat_template.jinja").write_text(template)
    tiny_towers.write(tmp_path / "clip-vit-base-patch32", "clip")
    write_tokenizer(tmp_path / "clip-vit-base-patch32")
    for name in ("cat.jpg", "dog.jpg"):
        Image.new("RGB", (30, 40)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_alone(name):
    packages = OF_OTHERS.get(name.partition(":")[0], ())
    missing = [package for package in packages if find_spec(package) is None]
    if missing and not os.environ.get("FASTATTN_REQUIRE_PARITY"):
        pytest.skip(f"not installed: {', '.join(missing)}, of [parity]")
    if re.search(r"torch\.(optimize|patch_sdpa)\(", EXAMPLES[name]) and not COMPILED:
        with pytest.raises(RuntimeError, match="this process runs on NumPy"):
            run(name)
    else:
        run(name)


@pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")
def test_the_tutorial_says_what_its_blocks_print(capsys):
    """The blocks run one after the other; the text after one is all that it prints."""
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    names, pairs = (
        {"__name__": "tutorial"},
        re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page, re.DOTALL),
    )
    assert len(pairs) == page.count("```python") > 8
    assert sum(1 for _, text in pairs if text) == page.count("```text")
    for code, text in pairs:
        exec(code, names)
        assert capsys.readouterr().out == text, code


def test_the_page_of_variants_names_what_there_is():
    """Its index has all functions of `fastattn.functional` but those of gradients."""
    page = (ROOT / "docs/variants.md").read_text(encoding="utf-8")
    modules = {"F": functional, "M": masks, "layers": layers, "positions": positions, "ops": ops}
    for module, name in re.findall(r"\b(F|M|layers|positions|ops)\.(?!md\b)(\w+)", page):
        assert hasattr(modules[module], name), name
    index = page.split("\n## Find a variant by its name\n")[1].split("\n## ")[0]
    functions = {name for name in functional.__all__ if not name.endswith("_backward")}
    assert functions - set(re.findall(r"`F\.(\w+)", index)) == set()


def test_the_picture_of_masks_has_the_masks_of_its_tool():
    """The tool computes each mask from its title, and writes the titles into the file."""
    pytest.importorskip("matplotlib")
    tool = runpy.run_path(str(ROOT / "tools/variant_pictures.py"))
    assert Image.open(ROOT / "docs/masks.png").text["Description"].splitlines() == tool["MASKS"]
    named = set(re.findall(r"\w+", " ".join(tool["MASKS"])))
    assert set(masks.__all__) - named == {"Mask", "compile", "dense"}
    for title in tool["MASKS"]:
        assert isinstance(eval(title, vars(masks) | tool["ARGUMENTS"]), masks.Mask)
