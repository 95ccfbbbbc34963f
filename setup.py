"""Builds the extension: each of src/families/ per instruction set and lane type, with flags of its own.

Objects stay in build/objects. Each is kept until its compiler, its flags or a file that it includes changes.
Optional: without a compiler the package installs and runs on NumPy. Environment:

FASTATTN_REQUIRE_EXT=1        fail instead
FASTATTN_WERROR=1             warnings in src/ are errors
FASTATTN_EMULATE_BF16_DOT=1   for tests: dot products of bfloat16 pairs on every instruction set, spelled out
                              where there is no instruction for them
FASTATTN_EMULATE_TILES=avx512 for tests: the instruction set `amx` for every CPU with AVX-512, its tiles
                              spelled out; or avx2, its vectors too
FASTATTN_ISAS=all              compile every instruction set of this architecture: the default but in place
FASTATTN_ISAS=native           those that this CPU uses by default, and generic: the default in place, of
                              `pip install -e` and `build_ext -i`
FASTATTN_ISAS=avx2,avx512      these, and generic
FASTATTN_OPENMP=0             leave OpenMP out, as where the compiler has none: threads are our own
FASTATTN_TRACE=1              note which thread runs which task when, for tools/threads.py
FASTATTN_SANITIZE=address,undefined  look for such errors at run time: tests/sanitize.sh
"""

import os
import platform
import re
import runpy
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

SRC = Path("src")
# -ffp-contract=off: every multiply-add is written as one; results do not depend on a compiler's taste.
# Never -ffast-math: NaN rules, and it sets flush-to-zero in the process that loads the extension.
# -fwrapv: most Pythons bring it; without it gcc 12 ends in an internal error on the doubles of `generic`.
FLAGS = ["-std=gnu11", "-g0", "-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
FLAGS += ["-Wall", "-Wextra"]
if os.environ.get("FASTATTN_EMULATE_BF16_DOT") == "1":
    FLAGS.append("-DFA_EMULATE_BF16_DOT")
TILES_ON = os.environ.get("FASTATTN_EMULATE_TILES", "")
if TILES_ON not in ("", "avx512", "avx2"):
    raise SystemExit(f"FASTATTN_EMULATE_TILES is {TILES_ON!r}; expected avx512 or avx2")
# Of `amx`, and of what asks for its CPUs:
TILES_FLAGS = [f"-DFA_EMULATE_TILES=fa_cpu_has_{TILES_ON}"] if TILES_ON else []
if TILES_ON == "avx2":  # gcc 12 takes over ten minutes for linear.c with -O3; no vector leaves a file
    TILES_FLAGS += ["-O1", "-Wno-psabi"]
SANITIZE = os.environ.get("FASTATTN_SANITIZE", "")
SANITIZED = ["-O1", "-g", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"] if SANITIZE else []
TRACE = [("FA_TRACE", "1")] if os.environ.get("FASTATTN_TRACE") == "1" else []
REQUIRED = os.environ.get("FASTATTN_REQUIRE_EXT") == "1"
WANTED = os.environ.get("FASTATTN_ISAS", "")


FAMILIES = sorted(path.stem for path in Path(SRC, "families").glob("*.c"))
EVERYWHERE = [family for family in FAMILIES if family != "integers"]
LONGEST = ("attention", "linear", "rowwise", "backward")  # to compile
# With -O3. The others compile in 0.6 to 0.8 of the time with -O2, and run as fast: docs/dev/wheels.md.
FASTEST = ("attention", "integers", "linear", "backward", "outer", "pack", "rows")
COMMON = ("cpu.c", "dispatch.c", "lists.c")
LANES = ("f32", "f64")
OBJECTS = Path("build/objects")  # in the checkout: `pip install -e .` has a new build_temp each time


class InstructionSet(NamedTuple):
    """A line of isa.inc."""

    name: str
    flags: tuple[str, ...]
    base: str
    own: tuple[str, ...]  # families of it

    def tables(self, lane, sets):
        """(set, lane type, family) of all its kernels with such lanes; `sets` has all sets by their names."""
        return [(name, lane, family) for family in FAMILIES if (name := self.owner(family, lane, sets))]

    def owner(self, family, lane, sets):
        """The set that has these kernels: itself, or of its bases the first; None if none has."""
        if family in self.own and (lane == "f32" or self.base == self.name):
            return self.name
        return None if self.base == self.name else sets[self.base].owner(family, lane, sets)


def optimisation(name, lane, family):
    """How hard the compiler tries. `generic` is for CPUs that hardly anybody has; no bit depends on it."""
    if lane == "f32" and family in FASTEST and name != "generic":
        return ["-O3"]
    return [
        "-O1" if name == "generic" else "-O2",
        "-Wno-maybe-uninitialized",
    ]  # which is right with -O3 alone


def listed(isas, compiled):
    """The instruction sets, and the tables of those that are compiled, as dispatch.c reads them."""

    def tables(isa, lane):
        sets = {isa.name: isa for isa in isas}
        return " ".join(
            f"FAMILY({name}_{of}, {family})" for name, of, family in isa.tables(lane, sets) if isa in compiled
        )

    return " ".join(f"ISA({isa.name}, {', '.join(tables(isa, lane) for lane in LANES)})" for isa in isas)


def processes():
    """Compilers to run at once: CPUs that the affinity and the cgroup allow."""
    cpus = runpy.run_path("fastattn/_engine/cpus.py")
    return min(len(cpus["CPUS"]), cpus["cgroup_quota"]() or len(cpus["CPUS"]))


@cache
def digest(path):
    """Name of what is in a file; as it was when first asked for, "" if there is none."""
    return sha256(Path(path).read_bytes()).hexdigest() if os.path.exists(path) else ""


def instruction_sets():
    """Read the names of isa.inc for this architecture, best first."""
    machine = platform.machine().lower().replace("arm64", "aarch64").replace("amd64", "x86_64")
    line = r'^FA_ISA\((\w+), (\w+), "(.*)", (\w+), "(.*)"\)$'
    text = (SRC / "isa.inc").read_text()
    lines = re.findall(line, text, re.MULTILINE)
    assert len(lines) == text.count("\nFA_ISA("), "isa.inc: a set for each FA_ISA, on one line"
    flags_of = {name: flags.split() for name, _, flags, _, _ in lines}
    base_of = {name: base for name, _, _, base, _ in lines}
    if TILES_ON:
        flags_of["amx"], base_of["amx"] = [*flags_of[TILES_ON], *TILES_FLAGS], TILES_ON
    return [
        InstructionSet(
            name, tuple(flags_of[name]), base_of[name], tuple(EVERYWHERE if own == "all" else own.split())
        )
        for name, arch, _, _, own in lines
        if arch in (machine, "any")
    ]


class BuildExt(build_ext):
    """One source under several flags, as far as the compiler takes them; then the extension as usual."""

    def build_extension(self, ext):
        """Compile what is not up to date at once, in processes of their own, and link it as usual."""
        if self.compiler.compiler_type == "msvc":  # whose compiler has neither GNU C's vectors nor its flags
            self.compiler.initialize()
            self.compiler.cc = shutil.which("clang-cl") or "clang-cl is not on the PATH"
        else:
            openmp = ["-fopenmp"] if self.has_openmp() else []
            ext.extra_compile_args += ["-g0", "-pthread", *openmp]
            ext.extra_link_args += ["-pthread", *openmp]
        werror = ["-Werror"] if os.environ.get("FASTATTN_WERROR") == "1" else []
        flags = [*FLAGS, *SANITIZED, *werror]
        ours = instruction_sets()
        known = {isa.name: isa for isa in ours if self.takes(isa.flags)}
        if not known:
            raise CompileError("no working C compiler (or none that takes GNU C flags)")
        wanted = self.wanted(known)
        isas = [isa for isa in known.values() if isa.name in wanted]
        sets = {isa.name: isa for isa in ours}
        tables = {table: None for isa in isas for lane in LANES for table in isa.tables(lane, sets)}
        compiled = [("FA_COMPILED", listed(ours, isas))]

        def kernels(name, lane, family):
            macros = [("FA_ISA_NAME", name), (f"FA_LANE_{lane.upper()}", "1")]
            flags_of = self.gnu([*optimisation(name, lane, family), *flags, *known[name].flags])
            return self.compile(SRC / f"families/{family}.c", f"{name}_{lane}", flags_of, macros)

        compiler = [self.compiler.cc] if self.compiler.compiler_type == "msvc" else self.compiler.compiler_so
        version = subprocess.run([*compiler, "--version"], stdout=subprocess.PIPE).stdout
        self.command = [version, *compiler]
        [layer], ext.sources = ext.sources, []
        layer_flags = ["-O1", *ext.extra_compile_args, *self.gnu([f"-isystem{numpy.get_include()}"])]
        folder = self.get_ext_filename("layer")  # each Python's own
        jobs = [partial(self.compile, layer, folder, layer_flags, ext.define_macros)]
        jobs += [partial(kernels, *table) for table in sorted(tables, key=lambda t: t[2] not in LONGEST)]
        jobs += [
            partial(self.compile, SRC / name, "common", self.gnu(["-O2", *flags, *TILES_FLAGS]), compiled)
            for name in COMMON
        ]
        for path in SRC.rglob("*.*"):
            digest(str(path))  # before anything is compiled
        names, count = " ".join(isa.name for isa in isas), processes()
        print(
            f"kernels for {names}: {len(jobs)} files, {count} at a time, where they have changed", flush=True
        )
        with ThreadPoolExecutor(count) as pool:
            ext.extra_objects = list(pool.map(lambda job: job(), jobs))
        ext.depends = ext.extra_objects
        super().build_extension(ext)

    def finalize_options(self):
        """Also keep what `run` forgets."""
        super().finalize_options()
        self.stays = bool(self.inplace)  # in this clone, for this machine

    def wanted(self, known):
        """Names of the instruction sets to compile, of those that the compiler takes."""
        names = (WANTED or ("native" if self.stays else "all")).split(",")
        if names == ["native"]:
            names = self.native(known)
        elif names == ["all"]:
            names = known
        elif unknown := set(names) - {isa.name for isa in instruction_sets()}:
            expected = ", ".join(isa.name for isa in instruction_sets())
            raise SystemExit(
                f"FASTATTN_ISAS has {', '.join(sorted(unknown))}; expected native, all or some of {expected}"
            )
        return {*names, "generic"}

    def native(self, known):
        """Those of `known` that this CPU uses by default, with tiles and without, as dispatch.c chooses."""
        program = """
            #include <stdio.h>
            #include "fastattn.h"
            int main(void)
            {
                const int slow_pairs = fa_cpu_slow_pairs();
                for (int tiles = 0; tiles < 2; tiles++) puts(fa_isa_name(fa_isa_best(slow_pairs, tiles)));
            }"""
        flags = self.gnu(["-DFA_COMPILED=" + listed(known.values(), ()), *TILES_FLAGS])
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "native.c"), Path(folder, "native")
            source.write_text(program)
            sources = [str(source), str(SRC / "cpu.c"), str(SRC / "dispatch.c")]
            try:
                objects = self.compiler.compile(sources, folder, None, [str(SRC)], extra_postargs=flags)
                self.compiler.link_executable(objects, str(made))
                return subprocess.run([made], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
            except (CompileError, LinkError, OSError, subprocess.CalledProcessError):  # for another machine
                return known

    def gnu(self, flags):
        """Flags of gcc and clang, as the compiler takes them."""
        return [f"/clang:{flag}" for flag in flags] if self.compiler.compiler_type == "msvc" else flags

    def compile(self, source, folder, flags, macros):
        """The object file of a source, compiled unless it is there: from these files, by this command."""
        [made] = self.compiler.object_filenames([str(source)], output_dir=str(OBJECTS / folder))
        stamp, includes = Path(made + ".stamp"), Path(made + ".d")
        words = [*self.command, self.debug, *flags, *macros]
        text = " ".join(map(str, words)).replace(numpy.get_include(), numpy.__version__)
        command = sha256(text.encode()).hexdigest()
        if os.path.exists(made) and stamp.exists():
            before, *files = stamp.read_text().splitlines()
            if before == command and all(line == f"{digest(line[65:])} {line[65:]}" for line in files):
                return made
        stamp.unlink(missing_ok=True)
        self.compiler.compile(
            [str(source)], str(OBJECTS / folder), macros, [str(SRC)], self.debug,
            extra_postargs=[*flags, *self.gnu(["-MMD", f"-MF{includes}"])],
        )  # fmt: skip
        named = includes.read_text().replace("\\\n", " ").split(": ", 1)[1]
        paths = [path.replace("\\ ", " ") for path in re.split(r"(?<!\\)\s+", named.strip())]
        stamp.write_text("\n".join([command, *(f"{digest(path)} {path}" for path in paths)]))
        return made

    def takes(self, flags):
        """Whether the compiler takes these flags."""
        return self.makes("int main(void) { return 0; }\n", self.gnu([*flags, "-Werror"]), link=False)

    def has_openmp(self):
        """Whether there are OpenMP's header and library; Apple's clang has neither."""
        program = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
        return os.environ.get("FASTATTN_OPENMP") != "0" and self.makes(program, ["-fopenmp"], link=True)

    def makes(self, program, flags, *, link):
        """Whether the compiler makes an object or a whole program of this text."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(program)
            try:
                objects = self.compiler.compile([str(source)], folder, extra_postargs=flags)
                if link:
                    self.compiler.link_executable(objects, "probe", folder, extra_postargs=flags)
            except (CompileError, LinkError):
                return False
        return True


def extensions():
    """The one extension."""
    runpy.run_path("src/declarations.py", run_name="__main__")
    ext = Extension(
        "fastattn._engine.core._core",
        ["fastattn/_engine/core/_core.pyx"],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), *TRACE],
        extra_compile_args=[*SANITIZED],
        extra_link_args=[*SANITIZED],
    )
    [ext] = cythonize([ext], build_dir="build/cython")
    ext.optional = not REQUIRED  # here, since cythonize makes a new Extension and forgets this
    return [ext]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
