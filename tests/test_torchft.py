"""torchft, the real package: two replicas, one of which is killed, comes back and heals."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import powersgd

pytest.importorskip("torchft")
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from powersgd.torchft import DistributedDataParallel, ManagerCollectives, Replica

from .tolerances import assert_close

SHAPES = [(20, 30), (12, 40), (7,), (20, 30)]
_spawn = multiprocessing.get_context("spawn")


class _Weighed(nn.Module):
    """Its parameters' gradients are the weights."""

    def __init__(self) -> None:
        super().__init__()
        ones = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
        self.all = nn.ParameterList(ones)

    def forward(self, weights: list[Tensor]) -> Tensor:
        return sum((p * w).sum() for p, w in zip(self.all, weights, strict=True))


def _targets(step: int, replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


class _Replica:
    """A replica group of one process, which trains until it is told to stop."""

    def __init__(self, number: int, lighthouse: str, use_async_quorum: bool) -> None:
        torch.set_num_threads(1)
        self.number = number
        self.model = _Weighed()
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
            load_state_dict=self._load,
            state_dict=self._save,
            min_replica_size=1,
            use_async_quorum=use_async_quorum,
            timeout=timedelta(seconds=20),
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{number}",
        )
        self.optimizer = Optimizer(self.manager, inner)
        self.state = powersgd.PowerSGDState(None, 2, 2, 0.5)
        self.ddp = DistributedDataParallel(
            self.manager, self.model, self.state, bucket_cap_mb=0.005
        )

    def _save(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def residuals(self) -> list[Tensor]:
        left = [self.state.residual(p) for p in self.model.parameters()]
        return [torch.zeros(s) if e is None else e for e, s in zip(left, SHAPES, strict=True)]

    def step(self) -> dict[str, Any]:
        """Make a step; return what came of it."""
        self.optimizer.zero_grad()
        self.manager.wait_quorum()
        step = self.manager.current_step()
        self.ddp(_targets(step, self.number)).backward()
        outputs = [p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        is_committed = self.manager.current_step() == step + 1
        if not is_committed:
            self.ddp.replica.settle()
        return {
            "step": step,
            "is_committed": is_committed,
            "took_part": self.manager.is_participating(),
            "participants": self.manager.num_participants(),
            "outputs": outputs,
            "residuals": self.residuals(),
            "iter": self.state.iter,
        }

    def outcome(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        self.ddp.replica.settle()
        carried = [self.state.carried(p) for p in self.model.parameters()]
        return {
            "history": history,
            "parameters": [p.detach().clone() for p in self.model.parameters()],
            "q": [c.q for c in carried],
            "spare": [c.spare for c in carried],
        }


DIES_AT, MEETS_AT, ENDS_AT = 6, 10, 18  # steps
TIMEOUT_S = 100


def _await(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def _kill_in_q(replica: _Replica) -> None:
    # The header, the P of two buckets, and the first Q.
    start, sent = ManagerCollectives.start_mean_, []

    def start_and_die(collectives: ManagerCollectives, tensor: Tensor) -> Any:
        sent.append(tensor)
        if len(sent) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(collectives, tensor)

    ManagerCollectives.start_mean_ = start_and_die  # type: ignore[method-assign]
    replica.step()


def _run(name: str, number: int, lighthouse: str, use_async: bool, directory: Path) -> None:
    replica, history = _Replica(number, lighthouse, use_async), []
    (directory / f"{name} is ready").touch()
    _await(directory / ("1 is ready" if name == "0" else "0 is ready"))
    while replica.manager.current_step() < ENDS_AT:
        step = replica.manager.current_step()
        if name == "1" and step == DIES_AT:
            _kill_in_q(replica)
        if name == "0" and step == MEETS_AT:
            _await(directory / "1 again is ready")
        history.append(replica.step())
    torch.save(replica.outcome(history), directory / name)
    replica.manager.shutdown(wait=False)
    os._exit(0)  # the manager's threads would wait for their timeouts


def _train(directory: Path, use_async: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000
    )
    arguments = (lighthouse.address(), use_async, directory)
    names = {"0": 0, "1": 1, "1 again": 1}
    processes = {
        name: _spawn.Process(target=_run, args=(name, number, *arguments), daemon=True)
        for name, number in names.items()
    }
    try:
        processes["0"].start()
        processes["1"].start()
        processes["1"].join(TIMEOUT_S)
        assert processes["1"].exitcode == -signal.SIGKILL
        processes["1 again"].start()
        for name in ("0", "1 again"):
            processes[name].join(TIMEOUT_S)
            assert processes[name].exitcode == 0
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
        lighthouse.shutdown()
    return torch.load(directory / "0"), torch.load(directory / "1 again")


def _mean(*every: list[Tensor]) -> list[Tensor]:
    return [torch.stack(tensors).mean(dim=0) for tensors in zip(*every, strict=True)]


@pytest.mark.parametrize("use_async", [False, True])
def test_a_replica_that_heals_gets_q_and_the_mean_residual(tmp_path: Path, use_async: bool) -> None:
    survivor, healed = _train(tmp_path, use_async)
    for name in ("parameters", "q", "spare"):
        torch.testing.assert_close(survivor[name], healed[name], rtol=0, atol=0)
    history = survivor["history"]
    failed = [one for one in history if not one["is_committed"]]
    assert [one["step"] for one in failed] == [DIES_AT]
    before = next(one for one in history if one["step"] == DIES_AT - 1)
    assert before["participants"] == 2
    assert before["iter"] == DIES_AT
    torch.testing.assert_close(failed[0]["residuals"], before["residuals"], rtol=0, atol=0)
    assert failed[0]["iter"] == before["iter"]

    # What the survivor held when it was left alone, and all that came in, has come out or is held.
    committed = {one["step"]: one for one in history if one["is_committed"]}
    theirs = {one["step"]: one for one in healed["history"]}
    assert list(committed) == list(range(ENDS_AT))
    assert [one["iter"] for one in committed.values()] == list(range(1, ENDS_AT + 1))
    totals = [residual.clone() for residual in before["residuals"]]
    for step in range(DIES_AT, ENDS_AT):
        both = step in theirs and theirs[step]["took_part"]
        assert committed[step]["participants"] == 1 + both
        inputs = [_targets(step, replica) for replica in ((0, 1) if both else (0,))]
        for total, given, output in zip(
            totals, _mean(*inputs), committed[step]["outputs"], strict=True
        ):
            total += given - output
        if step in theirs:
            torch.testing.assert_close(
                theirs[step]["outputs"], committed[step]["outputs"], rtol=0, atol=0
            )
    assert sum(one["took_part"] for one in theirs.values()) >= 4
    held = _mean(committed[ENDS_AT - 1]["residuals"], theirs[ENDS_AT - 1]["residuals"])
    for total, left in zip(totals, held, strict=True):
        assert_close(left, total, scale=100)
    assert held[0].abs().max() > 0.1


def test_settings_are_compared_when_a_replica_heals() -> None:
    class _Manager:
        def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
            self.load, self.save = load, save

        def current_step(self) -> int:
            return 5

    teacher, pupil = _Manager(), _Manager()
    Replica(teacher, powersgd.PowerSGDState(None, 2))
    Replica(pupil, powersgd.PowerSGDState(None, 3))
    with pytest.raises(ValueError, match=r"set matrix_approximation_rank to 3.*heals from to 2"):
        pupil.load(teacher.save())


def test_another_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a powersgd\.PowerSGDState"):
        DistributedDataParallel(None, nn.Linear(2, 2), None)
