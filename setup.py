"""Builds the extension: src/kernels.c per instruction set, lane type and part, each with its own flags.

Optional: without a compiler the package installs and runs on NumPy. Environment:

FASTATTN_REQUIRE_EXT=1        fail instead
FASTATTN_WERROR=1             warnings in src/ are errors
FASTATTN_EMULATE_BF16_DOT=1   for tests: dot products of bfloat16 pairs on every instruction set, spelled out
                              where there is no instruction for them
FASTATTN_ISAS=avx2,avx512      compile no other instruction sets but these, and generic
FASTATTN_OPENMP=0             leave OpenMP out, as where the compiler has none: threads are our own
FASTATTN_TRACE=1              note which thread runs which task when, for tools/threads.py
FASTATTN_SANITIZE=address,undefined  look for such errors at run time: tests/sanitize.sh
"""

import os
import platform
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

SRC = Path("src")
# -ffp-contract=off: every multiply-add is written as one; results do not depend on a compiler's taste.
# Never -ffast-math: NaN rules, and it sets flush-to-zero in the process that loads the extension.
# -fwrapv: most Pythons bring it; without it gcc 12 ends in an internal error on the doubles of `generic`.
FLAGS = ["-std=gnu11", "-O3", "-g0", "-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
FLAGS += ["-Wall", "-Wextra"]
if os.environ.get("FASTATTN_EMULATE_BF16_DOT") == "1":
    FLAGS.append("-DFA_EMULATE_BF16_DOT")
SANITIZE = os.environ.get("FASTATTN_SANITIZE", "")
SANITIZED = ["-O1", "-g", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"] if SANITIZE else []
TRACE = [("FA_TRACE", "1")] if os.environ.get("FASTATTN_TRACE") == "1" else []
REQUIRED = os.environ.get("FASTATTN_REQUIRE_EXT") == "1"


PARTS = ("bytes", "pairs", "plain")  # of kernels.c
LONGEST = ("all", *reversed(PARTS))  # to compile


class InstructionSet(NamedTuple):
    """A line of isa.inc."""

    name: str
    flags: tuple[str, ...]
    base: str
    own: tuple[str, ...]  # parts of it

    def table(self, part, shared):
        """(set, lane type, part) of kernels.c that has `part`; other sets use parts of those in `shared`."""
        if part == "double":
            return self.base, "f64", "all"
        whole = self.name == self.base and self.name not in shared
        return self.name if part in self.own else self.base, "f32", "all" if whole else part


def instruction_sets():
    """Those of isa.inc for this architecture, best first."""
    machine = platform.machine().lower().replace("arm64", "aarch64").replace("amd64", "x86_64")
    line = r'^FA_ISA\((\w+), (\w+), "(.*)", (\w+), "(.*)"\)$'
    lines = re.findall(line, (SRC / "isa.inc").read_text(), re.MULTILINE)
    return [
        InstructionSet(name, tuple(flags.split()), base, PARTS if own == "all" else tuple(own.split()))
        for name, arch, flags, base, own in lines
        if arch in (machine, "any")
    ]


class BuildExt(build_ext):
    """One source under several flags, as far as the compiler takes them; then the extension as usual."""

    def build_extension(self, ext):
        """Compile all objects at once, in processes of their own, and link them as usual."""
        if self.compiler.compiler_type == "msvc":  # whose compiler has neither GNU C's vectors nor its flags
            self.compiler.initialize()
            self.compiler.cc = shutil.which("clang-cl") or "clang-cl is not on the PATH"
        else:
            openmp = ["-fopenmp"] if self.has_openmp() else []
            ext.extra_compile_args += ["-g0", "-pthread", *openmp]
            ext.extra_link_args += ["-pthread", *openmp]
        werror = ["-Werror"] if os.environ.get("FASTATTN_WERROR") == "1" else []
        flags = [*FLAGS, *SANITIZED, *werror]
        known = {isa.name: isa for isa in instruction_sets() if self.takes(isa.flags)}
        wanted = (os.environ.get("FASTATTN_ISAS") or ",".join(known)).split(",")
        isas = [isa for isa in known.values() if isa.name in (*wanted, "generic")]
        if not isas:
            raise CompileError("no working C compiler (or none that takes GNU C flags)")
        shared = {isa.base for isa in isas if isa.name != isa.base}
        uses = {isa: [isa.table(part, shared) for part in (*PARTS, "double")] for isa in isas}
        entries = (", ".join([isa.name, *map("_".join, tables)]) for isa, tables in uses.items())
        compiled = [("FA_COMPILED", " ".join(f"X({entry})" for entry in entries))]

        def kernels(name, lane, part):
            macros = [("FA_ISA_NAME", name), (f"FA_LANE_{lane.upper()}", "1"), ("FA_PART", part)]
            return self.compile("kernels.c", f"{name}_{lane}_{part}", [*flags, *known[name].flags], macros)

        def layer():
            return self.compiler.compile(
                sources,
                self.build_temp,
                ext.define_macros,
                ext.include_dirs,
                self.debug,
                ext.extra_compile_args,
            )

        sources, ext.sources = ext.sources, []
        tables = dict.fromkeys(table for of in uses.values() for table in of)
        jobs = [
            partial(kernels, *table) for table in sorted(tables, key=lambda table: LONGEST.index(table[2]))
        ]
        jobs += [partial(self.compile, name, "common", flags, compiled) for name in ("cpu.c", "dispatch.c")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for objects in pool.map(lambda job: job(), [*jobs, layer]):
                ext.extra_objects += objects
        super().build_extension(ext)

    def gnu(self, flags):
        """Flags of gcc and clang, as the compiler takes them."""
        return [f"/clang:{flag}" for flag in flags] if self.compiler.compiler_type == "msvc" else flags

    def compile(self, source, folder, flags, macros):
        """Object files of one source of src/, in a folder of their own."""
        return self.compiler.compile(
            [str(SRC / source)], str(Path(self.build_temp, folder)), macros, [str(SRC)],
            extra_postargs=self.gnu(flags),
        )  # fmt: skip

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
    """The one extension; a class, since numpy and Cython exist only in the build environment."""
    import numpy
    from Cython.Build import cythonize

    ext = Extension(
        "fastattn._engine.core._core",
        ["fastattn/_engine/core/_core.pyx"],
        include_dirs=[str(SRC), numpy.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), *TRACE],
        depends=[str(path) for path in SRC.iterdir()],
        extra_compile_args=[*SANITIZED],
        extra_link_args=[*SANITIZED],
    )
    [ext] = cythonize([ext], build_dir="build/cython")
    ext.optional = not REQUIRED  # here, since cythonize makes a new Extension and forgets this
    return [ext]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
