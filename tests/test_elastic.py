"""A killed rank restarts the job, which goes on from its last checkpoint as the README says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .elastic_job import EVERY, README, STEPS, train
from .ranks import run_ranks

FATAL = 21


def _whole(rank: int) -> list[float]:
    del rank
    return train()


@pytest.fixture(scope="module")
def whole() -> list[list[float]]:
    return run_ranks(_whole, 2)


@pytest.mark.parametrize(("kind", "tolerance"), [("own", 0.0), ("shared", 1e-5)])
def test_a_killed_rank_restarts_the_job(
    tmp_path: Path, whole: list[list[float]], kind: str, tolerance: float
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = ["--max-restarts=3", str(Path(__file__).parent / "elastic_job.py"), kind, str(FATAL)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(README.parent),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see the README
    }
    done = subprocess.run(
        [*launch, *job], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "exitcode: -9" in done.stderr
    resumed_at = FATAL // EVERY * EVERY
    for rank, expected in enumerate(whole):
        losses = torch.load(tmp_path / f"losses{rank}.pt")
        assert len(losses) == STEPS - resumed_at
        assert losses == pytest.approx(expected[resumed_at:], rel=tolerance, abs=0)
        assert losses[-1] < expected[0] / 2
