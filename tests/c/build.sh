# For run.sh and run_aarch64.sh: builds the driver with the kernels, compiled as setup.py compiles them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(mktemp -d)
export out
trap 'rm -rf "$out"' EXIT
setup_flags=$(sed -n 's/^FLAGS = \[\(.*\)\]$/\1/p' setup.py | tr -d '",')

instruction_sets() { # instruction_sets ARCHITECTURE: lines "name doubles flags" of isa.inc
    sed -nE "s/^FA_ISA\((\w+), ($1|any), \"(.*)\", (\w+)\)$/\1 \4 \3/p" src/isa.inc
}

# build NAME ARCHITECTURE CC FLAGS...: $out/NAME/driver, with every instruction set that the compiler takes.
#   LEAVE_OUT  names of instruction sets to do without
#   EMULATE    names of those to have once more as <name>_emulated, where the bfloat16 dot product is spelled out
build() {
    local name=$1 arch=$2 cc=$3 flags=("${@:4}") isa doubles isa_flags jobs=() list="" defines="" with_doubles="" object
    local -x folder=$out/$name
    mkdir "$folder"
    compile() { # compile OBJECT SOURCE FLAGS...
        jobs+=("$cc $setup_flags -Werror ${flags[*]} ${*:3} -Isrc -c $2 -o \"\$folder/$1.o\"")
    }
    while read -r isa doubles isa_flags; do
        [[ " ${LEAVE_OUT-} " != *" $isa "* ]] || continue
        # shellcheck disable=SC2086  # flags are words
        if ! echo 'int main(void) { return 0; }' | $cc $isa_flags -Werror -x c -c - -o "$folder/probe" 2>/dev/null; then
            echo "$isa: not with this compiler"
            continue
        fi
        list+=" X($isa,$doubles)"
        compile "$isa-f32" src/kernels.c "$isa_flags" "-DFA_ISA_NAME=$isa" -DFA_LANE_F32=1
        if [[ " $with_doubles " != *" $doubles "* ]]; then
            with_doubles+=" $doubles"
            compile "$doubles-f64" src/kernels.c "$(instruction_sets "$arch" | sed -n "s/^$doubles [^ ]* //p")" \
                "-DFA_ISA_NAME=$doubles" -DFA_LANE_F64=1
        fi
        if [[ " ${EMULATE-} " == *" $isa "* ]]; then
            list+=" X(${isa}_emulated,$doubles)"
            defines+=" -Dfa_cpu_has_${isa}_emulated=fa_cpu_has_$isa"
            compile "$isa-emulated" src/kernels.c "$isa_flags" "-DFA_ISA_NAME=${isa}_emulated" -DFA_LANE_F32=1 \
                -DFA_EMULATE_BF16_DOT
        fi
    done < <(instruction_sets "$arch")
    compile cpu src/cpu.c
    compile dispatch src/dispatch.c "$defines" "'-DFA_COMPILED=$list'"
    compile driver tests/c/driver.c
    printf '%s\n' "${jobs[@]}" | xargs -d '\n' -P "$(nproc)" -I{} sh -c '{}'
    # shellcheck disable=SC2086
    $cc "${flags[@]}" "$folder"/*.o -lm -o "$folder/driver"
}
