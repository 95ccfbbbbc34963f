"""Builds the extension: src/kernels.c once per instruction set and lane type, each with its own flags.

Optional: without a compiler the package installs and runs on NumPy. Environment:

FASTATTN_REQUIRE_EXT=1        fail instead
FASTATTN_WERROR=1             warnings in src/ are errors
FASTATTN_EMULATE_BF16_DOT=1   for tests: dot products of bfloat16 pairs on every instruction set, spelled out
                              where there is no instruction for them
FASTATTN_ISAS=avx2,avx512      compile no other instruction sets but these, and generic
FASTATTN_TRACE=1              note which thread runs which task when, for tools/threads.py
FASTATTN_SANITIZE=address,undefined  look for such errors at run time: tests/sanitize.sh
"""

import os
import platform
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

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


def instruction_sets():
    """(name, flags, name of the set with its double kernels) of isa.inc for this architecture, best first."""
    machine = platform.machine().lower().replace("arm64", "aarch64").replace("amd64", "x86_64")
    line = r'^FA_ISA\((\w+), (\w+), "(.*)", (\w+)\)$'
    lines = re.findall(line, (SRC / "isa.inc").read_text(), re.MULTILINE)
    return [
        (name, flags.split(), doubles) for name, arch, flags, doubles in lines if arch in (machine, "any")
    ]


class BuildExt(build_ext):
    """One source under several flags, as far as the compiler takes them; then the extension as usual."""

    def build_extension(self, ext):
        """Compile the objects of src/ and hand them to the linker; then the Cython layer as usual."""
        werror = ["-Werror"] if os.environ.get("FASTATTN_WERROR") == "1" else []
        flags_of = {name: flags for name, flags, _ in instruction_sets() if self.takes(flags)}
        wanted = (os.environ.get("FASTATTN_ISAS") or ",".join(flags_of)).split(",")
        known = [(name, doubles) for name, _, doubles in instruction_sets() if name in flags_of]
        isas = [(name, doubles) for name, doubles in known if name in (*wanted, "generic")]
        if not isas:
            raise CompileError("no working C compiler (or none that takes GNU C flags)")

        def kernels(job):
            name, lane = job
            flags = flags_of[name]
            macros = [("FA_ISA_NAME", name), (f"FA_LANE_{lane}", "1")]
            return self.compile("kernels.c", f"{name}-{lane}", [*FLAGS, *SANITIZED, *werror, *flags], macros)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # seconds of gcc each, a process of its own
            jobs = [(name, "F32") for name, _ in isas] + [(name, "F64") for name in dict(map(reversed, isas))]
            for objects in pool.map(kernels, jobs):
                ext.extra_objects += objects
        compiled = [("FA_COMPILED", " ".join(f"X({name},{doubles})" for name, doubles in isas))]
        for source in ("cpu.c", "dispatch.c"):
            ext.extra_objects += self.compile(source, "common", [*FLAGS, *SANITIZED, *werror], compiled)
        super().build_extension(ext)

    def compile(self, source, folder, flags, macros):
        """Object files of one source of src/, in a folder of their own."""
        return self.compiler.compile(
            [str(SRC / source)], str(Path(self.build_temp, folder)), macros, [str(SRC)], extra_postargs=flags,
            depends=[str(path) for path in SRC.iterdir()],
        )  # fmt: skip

    def takes(self, flags):
        """Whether the compiler takes these flags."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("int main(void) { return 0; }\n")
            try:
                self.compiler.compile([str(source)], folder, extra_postargs=[*flags, "-Werror"])
            except CompileError:
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
        extra_compile_args=["-g0", "-pthread", *SANITIZED],
        extra_link_args=["-pthread", *SANITIZED],
    )
    [ext] = cythonize([ext], build_dir="build/cython")
    ext.optional = not REQUIRED  # here, since cythonize makes a new Extension and forgets this
    return [ext]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
