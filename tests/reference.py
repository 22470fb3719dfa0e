"""The independent reference: what every number should be, written to be read and not to be fast.

Plain loops over samples and ``torch.autograd.grad``, dense float64 NumPy for the rest. Nothing is imported
from trak_lite, so that a mistake there cannot hide here.

Shapes: N train rows, M targets, C checkpoints, B samples, P gradient entries, K feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray
OutputFunction = Callable[[nn.Module, Any], Tensor]
"""``(model, batch) -> (B,)``: the scalar f of every sample of the batch."""


# --- Gradients -------------------------------------------------------------------------------------------


def samples_of(batch: Any) -> list[Any]:
    """Split a batch (a tensor, or a tuple, list or dict of tensors) into batches of one sample."""
    if isinstance(batch, Tensor):
        return [batch[i : i + 1] for i in range(len(batch))]
    if isinstance(batch, Mapping):
        columns = {key: samples_of(value) for key, value in batch.items()}
        num_samples = len(next(iter(columns.values())))
        return [{key: column[i] for key, column in columns.items()} for i in range(num_samples)]
    columns = [samples_of(part) for part in batch]
    return [type(batch)(sample) for sample in zip(*columns, strict=True)]


def per_sample_gradients(
    model: nn.Module,
    output_function: OutputFunction,
    batch_samples: Sequence[Any],
    parameter_names: Sequence[str],
) -> dict[str, Array]:
    """Differentiate f of each sample, alone in its batch; returns ``(B, *shape)`` per parameter name."""
    named = dict(model.named_parameters())
    gradients: dict[str, list[Array]] = {name: [] for name in parameter_names}
    for sample in batch_samples:
        value = output_function(model, sample).sum()
        grads = torch.autograd.grad(value, [named[name] for name in parameter_names], allow_unused=True)
        for name, grad in zip(parameter_names, grads, strict=True):
            dense = torch.zeros_like(named[name]) if grad is None else grad
            gradients[name].append(dense.detach().to(torch.float64).cpu().numpy())
    return {name: np.stack(rows) for name, rows in gradients.items()}


def flatten(gradients: Mapping[str, Array]) -> Array:
    """Put the gradients of all parameters side by side, in their order: ``(B, P)``."""
    return np.concatenate([grad.reshape(len(grad), -1) for grad in gradients.values()], axis=1)


def features(gradients: Mapping[str, Array], matrices: Mapping[str, Array]) -> Array:
    """Multiply each parameter's gradients by its matrix ``(numel, K)`` and add up: ``(B, K)``."""
    return sum(grad.reshape(len(grad), -1) @ matrices[name] for name, grad in gradients.items())


# --- Classification: f, q and w --------------------------------------------------------------------------


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``l_y - logsumexp of the other logits`` of every sample, differentiable."""
    margins = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        others = torch.cat([row[:label], row[label + 1 :]])
        margins.append(row[label] - torch.logsumexp(others, dim=0))
    return torch.stack(margins)


def out_to_loss_grad(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Array:
    """Return ``q = 1 - p_y``, with p the softmax of the logits over the temperature: ``(B,)``."""
    scaled = logits.detach().to(torch.float64).cpu().numpy() / temperature
    values = []
    for row, label in zip(scaled, labels.tolist(), strict=True):
        p = np.exp(row - row.max())
        values.append(1.0 - (p / p.sum())[label])
    return np.array(values)


def loss_curvature(logits: Tensor, labels: Tensor) -> Array:
    """Return ``w = p (1 - p)`` of the margin under cross-entropy: ``(B,)``."""
    q = out_to_loss_grad(logits, labels)
    return q * (1.0 - q)


# --- Scores ----------------------------------------------------------------------------------------------


def kernel(
    train: Array,
    w: Array,
    *,
    damping: float | None = None,
    lambda_reg: float | None = None,
    weighting: str = "curvature",
) -> Array:
    """Return ``sum_i w_i phi_i phi_i^T + lambda I`` of one segment; damping is lambda in mean eigenvalues.

    Without a damping lambda is 20 % of the root mean square of the eigenvalues that can be above zero.
    """
    width = train.shape[1]
    hessian = np.zeros((width, width))
    for row, weight in zip(train, w, strict=True):
        hessian += (weight if weighting == "curvature" else 1.0) * np.outer(row, row)
    if lambda_reg is None and damping is None:
        largest = np.linalg.eigvalsh(hessian)[-len(train) :]
        lambda_reg = 0.2 * np.sqrt(np.mean(largest**2))
    elif lambda_reg is None:
        lambda_reg = damping * np.trace(hessian) / width
    return hessian + lambda_reg * np.eye(width)


def kernel_scores(
    train_features: Sequence[Array],
    q: Sequence[Array],
    w: Sequence[Array],
    target_features: Sequence[Array],
    *,
    segments: Sequence[tuple[int, int]],
    where_q: str = "outside",
    **kernel_settings: Any,
) -> Array:
    """Score by the native method: mean over checkpoints of the kernel products, times the mean q.

    Every sequence has one array per checkpoint: ``(N, K)``, ``(N,)``, ``(N,)``, ``(M, K)``.
    ``segments`` are the ``(start, stop)`` columns that share a kernel. ``where_q="inside"`` multiplies the
    products of every checkpoint by its q instead. Returns ``(N, M)``.
    """
    products = []
    for train, weights, target in zip(train_features, w, target_features, strict=True):
        product = np.zeros((len(train), len(target)))
        for start, stop in segments:
            if not train[:, start:stop].any():
                continue  # rows of zeros score nothing, and their kernel has no inverse
            matrix = kernel(train[:, start:stop], weights, **kernel_settings)
            product += train[:, start:stop] @ np.linalg.solve(matrix, target[:, start:stop].T)
        products.append(product)
    if where_q == "outside":
        return np.mean(products, axis=0) * np.mean(q, axis=0)[:, None]
    return np.mean([product * own[:, None] for product, own in zip(products, q, strict=True)], axis=0)


def top_k(scores: Array, k: int, *, sign: str = "helpful") -> tuple[Array, Array]:
    """Return rows and scores ``(M, k)`` of the best train rows per target; of ties the lower row first."""
    order = np.argsort(-scores if sign == "helpful" else scores, axis=0, kind="stable")[:k]
    return order.T, np.take_along_axis(scores, order, axis=0).T


def spearman(one: Array, other: Array) -> float:
    """Return the correlation of ranks, of ties their mean rank: scipy's, whose import takes a second."""
    ranks = []
    for values in (one, other):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[place])
    return float(np.corrcoef(*ranks)[0, 1])
