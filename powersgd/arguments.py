"""Checks of what users pass in: one sentence with the value and what is allowed."""

import math
import operator
from typing import Any, Literal


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """Return ``value`` as an int of at least ``minimum``.

    Args:
        name: The argument's name.
        value: What the user gave.
        minimum: The smallest allowed value, if there is one. The largest is that of 64 bits.

    Returns:
        The integer.

    Raises:
        ValueError: If it is something else; names the value and what is allowed.
    """
    allowed = "an integer" if minimum is None else f"an integer >= {minimum}"
    try:
        result = None if _is_bool(value) else operator.index(value)
    except (TypeError, RuntimeError):  # tensors raise the latter
        result = None
    if result is None or not -(1 << 63) <= result < 1 << 63:
        raise ValueError(f"{name} is {show(value)}, but must be {allowed}, of 64 bits at most")
    if minimum is not None and result < minimum:
        raise ValueError(f"{name} is {value!r}, but must be {allowed}")
    return result


def number(
    name: str,
    value: Any,
    allowed: Literal["> 0", ">= 0"],
    above: float = 0.0,
    below: float = math.inf,
) -> float:
    """Return ``value`` if it is a finite number in the allowed range.

    Args:
        name: The argument's name.
        value: What the user gave.
        allowed: ``"> 0"`` or ``">= 0"``.
        above: A greater number that it must exceed.
        below: A number that it must not reach.

    Returns:
        The value.

    Raises:
        ValueError: If it is something else; names the value and what is allowed.
    """
    try:
        result = math.nan if _is_bool(value) or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        result = math.nan
    is_allowed = result > above or (result == 0 and allowed == ">= 0")
    if not is_allowed or result >= below:
        limit = f"> {above} and < {below}" if above else allowed
        raise ValueError(f"{name} is {show(value)}, but must be a finite number {limit}")
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
    try:
        is_allowed = bool(value in (False, True))
    except (TypeError, ValueError, RuntimeError):  # several values in one
        is_allowed = False
    if not is_allowed:
        raise ValueError(f"{name} is {show(value)}, but must be True or False")
    return bool(value)


def group(name: str, value: Any) -> Any:
    """Return ``value`` if it is None, a process group with this rank in it, or like one.

    Args:
        name: The argument's name.
        value: What the user gave.

    Returns:
        The value.

    Raises:
        ValueError: If it is something else, such as torch's mark for a rank outside the group.
    """
    is_one = any(callable(getattr(value, name, None)) for name in ("allreduce", "start_mean_"))
    if value is not None and not is_one:
        raise ValueError(
            f"{name} is {show(value)}, but must be None or a process group with this rank in it"
        )
    return value


def require(option: str, value: int, low: int, high: int, reason: str = "") -> None:
    """Refuse a number outside its range.

    Args:
        option: The command line's name for it.
        value: What the user gave.
        low: The smallest allowed value.
        high: The largest allowed value.
        reason: Ends the sentence.

    Raises:
        ValueError: With one sentence.
    """
    if not low <= value <= high:
        raise ValueError(f"{option} is {value}, but must be from {low} to {high}{reason}")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def show(value: Any) -> str:
    """Return a value's text, of at most 100 characters, for an error."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "too large to print"
    return text if len(text) <= 100 else f"{text[:97]}..."
