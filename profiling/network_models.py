"""Models that are trained over a slow link: small enough for a processor, of plain torch."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def square() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return 6 layers of 1024 x 1024 without biases (6.3 million parameters), and its inputs."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    return nn.Sequential(*layers), lambda batch: torch.randn(batch, 1024)


def conv() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return 8 convolutions for 32 x 32 images (4.7 million parameters), and its inputs."""
    layers: list[nn.Module] = []
    widths = (3, 64, 64, 128, 128, 256, 256, 512, 512)
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Conv2d(inputs, outputs, 3, stride=1 + i % 2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), lambda batch: torch.randn(batch, 3, 32, 32)


def transformer() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return 4 encoder layers of width 384 (7.1 million parameters), and 32 tokens as inputs."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return encoder, lambda batch: torch.randn(batch, 32, 384)


MODELS = {function.__name__: function for function in (square, conv, transformer)}


class Shapes(nn.Module):
    """Parameters of any shapes, whose gradients are the inputs: nothing is computed in between."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.shapes = [tuple(shape) for shape in shapes]
        self.parameters_ = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in self.shapes])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum over parameters of parameter times input, a scalar."""
        parts = torch.split(inputs, [parameter.numel() for parameter in self.parameters_])
        pairs = zip(self.parameters_, parts, strict=True)
        return torch.stack([(p * part.view_as(p)).sum() for p, part in pairs]).sum()


def make_model(model: str | Sequence[Sequence[int]]) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Make a model.

    Args:
        model: A name of `MODELS`, or shapes of parameters.

    Returns:
        The model and a function of the batch size that draws inputs.
    """
    if isinstance(model, str):
        return MODELS[model]()
    numel = sum(torch.Size(shape).numel() for shape in model)
    return Shapes(model), lambda _: torch.randn(numel)
