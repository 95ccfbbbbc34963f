"""Pairs of texts whose likeness is known by where they stand, not by their words.

A pair has the grade 3 if it is two halves of one paragraph, 2 if it is paragraphs of one page, 1 of one
section, and 0 of different sections. Pages are modules of Python's standard library, and manual pages where
the machine has them; sections are packages, and programs of several pages, as git's.
"""

from __future__ import annotations

import ast
import gzip
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Pages = dict[str, dict[str, list[str]]]  # paragraphs of a page, pages of a section
WORDS = 16, 120  # of a paragraph
MAN = Path("/usr/share/man/man1")
MOST = 12  # manual pages of a section that are read
_MACRO = re.compile(r"^[.'](\\\"|\w*)")
_ESCAPE = re.compile(r"\\(f\(..|f\[\w*\]|f.|s[-+]?\d|\*\(..|\*\[\w*\]|[&|^:%/,)])")
_OTHER = re.compile(r"\\(\(..|\[\w+\]|.)")


def modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Package, module and syntax tree of every module of the standard library, but for tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted((*folder.glob("*.py"), *folder.glob("[a-z]*/*.py"))):
        if path.parent.name in ("test", "tests", "idlelib", "lib2to3", "site-packages"):
            continue
        package = path.stem if path.parent == folder else path.parent.name
        yield package, path.stem, ast.parse(path.read_bytes())


def docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            yield ast.get_docstring(node) or ""


def library() -> Pages:
    """Paragraphs of docstrings: a module is a page, a package a section."""
    found: Pages = defaultdict(dict)
    for package, name, tree in modules():
        found[package][name] = kept(part for text in docstrings(tree) for part in text.split("\n\n"))
    return found


def manuals() -> Pages:
    """Paragraphs of manual pages; pages whose names begin with the same word are a section."""
    found: Pages = defaultdict(dict)
    for path in sorted(path for path in MAN.glob("*-*.1.gz") if not path.is_symlink()):
        section = found[re.split("[-_]", path.name)[0]]
        if len(section) < MOST:
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                section[path.name] = kept(paragraphs(file.read()))
    return found


def paragraphs(roff: str) -> Iterator[str]:
    """The paragraphs of a page, without what its lines ask of the formatter."""
    lines: list[str] = []
    for line in (*roff.splitlines(), ".PP"):
        macro = _MACRO.match(line)
        if macro is None or macro[1] in ("B", "I", "BR", "IR", "RB", "RI", "BI", "IB"):
            text = _ESCAPE.sub("", line[macro.end() :] if macro else line)
            lines.append(_OTHER.sub(lambda other: "-" if other[1] == "-" else " ", text).replace('"', ""))
        elif macro[1] not in ("br", "sp", "nf", "fi", '\\"'):
            yield " ".join(lines)
            lines = []


def kept(texts: Iterator[str]) -> list[str]:
    """Texts of some length, in one line each, each once."""
    joined = dict.fromkeys(" ".join(text.split()) for text in texts)
    return [text for text in joined if WORDS[0] <= len(text.split()) <= WORDS[1]]


def pairs(pages: Pages, count: int) -> tuple[list[tuple[str, str]], np.ndarray]:
    """So many pairs of each grade, drawn with a fixed seed, and their grades."""
    rng, found = np.random.default_rng(0), []
    times = Counter(text for each in pages.values() for texts in each.values() for text in texts)
    once = {
        name: {page: [text for text in texts if times[text] == 1] for page, texts in each.items()}
        for name, each in pages.items()
    }  # what many pages say is of none
    pages = {name: {page: texts for page, texts in each.items() if texts} for name, each in once.items()}
    several = [name for name, each in pages.items() if len(each) > 1]
    longer = [texts for each in pages.values() for texts in each.values() if len(texts) > 1]

    def one(texts: list[str]) -> str:
        return texts[rng.integers(len(texts))]

    def of_page(section: str, other: str | None = None) -> tuple[str, str]:
        page = one([name for name in pages[section] if name != other])
        return page, one(pages[section][page])

    for _ in range(count):
        words = one(longer[rng.integers(len(longer))]).split()
        half = len(words) // 2
        found.append((" ".join(words[:half]), " ".join(words[half:])))
        first, second = rng.permutation(longer[rng.integers(len(longer))])[:2].tolist()
        found.append((first, second))
        section = one(several)
        page, text = of_page(section)
        found.append((text, of_page(section, page)[1]))
        one_, another = rng.permutation([name for name, each in pages.items() if each])[:2].tolist()
        found.append((of_page(one_)[1], of_page(another)[1]))
    return found, np.tile([3, 2, 1, 0], count)
