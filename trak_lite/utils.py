"""Small public functions of the original TRAK, under their original names.

Helpers of the original's score computer, such as ``get_matrix_mult``, are not included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trak_lite.errors import AssertedInputError
from trak_lite.projectors import NoOpProjector
from trak_lite.traker import TRAKer

__all__ = [
    "get_num_params",
    "get_parameter_chunk_sizes",
    "is_not_buffer",
    "parameters_to_vector",
    "test_install",
    "vectorize",
]

_MAX_ENTRIES = 2**32 - 1
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def test_install(use_fast_jl: bool = False) -> None:  # noqa: PT028 - not a test
    """Featurize and score twenty random samples, on the GPU if there is one. Raises if anything fails.

    Args:
        use_fast_jl: Accepted for the original's signature; no compiled extension is needed.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 16, generator=generator, device="cpu")
    batch = (inputs, torch.randint(2, (20,), generator=generator, device="cpu"))
    model = nn.Linear(16, 2, bias=False).to(device)
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(model, "image_classification", 20, save_dir=folder, proj_dim=8)
        traker.load_checkpoint(model.state_dict(), model_id=0)
        traker.featurize(batch, num_samples=20)
        traker.finalize_features()
        traker.start_scoring_checkpoint("install", model.state_dict(), 0, num_targets=20)
        traker.score(batch, num_samples=20)
        traker.finalize_scores("install")
        traker.close()


test_install.__test__ = False  # type: ignore[attr-defined]  # the name is the original's; pytest must not collect it


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return parameters as one vector ``(P,)``, in the given order."""
    return torch.cat([parameter.reshape(-1) for parameter in parameters])


def get_num_params(model: nn.Module) -> int:
    """Return the number of entries of all parameters; tied parameters count once.

    Example:
        >>> get_num_params(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def is_not_buffer(ind: int, params_dict: Sequence[str]) -> bool:
    """Return whether the name at ``ind`` is not the name of a batch normalisation statistic."""
    return not any(buffer in params_dict[ind] for buffer in _BUFFERS)


def vectorize(
    g: Mapping[str, Tensor], arr: Tensor | None = None, device: str | torch.device | None = None
) -> Tensor:
    """Concatenate per-sample gradients of all parameters.

    Args:
        g: Gradients ``(B, *parameter.shape)`` by parameter name.
        arr: ``(B, P)`` tensor to write into; ``None`` creates a new one.
        device: Device of a new tensor; ``None`` is the device of the gradients.

    Returns:
        ``(B, P)``, parameters in the order of the mapping.

    Raises:
        InvalidInputError: If ``g`` is empty.
        AssertedInputError: If the gradients have different B.

    Example:
        >>> vectorize({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        tensor([[1., 1., 0.]])
    """
    counts = sorted({len(rows) for rows in g.values()})
    if len(counts) > 1:
        raise AssertedInputError(
            f"The gradients have different numbers of samples: {counts}. Give gradients of the same samples for all "
            "parameters."
        )
    rows = NoOpProjector(device=device).project(g, model_id=0)
    return rows if arr is None else arr.copy_(rows)


def get_parameter_chunk_sizes(model: nn.Module, batch_size: int) -> tuple[int, list[int]]:
    """Divide a model's parameters, in order, into chunks of fewer than 2^32 / ``batch_size`` entries.

    Args:
        model: The module.
        batch_size: Rows that are projected at once.

    Returns:
        The limit, and the number of entries of each chunk; a parameter above the limit is a separate chunk.
    """
    limit = _MAX_ENTRIES // batch_size
    chunks: list[int] = []
    for parameter in model.parameters():
        if chunks and chunks[-1] + parameter.numel() < limit:
            chunks[-1] += parameter.numel()
        else:
            chunks.append(parameter.numel())
    return limit, chunks
