"""The order of the package: who may import whom, one name for one thing, a plan that names real files."""

import ast
import importlib
import inspect
import pkgutil
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fastattn
from fastattn import functional, layers, masks, models, ops, plot, positions

PACKAGE = Path(fastattn.__file__).parent
PLAN = Path(__file__).parents[1].joinpath("docs/architecture.md").read_text(encoding="utf-8")
MODULES = sorted(
    m.name for m in pkgutil.walk_packages([str(PACKAGE)], "fastattn.") if "__main__" not in m.name
)
PUBLIC = (fastattn, functional, functional.feature_maps, layers, masks, models, ops, plot, positions)


def section(title):
    """The text of one section of the plan."""
    return PLAN.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def floors():
    """The plan's list of floors, from the ground up: the modules of each, a folder standing for all in it."""
    lines = re.findall(r"^\d+\. (.*?): ", section("Floors"), re.MULTILINE)
    return [re.findall(r"`([\w./]+)`", line) for line in lines]


def floor_of(module):
    path = module.replace("fastattn.", "", 1).replace(".", "/") if module != "fastattn" else "__init__"
    found = [
        (len(name), floor)
        for floor, names in enumerate(floors())
        for name in names
        if path == name or (name.endswith("/") and f"{path}/".startswith(name))
    ]
    assert found, f"{module} is on no floor of docs/architecture.md"
    return max(found)[1]  # the longest name that fits


def imports(module):
    """(other module, whether it is imported when `module` is), of all its imports within the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    later = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.If)) and (
            isinstance(outer, ast.FunctionDef) or ast.unparse(outer.test) == "TYPE_CHECKING"
        )
        for node in ast.walk(outer)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fastattn":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module), id(node) not in later
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "fastattn":
                    yield alias.name, id(node) not in later


ABOVE_ALL = ("fastattn._bench", "fastattn.__main__", "fastattn._cli_models")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    """Imports for type checkers, too: a floor knows nothing of those above it."""
    if module.startswith(ABOVE_ALL):
        return
    wrong = [other for other, _ in imports(module) if floor_of(other) > floor_of(module)]
    assert wrong == []


def test_no_circle_of_imports():
    graph = {module: {other for other, now in imports(module) if now} for module in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises a CycleError that names the circle


@pytest.mark.parametrize("module", MODULES)
def test_a_module_s_name_is_not_that_of_a_function(module):
    """So that `import fastattn.x as x` always gives a module."""
    parent, _, name = module.rpartition(".")
    assert inspect.ismodule(getattr(importlib.import_module(parent), name, importlib.import_module(module)))


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


def glossary():
    """{name of an argument: names that it must not have} of the plan's table."""
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|$", section("Names of arguments"), re.MULTILINE)
    return {
        name: re.findall(r"`(\w+)`", never) for names, never in rows for name in re.findall(r"`(\w+)`", names)
    }


def test_one_name_for_one_thing():
    forbidden = {name for names in glossary().values() for name in names}
    wrong = [
        f"{where}({name}=)" for where, name in signatures() if name in forbidden or name.startswith("n_")
    ]
    assert wrong == []
    assert len(forbidden) > 10


def test_the_glossary_names_what_there_is():
    options = set(fastattn._args.options.AttentionOptions.__annotations__)
    assert set(glossary()) - {name for _, name in signatures()} - options == set()


def test_options_are_those_of_attention():
    """One definition: users read its names, and all defaults are those of the check."""
    checked = inspect.signature(fastattn._args.attention.attention_args).parameters
    seen = inspect.signature(fastattn.attention).parameters
    options = set(fastattn._args.options.AttentionOptions.__annotations__)
    assert set(seen) == {"q", "k", "v", "return_lse", "stats", *options}
    assert set(checked) == {"func", *seen}
    for name in (*options, "return_lse", "stats"):
        assert seen[name].default == checked[name].default


def test_public_signatures_are_typed():
    for module in PUBLIC:
        for name in module.__all__:
            if inspect.isfunction(function := getattr(module, name)):
                parameters = inspect.signature(function).parameters.values()
                assert all(p.annotation is not p.empty for p in parameters), name
                options = [p for p in parameters if p.kind == p.VAR_KEYWORD]
                assert all(p.annotation.startswith("Unpack[") for p in options), name


# How many files a change takes at most: of the product, and definitions that tests compare with.
RECIPES = {
    "a mask": 6, "a score modifier": 10, "an activation": 3, "a dtype": 8, "an instruction set": 3,
    "a layer": 4, "an operation": 6, "a model family": 4, "a variant": 5, "a program step": 3,
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_name_files_that_exist(recipe):
    text = section("Recipes").split(f"\n### To add {recipe}\n", 1)[1].split("\n### ", 1)[0]
    assert 0 < len(re.findall(r"^\d+\. `", text, re.MULTILINE)) <= RECIPES[recipe]
    root = PACKAGE.parent
    if (root / "src").exists():  # not of an installed wheel
        files = re.findall(r"`((?:fastattn|src|tests|docs|tools)/[\w./]+\.\w+)`", text)
        assert [name for name in files if not (root / name).exists()] == []
