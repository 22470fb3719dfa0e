"""Comparison of the methods of ``benchmarks.lds.table`` over problems.

Mean LDS and mean rank of every method, and for every problem the default of trak_lite minus the other package with the
highest LDS, with the 95 % interval of a paired bootstrap, which resamples subsets and targets together
(:func:`trak_lite.evaluation.compare_datamodeling_scores`). Differences need the scores that
``benchmarks.lds.table --keep FOLDER`` has stored; a problem without them keeps the difference of the last summary, if
that was of the same rows.

Rank 1 is the highest LDS on a problem. A method that failed there shares the last ranks with the others that did.
``rank among cheaper``: among the methods that take no more CPU time than the default of trak_lite on the problem.
Means are over the problems where a method was measured or failed; their number is in the column ``problems``.

Run:  python -m benchmarks.lds.summary --keep FOLDER [--ours "default, run"]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lds.peers import PEERS, TEXT_PEERS
from benchmarks.lds.settings import SETTINGS
from benchmarks.lds.table import DEFAULT, best_peer, kept
from benchmarks.lds.table import RESULTS as TABLE
from benchmarks.lds.truth import estimate, load
from benchmarks.measuring import parser_of, save_parts, surroundings
from trak_lite.evaluation import compare_datamodeling_scores

Rows = dict[str, dict[str, dict[str, Any]]]


def rows_of(parts: Mapping[str, Any], ours: str) -> Rows:
    """Return figures by problem and method: the default of trak_lite and all other packages."""
    found: Rows = {name: {} for name in SETTINGS}
    for key, figures in parts.items():
        name, method = key.split(" / ", 1)
        if method in {ours, *PEERS, *TEXT_PEERS} and ("lds_all" in figures or "fails" in figures):
            found[name][method] = figures
    return {name: methods for name, methods in found.items() if methods}


def ranks(methods: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Return the rank of every method on a problem, 1 for the highest LDS; ties share their mean rank."""
    values = np.array([one["lds_all"]["mean"] if "lds_all" in one else -np.inf for one in methods.values()])
    found = [1 + (values > value).sum() + ((values == value).sum() - 1) / 2 for value in values]
    return dict(zip(methods, map(float, found), strict=True))


def affordable(methods: Mapping[str, dict[str, Any]], ours: str) -> dict[str, dict[str, Any]]:
    """Return the methods that succeeded and take no more CPU time than ours; none if ours is missing."""
    limit = methods[ours].get("seconds", 0.0) if ours in methods else 0.0
    return {name: one for name, one in methods.items() if "lds_all" in one and one["seconds"] <= limit}


def overall(rows: Rows, ours: str) -> dict[str, dict[str, float]]:
    """Return mean LDS, mean ranks and CPU seconds of every method, by its mean rank."""
    found: dict[str, dict[str, list[float]]] = {}
    for methods in rows.values():
        cheaper = ranks(affordable(methods, ours))
        for method, rank in ranks(methods).items():
            lists = found.setdefault(method, {"rank": [], "cheaper": [], "lds": [], "seconds": []})
            lists["rank"].append(rank)
            if method in cheaper:
                lists["cheaper"].append(cheaper[method])
            if "lds_all" in methods[method]:
                lists["lds"].append(methods[method]["lds_all"]["mean"])
                lists["seconds"].append(methods[method]["seconds"])
    means = {
        method: {
            "problems": len(lists["rank"]),
            "failed": len(lists["rank"]) - len(lists["lds"]),
            "affordable": len(lists["cheaper"]),
            **{f"mean {name}": float(np.mean(values)) for name, values in lists.items() if values},
        }
        for method, lists in found.items()
    }
    return dict(sorted(means.items(), key=lambda item: item[1]["mean rank"]))


def difference(name: str, ours: str, peer: str, keep: Path) -> dict[str, Any] | None:
    """Return the LDS of ours minus that of a peer, paired; ``None`` if the scores of one are not kept."""
    paths = [kept(keep, name, method) for method in (ours, peer)]
    if not all(path.exists() for path in paths):
        return None
    truth = load(SETTINGS[name])
    first, second = (np.load(path).astype(np.float64) for path in paths)
    found = compare_datamodeling_scores(first, second, truth.masks, truth.outputs.mean(1))
    return estimate(found)


def compared(
    name: str, rows: Rows, parts: Mapping[str, Any], ours: str, keep: Path, last: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ours against the best peer, and against the best that takes no more CPU time.

    Args:
        name: Of the problem.
        rows: Figures by problem and method.
        parts: Of the results of ``benchmarks.lds.table``.
        ours: Method of trak_lite.
        keep: Folder of its scores.
        last: The problem in the last summary.
    """
    found: dict[str, Any] = {"ceiling": parts.get(f"{name} / ceiling"), "ours": rows[name].get(ours)}
    limit = (found["ours"] or {}).get("seconds", 0.0)
    for key, peer in (("peer", best_peer(parts, name)), ("cheaper peer", best_peer(parts, name, limit))):
        if peer is not None:
            figures = {"method": peer, **rows[name][peer]}
            paired = difference(name, ours, peer, keep)
            before = dict(last.get(key, {}))
            its = before.pop("difference", None)
            if paired is None and (found["ours"], figures) == (last.get("ours"), before):
                paired = its
            found[key] = {**figures, "difference": paired}
    return found


def main() -> None:
    """Compare, write JSON."""
    parser = parser_of(__doc__, "lds_summary.json")
    parser.add_argument(
        "--keep", type=Path, required=True, help="folder of the scores of benchmarks.lds.table"
    )
    parser.add_argument("--ours", default=DEFAULT, help="method of trak_lite")
    parser.add_argument("--results", type=Path, default=TABLE, help="results of benchmarks.lds.table")
    args = parser.parse_args()
    parts = json.loads(args.results.read_text())["parts"]
    rows = rows_of(parts, args.ours)
    means = overall(rows, args.ours)
    last = json.loads(args.out.read_text())["parts"]["problems"] if args.out.exists() else {}
    pairs = {name: compared(name, rows, parts, args.ours, args.keep, last.get(name, {})) for name in rows}
    save_parts(args.out, surroundings(peers=False), {"methods": means, "problems": pairs})


if __name__ == "__main__":
    main()
