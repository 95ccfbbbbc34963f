"""The inner loop of int8 by int8, as gcc compiled it, keeps sums and addresses in registers."""

import platform
import re
import shutil
import subprocess
from collections import defaultdict

import pytest

import fastattn

LINE = re.compile(r"\s+([0-9a-f]+):\s+(.*)")
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)")
STACK = re.compile(r"%[yz]mm.*\(%r[sb]p|\(%r[sb]p.*%[yz]mm|vmovq")  # or from a vector register to an address
DOTS = ("vpdpbusd", "vpmaddubsw")
OTHERS = ("prefetch", "vpshufb", "vpand")  # of loops that ask for weights or unpack 4 bits


def functions(path, name):
    """The instructions of each function whose name matches, as (address, text)."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    ).stdout
    for found in re.findall(rf"^[0-9a-f]+ <{name}>:\n((?:.+\n)*)", text, re.M):
        yield [(int(line[1], 16), line[2]) for line in map(LINE.fullmatch, found.splitlines()) if line]


def inner_loops(instructions):
    """Loops, from a jump's target to the jump, that hold no other."""
    places = {address: i for i, (address, _) in enumerate(instructions)}
    jumps = ((JUMP.match(text), i) for i, (_, text) in enumerate(instructions))
    targets = [(places.get(int(jump[1], 16)), i) for jump, i in jumps if jump]
    loops = [(begin, end) for begin, end in targets if begin is not None and begin <= end]
    for begin, end in loops:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops):
            yield [text for _, text in instructions[begin : end + 1]]


def dots(loop):
    return sum(text.startswith(DOTS) for text in loop)


@pytest.mark.skipif(not fastattn.show_config()["isas_available"], reason="no kernels")
def test_sums_and_addresses_of_bytes_stay_in_registers():
    compiler = fastattn.show_config()["compiler"]
    if platform.machine() not in ("x86_64", "AMD64") or not compiler.startswith("gcc"):
        pytest.skip("reads what gcc makes for x86-64")
    if not shutil.which("objdump"):
        pytest.skip("needs objdump")
    from fastattn._engine.core import _core

    tables = list(functions(_core.__file__, r"bytes_pass_\d+"))
    if not tables and next(functions(_core.__file__, "PyInit__core"), None) is None:
        pytest.skip("the symbols were stripped")
    loops = [loop for each in tables for loop in inner_loops(each) if dots(loop)]
    plain = [loop for loop in loops if not any(text.startswith(OTHERS) for text in loop)]
    compiled = fastattn.show_config()["isas_compiled"]
    assert bool(plain) == bool(set(compiled) - {"generic"})
    most = defaultdict(int)  # by instruction and width of vectors
    for loop in plain:
        assert not [text for text in loop if STACK.search(text)], loop
        (dot, *_) = (text for text in loop if text.startswith(DOTS))
        kind = dot.split()[0], dot[-4:-1]
        most[kind] = max(most[kind], dots(loop))
    assert all(n >= 8 for n in most.values()), most
