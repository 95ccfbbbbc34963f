"""The site: `sphinx-build -W --keep-going -n docs OUT` in an environment with the extra [docs]."""

import os
import sys
from pathlib import Path

import tomllib

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_site"))

import fastattn  # noqa: E402

project = "fastattn"
author = "the fastattn authors"
copyright = author
version = release = fastattn.__version__
html_title = f"fastattn {release}"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "inline_svg",
]
exclude_patterns = ["_site", "_templates", "gallery/*.md", "**/GALLERY_HEADER.rst"]
templates_path = ["_templates"]
root_doc = "index"

# Pages: links to headings as on GitHub.
myst_heading_anchors = 4
default_role = "code_or_link"  # `x` in docstrings is code, and a link where it names something public
nitpicky = True

# Reference: types stand in the docstrings.
autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # the template lists them

# Gallery: every script runs, and an error in one ends the build.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/plot_",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "capture_repr": (),
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,  # times of the machine that built the site say nothing
    "write_computation_times": False,
}

# Copied is what one can run: no prompts, and no button on what a program prints.
copybutton_selector = "div:not(.highlight-text, .highlight-none, .highlight-output) > div.highlight > pre"
copybutton_exclude = ".linenos, .gp, .go"

# Where the code is: pyproject.toml says it, or else whoever builds the site. Without either there is no link.
URLS = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
REPOSITORY = URLS.get("Repository") or os.environ.get("FASTATTN_REPOSITORY", "")

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {page: [] for page in ("index", "tutorial")}
html_theme_options = {
    "logo": {"text": html_title},
    "header_links_before_dropdown": 7,
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "icon_links": [{"name": "Repository", "url": REPOSITORY, "icon": "fa-solid fa-code-branch"}]
    * bool(REPOSITORY),
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
}
