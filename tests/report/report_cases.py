"""Scores to report on: drawn features without a model, and what is on a page by a plain HTML parser."""

import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trak_lite import Scores
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.verdict import Baseline, Calibration, Estimate, OneRunVerdict, Predictions
from trak_lite.methods import AbstractMethod, GaussNewton
from trak_lite.report.content import rendered
from trak_lite.report.page import environment
from trak_lite.report.survey import Histogram
from trak_lite.run.tables import FEATURES, LOSS_CURVATURE, OUT_TO_LOSS
from trak_lite.scoring.matrix import StreamedMatrix
from trak_lite.scoring.records import shown_settings
from trak_lite.scoring.source import ScoreSource
from trak_lite.store import Column, Manifest, MemoryFeatureStore, TableSpec
from trak_lite.types import FeatureLayout

__all__ = ["Baseline", "Calibration", "Histogram", "OneRunVerdict", "Predictions"]

DEFAULT = GaussNewton(damping=1.0)
BASELINE = Baseline("gradient dot product, no kernel", Estimate(0.3, 0.2, 0.4), Estimate(0.2, 0.1, 0.3))
VERDICT = Verdict(
    lds=Estimate(0.5, 0.4, 0.6), baselines=(BASELINE,), num_subsets=6, num_seeds=1, alpha=0.5, num_targets=4,
    num_constant=0, confidence=0.95, ceiling=None, calibration=None,
)  # fmt: skip


def drawn_scores(
    *,
    method: AbstractMethod = DEFAULT,
    num_checkpoints: int = 3,
    num_rows: int = 40,
    num_targets: int = 4,
    name: str = "test",
    verdict: Verdict | None = None,
    predictions: Predictions | None = None,
    features: np.ndarray | None = None,
) -> Scores:
    """Return scores of drawn rows of 6 features, computed when they are read."""
    draw = np.random.default_rng(0).normal
    store = MemoryFeatureStore(Manifest({"task": {"name": "drawn"}}, {"trak_lite": "0"}))
    numbers = range(num_checkpoints)
    rows = [draw(size=(num_rows, 6)) if features is None else features for _ in numbers]
    train = [_table(store, f"ckpt-{c}", c, rows[c]) for c in numbers]
    for c in numbers:
        _table(store, f"targets/{name}/ckpt-{c}", c, draw(size=(num_targets, 6)))
    layout, device = FeatureLayout.joint(6), torch.device("cpu")
    source = ScoreSource(store, train, name, method, layout=layout, target_identity={}, device=device)
    entries = SimpleNamespace(verdict={Verdict: verdict}.get, predictions=lambda: predictions)
    settings = shown_settings(method, checkpoints=num_checkpoints)
    made_with = name, method, source.store.manifest, settings
    return Scores(StreamedMatrix(source), *made_with, row_source=source, entries=entries)


def _table(store: MemoryFeatureStore, path: str, model_id: int, features: np.ndarray) -> Any:
    names = (OUT_TO_LOSS, LOSS_CURVATURE)
    columns = (Column(FEATURES, 6, "float32"), *(Column(name, None, "float32") for name in names))
    table = store.create_table(path, TableSpec(len(features), columns, 7, {"model_id": model_id}))
    generator = np.random.default_rng(model_id)
    values = {name: generator.uniform(0.1, 1, len(features)).astype(np.float32) for name in names}
    table.put(np.arange(len(features)), {FEATURES: features.astype(np.float32), **values})
    return table


def digest(text: str) -> str:
    """Return the source expression of an inline style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def predictions(num_targets: int = 4) -> Predictions:
    generator = np.random.default_rng(0)
    return Predictions(generator.normal(size=(6, num_targets)), generator.normal(size=(6, num_targets)))


class Parsed(HTMLParser):
    """Elements, attributes and text of a page, without the text of ``script``, ``style`` and ``title``."""

    def __init__(self, page: str | Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {"script": "", "style": "", "title": ""}
        """Text of the elements that :attr:`text` leaves out."""
        self.text = ""
        self._open: list[str] = []
        self.feed(page.read_text(encoding="utf-8") if isinstance(page, Path) else page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("img", "input", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in self.inside:
            self.inside[self._open[-1]] += data
        else:
            self.text += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        return [found for name, found in self.elements if name == tag and wanted.items() <= found.items()]

    def rows(self, tag: str = "li") -> list[int]:
        return [int(found["data-row"] or "") for found in self.all(tag) if "data-row" in found]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.elements}

    @property
    def is_closed(self) -> bool:
        return not self._open


def in_a_notebook(shown: Any) -> Parsed:
    return Parsed(shown._repr_html_())


def parsed_content(content: Any, what: str = "row 0") -> Parsed:
    template = environment().from_string("{% from 'parts.html' import content %}{{ content(shown) }}")
    return Parsed(template.render(shown=rendered(content, what)))
