#!/usr/bin/env bash
# The NEON kernels against the generic ones: cross-compiled, and run under emulation. CC_AARCH64 is the compiler, for
# instance "python -m ziglang cc -target aarch64-linux-musl", QEMU_AARCH64 the emulator; empty, nothing is run.
# CASES=/10 runs one case of ten.
source "$(dirname "${BASH_SOURCE[0]}")/build.sh"

build aarch64 aarch64 "${CC_AARCH64:-aarch64-linux-gnu-gcc}" -static
if [ -n "${QEMU_AARCH64=qemu-aarch64}" ]; then
    run_driver aarch64 "$QEMU_AARCH64"
fi
