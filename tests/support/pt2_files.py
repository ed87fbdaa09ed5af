"""``.pt2`` archives from their entries, and changed ones."""

from __future__ import annotations

import json
import os
import warnings
import zipfile

import torch

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import import_pt2

OPS = default_vocabulary()
GRAPH, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"


def write(path, entries, root="m/", compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as z, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of names that stand twice
        for name, data in entries.items() if isinstance(entries, dict) else entries:
            z.writestr(root + name, data)
    return path


def edited(entries, name, change):
    """The entries with a JSON one changed in place by ``change``."""
    document = json.loads(entries[name])
    change(document)
    return {**entries, name: json.dumps(document).encode()}


class Payload:
    """Pickles to a call of os.mkdir: unpickling it leaves a folder behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def check_values(path, module):
    imported = import_pt2(path)
    x = torch.randn(5, 4)
    graph = imported.graph
    got = evaluate(graph, {graph.inputs[0]: x.numpy()}, ops=OPS)[graph.outputs[0]]
    torch.testing.assert_close(torch.from_numpy(got), module(x).detach())
