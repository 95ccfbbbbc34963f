"""How many threads a process has without another word: environment, CPUs, OpenMP's places, quotas."""

import os
import re

import numpy as np
import pytest

import fastattn
from fastattn._engine import settings

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
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= int(run.stdout) <= cpus
    if hasattr(os, "sched_setaffinity"):
        one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + THREADS
        assert python(one, FASTATTN_NUM_THREADS=None, OMP_NUM_THREADS=None).stdout == "1\n"
    # With this, OpenMP binds the thread that loads it to one CPU.
    bound = python(THREADS, FASTATTN_NUM_THREADS=None, OMP_NUM_THREADS=None, OMP_PROC_BIND="true")
    assert bound.stdout == run.stdout


CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
needs_places = pytest.mark.skipif(
    len(CPUS) < 2 or not fastattn.show_config()["openmp"], reason="OpenMP binds threads on Linux; to two CPUs"
)
FROM = "import fastattn; c = fastattn.show_config(); print(c['num_threads'], c['num_threads_from'], sep='|')"


def threads_from(python, code=FROM, **environment):
    """(number, what sets it) of a process whose environment says nothing but `environment`."""
    nothing = dict.fromkeys(("FASTATTN_NUM_THREADS", "OMP_NUM_THREADS", *settings._BINDERS))
    run = python(code, **nothing | environment)
    assert run.returncode == 0, run.stderr
    number, said = run.stdout.strip().split("|")
    return int(number), said


@pytest.fixture
def openmp(python):
    """The file of the OpenMP that the extension loads."""
    code = "import fastattn; print(*{line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line})"
    return next(name for name in python(code).stdout.split() if re.search(r"lib[gi]?omp[^/]*$", name))


@needs_places
@pytest.mark.parametrize("binding", [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "threads"}])
def test_threads_where_openmp_was_loaded_and_bound_before(binding, python, openmp):
    """As by another library: this thread has one CPU by then, OpenMP's threads have all."""
    expected, _ = threads_from(python)
    name, _ = next(iter(binding.items()))
    load = f"import ctypes, os; ctypes.CDLL({openmp!r})\n"
    bound = python(load + "print(len(os.sched_getaffinity(0)))", **binding).stdout == "1\n"
    number, said = threads_from(python, load + FROM, **binding)
    assert number == expected
    assert said in ((name, "cgroup quota") if bound else ("CPU affinity", "cgroup quota"))


@needs_places
def test_threads_are_no_more_than_openmp_s_places_have_cpus(python):
    assert threads_from(python, OMP_PLACES=f"{{{max(CPUS)}}}") == (1, "OMP_PLACES")


@needs_places
def test_a_single_cpu_that_openmp_may_have_chosen_is_said(python):
    """As in the child of a bound process; then OpenMP has no other CPU here."""
    code = f"import os; os.sched_setaffinity(0, {{{max(CPUS)}}})\n" + FROM
    assert threads_from(python, code) == (1, "CPU affinity")
    number, said = threads_from(python, code, OMP_PROC_BIND="true")
    assert (number, said.partition(",")[0]) == (1, "CPU affinity")
    assert "may have narrowed for OMP_PROC_BIND" in said


WORKERS = """
import os
from fastattn._bench.pool import WorkerProcess
from fastattn._engine.settings import CPUS

for engine in ("numpy", "fastattn"):
    worker = WorkerProcess("attention", engine, len(CPUS))
    worker.ask("limits", dtype="float32")  # all threads
    tasks = [int(task) for task in os.listdir(f"/proc/{worker.process.pid}/task")]
    print(len(set().union(*map(os.sched_getaffinity, tasks))), end=" ")
    print(len(os.sched_getaffinity(worker.process.pid)), end="|")
    worker.close()
print(len(os.sched_getaffinity(0)))
"""


@needs_places
def test_the_bench_s_workers_have_all_cpus_under_omp_proc_bind(python):
    """Engines with an OpenMP of their own need them in the first thread; fastattn's stays bound."""
    run = python(WORKERS, OMP_PROC_BIND="true", FASTATTN_BACKEND=None)
    count = len(CPUS)
    assert run.stdout == f"{count} {count}|{count} 1|1\n", run.stderr


@pytest.mark.parametrize("value", ["0", "-2", "many", "1.5", "100000000"])
def test_a_wrong_number_of_threads_in_the_environment(value, python):
    run = python("import fastattn", FASTATTN_NUM_THREADS=value)
    assert run.returncode == 1
    assert f"FASTATTN_NUM_THREADS is {value!r}; expected" in run.stderr


def test_cgroup_quotas(tmp_path):
    """The smallest quota of the group and its ancestors, in CPUs rounded up."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert settings._cgroup_quota(str(tmp_path)) is None
    write("proc/self/cgroup", "0::/a/b\n")
    assert settings._cgroup_quota(str(tmp_path)) is None
    write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert settings._cgroup_quota(str(tmp_path)) is None
    write("sys/fs/cgroup/a/cpu.max", "250000 100000\n")
    assert settings._cgroup_quota(str(tmp_path)) == 3
    write("sys/fs/cgroup/a/b/cpu.max", "50000 100000\n")
    assert settings._cgroup_quota(str(tmp_path)) == 1
    write("proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/a\n")
    write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n")
    write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
    assert settings._cgroup_quota(str(tmp_path)) is None
    write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "400000\n")
    assert settings._cgroup_quota(str(tmp_path)) == 4


def test_no_more_threads_than_are_of_use():
    """No call asks for thousands of threads: where the system refuses one, OpenMP ends the process."""
    q = np.ones((3, 4), np.float32)
    most = max(64, os.cpu_count() or 1)
    assert fastattn.explain(q, q, q, num_threads=64)["num_threads"] == 64
    assert fastattn.explain(q, q, q, num_threads=4096)["num_threads"] == min(most, 4096)
    with settings.forced(num_threads=4096):
        assert fastattn.get_num_threads() == fastattn.show_config()["num_threads"] == min(most, 4096)
