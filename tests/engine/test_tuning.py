"""Files with sizes for a machine are read or refused; `python -m fastattn tune` measures and writes them."""

import json
import os

import pytest
from implementations import COMPILED, forced

from fastattn._engine import settings, tuning

SIZES = settings.core.SIZES if COMPILED else {}
needs_kernels = pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")

# A process of its own, since a file is read once.
PRINT = """
import warnings, numpy, fastattn
from fastattn._engine import settings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fastattn.attention(*numpy.ones((3, 1, 4, 8), "f"))
    fastattn.set_num_threads(fastattn.get_num_threads())
    fastattn.attention(*numpy.ones((3, 1, 4, 8), "f"))
print(*settings.core.get_sizes().values(), sep=" ", end="|")
print(fastattn.show_config()["tuning"], *(f"{w.filename} {w.message}" for w in caught), sep="|")
"""
USUAL = " ".join(str(default) for _, default, *_ in SIZES.values())


@pytest.fixture
def file(tmp_path):
    """A file of this machine that changes the first size."""
    path = tmp_path / "sizes" / "tuning.json"
    with forced(COMPILED[0], num_threads=2):
        tuning.write(path, {"attention_tasks": 12})
    return path


def changed(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def ask(python, code=PRINT, **environment):
    """(sizes, what show_config says, warnings) of a process."""
    environment = {
        "FASTATTN_ISA": COMPILED[0],
        "FASTATTN_NUM_THREADS": 2,
        "FASTATTN_BACKEND": None,
    } | environment
    run = python(code, **environment)
    assert run.returncode == 0, run.stderr
    sizes, said, *warned = run.stdout.strip().split("|")
    return sizes, said, warned


CHANGED = USUAL.replace("24", "12", 1)


@needs_kernels
def test_a_file_is_read(file, python):
    said = f"FASTATTN_TUNING={file}: attention_tasks 12 (not 24)"
    assert ask(python, FASTATTN_TUNING=file) == (CHANGED, said, [])
    file.write_text(file.read_text().replace(": 12", ": 24"))
    assert ask(python, FASTATTN_TUNING=file)[:2] == (USUAL, f"FASTATTN_TUNING={file}: all are the defaults")


TAKE_TURNS = """
import os, numpy, fastattn
from fastattn._engine import settings, tuning

def tasks():
    fastattn.attention(*numpy.ones((3, 1, 4, 8), "f"))
    return settings.core.get_sizes()["attention_tasks"]

def in_a_child():
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(tasks()).encode())
        os._exit(0)
    os.wait()
    return os.read(read, 1000).decode()

print(in_a_child(), end="|")
with settings.forced(num_threads=1):
    print(tasks(), end="|")
    with tuning.forced(attention_tasks=5), settings.forced(num_threads=2):
        print(tasks(), end="|")
    print(tasks(), end="|")
print(tasks(), end="|")
fastattn.set_num_threads(3)
print(tasks(), end="|")
fastattn.set_num_threads(2)
print(tasks(), in_a_child(), tasks(), sep="|")
"""


@needs_kernels
@pytest.mark.skipif(os.name != "posix", reason="forks")
def test_a_file_holds_while_the_process_has_its_number_of_threads(file, python):
    """The number at the first call does not count; and sizes that are forced stay."""
    environment = {"FASTATTN_ISA": COMPILED[0], "FASTATTN_NUM_THREADS": 2, "FASTATTN_BACKEND": None}
    run = python(TAKE_TURNS, FASTATTN_TUNING=file, **environment)
    assert run.stdout.strip() == "12|24|5|24|12|24|12|12|12", run.stderr


@needs_kernels
def test_the_usual_place(file, tmp_path, python):
    """It is read from a user's folder of configurations; a file that is not there is no news."""
    for names in ({"XDG_CONFIG_HOME": tmp_path, "HOME": "/nowhere"},
                  {"XDG_CONFIG_HOME": None, "HOME": tmp_path},
                  {"XDG_CONFIG_HOME": "relative", "HOME": tmp_path}):  # fmt: skip
        config = tmp_path / ("" if names["XDG_CONFIG_HOME"] == tmp_path else ".config")
        place = config / "fastattn" / "tuning.json"
        assert ask(python, FASTATTN_TUNING=None, **names) == (USUAL, "defaults", [])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file.read_text())
        sizes, said, warned = ask(python, FASTATTN_TUNING=None, **names)
        assert (sizes, said.partition(":")[0], warned) == (CHANGED, str(place), [])
        sizes, said, _ = ask(python, FASTATTN_TUNING="off", **names)
        assert (sizes, said) == (USUAL, "defaults: FASTATTN_TUNING is off")
        place.unlink()


@needs_kernels
@pytest.mark.parametrize(
    ("name", "value"), [("format", 2), ("isa", "another"), ("level2_cache", 1), ("num_threads", 3)]
)
def test_a_file_of_another_machine_is_ignored(name, value, file, python):
    changed(file, **{name: value})
    sizes, said, warned = ask(python, FASTATTN_TUNING=file)
    assert (sizes, warned) == (USUAL, [])
    assert said.startswith(f"defaults: FASTATTN_TUNING={file} is ignored, its {name} is {value!r} and not ")


MOST = SIZES["attention_tiles"][-1] if SIZES else 0
WRONG = {
    "sizes": (
        {"attention_tiles": MOST + 1},
        f"attention_tiles is {MOST + 1}; expected an integer, 1 to {MOST}",
    ),
    "below": ({"linear_tasks": 0}, "linear_tasks is 0; expected an integer, 1 to"),
    "float": ({"far_bytes": 2.0}, "far_bytes is 2.0; expected an integer"),
    "bool": ({"far_bytes": True}, "far_bytes is True; expected an integer"),
    "huge": ({"far_bytes": 10**30}, "far_bytes is 1000000000000000000000000000000; expected an integer"),
    "unknown": (
        {"attention_tasks": 12, "tasks": 3},
        "there is no size 'tasks'; expected some of attention_tasks,",
    ),
    "list": ([], "it has no object 'sizes'"),
}


@needs_kernels
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_entry_warns_and_nothing_changes(case, file, python):
    """Once, at the caller's line, with the names of variable, file and entry."""
    value, expected = WRONG[case]
    changed(file, sizes=value)
    sizes, said, (warned,) = ask(python, FASTATTN_TUNING=file)
    assert sizes == USUAL
    assert warned.startswith(f"<string> fastattn: FASTATTN_TUNING={file}: {expected}")
    assert said.startswith(f"defaults: FASTATTN_TUNING={file}: {expected}")


@needs_kernels
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{", "it is not JSON: Expecting property name"),
        (b"[1]", "it holds a list; expected an object"),
        (b"\xff", "'utf-8' codec"),
        (b"{}", "it has no 'format'"),
        (b"[" * 50_000, "maximum recursion"),
        (b" " * 100_000, "it has more than 65536 bytes"),
        (None, "No such file"),
    ],
)
def test_what_is_no_file_of_sizes_warns(text, expected, tmp_path, python):
    path = tmp_path / "tuning.json"
    if text is not None:
        path.write_bytes(text)
    sizes, said, (warned,) = ask(python, FASTATTN_TUNING=path)
    assert sizes == USUAL
    assert f"{path}: {expected}" in warned
    assert f"{path}: {expected}" in said


@needs_kernels
def test_what_is_no_file_warns(tmp_path, python):
    pipe = tmp_path / "pipe"  # nobody writes to it: to read it would never end
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        assert f"{path}: it is not a regular file" in ask(python, FASTATTN_TUNING=path)[2][0]


@needs_kernels
def test_a_wrong_file_in_the_usual_place_warns(tmp_path, python):
    path = tmp_path / "fastattn" / "tuning.json"
    path.parent.mkdir()
    path.write_text("{}")
    _, said, (warned,) = ask(python, FASTATTN_TUNING=None, XDG_CONFIG_HOME=tmp_path)
    assert said == f"defaults: {path}: it has no 'format'"
    assert f"fastattn: {path}: it has no 'format'; sizes are the defaults" in warned


@needs_kernels
def test_the_usual_place_that_cannot_be_read_does_not_warn(tmp_path, python):
    """Another user's home is one; here it is a link to itself, since root reads everything."""
    path = tmp_path / "fastattn" / "tuning.json"
    path.parent.mkdir()
    path.symlink_to(path)
    sizes, said, warned = ask(python, FASTATTN_TUNING=None, XDG_CONFIG_HOME=tmp_path)
    assert (sizes, warned) == (USUAL, [])
    assert said.startswith(f"defaults: {path}: ")


@needs_kernels
def test_a_warning_that_is_an_error_ends_the_first_call_alone(tmp_path, python):
    code = """
import warnings, numpy, fastattn
warnings.simplefilter("error")
for _ in range(2):
    try:
        print(fastattn.attention(*numpy.ones((3, 1, 1, 1), "f")).item(), end="|")
    except RuntimeWarning as warning:
        print(warning, end="|")
"""
    first, second, _ = ask(python, code, FASTATTN_TUNING=tmp_path / "none")
    assert first.startswith(f"fastattn: FASTATTN_TUNING={tmp_path / 'none'}: No such file")
    assert second == "1.0"


def test_importing_reads_nothing(tmp_path, python):
    code = "import fastattn; print(fastattn._engine.tuning._file)"
    run = python(code, FASTATTN_TUNING=tmp_path)
    assert (run.stdout, run.stderr) == ("None\n", "")
