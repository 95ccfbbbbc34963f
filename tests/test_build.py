"""Builds compile what changed, and keep objects up to date. The compiler of these tests only reads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Families of kernels that `generic` has.
FAMILIES = {path.stem for path in (ROOT / "src/families").glob("*.c")} - {"integers"}
KERNELS = {f"generic_{lane}/{family}" for lane in ("f32", "f64") for family in FAMILIES}
LAYER, COMMON = {"layer/_core"}, {"common/cpu", "common/dispatch", "common/lists"}
COMPILER = """#!/bin/sh
case " $* " in
*" --version "*) exec cc --version ;;
*" -c "*) echo "$@" >>"$CALLS"; exec cc -E "$@" ;;
esac
while [ "$1" != -o ]; do shift; done
: >"$2"
"""


def build(tree, compiler, **environment):
    """Names of the objects that a build for `generic` in this tree compiles."""
    calls = tree / "calls"
    calls.write_text("")
    given = {name: value for name, value in os.environ.items() if not name.startswith("FASTATTN_")}
    given |= {"CALLS": str(calls), "FASTATTN_ISAS": "generic", "FASTATTN_REQUIRE_EXT": "1"}
    given |= {"CC": compiler, **environment}
    command = [sys.executable, "setup.py", "build_ext"]
    done = subprocess.run(command, cwd=tree, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = re.findall(r"-o build/objects/(\w+)[^/ ]*/\S*?(\w+)\.o ", calls.read_text())
    assert len(made) == len(set(made))
    return {f"{folder}/{name}" for folder, name in made}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiler") / "cc"
    path.write_text(COMPILER)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory, compiler):
    """A tree with the kernels and a small Cython layer, after its first build."""
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    if sys.platform == "win32" or not shutil.which("cc") or not (ROOT / "setup.py").exists():
        pytest.skip("needs a compiler that is called cc, and the sources")
    tree = tmp_path_factory.mktemp("built") / "tree"
    core = tree / "fastattn/_engine/core"
    core.mkdir(parents=True)
    core.joinpath("_core.pyx").write_text('include "counts.pxi"\n')
    core.joinpath("counts.pxi").write_text("count = fa_isa_count()\n")
    shutil.copytree(ROOT / "src", tree / "src")
    shutil.copy(ROOT / "setup.py", tree)
    shutil.copy(ROOT / "fastattn/_engine/cpus.py", tree / "fastattn/_engine")
    assert build(tree, compiler) == KERNELS | COMMON | LAYER
    return tree


@pytest.fixture
def tree(built, tmp_path):
    """A copy of that tree, with its objects."""
    return shutil.copytree(built, tmp_path / "tree")


def add(path, text):
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def test_nothing_is_compiled_where_nothing_has_changed(tree, compiler):
    os.utime(tree / "src/rope.inc.h")
    assert build(tree, compiler) == set()


@pytest.mark.parametrize(
    ("changed", "families"),
    [
        ("backward_tile.inc.h", {"backward", "rowwise"}),
        ("simd.h", FAMILIES),
    ],
)
def test_a_changed_file_compiles_the_families_that_include_it(tree, compiler, changed, families):
    add(tree / "src" / changed, "/* changed */\n")
    assert build(tree, compiler) == {name for name in KERNELS if name.split("/")[1] in families}
    assert build(tree, compiler) == set()


def test_a_change_in_cython_compiles_its_module_alone(tree, compiler):
    add(tree / "fastattn/_engine/core/counts.pxi", "twice = 2 * count\n")
    assert build(tree, compiler) == LAYER


def test_a_change_of_the_interface_compiles_its_family_and_who_calls_it(tree, compiler):
    add(tree / "src/interface/outer.h", "/* changed */\n")
    callers = LAYER | {"common/cpu", "common/dispatch"}
    assert build(tree, compiler) == callers | {"generic_f32/outer", "generic_f64/outer"}
    add(tree / "src/interface/arrays.h", "/* changed */\n")
    assert build(tree, compiler) == KERNELS | COMMON | LAYER


def test_other_flags_compile_everything(tree, compiler):
    assert build(tree, compiler, FASTATTN_EMULATE_BF16_DOT="1") == KERNELS | COMMON
    assert build(tree, f"{compiler} -DMORE", CFLAGS="-DOTHER") == KERNELS | COMMON | LAYER


def test_names_of_no_instruction_set_are_refused(tree, compiler):
    with pytest.raises(AssertionError, match=r"FASTATTN_ISAS has avx9; expected native, all or .*generic"):
        build(tree, compiler, FASTATTN_ISAS="generic,avx9")


def test_what_failed_to_compile_is_compiled_again(tree, compiler):
    path = tree / "src/rope.inc.h"
    was = path.read_text(encoding="utf-8")
    add(path, "#error not yet\n")
    with pytest.raises(AssertionError, match="not yet"):
        build(tree, compiler)
    path.write_text(was, encoding="utf-8")
    assert build(tree, compiler) == {"generic_f32/rows", "generic_f64/rows"}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("double scale, softcap;", "float softcap; double scale;", "nothing fills softcap, float"),
        ("lanes (batch, heads_q), with", "lanes (heads_q), with", "expected ['batch']"),
        ("(batch, heads_q, len_q, n_top)", "(batch, heads_q, len_q, n_top, 2)", "three axes at most"),
        (": nonzero attends", ", contigous", "what follows the axes is not known"),
    ],
)
def test_a_field_that_nothing_fills_ends_the_build(tmp_path, before, after, said):
    """What a struct and an argument object both have is filled by what the struct's comment says of it."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs the sources")
    for folder in ("src", "fastattn/_args", "fastattn/_engine/core"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    header = tmp_path / "src/interface/attention.h"
    text = header.read_text(encoding="utf-8")
    assert before in text
    header.write_text(text.replace(before, after, 1), encoding="utf-8")
    command = [sys.executable, tmp_path / "src/declarations.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert said in done.stderr
