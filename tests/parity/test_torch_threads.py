"""One process with torch: whose threads compute, in which order the two are imported, and the same bits."""

import pytest
from implementations import COMPILED, THREADINGS

pytestmark = pytest.mark.skipif(not COMPILED, reason="NumPy has no threads of ours")

BESIDE = """
import numpy as np
{imports}

q = np.random.default_rng(0).standard_normal((8, 4, 200, 32), np.float32)
alone = fastattn.attention(q, q, q, num_threads=1)
layer, x = torch.nn.Linear(256, 256), torch.ones(512, 256)
with torch.inference_mode():
    expected = layer(x)
    for _ in range(20):
        assert (fastattn.attention(q, q, q, num_threads=2) == alone).all()
        assert torch.equal(layer(x), expected)
from fastattn._engine import beside_torch, settings
print(fastattn.show_config()["threading"], beside_torch.shares_openmp(settings.core.__file__))
"""


@pytest.mark.parametrize("imports", ["import torch, fastattn", "import fastattn, torch"])
@pytest.mark.parametrize("asked", [None, *THREADINGS])
def test_beside_torch(imports, asked, python):
    """OpenMP is left to torch where both run on the same one, and nobody asked for it."""
    run = python(BESIDE.format(imports=imports), FASTATTN_THREADING=asked, FASTATTN_NUM_THREADS=2)
    assert run.stdout, run.stderr
    threading, shared = run.stdout.split()
    assert threading == (asked or ("team" if shared == "True" else THREADINGS[0]))


def test_torch_s_threads_are_borrowed(python):
    code = BESIDE.format(imports="import torch, fastattn, fastattn.torch")
    assert python(code, FASTATTN_THREADING=None).stdout.split()[0] == "borrowed"
