"""A job for torchrun: it saves and loads as the README says, and its last rank may be killed once.

``torchrun --nproc-per-node 2 --max-restarts 1 tests/elastic_job.py own 21``
"""

import os
import re
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import powersgd

STEPS, EVERY = 40, 8
README = Path(__file__).parent.parent / "README.md"


def _recipe(kind: str) -> str:
    (code,) = re.findall(r"<!-- resume recipe -->\n```python\n(.*?)```", README.read_text(), re.S)
    own, shared = "state.state_dict(model)  # or ", "powersgd.shared_state_dict(state, model)"
    assert own + shared in code
    return code.replace(own, "") if kind == "shared" else code


def _newest(world_size: int) -> int:
    """The newest step of which every rank has a file; 0 if there is none."""
    names = [path.name for path in Path().glob("step*_rank*.pt")]
    steps = [int(re.findall(r"\d+", name)[0]) for name in names]
    return max((step for step in steps if steps.count(step) == world_size), default=0)


def train(kind: str = "", fatal: int = -1) -> list[float]:
    """Train on from the newest checkpoint; the losses of the steps of this life."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    state = powersgd.PowerSGDState(None, 2, start_powerSGD_iter=3, min_compression_rate=0.5)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    names: dict[str, Any] = {"os": os, "torch": torch, "dist": dist, "powersgd": powersgd}
    names |= {"model": model, "state": state, "optimizer": optimizer}
    start = 0
    if kind:
        exec(_recipe(kind), names)
        start = _newest(world_size)
    if start:
        names["load"](start)
    losses = []
    for step in range(start, STEPS):
        if (step, rank) == (fatal, world_size - 1) and os.environ[
            "TORCHELASTIC_RESTART_COUNT"
        ] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 24, generator=generator)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.repeat(1, 2)[:, :32].sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if kind and (step + 1) % EVERY == 0:
            names["save"](step + 1)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    losses = train(sys.argv[1], int(sys.argv[2]))
    torch.save(losses, f"losses{dist.get_rank()}.pt")
    dist.destroy_process_group()
    os._exit(0)  # some of torch's threads abort an interpreter that ends while they run
