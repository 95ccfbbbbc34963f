"""Makes what Cython reads of the C interface from its headers, in fastattn/_engine/core/.

_core.pxd has the declarations. kernel_tasks.pxi has the tasks of a loop that do nothing but call a kernel:
``_linear_task`` calls `run` of fa_linear_kernels, ``_rows_logits_task`` `logits_run` of fa_rows_kernels.
fills.pxi has functions that fill structs of arguments: ``_fill_rowwise`` a fa_rowwise_args from a
RowwiseArgs. They set what both have: numbers, and arrays whose comment begins with elements and axes, as
``lanes (batch, heads_q)`` does.
setup.py runs this before each build; alone: ``python src/declarations.py``.
"""

import ast
import re
from itertools import groupby
from pathlib import Path

SRC = Path(__file__).parent
CORE = SRC.parent / "fastattn/_engine/core"
TASKS, FILLS = CORE / "kernel_tasks.pxi", CORE / "fills.pxi"
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


def written():
    """The text of the Cython layer, but for what is made here."""
    paths = [CORE / "_core.pyx", *(path for path in CORE.glob("*.pxi") if path not in (TASKS, FILLS))]
    return " ".join(path.read_text(encoding="utf-8") for path in paths)


def tasks():
    """The functions of such tasks that the .pxi files use and do not define."""
    text = " ".join(" ".join((SRC / header).read_text(encoding="utf-8") for header in HEADERS).split())
    used = written()
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


NUMBERS = ("int", "int64_t", "uint64_t", "double", "fa_dtype")
TYPES_OF = {"lanes": "lane", "float64": "cnp.NPY_DOUBLE", "int64": "cnp.NPY_INT64", "bool": "cnp.NPY_BOOL"}
# What the comment of an array says first: its elements and axes; with what it is given, or has another type.
# "rows" are contiguous and, as "float", of any floating type; "tokens" are rows of what a _Channels has.
SPEC = (
    r"(tokens|rows|lanes|float64|int64|bool|float) \(((?:[^()]|\([^()]*\))*)\)(?=[,:;]|$)(, contiguous)?"
    r"(?:, with (\w+)|, or int8 with (\w+)|, of (\w+) or lanes)?"
)


def kinds():
    """The constants of each enum of kinds."""
    text = " ".join((SRC / header).read_text(encoding="utf-8") for header in HEADERS)
    enums = re.findall(r"typedef enum \{([^{}]*)\} (\w+_kind);", text)
    return {name: re.findall(r"\bFA_\w+", re.sub(r"/\*.*?\*/", "", body)) for body, name in enums}


# What has names in Python, and the dictionaries with their numbers.
NAMED = {"fa_activation": "_ACTIVATIONS", **dict.fromkeys(kinds(), "_KINDS")}


def structs():
    """The fields of each struct: name, type, and the match of SPEC in the comment, or None."""
    found = {}
    for header in HEADERS:
        text = (SRC / header).read_text(encoding="utf-8")
        for body, struct in re.findall(r"typedef struct \{\n(.*?)^\} (\w+);", text, re.DOTALL | re.MULTILINE):
            body = re.sub(r"^ */\*[^;]*?\*/\n", "", body, flags=re.MULTILINE)
            found[struct] = [
                (*one.replace("*", "* ").rsplit(maxsplit=1)[::-1], re.match(SPEC, " ".join(comment.split())))
                for field, comment in re.findall(r"([^;{}/#]+);(?: */\* (.*?)\*/)?", body, re.DOTALL)
                if "(" not in field
                for one in fields(field)
            ]
    return found


def classes():
    """The fields of each argument object, and whether they may be None."""
    found = {}
    for path in sorted((SRC.parent / "fastattn/_args").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                own = {
                    x.target.id: ast.unparse(x.annotation) for x in node.body if isinstance(x, ast.AnnAssign)
                }
                inherited = [found.get(ast.unparse(base), {}) for base in node.bases]
                found[node.name] = {name: x for each in (*inherited, own) for name, x in each.items()}
    return found


def class_of(struct):
    """The argument object of a struct: RowwiseArgs of fa_rowwise_args."""
    return "".join(word.title() for word in struct[3:].removesuffix("_args").split("_")) + "Args"


# What the .pxi files set.
BY_HAND = {
    "fa_attention_args": ("k", "v", "k_scale", "v_scale", "sigmoid_bias"),
    "fa_backward_args": ("dbias", "dbias_diagonals"),
    "fa_conv_args": ("x", "begins"),
    "fa_deformable_args": ("levels",),
    "fa_recurrent_args": ("log_decay", "begins"),
    "fa_recurrent_backward_args": ("dlog_decay",),
    "fa_scan_args": ("begins",),
    "fa_scan_grad_args": ("drates", "dskip", "dbias", "db", "dc"),
    "fa_update_args": ("parameters", "sums"),
}


class Fill:
    """The function that fills one of the `known` structs, from one of the argument `objects`."""

    def __init__(self, struct, known, objects):
        self.known, self.objects = known, objects
        self.sizes, self.parameters, self.numbers, self.arrays = {}, [], [], []
        self.count = 0  # of batch tables
        self.lane = None  # the place of the type that decides the type of lanes
        self.find(struct, "a")
        self.channels = any(spec and spec[1] == "tokens" for _, _, spec in known[struct])
        if self.channels:
            self.lane = f"{self.sizes['channels'].rpartition('.')[0]}.x.dtype"
        self.begins = self.lane
        self.fill(struct, class_of(struct), "a", "args", "    ")

    def find(self, struct, path):
        """Find numbers and arrays by their names, first the struct's own, then of structs in it."""
        for name, kind, spec in self.known[struct]:
            if kind in (*NUMBERS, "fa_array"):
                self.sizes.setdefault(name, f"{path}.{name}")
            if name == "dtype" or (path != "a" and spec and spec[1] == "rows"):
                self.lane = self.lane or f"{path}.{name}{'.dtype' * (name != 'dtype')}"
        for name, kind in self.inner(struct):
            self.find(kind, f"{path}.{name}")

    def inner(self, struct):
        """The structs in it."""
        return [
            (name, kind) for name, kind, _ in self.known[struct] if kind in self.known and kind != "fa_array"
        ]

    def size(self, axis):
        """A number of elements: of the struct's sizes, or of parameters."""

        def path(match):
            if match[0] != "max" and match[0] not in self.sizes:
                self.sizes[match[0]] = match[0]
                self.parameters.append(match[0])
            return self.sizes.get(match[0], match[0])

        return re.sub(r"[a-z]\w*", path, axis).replace("/", "//")

    def fill(self, struct, of, path, args, indent):
        """Add the lines of a struct, from the object `args` of a class."""
        fields, own, by_hand = self.known[struct], self.objects[of], BY_HAND.get(struct, ())
        for name, kind, _ in fields:
            value = f"{NAMED[kind]}[{args}.{name}]" if kind in NAMED else f"{args}.{name}"
            if name in own and (kind in NAMED or (kind in NUMBERS and "None" not in own[name])):
                (self.numbers if args == "args" else self.arrays).append(f"{indent}{path}.{name} = {value}")
        self.count += sum(kind == "fa_array" for _, kind, _ in fields)
        for name, kind, spec in fields:
            number = kind in NAMED or (kind in NUMBERS and "None" not in own.get(name, ""))
            elsewhere = kind in self.known or name in by_hand
            if name in own and not (self.checked(spec) or number or elsewhere):
                raise SystemExit(f"{struct}: nothing fills {name}, {kind}: see SPEC, NUMBERS and BY_HAND")
        arrays = [x for x in fields if x[2] and x[0] in own and x[0] not in by_hand]
        guards = {spec[4] for _, _, spec in arrays}
        alone = [name for name, _, spec in arrays if name in guards or spec[1] == "float"]
        for guard, some in groupby(arrays, lambda x: x[2][4] or x[0] * (x[0] in alone)):
            if guard:
                self.arrays.append(f"{indent}if {args}.{guard} is not None:")
            for each in some:
                self.arrays += [
                    indent + "    " * bool(guard) + line for line in self.array(path, args, *each)
                ]
        for name, kind in self.inner(struct):
            if kind.endswith("_args"):
                continue
            if kind[3:] not in own:
                self.fill(kind, of, f"{path}.{name}", args, indent)
                continue
            self.arrays += [f"{indent}{kind[3:]} = args.{kind[3:]}", f"{indent}if {kind[3:]} is not None:"]
            self.fill(kind, class_of(kind), f"{path}.{name}", kind[3:], indent + "    ")

    def checked(self, spec):
        """`spec`, if all that it says is understood."""
        if spec and re.match(r", (?!optional|\w's dtype)", spec.string[spec.end() :]):
            raise SystemExit(f"what follows the axes is not known: {spec.string}")
        return spec

    def array(self, path, args, name, kind, spec):
        """The lines of one array."""
        elements, axes, contiguous, _, scale, own = spec.groups()
        named = re.split(r", (?![^(]*\))", axes)  # max(heads_q, heads) is one
        axes = [self.size(axis) for axis in named if axis != "any"]
        to, array, own_type = f"{path}.{name}", f"{args}.{name}", self.sizes.get(f"{name}_dtype", "a.dtype")
        what = f'"{name}", {array}'
        if kind == "fa_array":
            batch = {"tokens": axes[:0]}.get(elements, ["sequences"] if self.channels else ["batch"])
            if named[: len(batch)] != batch or len(axes) > 3 + len(batch):
                raise SystemExit(f"expected {batch} and three axes at most: {spec.string}")
            axes, own_type = axes[len(batch) :], f"{to}.dtype"
            if self.channels:
                method = "set_tokens" if elements == "tokens" else "set"
                rows = axes if elements != "tokens" else [self.size(spec[2])]
                dtype = f"_lane({self.lane})" if elements == "lanes" else self.lane
                yield f"channels.{method}({', '.join((f'&{to}', what, dtype, *rows))})"
            elif own:
                types = f"{self.sizes[own]}.dtype, lane"
                yield f"_set_gradient(tables, &{to}, {what}, {types}, {', '.join(axes)})"
            elif elements == "rows":
                axes += [f"{args}.{scale} is not None", "True"] * bool(scale)
                yield f"tables.set_rows(&{to}, {what}, {', '.join(axes)})"
            else:
                if elements == "float":
                    yield f"{to}.dtype = _dtype({array})"
                type_num = TYPES_OF.get(elements, f"cnp.PyArray_TYPE({array})")
                more = ["1"] * (3 - len(axes)) + ["True"] if contiguous else []
                yield f"tables.set({', '.join((f'&{to}', what, type_num, str(len(axes)), *axes, *more))})"
        elif kind.endswith("char *"):
            row = self.sizes.get(f"{name}_row", "a.row")
            type_of = f"_lane({self.lane})" if elements == "lanes" else own_type
            yield f"{to} = _rows({what}, {', '.join(axes)}, {type_of}, &{row})"
        else:
            cast = "" if "void" in kind else f"<{kind}>"
            size = " * ".join(f"({axis})" for axis in axes) or f"{array}.size"
            yield f"{to} = {cast}_data({what}, {size}, {TYPES_OF[elements]})"
        if elements == "rows" and self.lane is None:
            self.lane = own_type
            yield f"lane = _lane_type({own_type})"

    def text(self, name, struct):
        """Lines of the function."""
        parameters = "".join(f", int64_t {size}" for size in self.parameters)
        tables = ", _Tables tables" * any("tables." in line for line in self.arrays)
        tables += ", _Channels channels" * self.channels
        yield f"cdef int {name}({struct} *a, args{tables}{parameters}) except -1:"
        lines = [*self.numbers, *self.arrays]
        if any(re.search(r"\blane\b", line) for line in lines):
            yield f"    cdef int lane{f' = _lane_type({self.begins})' if self.begins else ''}"
        yield from (*lines, "    return 0")


def dtypes():
    """Types of elements by the names that NumPy has for them: FA_BF16 is bfloat16."""
    text = (SRC / "interface/arrays.h").read_text(encoding="utf-8")
    names = re.findall(r"FA_(\w+)", re.search(r"typedef enum \{([^{}]*)\} fa_dtype;", text)[1])
    spelled = [re.sub(r"f(?=\d)", "float", re.sub(r"i(?=\d)", "int", x.lower())) for x in names]
    pairs = [f'"{name}": FA_{x}' for name, x in zip(spelled, names, strict=True)]
    return f"cdef dict _DTYPES = {{{', '.join(pairs)}}}"


def fills():
    """The kinds by their names; functions that fill structs, and how many batch tables these need."""
    known, objects, used = structs(), classes(), written()
    yield dtypes()
    names = [f'"{name[3:].lower()}": {name}' for some in kinds().values() for name in some]
    yield f"cdef dict _KINDS = {{{', '.join(names)}}}"
    for struct in known:
        name = struct[3:].removesuffix("_args")
        if f"_fill_{name}(" in used:
            fill = Fill(struct, known, objects)
            if fill.count:
                yield from ("cdef enum:", f"    {name.upper()}_ARRAYS = {fill.count}")
            yield from fill.text(f"_fill_{name}", struct)


def make():
    """Write the files that are not as before."""
    lines = ['"""Made by src/declarations.py."""', f"from libc.stdint cimport {TYPES}"]
    for header in HEADERS:
        lines += [f'cdef extern from "{header}" nogil:', *(f"    {line}" for line in declarations(header))]
    made_here = "# Made by src/declarations.py."
    for path, made in (
        (CORE / "_core.pxd", lines),
        (TASKS, [made_here, *tasks()]),
        (FILLS, [made_here, *fills()]),
    ):
        text = "\n".join([*made, ""])
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make()
