"""Rates, times and sizes as people write them."""

import math
import re

# Powers of ten, for float() to round once: 350 * 1e-3 is not the number that 0.35 is.
_PREFIXES = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12}
_SECONDS = {"s": 0, "ms": -3, "us": -6, "ns": -9}


def parse_rate(text: str) -> float:
    """Read a link rate.

    Args:
        text: Such as ``100Mbit``, ``1.5 Gbit/s``.

    Returns:
        Bits per second.

    Raises:
        ValueError: If it is none, or not positive.

    Example:
        >>> parse_rate("2.5Gbit/s")
        2500000000.0
    """
    match = re.fullmatch(r"(\d+\.?\d*) ?([kKMGT]?)bit(/s)?", text.strip())
    rate = float(f"{match[1]}e{_PREFIXES[match[2]]}") if match else 0.0
    if not 0 < rate < math.inf:
        raise ValueError(f"{text!r} is no link rate: write it as 100Mbit, 2.5Gbit")
    return rate


def parse_time(text: str) -> float:
    """Read a time.

    Args:
        text: Such as ``100us``, ``1.5 ms``, ``2s``.

    Returns:
        Seconds, 0 or more.

    Raises:
        ValueError: If it is none.

    Example:
        >>> parse_time("350ms")
        0.35
    """
    match = re.fullmatch(r"(\d+\.?\d*) ?([mnu]?s)", text.strip())
    seconds = float(f"{match[1]}e{_SECONDS[match[2]]}") if match else math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is no time: write it as 100us, 350ms, 2s")
    return seconds


def format_rate(bits_per_s: float) -> str:
    """Write a link rate with three digits.

    Args:
        bits_per_s: Bits per second.

    Returns:
        Its text.

    Example:
        >>> format_rate(1.234e9)
        '1.23 Gbit/s'
    """
    return _scaled(bits_per_s, "bit/s")


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes with three digits.

    Args:
        nbytes: Bytes.

    Returns:
        Its text.

    Example:
        >>> format_bytes(183_740)
        '184 kB'
    """
    return _scaled(nbytes, "B")


def _scaled(value: float, unit: str) -> str:
    prefix = next((p for p in "TGMk" if value >= 0.9995 * 10.0 ** _PREFIXES[p]), "")
    return f"{_three_digits(value / 10.0 ** _PREFIXES[prefix])} {prefix}{unit}"


def format_time(seconds: float) -> str:
    """Write a time with three digits.

    Args:
        seconds: Seconds.

    Returns:
        Its text.

    Example:
        >>> format_time(0.0123)
        '12.3 ms'
    """
    unit = next((u for u in ("s", "ms") if seconds >= 0.9995 * 10.0 ** _SECONDS[u]), "us")
    return f"{_three_digits(seconds / 10.0 ** _SECONDS[unit])} {unit}"


def _three_digits(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"
