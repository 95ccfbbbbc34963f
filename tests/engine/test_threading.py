"""Threads that compute: OpenMP's, with what its environment variables say, or our own."""

import ctypes
import os

import numpy as np
import pytest
from implementations import COMPILED, THREADINGS
from oracle import assert_same_bits

import fastattn
from fastattn._engine import settings

Q = np.random.default_rng(0).standard_normal((8, 4, 200, 32), np.float32)

compiled = pytest.mark.skipif(not COMPILED, reason="NumPy has no threads of ours")
openmp = pytest.mark.skipif(not COMPILED or "openmp" not in THREADINGS, reason="a build without OpenMP")
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux lists threads")

THREADS = """
import os, threading, time
import numpy as np, fastattn

first = threading.Thread(target=int)  # a race detector begins a thread of its own beside it
first.start(), first.join()
before = set(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else set()

def ours():  # threads that were not there before, of a race detector or of BLAS
    return set(os.listdir("/proc/self/task")) - before

q = np.random.default_rng(0).standard_normal((8, 4, 200, 32), np.float32)
same = (fastattn.attention(q, q, q) == fastattn.attention(q, q, q, num_threads=1)).all()
same &= (fastattn.attention(q, q, q, num_threads=3) == fastattn.attention(q, q, q, num_threads=1)).all()
assert same
config = fastattn.show_config()
"""
# A host sleeps in each region, in the caller's place.
LISTED = """
deadline = time.monotonic() + 30
while len(ours()) < {count} and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.05)
"""

FEWER = """
deadline = time.monotonic() + 60
while len(ours()) > {count} and time.monotonic() < deadline:
    time.sleep(0.1)
print(len(ours()))
"""


@pytest.fixture(autouse=True)
def _as_before():
    before = fastattn.show_config()["threading"]
    yield
    if before:
        fastattn.set_threading(before)


@openmp
def test_openmp_is_the_default_where_it_was_built_in(python):
    assert THREADINGS == ("openmp", "team")
    run = python("import fastattn; print(fastattn.show_config()['threading'])", FASTATTN_THREADING=None)
    assert run.stdout == "openmp\n", run.stderr


@compiled
@pytest.mark.parametrize("threading", THREADINGS)
def test_threads_are_chosen_by_a_call_and_by_the_environment(threading, python):
    fastattn.set_threading(threading)
    assert fastattn.show_config()["threading"] == threading
    run = python("import fastattn; print(fastattn.show_config()['threading'])", FASTATTN_THREADING=threading)
    assert run.stdout == f"{threading}\n", run.stderr


@compiled
def test_no_bit_depends_on_whose_threads_compute():
    expected = fastattn.attention(Q, Q, Q, num_threads=1)
    for threading in (*THREADINGS, *THREADINGS):
        fastattn.set_threading(threading)
        for num_threads in (2, 5):
            assert_same_bits([fastattn.attention(Q, Q, Q, num_threads=num_threads)], [expected])


@compiled
@linux
def test_changing_to_and_fro_leaves_no_threads_behind(python):
    """OpenMP's end with their region, our own are kept for the next call."""
    code = """
for _ in range(10):
    for threading in fastattn.show_config()["threading_available"]:  # "team" is the last
        fastattn.set_threading(threading)
        fastattn.attention(q, q, q, num_threads=3)
"""
    run = python(THREADS + code + FEWER.format(count=2))
    assert run.stdout == "2\n", run.stderr


@openmp
@linux
def test_a_region_ends_that_nobody_calls(python):
    code = THREADS + FEWER.format(count=0) + "fastattn.attention(q, q, q, num_threads=3)"
    run = python(code, FASTATTN_THREADING="openmp")
    assert (run.stdout, run.returncode) == ("0\n", 0), run.stderr


def test_threads_that_do_not_exist():
    with pytest.raises(ValueError, match=r"set_threading\(\): threading is 'tbb'; available in this build: "):
        fastattn.set_threading("tbb")
    with pytest.raises(ValueError, match=r"threading is 3; available"):
        fastattn.set_threading(3)
    with pytest.raises(ValueError, match=r"^set_threading\(\): threading is an array"):
        fastattn.set_threading(np.zeros(2))


@openmp
@linux
@pytest.mark.parametrize(("threading", "limit", "count", "where"), [
    ("openmp", 1, 0, "1 OMP_THREAD_LIMIT"),
    ("openmp", 2, 2, "2 OMP_THREAD_LIMIT"),  # one of them sleeps, in the caller's place
    ("team", 2, 7, "8 FASTATTN_NUM_THREADS"),
])  # fmt: skip
def test_openmp_s_limit_holds_for_the_caller_and_its_helpers(threading, limit, count, where, python):
    said = 'print(len(ours()), config["num_threads"], config["num_threads_from"])'
    run = python(THREADS + LISTED.format(count=count) + said, OMP_THREAD_LIMIT=limit,
                 FASTATTN_NUM_THREADS=8, FASTATTN_THREADING=threading)  # fmt: skip
    assert run.stdout == f"{count} {where}\n", run.stderr


@openmp
def test_the_limit_is_openmp_s_alone(python):
    code = """
import fastattn
def say():
    print(fastattn.get_num_threads(), fastattn.show_config()["num_threads_from"])
say()
fastattn.set_threading("team"), say()
fastattn.set_num_threads(5), say()
fastattn.set_threading("openmp"), say()
"""
    run = python(code, OMP_THREAD_LIMIT=1, FASTATTN_NUM_THREADS=3, FASTATTN_THREADING="openmp")
    said = ["1 OMP_THREAD_LIMIT", "3 FASTATTN_NUM_THREADS", "5 set_num_threads()", "1 OMP_THREAD_LIMIT"]
    assert run.stdout.splitlines() == said, run.stderr


@openmp
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system binds no threads")
@pytest.mark.parametrize(
    "variable", [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "threads"}], ids=["bind", "places"]
)
def test_bound_threads_keep_a_place_each(variable, python):
    """The caller has the first one, helpers have the others, and sleeping does not change it."""
    cpus = len(os.sched_getaffinity(0))
    code = (
        THREADS.replace("num_threads=3", f"num_threads={cpus}")
        + LISTED.format(count=cpus)
        + """
fastattn.attention(q, q, q)
print(config["num_threads"])
places = [tuple(os.sched_getaffinity(int(task))) for task in ours() | {os.getpid()}]
print(len(set(places)), sum(len(place) == 1 for place in places))
"""
    )
    environment = {"FASTATTN_NUM_THREADS": None, "OMP_NUM_THREADS": None}
    run = python(code, FASTATTN_THREADING="openmp", **environment, **variable)
    # A quota of this container may leave fewer threads than there are processors.
    threads, places, bound = map(int, run.stdout.split())
    assert 1 <= threads <= cpus
    assert places == cpus
    assert bound == (cpus + 1 if cpus > 1 else 1), run.stderr


@openmp
def test_openmp_shows_where_its_threads_run(python):
    environment = {"FASTATTN_NUM_THREADS": 3, "FASTATTN_THREADING": "openmp"}
    shows = {"OMP_DISPLAY_AFFINITY": "true", "OMP_AFFINITY_FORMAT": "place %A of %n"}
    run = python(THREADS + LISTED.format(count=3), **environment, **shows)
    shown = [line for line in (run.stdout + run.stderr).splitlines() if line.startswith("place ")]
    assert {line.rpartition(" ")[2] for line in shown} >= {"0", "1", "2"}


@openmp
@pytest.mark.parametrize("variable", [{"OMP_DYNAMIC": "true"}, {"OMP_MAX_ACTIVE_LEVELS": "0"}], ids=str)
def test_fewer_threads_where_openmp_gives_fewer(variable, python):
    run = python(THREADS + "print('computed')", FASTATTN_THREADING="openmp", **variable)
    assert run.stdout == "computed\n", run.stderr


@openmp
def test_calls_inside_other_regions_have_their_own_threads():
    """Each thread of a region calls, as a program in Cython or C++ would."""
    parallel = ctypes.CDLL(settings.core.__file__)
    if not hasattr(parallel, "GOMP_parallel"):
        pytest.skip("not gcc's way to begin a region")
    expected, found = fastattn.attention(Q, Q, Q, num_threads=1), []
    fastattn.set_threading("openmp")

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def call(_):
        found.append(fastattn.attention(Q, Q, Q, num_threads=2))

    for _ in range(5):
        parallel.GOMP_parallel(call, None, 3, 0)
    assert len(found) == 15
    for got in found:
        assert_same_bits([got], [expected])
