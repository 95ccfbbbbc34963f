"""`python -m fastattn tune` measures, proposes and writes sizes for this machine."""

import json
import re
import subprocess
import sys

import pytest
from implementations import COMPILED, child_environment, forced

from fastattn._bench import tune
from fastattn._engine import settings

SIZES = settings.core.SIZES if COMPILED else {}
needs_kernels = pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")


READ = """
import json, fastattn
from fastattn._engine import settings
assert fastattn.show_config()["tuning"].startswith("FASTATTN_TUNING=")
print(json.dumps(settings.core.get_sizes()))
"""


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
    if not any(line.startswith("BUSY MACHINE: ") for line in lines):
        assert lines[-1] == f"Nothing was written; --write writes to {path}"
    assert not path.exists()


@pytest.fixture
def tune_here(monkeypatch, capsys):
    """A function that runs the command in this process, where threads get a share of the CPU time."""

    def run(share, write):
        monkeypatch.setattr(tune, "cpu_share", lambda: share)
        with forced(COMPILED[0], num_threads=2):
            code = tune.main(1, None, write, False)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@needs_kernels
def test_a_busy_machine_is_said_and_nothing_is_written(tmp_path, tune_here):
    path = tmp_path / "new" / "folder" / "tuning.json"
    for write, code, refusal in ((None, 0, ""), (path, 2, f"Nothing was written to {path}\n")):
        found, out, err = tune_here(0.7, write)
        assert (found, err) == (code, refusal)
        assert "\nBUSY MACHINE: threads that computed without a pause got 70% of the CPU time.\n" in out
        assert list(tmp_path.iterdir()) == []


def test_the_share_of_the_cpu_time_is_one_of_all_threads():
    if COMPILED:
        with forced(COMPILED[0], num_threads=2):
            assert 0 < tune.cpu_share() < 1.5  # the system counts in ticks


@needs_kernels
def test_the_command_writes_and_removes(tmp_path, python, tune_here):
    path = tmp_path / "new" / "tuning.json"
    code, out, err = tune_here(0.9, path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"Written to {path}"
    assert [name.name for name in path.parent.iterdir()] == [path.name]
    sizes = json.loads(path.read_text())["sizes"]
    would = ", ".join(f"{name} to {value}" for name, value in sizes.items()) or "nothing"
    assert f"\nWould change: {would}\n" in out
    environment = {"FASTATTN_ISA": COMPILED[0], "FASTATTN_NUM_THREADS": 2, "FASTATTN_BACKEND": None}
    read = python(READ, FASTATTN_TUNING=path, **environment)
    expected = {name: default for name, (_, default, *_) in SIZES.items()} | sizes
    assert (json.loads(read.stdout), read.stderr) == (expected, "")
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
    for target in ((), (str(tmp_path / "x.json"),)):
        run = command("--write", *target, "--reset")
        assert (run.returncode, run.stdout) == (2, "")
        assert "error: --reset removes the file that --write writes: give one of them" in run.stderr
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
    """A gain is beyond what the default's two minima differ, beyond 2%, and there on all shapes."""
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
