"""One rank on a slow link: trains with each hook in turn, as `profiling.network` asks.

It reads one line of JSON after the other from its input, answers each with one line, and ends when
its input does, so that no rank outlives the process that started it.
"""

import hashlib
import json
import os
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiling.hooks import START, Hook, make_backward, wrap
from profiling.link import INTERFACE, address_of
from profiling.network_models import make_model

WARM_UP = START + 4  # steps: plain ones, those that compile, caches
TINY = 50  # all-reduces of one element
TRANSFER_S = 0.4
CHUNK = 1 << 20
PORT = 29_000
DAY = timedelta(days=1)  # the one that started this rank has a shorter limit


def _loss(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    return loss


def _sum(model: nn.Module, inputs: Tensor) -> Tensor:
    total: Tensor = model(inputs)
    return total


class Trainer:
    """A model in training: alone, or in DDP with one of the hooks."""

    def __init__(self, task: dict[str, Any], hook: Hook | None, rank: int) -> None:
        torch.manual_seed(0)
        self.model, draw = make_model(task["model"])
        torch.manual_seed(1 + dist.get_rank())
        self.inputs = draw(task["batch"])
        loss = _loss if isinstance(task["model"], str) else _sum
        wrapped: Any = self.model
        if hook is not None:
            # torch's own works with one bucket alone; everything else has DDP's usual ones.
            options = {"bucket_cap_mb": 1_000_000} if hook is Hook.TORCH else {}
            wrapped, _ = wrap(self.model, hook, max(rank, 1), **options)
        self.backward = make_backward(wrapped, loss, hook or Hook.NONE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> None:
        """Make a step: forward, backward with its averaging, optimizer."""
        self.optimizer.zero_grad()
        self.backward(self.inputs)
        self.optimizer.step()

    def digest(self) -> int:
        """Return what is equal on two ranks only if all their gradients are, to the bit."""
        hashed = hashlib.sha256()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            hashed.update(parameter.grad.contiguous().numpy().tobytes())
        return int.from_bytes(hashed.digest()[:7], "little")


def require_equal(name: str, digest: int) -> None:
    """Raise unless all ranks call with the same digest.

    Args:
        name: Of what has it.
        digest: Fewer than 63 bits.

    Raises:
        RuntimeError: If they differ.
    """
    every = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([digest]))
    if len({int(one) for one in every}) > 1:
        raise RuntimeError(f"{name} gave ranks different averaged gradients")


def sent_bytes() -> int:
    """Return the bytes that this rank's interface has sent, with all headers."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _transfer_bits_per_s(nominal: float) -> float:
    # Every rank sends to the next one at the same time, as in a ring, over a plain socket.
    rank, workers = dist.get_rank(), dist.get_world_size()
    nbytes = max(CHUNK // 2, round(TRANSFER_S * nominal / 8))
    with socket.create_server((address_of(rank), PORT)) as server:
        dist.barrier()
        following = (address_of((rank + 1) % workers), PORT)
        with socket.create_connection(following) as out, server.accept()[0] as into:
            sender = threading.Thread(target=_send, args=(out, nbytes))
            sender.start()
            received_s = _receive(into, nbytes)
            sender.join()
    rate = torch.tensor(8 * nbytes / received_s, dtype=torch.float64)
    dist.all_reduce(rate, dist.ReduceOp.MIN)
    return rate.item()


def _send(out: socket.socket, nbytes: int) -> None:
    chunk = memoryview(bytes(CHUNK))
    for start in range(0, nbytes, CHUNK):
        out.sendall(chunk[: nbytes - start])


def _receive(into: socket.socket, nbytes: int) -> float:
    chunk = memoryview(bytearray(CHUNK))
    start, left = time.perf_counter(), nbytes
    while left:
        received = into.recv_into(chunk, min(left, CHUNK))
        if not received:
            raise RuntimeError("the other end closed the connection")
        left -= received
    return time.perf_counter() - start


def _latency_s() -> float:
    tensor, times = torch.zeros(1), []
    for _ in range(TINY):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return statistics.median(times[TINY // 10 :])


def _time(trainer: Trainer) -> tuple[float, int]:
    # The barrier after the step waits for what is still on its way.
    before, start = sent_bytes(), time.perf_counter()
    trainer.step()
    taken_s = time.perf_counter() - start
    dist.barrier()
    return taken_s, sent_bytes() - before


def _slowest(values: Tensor) -> Tensor:
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def _measure(trainers: list[Trainer], names: list[str], request: dict[str, Any]) -> dict[str, Any]:
    achieved = _transfer_bits_per_s(request["bits_per_s"])
    latency_s = _latency_s()
    dist.barrier()
    start = time.perf_counter()
    for trainer in trainers:
        _time(trainer)
    round_s = _slowest(torch.tensor(time.perf_counter() - start)).item()
    rounds = min(request["repeats"], max(request["fewest"], int(request["seconds"] / round_s)))
    taken = [[_time(trainer) for trainer in trainers] for _ in range(rounds)]
    for name, trainer in zip(names[1:], trainers[1:], strict=True):
        require_equal(name, trainer.digest())
    times = _slowest(torch.tensor([[t for t, _ in one] for one in taken], dtype=torch.float64))
    sent = torch.tensor([[nbytes for _, nbytes in one] for one in taken], dtype=torch.float64)
    return {
        "achieved_bits_per_s": achieved,
        "latency_s": latency_s,
        "times_s": times.T.tolist(),
        "sent_bytes": [int(one) for one in sent.median(dim=0).values],
    }


def _requests() -> Iterator[dict[str, Any]]:
    lines: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)  # also from within a collective that waits for ever

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def _make_trainers(task: dict[str, Any]) -> list[Trainer]:
    # Each is warmed up before the next is made: wrapping one sets how torch.compile sees DDP.
    hooks = [(None, 0), *((Hook(name), rank) for name, rank in task["hooks"])]
    trainers = []
    for hook, rank in hooks:
        trainers.append(Trainer(task, hook, rank))
        for _ in range(WARM_UP):
            trainers[-1].step()
    return trainers


def main() -> None:
    """Run one rank: ``network_rank RANK WORKERS STORE TASK``, the task as JSON."""
    rank, workers, store, task = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints is no answer
    requests, parsed = _requests(), json.loads(task)
    next(requests)
    torch.set_num_threads(parsed["threads"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(workers),
        timeout=DAY,
    )
    trainers = _make_trainers(parsed)
    names = ["compute", *(f"{Hook(name).label}, rank {r}" for name, r in parsed["hooks"])]
    print(json.dumps({}), file=answers, flush=True)
    for request in requests:
        print(json.dumps(_measure(trainers, names, request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
