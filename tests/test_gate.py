"""The parts of `.ci/full`: what they hold, and what is written down of one that passed."""

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (shutil.which("bash") and shutil.which("git")):
    pytest.skip("the gate runs in bash, from a checkout of git", allow_module_level=True)

# In place of the steps: they pass, fail, or say what was left out.
STEPS = """
[ "$1" = --full ] && shift
echo "steps: $*"
case "$*" in *races*) exit 1 ;; *wheels*) echo "!!! not built with clang" ;; *fallback*) touch new ;; esac
"""


def parts():
    """The steps of each part, as `--help` has them."""
    run = subprocess.run(["bash", ROOT / ".ci/full", "--help"], capture_output=True, text=True, check=True)
    found = [line.split() for line in run.stdout.rpartition("git notes")[2].splitlines()[1:] if line]
    return {part: steps for part, *steps in found}


def test_each_step_is_in_one_part():
    functions = set(re.findall(r"^([a-z0-9_]+)\(\) \{", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    helpers = {"step", "copy_tree", "have", "leave_out", "make_venv", "tests"}  # tests_* are its parts
    counts = Counter(step for steps in parts().values() for step in steps)
    assert functions - helpers == counts.keys()
    assert {step for step, n in counts.items() if n > 1} == {"install"}
    assert all("install" not in steps[1:] for steps in parts().values())


def test_the_workflow_runs_each_part():
    workflow = ROOT / ".github/workflows/gate.yml"
    if not workflow.exists():
        pytest.skip("of a checkout, not of an sdist")
    (listed,) = re.findall(r"^ +part: \[(.*)\]$", workflow.read_text(), re.MULTILINE)
    assert listed.split(", ") == list(parts())


@pytest.fixture
def gate(tmp_path):
    """Run `.ci/full` in a new checkout, whose steps do nothing."""
    identity = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith("GIT_")}, **identity}
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/full", tmp_path / ".ci/full")
    (tmp_path / ".ci/run").write_text(STEPS)

    def run(*command):
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return found.returncode, found.stdout + found.stderr

    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "x")):
        assert run("git", *command)[0] == 0
    return lambda *arguments: run("bash", ".ci/full", *arguments)


def test_a_part_that_passed_is_written_down(gate):
    code, said = gate("kernels", "wheels")
    assert code == 0, said
    assert "steps: kernels" in said
    assert re.search(r"^kernels +passed +\d+ s\nwheels +passed +\d+ s\n$", said, re.MULTILINE)
    _, passed = gate("--passed")
    lines = dict(line.split(": ", 1) for line in passed.splitlines())
    assert list(lines) == list(parts())
    assert re.match(r"passed in \d+ s on \d{4}-\d\d-\d\d, \d+ CPUs", lines["kernels"])
    assert lines["wheels"].endswith("; not built with clang")
    assert lines["races"] == "not yet"


def test_one_that_failed_or_was_not_of_a_commit_is_not(gate):
    """Others run all the same."""
    code, said = gate("races", "fallback", "kernels")
    assert code == 1, said
    assert re.search(r"^races +FAILED +\d+ s\nfallback +passed", said, re.MULTILINE)
    assert "fallback passed, but not on a commit: nothing is written down" in said
    assert "passed" not in gate("--passed")[1]


def test_a_part_that_is_none(gate):
    code, said = gate("kernels", "everything")
    assert code == 2
    assert said.startswith("there is no part everything; there are: functional others")
