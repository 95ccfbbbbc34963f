#!/usr/bin/env bash
# The NEON kernels against plain C: cross-compiled, and run under emulation. CC_AARCH64 is the compiler, for instance
# "python -m ziglang cc -target aarch64-linux-musl", QEMU_AARCH64 the emulator.
# LEAVE_OUT=generic runs NEON alone.
source "$(dirname "${BASH_SOURCE[0]}")/build.sh"

build aarch64 aarch64 "${CC_AARCH64:-aarch64-linux-gnu-gcc}" -static
jobs=()
for isa in neon generic; do # at the same time: emulated, each takes minutes
    if [[ " ${LEAVE_OUT-} " != *" $isa "* ]]; then
        "${QEMU_AARCH64:-qemu-aarch64}" "$out/aarch64/driver" "$isa" &
        jobs+=($!)
    fi
done
for job in "${jobs[@]}"; do wait "$job"; done
