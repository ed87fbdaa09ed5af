"""Layers of experts of transformers' models, in each of its forms: what is found, and what it computes."""

from __future__ import annotations

import pytest
import torch
from exported import OPS, agree

import fusionreg
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.lift import lift
from fusionreg.integrations.torch import export, import_exported
from fusionreg.integrations.torch.module import ExportedCallable

transformers = pytest.importorskip("transformers")

MIXTRAL = ("MixtralConfig", "mixtral", "MixtralSparseMoeBlock", {"intermediate_size": 48, "num_local_experts": 4})
QWEN2 = (
    "Qwen2MoeConfig", "qwen2_moe", "Qwen2MoeSparseMoeBlock",
    {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "num_experts": 4, "norm_topk_prob": False},
)  # fmt: skip
QWEN3 = (
    "Qwen3MoeConfig", "qwen3_moe", "Qwen3MoeSparseMoeBlock",
    {"moe_intermediate_size": 48, "num_experts": 4, "norm_topk_prob": True},
)  # fmt: skip
DEEPSEEK = (
    "DeepseekV3Config", "deepseek_v3", "DeepseekV3MoE",
    {"moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
)  # fmt: skip
GLM4 = (
    "Glm4MoeConfig", "glm4_moe", "Glm4MoeMoE",
    {"moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
)  # fmt: skip
FOUND = {"deepseek_v3": "moe.group_limited_ffn"}


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("moe",), device="sim")


def layer(model, form: str, dtype: torch.dtype) -> torch.nn.Module:
    config, package, name, options = model
    made = getattr(transformers, config)(hidden_size=32, num_experts_per_tok=2, **options)
    made._experts_implementation = form
    module = getattr(getattr(transformers.models, package), f"modeling_{package}")
    torch.manual_seed(0)
    block = getattr(module, name)(made)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return block.eval().to(dtype)


def lifted(block: torch.nn.Module, x: torch.Tensor) -> ExportedCallable:
    """The layer as what patterns are looked for in."""
    imported = import_exported(export(block, (x,), None, None))
    graph = lift(imported.graph, OPS)
    return ExportedCallable(imported, lambda given: evaluate(graph, given, ops=OPS))


@pytest.mark.parametrize(
    ("model", "form"),
    [
        *((m, "grouped_mm") for m in (MIXTRAL, QWEN2, QWEN3, DEEPSEEK, GLM4)),
        *((m, "batched_mm") for m in (MIXTRAL, DEEPSEEK)),
        (MIXTRAL, "eager"),
    ],
    ids=lambda p: p if isinstance(p, str) else p[1],
)
def test_the_layer_is_found_and_means_the_same(registry, model, form):
    block, x = layer(model, form, torch.bfloat16), torch.randn(1, 6, 32).bfloat16()
    with torch.no_grad():
        matches = registry.match(block, x).matches
        agree(lifted(block, x)(x), block(x), 0.03)
    largest = max(matches, key=lambda m: len(m.nodes))
    assert largest.fusion == FOUND.get(model[1], "moe.routed_ffn")
    if model is not DEEPSEEK:
        assert largest.attributes["renormalise"] == int(model is not QWEN2) and largest.attributes["top_k"] == 2


def test_any_number_of_tokens(registry):
    block = layer(QWEN3, "grouped_mm", torch.bfloat16)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    x = torch.randn(1, 6, 32).bfloat16()
    with torch.no_grad():
        program = torch.export.export(block, (x,), dynamic_shapes=({1: tokens},))
        assert "moe.routed_ffn" in [m.fusion for m in registry.match(program).matches]
        other = torch.randn(1, 9, 32).bfloat16()
        agree(registry.fuse(program)(other), block(other), 0.03)
