"""Experts whose turns the data tells: what cannot be exported as it stands is exported in its other form."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusionreg.core.errors import ModelError
from fusionreg.integrations.torch import export


class Looping(torch.nn.Module):
    """Experts as transformers decorates them: ``eager`` is a loop over those that some row has."""

    is_concatenated = is_transposed = True

    def __init__(self, config) -> None:
        super().__init__()
        self.config, self.weight = config, torch.nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x, ids):
        if self.config._experts_implementation == "grouped_mm":
            return torch.einsum("ti,tio->to", x, self.weight[ids])
        y = torch.zeros_like(x)
        for e in ids.unique():
            y[ids == e] = x[ids == e] @ self.weight[e]
        return y


@pytest.mark.parametrize("form", ["eager", None, "grouped_mm", "other"])
def test_experts_in_a_loop_are_exported_as_a_product(form) -> None:
    config = SimpleNamespace(_experts_implementation=form)
    module, x, ids = Looping(config), torch.randn(5, 4), torch.tensor([0, 2, 2, 0, 1])
    if form == "other":  # a form of somebody's own stays
        with pytest.raises(ModelError, match="cannot export"):
            export(module, (x, ids))
    else:
        graph = export(module, (x, ids)).module()
        torch.testing.assert_close(graph(x, ids), module(x, ids))
    assert config._experts_implementation == form
