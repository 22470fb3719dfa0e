"""hosts: two hosts with a shared disk, of which one is lost and comes back, under torchrun's c10d rendezvous.

The hosts are two network namespaces joined by a veth pair, which requires root. Without root, or with
``--loopback``, both are agents on the loopback interface, and a loss is only a kill. Both share one kernel and its
file locks: no network file system is tested.

To lose a host, its link is taken down, and all its processes are killed with SIGKILL at once. Scenarios:

- second: the host without the rendezvous is lost after a part of the rows, and comes back (``--nnodes=1:2
  --max-restarts=3``). An environment variable prevents the agents from sharing the store of the rendezvous with the
  ranks; otherwise torch 2.13 does not let a host come back.
- second_by_default: the same without the variable.
- first: the host with the rendezvous is lost.

The behaviour of the agents is recorded. If an agent does not end well, both are started again on the same store.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scaling import killed_ranks
from benchmarks.scaling.killed_ranks import LOGS, SCRIPT, Job, alone

PORT = 29_417
PATIENCE = 600.0  # seconds for everything that has to end by itself; agents wait 300 for one that is lost


@dataclass(slots=True)
class Host:
    """A network namespace or the loopback interface, and the last agent that was started there."""

    name: str
    address: str
    namespace: str | None = None
    agent: subprocess.Popen[bytes] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """Variables of the agent's environment."""

    def start(self, folder: Path, job: Job, name: str, endpoint: str, first: bool) -> None:
        """Start an agent with two ranks, which joins the rendezvous or, on the first host, holds it."""
        command = [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]
        command += [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
        command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        command += [f"--rdzv-id={name}", f"--rdzv-conf=is_host={int(first)}", f"--local-addr={self.address}"]
        interface = "lo" if self.namespace is None else f"{self.namespace}-v"
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, **self.settings}
        with (folder / f"{name}-{self.name}.txt").open("ab") as file:
            self.agent = subprocess.Popen(
                [*command, str(SCRIPT), str(folder), job.to_json()],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
            )

    def lose(self) -> None:
        """Take the link down and kill every process, the agent first."""
        if self.namespace is not None:
            ip("-n", self.namespace, "link", "set", f"{self.namespace}-v", "down")
        self.kill()

    def come_back(self) -> None:
        """Bring the link up again."""
        if self.namespace is not None:
            ip("-n", self.namespace, "link", "set", f"{self.namespace}-v", "up")

    def kill(self) -> None:
        """Kill the agent and its ranks."""
        if self.agent is not None:
            ranks = killed_ranks.children(self.agent.pid)
            self.agent.kill()
            for rank in ranks:
                killed_ranks.kill(rank)
            self.agent.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=60_000, help="train rows, for each of two checkpoints")
    parser.add_argument(
        "--loopback", action="store_true", help="make no namespaces, even where it is allowed"
    )
    parser.add_argument("--scenarios", nargs="+", choices=sorted(SCENARIOS), default=sorted(SCENARIOS))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the scenarios; return events with times, and counts."""
    job = Job(rows=options.rows, chunk_rows=256, batch=32, width=256, proj_dim=128, targets=64)
    namespaces = os.geteuid() == 0 and shutil.which("ip") is not None and not options.loopback
    if not namespaces:
        print("No network namespaces (they need root and ip): two agents on the loopback interface instead.")
    found, broken = {}, []
    with tempfile.TemporaryDirectory() as folder:
        expected = alone(Path(folder), job)
        for name in options.scenarios:
            place = Path(folder, name)
            place.mkdir()
            with two_hosts(namespaces) as hosts:
                play = Play(place, job, hosts, killed_ranks.Round(place, job, expected))
                try:
                    SCENARIOS[name](play)
                except killed_ranks.Violated as error:
                    broken.append({"scenario": name, "error": str(error)})
            found[name] = {"events": play.events, "counts": dict(sorted(play.round.counts.items()))}
            found[name]["scores differ by at most, of the largest"] = play.round.worst_score
    hosts_are = "network namespaces" if namespaces else "agents on the loopback interface"
    return {"hosts": hosts_are, "job": asdict(job), "scenarios": found, "broken": broken}


@contextmanager
def two_hosts(namespaces: bool) -> Iterator[tuple[Host, Host]]:
    """Create two connected hosts, and remove them in any case."""
    if not namespaces:
        hosts = (Host("a", "127.0.0.1"), Host("b", "127.0.0.1"))
        try:
            yield hosts
        finally:
            for host in hosts:
                host.kill()
        return
    mark = f"tl{os.getpid() % 100_000}"
    hosts = tuple(Host(n, f"10.211.83.{i}", f"{mark}{n}") for i, n in enumerate("ab", 1))
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        ends = [("name", f"{host.namespace}-v", "netns", host.namespace) for host in hosts]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", f"{host.namespace}-v")
            ip("-n", host.namespace, "link", "set", f"{host.namespace}-v", "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def ip(*arguments: str | None) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


@dataclass(slots=True)
class Play:
    """Two hosts, one store, and the recorded events."""

    folder: Path
    job: Job
    hosts: tuple[Host, Host]
    round: killed_ranks.Round
    events: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def say(self, event: str) -> None:
        """Record an event with the time and the share of stored rows."""
        done = int(killed_ranks.on_disk(self.folder, self.job).sum())
        seconds = time.monotonic() - self.begun
        self.events.append(f"{seconds:.0f} s, {done} of {self.job.rows_of_all} rows on disk: {event}")
        print(self.events[-1], flush=True)

    def start(self, host: Host, name: str) -> None:
        """Start an agent."""
        if name not in self.round.starts:
            self.round.starts[name] = killed_ranks.on_disk(self.folder, self.job)
        first = self.hosts[0]
        host.start(self.folder, self.job, name, f"{first.address}:{PORT}", host is first)
        self.say(f"host {host.name} starts an agent")

    def until(self, share: float) -> None:
        """Wait until this share of all rows is on disk."""
        end = time.monotonic() + PATIENCE
        while killed_ranks.on_disk(self.folder, self.job).mean() < share:
            if time.monotonic() > end:
                raise killed_ranks.Violated(f"Rows do not get on in {PATIENCE:.0f} s.")
            time.sleep(0.1)

    def ended(self, host: Host, seconds: float = PATIENCE) -> int | None:
        """Wait for an agent; return its exit status, or ``None`` if it still runs."""
        try:
            status = host.agent.wait(seconds)
        except subprocess.TimeoutExpired:
            self.say(f"the agent of host {host.name} still runs after {seconds:.0f} s")
            return None
        self.say(f"the agent of host {host.name} ends with {status}")
        return status

    def finish(self, name: str) -> None:
        """Wait for both agents; if one does not end well, start both again and require that they do."""
        if [self.ended(host) for host in self.hosts] == [0, 0]:
            return
        for host in self.hosts:
            host.kill()
            self.start(host, f"{name}-again")
        if [self.ended(host) for host in self.hosts] != [0, 0]:
            said = "".join(
                path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*again*.txt")
            )
            raise killed_ranks.Violated(f"Started anew, the agents do not end well:\n{said}")

    def check(self) -> None:
        """Compare store and logs with one undisturbed process; all but the last four ranks may have been killed."""
        started = len(list((self.folder / LOGS).iterdir()))
        self.round.ended_ranks = started - 4
        self.round.counts["ranks started"] = started
        self.round.compare()
        self.round.count_rows()
        self.say("every feature has the bits of one process")


def second_is_lost(play: Play) -> None:
    """The second host is lost at a tenth of the rows, and comes back at a fifth."""
    for host in play.hosts:
        host.settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    second_is_lost_by_default(play)


def second_is_lost_by_default(play: Play) -> None:
    """The same, without the variable."""
    _, second = play.hosts
    for host in play.hosts:
        play.start(host, "second")
    play.until(0.1)
    second.lose()
    play.say("host b is lost")
    play.until(0.2)
    second.come_back()
    play.start(second, "second")
    play.finish("second")
    play.check()


def first_is_lost(play: Play) -> None:
    """The host with the rendezvous is lost, and comes back when the other has ended or has had all rows a while."""
    first, second = play.hosts
    for host in play.hosts:
        play.start(host, "first")
    play.until(0.1)
    first.lose()
    play.say("host a, which holds the rendezvous, is lost")
    play.ended(second, 90.0)
    second.kill()
    first.come_back()
    for host in play.hosts:
        play.start(host, "first-again")
    play.finish("first-again")
    play.check()


SCENARIOS = {
    "first": first_is_lost,
    "second": second_is_lost,
    "second_by_default": second_is_lost_by_default,
}
