"""Numbers of threads that a process has without another word: environment, CPUs, quotas."""

import os

import numpy as np
import pytest

import fastattn
from fastattn._engine import cpus, settings

THREADS = "import fastattn; print(fastattn.get_num_threads())"


@pytest.mark.parametrize(("environment", "expected"), [
    ({"FASTATTN_NUM_THREADS": 3, "OMP_NUM_THREADS": None}, 3),
    ({"FASTATTN_NUM_THREADS": None, "OMP_NUM_THREADS": 5}, 5),
    ({"FASTATTN_NUM_THREADS": 3, "OMP_NUM_THREADS": 5}, 3),
    ({"FASTATTN_NUM_THREADS": None, "OMP_NUM_THREADS": "4,2"}, 4),
    ({"FASTATTN_NUM_THREADS": "", "OMP_NUM_THREADS": 7}, 7),
])  # fmt: skip
def test_the_environment_s_threads(environment, expected, python):
    run = python(THREADS, **environment)
    assert run.stdout == f"{expected}\n", run.stderr


def test_threads_without_a_word_are_the_cpus_that_we_may_use(python):
    run = python(THREADS, FASTATTN_NUM_THREADS=None, OMP_NUM_THREADS=None)
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= int(run.stdout) <= most
    if hasattr(os, "sched_setaffinity"):
        one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + THREADS
        assert python(one, FASTATTN_NUM_THREADS=None, OMP_NUM_THREADS=None).stdout == "1\n"


def test_cgroup_quotas(tmp_path):
    """The smallest quota of the group and its ancestors, in CPUs rounded up."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert cpus.cgroup_quota(str(tmp_path)) is None
    write("proc/self/cgroup", "0::/a/b\n")
    assert cpus.cgroup_quota(str(tmp_path)) is None
    write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert cpus.cgroup_quota(str(tmp_path)) is None
    write("sys/fs/cgroup/a/cpu.max", "250000 100000\n")
    assert cpus.cgroup_quota(str(tmp_path)) == 3
    write("sys/fs/cgroup/a/b/cpu.max", "50000 100000\n")
    assert cpus.cgroup_quota(str(tmp_path)) == 1
    write("proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/a\n")
    write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n")
    write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
    assert cpus.cgroup_quota(str(tmp_path)) is None
    write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "400000\n")
    assert cpus.cgroup_quota(str(tmp_path)) == 4


def test_no_more_threads_than_are_of_use():
    """No call makes thousands of threads."""
    q = np.ones((3, 4), np.float32)
    most = max(64, os.cpu_count() or 1)
    assert fastattn.explain(q, q, q, num_threads=64)["num_threads"] == 64
    assert fastattn.explain(q, q, q, num_threads=4096)["num_threads"] == min(most, 4096)
    with settings.forced(num_threads=4096):
        assert fastattn.get_num_threads() == fastattn.show_config()["num_threads"] == min(most, 4096)
