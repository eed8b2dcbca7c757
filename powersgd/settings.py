"""What all ranks must agree on, and what each setting may be."""

from typing import Any, NamedTuple

from powersgd.arguments import flag, group, integer, number

SMALLEST_SCALE, LARGEST_SCALE = 1e-38, 1e38  # between which float32 can divide
_CHECKS: dict[str, tuple[Any, ...]] = {
    "process_group": (group,),
    "matrix_approximation_rank": (integer, 1),
    "start_powerSGD_iter": (integer, 0),
    "min_compression_rate": (number, "> 0"),
    "use_error_feedback": (flag,),
    "warm_start": (flag,),
    "orthogonalization_epsilon": (number, ">= 0"),
    "random_seed": (integer,),
    "compression_stats_logging_frequency": (integer,),
    "batch_tensors_with_same_shape": (flag,),
    "iter": (integer, 0),
    "loss_scale": (number, "> 0", SMALLEST_SCALE, LARGEST_SCALE),
}


def check(name: str, value: Any) -> Any:
    """Check an attribute of `powersgd.PowerSGDState` that users set.

    Args:
        name: The attribute's name.
        value: What the user gave.

    Returns:
        The value as a plain number; any value if the name is none that users set.

    Raises:
        ValueError: If the value is out of its range; names it and what is allowed.
    """
    if name not in _CHECKS:
        return value
    function, *limits = _CHECKS[name]
    return function(name, value, *limits)


class Settings(NamedTuple):
    """The settings that shape a step, under the names of `powersgd.PowerSGDState`'s attributes."""

    matrix_approximation_rank: int
    start_powerSGD_iter: int  # noqa: N815 (torch's name)
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    random_seed: int
    batch_tensors_with_same_shape: bool
    iter: int

    @classmethod
    def of(cls, state: Any) -> "Settings":
        """Read them off a state."""
        return cls(*(getattr(state, name) for name in cls._fields))
