"""Which collective is started when: the one reduction behind every front end.

Every rank starts the same collectives in the same order, decided by program order alone. When a
bucket is ready, its P (with everything that is not compressed) starts on its way while backward
still runs. When the step's last bucket is ready, this thread walks over all buckets: wait for P,
compute Q, start it. It then waits for all Q, and only when the whole step is known to be finite on
all ranks it changes the state. No thread, no collective from a callback (unless DDP left out the
last bucket, when the end of backward ends the step), at most two collectives per bucket.

A step that meets an inf or a NaN anywhere leaves the state as it was, and makes every compressed
gradient of the step NaN on all ranks, so that no optimizer applies what the residuals still hold.
No flag has to travel for this: a non-finite gradient makes P non-finite, and sums of it stay so.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from powersgd.arrival import Arrival, Flag, meet
from powersgd.collectives import (
    Collectives,
    Work,
    average_,
    find_collectives,
    new_future,
    start_mean_,
    wait,
)
from powersgd.compression import Compression, compress, decompress_if_, project
from powersgd.ranges import named_range
from powersgd.state import PowerSGDState

Future = torch.futures.Future[Tensor]


@dataclass
class _InFlight:
    """A bucket on its way through a step."""

    future: Future
    buffer: Tensor  # what the front end gets back
    message: Tensor  # what the running collective sums up
    work: Work | None
    compression: Compression | None = None  # None: plain averaging


def reduce_bucket(state: PowerSGDState, arrival: Arrival) -> Future:
    """Start to average a bucket's gradients over the ranks; the step's last bucket ends the step.

    Args:
        state: The state; counts no iteration here.
        arrival: The bucket.

    Returns:
        A future of the buffer. Once compression has started it is complete when this function has
        returned for the step's last bucket.

    Raises:
        RuntimeError: If there is no process group, or a collective fails (a rank died, a timeout).
        ValueError: See `powersgd.arrival.meet`.
    """
    buffer, index = arrival.buffer, arrival.index
    with _plain_mode(buffer.device):
        with named_range("plan", index):
            bucket = meet(state, arrival)
        collectives = find_collectives(state.agreed_group)
        if state.is_warming_up():
            if arrival.is_first:
                _start_flag(state, buffer.device, collectives)
            # Each bucket on its own: in the first step under static_graph, DDP does not say which
            # bucket is the last.
            with named_range("all-reduce of the gradient"):
                return average_(buffer, collectives)
        if arrival.is_first:
            state.in_flight.clear()  # a backward that was aborted may have left some
        compression, message = None, buffer
        if bucket is not None:
            with named_range("P", index):
                compression, message = compress(state, bucket, buffer, arrival.may_be_unused, index)
        with named_range("all-reduce of P", index):
            future, work = new_future(buffer.device), start_mean_(message, collectives)
        state.in_flight.append(_InFlight(future, buffer, message, work, compression))
        if arrival.is_last:
            finish_step(state)
    return future


@contextmanager
def _plain_mode(device: torch.device) -> Iterator[None]:
    # Hooks run in whatever mode backward was called: with create_graph, under autocast.
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _start_flag(state: PowerSGDState, device: torch.device, collectives: Collectives) -> None:
    # In plain averaging there is no message of ours that could take it along.
    flag = torch.full((1,), float(state.has_changed()), device=device)
    state.change = Flag(flag, start_mean_(flag, collectives))


def finish_step(state: PowerSGDState) -> None:
    """End the running step, all of whose buckets have arrived: average, and update the state.

    Args:
        state: The state.

    Raises:
        RuntimeError: If a collective fails (a rank died, a timeout).
    """
    step: list[_InFlight] = list(state.in_flight)
    state.in_flight.clear()
    _wait(step, "P")
    compressed = [(f, f.compression) for f in step if f.compression is not None]
    if compressed:
        with _plain_mode(step[0].buffer.device):
            _finish_compressed(state, step, compressed)
    for in_flight in step:
        in_flight.future.set_result(in_flight.buffer)


def _finish_compressed(
    state: PowerSGDState,
    step: Sequence[_InFlight],
    compressed: Sequence[tuple[_InFlight, Compression]],
) -> None:
    collectives = find_collectives(state.agreed_group)
    finite = _is_finite(step)
    state.change = Flag(compressed[-1][0].message[-1:].clone())
    for in_flight, compression in compressed:
        in_flight.message = project(state, compression, in_flight.message, collectives.size())
        with named_range("all-reduce of Q", compression.index):
            in_flight.work = start_mean_(in_flight.message, collectives)
    _wait(step, "Q")
    finite = finite & _is_finite(step)
    for in_flight, compression in compressed:
        with named_range("reconstruction", compression.index):
            decompress_if_(finite, state, compression, in_flight.message)
    plans = [compression.bucket.plan for _, compression in compressed]
    state.count(plans, sum(in_flight.buffer.numel() for in_flight, _ in compressed))


def _wait(step: Sequence[_InFlight], factor: str) -> None:
    # For all of them, also if one has failed: a group that is torn down while its threads still
    # hold tensors of ours can wait for them for ever (torch's DDP keeps Python's lock).
    first: RuntimeError | None = None
    for i, in_flight in enumerate(step):
        try:
            with named_range(f"wait for {factor}", i):
                wait(in_flight.work)
        except RuntimeError as error:
            first = first or error
        in_flight.work = None
    try:
        if first is not None:
            raise first
    finally:
        del first  # its traceback holds this frame, and so the DDP model, until Python collects it


def _is_finite(step: Sequence[_InFlight]) -> Tensor:
    # Equal on all ranks, because the sums are. Stays on the device: nothing waits for it there.
    total = torch.zeros((), device=step[0].buffer.device)
    for in_flight in step:
        message = in_flight.message
        values = message._values() if message.is_sparse else message
        total = total + (values * 0).sum(dtype=torch.float32).to(total.device)
    return total == 0
