"""Run a function on several gloo ranks, each in a process of its own."""

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
        context = mp.get_context("spawn")
        ranks = [
            context.Process(
                target=_run,
                args=(function, rank, world_size, directory, group_timeout_s, args),
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
            return [_collect(Path(directory), i, p, i in mortal) for i, p in enumerate(ranks)]
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
    group_timeout_s: float,
    args: tuple[Any, ...],
) -> None:
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


def _collect(directory: Path, rank: int, process: Any, is_mortal: bool) -> Any:
    path = directory / f"{rank}.pickle"
    if is_mortal and process.exitcode == -signal.SIGKILL:
        return None
    if not path.exists():
        state = "did not finish in time" if process.is_alive() else f"died ({process.exitcode})"
        others = [p.stem for p in directory.glob("*.pickle")]
        raised = [pickle.loads((directory / f"{r}.pickle").read_bytes()) for r in others]
        texts = "\n".join(text for kind, text in raised if kind == "raised")
        raise RankError(f"rank {rank} {state}\n{texts}")
    kind, value = pickle.loads(path.read_bytes())
    if kind == "raised":
        raise RankError(f"rank {rank} raised\n{value}")
    if is_mortal:
        raise RankError(f"rank {rank} was not killed")
    return value
