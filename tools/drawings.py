"""Draw the pictures of docs/how-it-works.md: python tools/drawings.py docs/drawings.

The SVG files follow the reader's light or dark theme: by the system's wish where they are images, and in the
site by the page's own colours, which docs/_static/site.css has under the same names.
"""

import sys
from html import escape
from pathlib import Path

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: var(--ink) }
  .small { font-size: 11px } .middle { text-anchor: middle } .end { text-anchor: end }
  .a { fill: var(--a) } .b { fill: var(--b) } .c { fill: var(--c) } .none { fill: none }
  rect, path, line { stroke: var(--line); stroke-width: 1 }
  .arrow { fill: none; stroke: var(--ink); stroke-width: 1.5 } .head { fill: var(--ink); stroke: none }
  .dash { stroke-dasharray: 4 3 }
"""
LIGHT = "--ink: #1f2328; --line: #8c959f; --a: #cfe3fa; --b: #ffe0b8; --c: #d3efdc"
DARK = "--ink: #e6edf3; --line: #7d8590; --a: #23466e; --b: #6b4a17; --c: #23543a"


class Drawing:
    """Shapes, one after the other; y goes down."""

    def __init__(self, width, height):
        self.width, self.height, self.parts = width, height, []

    def text(self, x, y, text, kind=""):
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>')

    def box(self, x, y, width, height, kind="none", label="", small=False):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{kind}"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 4, label, "middle small" if small else "middle")

    def arrow(self, x1, y1, x2, y2):
        """A straight arrow, along one axis."""
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self.parts.append(f'<path d="M{x1} {y1}L{x2 - 6 * dx} {y2 - 6 * dy}" class="arrow"/>')
        left, right = (
            (x2 - 8 * dx - 4 * dy, y2 - 8 * dy - 4 * dx),
            (x2 - 8 * dx + 4 * dy, y2 - 8 * dy + 4 * dx),
        )
        self.parts.append(f'<path d="M{x2} {y2}L{left[0]} {left[1]}L{right[0]} {right[1]}Z" class="head"/>')

    def svg(self):
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}"
        style = f"<style>  svg {{ {LIGHT} }} {dark}{STYLE}</style>"
        inside = "\n".join(self.parts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{style}\n{inside}\n</svg>\n'


def memory():
    """Plain attention holds all scores; fused attention holds a tile of them."""
    d = Drawing(720, 300)
    for x, title in ((0, "plain: three passes over all scores"), (390, "fused: one pass, a tile at a time")):
        d.text(x + 10, 22, title)
    d.box(10, 60, 36, 200, "a", "Q")
    d.box(60, 60, 200, 200, "b", "all scores: L x L")
    d.box(60, 30, 200, 22, "c", "K, V", small=True)
    d.box(274, 60, 36, 200, "a", "out")
    d.text(60, 282, "8192 tokens: 256 MB a head, in memory", "small")
    d.box(400, 60, 36, 200, "none", "")
    d.box(400, 110, 36, 28, "a", "tile", small=True)
    d.box(450, 60, 200, 200, "none dash")
    d.box(530, 110, 40, 28, "b", "8 KB", small=True)
    d.box(450, 30, 200, 22, "none")
    d.box(530, 30, 40, 22, "c", "block", small=True)
    d.box(664, 60, 36, 200, "none")
    d.box(664, 110, 36, 28, "a", "tile", small=True)
    d.arrow(574, 124, 626, 124)
    d.text(450, 282, "any number of tokens: 8 KB, in the cache", "small")
    return d


def online():
    """Draw what a row carries from one block of keys to the next."""
    d = Drawing(720, 250)
    for i, x in enumerate((10, 250, 490)):
        d.box(x, 12, 210, 34, "c", f"keys {64 * i} to {64 * i + 63}")
        d.arrow(x + 105, 46, x + 105, 76)
        d.box(x, 78, 210, 30, "b", "scores of this block")
        d.arrow(x + 105, 108, x + 105, 138)
        d.box(x, 140, 210, 64, "a")
        d.text(x + 105, 163, "largest score m, sum l,", "middle small")
        d.text(x + 105, 183, "sum of p times v: acc", "middle small")
        if i:
            d.arrow(x - 30, 172, x, 172)
    d.text(
        10,
        236,
        "A larger maximum scales l and acc, which were summed before, once. At the end: acc / l.",
    )
    return d


def lanes():
    """A vector holds one number of sixteen queries."""
    d = Drawing(720, 330)
    d.text(10, 22, "one vector register: the same key, sixteen queries")
    for i in range(16):
        d.box(110 + 36 * i, 40, 36, 30, "a", f"q{i}", small=True)
    d.text(100, 60, "lanes", "end small")
    for row, name in enumerate(("key 0", "key 1", "key 2", "...", "key 63")):
        y = 92 + 30 * row
        d.text(100, y + 20, name, "end small")
        for i in range(16):
            d.box(110 + 36 * i, y, 36, 30, "b")
    d.arrow(128, 246, 128, 276)
    d.text(140, 264, "softmax runs down: maxima and sums are one instruction for all sixteen", "small")
    for i in range(16):
        d.box(110 + 36 * i, 280, 36, 30, "c", "m, l", small=True)
    d.text(100, 300, "state", "end small")
    return d


def tiles():
    """Tiles of a causal window: most are never touched."""
    d = Drawing(720, 330)
    size, n = 26, 10
    d.text(40, 20, "blocks of keys", "")
    for i in range(n):
        for j in range(n):
            kind = "none"
            if i - 3 < j < i:
                kind = "a"
            elif j in (i, i - 3):
                kind = "b"
            d.box(40 + size * j, 34 + size * i, size, size, kind)
    d.parts.append(f'<text transform="translate(28 {34 + size * n}) rotate(-90)">rows of queries</text>')
    for y, kind, title, more in (
        (60, "a", "full", "every row attends every key: nothing is compared"),
        (120, "b", "edge", "a range begins or ends here: compared lane by lane"),
        (180, "none", "empty", "nobody attends: never loaded, never computed"),
    ):
        d.box(350, y, size, size, kind)
        d.text(390, y + 12, title)
        d.text(390, y + 30, more, "small")
    d.text(350, 260, "A causal window. explain(...) counts these tiles.", "small")
    return d


def amx():
    """Four tiles of sums, from two of rows and two of columns."""
    d = Drawing(720, 330)
    d.text(40, 20, "a tile: 16 rows of 64 bytes, which are 32 numbers of 16 bits or 64 of 8", "small")
    for i in range(2):
        y = 130 + 92 * i
        d.box(40, y, 160, 84, "a", f"rows {16 * i} to {16 * i + 15}")
        d.text(120, y + 64, f"of x: tile {4 + i}", "middle small")
    for j in range(2):
        x = 236 + 172 * j
        d.box(x, 40, 164, 76, "c", f"columns {16 * j} to {16 * j + 15}")
        d.text(x + 82, 102, f"of a panel: tile {6 + j}", "middle small")
    for i in range(2):
        for j in range(2):
            x, y = 236 + 172 * j, 130 + 92 * i
            d.box(x, y, 164, 84, "b", f"tile {2 * i + j}")
            d.text(x + 82, y + 64, "16 x 16 sums, float32", "middle small")
    d.arrow(204, 172, 232, 172)
    d.arrow(204, 264, 232, 264)
    d.text(588, 150, "four loads,", "small")
    d.text(588, 168, "four instructions:", "small")
    d.text(588, 186, "32,768 products", "small")
    d.text(588, 204, "of 16 bits", "small")
    return d


def splits():
    """Long caches are cut along the keys, and merged in a fixed order."""
    d = Drawing(720, 240)
    d.box(10, 20, 90, 30, "a", "1 query")
    for i in range(4):
        x = 130 + 148 * i
        d.box(x, 20, 140, 30, "c", f"keys {512 * i} to {512 * i + 511}", small=True)
        d.arrow(x + 70, 50, x + 70, 84)
        d.box(x, 86, 140, 34, "b", f"partial {i}: m, l, acc", small=True)
        d.arrow(x + 70, 120, x + 70, 154)
    d.box(130, 156, 584, 34, "a", "merged in this order, whichever thread made them")
    d.text(130, 220, "So the bits of a result do not depend on the number of threads.", "small")
    return d


def main(folder):
    for draw in (memory, online, lanes, tiles, amx, splits):
        Path(folder, f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
