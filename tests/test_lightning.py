"""PowerSGD under a Lightning Trainer: right averages, exact resumption, the loss scale."""

import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import powersgd

from .ranks import run_ranks
from .test_accelerate import (
    CLOSE,
    MOMENTUM,
    RATE,
    SETTINGS,
    STEPS,
    STOP,
    Outcome,
    assert_exact,
    attach,
    batch,
    distance,
    net,
)

# Without its import, which takes as long as all the rest: only the ranks need it.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


def _module(layers: int) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.gradients = net(layers), []

        def training_step(self, number: Tensor, index: int) -> Tensor:
            inputs, targets = batch(self.trainer.global_step, self.global_rank, layers == 1)
            return (self.net(inputs) - targets).square().sum() / 2

        def validation_step(self, number: Tensor, index: int) -> None:
            pass

        def on_after_backward(self) -> None:
            self.gradients.append([p.grad.clone() for p in self.parameters()])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)

    return Module()


def _fit(
    callback: Any = None,
    layers: int = 3,
    stop: int = STEPS,
    plugins: tuple[Any, ...] = (),
    saves: tuple[Any, ...] = (),
    path: Path | None = None,
    validated: Path | None = None,
    registers: bool = False,
) -> Outcome:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class OnGpu(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            if registers:  # as on CUDA devices
                self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)

    module, state = _module(layers), powersgd.PowerSGDState(None, **SETTINGS)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OnGpu(ddp_comm_state=state, ddp_comm_hook=powersgd.powerSGD_hook),
        plugins=[TorchElasticEnvironment(), *plugins],
        callbacks=[callback(state), *saves] if callback else [],
        max_steps=stop,
        limit_val_batches=1,
        enable_checkpointing=bool(saves),
        **dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False),
    )
    numbers = torch.utils.data.DataLoader(range(1000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, numbers, ckpt_path=path)
        if validated is not None:
            trainer.validate(module, numbers, ckpt_path=validated, verbose=False)
            trainer.fit_loop.epoch_loop.max_steps = STEPS
            trainer.fit(module, numbers)
    return {
        "parameters": [p.detach().clone() for p in module.parameters()],
        "gradients": module.gradients,
        "stats": state.compression_stats(),
        "iter": state.iter,
        "warnings": [str(warning.message) for warning in caught],
    }


def _train(rank: int, directory: Path) -> dict[str, Outcome]:
    attach(rank)
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import MixedPrecision

    from powersgd.lightning import PowerSGDCallback

    class Scaled(MixedPrecision):
        def __init__(self) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            super().__init__("16-mixed", "cpu", scaler)

        def autocast_context_manager(self) -> Any:
            return nullcontext()  # the scaler alone, in float64

    class Untold(PowerSGDCallback):
        def on_before_backward(self, *args: Any) -> None:
            pass

    save = pl.callbacks.ModelCheckpoint(directory, "saved", every_n_train_steps=STOP)
    return {
        "exact": _fit(PowerSGDCallback, layers=1, registers=True),
        "whole": _fit(PowerSGDCallback),
        "stopped": _fit(PowerSGDCallback, stop=STOP, saves=(save,)),
        "scaled": _fit(PowerSGDCallback, plugins=(Scaled(),)),
        "untold": _fit(Untold, plugins=(Scaled(),)),
    }


def _resume(rank: int, directory: Path) -> dict[str, Outcome]:
    attach(rank)
    from powersgd.lightning import PowerSGDCallback

    saved, without = directory / "saved.ckpt", directory / f"without{rank}.ckpt"
    everything = torch.load(saved)
    del everything["callbacks"]["PowerSGDCallback"]
    torch.save(everything, without)
    return {
        "resumed": _fit(PowerSGDCallback, path=saved),
        "fresh": _fit(PowerSGDCallback, path=without),
        "left out": _fit(path=saved),
        "continued": _fit(PowerSGDCallback, stop=STOP, validated=without),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """By rank, the outcome of each run."""
    directory = tmp_path_factory.mktemp("lightning")
    both = (run_ranks(function, 2, directory) for function in (_train, _resume))
    return [trained | resumed for trained, resumed in zip(*both, strict=True)]


@pytest.mark.parametrize("name", ["exact", "whole", "scaled", "resumed", "continued"])
def test_ranks_agree_and_compress(runs: list[Any], name: str) -> None:
    first, second = (rank[name] for rank in runs)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    assert first["stats"] == second["stats"]
    assert first["stats"][0] > 1
    assert first["iter"] == STEPS


def test_rank_one_averages_are_exact(runs: list[Any]) -> None:
    for rank in runs:
        assert_exact(rank["exact"]["gradients"])


def test_a_resumed_run_is_the_one_that_never_stopped(runs: list[Any]) -> None:
    """To rounding: the checkpoint holds the mean of the residuals."""
    for rank in runs:
        assert rank["stopped"]["iter"] == STOP
        assert distance(rank["stopped"]["parameters"], rank["whole"]["parameters"]) > 1e-2
        assert distance(rank["resumed"]["parameters"], rank["whole"]["parameters"]) < CLOSE
        assert rank["resumed"]["stats"] == rank["whole"]["stats"]


def test_without_a_saved_state_it_starts_afresh_and_says_so_once(runs: list[Any]) -> None:
    said = [w for rank in runs for w in rank["fresh"]["warnings"] if "no PowerSGD state" in w]
    assert len(said) == 1
    assert "starts afresh, after 3 steps" in said[0]
    for rank in runs:
        assert rank["fresh"]["iter"] == STEPS - STOP
        assert distance(rank["fresh"]["parameters"], rank["whole"]["parameters"]) > 1e-2
        assert not any("PowerSGD" in warning for warning in rank["resumed"]["warnings"])


def test_a_second_fit_goes_on_whatever_was_validated(runs: list[Any]) -> None:
    assert all(rank["continued"]["stats"] == rank["whole"]["stats"] for rank in runs)


def test_a_callback_that_is_left_out_is_missed(runs: list[Any]) -> None:
    for rank in runs:
        assert distance(rank["left out"]["parameters"], rank["whole"]["parameters"]) > 1e-2
    assert any("PowerSGDCallback" in warning for warning in runs[0]["left out"]["warnings"])


def test_the_state_follows_the_scaler(runs: list[Any]) -> None:
    for rank in runs:
        assert distance(rank["scaled"]["parameters"], rank["whole"]["parameters"]) < CLOSE
        assert distance(rank["untold"]["parameters"], rank["whole"]["parameters"]) > 1e-2
