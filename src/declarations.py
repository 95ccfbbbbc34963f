"""Makes what Cython reads of the C interface from its headers, in fastattn/_engine/core/.

_core.pxd has the declarations. kernel_tasks.pxi has the tasks of a loop that do nothing but call a kernel:
``_linear_task`` calls `run` of fa_linear_kernels, ``_rows_logits_task`` `logits_run` of fa_rows_kernels.
setup.py runs this before each build; alone: ``python src/declarations.py``.
"""

import re
from pathlib import Path

SRC = Path(__file__).parent
CORE = SRC.parent / "fastattn/_engine/core"
TASKS = CORE / "kernel_tasks.pxi"
HEADERS = (
    "interface/arrays.h",
    *re.findall(
        '^#include "(interface/.*)"$', (SRC / "fastattn.h").read_text(encoding="utf-8"), re.MULTILINE
    ),
    "fastattn.h",
    "lists.h",
)
TYPES = "int8_t, int32_t, int64_t, uint8_t, uint64_t"
POINTER = " noexcept nogil"  # what Cython assumes of a function, but not of a pointer to one


def fields(declaration):
    """The fields of `const char *x, *y`, each with its type; or one pointer to a function."""
    declaration = " ".join(declaration.split()).replace("(void)", "()").replace("*const ", "*")
    if "(" in declaration:
        return [declaration + POINTER * ("(*" in declaration)]
    kind, names = re.fullmatch(r"((?:const |unsigned )*\w+ )(.*)", declaration).groups()
    return [kind + name for name in names.split(", ")]


def declarations(header):
    """The lines of a header as Cython has them."""
    text = re.sub(r"/\*.*?\*/|\\\n", "", (SRC / header).read_text(encoding="utf-8"), flags=re.DOTALL)
    sizes = re.findall(r"^FA_SIZE\((\w+)", (SRC / "tuning.inc").read_text(encoding="utf-8"), re.MULTILINE)
    text = text.replace('#include "tuning.inc"', "".join(f"int64_t {name};" for name in sizes))
    constants = re.findall(r"^#define (\w+) +\d", text, re.MULTILINE)
    if constants:
        yield from ("enum:", *(f"    {name}" for name in constants))
    text = re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    for kind, body, name, one in re.findall(
        r"typedef (enum|struct) \{(.*?)\} (\w+);|([^;{}]+);", text, re.DOTALL
    ):
        if one:
            (declaration,) = fields(re.sub(r"^\s*extern ", "", one))
            yield re.sub("^typedef ", "ctypedef ", declaration)
            continue
        yield f"ctypedef {kind} {name}:"
        parts = (
            body.split(",")
            if kind == "enum"
            else [x for f in body.split(";") if f.strip() for x in fields(f)]
        )
        yield from (f"    {part.strip()}" for part in parts if part.strip())


# The parameters of kernels that are tasks as they are: of so many rows, or with a plan.
BY_ROWS = r"const (\w+) \*, int64_t begin, int64_t end(, void \*scratch)?"
PLANNED = r"const (\w+) \*,( const \w+ \*,)? int64_t \w+, void \*scratch"


def tasks():
    """The functions of such tasks that the .pxi files use and do not define."""
    text = " ".join(" ".join((SRC / header).read_text(encoding="utf-8") for header in HEADERS).split())
    used = " ".join(path.read_text(encoding="utf-8") for path in CORE.glob("*.pxi") if path != TASKS)
    kernels = [
        (family, *kernel)
        for table, family in re.findall(r"struct \{([^{}]*)\} fa_(\w+)_kernels;", text)
        for kernel in re.findall(r"void \(\*(\w+)\)\((.*?)\);", table)
    ]
    for family, kernel, parameters in kernels:
        name = f"_{family}_{kernel}".removesuffix("_run") + "_task"
        rows, planned = (re.fullmatch(form, parameters) for form in (BY_ROWS, PLANNED))
        if not re.search(rf"\b{name}\b", used) or f"void {name}(" in used or not (rows or planned):
            continue
        yield f"cdef void {name}(Loop *loop, int64_t task, void *scratch) noexcept nogil:"
        args = f"<const {(rows or planned)[1]} *>loop.args"
        if rows:
            yield "    cdef int64_t begin = task * loop.step"
            args += f", begin, min(loop.n, begin + loop.step){', scratch' if rows[2] else ''}"
        else:
            args += f", <{planned[2].strip(' ,')}>loop.plan" if planned[2] else ""
            args += ", task, scratch"
        yield f"    loop.kernels.{family}.{kernel}({args})"


def make():
    """Write the files that are not as before."""
    lines = ['"""Made by src/declarations.py."""', f"from libc.stdint cimport {TYPES}"]
    for header in HEADERS:
        lines += [f'cdef extern from "{header}" nogil:', *(f"    {line}" for line in declarations(header))]
    for path, made in (CORE / "_core.pxd", lines), (TASKS, ["# Made by src/declarations.py.", *tasks()]):
        text = "\n".join([*made, ""])
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make()
