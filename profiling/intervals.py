"""Sets of times, as sorted lists of disjoint ``(start, end)``."""

from collections.abc import Iterable

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union.

    Args:
        intervals: In any order, overlapping or not.

    Returns:
        Sorted and disjoint, none of them empty.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return what is in both.

    Args:
        a: From `merge`.
        b: From `merge`.

    Returns:
        As from `merge`.
    """
    others = list(b)
    return merge(
        (max(start, low), min(end, high))
        for start, end in a
        for low, high in others
        if max(start, low) < min(end, high)
    )


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return what is in the first and not in the second.

    Args:
        a: From `merge`.
        b: From `merge`.

    Returns:
        As from `merge`.
    """
    left, others = [], list(b)
    for start, end in a:
        for low, high in others:
            if low < end and high > start:
                left.append((start, max(start, low)))
                start = max(start, high)
        left.append((start, max(start, end)))
    return merge(left)


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of all of them.

    Args:
        intervals: From `merge`.

    Returns:
        The sum of their lengths.
    """
    return sum(end - start for start, end in intervals)
