"""What the runs say: means and spreads over seeds, and what each part of PowerSGD gains."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from profiling.tasks import TASKS
from profiling.training import OPTIMIZER_TITLES, PLAIN, Kind, Outcome

CLEAR = 2.0  # times its spread over seeds: what a mean difference must exceed


class Effect(Enum):
    """What a change does to the final loss."""

    LOWERS = "lowers the final loss"
    RAISES = "raises the final loss"
    UNCLEAR = "makes no clear difference"


@dataclass(frozen=True)
class Summary:
    """One kind's runs, over seeds; means and spreads are of those that did not diverge.

    Attributes:
        loss: Mean of the final losses; None if all runs diverged.
        loss_spread: Their standard deviation; None with fewer than two.
        accuracy: Mean of the final accuracies.
        accuracy_spread: Their standard deviation.
        runs: Number of runs.
        diverged: How many of them diverged.
        step_bytes: Sent by each rank in a step, once compression has started.
        reduction: How many times fewer these are than without compression.
    """

    loss: float | None
    loss_spread: float | None
    accuracy: float | None
    accuracy_spread: float | None
    runs: int
    diverged: int
    step_bytes: float
    reduction: float


@dataclass(frozen=True)
class Difference:
    """What a change of kind does to the final loss, seed by seed.

    Attributes:
        mean: Loss after the change minus loss before it, over seeds where neither diverged.
        spread: Standard deviation over seeds; None with fewer than two.
        diverged_before: Runs that diverged before the change.
        diverged_after: Runs that diverged after it.
        effect: Decided by the runs that diverged, and where these are equal by whether the mean
            is more than `CLEAR` times the spread.
    """

    mean: float | None
    spread: float | None
    diverged_before: int
    diverged_after: int

    @property
    def effect(self) -> Effect:
        """What the change does."""
        more = self.diverged_after - self.diverged_before
        if more:
            return Effect.RAISES if more > 0 else Effect.LOWERS
        if self.mean is None or self.spread is None or abs(self.mean) <= CLEAR * self.spread:
            return Effect.UNCLEAR
        return Effect.RAISES if self.mean > 0 else Effect.LOWERS

    def __str__(self) -> str:
        parts = []
        if self.mean is not None:
            spread = "" if self.spread is None else f" ± {self.spread:.3f}"
            parts.append(f"{self.mean:+.3f}{spread}")
        if self.diverged_before or self.diverged_after:
            parts.append(f"{self.diverged_before} -> {self.diverged_after} diverged")
        return "; ".join(parts)


class Study:
    """The outcomes of one task with one optimizer.

    Args:
        outcomes: All of the same task and optimizer.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.task, self.optimizer = outcomes[0].run.task, outcomes[0].run.optimizer
        self.of_kind: dict[Kind, list[Outcome]] = {}
        for outcome in outcomes:
            self.of_kind.setdefault(outcome.run.kind, []).append(outcome)
        self.ranks = sorted({kind.rank for kind in self.of_kind if kind.rank is not None})

    @property
    def title(self) -> str:
        """Task and optimizer, for people."""
        return f"{TASKS[self.task].title}, {OPTIMIZER_TITLES[self.optimizer]}"

    @property
    def shows_accuracy(self) -> bool:
        """Whether the task's accuracy is worth a column."""
        return TASKS[self.task].shows_accuracy

    def summarize(self, kind: Kind) -> Summary:
        """Return the mean and spread over the runs of a kind.

        Args:
            kind: One that was run.

        Returns:
            The summary.
        """
        outcomes = self.of_kind[kind]
        good = [outcome.final for outcome in outcomes if not outcome.has_diverged]
        return Summary(
            *mean_and_spread([point.loss for point in good]),
            *mean_and_spread([point.accuracy for point in good]),
            runs=len(outcomes),
            diverged=len(outcomes) - len(good),
            step_bytes=outcomes[0].step_bytes,
            reduction=outcomes[0].plain_bytes / outcomes[0].step_bytes,
        )

    def compare(self, before: Kind, after: Kind) -> Difference:
        """Return what going from one kind to another does, from runs of the same seed.

        Args:
            before: One that was run.
            after: Another, run with the same seeds.

        Returns:
            The difference of their final losses.
        """
        pairs = list(zip(self.of_kind[before], self.of_kind[after], strict=True))
        differences = [
            b.final.loss - a.final.loss for a, b in pairs if not (a.has_diverged or b.has_diverged)
        ]
        return Difference(
            *mean_and_spread(differences),
            sum(a.has_diverged for a, _ in pairs),
            sum(b.has_diverged for _, b in pairs),
        )

    def effects(self, rank: int) -> dict[str, Difference]:
        """Return what error feedback and warm start do at a rank, each with and without the other.

        Args:
            rank: One that was run.

        Returns:
            The differences, by what is switched on.
        """
        both = Kind(rank)
        no_feedback, cold = replace(both, use_error_feedback=False), replace(both, warm_start=False)
        neither = Kind(rank, use_error_feedback=False, warm_start=False)
        return {
            "error feedback (with warm start)": self.compare(no_feedback, both),
            "warm start (with error feedback)": self.compare(cold, both),
            "error feedback (without warm start)": self.compare(neither, cold),
            "warm start (without error feedback)": self.compare(neither, no_feedback),
        }

    def conclude(self) -> list[str]:
        """Say in sentences what the numbers show.

        Returns:
            One sentence on each of error feedback and warm start, with and without the other, and
            one on PowerSGD against plain all-reduce.
        """
        if not self.ranks:
            return []
        by_rank = {rank: self.effects(rank) for rank in self.ranks}
        sentences = [
            _sentence(
                f"{name[0].upper()}{name[1:]}", {rank: by_rank[rank][name] for rank in self.ranks}
            )
            for name in by_rank[self.ranks[0]]
        ]
        against = {rank: self.compare(PLAIN, Kind(rank)) for rank in self.ranks}
        return [*sentences, _sentence("PowerSGD in place of plain all-reduce", against)]


def mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of values, if there are any, and their standard deviation if two or more."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def group(outcomes: Iterable[Outcome]) -> list[Study]:
    """Return the studies, one for each task and optimizer, in the order of the runs."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.run.task, outcome.run.optimizer), []).append(outcome)
    return [Study(members) for members in groups.values()]


def _sentence(subject: str, differences: dict[int, Difference]) -> str:
    parts = []
    for effect in Effect:
        found = [
            f"rank {rank} ({difference})"
            for rank, difference in differences.items()
            if difference.effect is effect
        ]
        if found:
            parts.append(f"{effect.value} at {', '.join(found)}")
    return f"{subject} {'; '.join(parts)}."
