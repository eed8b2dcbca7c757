"""Ranks compare what they are about to do, so that a difference is an error and not a hang.

What one rank alone finds wrong is such a difference, too: it tells the others instead of leaving
them to wait for it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from powersgd.collectives import Collectives, explained

_ERROR = "error"


def require_agreement(
    collect: Callable[[], Mapping[str, Any]], collectives: Collectives, device: torch.device
) -> None:
    """Raise on all ranks unless all of them state the same facts.

    One small all-gather; two more, to name the difference, only if there is one.

    Args:
        collect: Returns what this rank is about to do, by name; values that JSON can hold. What it
            raises, as ValueError or TypeError, is raised here once the other ranks know.
        collectives: The backend, all of whose members make this call.
        device: Where the group's backend wants its tensors.

    Raises:
        RuntimeError: If a collective fails.
        TypeError: If ``collect`` raised one.
        ValueError: If ``collect`` raised one, on this or on another rank, or if ranks differ; names
            the first differing fact and every rank's value.
    """
    own: Exception | None = None
    try:
        facts = collect()
    except (TypeError, ValueError) as error:
        own, facts = error, {_ERROR: str(error)}
    every = _gather(facts, collectives, device)
    if own is not None:
        raise own
    for rank, theirs in enumerate(every):
        if _ERROR in theirs:
            raise ValueError(f"rank {rank} of the group stopped: {theirs[_ERROR]}")
    if every:
        raise ValueError(_describe(every))


def _gather(
    facts: Mapping[str, Any], collectives: Collectives, device: torch.device
) -> list[Mapping[str, Any]]:
    # By rank; empty if all are the same.
    text = json.dumps(facts).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    mine = torch.tensor([digest, len(text)], dtype=torch.int64, device=device)
    digests, lengths = torch.stack(_all_gather(mine, collectives)).T.tolist()
    if len(set(digests)) == 1:
        return []
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = _all_gather(padded.to(device), collectives)
    return [json.loads(bytes(t[:n].tolist())) for t, n in zip(texts, lengths, strict=True)]


def _all_gather(tensor: torch.Tensor, collectives: Collectives) -> list[torch.Tensor]:
    with explained():
        return collectives.all_gather(tensor)


def _describe(facts: Sequence[Mapping[str, Any]]) -> str:
    name = _find_difference(facts)
    remedy = "; load the same checkpoint on all of them" if name == "iter" else ""
    own: list[Any] = [f.get(name) for f in facts]
    while all(isinstance(value, dict) for value in own):  # of long tables, one entry says enough
        inner = _find_difference(own)
        name, own = f"{name}: {inner}", [value.get(inner) for value in own]
    values = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(own))
    return (
        f"ranks disagree on {name}: {values}; it must be the same on all ranks of the group{remedy}"
    )


def _find_difference(facts: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for rank in facts for name in rank)
    return next(k for k in names if len({json.dumps(f.get(k)) for f in facts}) > 1)
