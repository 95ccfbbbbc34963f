"""Drawings become part of the page, so that their colours follow the theme that the reader chose."""

import re
from pathlib import Path

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform


class InlineDrawings(SphinxPostTransform):
    """Images of `drawings/` as SVG elements."""

    default_priority = 5  # before images are collected for the output
    formats = ("html",)

    def run(self, **kwargs):
        for image in list(self.document.findall(nodes.image)):
            uri = image.get("uri", "")
            if "drawings/" not in uri:
                continue
            text = Path(self.env.srcdir, uri).read_text(encoding="utf-8")
            text = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)  # site.css has the colours
            svg = text.replace("<svg ", f'<svg class="drawing" role="img" aria-label="{image["alt"]}" ', 1)
            image.replace_self(nodes.raw("", f'<div class="drawing-box">{svg}</div>', format="html"))


def setup(app):
    app.add_post_transform(InlineDrawings)
    return {"parallel_read_safe": True}
