"""What all ranks must agree on."""

from typing import Any, NamedTuple

from powersgd.arguments import flag, integer, number


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
    def of(cls, source: Any) -> "Settings":
        """Read and check them.

        Args:
            source: What has attributes of these names.

        Returns:
            The settings.

        Raises:
            ValueError: If a value is out of its range; names the value and what is allowed.
        """
        return cls(
            integer("matrix_approximation_rank", source.matrix_approximation_rank, 1),
            integer("start_powerSGD_iter", source.start_powerSGD_iter, 0),
            number("min_compression_rate", source.min_compression_rate, "> 0"),
            flag("use_error_feedback", source.use_error_feedback),
            flag("warm_start", source.warm_start),
            number("orthogonalization_epsilon", source.orthogonalization_epsilon, ">= 0"),
            integer("random_seed", source.random_seed),
            flag("batch_tensors_with_same_shape", source.batch_tensors_with_same_shape),
            integer("iter", source.iter, 0),
        )
