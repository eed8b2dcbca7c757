"""Parameter shapes of real models, written out, so that nobody needs to install one."""

from collections.abc import Callable

Shapes = dict[str, tuple[int, ...]]


def square() -> Shapes:
    """Return 24 matrices of 1024 x 1024 (25.2 million parameters)."""
    return {f"{i}.weight": (1024, 1024) for i in range(24)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def resnet18() -> Shapes:
    """Return ResNet18 for CIFAR10 (11,173,962 parameters)."""
    shapes = {"conv1.weight": (64, 3, 3, 3), **_norm("bn1", 64)}
    inputs = 64
    for layer, width in enumerate((64, 128, 256, 512), 1):
        for block in range(2):
            name = f"layer{layer}.{block}"
            shapes |= {f"{name}.conv1.weight": (width, inputs, 3, 3), **_norm(f"{name}.bn1", width)}
            shapes |= {f"{name}.conv2.weight": (width, width, 3, 3), **_norm(f"{name}.bn2", width)}
            if block == 0 and inputs != width:
                shapes[f"{name}.downsample.0.weight"] = (width, inputs, 1, 1)
                shapes |= _norm(f"{name}.downsample.1", width)
            inputs = width
    return shapes | _linear("fc", 10, 512)


def resnet50() -> Shapes:
    """Return ResNet50 for ImageNet (25,557,032 parameters)."""
    shapes = {"conv1.weight": (64, 3, 7, 7), **_norm("bn1", 64)}
    inputs = 64
    for layer, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            kernels = ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1))
            for i, kernel in enumerate(kernels, 1):
                shapes[f"{name}.conv{i}.weight"] = kernel
                shapes |= _norm(f"{name}.bn{i}", kernel[0])
            if block == 0:
                shapes[f"{name}.downsample.0.weight"] = (4 * width, inputs, 1, 1)
                shapes |= _norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    return shapes | _linear("fc", 1000, 2048)


def lstm() -> Shapes:
    """Return the language model of the PowerSGD paper (28,949,319 parameters).

    An LSTM of 3 layers of 650, its embedding of 28,869 words tied to the output.
    """
    shapes: Shapes = {"embedding.weight": (28_869, 650)}
    for layer in range(3):
        shapes |= {f"lstm.weight_{kind}_l{layer}": (2600, 650) for kind in ("ih", "hh")}
        shapes |= {f"lstm.bias_{kind}_l{layer}": (2600,) for kind in ("ih", "hh")}
    return shapes | {"output.bias": (28_869,)}


def _gpt(layers: int) -> Shapes:
    d = 768
    shapes: Shapes = {"wte.weight": (50_257, d), "wpe.weight": (1024, d)}
    for i in range(layers):
        shapes |= _norm(f"h.{i}.ln_1", d)
        shapes |= _linear(f"h.{i}.attn.qkv", 3 * d, d) | _linear(f"h.{i}.attn.proj", d, d)
        shapes |= _norm(f"h.{i}.ln_2", d)
        shapes |= _linear(f"h.{i}.mlp.fc", 4 * d, d) | _linear(f"h.{i}.mlp.proj", d, 4 * d)
    return shapes | _norm("ln_f", d)


def gpt() -> Shapes:
    """Return a GPT of 4 layers and d = 768, embeddings tied (67.7 million parameters)."""
    return _gpt(4)


def gpt2() -> Shapes:
    """Return GPT-2 small: 12 layers, d = 768, embeddings tied (124,439,808 parameters)."""
    return _gpt(12)


def vit_b() -> Shapes:
    """Return ViT-B/16 for ImageNet (86,567,656 parameters)."""
    d = 768
    shapes: Shapes = {"class_token": (1, 1, d), "conv_proj.weight": (d, 3, 16, 16)}
    shapes |= {"conv_proj.bias": (d,), "pos_embedding": (1, 197, d)}
    for i in range(12):
        shapes |= _norm(f"layers.{i}.ln_1", d)
        shapes |= _linear(f"layers.{i}.in_proj", 3 * d, d)
        shapes |= _linear(f"layers.{i}.out_proj", d, d)
        shapes |= _norm(f"layers.{i}.ln_2", d)
        shapes |= _linear(f"layers.{i}.mlp.0", 4 * d, d) | _linear(f"layers.{i}.mlp.3", d, 4 * d)
    return shapes | _norm("ln", d) | _linear("head", 1000, d)


def t5_large() -> Shapes:
    """Return T5-large: 24 + 24 layers, d = 1024, embeddings tied (737,668,096 parameters)."""
    d = 1024
    shapes: Shapes = {"shared.weight": (32_128, d)}
    for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        for i in range(24):
            name = f"{stack}.{i}"
            for attention in attentions:
                shapes |= {f"{name}.{attention}.{part}.weight": (d, d) for part in "qkvo"}
                if attention == "self" and i == 0:
                    shapes[f"{name}.{attention}.relative_attention_bias.weight"] = (32, 16)
                shapes[f"{name}.{attention}.norm.weight"] = (d,)
            shapes |= {f"{name}.wi.weight": (4 * d, d), f"{name}.wo.weight": (d, 4 * d)}
            shapes[f"{name}.norm.weight"] = (d,)
        shapes[f"{stack}.final_norm.weight"] = (d,)
    return shapes


WORKLOADS: dict[str, Callable[[], Shapes]] = {
    function.__name__: function
    for function in (square, resnet18, resnet50, lstm, gpt, gpt2, vit_b, t5_large)
}
