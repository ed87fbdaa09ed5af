"""Published architectures, randomly initialised: modules with example inputs, and how a training step makes a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
        module: in float32, where tensors are made by default.
        inputs: example inputs; floating ones are cast to the dtype of a run.
        loss: result → a scalar.
    """

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    loss: Callable[[Any], torch.Tensor]


def first(result: Any) -> torch.Tensor:
    """The tensor that a model gives, or the first of several."""
    if isinstance(result, torch.Tensor):
        return result
    return result[0] if isinstance(result, tuple) else next(iter(result.values()))


def _weighed(result: Any) -> torch.Tensor:
    """A mean with weights that no normalisation takes out."""
    y = first(result).float()
    return (y * torch.linspace(-1.0, 2.0, y.numel(), device=y.device).view_as(y)).mean()


def bert(tiny: bool) -> Subject:
    """BERT-base, 8 × 512 tokens, of two layers (WORKLOADS: a step is as good as its layers)."""
    from transformers import BertConfig, BertModel

    size: dict[str, Any] = {}
    if tiny:
        size |= {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99}
    config = BertConfig(num_hidden_layers=2, **size)
    tokens = torch.randint(0, 99, (2, 16) if tiny else (8, 512))
    return Subject(BertModel(config, add_pooling_layer=False), (tokens,), _weighed)


def _llama(tiny: bool) -> Any:
    from transformers import LlamaConfig, LlamaModel

    size: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    size |= {"num_key_value_heads": 8, "vocab_size": 1000}
    if tiny:
        size |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaModel(LlamaConfig(num_hidden_layers=1, use_cache=False, **size))


def llama(tiny: bool) -> Subject:
    """One layer of Llama-3-8B, 1 × 2048 tokens."""
    return Subject(_llama(tiny), (torch.randint(0, 99, (1, 16) if tiny else (1, 2048)),), _weighed)


class Decode(nn.Module):
    """A step of decoding: one new token of each sequence, behind those whose keys and values are in a cache."""

    keys: torch.Tensor
    values: torch.Tensor
    at: torch.Tensor

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        self.model, self.layer = model, _full_layer()
        config = model.config
        shape = (batch, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
        self.register_buffer("keys", torch.randn(shape))
        self.register_buffer("values", torch.randn(shape))
        self.register_buffer("at", torch.tensor([length - 1]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from transformers.cache_utils import Cache

        cache = Cache(layers=[self.layer(self.keys, self.values, self.at)])
        result: torch.Tensor = self.model(tokens, past_key_values=cache, use_cache=True).last_hidden_state
        return result


def _full_layer() -> Any:
    """A class of static caches that have one place left, under every name that versions of transformers ask for."""
    from transformers.cache_utils import CacheLayerMixin

    class Full(CacheLayerMixin):
        is_compileable, is_sliding, is_initialized = True, False, True

        def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> None:
            self.full = keys, values, at

        def lazy_initialization(self, *_: Any) -> None:
            """There is nothing to allocate."""

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            keys, values, at = self.full
            return keys.index_copy_(2, at, key_states), values.index_copy_(2, at, value_states)

        def get_seq_length(self, *_: Any) -> int:
            return int(self.full[0].shape[2]) - 1

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return int(self.full[0].shape[2]), 0

        def get_max_length(self) -> int:
            return int(self.full[0].shape[2])

        get_max_cache_shape = get_max_length

    return Full


def llama_decode(tiny: bool) -> Subject:
    """The layer of :func:`llama` for one token of each of 16 sequences, behind 2047 cached ones."""
    batch, length = (2, 16) if tiny else (16, 2048)
    return Subject(Decode(_llama(tiny), batch, length), (torch.randint(0, 99, (batch, 1)),), _weighed)


def _mixtral(tiny: bool, tokens: int) -> Subject:
    """One layer of Mixtral-8x7B; experts as transformers runs them on a GPU: grouped products."""
    from transformers import MixtralConfig, MixtralModel

    size: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    size |= {"num_key_value_heads": 8, "vocab_size": 1000, "num_local_experts": 8}
    if tiny:
        size |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_local_experts": 4}
        size |= {"num_key_value_heads": 2}
    config: Any = MixtralConfig(num_hidden_layers=1, use_cache=False, **size)
    return Subject(MixtralModel(config), (torch.randint(0, 99, (1, min(tokens, 16) if tiny else tokens)),), _weighed)


def mixtral_1(tiny: bool) -> Subject:
    """A token through the layer of Mixtral-8x7B."""
    return _mixtral(tiny, 1)


def mixtral_64(tiny: bool) -> Subject:
    """64 tokens through it."""
    return _mixtral(tiny, 64)


def mixtral_4096(tiny: bool) -> Subject:
    """4096 tokens through it."""
    return _mixtral(tiny, 4096)


def _of_images(module: nn.Module, images: torch.Tensor) -> Subject:
    """A network of images with channels last, as all libraries convolve fastest."""
    last = torch.channels_last
    return Subject(module.to(memory_format=last), (images.contiguous(memory_format=last),), _weighed)


def _resnet50(tiny: bool, images: int) -> Subject:
    import timm

    given = torch.randn((2, 3, 32, 32) if tiny else (images, 3, 224, 224))
    return _of_images(timm.create_model("resnet18" if tiny else "resnet50", num_classes=10), given)


def resnet50(tiny: bool) -> Subject:
    """ResNet-50 of timm, 32 images of 224 × 224."""
    return _resnet50(tiny, 32)


def resnet50_256(tiny: bool) -> Subject:
    """ResNet-50 of timm, 256 images of 224 × 224."""
    return _resnet50(tiny, 256)


def convnext(tiny: bool) -> Subject:
    """ConvNeXt of timm, 32 images."""
    import timm

    name, images = ("convnext_atto", (2, 3, 32, 32)) if tiny else ("convnext_tiny", (32, 3, 224, 224))
    return _of_images(timm.create_model(name, num_classes=10, drop_path_rate=0.0), torch.randn(images))


class ResBlock(nn.Module):
    """A residual block of a diffusion U-Net: GroupNorm, SiLU, convolution, twice; a time embedding between."""

    def __init__(self, channels: int, embedding: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(embedding, channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x)))
        h = h + self.time(nn.functional.silu(t))[:, :, None, None]
        h = self.conv2(self.dropout(nn.functional.silu(self.norm2(h))))
        return x + h


def resblock(tiny: bool) -> Subject:
    """The ResBlock of SDXL at its largest resolution: 2 × 320 × 128²."""
    channels, side, embedding = (64, 8, 32) if tiny else (320, 128, 1280)
    return Subject(
        ResBlock(channels, embedding), (torch.randn(2, channels, side, side), torch.randn(2, embedding)), _weighed
    )


class Feedforward(nn.Module):
    """A pre-norm feed-forward stack that drops behind its GELU: what S6 is about, with a projection between."""

    def __init__(self, width: int, depth: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(self.dropout(nn.functional.gelu(layer(x))))
        return x


def feedforward(tiny: bool) -> Subject:
    """Four layers of width 4096 over 8192 rows."""
    rows, width = (16, 64) if tiny else (8192, 4096)
    return Subject(Feedforward(width, 4), (torch.randn(rows, width),), _weighed)


ARCHITECTURES: dict[str, Callable[[bool], Subject]] = {
    made.__name__: made
    for made in (
        bert, llama, llama_decode, mixtral_1, mixtral_64, mixtral_4096, resnet50, resnet50_256, convnext, resblock,
        feedforward,
    )
}  # fmt: skip
