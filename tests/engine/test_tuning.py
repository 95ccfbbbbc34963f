"""Files with sizes for a machine are read or refused; `python -m fastattn tune` measures and writes them."""

import json
import os
import re
import subprocess
import sys

import pytest
from implementations import COMPILED, child_environment, forced

from fastattn._bench import tune
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
    said = f"{file}: attention_tasks 12 (not 24)"
    assert ask(python, FASTATTN_TUNING=file) == (CHANGED, said, [])
    file.write_text(file.read_text().replace(": 12", ": 24"))
    assert ask(python, FASTATTN_TUNING=file) == (USUAL, f"{file}: all are the defaults", [])


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
    assert said.startswith(f"defaults: {file} is ignored, its {name} is {value!r} and not ")


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
    """Once, at the caller's line, with the names of file and entry."""
    value, expected = WRONG[case]
    changed(file, sizes=value)
    sizes, said, (warned,) = ask(python, FASTATTN_TUNING=file)
    assert sizes == USUAL
    assert warned.startswith(f"<string> fastattn: {file}: {expected}")
    assert said.startswith(f"defaults: {file}: {expected}")


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
def test_the_usual_place_that_cannot_be_read_does_not_warn(tmp_path, python):
    """As another user's home cannot; here, since root reads everything, a link to itself."""
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
    assert first.startswith(f"fastattn: {tmp_path / 'none'}: No such file")
    assert second == "1.0"


def test_importing_reads_nothing(tmp_path, python):
    run = python(
        "import sys, fastattn; print('fastattn._engine.tuning' in sys.modules)", FASTATTN_TUNING=tmp_path
    )
    assert (run.stdout, run.stderr) == ("False\n", "")


def command(*arguments, **environment):
    environment = {"FASTATTN_BACKEND": None, "FASTATTN_NUM_THREADS": 2} | environment
    return subprocess.run(
        [sys.executable, "-m", "fastattn", "tune", *arguments],
        env=child_environment(**environment), capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@needs_kernels
def test_the_command(tmp_path):
    """It says something of each size, and writes only if asked to."""
    path = tmp_path / "new" / "tuning.json"
    run = command("--seconds", "1", "--seed", "3", FASTATTN_TUNING=path)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines if line[:1].islower()] == list(SIZES)
    assert all(re.search(r" (keep|change to \d+); ", line) for line in lines if line[:1].islower())
    assert lines[-1] == f"Nothing was written; --write writes to {path}"
    assert not path.exists()


@needs_kernels
def test_the_command_writes_and_removes(tmp_path, python):
    path = tmp_path / "new" / "tuning.json"
    run = command("--seconds", "1", "--write", str(path))
    assert run.stdout.splitlines()[-1] == f"Written to {path}", run.stderr
    sizes = json.loads(path.read_text())["sizes"]
    would = ", ".join(f"{name} to {value}" for name, value in sizes.items()) or "nothing"
    assert f"\nWould change: {would}\n" in run.stdout
    found, said, warned = ask(python, FASTATTN_ISA=None, FASTATTN_TUNING=path)
    expected = {name: default for name, (_, default, *_) in SIZES.items()} | sizes
    assert (found, warned) == (" ".join(map(str, expected.values())), [])
    assert said.startswith(f"{path}: ")
    assert command("--reset", FASTATTN_TUNING=path).stdout == f"{path} was removed.\n"
    assert command("--reset", FASTATTN_TUNING=path).stdout == f"There is no {path}: the defaults hold.\n"
    assert not path.exists()


@needs_kernels
def test_the_command_refuses(tmp_path):
    run = command("--write", str(tmp_path))
    assert (run.returncode, run.stdout) == (2, "")
    assert f"cannot write {str(tmp_path)!r}: it is a folder" in run.stderr
    run = command("--reset", FASTATTN_TUNING=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"cannot remove {tmp_path}: ")
    run = command("--write", "/proc/none/tuning.json")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("cannot write /proc/none/tuning.json: ")
    run = command("--write", FASTATTN_TUNING="off")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("FASTATTN_TUNING is off")
    run = command(FASTATTN_BACKEND="numpy")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "There is nothing to tune: no compiled kernels are in use.\n"


@needs_kernels
@pytest.mark.parametrize("name", SIZES)
def test_what_is_measured_needs_two_wins(name, monkeypatch):
    """Times that say that doubling saves 10%, first always, then not in the second measurement."""
    default = SIZES[name][1]
    doubled = 2 * default if 2 * default in tune.candidates(name) else default // 2
    measured = []

    def minima(size, values, call, seconds):
        measured.append(values)
        wins = steady or len(measured) <= tune.SHAPES
        return [0.9 if value == doubled and wins else 1.0 for value in values]

    monkeypatch.setattr(tune, "_minima", minima)
    for steady, best in ((True, doubled), (False, default)):
        measured.clear()
        with forced(COMPILED[0], num_threads=2):
            result = tune.measure(name, 0, 100)
        assert (result.best, bool(result.why)) == (best, not steady)
        assert measured[-1] == [default, doubled, default]
        assert f"{doubled}: +10.0%" in tune.line(result)


@needs_kernels
@pytest.mark.parametrize(
    ("default_again", "gain", "noise"),
    [([1.2] * 8, 0.1, 0.2), ([1.0] * 8, 0.01, 0.0), ([1.0] * 7 + [1.001], 0.025, 0.045)],
)
def test_what_is_no_gain(default_again, gain, noise, monkeypatch):
    """Not beyond what the default's two minima differ; not beyond 2%; not the same on all shapes."""
    spread = iter([0.06, -0.06] * 4 if gain == 0.025 else [0.0] * 8)
    again = iter(default_again)
    monkeypatch.setattr(tune, "_minima", lambda *_: [1.0, 1 - gain - next(spread), 1.0, next(again)])
    result = tune.measure("attention_tasks", 0, 100)
    assert (result.best, result.why) == (24, "")
    assert result.gains[12].mean == pytest.approx(gain)
    assert result.gains[12].noise == pytest.approx(noise, abs=0.006)


@needs_kernels
def test_every_size_is_measured():
    assert list(tune.DRAWS) == list(SIZES)
    assert set(tune.NEED_THREADS) < set(SIZES)
    with forced(COMPILED[0], num_threads=1):
        assert tune.measure("parallel_flops", 0, 1).why == "there is one thread"
