"""Random calls of all that is public, and malformed files of models: tests/fuzz draws and judges them."""

import subprocess
import sys
from pathlib import Path

import pytest
from implementations import COMPILED, child_environment

FUZZ = Path(__file__).parent


def fuzz(*arguments):
    command = [sys.executable, str(FUZZ), *map(str, arguments)]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True)


@pytest.mark.parametrize(
    ("kind", "some", "many"), [("calls", 500, 10_000), ("files", 100, 1_000), ("gguf", 1_000, 100_000)]
)
def test_nothing_is_wrong(kind, some, many, pytestconfig):
    cases = many if pytestconfig.getoption("full") else some
    run = fuzz("--kind", kind, "--cases", cases)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{cases} cases of seed 0: no problems" in run.stdout


def test_each_fault_is_found():
    """The fuzzer names each fault by its number, also where the process dies, and carries on."""
    run = fuzz("--kind", "faults", "--cases", 40, "--seconds", 1)
    assert run.returncode == 1, run.stdout + run.stderr
    for found in (
        "the process ended with -11: Fatal Python error: Segmentation fault",
        "Timeout (0:00:01)",
        "fault: RuntimeWarning: of something",
        "fault: KeyError: 'fault(): nothing there'",
        "fault: ValueError: operands could not be broadcast",
        "fault: returned [((3,), dtype('float64'))]; expected",
        "fault: NaN or an infinity in",
        "fault: it wrote to <float64 (2,)",
        *(["has other bits in one thread", "and on numpy 1.0"] if COMPILED else []),
    ):
        assert found in run.stdout, run.stdout
    assert "x is 3" not in run.stdout
    lines = [line for line in run.stdout.splitlines() if line.startswith("python tests/fuzz")]
    one = fuzz("--kind", "faults", "--case", lines[0].rpartition(" ")[2])
    assert one.returncode == 1, one.stdout + one.stderr
