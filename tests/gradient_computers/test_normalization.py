"""Norms and normalised rows, as an Attributor stores them, against the gradients of a plain loop divided by hand."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from models import CASES, by_loop, make
from torch import nn

from trak_lite import Attributor, Normalization, Rows, clip, clipping_threshold
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.store import ZarrFeatureStore

NONE, UNIT, BY_MODULE = Normalization(), Normalization("unit"), Normalization("unit", scope="module")


def stored(path, model, output, batch, normalize, computer=HookGradientComputer):
    """The rows ``(B, P)`` of whole gradients, and the norms ``(B,)`` of what nothing divided."""
    settings = {"projector": "none", "dtype": "float32", "store_norms": True, "device": "cpu"}
    made = Attributor(model, output, path, normalize=normalize, gradient_computer=computer, **settings)
    named = isinstance(batch, dict)
    columns = zip(*(batch.values() if named else batch), strict=True)
    samples = [dict(zip(batch, sample, strict=True)) if named else sample for sample in columns]
    made.featurize(Rows(samples, batch_size=4, name="train"))
    with ZarrFeatureStore.open(path, mode="r") as store:
        table = store.open_table("ckpt-0")
        return torch.tensor(table.read("features")), torch.tensor(table.read("gradient_norm")).flatten()


def divided(grads, normalize):
    """Every sample's gradient, or its part in each module, over its norm or brought down to C."""
    scaled = {name: grad.flatten(1).double() for name, grad in grads.items()}
    modules = {name: name.rpartition(".")[0] if normalize.scope == "module" else "" for name in grads}
    for module in {*modules.values()}:
        own = [name for name in grads if modules[name] == module]
        norm = torch.cat([scaled[name] for name in own], 1).norm(dim=1, keepdim=True)
        factor = {"none": norm / norm, "unit": 1 / norm}.get(normalize.kind)
        factor = (normalize.threshold / norm).clamp(max=1) if factor is None else factor
        for name in own:
            scaled[name] = scaled[name] * torch.where(norm > 0, factor, 1.0)
    return torch.cat(list(scaled.values()), 1)


@pytest.mark.parametrize("normalize", [BY_MODULE, UNIT, NONE, clip(2.0)], ids=lambda n: f"{n.kind}-{n.scope}")
@pytest.mark.parametrize("chunk_size", [3, None])
@pytest.mark.parametrize("name", ["GPT-2", "small CNN", "DLRM", "LoRA and weight norm"])
def test_rows_and_norms_are_those_of_the_full_gradients(name, chunk_size, normalize, tmp_path):
    """Blocks come dense, as factors, as sums of both, and as rows of a table, whole or chunk by chunk."""
    case = CASES[name]
    model, batch = make(case)
    plain = by_loop(model, case.output, batch)
    computer = partial(HookGradientComputer, chunk_size=chunk_size)
    found, norms = stored(tmp_path / "rows.zarr", model, case.output, batch, normalize, computer)
    torch.testing.assert_close(found.double(), divided(plain, normalize), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms.double(), divided(plain, NONE).norm(dim=1), rtol=1e-6, atol=0)


def test_the_norm_of_positions_that_cancel_keeps_its_digits(tmp_path):
    torch.manual_seed(0)
    for width in (64, 1):  # products of positions, or of entries
        x, g, small = (torch.randn(2, 1, width) for _ in range(3))
        size = 1e-3 if width == 64 else 1.0
        inputs, grads = torch.cat([x, x + size * small], 1), torch.cat([g, -g], 1)
        expected = (grads.double().transpose(1, 2) @ inputs.double()).flatten(1).norm(dim=1)
        layer, product = nn.Linear(width, width, bias=False), lambda c, b: (c(b[0]) * b[1]).sum((1, 2))
        _, norms = stored(tmp_path / f"{width}.zarr", layer, product, (inputs, grads), NONE)
        torch.testing.assert_close(norms.double(), expected, rtol=1e-3, atol=0)

    ids = torch.tensor([[2, 0, 2, 2], [1, 1, 3, 0]])
    values = torch.randn(2, 4, 5)
    values[0, 3] = -values[0, 0] - values[0, 2]  # row 2 of the first sample cancels to nothing
    table = nn.EmbeddingBag(4, 5, mode="sum")

    def weighted(call, batch):
        looked_up = call(batch[0].flatten().unsqueeze(1)).view(*batch[0].shape, 5)
        return (looked_up * batch[1]).sum((1, 2))

    found, norms = stored(tmp_path / "table.zarr", table, weighted, (ids, values), NONE)
    dense = torch.zeros(2, 4, 5).scatter_add(1, ids.unsqueeze(2).expand(-1, -1, 5), values)
    torch.testing.assert_close(found, dense.flatten(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, dense.flatten(1).norm(dim=1), rtol=1e-5, atol=0)


# ---- Settings
def attributor(normalize):
    return Attributor(nn.Linear(2, 2), "image_classification", None, proj_dim=4, normalize=normalize)


REFUSED = [
    (lambda: clipping_threshold(torch.tensor([1.0]), quantile=0.0), "quantile must be above 0"),
    (lambda: clipping_threshold(torch.tensor([1.0]), quantile=1.5), "at most 1, got 1.5"),
    (lambda: clipping_threshold(torch.tensor([])), "norms has 0 entries"),
    (lambda: clipping_threshold(torch.tensor([1.0, float("nan")])), "2 entries, of which 1 are finite"),
    (lambda: clipping_threshold(torch.zeros(2)), "Most gradients are zero"),
    (lambda: Normalization("unti"), "unti"),  # type: ignore[arg-type]
    (lambda: Normalization("unit", scope="layer"), "layer"),  # type: ignore[arg-type]
    (lambda: Normalization("unit", threshold=1.0), "threshold=1.0 was given with kind='unit'"),
    (lambda: Normalization("clip"), r"needs a threshold, got None\. Expected a positive number"),
    (lambda: Normalization("clip", threshold=0.0), "above 0, got 0.0"),
    (lambda: Normalization("clip", threshold=float("inf")), "finite number above 0, got inf"),
    *(
        (partial(attributor, choice), r"'none', 'unit', clip\(C\).*; got")
        for choice in ("clip", "unti", 1.0, None, clip, np.ones(2))
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("use", "message"), REFUSED)
def test_norms_and_settings_that_mean_nothing_are_refused(use, message):
    with pytest.raises(InvalidInputError, match=message):
        use()


def test_a_threshold_is_a_quantile_of_the_norms():
    read_only = np.arange(12, dtype=np.float32).reshape(3, 4)
    read_only.flags.writeable = False
    assert clipping_threshold(torch.arange(1.0, 12.0)) == pytest.approx(10.0)
    assert clipping_threshold(torch.arange(1.0, 12.0), quantile=1) == 11.0
    assert clipping_threshold(read_only) == clipping_threshold(torch.arange(12.0)) == pytest.approx(9.9)


def test_settings_come_back_from_json_and_a_norm_out_of_reach_gives_nan_and_not_a_short_row():
    for normalization in (NONE, BY_MODULE, clip(2, scope="module"), clip(0.5)):
        assert Normalization(**json.loads(json.dumps(normalization.to_json()))) == normalization
    assert NONE.fingerprint() == {}
    clipping = {"kind": "clip", "scope": "module", "threshold": 2.0}
    assert clip(2, scope="module").fingerprint() == {"normalization": clipping}
    factors = UNIT.factors(torch.tensor([float("inf"), float("nan"), 4.0]))
    assert factors.isnan().tolist() == [True, True, False]
    assert factors[2] == 0.5
