#!/usr/bin/env bash
# The kernels against the generic ones on every instruction set of this machine.
#
#   run.sh         once as they are shipped and once with sanitizers, which are all compiled here. CC is the compiler,
#                  SANITIZERS what it looks for: clang needs minutes to compile for "undefined"
#   run.sh built   the objects of a build in place (build/objects), with which the driver alone is compiled
#   CASES=/10      one case of ten; without it the sanitized driver runs one of four
source "$(dirname "${BASH_SOURCE[0]}")/build.sh"
cc=${CC:-cc}
sanitizers=${SANITIZERS:-address,undefined}
arch=$(uname -m)
arch=${arch/arm64/aarch64}
if [ "${1-}" = built ]; then
    link_built "$arch" "$cc"
    run_driver built
    exit
fi
EMULATE="amx_on_avx512 amx_on_avx2 avx512 generic"

build plain "$arch" "$cc"
run_driver plain

# Undefined behaviour ends in an illegal instruction: the code for messages, too, takes minutes to compile.
here=$("$out/plain/driver" list | cut -d " " -f 1 | sort -u)
LEAVE_OUT=$(instruction_sets "$arch" | cut -d "|" -f 1 | grep -vxF "$here" | tr '\n' ' ' || true)
! grep -qx avx512 <<<"$here" || EMULATE=${EMULATE/amx_on_avx2/} # the same source, sanitized in half an hour of compiling
build sanitized "$arch" "$cc" -O1 -g1 "-fsanitize=$sanitizers" -fsanitize-undefined-trap-on-error
# Such faults do not hide in single cases, which take five times as long here.
ASAN_OPTIONS=detect_leaks=0 CASES=${CASES:-/4} run_driver sanitized
