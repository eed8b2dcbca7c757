"""Processes of ranks in namespaces: started, asked and ended."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from profiling.link import INTERFACE, Link, LinkError

ROOT = Path(__file__).parent.parent


class Ranks:
    """One process in each namespace of a link; each answers one line of JSON with another."""

    def __init__(self, link: Link, task: dict[str, Any], directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(link.names):
                self._processes.append(self._start(rank, name, len(link.names), task))
        except BaseException:
            self.end()
            raise

    def _start(
        self, rank: int, name: str, workers: int, task: dict[str, Any]
    ) -> "subprocess.Popen[bytes]":
        store = self._directory / "store"
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "profiling.network_rank"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = str(task["threads"])
        with self._errors(rank).open("wb") as errors:
            return subprocess.Popen(
                [*command, str(rank), str(workers), str(store), json.dumps(task)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "OMP_NUM_THREADS": threads,
                },
                start_new_session=True,  # Ctrl-C is for the one that started them
            )

    @property
    def pids(self) -> list[int]:
        """The processes' ids, by rank."""
        return [process.pid for process in self._processes]

    def ask(self, request: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """Send all ranks a request and wait for their answers.

        Args:
            request: What can be JSON.
            limit_s: Hard limit.

        Returns:
            The answers, by rank.

        Raises:
            LinkError: If a rank ended, or the time ran out.
        """
        line = json.dumps(request).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of one that has ended, which its output tells
                os.write(process.stdin.fileno(), line)
        return self._answers(time.monotonic() + limit_s, limit_s)

    def _answers(self, deadline: float, limit_s: float) -> list[dict[str, Any]]:
        answers = [b""] * len(self._processes)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise LinkError(f"the ranks did not answer within {limit_s:g} s")
                for key, _ in selector.select(left_s):
                    received = os.read(key.fd, 1 << 16)
                    if not received:
                        raise self._ended(key.data)
                    answers[key.data] += received
                    if received.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(answer) for answer in answers]

    def _errors(self, rank: int) -> Path:
        return self._directory / f"{rank}.err"

    def _ended(self, rank: int) -> LinkError:
        try:
            code: int | str = self._processes[rank].wait(10)
        except subprocess.TimeoutExpired:
            code = "unknown"
        lines = self._errors(rank).read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return LinkError(f"rank {rank} ended early with exit code {code}{last}")

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


@contextmanager
def start_ranks(link: Link, task: dict[str, Any]) -> Iterator[Ranks]:
    """Start a process in each namespace, and end them whatever happens.

    Args:
        link: The namespaces.
        task: What `profiling.network_rank` is to do; what can be JSON.

    Yields:
        The ranks.
    """
    with tempfile.TemporaryDirectory() as directory:
        ranks = Ranks(link, task, Path(directory))
        try:
            yield ranks
        finally:
            ranks.end()
