"""Folders of tiny models that several files of tests load."""

import pytest
import tiny_models as tiny
from tiny_models import CONFIGS
from tiny_tokenizers import write_byte_tokenizer, write_tokenizer


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
