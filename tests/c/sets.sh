# For build.sh and cross.sh: the instruction sets of src/isa.inc.

families=$(basename -s .c src/families/*.c)

instruction_sets() { # instruction_sets ARCHITECTURE: lines "name|base|families of its own|flags" of isa.inc
    sed -nE "s/^FA_ISA\((\w+), ($1|any), \"(.*)\", (\w+), \"(.*)\"\)$/\1|\4|\5|\3/p" src/isa.inc
}

owner() { # owner ISA FAMILY f32|f64: the set that has these kernels, as in setup.py; nothing if none has
    local isa base own flags wanted=$1
    while IFS="|" read -r isa base own flags; do # a base stands behind what it is the base of
        [ "$isa" = "$wanted" ] || continue
        if [[ "$isa" = "$base" || "$3" = f32 ]] && [[ "$own" = all || " $own " == *" $2 "* ]]; then
            [[ "$own" = all && "$2" = integers ]] || echo "$isa"
            return
        fi
        wanted=$base
    done < <(instruction_sets ".*")
}
