"""Run a function on several gloo ranks, each in a process of its own."""

import faulthandler
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankError(AssertionError):
    """A rank raised; the message carries its traceback."""


# New processes are copies of one that has imported what takes seconds and has run nothing.
_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "powersgd"])

_trace: Any = None  # of this process, if it is a rank: where it writes down its stacks


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    group_timeout_s: float = 60,
    mortal: Collection[int] = (),
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a fresh gloo group.

    Args:
        function: A module-level function; it runs with the default group initialised.
        world_size: Number of processes.
        args: Passed on.
        timeout_s: Hard limit; past it all ranks are killed and the call raises.
        group_timeout_s: The process group's own timeout.
        mortal: Ranks that must be killed on the way.

    Returns:
        The return values by rank (anything that pickles; tensors on CPU), None for `mortal` ones.

    Raises:
        RankError: If a rank raised, was killed or was not, or the time ran out.
    """
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            _processes.Process(
                target=_run,
                args=(function, rank, world_size, directory, timeout_s, group_timeout_s, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            outcomes = [_outcome(Path(directory), i, p) for i, p in enumerate(ranks)]
            return _values(outcomes, mortal)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                rank.join()


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    directory: str,
    timeout_s: float,
    group_timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    global _trace
    _trace = Path(directory, f"{rank}.trace").open("w")  # noqa: SIM115 (as long as the process)
    faulthandler.enable(_trace)
    watch(max(1, timeout_s - 10))
    torch.set_num_threads(1)
    outcome: tuple[str, Any]
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout_s),
        )
        outcome = ("returned", function(rank, *args))
        dist.destroy_process_group()
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    Path(directory, f"{rank}.partial").write_bytes(pickle.dumps(outcome))
    Path(directory, f"{rank}.partial").rename(Path(directory, f"{rank}.pickle"))


def watch(timeout_s: float) -> None:
    """Have this rank write down where it stands, should it be in the same call for so long."""
    faulthandler.dump_traceback_later(timeout_s, file=_trace)


def _outcome(directory: Path, rank: int, process: Any) -> tuple[str, Any]:
    """How a rank ended: returned with a value, or another way with all that it wrote down."""
    path = directory / f"{rank}.pickle"
    how, value = (
        "did not finish in time" if process.is_alive() else f"died ({process.exitcode})",
        "",
    )
    if path.exists():
        how, value = pickle.loads(path.read_bytes())
    elif process.exitcode == -signal.SIGKILL:
        how = "was killed"
    trace = (directory / f"{rank}.trace").read_text()
    return how, value if how == "returned" else f"{value}\n{trace}"


def _values(outcomes: list[tuple[str, Any]], mortal: Collection[int]) -> list[Any]:
    expected = ["was killed" if rank in mortal else "returned" for rank in range(len(outcomes))]
    if expected != [how for how, _ in outcomes]:
        parts = [
            f"rank {rank} {how}\n{'' if how == 'returned' else value}"
            for rank, (how, value) in enumerate(outcomes)
        ]
        raise RankError("\n".join(parts))
    return [value if how == "returned" else None for how, value in outcomes]
