"""Makes the goldens again, only after a change that is meant to change results; with ``--missing``, adds what is new.

Run ``PYTHONPATH=tests:tests/traker:tests/projectors:tests/modelout_functions python tests/goldens/make.py [--missing]``
in the root of the repository. It needs the original release traker 0.3.2, whose scores are the goldens of ``TRAKer``.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
import traker_cases
from golden_cases import (
    CASES,
    NUMBERS,
    STORE,
    VECTORS,
    fill_store,
    projections,
    reference_gradients,
    scores_of,
    vectors,
)
from golden_traker import SETTINGS, settings

ALWAYS = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the archive, so that the same contents are the same bytes."""


def numbers() -> dict[str, np.ndarray]:
    """Return every array by name."""
    found = {f"gradients/{name}": reference_gradients(name) for name in CASES}
    found |= {f"projections/{key}": matrix for key, matrix in projections()}
    for name in CASES:
        found |= {f"scores/{name}/{method}": scores for method, scores in scores_of(name)}
    for key in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            base = traker_cases.original().projectors.AbstractProjector
            made = traker_cases.make_original(Path(folder), **settings(key, base))
            found[f"traker/{key}"] = traker_cases.run(made, key.split("/")[0])
    return found


def store() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill_store(folder)
        with zipfile.ZipFile(STORE, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), ALWAYS)
                    archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    torch.set_num_threads(1)
    only_missing = sys.argv[1:] == ["--missing"]
    for path, made in ((NUMBERS, numbers()), (VECTORS, dict(vectors()))):
        if only_missing:
            with np.load(path) as kept:
                made = {**kept, **{name: value for name, value in made.items() if name not in kept}}
        np.savez_compressed(path, **made)
    if not only_missing:
        store()
    for path in (NUMBERS, VECTORS, STORE):
        print(f"{path.name}: {path.stat().st_size:,} bytes")
