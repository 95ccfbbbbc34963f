"""Every command ends quietly when nobody reads on, and with one line when the disk is full."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny_models as tiny
from implementations import COMPILED, child_environment
from tiny_models import CONFIGS
from tiny_tokenizers import TEXTS, write_byte_tokenizer, write_tokenizer

from fastattn._args.errors import naming

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="of pipes and devices of POSIX")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
PIPE = 141  # of a command that SIGPIPE ended, in a shell


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Commands that print, each at a size of seconds."""
    encoder, writer = tmp_path_factory.mktemp("bert"), tmp_path_factory.mktemp("gpt2")
    tiny.write(encoder, "bert")
    write_tokenizer(encoder)
    changes = {"vocab_size": 256, "n_positions": 64}
    tiny.write(writer, "gpt2", tiny.tensors("gpt2", {**CONFIGS["gpt2"], **changes}), **changes)
    write_byte_tokenizer(writer)
    lines = encoder / "lines.txt"
    lines.write_text("\n".join(TEXTS))
    return {
        "info": ["info"],
        "help": ["--help"],
        "selftest": ["selftest", "--cases", "1"],
        "bench": ["bench", "--seconds", "1"],
        "embed": ["embed", "--model", str(encoder), str(lines)],
        "generate": ["generate", "--model", str(writer), "Once", "--max-new-tokens", "60"],
    }


NAMES = ["info", "help", "selftest", "bench", "embed", "generate"]


def run(arguments, stdout, **more):
    command = [sys.executable, "-B", "-m", "fastattn", *arguments]
    how = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "timeout": 120}
    chosen = {} if COMPILED else {"FASTATTN_BACKEND": "numpy"}
    return subprocess.run(command, stdout=stdout, env=child_environment(**chosen), **how, **more)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_that_nobody_reads_is_no_error(name, commands):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = run(commands[name], pipe)
    assert (done.returncode, done.stderr) == (PIPE, "")


@needs_full
@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_is_one_line(name, commands):
    with open("/dev/full", "wb") as full:
        done = run(commands[name], full)
    expected = f"error: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: the standard output\n"
    assert (done.returncode, done.stderr) == (1, expected)


def interruptible():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in the background


@pytest.mark.parametrize("wait", [0, 0.3])
def test_ctrl_c_ends_the_bench_without_a_traceback(wait):
    """A terminal sends it to the bench and to all engines, which may still be importing."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    alone = {"start_new_session": True, "preexec_fn": interruptible}
    command = [sys.executable, "-m", "fastattn", "bench"]
    process = subprocess.Popen(command, env=child_environment(), **pipes, **alone)
    assert process.stdout.readline() == "This takes about 60 seconds.\n"
    time.sleep(wait)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 128 + signal.SIGINT


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(tmp_path):
    """A stand-in for NumPy is the import that it comes in."""
    (tmp_path / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    command = [sys.executable, "-B", "-m", "fastattn", "info"]
    done = subprocess.run(command, capture_output=True, env=environment, text=True, preexec_fn=interruptible)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def limited():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))  # bytes of a file


def test_a_full_disk_names_the_file_of_vectors(commands, tmp_path):
    output = tmp_path / "vectors.npy"
    done = run([*commands["embed"], "--output", str(output)], subprocess.PIPE, preexec_fn=limited)
    assert done.returncode == 1
    assert done.stderr.endswith(f"error: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: '{output}'\n")


BENCH = """
import sys
from fastattn.__main__ import main
from fastattn._bench import harness, report
harness.run, report.text = (lambda *args, **options: ["long"] * 999), str
sys.exit(main())
"""


def test_a_full_disk_names_the_file_of_the_bench(tmp_path):
    """What the bench measures does not matter."""
    output = tmp_path / "bench.json"
    command = [sys.executable, "-B", "-c", BENCH, "bench", "--json", str(output)]
    done = subprocess.run(
        command, capture_output=True, env=child_environment(), text=True, preexec_fn=limited
    )
    assert done.returncode == 1
    assert done.stderr == f"error: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: '{output}'\n"


def test_only_errors_of_writing_get_a_name():
    for number, name in ((errno.ENOSPC, "there"), (errno.ENOMEM, None)):
        with pytest.raises(OSError, match=os.strerror(number)) as caught, naming("there"):
            raise OSError(number, os.strerror(number))
        assert caught.value.filename == name
    with pytest.raises(FileNotFoundError) as caught, naming("there"), open("/no/such/file"):
        pass
    assert caught.value.filename == "/no/such/file"
