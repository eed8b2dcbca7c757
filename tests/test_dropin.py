"""A DDP script written for torch's hook, with only the import line changed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# was: from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
from powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

from .ranks import run_ranks


def _script(rank: int, batched: bool) -> tuple[list[float], bool, int, float]:
    torch.manual_seed(0)
    width = 1750  # 5 layers of 12 MB: three buckets of 25 MB
    layers = [layer for _ in range(5) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 1)))
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
    )
    buckets = []
    hook = batched_powerSGD_hook if batched else powerSGD_hook

    def counting(
        state: PowerSGDState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.index())
        return hook(state, bucket)

    model.register_comm_hook(state, counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, width, generator=generator)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    same = all(torch.equal(mine, other) for other in theirs)
    return losses, same, max(buckets) + 1, state.compression_stats()[0]


def test_one_changed_import() -> None:
    for batched in (False, True):
        for losses, same, buckets, rate in run_ranks(_script, 3, batched):
            assert same
            assert buckets >= 3
            assert losses[-1] < 0.7 * losses[0]
            assert rate > 500


_TRAINS_AND_LEAVES = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
import powersgd

def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    state = powersgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()

def threads():
    return [t for t in Path("/proc/self/task").iterdir() if "gloo" in (t / "comm").read_text()]

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
train()
print(len(threads()))
dist.destroy_process_group()
print(len(threads()))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_no_thread_of_gloo_outlives_its_group(tmp_path: Path) -> None:
    """One that frees a tensor while Python ends aborts the process."""
    command = [sys.executable, "-c", _TRAINS_AND_LEAVES, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    during, after = map(int, done.stdout.split())
    assert during > 0
    assert after == 0
