"""The state of one model's compression: settings, statistics and what each parameter carries over.

It starts no collective. What a step carries over to the next one changes here at its end, once the
step is known to be good on all ranks.
"""

import itertools
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from powersgd.layout import local
from powersgd.memory import BucketState, Carried
from powersgd.names import StandIns
from powersgd.phases import EAGER, Steps
from powersgd.plan import Plan
from powersgd.positions import Positions
from powersgd.saving import Saved
from powersgd.settings import Settings, check

logger = logging.getLogger(__name__)

_handles = itertools.count()
STATES: weakref.WeakValueDictionary[int, "PowerSGDState"] = weakref.WeakValueDictionary()


class PowerSGDState(Saved):
    r"""Settings and memory of `powerSGD_hook` and `batched_powerSGD_hook`, for one model.

    The first ten arguments have the names, order, defaults and meaning of
    ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState``.

    The settings are attributes and may be changed in mid-run, on all ranks: they come into force at
    the second step after the change, once all ranks have agreed on them.

    ``loss_scale``, another attribute, is what the gradients of this step are multiplied by; with a
    ``torch.amp.GradScaler``, set it to ``scaler.get_scale()`` before each backward pass. Residuals
    follow it, so that they survive its changes.

    Memory, from the first compressed step on: with error feedback one buffer of the size of the
    compressed gradients, with warm start twice the size of all Q.

    Args:
        process_group: DDP's process group; None means the default group.
        matrix_approximation_rank: Largest rank of the factors, >= 1. Typically 1 to 4; double it
            until the accuracy is right.
        start_powerSGD_iter: Steps of plain averaging before compression starts, >= 0, and >= 2 with
            error feedback or warm start. About 10 % of all steps is a good start.
        min_compression_rate: A matrix ``(n, m)`` is compressed if
            ``(n + m) * rank * min_compression_rate < n * m``; > 0.
        use_error_feedback: Add what compression left out to the next step's gradient.
        warm_start: Start from the last step's Q, not from a random one.
        orthogonalization_epsilon: Added to the norms in orthogonalization, >= 0. Zero rows and
            dependent rows are safe without it.
        random_seed: Seeds the random Q; any integer of 64 bits, the same on all ranks.
        compression_stats_logging_frequency: Log the statistics every so many steps; below 1 is 1.
        batch_tensors_with_same_shape: Batch all matrices of a shape, also where they have to be
            copied together. Those that lie evenly spaced are always batched, without a copy.
        steps: The implementation of the steps; `powersgd.EAGER` or a compiled form of it.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        >>> state.compression_stats()
        (0, 0, 0)
    """

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 (torch's name)
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        steps: Steps = EAGER,
    ) -> None:
        if not isinstance(steps, Steps):
            raise ValueError(f"steps is {steps!r}, but must be a powersgd.Steps such as EAGER")
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.loss_scale = 1.0
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter <= 1:
            raise ValueError(
                f"start_powerSGD_iter is {self.start_powerSGD_iter}, but must be >= 2 with "
                "use_error_feedback or warm_start, because DDP rebuilds its buckets after the "
                "first step"
            )
        self._steps = steps
        self.owner: Any = None  # the front end's: whose state it is
        self.stand_ins = StandIns()
        self.handle = next(_handles)
        STATES[self.handle] = self
        self.reset()
        logger.info("PowerSGD config: %s", self.settings()._asdict())

    def reset(self) -> None:
        """Forget all but the settings, as if no step had been made."""
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        # What ranks have agreed on; settings that were changed since then wait for their turn.
        self.agreed: Settings | None = None
        self.agreed_group: Any = None
        # This rank in the world, and the size of the group that agreed; and the same of the rank
        # whose residuals were loaded, until ranks have agreed that this rank is the right one.
        self.home: tuple[int, int] | None = None
        self.origin: tuple[int, int] | None = None
        # The running step; the reduction's.
        self.in_flight: list[Any] = []
        self.change: Any = None
        # The front end's: where the step stands.
        self.last_index: float = math.inf
        # What graphs need, if the compiler traces the hook, and by which they find the state.
        self.traced: Any = None
        self.positions = Positions()
        self._buckets: dict[Tensor, BucketState] = {}
        # The model's parameters by name; empty until it is known.
        self.names: Mapping[str, Tensor] = {}
        # What was loaded and waits for its parameter to arrive; what was unpickled, for its model.
        self.loaded: dict[Tensor, Carried] = {}
        self.unclaimed: Mapping[str, Any] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            AttributeError: If there is none of this name: a setting was misspelt.
            ValueError: If it is a setting and the value is not allowed.
        """
        is_made = type(self) is PowerSGDState and "unclaimed" in self.__dict__  # set last
        if is_made and not hasattr(self, name):
            raise AttributeError(f"PowerSGDState has no attribute {name!r} to set")
        super().__setattr__(name, check(name, value))

    @property
    def steps(self) -> Steps:
        """The implementation of the steps, for good."""
        return self._steps

    def settings(self) -> Settings:
        """Read the settings as they are set now."""
        return Settings.of(self)

    @property
    def in_force(self) -> Settings:
        """The settings that are in force: the ones that ranks have agreed on, if they have."""
        return self.agreed or self.settings()

    def has_changed(self) -> bool:
        """Tell whether what ranks must agree on was set since they agreed."""
        return self.settings() != self.agreed or self.process_group is not self.agreed_group

    def adopt(self, settings: Settings, home: tuple[int, int]) -> None:
        """Take over what ranks have agreed on; memory that it switches off is dropped.

        Args:
            settings: The settings of the steps to come.
            home: This rank in the world, and the size of its group.
        """
        self.agreed, self.agreed_group = settings, self.process_group
        self.home, self.origin = home, None
        for bucket in self._buckets.values():
            if not settings.use_error_feedback:
                bucket.residual, bucket.owed = None, {}
            if not settings.warm_start:
                bucket.q = bucket.spare = None
        for carried in self.loaded.values():
            if not settings.use_error_feedback:
                carried.residual, carried.is_owed = None, False
            if not settings.warm_start:
                carried.q = carried.spare = None

    def is_warming_up(self) -> bool:
        """Tell whether gradients are still averaged without compression."""
        return self.in_force.iter < self.in_force.start_powerSGD_iter

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Count a step when its last bucket is done, and log when compression starts.

        Args:
            bucket: The ``torch.distributed.GradBucket`` that is done.
        """
        if bucket.is_last():
            self.count_iteration()

    def count_iteration(self) -> None:
        """Count a step, and log when compression starts."""
        self.iter += 1
        if self.agreed is not None:
            self.agreed = self.agreed._replace(iter=self.agreed.iter + 1)
        if self.in_force.iter == self.in_force.start_powerSGD_iter:
            logger.info("Start to apply PowerSGD after %s iterations.", self.in_force.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression so far, over all compressed steps.

        Sparse gradients, which are never compressed, are not counted.

        Returns:
            ``(rate, numel_before, numel_after)``: elements of the gradients, elements handed to
            all-reduce by this rank, without the flag of each bucket that tells of changed settings,
            and their ratio (0 before the first compressed step).
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def count(self, plans: Sequence[Plan], numel: int) -> None:
        """Add one compressed step to the statistics, and log them when it is time.

        Args:
            plans: The plans of the step's buckets.
            numel: Elements of the gradients in these buckets.
        """
        self.total_numel_before_compression += numel
        self.total_numel_after_compression += sum(plan.sent_numel for plan in plans)
        iteration = self.in_force.iter
        if iteration < self.next_stats_report:
            return
        rate, before, after = self.compression_stats()
        logger.info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, "
            "rate %s",
            iteration,
            before,
            after,
            rate,
        )
        self.next_stats_report = iteration + max(1, self.compression_stats_logging_frequency)

    def residual(self, parameter: Tensor) -> Tensor | None:
        """Return a copy of what this rank still owes to a parameter's gradient.

        Like the gradient, it is multiplied by `loss_scale`.

        Args:
            parameter: A parameter of the model that this state serves.

        Returns:
            Shape of ``parameter``; None if it has no residual (not compressed, no error feedback,
            no compressed step yet, or a copied or unpickled state has not met its model yet).
        """
        carried = self.carried(parameter)
        if carried.residual is None:
            return None
        return carried.residual * (self.loss_scale / carried.loss_scale)

    def find_bucket(self, parameters: Sequence[Tensor], key: tuple[Any, ...]) -> BucketState | None:
        """Look up the bucket of exactly these parameters, as they lie now, under this key."""
        bucket = self._buckets.get(parameters[0])
        if bucket is None or bucket.key != key or len(bucket.parameters) != len(parameters):
            return None
        pairs = zip(bucket.parameters, bucket.specs, parameters, strict=True)
        same = all(a is b and local(b).stride() == spec.stride for a, spec, b in pairs)
        return bucket if same else None

    def carried(self, parameter: Tensor) -> Carried:
        """Return what a parameter carries over, from wherever it is now."""
        if parameter in self.loaded:
            return self.loaded[parameter]
        bucket = self._buckets.get(parameter)
        return Carried() if bucket is None else bucket.carried(parameter)

    def served(self) -> set[Tensor]:
        """Return all parameters that this state knows of."""
        return {*self.positions.parameters(), *self._buckets, *self.loaded}

    def place_bucket(self, bucket: BucketState) -> None:
        """Take in a bucket that holds all that its parameters carry over."""
        for parameter in bucket.parameters:
            if parameter in self._buckets:
                self._buckets[parameter].key = ()  # no longer up to date: must not be found again
            self._buckets[parameter] = bucket
            self.loaded.pop(parameter, None)
