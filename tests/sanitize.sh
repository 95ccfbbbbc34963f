#!/usr/bin/env bash
# The extension as Python uses it, under sanitizers: tests of what callers, layers and models hand to the kernels, and
# random calls (tests/fuzz). tests/c/run.sh has the kernels themselves.
#
#   tests/sanitize.sh            memory and undefined behaviour (gcc), the kernels for `generic`: minutes
#   tests/sanitize.sh all        those for every instruction set, all tests, ten times as many calls: hours
#   tests/sanitize.sh threads    data races
#
# PYTHON is the interpreter. Everything is built in a temporary folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset "${!FASTATTN_@}" PYTHONPATH
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

build() { # build SANITIZERS ISAS: the package and what its tests need, in $work
    mkdir "$work/tree"
    { git ls-files -z --cached --others --exclude-standard 2>/dev/null || find . -type f -print0; } |
        tar -c --null -T - | tar -x -C "$work/tree"
    "${PYTHON:-python3}" -m venv "$work/venv"
    FASTATTN_REQUIRE_EXT=1 FASTATTN_SANITIZE=$1 FASTATTN_ISAS=$2 "$work/venv/bin/pip" install -e "$work/tree[test]"
    [ "$2" = all ] || export FASTATTN_ISA=$2 # no warning that this CPU has better ones
    cd "$work/tree"
    if "$work/venv/bin/python" -c "import fastattn._engine.core._core" 2>/dev/null; then
        echo "the extension works without the sanitizers' runtime: they are not in it"
        exit 1
    fi
}

sanitized() { # sanitized PROGRAM ARGUMENTS...: of the environment, with the runtime that the extension needs
    LD_PRELOAD=$runtime PYTHONMALLOC=malloc "$work/venv/bin/$1" "${@:2}"
}

memory() { # memory ISAS CALLS TESTS...
    ls "${@:3}" >/dev/null # a name that is gone, before minutes of compiling
    export CC=gcc UBSAN_OPTIONS=print_stacktrace=1
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096
    # C++'s runtime, too, which catches what NumPy's or matplotlib's parts throw.
    runtime="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)"
    build address,undefined "$1"
    # Less one test that measures memory, of which the detector takes its own.
    sanitized pytest -q -n auto --full "${@:3}" \
        --deselect tests/models/test_files.py::test_loading_holds_what_is_packed_and_one_tensor
    sanitized python tests/fuzz --cases "$2"
    sanitized python tests/fuzz --kind files --cases $(($2 / 10))
}

# Two threads write to one array.
RACE="
import threading, numpy, fastattn
q = numpy.ones((8, 8, 200, 64), numpy.float32)
out = numpy.empty_like(q)
threads = [threading.Thread(target=lambda: fastattn.attention(q, q, q, out=out)) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"

threads() {
    export CC=gcc
    runtime=$(gcc -print-file-name=libtsan.so)
    export TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66:log_path=$work/races
    build thread generic
    if sanitized python -c "$RACE" || ! grep -q "data race" "$work"/races.*; then
        echo "a race that is there is not found"
        exit 1
    fi
    rm "$work"/races.*
    # Where the system refuses several callers memory, it refuses the detector its own.
    if ! sanitized pytest -q --full -k "thread and not numpy and not ctrl_c and not forked and not several_callers" tests
    then
        cat "$work"/races.* 2>/dev/null
        exit 1
    fi
}

case ${1-memory} in
memory)
    memory generic 10000 tests/engine/test_core.py tests/layers tests/masks/test_definitions.py \
        tests/functional/test_{calls,decode,errors,inputs,merge_states,options,recurrent,rowwise}.py \
        tests/models/test_{files,program,results,text}.py tests/positions/test_rotary.py tests/test_ops.py
    ;;
all) memory all 100000 tests ;;
threads) threads ;;
*)
    sed -n '5,7s/^# *//p' "$0"
    exit 2
    ;;
esac
