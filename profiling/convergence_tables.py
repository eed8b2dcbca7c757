"""The convergence study's results as tables: for the terminal, and for the README."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.table import Table

from profiling.effects import Study, Summary
from profiling.training import PLAIN, START, Kind

MISSING = "-"


def make_table(study: Study) -> Table:
    """Return a table of a study's kinds.

    Args:
        study: One task and optimizer.

    Returns:
        Its rows: final loss and accuracy over seeds, and what each rank sends.
    """
    table = Table(title=study.title, caption="mean ± standard deviation over seeds")
    table.add_column("averaging")
    names = ["final loss", *(["accuracy"] if study.shows_accuracy else []), "diverged", "kB a step"]
    for name in [*names, "times less"]:
        table.add_column(name, justify="right")
    for kind in study.of_kind:
        summary = study.summarize(kind)
        accuracy = [format_accuracy(summary)] if study.shows_accuracy else []
        diverged = f"{summary.diverged} of {summary.runs}"
        sent = [f"{summary.step_bytes / 1e3:.1f}", f"{summary.reduction:.1f}"]
        table.add_row(kind.name, _loss(summary), *accuracy, diverged, *sent)
    return table


def _loss(summary: Summary) -> str:
    if summary.loss is None:
        return "diverged"
    spread = "" if summary.loss_spread is None else f" ± {summary.loss_spread:.3f}"
    return f"{summary.loss:.3f}{spread}"


def format_loss(summary: Summary) -> str:
    """Return a mean loss and its spread; ``diverged`` if no run was left.

    Args:
        summary: Of the runs of one kind.

    Returns:
        Such as ``0.123 ± 0.004``, followed by the number of runs that diverged, if any did.
    """
    if summary.loss is None or not summary.diverged:
        return _loss(summary)
    return f"{_loss(summary)} ({summary.diverged} of {summary.runs} diverged)"


def format_accuracy(summary: Summary) -> str:
    """Return a mean accuracy and its spread, in percent; a dash if no run was left.

    Args:
        summary: Of the runs of one kind.

    Returns:
        Such as ``98.2 ± 0.3 %``.
    """
    if summary.accuracy is None:
        return MISSING
    spread = "" if summary.accuracy_spread is None else f" ± {100 * summary.accuracy_spread:.1f}"
    return f"{100 * summary.accuracy:.1f}{spread} %"


def make_markdown(studies: Sequence[Study]) -> str:
    """Return the README's table: final losses, a row for each task and optimizer.

    Args:
        studies: All that were run.

    Returns:
        Lines of Markdown; the last columns switch off parts of PowerSGD at rank 2, or at the lowest
        rank that was run.
    """
    ranks = sorted({rank for study in studies for rank in study.ranks})
    columns = {"plain": PLAIN, **{f"rank {rank}": Kind(rank) for rank in ranks}}
    if ranks:
        base = Kind(2 if 2 in ranks else ranks[0])
        name, cold = f"rank {base.rank}", replace(base, warm_start=False)
        columns[f"{name}, no error feedback"] = replace(base, use_error_feedback=False)
        columns[f"{name}, no warm start"] = cold
        columns[f"{name}, neither"] = replace(cold, use_error_feedback=False)
    rows = [["final loss", *columns], ["---", *("---:" for _ in columns)]]
    rows += [[study.title, *(_cell(study, kind) for kind in columns.values())] for study in studies]
    rows += _sent_rows(studies, list(columns.values()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(study: Study, kind: Kind) -> str:
    return format_loss(study.summarize(kind)) if kind in study.of_kind else MISSING


def _sent_rows(studies: Sequence[Study], kinds: Sequence[Kind]) -> Iterator[list[str]]:
    # What is sent depends on the model alone, so one optimizer's runs tell it.
    first = {study.task: study for study in reversed(studies)}
    for task in dict.fromkeys(study.task for study in studies):
        cells = []
        for kind in kinds:
            is_there = kind in first[task].of_kind
            cells.append(_sent(first[task].summarize(kind)) if is_there else MISSING)
        yield [f"{task}: sent by each process in a step, from step {START + 1} on", *cells]


def _sent(summary: Summary) -> str:
    less = "" if summary.reduction == 1 else f", {summary.reduction:.1f} times less"
    return f"{summary.step_bytes / 1e3:.1f} kB{less}"
