#!/usr/bin/env bash
# Everything in C, compiled for systems that are not at hand, so that a break shows: Windows and macOS. Nothing is run.
# ZIG is zig's clang, such as "python -m ziglang cc"; PYTHON has pip and Cython, and its headers stand in for theirs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python=${PYTHON:-python3}
zig=${ZIG:-$python -m ziglang cc}
. tests/c/sets.sh
setup_flags=$(sed -n 's/^FLAGS = \[\(.*\)\]$/\1/p' setup.py | tr -d '",')
# Without optimisation: minutes instead of an hour, and the same errors.
flags="$setup_flags -O0 -Wall -Wextra -Werror -Isrc"
includes=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
mkdir "$out/python"
cp -r "$includes/." "$out/python"
if grep -q "multiarch location" "$includes/pyconfig.h"; then # Debian's, which includes that of an architecture
    multiarch=$("$python" -c "import sysconfig; print(sysconfig.get_config_var('MULTIARCH'))")
    cp "/usr/include/$multiarch/$(basename "$includes")/pyconfig.h" "$out/python"
fi
version=$("$python" -c "import numpy; print(numpy.__version__)")

numpy_headers() { # numpy_headers PLATFORM: where those of its wheel lie
    "$python" -m pip download -q --no-deps --only-binary :all: --platform "$1" -d "$out/$1" "numpy==$version" >&2
    "$python" -m zipfile -e "$out/$1"/numpy-*.whl "$out/$1"
    echo "$out/$1/numpy/_core/include"
}

compile() { # compile TARGET SOURCE FLAGS...: adds to `jobs`
    jobs+=("$zig -target $1 ${*:3} -c $2 -o \"$out/$1-${#jobs[@]}.o\"")
}

"$python" src/declarations.py
"$python" -m cython -3 fastattn/_engine/core/_core.pyx -o "$out/_core.c"
core_flags="-O0 -w -DNDEBUG -DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION -Isrc"
jobs=()
while read -r target arch platform; do
    instruction_sets "$arch" >"$out/sets"
    list=""
    while IFS="|" read -r isa base own isa_flags; do
        isa_flags=${isa_flags/-march=armv8.2-a/-mcpu=generic+v8_2a} # what zig calls it
        floats="" doubles=""
        for family in $families; do
            for lane in f32 f64; do
                of=$(owner "$isa" "$family" "$lane")
                [ -n "$of" ] || continue
                [ "$lane" = f64 ] || floats+="FAMILY(${of}_f32,$family) "
                [ "$lane" = f32 ] || doubles+="FAMILY(${of}_f64,$family) "
                [ "$of" = "$isa" ] || continue
                compile "$target" "src/families/$family.c" "$flags $isa_flags -DFA_ISA_NAME=$isa -DFA_LANE_${lane^^}=1"
            done
        done
        list+=" ISA($isa, $floats, $doubles)"
    done <"$out/sets"
    for source in src/*.c; do
        compile "$target" "$source" "$flags '-DFA_COMPILED=$list'"
    done
    headers=$out/python
    if [ "$platform" = win_amd64 ]; then # Python's own, but for what configuring it has found here
        headers=$out/windows
        mkdir "$headers"
        cp -r "$out/python/." "$headers"
        cp tests/c/pyconfig_windows.h "$headers/pyconfig.h"
    fi
    compile "$target" "$out/_core.c" "$core_flags -I$headers -I$(numpy_headers "$platform")"
    # shellcheck disable=SC2016  # the shell that xargs starts expands it
    printf '%s\n' "${jobs[@]}" | xargs -d '\n' -P "$(nproc)" -I{} sh -c '{}'
    if [ "$platform" != win_amd64 ]; then # whose linker wants Python's import library
        $zig -target "$target" -shared -undefined dynamic_lookup "$out/$target"-*.o -o "$out/core.so"
    else # no symbol but Python's and the system's is missing
        $zig -target "$target" -shared $(ls "$out/$target"-*.o | grep -v -e "-$((${#jobs[@]} - 1)).o") -o "$out/core.dll"
    fi
    echo "$target: ${#jobs[@]} objects"
    jobs=()
done <<'TARGETS'
x86_64-windows-gnu x86_64 win_amd64
aarch64-macos aarch64 macosx_14_0_arm64
x86_64-macos x86_64 macosx_14_0_x86_64
TARGETS
