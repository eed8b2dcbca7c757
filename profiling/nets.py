"""Models of which training steps are recorded, each with its loss and a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Net(str, Enum):
    """A model by its name."""

    TINY = "tiny"
    CONVOLUTIONS = "convolutions"
    TRANSFORMER = "transformer"
    LARGE_TRANSFORMER = "large_transformer"


@dataclass(frozen=True)
class Task:
    """What a training step does.

    Attributes:
        model: The model; equal on all ranks.
        loss: Called with the model and the batch.
        batch: Inputs and targets; random, because only times are of interest.
        bucket_cap_mb: Of DDP, so that there are several buckets.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: tuple[Tensor, Tensor]
    bucket_cap_mb: float

    @property
    def gradient_mb(self) -> float:
        """Size of all gradients, in MB."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters()) / 1e6


class Block(nn.Module):
    """One layer of a transformer, with causal attention and norms before.

    Args:
        width: Of the residual stream.
        heads: Of attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Map ``(batch, length, width)`` to the same shape."""
        qkv = self.qkv(self.attention_norm(stream)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.projection(mixed.transpose(1, 2).flatten(-2))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(stream)))
        update: Tensor = self.down(hidden)
        return stream + update


class Transformer(nn.Module):
    """A small language model.

    Args:
        words: Of the vocabulary.
        width: Of the residual stream.
        layers: Number of layers.
    """

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Map words ``(batch, length)`` to logits ``(batch * length, words)``."""
        logits: Tensor = self.output(self.norm(self.blocks(self.embedding(words))))
        return logits.flatten(0, 1)


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512)):
        stride = 2 if outputs > inputs > 3 else 1
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 56), nn.Linear(56, 10))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def make_task(net: Net, rank: int) -> Task:
    """Build a model and a batch.

    Args:
        net: Which model.
        rank: Of the process, seeds its batch; the model's weights are equal on all ranks.

    Returns:
        What a step does.
    """
    torch.manual_seed(0)
    if net in (Net.TRANSFORMER, Net.LARGE_TRANSFORMER):
        words, width, layers = (1000, 256, 4) if net is Net.TRANSFORMER else (8000, 512, 8)
        model: nn.Module = Transformer(words, width, layers)
    else:
        words = 10
        model = _tiny() if net is Net.TINY else _convolutions()
    generator = torch.Generator().manual_seed(1 + rank)
    shape = {Net.TINY: (16, 48), Net.CONVOLUTIONS: (8, 3, 32, 32)}.get(net, (4, 64))
    if net in (Net.TRANSFORMER, Net.LARGE_TRANSFORMER):
        inputs = torch.randint(words, shape, generator=generator)
        count = inputs.numel()
    else:
        inputs, count = torch.randn(shape, generator=generator), shape[0]
    targets = torch.randint(words, (count,), generator=generator)
    caps = {Net.TINY: 0.012, Net.CONVOLUTIONS: 5, Net.TRANSFORMER: 4, Net.LARGE_TRANSFORMER: 25}
    return Task(model, _loss, (inputs, targets), caps[net])
