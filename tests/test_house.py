"""The order of the package: who may import whom, one name for one thing; the plan and C heads are true."""

import ast
import importlib
import inspect
import pickle
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import fastattn
from fastattn import flash_attn, functional, grad, layers, masks, models, ops, plot, positions, train
from fastattn._args.options import SamplingOptions
from fastattn._args.words import OTHER_NAMES
from fastattn._undo import Undo
from fastattn.flash_attn import bert_padding
from fastattn.flash_attn.layers import rotary
from fastattn.layers._attention_parameters import CallOptions
from fastattn.layers._decoder_layer import DecoderOptions
from fastattn.models._classify import PredictOptions
from fastattn.models._encode_calls import EncodeOptions

PACKAGE = Path(fastattn.__file__).parent
ROOT = Path(__file__).parents[1]
PLAN = ROOT.joinpath("docs/dev/architecture.md").read_text(encoding="utf-8")
FILES = [path for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyx")]
NAMES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES}
MODULES = sorted(name.removesuffix(".__init__") for name in NAMES if not name.endswith("__main__"))
PUBLIC = (
    fastattn, functional, functional.feature_maps, grad, layers, masks, models, ops, plot, positions, train,
)  # fmt: skip


def section(title):
    """The text of one section of the plan."""
    return PLAN.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@cache
def floors():
    """The plan's list of floors, from the ground up: the modules of each, a folder standing for all in it."""
    lists = re.findall(r"^\d+\. (.*?): ", section("Floors"), re.MULTILINE | re.DOTALL)
    return [re.findall(r"`([\w./]+)`", names) for names in lists]


def floor_of(module):
    path = module.replace("fastattn.", "", 1).replace(".", "/") if module != "fastattn" else "__init__"
    found = [
        (len(name), floor)
        for floor, names in enumerate(floors())
        for name in names
        if path == name or (name.endswith("/") and f"{path}/".startswith(name))
    ]
    assert found, f"{module} is on no floor of docs/dev/architecture.md"
    return max(found)[1]  # the longest name that fits


@cache
def imports(module):
    """All that `module` imports within the package."""
    path = source(module)
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":  # Cython
        return set(re.findall(r"^\s*(?:from|import) (fastattn[\w.]*)", text, re.MULTILINE))
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return {name for name in found if name.partition(".")[0] == "fastattn"}


def source(module):
    """Find the file of `module`."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"), path.with_suffix(".pyx"))
    return next(file for file in files if file.exists())


ABOVE_ALL = ("fastattn._bench", "fastattn._cli_")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    """Imports for type checkers, too: a floor knows nothing of those above it."""
    if module.startswith(ABOVE_ALL):
        return
    own = floor_of(module)
    lazy = [("fastattn", f"fastattn.{name}") for name in ("models", "train")]  # imported when first used
    wrong = [o for o in imports(module) if floor_of(o) > own and (module, o) not in lazy]
    assert wrong == [], f"{source(module)} imports from above, by the floors of docs/dev/architecture.md"


def test_no_circle_of_imports():
    """Imports within functions and for type checkers count."""
    graph = {module: imports(module) for module in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises a CycleError that names the circle


SETTINGS = {
    "_args", "_args.blocks", "_args.dtypes", "_args.errors", "_args.types", "_args.values",
    "_args.weight_types", "_engine", "_engine.beside_torch", "_engine.core", "_engine.core._core",
    "_engine.cpus", "_engine.settings", "_version",
}  # fmt: skip


def test_an_import_loads_the_settings_alone(python):
    """All else is loaded when it is first used, and then is there as an attribute."""
    code = "import sys, numpy; before = {*sys.modules}; import fastattn; print(*({*sys.modules} - before))"
    found = {name for name in python(code).stdout.split() if "cython" not in name}
    assert {name.partition(".")[2] for name in found if name.startswith("fastattn.")} <= SETTINGS
    packages = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    assert packages - {"numpy"} == {"fastattn"}  # of NumPy, some modules load late
    names = set(fastattn.__all__) - {"__version__"}
    code = f"import fastattn; print(*(getattr(fastattn, name).__name__ for name in {sorted(names)}))"
    assert {name.rpartition(".")[2] for name in python(code).stdout.split()} == names


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [("", "MultiheadAttention", "layers.MultiHeadAttention"), ("", "flash_attn_func", "attention"),
     ("", "flash_attention", "attention"), ("", "layer", "layers"),
     ("", "sparsemax_atention", "functional.sparsemax_attention"), ("", "layer_norm", "ops.layer_norm"),
     ("", "Layers", "layers"), ("layers", "MultiheadAttention", "layers.MultiHeadAttention"),
     ("functional", "atention", "attention"), ("masks", "casual", "masks.causal"),
     ("models", "laod", "models.load"), ("positions", "aliby_slopes", "positions.alibi_slopes"),
     ("grad", "layernorm", "grad.layer_norm"), ("ops", "layernorm", "ops.layer_norm"),
     ("train", "Adamw", "train.AdamW")],
)  # fmt: skip
def test_unknown_names_are_told_the_nearest(module, name, expected):
    module = f"fastattn.{module}".rstrip(".")
    message = rf"^module '{module}' has no attribute '{name}'; expected fastattn.{expected}$"
    with pytest.raises(AttributeError, match=message) as error:
        getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match=message):
        raise pickle.loads(pickle.dumps(error.value))
    if module != "fastattn.ops":  # no package: Python's own error names the file
        with pytest.raises(ImportError, match=message):
            exec(f"from {module} import {name}")


def test_to_ask_for_a_name_imports_no_module(python):
    """Nor do the names that Python and its tools ask for, or a name that is none, raise another error."""
    asked = ["something_else", "MultiheadAttention", "__wrapped__", "_private", "a.b", ""]
    code = f"""
import sys, fastattn, fastattn._args.names, fastattn.ops
before = {{name for name in sys.modules if name.startswith("fastattn")}}
for module in (fastattn, fastattn.ops):
    assert [getattr(module, name, 0) for name in {asked}] == [0] * {len(asked)}
print({{name for name in sys.modules if name.startswith("fastattn")}} - before)
"""
    assert python(code).stdout.strip() == "set()"


def test_a_module_s_name_is_not_that_of_a_function():
    """A statement `import fastattn.x as x` then always gives a module."""
    public = {f"{module.__name__}.{name}" for module in PUBLIC for name in module.__all__}
    functions = {name for name in public if not inspect.ismodule(find(name))}
    assert functions & set(MODULES) == set()


@pytest.mark.parametrize("name", [name for name in MODULES if "._" not in name])
def test_completion_shows_what_is_public(name):
    """No import of the module is shown. Names with an underscore are hidden from it anyway."""
    if name in ("fastattn.torch", "fastattn.dask"):  # elsewhere, where they must be there
        pytest.importorskip(name.partition(".")[2])
    module = importlib.import_module(name)
    shown, public = ({n for n in names if n[0] != "_"} for names in (dir(module), module.__all__))
    assert shown == public


def test_errstate_is_no_decorator():
    """In NumPy 1.26 one has one state for all threads: `quiet` is made anew in each call."""
    sources = {
        path: path.read_text(encoding="utf-8") for path in Path(fastattn.__file__).parent.rglob("*.py")
    }
    assert [str(path) for path, text in sources.items() if "@np.errstate" in text] == []


def find(name):
    parent, _, last = name.rpartition(".")
    return vars(sys.modules[parent]).get(last) or getattr(sys.modules[parent], last)


def signatures():
    """(where, parameter) of all that is public."""
    for module in PUBLIC:
        for name in module.__all__:
            x = getattr(module, name)
            inner = vars(x).items() if inspect.isclass(x) else ()
            methods = [(f"{name}.{n}", f) for n, f in inner if n == "__call__" or n[0] != "_"]
            for where, function in [(name, x), *methods]:
                if callable(function) and not inspect.ismodule(function):
                    try:
                        parameters = inspect.signature(function).parameters
                    except ValueError:  # of what is written in C
                        continue
                    yield from ((f"{module.__name__}.{where}", parameter) for parameter in parameters)


def glossary_rows():
    """(names of an argument, names that it must not have) of the plan's table."""
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|$", section("Names of arguments"), re.MULTILINE)
    return [tuple(re.findall(r"`(\w+)`", cell) for cell in row) for row in rows]


def glossary():
    """{name of an argument: names that it must not have}."""
    return {name: never for names, never in glossary_rows() for name in names}


def test_one_name_for_one_thing():
    forbidden = {name for names in glossary().values() for name in names}
    wrong = [
        f"{where}({name}=)" for where, name in signatures() if name in forbidden or name.startswith("n_")
    ]
    assert wrong == [], "docs/dev/architecture.md says how these arguments are called"
    assert len(forbidden) > 10


def test_errors_know_the_names_that_are_never_used():
    """A caller who passes one is told the right one."""
    for row, never in glossary_rows():
        for word in never:
            found = any(word in OTHER_NAMES.get(name, ()) for name in row)
            assert found, f"OTHER_NAMES of fastattn/_args/words.py lacks {word} for {row}"
    options = (CallOptions, DecoderOptions, SamplingOptions, EncodeOptions, PredictOptions)
    known = {name for kind in options for name in kind.__annotations__} | {name for _, name in signatures()}
    assert set(OTHER_NAMES) <= known


def test_options_are_those_of_attention():
    """One definition: users read its names, and all defaults are those of the check."""
    checked = inspect.signature(fastattn._args.attention.attention_args).parameters
    seen = inspect.signature(fastattn.attention).parameters
    options = set(fastattn._args.options.AttentionOptions.__annotations__)
    assert set(seen) == {"q", "k", "v", "return_lse", "stats", "more", "others", *options}
    assert set(checked) == {"names", "scales", "cached", *seen} - {"more", "others"}
    for name in (*options, "return_lse", "stats"):
        assert seen[name].default == checked[name].default
    types = fastattn._args.options.AttentionOptions.__annotations__
    plain = {name: getattr(types[name], "__forward_arg__", types[name]) for name in options}
    assert {name: seen[name].annotation.replace("NDArray[Any]", "Array") for name in options} == plain


FLASH = (flash_attn, bert_padding, rotary)  # whose arguments have its names


@pytest.mark.parametrize("module", [*PUBLIC, *FLASH], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    "x", [None, "x", -1, np.ones((1, 2, 4, 8), np.float32)], ids=lambda x: type(x).__name__
)
def test_no_error_of_a_check_lacks_the_function_s_name(module, x):
    """Who calls a check puts it there: `errors.named`."""
    for function in (getattr(module, name) for name in module.__all__):
        if not inspect.isfunction(function) or module is models:  # whose load reads folders
            continue
        parameters = inspect.signature(function).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        message = ""
        try:
            made = function(*(x for _ in needed))
            if isinstance(made, Undo):
                made.undo()
        except Exception as error:
            message = str(error)
        assert not message.startswith("():"), function


# Options of attention that a function does not take, besides return_lse and stats.
NONE = frozenset()
NO_PLACES = {"mask", "causal", "window", "kv_lengths", "q_offset", "row_ranges", "bias", "alibi_slopes"}
REFUSED = {
    "additive_attention": {"sinks"},
    "attention_backward": {"out"},
    "attention_weights": {"out", "num_threads", "backend"},
    "disentangled_attention": {"softcap"},
    "entmax15_attention": {"sinks"},
    "explain": NONE,
    "gated_attention": NONE,
    "selected_attention": {"mask", "bias", "alibi_slopes", "row_ranges"},
    "sigmoid_attention": {"sinks"},
    "sparsemax_attention": {"sinks"},
    "talking_heads_attention": {"sinks"},
    "top_k_attention": {"sinks"},
    "varlen_attention_backward": NO_PLACES - {"causal", "window", "alibi_slopes"} | {"out"},
}


# The few that take dropout.
DROPOUT = {"dropout", "seed"}
TAKE_DROPOUT = {"attention_backward", "attention_weights", "explain", "varlen_attention_backward"}

# The few that take int8 keys and values.
INT8 = {"k_scale", "v_scale"}
TAKES_INT8 = {
    "attention_weights": {"k_scale"},
    "explain": INT8,
    "selected_attention": INT8,
    "sigmoid_attention": INT8,
}


# The few that take pages, or products of int8.
PAGES = {"block_table", "products"}
TAKE_PAGES = {"explain"}


@pytest.mark.parametrize(("name", "scales"), (TAKES_INT8 | {"attention": INT8}).items())
def test_messages_know_who_takes_int8(name, scales):
    function = getattr(fastattn, name, None) or getattr(functional, name)
    x = np.ones((1, 2, 4, 8), np.float32)
    wrong = {n: x > 0 for n in ("k", "v", "selected") if n in inspect.signature(function).parameters}
    with pytest.raises(TypeError) as caught:
        function(x, **wrong)
    assert set(re.findall(r"\w_scale", str(caught.value))) == scales


@pytest.mark.parametrize("name", REFUSED)
def test_every_function_refuses_the_options_that_it_does_not_take(name):
    function = getattr(fastattn, name, None) or getattr(functional, name)
    parameters = inspect.signature(function).parameters
    options = re.findall(r"\w+", parameters["options"].annotation)[1]
    taken = set(getattr(fastattn._args.options, options).__annotations__)
    everything = set(fastattn._args.options.AttentionOptions.__annotations__)
    refused = REFUSED[name] | (INT8 - TAKES_INT8.get(name, NONE))
    refused |= NONE if name in TAKE_DROPOUT else DROPOUT
    refused |= NONE if name in TAKE_PAGES else PAGES
    assert everything - taken == refused
    x = np.ones((1, 2, 4, 8), np.float32)
    needed = {n: x for n, p in parameters.items() if p.default is p.empty and n != "options"}
    needed |= {n: 1 for n in needed if n in ("top_k", "num_buckets", "kernel")}
    for option in refused - set(parameters):
        with pytest.raises(TypeError, match=rf"^{name}\(\): {option} is not an argument"):
            function(**needed, **{option: None})


def test_there_is_no_other_function_with_options():
    functions = {name for name in functional.__all__ if inspect.isfunction(getattr(functional, name))}
    with_options = {n for n in functions if "options" in inspect.signature(getattr(functional, n)).parameters}
    assert with_options == set(REFUSED) - {"attention_weights", "explain"}, "REFUSED of tests/test_house.py"
