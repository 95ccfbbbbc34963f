# For run.sh and run_aarch64.sh: builds the driver with the kernels, by the flags of setup.py and those that are given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(mktemp -d)
export out
trap 'rm -rf "$out"' EXIT
setup_flags=$(sed -n 's/^FLAGS = \[\(.*\)\]$/\1/p' setup.py | tr -d '",')

. tests/c/sets.sh

own_kernels() { # own_kernels ISA FAMILIES: a pattern of the lines of `driver list` whose kernels no other set has
    if [ "$2" = all ]; then echo "^$1(_emulated)? "; else echo "^$1 (${2// /|})$"; fi
}

# build NAME ARCHITECTURE CC FLAGS...: $out/NAME/driver, with every instruction set that the compiler takes, and
# $out/NAME/own, patterns of those lines of `driver list` whose kernels are not those of another line.
#   LEAVE_OUT  names of instruction sets to do without; the driver needs generic
#   EMULATE    names of those to have once more as <name>_emulated, where the bfloat16 dot product is spelled out, or
#              the tiles of amx are, for any CPU with AVX-512: amx_on_avx512; or with AVX2: amx_on_avx2
build() {
    local name=$1 arch=$2 cc=$3 flags=("${@:4}") isa base own isa_flags on tiles jobs=() list="" defines="" there="" family of floats doubles
    local -x folder=$out/$name
    mkdir "$folder"
    compile() { # compile OBJECT SOURCE FLAGS...: once
        [[ " $there " != *" $1 "* ]] || return 0
        there+=" $1"
        jobs+=("$cc $setup_flags ${optimisation:--O2} -Werror ${flags[*]} ${*:3} -Isrc -c $2 -o \"\$folder/$1.o\"")
    }
    kernels() { # kernels ISA f32|f64 FAMILY FLAGS...
        local optimisation="-O2 -Wno-maybe-uninitialized" # as in setup.py
        [[ ! "$2_$3" =~ ^f32_(attention|integers|linear|backward|outer|pack|rows)$ ]] || optimisation=-O3
        [[ "$1" != generic* ]] || optimisation="-O1 -Wno-maybe-uninitialized"
        compile "$1_$2_$3" "src/families/$3.c" "-DFA_ISA_NAME=$1" "-DFA_LANE_${2^^}=1" "${@:4}"
    }
    flags_of() { # flags_of ISA
        instruction_sets "$arch" | sed -n "s/^$1|.*|//p"
    }
    while IFS="|" read -r isa base own isa_flags; do
        for on in avx512 avx2; do
            [[ "$isa" = amx && " ${EMULATE-} " == *" amx_on_$on "* && " ${LEAVE_OUT-} " != *" $on "* ]] || continue
            floats="" doubles="" tiles=-DFA_EMULATE_TILES
            [ "$on" = avx512 ] || tiles+=" -O1 -Wno-psabi" # as in setup.py
            for family in $families; do
                of=$on
                [ "$family" != integers ] || continue # without tiles
                [[ " $own " != *" $family "* ]] || of=amx_on_$on
                kernels "$of" f32 "$family" "$(flags_of "$on")" "$([ "$of" = "$on" ] || echo "$tiles")"
                kernels "$on" f64 "$family" "$(flags_of "$on")"
                floats+="FAMILY(${of}_f32,$family) " doubles+="FAMILY(${on}_f64,$family) "
            done
            list+=" ISA(amx_on_$on,$floats,$doubles)"
            echo "^amx_on_$on (${own// /|})$" >>"$folder/own"
            defines+=" -Dfa_cpu_has_amx_on_$on=fa_cpu_has_$on"
        done
        [[ " ${LEAVE_OUT-} " != *" $isa "* ]] || continue
        # shellcheck disable=SC2086  # flags are words
        if ! echo 'int main(void) { return 0; }' | $cc $isa_flags -Werror -x c -c - -o "$folder/probe" 2>/dev/null; then
            echo "$isa: not with this compiler"
            continue
        fi
        floats="" doubles=""
        for family in $families; do
            of=$(owner "$isa" "$family" f32)
            [ -n "$of" ] || continue
            kernels "$of" f32 "$family" "$(flags_of "$of")"
            floats+="FAMILY(${of}_f32,$family) "
            of=$(owner "$isa" "$family" f64)
            [ -n "$of" ] || continue
            kernels "$of" f64 "$family" "$(flags_of "$of")"
            doubles+="FAMILY(${of}_f64,$family) "
        done
        list+=" ISA($isa,$floats,$doubles)"
        own_kernels "$isa" "$own" >>"$folder/own"
        if [[ " ${EMULATE-} " == *" $isa "* ]]; then
            floats=""
            for family in $families; do
                kernels "${isa}_emulated" f32 "$family" "$isa_flags" -DFA_EMULATE_BF16_DOT
                floats+="FAMILY(${isa}_emulated_f32,$family) "
            done
            list+=" ISA(${isa}_emulated,$floats,$doubles)"
            defines+=" -Dfa_cpu_has_${isa}_emulated=fa_cpu_has_$isa"
        fi
    done < <(instruction_sets "$arch")
    for source in src/*.c; do
        compile "$(basename -s .c "$source")" "$source" "$defines" "'-DFA_COMPILED=$list'"
    done
    compile driver tests/c/driver.c -fno-tree-vectorize # for AArch64, gcc 12 breaks down in it at a fmin()
    printf '%s\n' "${jobs[@]}" | xargs -d '\n' -P "$(nproc)" -I{} sh -c '{}'
    # shellcheck disable=SC2086
    $cc "${flags[@]}" "$folder"/*.o -lm -o "$folder/driver"
}

link_built() { # link_built ARCHITECTURE CC: $out/built/driver, with the objects that setup.py has left
    local isa base own flags objects
    mkdir "$out/built"
    while IFS="|" read -r isa base own flags; do
        own_kernels "$isa" "$own" >>"$out/built/own"
    done < <(instruction_sets "$1")
    mapfile -t objects < <(find build/objects -path '*/src/*.o')
    # shellcheck disable=SC2086
    $2 $setup_flags -O1 -Werror -Isrc tests/c/driver.c "${objects[@]}" -lm -o "$out/built/driver"
}

# run_driver NAME COMMAND...: all that $out/NAME/driver can run, by the command, as many processes at once as there are
# CPUs. CASES=/10 runs one case of ten.
run_driver() {
    local driver=("${@:2}" "$out/$1/driver")
    "${driver[@]}" list | grep -E -f "$out/$1/own" | sed "s,$,${CASES:+ $CASES}," |
        xargs -r -P "$(nproc)" -L 1 "${driver[@]}"
}
