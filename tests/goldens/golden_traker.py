"""Settings under which ``TRAKer`` and the original multiply gradients by the same matrix."""

from __future__ import annotations

from typing import Any

from traker_cases import MODELS, injected, make_model, num_kept

SETTINGS = {f"{name}/{some}": (name, some) for name in MODELS for some in ("all", "some")}
LAMBDA = 0.1


def settings(key: str, base: type) -> dict[str, Any]:
    """Return the arguments of either, whose projectors have the given base."""
    name, some = SETTINGS[key]
    kept = MODELS[name][2] if some == "some" else None
    projector = injected(base, num_kept(make_model(name), kept))
    return {"model": make_model(name), "projector": projector, "grad_wrt": kept, "lambda_reg": LAMBDA}
