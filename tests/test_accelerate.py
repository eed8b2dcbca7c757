"""PowerSGD under Accelerate: right averages, exact resumption, the loss scale."""

import itertools
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powersgd

from .ranks import run_ranks

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")

STEPS, STOP = 12, 7
SETTINGS = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, "min_compression_rate": 0.1}
RATE, MOMENTUM = 0.02, 0.9
CLOSE = 1e-10  # relative, in float64
Outcome = dict[str, Any]


def batch(step: int, rank: int, same_input: bool) -> tuple[Tensor, Tensor]:
    """An input, which ranks may share, and a target, which they do not."""
    seeds, sizes = (step if same_input else 100 * step + rank, 1000 * step + rank), (8, 6)
    inputs, targets = (
        torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed, size in zip(seeds, sizes, strict=True)
    )
    return inputs, targets


def net(layers: int) -> nn.Module:
    torch.manual_seed(0)
    linear = [nn.Linear(*w, bias=False) for w in itertools.pairwise([8] * layers + [6])]
    return nn.Sequential(*[p for layer in linear for p in (nn.Tanh(), layer)][1:]).double()


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def assert_exact(gradients: list[list[Tensor]]) -> None:
    """Assert that one layer's gradients, by step, are the means over two ranks, of rank one."""
    weight, velocity = next(net(1).parameters()).detach(), 0
    for step in range(STEPS):
        batches = [batch(step, rank, same_input=True) for rank in range(2)]
        mean = sum((weight @ x - t).outer(x) for x, t in batches) / 2
        assert distance(gradients[step], [mean]) < CLOSE
        velocity = MOMENTUM * velocity + mean
        weight = weight - RATE * velocity


def attach(rank: int) -> None:
    """Make this rank one that torchrun might have started."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["LOCAL_WORLD_SIZE"] = "2"


class _Job:
    """A model in training, set up as the README says."""

    def __init__(self, layers: int = 3, scaler: Any = None, is_registered: bool = True) -> None:
        from accelerate import Accelerator

        self.accelerator, self.layers = Accelerator(cpu=True), layers
        self.accelerator.scaler = scaler  # Accelerate makes one on GPUs only
        model = net(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.state = powersgd.PowerSGDState(None, **SETTINGS)
        self.model.register_comm_hook(self.state, powersgd.powerSGD_hook)
        if is_registered:
            checkpoint = powersgd.Checkpoint(self.state, self.model, shared=True)
            self.accelerator.register_for_checkpointing(checkpoint)
        self.gradients: list[Any] = []

    def train(self, start: int, stop: int, is_told: bool = True) -> "_Job":
        scaler = self.accelerator.scaler
        for step in range(start, stop):
            inputs, targets = batch(step, self.accelerator.process_index, self.layers == 1)
            loss = (self.model(inputs) - targets).square().sum() / 2
            if scaler is not None and is_told:
                self.state.loss_scale = scaler.get_scale()
            self.accelerator.backward(loss)
            self.gradients.append([p.grad.clone() for p in self.model.parameters()])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def load(self, directory: Path) -> "_Job":
        self.accelerator.load_state(str(directory))
        return self

    def outcome(self) -> Outcome:
        return {
            "parameters": [p.detach().clone() for p in self.model.parameters()],
            "gradients": self.gradients,
            "stats": self.state.compression_stats(),
            "iter": self.state.iter,
        }


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)


def _train(rank: int, directory: Path) -> dict[str, Outcome]:
    attach(rank)
    outcomes = {
        "exact": _Job(layers=1).train(0, STEPS).outcome(),
        "whole": _Job().train(0, STEPS).outcome(),
        "scaled": _Job(scaler=_scaler()).train(0, STEPS).outcome(),
        "untold": _Job(scaler=_scaler()).train(0, STEPS, is_told=False).outcome(),
    }
    for name, scaler in (("plain", None), ("scaled", _scaler())):
        stopped = _Job(scaler=scaler).train(0, STOP)
        stopped.accelerator.save_state(str(directory / name))
        outcomes[f"stopped {name}"] = stopped.outcome()
    return outcomes


def _resume(rank: int, directory: Path) -> dict[str, Outcome]:
    attach(rank)
    with pytest.raises(RuntimeError, match="Number of custom checkpoints"):
        _Job(is_registered=False).load(directory / "plain")
    without = Path(shutil.copytree(directory / "plain", directory / f"without{rank}"))
    (without / "custom_checkpoint_0.pkl").unlink()
    jobs = {
        "resumed": _Job().load(directory / "plain"),
        "resumed scaled": _Job(scaler=_scaler()).load(directory / "scaled"),
        "left out": _Job(is_registered=False).load(without),
    }
    return {name: job.train(STOP, STEPS).outcome() for name, job in jobs.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """By rank, the outcome of each run."""
    directory = tmp_path_factory.mktemp("accelerate")
    both = (run_ranks(function, 2, directory) for function in (_train, _resume))
    return [trained | resumed for trained, resumed in zip(*both, strict=True)]


@pytest.mark.parametrize("name", ["exact", "whole", "scaled", "resumed", "resumed scaled"])
def test_ranks_agree_and_compress(runs: list[Any], name: str) -> None:
    first, second = (rank[name] for rank in runs)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    assert first["stats"] == second["stats"]
    assert first["stats"][0] > 1
    assert first["iter"] == STEPS


def test_rank_one_averages_are_exact(runs: list[Any]) -> None:
    for rank in runs:
        assert_exact(rank["exact"]["gradients"])


@pytest.mark.parametrize("name", ["resumed", "resumed scaled"])
def test_a_resumed_run_is_the_one_that_never_stopped(runs: list[Any], name: str) -> None:
    """To rounding: the checkpoint holds the mean of the residuals."""
    for rank in runs:
        assert rank["stopped plain"]["iter"] == STOP
        assert distance(rank["stopped plain"]["parameters"], rank["whole"]["parameters"]) > 1e-2
        assert distance(rank[name]["parameters"], rank["whole"]["parameters"]) < CLOSE
        assert rank[name]["stats"] == rank["whole"]["stats"]


def test_a_state_that_is_not_registered_is_missed(runs: list[Any]) -> None:
    for rank in runs:
        assert rank["left out"]["iter"] == STEPS - STOP
        assert distance(rank["left out"]["parameters"], rank["whole"]["parameters"]) > 1e-2


def test_a_state_that_is_told_the_scale_follows_it(runs: list[Any]) -> None:
    for rank in runs:
        assert distance(rank["scaled"]["parameters"], rank["whole"]["parameters"]) < CLOSE
        assert distance(rank["untold"]["parameters"], rank["whole"]["parameters"]) > 1e-2
