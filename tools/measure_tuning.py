"""What a step of AdamW takes in fine-tuning, merging and packing included: adapters, one matrix, everything.

    python tools/measure_tuning.py FOLDER

FOLDER has an encoder, for instance MiniLM's. All numbers are milliseconds, the best of several.
"""

import sys
import time

from fastattn import models
from fastattn.train import AdamW, ContrastiveTuning

BATCH = (["the cat sat on the mat", "a dog ran"], ["a mat", "the tree"])


def main():
    model = models.load(sys.argv[1])
    matrix = max(name for name, x in model.state_dict().items() if x.ndim == 2)
    for what, options in {
        "adapters of rank 8": {"rank": 8},
        f"{matrix} alone": {"targets": matrix},
        "everything": {},
    }.items():
        tuning = ContrastiveTuning(model, **options)
        optimizer, (_, grads) = AdamW(tuning, lr=1e-4), tuning.loss(BATCH)
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            optimizer.step(grads)
            times.append(1e3 * (time.perf_counter() - begin))
        print(f"{what}: {min(times):.1f}")


if __name__ == "__main__":
    main()
