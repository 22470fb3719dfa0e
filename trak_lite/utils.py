"""Small public functions under the names that the original TRAK gives them."""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn

from trak_lite.traker import TRAKer

__all__ = ["get_num_params", "parameters_to_vector", "test_install"]


def test_install(use_fast_jl: bool = False) -> None:
    """Featurize and score twenty random samples, on the GPU if there is one, and check the result.

    Args:
        use_fast_jl: Accepted for the original's signature; no compiled extension is needed.

    Raises:
        RuntimeError: If the scores are not finite.
    """
    del use_fast_jl
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(20, 16, generator=generator), torch.randint(2, (20,), generator=generator))
    model = nn.Linear(16, 2, bias=False).to(device)
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(model, "image_classification", 20, save_dir=folder, proj_dim=8)
        traker.load_checkpoint(model.state_dict(), model_id=0)
        traker.featurize(batch, num_samples=20)
        traker.finalize_features()
        traker.start_scoring_checkpoint("install", model.state_dict(), 0, num_targets=20)
        traker.score(batch, num_samples=20)
        scores = traker.finalize_scores("install")
        traker.close()
    if not torch.from_numpy(scores).isfinite().all():
        raise RuntimeError("The scores of the installation test are not finite. Please report this.")


test_install.__test__ = False  # type: ignore[attr-defined]  # its name is the original's; pytest must not take it


def parameters_to_vector(parameters: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Return parameters as one vector ``(P,)``, in the order given."""
    return torch.cat([parameter.reshape(-1) for parameter in parameters])


def get_num_params(model: nn.Module) -> int:
    """Return the number of entries of all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
