"""Training in NumPy: AdamW and SGD with torch's steps, clipping, schedules, a loop that can be resumed.

See docs/training.md. A TypeError or a ValueError names the argument that does not fit, a FloatingPointError
the gradient that is not finite.
"""

from fastattn._args.names import show_public
from fastattn.train._batches import Batches
from fastattn.train._encoders import ClassifierTuning, ContrastiveTuning
from fastattn.train._optimizer import SGD, AdamW
from fastattn.train._schedule import Schedule
from fastattn.train._trainer import Step, Trainer
from fastattn.train._tuning import NextTokenTuning

__all__ = [
    "SGD",
    "AdamW",
    "Batches",
    "ClassifierTuning",
    "ContrastiveTuning",
    "NextTokenTuning",
    "Schedule",
    "Step",
    "Trainer",
]

show_public(__name__)
