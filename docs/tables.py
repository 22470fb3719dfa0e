"""Makes the tables of measured figures in the pages from benchmarks/results. A test compares the pages with them.

Run:  python docs/tables.py        (rewrites the text between the markers; takes seconds)
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import scale_plan  # found through the line above
from scale_plan import RESULTS, markdown, parts

from trak_lite.evaluation import target_loss_rise

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*sorted((ROOT / "docs" / "pages").rglob("*.md")), ROOT / "docs" / "scale.md")
MARKED = re.compile(r"(?<=<!-- table: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def lds() -> str:
    """Return, for every problem, the LDS of the default, of the best other package, and their difference."""
    rows, shown = [], parts("lds_defaults")
    for problem, found in parts("lds_summary")["problems"].items():
        ours, peer = found["ours"], found.get("peer")
        name = problem if problem in shown else f"{problem} (never shown)"
        cells = [name, f"{found['ceiling']:.3f}", _interval(ours["lds_all"]), f"{ours['seconds']:.0f}"]
        if peer is not None:
            cells += [peer["method"], _interval(peer["lds_all"]), f"{peer['seconds']:.0f}"]
            cells += [_interval(peer["difference"], sign="+")]
        rows.append([*cells, *[""] * (8 - len(cells))])
    columns = [
        "problem",
        "ceiling",
        "default",
        "CPU s",
        "best other package",
        "its LDS",
        "CPU s",
        "difference",
    ]
    return markdown(columns, rows)


def _interval(value: dict[str, Any], sign: str = "") -> str:
    low, high = value["interval"]
    return f"{value['mean']:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def removal() -> str:
    """Return how much f falls after retraining without the 5 % most helpful rows, by four ways to choose them."""
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in parts("lds_summary")["problems"]}
    for key, figures in parts("lds_removal").items():
        problem, method = key.split(" / ", 1)
        found[problem][method] = figures
    rows = []
    for problem, methods in found.items():
        if not methods:
            continue
        peer = next((name for name in methods if name not in REMOVED_BY), None)
        falls = {name: figures["5%"]["fall"] for name, figures in methods.items()}
        ours, theirs = falls["default, run"], falls.get(peer or "", {})
        about = methods["default, run"]
        cells = [problem, f"{about['targets']} x {about['seeds']}", _interval(ours)]
        cells += [peer or "", _interval(theirs) if theirs else ""]
        if "per target" in ours and "per target" in theirs:
            paired = target_loss_rise(theirs["per target"], ours["per target"])
            difference = {"mean": paired.mean, "interval": paired.interval}
            cells.append(_interval(difference, sign="+"))
        else:
            cells.append("")
        cells += [_interval(falls[name]) if name in falls else "" for name in REMOVED_BY[1:]]
        rows.append(cells)
    columns = ["problem", "targets x seeds", "default", "best other package", "its fall", "difference"]
    return markdown([*columns, *REMOVED_BY[1:]], rows)


REMOVED_BY = ("default, run", "nearest", "random")


def whole_runs() -> str:
    """Return the CPU seconds of the parts of a default run, and of kronfluence's EK-FAC, by problem."""
    found = json.loads((RESULTS / "attributor.json").read_text(encoding="utf-8"))
    rows = []
    for key, run in found.items():
        if not key.startswith("whole_run") or "rows_cpu_s" not in run["rounds"]["trak_lite"][0]:
            continue
        seconds = [
            statistics.mean(one[name] for one in run["rounds"][tool])
            for tool, names in (
                ("trak_lite", ("rows_cpu_s", "fit_cpu_s", "score_cpu_s", "cpu_s")),
                ("kronfluence", ("cpu_s",)),
            )
            for name in names
        ]
        name = key.removeprefix("whole_run").strip("_") or "residual perceptron"
        rows.append([name, str(run["checkpoints"]), *(f"{value:.1f}" for value in seconds)])
    return markdown(["problem", "checkpoints", "rows", "fit", "score", "default", "kronfluence"], rows)


def ranks() -> str:
    """Return mean rank and mean LDS of the default and of every method of other packages."""
    rows = [
        [method, *(f"{one[name]:.{digits}f}" if name in one else "" for name, digits in RANKS.items())]
        for method, one in parts("lds_summary")["methods"].items()
    ]
    return markdown(["method", *RANKS], rows)


RANKS = {"mean rank": 2, "mean lds": 3, "mean seconds": 1, "problems": 0, "failed": 0}


def defaults() -> str:
    """Return the LDS of the former default, the default, and the settings that the other problems choose."""
    rows = [
        [
            problem,
            f"{found['before']:.3f}",
            f"{found['default']:.3f}",
            f"{found['chosen'][1]:.3f}: {found['chosen'][0]}",
            f"{found['best'][1]:.3f}: {found['best'][0]}",
        ]
        for problem, found in parts("lds_defaults")["leave one out, run"].items()
    ]
    return markdown(["problem", "before", "default", "chosen on the others", "best"], rows)


def cost() -> str:
    """Return accuracy and cost of methods on one problem: LDS, disk per train row, and CPU seconds."""
    problem = "digits_mlp"
    found = {
        key.split(" / ", 1)[1]: figures
        for key, figures in parts("lds").items()
        if key.startswith(f"{problem} / ") and isinstance(figures, dict) and "lds_all" in figures
    }
    rows = [
        [
            name,
            *(
                str(figures[key] if figures.get(key) is not None else "")
                for key in ("checkpoints", "K", "row_bytes")
            ),
            f"{figures['seconds']:.1f}",
            _interval(figures["lds_all"]),
        ]
        for name, figures in sorted(found.items(), key=lambda item: -item[1]["lds_all"]["mean"])
        if "seconds" in figures
    ]
    return markdown(["method", "checkpoints", "K", "bytes per train row", "CPU s", "LDS"], rows)


def projection() -> str:
    """Return the agreement of scores from features with scores from unprojected gradients."""

    def cell(figures: dict[str, float]) -> str:
        return f"{figures['mean']:.3f} ± {figures['std']:.3f}"

    rows = [
        [
            f"`{part['projector']}`, {part['proj_dim']}",
            str(part["width"]),
            cell(part["ridge"]),
            cell(part["grad_dot"]),
        ]
        for part in parts("projection_quality").values()
    ]
    return markdown(["projector, K", "numbers per row", "damped kernel", "dot product"], rows)


def damping() -> str:
    """Return the agreement of projected with unprojected EK-FAC, by damping and K."""
    models = parts("ekfac_parity")
    sizes = [key for key in models["mlp"]["projected"][0] if key != "damping"]
    rows = [
        [f"{model.upper()}, {line['damping']:g}", *(f"{line[size]:.2f}" for size in sizes)]
        for model, found in models.items()
        for line in found["projected"]
    ]
    return markdown(["model, damping", *sizes], rows)


def plan() -> str:
    """Return what runs of several models take, beside their plans."""
    rows = []
    for name, found in parts("plan").items():
        before, true = found["plan"], found["truth"]
        pairs = [("total_cpu_s", ".1f"), ("featurize_mib", ".0f"), ("disk_mib", ".0f")]
        figures = [f"{side[key]:{how}}" for key, how in pairs for side in (before, true)]
        cells = [name, before["rows"], before["features"], before["bytes_per_row"], before["batch_size"]]
        rows.append([*map(str, cells), *figures])
    columns = ["model", "rows", "features", "bytes per row", "batch", "CPU s: plan", "run"]
    return markdown([*columns, "memory, MiB: plan", "run", "disk, MiB: plan", "run"], rows)


def reliability() -> str:
    """Return the predictions of standard errors and reliability, and the actual values of other runs."""
    found = parts("score_reliability")
    columns = {"expected": "expected", "actual": "actual", "error ratio": "error ratio"}
    rows = [[name, *(f"{figures[key]:.2f}" for key in columns)] for name, figures in found.items()]
    return markdown(["over", *columns.values()], rows)


def wrong_labels() -> str:
    """Return the precision of rankings that find wrong labels, and their processor time."""
    found = parts("wrong_labels")
    rankings = list(
        dict.fromkeys(ranking for one in found.values() for ranking in one if ranking != "effects")
    )
    rows = [
        [name, *(f"{one[ranking]['precision']:.2f}" for ranking in rankings)] for name, one in found.items()
    ]
    seconds = [sum(one[ranking]["seconds"] for one in found.values()) for ranking in rankings]
    rows.append(["processor time, all four", *(f"{each:.1f} s" for each in seconds)])
    return markdown(["data", *(f"`{ranking}`" for ranking in rankings)], rows)


def wrong_label_effects() -> str:
    """Return the coverage of intervals of removed sets where labels are wrong, over data sets, by kind and size."""
    found = [one["effects"] for one in parts("wrong_labels").values()]
    kinds, shares = (
        list(dict.fromkeys(cell.rpartition(" ")[place] for cell in found[0])) for place in (0, 2)
    )
    rows = []
    for kind in kinds:
        means = [sorted(statistics.mean(one[f"{kind} {share}"]) for one in found) for share in shares]
        rows.append([kind, *(f"{each[0]:.0%} to {each[-1]:.0%}" for each in means)])
    return markdown(["set", *(f"{share} of the rows" for share in shares)], rows)


def what_if() -> str:
    """Return the coverage of intervals of removed sets over all problems, and their widths, by kind and size."""
    found = list(parts("what_if").values())
    cells = list(found[0]["sets"])
    kinds, shares = (list(dict.fromkeys(cell.rpartition(" ")[place] for cell in cells)) for place in (0, 2))
    rows = []
    for kind in kinds:
        shown = []
        for share in shares:
            sets = [one["sets"][f"{kind} {share}"] for one in found]
            covered = sorted(100 * one["coverage"] for one in sets)
            widths = [cell["half_width"] / one["noise"] for cell, one in zip(sets, found, strict=True)]
            shown.append(
                f"{statistics.median(covered):.0f} % ({covered[0]:.0f} to {covered[-1]:.0f}), "
                f"± {statistics.median(widths):.1f}"
            )
        rows.append([kind, *shown])
    return markdown(["set", "1 % of the rows", "5 %", "20 %"], rows)


def repair() -> str:
    """Return the share of the rows to remove for 80 % success by method, and what ``repair`` finds."""
    rows = []
    for problem, found in parts("what_if").items():
        if "repair" not in found:
            continue
        one = found["repair"]
        by_size = [
            one[method]["80 % at"] or "none up to 32 %"
            for method in ("scores", "EK-FAC", "nearest", "random")
        ]
        chosen = one["found with chance 0.8"]
        cells = [f"{chosen[name]:.1%}" for name in ("median share", "success of these")]
        collateral = f"{chosen['collateral, root mean square']:.2g}"
        rows.append([problem, f"{one['goal']:.1f}", *by_size, *cells, collateral])
    columns = [
        "problem",
        "goal",
        "scores",
        "EK-FAC",
        "nearest",
        "random",
        "`repair`: rows",
        "success",
        "change of other targets",
    ]
    return markdown(columns, rows)


def selection() -> str:
    """Return memory and CPU time of selections by the number of train rows."""
    found = parts("selection")
    sizes = sorted({int(key.split(" / ")[1]) for key in found})
    methods = dict.fromkeys(key.split(" / ")[0] for key in found)
    rows = []
    for method in methods:
        figures = [found[f"{method} / {size}"] for size in sizes]
        rows.append([f"`{method}`", *(f"{one['mib']:.0f} MiB, {one['seconds']:.2f} s" for one in figures)])
    return markdown(["method", *(f"{size:,} rows" for size in sizes)], rows)


def zoo_rows() -> dict[str, dict[str, Any]]:
    """Return the result of every architecture by name, in the order of the file: by domain, then by name."""
    found: dict[str, dict[str, Any]] = json.loads((RESULTS / "zoo.json").read_text(encoding="utf-8"))[
        "models"
    ]
    return found


def zoo() -> str:
    """Return engine, errors and cost of every published architecture."""

    def line(name: str, row: dict[str, Any]) -> list[str]:
        if row["outcome"] != "right":
            return [row["domain"], name, f"refused: `{row['error']}`", "", "", "", ""]
        figures = [f"{row[key]:.1e}" for key in ("gradient_error", "row_error")]
        return [row["domain"], name, row["engine"], str(row["modules"]), *figures, f"{row['cost']:.1f}"]

    columns = ["domain", "architecture", "engine", "modules", "gradient error", "row error", "cost"]
    return markdown(columns, [line(name, row) for name, row in zoo_rows().items()])


def zoo_refusals() -> str:
    """Return the refused architectures and the error messages."""
    rows = [
        [name, f"`{row['error']}`", row["message"].replace("|", "\\|")]
        for name, row in zoo_rows().items()
        if row["outcome"] == "refused"
    ]
    return markdown(["architecture", "error", "message"], rows)


def optimizer() -> str:
    """Return the LDS of plain rows and of rows that Adam's state changes, with all checkpoints of a run."""
    rows = []
    for problem, figures in parts("lds_optimizer").items():
        for key in (key for key in figures if key.startswith("run, none, ")):
            method = key.removeprefix("run, none, ")
            scaled = figures[f"run, adam, {method}"]
            cells = [_interval(figures[key]), _interval(scaled), _interval(scaled["difference"], sign="+")]
            rows.append([problem, method, *cells])
        rows.append([problem, "`LESS`", "", _interval(figures["run, adam_update, LESS"]), ""])
    return markdown(["problem", "method", "plain rows", "`adam` (LESS: `adam_update`)", "difference"], rows)


def unrolled_parts(part: str) -> dict[str, dict[str, Any]]:
    """Return the measured rows of a part of the benchmark of replays, without failed ones."""
    rows = parts("unrolled").items()
    return {
        key.split(" / ", 1)[1]: figures
        for key, figures in rows
        if key.startswith(f"{part} / ") and "fails" not in figures
    }


def unrolled_smooth() -> str:
    """Return metasmoothness and one-run LDS of trainings, the smoothest first."""
    found = unrolled_parts("smooth")
    rows = [
        [
            name,
            *(f"{figures[key]:.3f}" for key in SMOOTHNESS),
            f"{figures['accuracy']:.2f}",
            *(f"{figures['unrolled'][share]['mean']:.3f}" for share in SHARES),
            f"{figures['default']['0.05']['mean']:.3f}",
        ]
        for name, figures in sorted(found.items(), key=lambda item: -item[1][SMOOTHNESS[1]])
    ]
    columns = ["training", "h = 0.1", "h = 0.5", "accuracy", "1 %", "5 %", "10 %", "50 %", "kernel, 5 %"]
    return markdown(columns, rows)


SMOOTHNESS = ("metasmoothness", "metasmoothness, h = 0.5")
SHARES = ("0.01", "0.05", "0.1", "0.5")


def unrolled_cost() -> str:
    """Return cost per target and memory of replays."""
    found = unrolled_parts("cost")
    order = {name: place for place, name in enumerate(found)}
    rows = [
        [
            name.split(", ")[0],
            f"{figures['parameters']:,}",
            name.split(", ")[1],
            f"{figures['per_target']:.2f}",
            f"{figures['per_target_plain']:.2f}",
            f"{figures['mib']:.0f}",
        ]
        for name, figures in sorted(
            found.items(),
            key=lambda item: (item[0].split()[0], "MiB" in item[0], item[1]["targets"], order[item[0]]),
        )
    ]
    columns = [
        "model",
        "parameters",
        "block or memory",
        "trainings per target",
        "plain trainings per target",
        "MiB",
    ]
    return markdown(columns, rows)


def unrolled_expected() -> str:
    """Return LDS over seeds of replays, of the default kernel, and of their averages."""
    columns = ("default", "one run", "4 runs", "one run and default", "4 runs and default")
    rows = [
        [
            problem,
            f"{sum(figures['metasmoothness']) / len(figures['metasmoothness']):.3f}",
            f"{figures['ceiling']:.3f}",
            *(f"{figures[name]['mean']:.3f}" for name in columns),
            f"{min(figures['each run']):.3f} to {max(figures['each run']):.3f}",
        ]
        for problem, figures in unrolled_parts("expected").items()
    ]
    return markdown(["problem", "metasmoothness", "ceiling", *columns, "each run"], rows)


def unrolled_teacher() -> str:
    """Return LDS of the default kernel before and after calibration by a teacher."""
    rows = [
        [
            problem,
            f"{figures['metasmoothness']:.3f}",
            *(
                _interval(figures[f"{method}, {question}"])
                if figures["kept"] or method == "default"
                else "not kept"
                for question in ("this run", "other seeds")
                for method in ("default", "calibrated")
            ),
        ]
        for problem, figures in unrolled_parts("teacher").items()
    ]
    questions = ("this run", "this run, calibrated", "other seeds", "other seeds, calibrated")
    return markdown(["problem", "metasmoothness", *questions], rows)


def smoothness_figure() -> str:
    """Return a scatter plot of one-run LDS by metasmoothness as SVG."""
    width, height, left, low = 560, 360, 60, 310
    text = 'font-family="sans-serif" font-size="12" fill="#555"'

    def x(value: float) -> float:
        return left + value * (width - left - 20)

    def y(value: float) -> float:
        return low - value * (low - 20)

    shapes = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for place in range(0, 11, 2):
        value = place / 10
        shapes += [
            f'<path d="M{x(value):.1f} {y(0)}V{y(1)}M{x(0)} {y(value):.1f}H{x(1):.1f}" stroke="#ddd"/>',
            f'<text x="{x(value):.1f}" y="{low + 18}" text-anchor="middle" {text}>{value:g}</text>',
            f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end" {text}>{value:g}</text>',
        ]
    shapes += [
        f'<path d="M{x(0.9):.1f} {y(0)}V{y(1)}" stroke="#b40" stroke-dasharray="4 4"/>',
        f'<text x="{x(0.5):.1f}" y="{height - 10}" text-anchor="middle" {text}>metasmoothness</text>',
        f'<text x="16" y="{y(0.5):.1f}" text-anchor="middle" transform="rotate(-90 16 {y(0.5):.1f})" {text}>'
        "LDS with 5 % of the rows left out</text>",
    ]
    for name, figures in unrolled_parts("smooth").items():
        for key, fill in zip(SMOOTHNESS, ("none", "#06c"), strict=True):
            places = x(max(0.0, figures[key])), y(max(0.0, figures["unrolled"]["0.05"]["mean"]))
            shapes.append(
                f'<circle cx="{places[0]:.1f}" cy="{places[1]:.1f}" r="5" fill="{fill}" stroke="#06c">'
                f"<title>{name}</title></circle>"
            )
    for place, (fill, label) in enumerate((("none", "h = 0.1"), ("#06c", "h = 0.5"))):
        shapes += [
            f'<circle cx="{x(0.04):.1f}" cy="{40 + 20 * place}" r="5" fill="{fill}" stroke="#06c"/>',
            f'<text x="{x(0.04) + 12:.1f}" y="{44 + 20 * place}" {text}>{label}</text>',
        ]
    lines = "\n".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n{lines}\n</svg>\n'


def serve() -> str:
    """Return the latency of every kind of page of ``serve``, by example."""
    kinds = {
        "target": "target",
        "review": "review",
        "ask": "new text",
        "tokens": "target with coloured tokens",
    }
    rows = []
    for example, found in parts("serve").items():
        for kind in (kind for kind in kinds if kind in found):
            one = found[kind]
            shown = (one["p50"], one["p95"], one.get("processor"), found["first"].get(kind))
            figures = ["" if seconds is None else f"{seconds:.2f}" for seconds in shown]
            rows.append([f"{example}, {kinds[kind]}", str(one["requests"]), *figures])
    return markdown(["page", "requests", "p50", "p95", "processor time", "right after the start"], rows)


FIGURE = ROOT / "docs" / "images" / "metasmoothness.svg"

TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        lds,
        removal,
        whole_runs,
        ranks,
        defaults,
        cost,
        projection,
        damping,
        plan,
        reliability,
        wrong_labels,
        what_if,
        wrong_label_effects,
        repair,
        selection,
        optimizer,
        zoo,
        zoo_refusals,
        unrolled_smooth,
        unrolled_cost,
        unrolled_expected,
        unrolled_teacher,
        serve,
        *scale_plan.TABLES,
    )
}


def refreshed(text: str) -> str:
    """Return a page with every marked table made again from the last measurement."""
    return MARKED.sub(lambda match: f"{match[1]}{match[2]}{TABLES[match[1]]()}", text)


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := refreshed(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    FIGURE.write_text(smoothness_figure(), encoding="utf-8")


if __name__ == "__main__":
    main()
