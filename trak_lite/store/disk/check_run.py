"""The check of a run's folder, which consists of sealed files and a store of scores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from trak_lite.core.files import refuse_links
from trak_lite.core.folders import names_in
from trak_lite.core.json_text import digest_of, parse_json
from trak_lite.core.sealed import sealed_content
from trak_lite.errors import StoreError
from trak_lite.store._check_report import Finding, Report, Tally
from trak_lite.store.disk.check import check_folder

RUN: Final = "run.json"
"""The record of a run, in its folder."""
_NEXT_RUN = "delete it: the next recipe.train(path) or replay makes it again"


def check_run(root: str, *, repair: bool) -> Report:
    """Check a run's folder: record, states, unfinished blocks, and its store of scores, which is also repaired."""
    root = os.path.realpath(root)  # below it no link is followed
    findings: list[Finding] = []
    tally = Tally()
    try:
        identity = run_identity(parse_json(sealed_content(f"{root}/{RUN}", RUN))["fingerprint"])
    except (StoreError, ValueError, KeyError, TypeError) as error:
        text = "the states and blocks were not checked: the record of the run must be restored first"
        findings = [
            Finding("damage", None, str(error), _NEXT_RUN),
            Finding("note", None, text, "check again afterwards"),
        ]
    else:
        for path in _run_files(root, findings):
            folder, name = os.path.basename(os.path.dirname(path)), os.path.basename(path)
            try:
                tally.bytes += len(sealed_content(path, f"{identity}/{folder}/{name}"))
            except StoreError as error:
                if os.path.lexists(path):  # otherwise a replay has finished the block meanwhile
                    findings.append(Finding("damage", None, str(error), _NEXT_RUN))
    try:
        refuse_links(f"{root}/scores.zarr")
    except StoreError as error:
        findings.append(Finding("damage", None, str(error), "replace it by the folder"))
        return Report(root, tuple(findings), tally)
    if not os.path.lexists(f"{root}/scores.zarr"):
        return Report(root, tuple(findings), tally)
    scores = check_folder(f"{root}/scores.zarr", repair=repair)
    tally.add(scores.tally)
    return Report(root, (*findings, *scores.findings), tally, scores.set_aside)


def _run_files(root: str, findings: list[Finding]) -> Iterator[str]:
    """Yield the paths of the states and blocks of a run; add folders that cannot be listed to the findings."""
    try:
        folders = [
            f"{root}/states",
            *(f"{root}/replays/{name}" for name in sorted(names_in(f"{root}/replays"))),
        ]
        for folder in folders:
            if os.path.lexists(folder):
                yield from (
                    f"{folder}/{name}" for name in sorted(names_in(folder)) if not name.startswith(".")
                )
    except StoreError as error:
        findings.append(Finding("damage", None, str(error), "put the folder back"))


def run_identity(fingerprint: dict[str, Any]) -> str:
    """Return what the files of a run are bound to: a digest of the settings of its training."""
    return digest_of(fingerprint)[:16]
