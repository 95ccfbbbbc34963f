#!/usr/bin/env bash
# The NEON kernels against plain C: cross-compiled, and run under emulation. CC_AARCH64 is the compiler, for instance
# "python -m ziglang cc -target aarch64-linux-musl", QEMU_AARCH64 the emulator.
# LEAVE_OUT=generic runs NEON alone, and CASES=/10 one case of ten.
source "$(dirname "${BASH_SOURCE[0]}")/build.sh"

build aarch64 aarch64 "${CC_AARCH64:-aarch64-linux-gnu-gcc}" -static
jobs=()
# At the same time: emulated, each takes minutes. Products of bytes and of bfloat16 have instructions beside NEON's.
for what in "neon all" "generic all" "neonbf16 attention" "neonbf16 backward" "neonbf16 linear" "neonbf16 outer" \
    "neoni8mm linear" "neondot linear"; do
    if [[ " ${LEAVE_OUT-} " != *" ${what%% *} "* ]]; then
        # shellcheck disable=SC2086  # the set, the family and the cases
        "${QEMU_AARCH64:-qemu-aarch64}" "$out/aarch64/driver" $what ${CASES-} &
        jobs+=($!)
    fi
done
for job in "${jobs[@]}"; do wait "$job"; done
