"""The released kronfluence gives the same scores, where it is installed (the benchmark extra)."""

import pytest
import torch

pytest.importorskip("kronfluence")

from benchmarks import ekfac_parity


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_scores_with_the_empirical_fisher_are_kronfluences(name):
    model = ekfac_parity.models()[name].eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(136, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (136,), generator=generator)
    train, targets = ((images[part], labels[part]) for part in (slice(128), slice(128, None)))
    found = ekfac_parity.parity(model, train, targets, "empirical", "ekfac")
    assert found["error"] < 1e-3
