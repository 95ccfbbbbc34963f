"""Tests of show_config and explain, and of how the environment changes them."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from implementations import COMPILED, child_environment, each_isa, forced

import fastattn
from fastattn.__main__ import main
from fastattn._bench import report as bench_report
from fastattn._bench.cases import Shape, make_inputs
from fastattn._engine import missing, settings
from fastattn._engine.cpus import CPUS

SHAPE = Shape("config", batch=2, heads_q=8, heads_kv=2, len_q=200, len_k=500, head_dim=32)
Q, K, V = make_inputs(SHAPE, "float32", np.random.default_rng(0))

CONFIG_KEYS = ["version", "backend", "why_numpy", "isa", "isa_refused", "isa_left_out",
               "isas_available", "isas_compiled", "num_threads", "num_threads_from", "threading",
               "threading_available", "level2_cache", "compiler", "numpy", "python"]  # fmt: skip

# Whatever the environment of the tests is: the extension if it is there.
DEFAULT = {"FASTATTN_BACKEND": None, "FASTATTN_ISA": None}
BUILT = bool(fastattn.show_config()["isas_available"])


def test_what_is_exported():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", fastattn.__version__)
    assert issubclass(fastattn.FallbackWarning, Warning)


def test_show_config():
    config = fastattn.show_config()
    assert list(config) == CONFIG_KEYS
    assert config["version"] == fastattn.__version__
    assert config["num_threads"] == fastattn.get_num_threads()
    assert config["isas_available"] == settings.available_isas()
    assert set(config["isas_available"]) <= set(config["isas_compiled"])
    assert config["backend"] == ("compiled" if COMPILED else "numpy")
    assert (config["why_numpy"] is None) == bool(COMPILED)
    assert (config["isa"] in config["isas_available"]) == bool(COMPILED)
    if BUILT:
        assert "generic" in config["isas_available"]
        assert config["compiler"]


def test_reports_print_as_tables():
    for report in (fastattn.show_config(), fastattn.explain(Q, K, V, causal=True)):
        lines = repr(report).splitlines()
        assert len(lines) == len(report)
        for line, name in zip(lines, report, strict=True):
            assert re.match(rf"{name} +\S", line), line


def test_show_config_follows_what_is_forced(implementation):
    config = fastattn.show_config()
    if implementation == "numpy":
        assert config["backend"] == "numpy"
        assert config["why_numpy"]
    else:
        assert (config["backend"], config["isa"]) == ("compiled", implementation)


def test_show_config_says_where_threads_are_too_many(python):
    code = (
        "import fastattn; c = fastattn.show_config(); print(c['num_threads'], c['num_threads_from'], sep='|')"
    )
    run = python(code, FASTATTN_NUM_THREADS=4096, FASTATTN_THREADING="team")
    used, said = run.stdout.strip().split("|")
    assert said == f"FASTATTN_NUM_THREADS: 4096, of which {used} are used"


def test_explain(implementation):
    report = fastattn.explain(Q, K, V)
    if implementation == "numpy":
        assert report["backend"] == report["kernel"] == "numpy"
    else:
        assert (report["backend"], report["isa"]) == ("compiled", implementation)
        assert report["why_numpy"] is None
    assert report["tiles"] == report["tiles_full"] > 0
    assert report["tiles_skipped"] == report["tiles_edge"] == 0
    assert report["copies"] == ()
    assert report["num_threads"] == fastattn.get_num_threads()
    rows = SHAPE.len_q * SHAPE.heads_q // SHAPE.heads_kv  # of one KV head
    least = SHAPE.batch * SHAPE.heads_kv * (rows // report["block_q"]) * (SHAPE.len_k // report["block_k"])
    assert report["tiles"] >= max(1, least)
    assert fastattn.explain(Q[:, :2, :1], K[:, :, :16], V[:, :, :16]).get("split_k") is None


def test_explain_counts_tiles(implementation):
    """`count_tiles` is tested in test_tiles.py."""
    nothing = fastattn.explain(Q, K, V, kv_lengths=0)
    assert nothing["tiles_skipped"] == nothing["tiles"] > 0
    long = make_inputs(SHAPE._replace(len_q=2000, len_k=2000), "float32", np.random.default_rng(0))
    causal = fastattn.explain(*long, causal=True)
    assert 0.3 < causal["tiles_skipped"] / causal["tiles"] < 0.5
    window = fastattn.explain(*long, window=(100, 0))
    assert 0.5 < window["tiles_skipped"] / window["tiles"] < 1


def test_conversions_are_said(implementation):
    k16 = K.astype(np.float16)
    said = fastattn.explain(Q, k16, k16, alibi_slopes=np.ones(8), sinks=np.ones(8, np.float32))
    assert said["copies"] == ("alibi_slopes converted: float64 to float32",)
    assert [text.split(",")[0] for text in said["conversions"]] == ["k widened", "v widened"]
    assert fastattn.explain(Q, K, V)["conversions"] == ()
    for heads, gathered in ((8, ["k gathered", "v gathered"]), (9, [])):  # rows 1024 and 1152 bytes apart
        inside = SHAPE._replace(heads_q=heads, heads_kv=heads)
        said = fastattn.explain(*make_inputs(inside, "float32", np.random.default_rng(0), layout="blhd"))
        found = [text.split(",")[0] for text in said["conversions"]]
        assert found == (gathered if implementation != "numpy" else []), heads


def test_explain_computes_nothing():
    out = np.full((2, 8, 200, 32), 7, np.float32)
    fastattn.explain(Q, K, V, out=out, return_lse=True)
    assert (out == 7).all()


def test_explain_backend():
    assert fastattn.explain(Q, K, V, backend="numpy")["why_numpy"]
    if BUILT:
        assert fastattn.explain(Q, K, V, backend="compiled")["backend"] == "compiled"


@each_isa
def test_short_queries_have_a_kernel_of_their_own(isa):
    """The rows of a KV head, and whether it has more keys, decide the kernel. Threads do not."""

    def plan(shape, **arguments):
        arrays = make_inputs(shape, "float32", np.random.default_rng(0))
        with forced(isa):
            return fastattn.explain(*arrays, **arguments)["kernel"]

    decode = SHAPE._replace(heads_q=2, len_q=1)
    assert plan(SHAPE) == "tile"
    assert plan(decode) == "few_rows"
    for same in ({"num_threads": 1}, {"num_threads": 9}, {"kv_lengths": [500, 3]}, {"kv_lengths": 0}):
        assert plan(decode, **same) == "few_rows"
        assert plan(SHAPE, **same) == "tile"
    assert plan(decode._replace(batch=1)) == "few_rows"
    assert plan(decode._replace(len_q=4, len_k=4)) == "tile"  # a short sequence that attends itself


def test_copies_are_said():
    report = fastattn.explain(Q[..., ::2], K[..., :16], V)
    assert [text.split()[0] for text in report["copies"]] == ["q"]
    assert "head dimension" in report["copies"][0]
    bias = np.zeros((200, 500), ">f4")
    assert [text.split()[0] for text in fastattn.explain(Q, K, V, bias=bias)["copies"]] == ["bias"]


def test_available_isas_come_best_first():
    order = [
        "amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "neonbf16", "neoni8mm", "neondot",
        "neon", "generic",
    ]  # fmt: skip
    isas = fastattn.show_config()["isas_available"]
    without_tiles = [isa for isa in isas if isa != "amx"]
    first = [isa for isa in without_tiles[:1] if isa == "avx512vnni"]  # where dot products of pairs are slow
    assert list(isas) == sorted(isas, key=lambda isa: (isa != "amx", isa not in first, order.index(isa)))
    assert all(isa in fastattn.show_config()["isas_compiled"] for isa in isas)


@pytest.mark.skipif(not BUILT, reason="of the extension")
def test_slow_dot_products_of_pairs_are_not_the_default():
    available = settings.core.AVAILABLE_ISAS
    best = [isa for isa in settings.core.COMPILED_ISAS if isa in available]
    without = [isa for isa in best if isa != "amx"]
    assert settings.core.default_isa(False, True) == best[0]
    assert settings.core.default_isa(False, False) == without[0]
    assert settings.core.default_isa(True, False) == next(isa for isa in without if isa != "avx512bf16")
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and platform.machine() == "x86_64":
        assert available[0] == settings.core.default_isa("GenuineIntel" in cpu.read_text(), True)


@each_isa
def test_the_environment_forces_an_isa(isa, python):
    code = "import fastattn; print(fastattn.show_config()['isa'])"
    assert python(code, **{**DEFAULT, "FASTATTN_ISA": isa}).stdout == f"{isa}\n"


def test_an_isa_for_the_calls_that_ask_for_kernels(python):
    """FASTATTN_BACKEND=numpy is the default only: FASTATTN_ISA holds where a call says backend="compiled"."""
    code = """
import numpy as np, fastattn
q = np.ones((2, 4))
backend = "compiled" if fastattn.show_config()["isas_available"] else None
print(fastattn.explain(q, q, q, backend=backend)["isa"])
"""
    run = python(code, FASTATTN_BACKEND="numpy", FASTATTN_ISA="generic")
    assert run.stdout == "generic\n" if BUILT else run.returncode == 0
    if BUILT:
        run = python(code, FASTATTN_BACKEND="numpy", FASTATTN_ISA="sse9")
        assert "FASTATTN_ISA is 'sse9'; available here: " in run.stderr


WRONG = [
    *(
        ("ISA", isa, "available here: .*generic" if BUILT else "available here: none")
        for isa in ("sse9", "AVX2", "avx2" if "neon" in settings.available_isas() else "neon")
    ),
    ("BACKEND", "cuda", "expected one of compiled, numpy"),
    *(("NUM_THREADS", wrong, "expected") for wrong in ("0", "-2", "many", "1.5", "100000000")),
    *([("THREADING", "tbb", "available in this build: ")] if BUILT else []),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_environment(name, value, message, python):
    run = python("import fastattn", **{**DEFAULT, f"FASTATTN_{name}": value})
    assert run.returncode == 1
    assert re.search(f"FASTATTN_{name} is {value!r}; {message}", run.stderr)


COMPUTE = """
import numpy as np, warnings
import fastattn
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        fastattn.attention(np.ones((2, 4)), np.ones((2, 4)), np.ones((2, 4)){})
print(fastattn.show_config()["backend"], [w.category.__name__ for w in caught], *(w.filename for w in caught))
"""


def test_the_environment_chooses_the_backend(python):
    said = COMPUTE.format("") + "print(fastattn.show_config()['why_numpy'])"
    run = python(said, **{**DEFAULT, "FASTATTN_BACKEND": "numpy"})
    assert run.stdout == "numpy []\nset by FASTATTN_BACKEND\n"
    run = python(COMPUTE.format(""), **{**DEFAULT, "FASTATTN_BACKEND": "compiled"})
    if BUILT:
        assert run.stdout == "compiled []\n"
    else:
        assert "FASTATTN_BACKEND is 'compiled', but" in run.stderr


# As on a machine where nothing was compiled, whether or not something was here.
NOT_COMPILED = "import sys; sys.modules['fastattn._engine.core._core'] = None\n"


def test_the_fallback_warns_once(python):
    """The warning points at the caller's line."""
    run = python(NOT_COMPILED + COMPUTE.format(""), **DEFAULT)
    assert run.stdout == "numpy ['FallbackWarning'] <string>\n", run.stderr


@pytest.fixture
def clone(tmp_path):
    """A copy of the package without kernels, in a folder with setup.py."""
    folder = tmp_path / "clone"
    without = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "_bench", "dask")
    shutil.copytree(Path(fastattn.__file__).parent, folder / "fastattn", ignore=without)
    (folder / "setup.py").touch()
    return folder


@pytest.mark.parametrize("by", ["the current folder", "PYTHONPATH"])
def test_a_clone_that_hides_the_installed_package_is_named(by, clone, tmp_path):
    site = tmp_path / "site"
    for name in ("fastattn/__init__.py", "fastattn-9.dist-info/RECORD"):
        site.joinpath(name).parent.mkdir(parents=True)
        site.joinpath(name).touch()
    (site / "fastattn-9.dist-info/METADATA").write_text("Name: fastattn\nVersion: 9\n")
    stands = by == "the current folder"
    path = [str(site)] if stands else [str(clone), str(site)]
    environment = child_environment(**DEFAULT, PYTHONPATH=os.pathsep.join(path))
    code = COMPUTE.format("") + "print(caught[0].message)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=clone if stands else tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (
        f"{clone} was not built, and hides the package that is installed, {site / 'fastattn'})" in run.stdout
    )
    remedy = "Start Python in another folder" if stands else f"Take {clone} out of Python's path"
    assert f" {remedy}, or compile its kernels: pip install -e {clone}. Or set FASTATTN_BACKEND" in run.stdout
    assert "C compiler" not in run.stdout


def test_what_is_missing_without_another_package(clone, monkeypatch):
    error = "No module named 'fastattn._engine.core._core'"
    monkeypatch.setattr(missing, "_OWN", clone / "fastattn")
    for installed, said, text in (
        ([clone / "fastattn"], "C compiler", error),
        ([], f"pip install -e {clone}", f"{error}; {clone} was not built"),
    ):
        monkeypatch.setattr(missing, "_installed", lambda installed=installed: iter(installed))
        found = missing.missing.__wrapped__(error)
        assert found.why == text
        assert said in found.remedy
        assert missing.missing.__wrapped__("an undefined symbol").remedy.startswith("Install it again")


@pytest.mark.parametrize("layer", ["Linear(4, 4, rng={0})", "TransformerEncoderLayer(4, 2, 8, rng={0})"])
def test_a_layer_warns_on_its_callers_line(layer, python):
    layer = layer.format("numpy.random.default_rng(0)")
    run = python(
        f"{NOT_COMPILED}import warnings, numpy, fastattn.layers\n"
        f"with warnings.catch_warnings(record=True) as caught:\n"
        f"    fastattn.layers.{layer}(numpy.ones((2, 4), 'f'))\n"
        f"print([(w.category.__name__, w.filename, w.lineno) for w in caught])",
        **DEFAULT,
    )
    assert run.stdout == "[('FallbackWarning', '<string>', 4)]\n", run.stderr


def test_a_number_of_threads_of_thousands_of_digits(python):
    run = python("import fastattn", FASTATTN_NUM_THREADS="9" * 5000)
    expected = r"ValueError: FASTATTN_NUM_THREADS is '9{35}\.\.\.'; expected an integer, 1 to 4096\n$"
    assert re.search(expected, run.stderr)
    code = "import fastattn; print(fastattn.get_num_threads())"
    plain = python(code, FASTATTN_NUM_THREADS="", OMP_NUM_THREADS="").stdout
    assert python(code, FASTATTN_NUM_THREADS="", OMP_NUM_THREADS="9" * 5000).stdout == plain


@pytest.mark.parametrize("name", ["FASTATTN_BACKEND", "FASTATTN_ISA", "FASTATTN_NUM_THREADS"])
def test_a_wrong_environment_is_a_line_on_the_command_line(name):
    """There is no traceback: who types `python -m fastattn info` did not write the code in it."""
    # A build without this CPU's best set would warn of that, too.
    environment = child_environment(**{**DEFAULT, "PYTHONWARNINGS": "ignore", name: "wrong"})
    command = [sys.executable, "-m", "fastattn", "info"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(f"fastattn: {name} is 'wrong'; .*\n", run.stderr)


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1000000"])
def test_the_bench_s_threads(threads, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fastattn", "bench", "--threads", threads])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"--threads: expected 1 to {len(CPUS)}, the CPUs" in capsys.readouterr().err


def test_the_bench_says_that_the_machine_was_busy():
    for share, said in ((0.5, ["\nBUSY MACHINE"]), (0.9, [])):
        assert [line[:13] for line in bench_report._warning({"cpu_share": share})] == said


def test_the_fallback_that_was_asked_for_does_not_warn(python):
    assert python(NOT_COMPILED + COMPUTE.format(", backend='numpy'"), **DEFAULT).stdout == "numpy []\n"
    environment = {**DEFAULT, "FASTATTN_BACKEND": "numpy"}
    assert python(NOT_COMPILED + COMPUTE.format(""), **environment).stdout == "numpy []\n"


def test_without_the_extension(python):
    """Only speed is missing, and everything says why it is and how to get it."""
    code = (
        NOT_COMPILED
        + """
import warnings
import numpy as np
import fastattn
config = fastattn.show_config()
assert config["isas_available"] == ()
assert config["backend"] == "numpy" and config["isa"] is None and config["isas_compiled"] == (), config
assert "_core" in config["why_numpy"], config
q = np.ones((3, 4))
assert fastattn.explain(q, q, q)["why_numpy"]
try:
    fastattn.attention(q, q, q, backend="compiled")
except ValueError as error:
    assert "backend is 'compiled'" in str(error) and "_core" in str(error), error
    assert ". Install it again where there is a C compiler" in str(error), error
else:
    raise AssertionError("an explicit backend fell back")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fastattn.scaled_dot_product_attention(q, q, q)
assert "compile" in str(caught[0].message), caught
print("good")
"""
    )
    run = python(code, **DEFAULT)
    assert run.stdout == "good\n", run.stderr
    run = python(NOT_COMPILED + "import fastattn", **{**DEFAULT, "FASTATTN_BACKEND": "compiled"})
    assert run.returncode == 1
    assert "FASTATTN_BACKEND is 'compiled'" in run.stderr
    assert ". Install it again where there is a C compiler" in run.stderr
    run = python(NOT_COMPILED + "import fastattn", **{**DEFAULT, "FASTATTN_ISA": "avx2"})
    assert run.returncode == 1
    assert "FASTATTN_ISA is 'avx2'; available here: none" in run.stderr


@pytest.mark.skipif(not BUILT, reason="of compiled kernels, and there are none")
def test_a_build_for_another_cpu_says_so_once(monkeypatch):
    """A better set that was not compiled is named when fastattn is imported, unless a set was asked for."""
    own = settings.core
    names = {name: getattr(own, name) for name in dir(own)}
    core = SimpleNamespace(**names | {"isa_left_out": lambda: "amx"})
    monkeypatch.setattr(settings, "core", core)
    monkeypatch.delenv("FASTATTN_BACKEND", raising=False)
    monkeypatch.delenv("FASTATTN_ISA", raising=False)
    with pytest.warns(fastattn.FallbackWarning, match=r"built without amx, .* FASTATTN_ISA=\w+ to") as caught:
        settings._from_environment()
    assert len(caught) == 1
    for name, value in (("FASTATTN_ISA", own.get_isa()), ("FASTATTN_BACKEND", "numpy")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            settings._from_environment()


def test_the_handler_of_ctrl_c_is_left_to_other_programs(tmp_path):
    """The package changes it for its own command alone, while that is imported."""
    (tmp_path / "tools").mkdir()
    code = "import signal\nbefore = signal.getsignal(signal.SIGINT)\nimport fastattn\n"
    (tmp_path / "tools/__init__.py").write_text(code)
    code = "import signal, tools\nprint(signal.getsignal(signal.SIGINT) is tools.before)\n"
    (tmp_path / "tools/one.py").write_text(code)
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    command = [sys.executable, "-m", "tools.one", "fastattn"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout == "True\n", run.stderr
