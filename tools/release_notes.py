"""Print what CHANGELOG.md says of the version that is being released.

    python tools/release_notes.py v0.1.0

The tag is that of fastattn/_version.py, and the section says when: `## 0.1.0 (2027-01-31)`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag, version, changelog):
    """The section of `version`; raise unless `tag` releases it and the section has a date."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag!r}; expected 'v{version}', of fastattn/_version.py")
    sections = re.split(r"^## (.*)\n", changelog, flags=re.MULTILINE)
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        if title.split(" ")[0] == version:
            if not re.fullmatch(r"\S+ \(\d{4}-\d\d-\d\d\)", title):
                raise ValueError(f"CHANGELOG.md has {title!r}; expected '{version} (YYYY-MM-DD)'")
            return text.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section {version!r}")


if __name__ == "__main__":
    found = re.search(r'^__version__ = "(.*)"$', (ROOT / "fastattn/_version.py").read_text(), re.MULTILINE)
    try:
        print(notes(sys.argv[1], found[1], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")
    except (IndexError, ValueError) as error:
        sys.exit(f"release_notes.py: {error}")
