"""More mixtures of experts and hybrids of transformers than the zoo's table has, for ``benchmarks.zoo --gradients``.

One set of sizes serves all; a configuration does not read what it does not know. Widths are multiples of 8, so that
the grouped products of bfloat16 take them.
"""

from __future__ import annotations

import dataclasses

from benchmarks.architectures import Architecture
from benchmarks.architectures.hub import TABLE, causal


def mixtures() -> list[Architecture]:
    """Return one language model of each kind, under a name that is not in the table."""
    aligned = TABLE["aligned"]
    settings = {kind: {**aligned["sizes"], **aligned["own sizes"].get(kind, {})} for kind in aligned["kinds"]}
    found = [causal(kind, "mixtures and hybrids", **sizes) for kind, sizes in settings.items()]
    return [dataclasses.replace(entry, name=f"{entry.name} (aligned)") for entry in found]
