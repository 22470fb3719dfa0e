"""The fault campaign: random faults of the disk below real stores, for a given number of minutes.

Rounds of every kind alternate: power cuts (replayed from a record of every file change, and, where mounting is allowed,
copies of a live ext4 image); full disks; read-only mounts. Kills at every named step, interrupts, several writers,
failing calls and harmed files are in tests/store (``test_store_machine.py`` draws as many of these as it is told),
flips of every bit in hostile_store.py, and kills of whole runs at random moments here, with ``--kills``. After each
fault the run is resumed to its end. No acknowledged row is lost, and none is wrong.
tests/faults runs a quick part of the same rounds, and its README lists the tests of each fault.

The exit status is 1 if a guarantee was broken. The round is then printed with the command that repeats it.

Run:  python -m benchmarks.fault_campaign --minutes 30 [--seed 0] [--out benchmarks/results/fault_campaign.json]
      python -m benchmarks.fault_campaign --kills 2000 [--paths NAME ...]    (only whole runs, on every public path;
                                                                              resumes an earlier campaign)
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("faults", "store", ".")]

from campaign import KINDS, Broken, Campaign  # noqa: E402  (found through the line above)

from benchmarks.fault_mounts import NEED_MOUNTS, may_mount  # noqa: E402
from benchmarks.measuring import RESULTS, file_system, parser_of  # noqa: E402

KINDS.update(NEED_MOUNTS)
ONCE = ("every_power_cut",)  # exhaustive: the same every time
MOST_BROKEN = 50
COUNTED = ("promises broken", "power cuts", "power cuts of an ext4 image", "full disks", "rows acknowledged")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="how long to go on; unless 0, one round of each kind at least",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--size", type=int, default=60, help="power cuts in one round")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS), help="of faults")
    parser.add_argument("--round", type=int, help="run the round of this number alone, and write nothing")
    parser.add_argument("--no-mounts", action="store_true", help="mount nothing, even where it is allowed")
    parser.add_argument("--out", type=Path, help="where the summary goes")
    parser.add_argument("--kills", type=int, help="kill whole runs, so often in all, and do nothing else")
    parser.add_argument("--paths", nargs="+", help="of the runs that are killed (all of them)")
    parser.add_argument("--run", type=int, help="kill the run of this number alone, and write nothing")
    return parser.parse_args()


def rounds(kinds: list[str], mounts: bool) -> Iterator[tuple[str, int]]:
    """Yield (kind, number) forever, alternating over all kinds."""
    for number in itertools.count():
        for kind in kinds:
            if (mounts or kind not in NEED_MOUNTS) and (number == 0 or kind not in ONCE):
                yield kind, number


def due(campaign: Campaign, options: argparse.Namespace, mounts: bool) -> Iterator[tuple[str, int]]:
    """Yield the rounds to run: a requested one, or all that fit into the time."""
    if options.round is not None:
        yield options.kinds[0], options.round
        return
    end = time.monotonic() + 60 * options.minutes
    for kind, number in rounds(options.kinds, mounts):
        late = time.monotonic() > end and (number > 0 or not options.minutes)
        if late or len(campaign.broken) >= MOST_BROKEN:
            break
        yield kind, number


def report(broken: Broken, options: argparse.Namespace) -> str:
    """Print a broken guarantee; return the command that repeats its round."""
    command = (
        f"python -m benchmarks.fault_campaign --seed {options.seed} --size {options.size} "
        f"--kinds {broken.kind} --round {broken.number}"
    )
    print(
        f"\nBROKEN by {broken.kind}, round {broken.number}; again with: {command}\n{broken.trace}", flush=True
    )
    return command


def surroundings(folder: str) -> dict[str, Any]:
    """Return the machine and the versions that the figures belong to."""
    packages = ("numpy", "zarr", "google-crc32c")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "file system": file_system(folder),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def summary(
    campaign: Campaign, options: argparse.Namespace, minutes: float, commands: list[str]
) -> dict[str, Any]:
    """Return the content of the result file."""
    totals = {name: campaign.totals[name] for name in sorted({*campaign.totals, *COUNTED})}
    return {
        **surroundings(campaign.folder),
        "seed": options.seed,
        "size": options.size,
        "minutes": round(minutes, 1),
        "rounds": {"all": campaign.rounds.total(), **campaign.rounds},
        "totals": totals,
        "broken": [
            {
                "round": f"{broken.kind} {broken.number}",
                "error": broken.error.splitlines()[0],
                "again": command,
            }
            for broken, command in zip(campaign.broken, commands, strict=True)
        ],
    }


def kill_runs(options: argparse.Namespace) -> int:
    """Kill whole runs until the requested number of kills is reached; continue from an existing summary."""
    from benchmarks.killed_runs import PATHS, Kills  # imports torch, which the other faults need not

    out = options.out or RESULTS / "kill_campaign.json"
    kills = Kills(options.seed, options.paths or PATHS)
    before = json.loads(out.read_text()) if out.is_file() and options.run is None else None
    if before is not None and (before["seed"], list(before["paths"])) == (options.seed, kills.paths):
        kills.go_on(before)
    started = time.monotonic() - 60 * kills.minutes
    try:
        while options.run is None and kills.total("kills") < options.kills:
            kills.run(kills.total("runs"))
            kills.minutes = (time.monotonic() - started) / 60
            found = {**surroundings(kills.folder), **kills.summary()}
            out.parent.mkdir(parents=True, exist_ok=True)
            out.with_suffix(".part").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            out.with_suffix(".part").replace(out)
            if len(kills.broken) >= MOST_BROKEN:
                break
        if options.run is not None:
            kills.run(options.run)
    finally:
        kills.close()
    print(json.dumps(kills.summary(), indent=1, ensure_ascii=False))
    return 1 if kills.broken else 0


def main() -> int:
    options = arguments()
    if options.kills is not None or options.run is not None:
        return kill_runs(options)
    options.out = options.out or RESULTS / "fault_campaign.json"
    mounts = may_mount() and not options.no_mounts
    started, commands = time.monotonic(), []
    with Campaign(options.seed, size=options.size) as campaign:
        for kind, number in due(campaign, options, mounts):
            broken = campaign.run(kind, number)
            if broken is not None:
                commands.append(report(broken, options))
        found = summary(campaign, options, (time.monotonic() - started) / 60, commands)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if options.round is None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 1 if campaign.broken else 0


if __name__ == "__main__":
    sys.exit(main())
