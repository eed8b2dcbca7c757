"""PowerSGD gradient compression for PyTorch, as pure steps under a small state."""

import importlib
from typing import Any

from powersgd.compilation import compile_steps
from powersgd.ddp import batched_powerSGD_hook, powerSGD_hook
from powersgd.loading import load_steps
from powersgd.loop import average_gradients
from powersgd.orthogonalization import orthogonalize
from powersgd.phases import EAGER, Steps
from powersgd.registration import register
from powersgd.sharing import Checkpoint, shared_state_dict
from powersgd.state import PowerSGDState
from powersgd.steps import compute_p, compute_q, reconstruct, residual

__version__ = "0.1.0"

__all__ = [
    "EAGER",
    "Checkpoint",
    "PowerSGDState",
    "Steps",
    "average_gradients",
    "batched_powerSGD_hook",
    "compile_steps",
    "compute_p",
    "compute_q",
    "load_steps",
    "orthogonalize",
    "powerSGD_hook",
    "reconstruct",
    "register",
    "residual",
    "shared_state_dict",
]

_FRONT_ENDS = ("fsdp", "lightning", "torchft")


def __getattr__(name: str) -> Any:
    # Only for those who use them: each imports what takes a second or is not installed.
    if name in _FRONT_ENDS:
        return importlib.import_module(f"powersgd.{name}")
    raise AttributeError(f"module 'powersgd' has no attribute {name!r}")
