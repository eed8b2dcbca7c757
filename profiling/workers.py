"""Local ranks: gloo processes on this machine that run one function and give back its values."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_locally(
    function: Callable[..., Any], world_size: int, *arguments: Any, threads: int = 1
) -> list[Any]:
    """Run a function on all ranks of a new gloo group, in processes of their own.

    Args:
        function: Called as ``function(rank, *arguments)``; of a module's top level.
        world_size: Number of processes.
        *arguments: Whatever can be pickled.
        threads: Of each process.

    Returns:
        What it returned, by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: If a rank failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as directory:
        rest = (function, world_size, directory, arguments, threads)
        spawn(_run, rest, world_size)  # type: ignore[no-untyped-call]
        paths = [Path(directory, f"{rank}.pt") for rank in range(world_size)]
        return [torch.load(path, weights_only=False) for path in paths]


def _run(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    directory: str,
    arguments: tuple[Any, ...],
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *arguments), f"{directory}/{rank}.pt")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
