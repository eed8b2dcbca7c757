"""Checks of what users pass in: one sentence with the value and what is allowed."""

import math
import operator
from typing import Any, Literal


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """Return ``value`` as an int of at least ``minimum``.

    Args:
        name: The argument's name.
        value: What the user gave.
        minimum: The smallest allowed value, if there is one.

    Returns:
        The integer.

    Raises:
        ValueError: If it is something else; names the value and what is allowed.
    """
    allowed = "an integer" if minimum is None else f"an integer >= {minimum}"
    try:
        result = operator.index(value)
    except TypeError:
        result = None
    if result is None or isinstance(value, bool) or (minimum is not None and result < minimum):
        raise ValueError(f"{name} is {value!r}, but must be {allowed}")
    return result


def number(name: str, value: Any, allowed: Literal["> 0", ">= 0"]) -> float:
    """Return ``value`` if it is a finite number in the allowed range.

    Args:
        name: The argument's name.
        value: What the user gave.
        allowed: ``"> 0"`` or ``">= 0"``.

    Returns:
        The value.

    Raises:
        ValueError: If it is something else; names the value and what is allowed.
    """
    try:
        is_allowed = value > 0 if allowed == "> 0" else value >= 0
        is_allowed = is_allowed and math.isfinite(value) and not isinstance(value, bool)
        result = float(value)
    except (TypeError, ValueError):
        is_allowed = False
    if not is_allowed:
        raise ValueError(f"{name} is {value!r}, but must be a finite number {allowed}")
    return result


def flag(name: str, value: Any) -> bool:
    """Return ``value`` as a bool.

    Args:
        name: The argument's name.
        value: What the user gave.

    Returns:
        The flag.

    Raises:
        ValueError: If it is neither True nor False nor equal to one of them; names the value.
    """
    if value not in (False, True):
        raise ValueError(f"{name} is {value!r}, but must be True or False")
    return bool(value)


def group(name: str, value: Any) -> Any:
    """Return ``value`` if it is None or a process group with this rank in it.

    Args:
        name: The argument's name.
        value: What the user gave.

    Returns:
        The value.

    Raises:
        ValueError: If it is something else, such as torch's mark for a rank outside the group.
    """
    if value is not None and not callable(getattr(value, "size", None)):
        raise ValueError(
            f"{name} is {value!r}, but must be None or a process group with this rank in it"
        )
    return value
