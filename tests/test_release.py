"""A tag makes a release: what its notes are, and what refuses it."""

import importlib.util
import re
from pathlib import Path

import pytest

import fastattn

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def notes():
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / "tools/release_notes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.notes


CHANGELOG = "# Changelog\n\n## 0.2.0 (2027-01-31)\n\n- New.\n\n## 0.1.0 (not released yet)\n\n- Old.\n"


def test_notes_are_one_section(notes):
    assert notes("v0.2.0", "0.2.0", CHANGELOG) == "- New.\n"


@pytest.mark.parametrize(
    ("tag", "version", "error"),
    [
        ("v0.2.1", "0.2.0", "expected 'v0.2.0'"),
        ("0.2.0", "0.2.0", "expected 'v0.2.0'"),
        ("v0.1.0", "0.1.0", "YYYY-MM-DD"),
        ("v0.3.0", "0.3.0", "no section '0.3.0'"),
    ],
)
def test_a_release_that_is_not_ready(notes, tag, version, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        notes(tag, version, CHANGELOG)


def test_the_changelog_has_this_version(notes):
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.sub(r"\(not released yet\)", "(2027-01-31)", changelog, count=1)
    version = fastattn.__version__
    assert notes(f"v{version}", version, dated)
