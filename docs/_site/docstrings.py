"""Docstrings as they are written here, for Sphinx: `x` is code, and (..., *grid) a shape."""

import re

from docutils import nodes
from sphinx.roles import XRefRole


class CodeOrLink(XRefRole):
    """A link where the code is the name of something documented."""

    def process_link(self, env, refnode, has_explicit_title, title, target):
        refnode["refdomain"], refnode["reftype"], refnode["may_be_missing"] = "py", "obj", True
        refnode["py:module"] = env.ref_context.get("py:module")
        refnode["py:class"] = env.ref_context.get("py:class")
        return title, target


def as_code(app, env, node, contnode):
    return contnode if node.get("may_be_missing") else None


def as_shapes(app, what, name, obj, options, lines):
    """Axes such as *grid are no emphasis. Where a line has code, nothing is changed."""
    lines[:] = [line if "`" in line else re.sub(r"(?<=[ (])\*(?=\w+[,)])", r"\\*", line) for line in lines]


def without_fields(app, what, name, obj, options, signature, return_annotation):
    """Models are made by `load`, and nobody passes their fields."""
    if what == "class" and name.startswith("fastattn.models."):
        return "", None
    return None


def of_others(app, what, name, obj, skip, options):
    """Leave out what a class has from another package, which is described there."""
    module = getattr(obj, "__module__", None)
    return True if module and not module.startswith("fastattn") else None


def setup(app):
    app.add_role("code_or_link", CodeOrLink(innernodeclass=nodes.literal))
    app.connect("missing-reference", as_code)
    app.connect("autodoc-skip-member", of_others)
    app.connect("autodoc-process-signature", without_fields)
    app.connect("autodoc-process-docstring", as_shapes, priority=400)  # before numpydoc
    return {"parallel_read_safe": True}
