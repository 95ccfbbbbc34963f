#!/usr/bin/env bash
# The NEON kernels against plain C: cross-compiled, and run under emulation. CC_AARCH64 is the compiler, for instance
# "python -m ziglang cc -target aarch64-linux-musl", QEMU_AARCH64 the emulator.
source "$(dirname "${BASH_SOURCE[0]}")/build.sh"

build aarch64 aarch64 "${CC_AARCH64:-aarch64-linux-gnu-gcc}" -static
"${QEMU_AARCH64:-qemu-aarch64}" "$out/aarch64/driver" neon & # at the same time: emulated, each takes minutes
"${QEMU_AARCH64:-qemu-aarch64}" "$out/aarch64/driver" generic
wait $!
