"""The benchmark's results as tables for people."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from profiling.hooks import Hook
from profiling.results import Measured, Memory, Result, Row

MB = 1e6


def call_table(rows: Sequence[Row], hooks: Sequence[Hook]) -> Table:
    """Show the times of calls.

    Args:
        rows: What was measured.
        hooks: Of the columns; torch's hook gives ours a ratio.

    Returns:
        The table.
    """
    table = Table(
        title="One call of the hook: median (quartiles) in ms",
        caption="floor: 5 passes over the gradient; x: torch / the column before",
    )
    table.add_column("workload")
    names = [name for hook in hooks for name in _columns(hook, hooks)]
    for name in ("threads", "rank", *names, "floor"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [cell for hook in hooks for cell in _cells(row, hook, hooks)]
        table.add_row(row.workload, str(row.threads), str(row.rank), *cells, _floor(row))
    return table


def _columns(hook: Hook, hooks: Sequence[Hook]) -> list[str]:
    return [hook.value, "x"] if hook.is_ours and Hook.TORCH in hooks else [hook.value]


def _cells(row: Row, hook: Hook, hooks: Sequence[Hook]) -> list[str]:
    result, ratio = row.find(hook), row.speedup(hook)
    cells = [str(result.time) if result else "-", f"{ratio:.1f}" if ratio else "-"]
    return cells[: len(_columns(hook, hooks))]


def _floor(row: Row) -> str:
    # Where not all hooks fitted into memory at once, each group had a floor of its own.
    floors = [result.floor for result in row.results if result.measured is Measured.CALL]
    return str(min(floors, key=lambda floor: floor.median)).split(" ")[0] if floors else "-"


def speed_sentences(rows: Sequence[Row], hooks: Sequence[Hook]) -> Iterator[str]:
    """Say how much faster than torch's hook ours are, where they gain least.

    Args:
        rows: What was measured.
        hooks: That were measured.

    Yields:
        A sentence for each hook of ours.
    """
    for hook in hooks:
        speeds = [(row.speedup(hook), row) for row in rows]
        known = [(speed, row) for speed, row in speeds if speed is not None]
        if hook.is_ours and known:
            lowest, worst = min(known, key=lambda pair: pair[0])
            yield (
                f"{hook.label} is at least {lowest:.1f} times as fast as torch's (lowest: "
                f"{worst.workload}, rank {worst.rank}, {worst.threads} threads)."
            )


def memory_table(rows: Sequence[Row]) -> Table:
    """Show what calls allocate, which does not depend on threads.

    Args:
        rows: What was measured.

    Returns:
        The table.
    """
    table = Table(
        title="Memory in MB (x the gradient)",
        caption="peak: most that one call allocates beyond what was there; "
        "kept: from one call to the next",
    )
    for name in ("workload", "gradient", "rank", "hook", "peak", "kept"):
        table.add_column(name, justify="left" if name in ("workload", "hook") else "right")
    threads = rows[0].threads
    for row in rows:
        for result in row.results if row.threads == threads else ():
            if result.measured is Measured.CALL:
                table.add_row(*_setting(row), result.hook.value, *_bytes(row, result.memory))
    return table


def _setting(row: Row) -> tuple[str, str, str]:
    return row.workload, f"{row.gradient_bytes / MB:.3g}", str(row.rank)


def _bytes(row: Row, memory: Memory) -> Iterator[str]:
    for nbytes in (memory.peak_bytes, memory.kept_bytes or 0):
        yield f"{nbytes / MB:.1f} ({nbytes / row.gradient_bytes:.2f})"


def pass_table(rows: Sequence[Row]) -> Table:
    """Show the times and the memory of whole passes.

    Args:
        rows: What was measured.

    Returns:
        The table.
    """
    table = Table(
        title="Forward and backward of a model that computes nothing: median (quartiles) in ms",
        caption="plain: the same pass with plain averaging, eager (for python_reducer: compiled); "
        "beyond: what the hook adds; peak: most that one pass allocates, x the gradient",
    )
    names = ("pass", "plain", "beyond", "floor", "peak", "plain's peak")
    for name in ("workload", "threads", "rank", "hook", *names):
        table.add_column(name, justify="left" if name in ("workload", "hook") else "right")
    for row in rows:
        for result in row.results:
            if result.plain is not None:
                start = (row.workload, str(row.threads), str(row.rank), result.hook.value)
                table.add_row(*start, *_pass_cells(row, result))
    return table


def _pass_cells(row: Row, result: Result) -> Iterator[str]:
    plain = result.plain
    assert plain is not None
    yield str(result.time)
    yield str(plain.time)
    yield f"{result.time.median - plain.time.median:.1f}"
    yield f"{result.floor.median:.1f}"
    yield f"{result.memory.peak_bytes / row.gradient_bytes:.2f}"
    yield f"{plain.peak_bytes / row.gradient_bytes:.2f}"
