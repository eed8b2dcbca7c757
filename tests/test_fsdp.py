"""FSDP2 between replicas: 2 x 2 and 2 x 3 gloo ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import powersgd
import powersgd.fsdp
from powersgd.fsdp_internals import find_groups
from powersgd.layout import local

from .ranks import run_ranks
from .tolerances import assert_close
from .training import SETTINGS


def _plain() -> nn.Sequential:
    # Rows that no number of shards divides, and a single one.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 31), nn.Tanh())
    return model.append(nn.Linear(31, 1))


class _Job:
    """A model in training, sharded within each replica; batches depend on rank and step."""

    def __init__(self, shards: int, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        sizes = (dist.get_world_size() // shards, shards)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        self.shards, self.dtype = shards, dtype
        self.model = _plain().to(dtype)
        options["mesh"] = self.mesh["shard"]
        for layer in (self.model[2], self.model[4], self.model):
            fully_shard(layer, **options)
        self.state = powersgd.PowerSGDState(None, **SETTINGS)
        powersgd.fsdp.register(self.model, self.state, self.mesh.get_group("replicate"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def inputs(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        return torch.randn(16, 24, generator=generator, dtype=self.dtype)

    def backward(self, *steps: int) -> None:
        self.optimizer.zero_grad()
        for step in steps:
            self.model.set_requires_gradient_sync(step == steps[-1])
            _loss(self.model, self.inputs(step)).backward()

    def train(self, start: int, stop: int) -> "_Job":
        for step in range(start, stop):
            self.backward(step)
            self.optimizer.step()
        return self

    def locals(self) -> list[Tensor]:
        return [local(p).detach().clone() for p in self.model.parameters()]


def _loss(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().sum() / 16


class _Weighed(nn.Module):
    """Its parameters' gradients are the weights."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)

    def forward(self, weights: list[Tensor]) -> Tensor:
        return sum((p * w).sum() for p, w in zip(self.all, weights, strict=True))


class _Shards:
    """What is expected: DDP over replicas, with our hook, of a model made of shards."""

    def __init__(self, job: _Job) -> None:
        shapes = [local(p).shape for p in job.model.parameters()]
        zeros = [nn.Parameter(torch.zeros(shape, dtype=job.dtype)) for shape in shapes]
        self.group = job.mesh.get_group("replicate")
        self.ddp = DistributedDataParallel(_Weighed(zeros), process_group=self.group)
        self.state = powersgd.PowerSGDState(self.group, **SETTINGS)
        self.ddp.register_comm_hook(self.state, powersgd.powerSGD_hook)

    def average(self, gradients: list[Tensor]) -> list[Tensor]:
        self.ddp.zero_grad()
        self.ddp(gradients).backward()
        return [p.grad for p in self.ddp.parameters()]


def _gradients(job: _Job, *steps: int) -> list[Tensor]:
    """This rank's shards of the gradients' mean over its replica, by hand."""
    model = _plain().to(job.dtype)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), job.model.parameters(), strict=True):
            mine.copy_(theirs.full_tensor())
    for step in steps:
        _loss(model, job.inputs(step)).backward()
    index = job.mesh.get_local_rank("shard")
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad / job.shards
        dist.all_reduce(gradient, group=job.mesh.get_group("shard"))
        rows = -(-gradient.size(0) // job.shards)
        gradients.append(gradient[index * rows : (index + 1) * rows])
    return gradients


def _equals_ddp_on_the_shards(shards: int, **options: Any) -> list[Tensor]:
    job = _Job(shards, **options)
    expected = _Shards(job)
    for step in range(0, 16, 2):
        by_hand = expected.average(_gradients(job, step, step + 1))
        job.backward(step, step + 1)
        for parameter, gradient in zip(job.model.parameters(), by_hand, strict=True):
            assert_close(local(parameter.grad), gradient, scale=1e3)
        job.optimizer.step()
    assert job.state.iter == 8
    assert job.state.compression_stats() == expected.state.compression_stats()
    assert job.state.compression_stats()[0] > 1.5
    return job.locals()


def _mixed(shards: int, reduce_dtype: torch.dtype) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    job, exact = _Job(shards, torch.float32, mp_policy=policy), _Job(shards, torch.float32)
    for mine, theirs in zip(job.train(0, 8).locals(), exact.train(0, 8).locals(), strict=True):
        assert not mine.numel() or (mine - theirs).norm() < 0.1 * theirs.norm()
    return job.locals()


def _resume(shards: int, directory: str) -> None:
    for shared in (False, True):
        path = f"{directory}/{shared}"
        whole = _Job(shards).train(0, 9)
        first = _Job(shards).train(0, 5)
        checkpoint = powersgd.Checkpoint(first.state, first.model, shared=shared)
        held = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}
        dcp.save({**held, "powersgd": checkpoint}, checkpoint_id=path)
        second = _Job(shards)
        second.backward(0)
        second.optimizer.step()  # so that the optimizer has its tensors
        second.state.reset()
        held = {"model": second.model.state_dict(), "optimizer": second.optimizer.state_dict()}
        checkpoint = powersgd.Checkpoint(second.state, second.model, shared=shared)
        dcp.load({**held, "powersgd": checkpoint}, checkpoint_id=path)
        second.optimizer.load_state_dict(held["optimizer"])
        second.train(5, 9)
        for mine, theirs in zip(second.locals(), whole.locals(), strict=True):
            assert_close(mine, theirs, scale=1e3)


def _one_group(shards: int) -> list[Tensor]:
    """A group that ends with the backward pass, some of whose parameters get no gradient."""
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    model = _plain()
    model.unused = nn.Parameter(torch.ones(20, 30))
    model[0].weight.requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"])
    state = powersgd.PowerSGDState(None, **SETTINGS)
    powersgd.fsdp.register(model, state, mesh.get_group("replicate"))
    for step in range(6):
        model.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(16, 24)).square().sum().backward()
        assert state.iter == step + 1
        assert not model.unused.grad.full_tensor().any()
        assert model[0].weight.grad is None
        assert model[2].weight.grad.full_tensor().any()
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def _errors(shards: int) -> None:
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    group, state = mesh.get_group("replicate"), powersgd.PowerSGDState(None)
    with pytest.raises(ValueError, match="not sharded"):
        powersgd.fsdp.register(_plain(), state, group)
    with pytest.raises(ValueError, match=r"two dimensions.*mesh\[\"shard\"\]"):
        powersgd.fsdp.register(fully_shard(_plain(), mesh=mesh), state, group)
    model = fully_shard(_plain(), mesh=mesh["shard"])
    with pytest.raises(ValueError, match="over which the model is sharded"):
        powersgd.fsdp.register(model, state, mesh.get_group("shard"))
    with pytest.raises(TypeError, match="PowerSGDState"):
        powersgd.fsdp.register(model, None, group)  # type: ignore[arg-type]
    other = powersgd.PowerSGDState(dist.group.WORLD)
    with pytest.raises(ValueError, match="another process group"):
        powersgd.fsdp.register(model, other, group)
    assert state.process_group is None
    powersgd.fsdp.register(model, state, group)
    with pytest.raises(ValueError, match="hook already"):
        powersgd.fsdp.register(model, powersgd.PowerSGDState(None), group)
    unlike = powersgd.PowerSGDState(None, 1 + mesh.get_local_rank("replicate"))
    model = fully_shard(_plain(), mesh=mesh["shard"])
    powersgd.fsdp.register(model, unlike, group)
    with pytest.raises(ValueError, match="rank 0 has 1, rank 1 has 2"):
        model(torch.randn(3, 24)).sum().backward()


def _all_cases(rank: int, shards: int, directory: str) -> dict[str, list[Tensor]]:
    results = {
        "reshard": _equals_ddp_on_the_shards(shards, reshard_after_forward=True),
        "keep": _equals_ddp_on_the_shards(shards, reshard_after_forward=False),
        "mixed": _mixed(shards, torch.float32),
        "half": _mixed(shards, torch.bfloat16),
    }
    results["one group"] = _one_group(shards)
    _resume(shards, directory)
    _errors(shards)
    return results


@pytest.mark.parametrize("shards", [2, 3])
def test_replicas_of_shards(shards: int, tmp_path: Path) -> None:
    results = run_ranks(_all_cases, 2 * shards, shards, str(tmp_path))
    for one, other in zip(results[:shards], results[shards:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("group")
def test_what_torch_does_not_document_is_still_there() -> None:
    """If this fails, torch has changed: see powersgd/fsdp_internals.py."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(_plain(), mesh=mesh["shard"])
    ((module, group),) = find_groups(model)
    assert module is model
    assert not group.is_replicated()
    assert group.ranks() == {0}
    assert not group.has_hook()
    model.set_all_reduce_hook(lambda reduced: seen.append((reduced.numel(), group.shards())))
    assert group.has_hook()
    seen: list[Any] = []
    model(torch.randn(2, 24)).sum().backward()
    ((numel, shards),) = seen
    assert numel == sum(shard.padded_numel for shard in shards)
    for shard, parameter in zip(shards, model.parameters(), strict=True):
        assert shard.parameter is parameter
        assert shard.padded_numel == parameter.numel()
        assert group.find(parameter).sharded_param is parameter
    assert group.find(torch.ones(())) is None
    ((_, replicated),) = find_groups(fully_shard(_plain(), mesh=mesh))
    assert replicated.is_replicated()
