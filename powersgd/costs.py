"""What a training step costs: the link, the compression, and how both overlap with backward.

The collectives follow the alpha-beta model: a message costs a fixed time, and each byte its share
of the link. A step is then played through bucket by bucket, as DDP runs it.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from powersgd.models import Layer
from powersgd.plan import Plan, make_plan

PAYLOAD = 0.95  # of what a link carries; the rest is headers of Ethernet, IP and TCP
FORWARD = 1 / 3  # of the time to compute a step; backward is the rest
FIRST_BUCKET_MB, BUCKET_MB = 1, 25  # DDP's defaults


class Algorithm(str, Enum):
    """How an all-reduce travels."""

    RING = "ring"
    TREE = "tree"
    BEST = "best"


class Exchange(str, Enum):
    """How gradients are averaged."""

    PLAIN = "fp32"
    BF16 = "bf16"
    POWERSGD = "powersgd"


@dataclass(frozen=True)
class Link:
    """What connects the workers, each with one of its own.

    Attributes:
        bits_per_s: Its rate, in each direction.
        latency_s: Of one message, one way.
        algorithm: How an all-reduce travels; ``BEST`` is the faster one.
    """

    bits_per_s: float
    latency_s: float
    algorithm: Algorithm = Algorithm.BEST


@dataclass(frozen=True)
class Costs:
    """What work costs on one machine, in seconds; see `powersgd.calibration`.

    Attributes:
        source: Where and how it was measured.
        ranks: The ranks for which it was, ascending.
        element_s: By rank, of one compressed element: all three steps and error feedback.
        group_s: By rank, of one batch of equal matrices, on top.
        cast_s: Of one element that is cast to bf16 and back.
        copy_s: Of one element that DDP copies into its bucket and back.
        message_s: Of one message of an all-reduce, on the host.
        byte_s: Of one byte that an all-reduce sends, on the host.
    """

    source: str
    ranks: tuple[int, ...]
    element_s: tuple[float, ...]
    group_s: tuple[float, ...]
    cast_s: float
    copy_s: float
    message_s: float
    byte_s: float

    def compression_s(self, plan: Plan, rank: int) -> float:
        """Return the time to compress and decompress one bucket.

        Args:
            plan: The bucket's.
            rank: Of the approximation; between and beyond the measured ones a line is drawn.
        """
        element_s = _on_line(self.ranks, self.element_s, rank)
        group_s = _on_line(self.ranks, self.group_s, rank)
        return plan.residual_numel * element_s + len(plan.groups) * group_s

    def all_reduce_s(self, nbytes: float, workers: int, link: Link) -> float:
        """Return the time of one all-reduce.

        Args:
            nbytes: Bytes of the tensor.
            workers: Number of ranks.
            link: What connects them.
        """
        if workers == 1 or not nbytes:
            return 0.0
        message_s = link.latency_s + self.message_s
        byte_s = 8 / (PAYLOAD * link.bits_per_s) + self.byte_s
        share = 2 * (workers - 1)
        ring = share * message_s + share / workers * nbytes * byte_s
        # Up a tree and down again; in two trees at a time, so that leaves do not idle.
        tree = 2 * math.ceil(math.log2(workers)) * message_s + 2 * nbytes * byte_s
        times = {Algorithm.RING: ring, Algorithm.TREE: tree, Algorithm.BEST: min(ring, tree)}
        return times[link.algorithm]


def _on_line(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return max(0.0, ys[right - 1] + share * (ys[right] - ys[right - 1]))


@dataclass(frozen=True)
class Method:
    """One way to average gradients.

    Attributes:
        exchange: How.
        rank: Rank of PowerSGD's approximation; 0 for the others.
    """

    exchange: Exchange
    rank: int = 0

    @property
    def name(self) -> str:
        """Its name for people."""
        if self.exchange is Exchange.POWERSGD:
            return f"PowerSGD rank {self.rank}"
        return f"all-reduce {self.exchange.value}"


@functools.lru_cache
def split_into_buckets(
    layers: tuple[Layer, ...], bucket_cap_mb: float = BUCKET_MB
) -> list[tuple[Layer, ...]]:
    """Fill buckets as DDP does: from the last parameter to the first, the first bucket smaller.

    Args:
        layers: In the model's order.
        bucket_cap_mb: DDP's.

    Returns:
        The buckets in the order in which backward completes them.
    """
    buckets: list[list[Layer]] = [[]]
    cap, filled = min(FIRST_BUCKET_MB, bucket_cap_mb) * 2**20, 0
    for layer in reversed(layers):
        buckets[-1].append(layer)
        filled += layer.nbytes
        if filled >= cap:
            buckets.append([])
            cap, filled = bucket_cap_mb * 2**20, 0
    return [tuple(bucket) for bucket in buckets if bucket]


@functools.lru_cache(maxsize=4096)
def plan_layers(layers: tuple[Layer, ...], rank: int, min_compression_rate: float) -> Plan:
    """Plan a bucket, or a whole model.

    Args:
        layers: In the order of the bucket.
        rank: Of the approximation.
        min_compression_rate: See `powersgd.PowerSGDState`.

    Returns:
        The plan.
    """
    return make_plan([layer.spec for layer in layers], rank, min_compression_rate)


@dataclass(frozen=True)
class Job:
    """What is trained where.

    Attributes:
        layers: The model's.
        workers: Number of ranks.
        compute_s: Forward, backward and optimizer of one step, without communication.
        costs: Of this machine.
        min_compression_rate: See `powersgd.PowerSGDState`.
        bucket_cap_mb: DDP's.
    """

    layers: tuple[Layer, ...]
    workers: int
    compute_s: float
    costs: Costs
    min_compression_rate: float = 2
    bucket_cap_mb: float = BUCKET_MB

    def step_s(self, method: Method, link: Link) -> float:
        """Predict the time of a step.

        Backward fills bucket after bucket; each travels as soon as it is full, one at a time, while
        backward goes on. PowerSGD computes P between two buckets, and its second all-reduce comes
        after the last one.

        Args:
            method: How gradients are averaged.
            link: What connects the workers.

        Returns:
            Seconds.
        """
        buckets = split_into_buckets(self.layers, self.bucket_cap_mb)
        total = sum(layer.spec.numel for layer in self.layers)
        now, free = FORWARD * self.compute_s, 0.0  # of the processor; of the link
        ends, plans = [], []
        for bucket in buckets:
            numel = sum(layer.spec.numel for layer in bucket)
            now += (1 - FORWARD) * self.compute_s * numel / max(total, 1)
            now += self.costs.copy_s / 2 * numel  # into the bucket
            nbytes, work_s, plan = self._first_message(bucket, numel, method)
            now += work_s
            free = max(now, free) + self.costs.all_reduce_s(nbytes, self.workers, link)
            ends.append(free)
            plans.append((plan, bucket[0].itemsize))
        out_s = self.costs.copy_s / 2 * total
        if method.exchange is not Exchange.POWERSGD:
            return max(now, free) + out_s
        return self._finish(method.rank, plans, now, ends, link) + out_s

    def _first_message(
        self, bucket: tuple[Layer, ...], numel: int, method: Method
    ) -> tuple[float, float, Plan | None]:
        # Bytes, work before they are sent, and the plan of what is compressed.
        itemsize = bucket[0].itemsize
        if method.exchange is Exchange.PLAIN:
            return numel * itemsize, 0.0, None
        if method.exchange is Exchange.BF16:
            return 2 * numel, numel * self.costs.cast_s if itemsize > 2 else 0.0, None
        plan = plan_layers(bucket, method.rank, self.min_compression_rate)
        nbytes = (plan.p_numel + plan.uncompressed_numel + 1) * itemsize
        return nbytes, self.costs.compression_s(plan, method.rank) / 3, plan

    def _finish(
        self,
        rank: int,
        plans: Sequence[tuple[Plan | None, int]],
        now: float,
        ends: Sequence[float],
        link: Link,
    ) -> float:
        # P, Q and the reconstruction each take a third of the compression.
        free = ends[-1]
        now = max(now, free)  # all P are awaited before the first Q
        left_s = 0.0
        for plan, itemsize in plans:
            if plan is None or not plan.groups:
                continue
            third = self.costs.compression_s(plan, rank) / 3
            now += third
            left_s += third
            nbytes = plan.q_numel * itemsize
            free = max(now, free) + self.costs.all_reduce_s(nbytes, self.workers, link)
        return max(now, free) + left_s

    def break_even_bits_per_s(self, method: Method, baseline: Method, link: Link) -> float:
        """Return the link rate below which a method is faster than another.

        Args:
            method: Of PowerSGD.
            baseline: What it is compared with.
            link: Whose rate is varied.

        Returns:
            Bits per second, between 1 Mbit/s and 10 Tbit/s; 0 if it is slower there throughout,
            infinity if faster.
        """
        low, high = 1e6, 1e13

        def is_faster(rate: float) -> bool:
            at = Link(rate, link.latency_s, link.algorithm)
            return self.step_s(method, at) < self.step_s(baseline, at)

        if is_faster(high):
            return math.inf
        if not is_faster(low):
            return 0.0
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_faster(middle) else (low, middle)
        return low
