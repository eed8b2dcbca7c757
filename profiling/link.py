"""A slow link on this machine: a network namespace for each rank, behind what tc shapes.

Two namespaces are the two ends of a veth pair; more of them are joined by a bridge in one more. All
addresses lie inside of the namespaces, and there are no routes out of them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

INTERFACE = "veth0"  # of each rank, in its namespace
PREFIX = "powersgd"
SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # as Ctrl-C, they end a run only after the clean-up
COMMAND_S = 30.0

# What tbf saves up while the link idles passes at once. It must bridge the time in which a timer is
# late, or the rate is not reached; but more than that, and PowerSGD's few kilobytes would be free:
# a message after a pause arrives earlier by up to this time.
BURST_S, SMALLEST_BURST = 2e-3, 2**14
QUEUE_S, SMALLEST_QUEUE = 0.02, 2**20


class LinkError(RuntimeError):
    """A link cannot be made, or a rank on it failed: one sentence."""


@dataclass(frozen=True)
class Link:
    """Namespaces that are joined; made by `namespaces`.

    Attributes:
        names: The ranks' namespaces.
        ends: ``(namespace, interface)`` of every interface that is shaped.
    """

    names: tuple[str, ...]
    ends: tuple[tuple[str, str], ...]

    def shape(self, bits_per_s: float, latency_s: float = 0.0) -> None:
        """Limit the rate in each direction.

        Args:
            bits_per_s: With all headers, as the link's nominal rate.
            latency_s: Added to each message, one way.

        Raises:
            LinkError: If tc refuses; such as a latency where the kernel has no netem.
        """
        burst = max(SMALLEST_BURST, round(BURST_S * bits_per_s / 8))
        queue = max(SMALLEST_QUEUE, round(QUEUE_S * bits_per_s / 8))
        rate = f"rate {round(bits_per_s)}bit burst {burst}b limit {queue}b"
        for name, interface in self.ends:
            _run(f"tc -n {name} qdisc replace dev {interface} root handle 1: tbf {rate}")
            if latency_s and interface == INTERFACE:  # once on the way, not again at the bridge
                self._delay(name, latency_s)

    def _delay(self, name: str, latency_s: float) -> None:
        delay = f"netem delay {round(1e6 * latency_s)}us limit 100000"
        try:
            _run(f"tc -n {name} qdisc replace dev {INTERFACE} parent 1:1 handle 10: {delay}")
        except LinkError as error:
            raise LinkError(
                "a latency needs netem (CONFIG_NET_SCH_NETEM), which this kernel does not offer: "
                f"{error}"
            ) from error

    def unshape(self) -> None:
        """Let everything pass as fast as it can."""
        for name, interface in self.ends:
            with suppress(LinkError):  # nothing was there
                _run(f"tc -n {name} qdisc del dev {interface} root")


def address_of(rank: int) -> str:
    """Return a rank's address on the link.

    Args:
        rank: The rank.

    Returns:
        An IPv4 address.
    """
    return f"10.99.0.{rank + 1}"


def find_obstacle() -> str | None:
    """Say in one sentence what a link needs and this process lacks; None if nothing is missing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces exist on Linux alone, and this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` (of iproute2) isn't on PATH, and a shaped link needs it"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


@contextmanager
def namespaces(workers: int) -> Iterator[Link]:
    """Make joined namespaces, and remove them whatever happens; those of dead runs too.

    Args:
        workers: How many, 2 or more.

    Yields:
        The link, not shaped yet.

    Raises:
        LinkError: If they cannot be made.
    """
    obstacle = find_obstacle()
    if obstacle is not None:
        raise LinkError(obstacle)
    prefix = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    names, hub = [f"{prefix}-{rank}" for rank in range(workers)], f"{prefix}-hub"
    with _signals_raise():
        try:
            _remove([name for name in _list() if _is_stale(name)])
            yield _make(names, hub)
        finally:
            with _undisturbed():
                _remove([name for name in (*names, hub) if name in _list()])


def _make(names: list[str], hub: str) -> Link:
    try:
        _add(names[0])
    except LinkError as error:
        raise LinkError(f"network namespaces are not permitted here: {error}") from error
    for name in names[1:]:
        _add(name)
    ends = [(name, INTERFACE) for name in names]
    if len(names) == 2:
        veth = f"name {INTERFACE} netns {names[0]} type veth peer name {INTERFACE}"
        _run(f"ip link add {veth} netns {names[1]}")
    else:
        ends += _make_hub(names, hub)
    for rank, name in enumerate(names):
        _run(f"ip -n {name} address add {address_of(rank)}/24 dev {INTERFACE}")
    for name, interface in ends:
        _run(f"ip -n {name} link set dev {interface} up")
    return Link(tuple(names), tuple(ends))


def _make_hub(names: list[str], hub: str) -> list[tuple[str, str]]:
    _add(hub)
    _run(f"ip -n {hub} link add name bridge0 type bridge")
    _run(f"ip -n {hub} link set dev bridge0 up")
    ports = [f"port{rank}" for rank in range(len(names))]
    for name, port in zip(names, ports, strict=True):
        veth = f"name {INTERFACE} netns {name} type veth peer name {port}"
        _run(f"ip link add {veth} netns {hub}")
        _run(f"ip -n {hub} link set dev {port} master bridge0")
    return [(hub, port) for port in ports]


def _add(name: str) -> None:
    _run(f"ip netns add {name}")
    _run(f"ip -n {name} link set dev lo up")


def _remove(names: list[str]) -> None:
    for name in names:
        with suppress(LinkError):  # the next one must go all the same
            for pid in _run(f"ip netns pids {name}").split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(LinkError):
            _run(f"ip netns delete {name}")


def _list() -> list[str]:
    return [line.split()[0] for line in _run("ip netns list").splitlines() if line.strip()]


def _is_stale(name: str) -> bool:
    match = re.fullmatch(rf"{PREFIX}-(\d+)-[0-9a-f]{{6}}-(\d+|hub)", name)
    if match is None:
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    return False


def _run(command: str) -> str:
    try:
        done = subprocess.run(
            command.split(),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            start_new_session=True,  # Ctrl-C must not end what cleans up
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"`{command}` failed: {error}") from error
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LinkError(f"`{command}` failed: {reason}")
    return done.stdout


@contextmanager
def _signals_raise() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets the main thread alone set handlers
        return
    before = {number: signal.signal(number, _raise) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _undisturbed() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
