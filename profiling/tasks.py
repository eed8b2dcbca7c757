"""The two training tasks: digits with a convolutional net, English text with a transformer.

Both are small enough for seconds on a CPU and real enough that training may fail: their data ships
with scikit-learn and with Python.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from powersgd.demo import TRAIN_IMAGES, build_net, load_split

Batch = tuple[Tensor, Tensor]

IMAGES = 64  # of a batch, over all ranks
WINDOWS, CONTEXT = 16, 32  # of a batch, over all ranks; characters that the transformer sees
HELD_OUT_WINDOWS = 128
HELD_OUT_SHARE = 10  # one paragraph in so many
SHORTEST_PARAGRAPH = 100  # characters; below are headings and bits of code
OVERLAP = 60  # characters; a held-out paragraph shares no run of so many with the training text
SYMBOLS = 96  # the line break, and ASCII from the space to the tilde
WIDTH, LAYERS, HEADS = 64, 2, 4


@dataclass(frozen=True)
class Task:
    """What is learned, from what, and how fast.

    Attributes:
        title: Its name for people.
        loss_label: Name and unit of the held-out loss.
        build: Returns the untrained model; its outputs are logits ``(..., classes)``.
        draw: Returns the inputs and targets of a seed's step, over all ranks.
        held_out: Returns inputs and targets that are never trained on.
        learning_rates: Peak learning rate of each optimizer, chosen for plain all-reduce.
        steps: Of a run.
        shows_accuracy: Whether the accuracy tells something beside the loss.
    """

    title: str
    loss_label: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Batch]
    held_out: Callable[[], Batch]
    learning_rates: Mapping[str, float]
    steps: int
    shows_accuracy: bool


def _draw_digits(seed: int, step: int) -> Batch:
    images, labels, *_ = load_split()
    epoch, start = divmod(step, TRAIN_IMAGES // IMAGES)
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(TRAIN_IMAGES, generator=generator)
    batch = order[start * IMAGES : (start + 1) * IMAGES]
    return images[batch], labels[batch]


def _held_out_digits() -> Batch:
    _, _, images, labels = load_split()
    return images, labels


@functools.cache
def load_paragraphs() -> tuple[list[str], list[str]]:
    """Split the text of Python's ``help()`` topics into training and held-out paragraphs.

    Topics repeat each other, so each paragraph is taken once, on one line, and a held-out one that
    shares a long run of characters with the training text is left out.

    Returns:
        The training and the held-out paragraphs, in a fixed order. Another version of Python has
        another text.
    """
    from pydoc_data.topics import topics  # half a MB, read only by those who train on it

    texts = (
        " ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")
    )
    paragraphs = [text for text in dict.fromkeys(texts) if len(text) >= SHORTEST_PARAGRAPH]
    held_out = paragraphs[HELD_OUT_SHARE - 1 :: HELD_OUT_SHARE]
    reserved = set(held_out)
    train = [text for text in paragraphs if text not in reserved]
    known = set().union(*map(_runs, train))
    return train, [text for text in held_out if known.isdisjoint(_runs(text))]


def _runs(text: str) -> set[str]:
    return {text[i : i + OVERLAP] for i in range(len(text) - OVERLAP + 1)}


def encode(text: str) -> Tensor:
    """Number the characters of a text.

    Args:
        text: Its line breaks and printable ASCII count; anything else becomes a question mark.

    Returns:
        Shape ``(len(text),)``, int64: 0 for a line break, 1 for a space, 95 for a tilde.
    """
    codes = torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.int64)
    is_printable = (codes >= ord(" ")) & (codes <= ord("~"))
    codes = torch.where(is_printable, codes, ord("?")) - (ord(" ") - 1)
    is_break = torch.tensor([character == "\n" for character in text])
    return codes.masked_fill(is_break, 0)


@functools.cache
def _load_text() -> tuple[Tensor, Tensor]:
    train, held_out = ("\n".join(paragraphs) for paragraphs in load_paragraphs())
    return encode(train), encode(held_out)


def _cut(text: Tensor, starts: Tensor) -> Batch:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def _draw_text(seed: int, step: int) -> Batch:
    text, _ = _load_text()
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return _cut(text, torch.randint(len(text) - CONTEXT, (WINDOWS,), generator=generator))


def _held_out_text() -> Batch:
    _, text = _load_text()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, HELD_OUT_WINDOWS, dtype=torch.float64)
    return _cut(text, starts.long())


class Block(nn.Module):
    """A layer of the transformer: attention to what came before, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.linear_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output ``(batch, characters, WIDTH)``, of its input's shape."""
        heads = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.linear(self.linear_norm(hidden))
        return result


class Transformer(nn.Module):
    """Predicts each next character of a window: 2 layers of width 64, 114,528 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits ``(batch, characters, SYMBOLS)`` of what follows each character."""
        positions = self.positions(torch.arange(characters.size(1), device=characters.device))
        logits: Tensor = self.head(self.layers(self.characters(characters) + positions))
        return logits


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of logits ``(..., classes)``, targets ``(...)``."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def unigram_entropy(text: Tensor) -> float:
    """Return the least loss, in nats, of a model that knows how often each character comes.

    Args:
        text: Numbers of characters, shape ``(n,)``.

    Returns:
        The entropy of their distribution; a transformer that learned less learned nothing.
    """
    shares = torch.bincount(text).double() / len(text)
    return math.fsum(-share * math.log(share) for share in shares.tolist() if share > 0)


TASKS = {
    "digits": Task(
        "digits, convolutional net",
        "test loss (nats)",
        build_net,
        _draw_digits,
        _held_out_digits,
        {"sgd": 0.1, "adamw": 8e-3},
        steps=126,
        shows_accuracy=True,
    ),
    "text": Task(
        "English text, transformer",
        "held-out loss (nats per character)",
        Transformer,
        _draw_text,
        _held_out_text,
        {"sgd": 0.5, "adamw": 8e-3},
        steps=240,
        shows_accuracy=False,
    ),
}
