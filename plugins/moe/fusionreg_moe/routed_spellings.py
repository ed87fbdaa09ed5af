"""``moe.routed_ffn`` as models spell it out, from the router's logits on.

All experts' matrices of a token are gathered, as transformers' ``batched_mm`` does it. Experts come from TopK, so no
index is below 0 and Gather means what the fusion does. A divisor that keeps its axis says that weights are
renormalised. Weights are multiplied as they are, rounded to the dtype of the products first, or in float32.
"""

from __future__ import annotations

from itertools import product

_LOGITS = ("s = Softmax(logits)", 's = Softmax(Cast(logits, to="float32"))')
_CHOSEN = "v, ids = TopK(s, (top_k,), largest={})"
_WEIGHTS = (
    f"{_CHOSEN.format('1')}\nw = v",
    f"{_CHOSEN.format('renormalise')}\nw = Div(v, ReduceSum(v, (-1,), keepdims=renormalise))",
)
_PRODUCTS = """
at = Reshape(ids, (-1,))
r = Reshape(Expand(Unsqueeze(x, (1,)), (1, top_k, 1)), (-1, -1))
h = Squeeze(MatMul(Gather(gate_up, at), Unsqueeze(r, (2,))), (2,))
gate, up = Split(h, (-1, -1), axis=-1)
a = any_of(Swish, Gelu, "activation", gelu_tanh=Gelu(approximate="tanh"), relu2=fusionreg.SquaredRelu)(gate)
d = Squeeze(MatMul(Gather(down, at), Unsqueeze(Mul(a, up), (2,))), (2,))
""".strip()
_SUM = "ReduceSum(Reshape(z, (-1, top_k, -1)), (1,), keepdims=0)"
_COMBINED = (
    f"z = Mul(d, Unsqueeze(Reshape({{w}}, (-1,)), (1,)))\ny = {_SUM}",
    f"z = Mul(d, Unsqueeze(Reshape(Cast({{w}}, to=T), (-1,)), (1,)))\ny = {_SUM}",
    f'z = Mul(Cast(d, to="float32"), Unsqueeze(Reshape({{w}}, (-1,)), (1,)))\ny = Cast({_SUM}, to=T)',
)


def _spelled(logits: str, weights: str, combined: str) -> str:
    *steps, last = weights.split("\n")
    name = last.removeprefix("w = ") if last == "w = v" else "w"
    steps += [] if name == "v" else [last]
    return "\n".join((logits, *steps, _PRODUCTS, combined.format(w=name)))


SPELLINGS = tuple(_spelled(*parts) for parts in product(_LOGITS, _WEIGHTS, _COMBINED))
"""The texts that :file:`routed.py` has beside its reference."""
