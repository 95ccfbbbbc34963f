"""Makes fastattn/_engine/core/_core.pxd, what Cython reads of the C interface, from its headers.

setup.py runs it before each build; alone: ``python src/declarations.py``.
"""

import re
from pathlib import Path

SRC = Path(__file__).parent
MADE = SRC.parent / "fastattn/_engine/core/_core.pxd"
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


def make():
    """Write the file, if it is another one than before."""
    lines = ['"""Made by src/declarations.py."""', f"from libc.stdint cimport {TYPES}"]
    for header in HEADERS:
        lines += [f'cdef extern from "{header}" nogil:', *(f"    {line}" for line in declarations(header))]
    text = "\n".join([*lines, ""])
    if not MADE.exists() or MADE.read_text(encoding="utf-8") != text:
        MADE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make()
