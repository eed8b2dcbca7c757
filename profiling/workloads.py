"""Parameter shapes of real models, written out, so that no benchmark needs to install one."""

Shapes = list[tuple[int, ...]]


def square() -> Shapes:
    """Return 24 matrices of 1024 x 1024 (25.2 million parameters)."""
    return [(1024, 1024)] * 24


def resnet18() -> Shapes:
    """Return ResNet18 for CIFAR10, in the order of its modules (11.2 million parameters)."""
    shapes: Shapes = [(64, 3, 3, 3), (64,), (64,)]
    inputs = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, inputs, 3, 3), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            if block == 0 and inputs != width:
                shapes += [(width, inputs, 1, 1), (width,), (width,)]
            inputs = width
    return [*shapes, (10, 512), (10,)]


def gpt() -> Shapes:
    """Return a GPT with 4 layers and d = 768, embeddings tied (67.7 million parameters)."""
    d = 768
    norm: Shapes = [(d,), (d,)]
    attention: Shapes = [(3 * d, d), (3 * d,), (d, d), (d,)]
    mlp: Shapes = [(4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    layer = norm + attention + norm + mlp
    return [(50257, d), (1024, d), *layer * 4, *norm]


WORKLOADS = {"square": square, "resnet18": resnet18, "gpt": gpt}
