"""Does PowerSGD pay? Predictions for all methods, and what follows from them in a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from powersgd.costs import Exchange, Job, Link, Method, plan_layers
from powersgd.units import format_rate, format_time

RANKS = (1, 2, 4, 8, 16, 32)
PLAIN, BF16 = Method(Exchange.PLAIN), Method(Exchange.BF16)
WORTH = 0.9  # of the other's step time: a smaller gain may be an error of the prediction
GENTLE_RANK = 4  # mostly as accurate as plain averaging; see the README


@dataclass(frozen=True)
class Forecast:
    """What is predicted of one method.

    Attributes:
        method: The method.
        sent_bytes: Bytes that each worker hands to all-reduce per step.
        step_s: Time of a step, in seconds.
        break_even: Link rates in bit/s below which it is faster than fp32 and than bf16 all-reduce,
            0 for never, infinity for always; None for these two themselves.
    """

    method: Method
    sent_bytes: int
    step_s: float
    break_even: tuple[float, float] | None


def predict(job: Job, link: Link, ranks: Sequence[int] = RANKS) -> list[Forecast]:
    """Predict the step time of all-reduce in fp32 and bf16, and of PowerSGD.

    Args:
        job: What is trained.
        link: What connects the workers.
        ranks: Ranks of PowerSGD.

    Returns:
        The two, then the ranks.
    """
    numel = sum(layer.spec.numel for layer in job.layers)
    nbytes = sum(layer.nbytes for layer in job.layers)
    forecasts = [
        Forecast(PLAIN, nbytes, job.step_s(PLAIN, link), None),
        Forecast(BF16, 2 * numel, job.step_s(BF16, link), None),
    ]
    for rank in ranks:
        method = Method(Exchange.POWERSGD, rank)
        rates = [job.break_even_bits_per_s(method, other, link) for other in (PLAIN, BF16)]
        sent = count_sent_bytes(job, rank)
        step_s = job.step_s(method, link)
        forecasts.append(Forecast(method, sent, step_s, (rates[0], rates[1])))
    return forecasts


def count_sent_bytes(job: Job, rank: int) -> int:
    """Return the bytes that each worker hands to all-reduce in a compressed step.

    Args:
        job: What is trained.
        rank: Rank of the approximation.
    """
    layers = ((plan_layers((one,), rank, job.min_compression_rate), one) for one in job.layers)
    return sum(plan.sent_numel * layer.itemsize for plan, layer in layers)


def advise(forecasts: Sequence[Forecast], link: Link) -> str:
    """Say in a sentence or two whether PowerSGD pays.

    Args:
        forecasts: From `predict`.
        link: What connects the workers.

    Returns:
        The recommendation; it begins with "Use", "Don't" or "It hardly matters".
    """
    plain = min(forecasts[:2], key=lambda f: f.step_s)
    powersgd = forecasts[2:]
    paying = [f for f in powersgd if f.step_s < WORTH * plain.step_s]
    if paying:
        chosen = max(
            [f for f in paying if f.method.rank <= GENTLE_RANK] or paying[:1],
            key=lambda f: f.method.rank,
        )
        return _recommend(chosen, paying, plain, link)
    best = min(powersgd, key=lambda f: f.step_s)
    rates = (best.break_even or (0.0, 0.0))[forecasts.index(plain)]
    verdict = "It hardly matters" if best.step_s < plain.step_s else "Don't use PowerSGD here"
    return (
        f"{verdict}: at {format_rate(link.bits_per_s)} the fastest rank, {best.method.rank}, takes "
        f"{format_time(best.step_s)} per step, {plain.method.name} {format_time(plain.step_s)}. "
        + _say_where(rates)
    )


def _recommend(chosen: Forecast, paying: Sequence[Forecast], plain: Forecast, link: Link) -> str:
    largest = paying[-1].method.rank
    return (
        f"Use PowerSGD: at {format_rate(link.bits_per_s)}, rank {chosen.method.rank} takes "
        f"{format_time(chosen.step_s)} per step, {plain.method.name} {format_time(plain.step_s)}, "
        f"{plain.step_s / chosen.step_s:.1f} times as long; it pays up to rank {largest}. "
        "Check the accuracy: double the rank until it is right."
    )


def _say_where(rate: float) -> str:
    if rate == 0:
        return "It would not pay on any link slower than this one either."
    if math.isinf(rate):
        return "It would be faster at every rate."
    return f"It would break even on a link of {format_rate(rate)}."


def sweep_workers(job: Job, link: Link, rank: int, workers: Sequence[int]) -> list[list[float]]:
    """Predict step times for other numbers of workers.

    Args:
        job: What is trained.
        link: What connects the workers.
        rank: Rank of PowerSGD.
        workers: Numbers of workers.

    Returns:
        For each number the step times of fp32, bf16 and PowerSGD, in seconds.
    """
    methods = (PLAIN, BF16, Method(Exchange.POWERSGD, rank))
    return [[replace(job, workers=n).step_s(m, link) for m in methods] for n in workers]
