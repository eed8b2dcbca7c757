"""PowerSGD for a Lightning ``Trainer``; needs ``lightning`` or ``pytorch_lightning``."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from powersgd.ddp import powerSGD_hook
from powersgd.sharing import shared_state_dict
from powersgd.state import PowerSGDState

try:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import rank_zero_warn
except ModuleNotFoundError:  # the same package under its other name
    import pytorch_lightning as pl  # type: ignore[no-redef]
    from pytorch_lightning.utilities import rank_zero_warn


class PowerSGDCallback(pl.Callback):
    """Compresses the gradients of a ``Trainer(strategy="ddp")``, and saves and resumes the state.

    It registers the hook itself, because Lightning's ``DDPStrategy(ddp_comm_state=...,
    ddp_comm_hook=...)`` does so on CUDA devices only; there, both may be given. Checkpoints hold
    `powersgd.shared_state_dict`, so that they fit any number of ranks.

    Args:
        state: The state. Not copied: Lightning's callback and the caller see the same one.
        hook: `powersgd.powerSGD_hook`, `powersgd.batched_powerSGD_hook` or a wrapper around them.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=2)
        >>> pl.Trainer(strategy="ddp", callbacks=PowerSGDCallback(state))  # doctest: +SKIP
    """

    def __init__(self, state: PowerSGDState, hook: Callable[..., Any] = powerSGD_hook) -> None:
        self._state, self._hook = state, hook
        # What was read of a checkpoint and waits until the model is where it will be trained; an
        # empty one says that there was nothing.
        self._saved: Mapping[str, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget what was loaded for another purpose, such as validation.

        Args:
            trainer: The trainer.
            pl_module: The model.
            stage: "fit", "validate", "test" or "predict".
        """
        self._saved = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Register the hook with the DDP model, which Lightning makes anew for each fit.

        Not again if the strategy has done so with this state.

        Args:
            trainer: The trainer.
            pl_module: The model.

        Raises:
            RuntimeError: If the strategy has registered another hook.
            ValueError: If the trainer's strategy is not DDP.
        """
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "PowerSGDCallback needs a Trainer(strategy='ddp') or another DDPStrategy, but the "
                f"strategy is {type(trainer.strategy).__name__}"
            )
        if self._state not in [registered for _, registered in model._comm_hooks]:
            model.register_comm_hook(self._state, self._hook)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over what was loaded, now that everything else is restored.

        Args:
            trainer: The trainer.
            pl_module: The model.

        Raises:
            RuntimeError: See `PowerSGDState.load_state_dict`.
            ValueError: See `PowerSGDState.load_state_dict`.
        """
        saved, self._saved = self._saved, None
        if saved:
            self._state.load_state_dict(saved, pl_module)
        elif saved is not None:
            self._state.reset()
            rank_zero_warn(
                "The checkpoint holds no PowerSGD state, so it was made without PowerSGDCallback: "
                "compression starts afresh, after "
                f"{self._state.start_powerSGD_iter} steps without it."
            )

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Tell the state what the loss was multiplied by, if the precision plugin has a scaler.

        Args:
            trainer: The trainer.
            pl_module: The model.
            loss: The scaled loss.
        """
        if trainer.scaler is not None:
            self._state.loss_scale = trainer.scaler.get_scale()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the state among the callbacks' in a checkpoint; a collective.

        Lightning calls this on all ranks, though only the first one writes the file, and warns if
        the callback is missing when it is loaded.

        Args:
            trainer: The trainer.
            pl_module: The model.
            checkpoint: The checkpoint. Changed.

        Raises:
            RuntimeError: See `powersgd.shared_state_dict`.
            ValueError: See `powersgd.shared_state_dict`.
        """
        checkpoint["callbacks"][self.state_key] = shared_state_dict(self._state, pl_module)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the state for `on_train_start`: the model is not on its device yet.

        Args:
            trainer: The trainer.
            pl_module: The model.
            checkpoint: The checkpoint. Not changed.
        """
        self._saved = checkpoint["callbacks"].get(self.state_key, {})
