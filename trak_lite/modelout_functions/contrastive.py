"""Model output functions of embedding models: queries with positives and negatives, and pairs of image and text.

Shapes: B samples, d embedding width; n negatives of a row; S negatives of pairs (a subset of N embedded pairs).
Source of the pairs' function: TRAK (arXiv:2303.14186), section 5.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.fingerprint import tensor_bytes
from trak_lite.core.validate import integer, one_of, optional, positive_int, positive_real
from trak_lite.data.batches import move_batch
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, evaluating
from trak_lite.modelout_functions._inputs import (
    class_labels,
    columns_of,
    distinct_names,
    fields_of,
    labels_tensor,
    nan_unless,
    precise,
    prefixed,
    refuse_invalid,
    shape_texts,
    tensor_of,
)
from trak_lite.modelout_functions._margins import UniformNoise, multiclass_terms, sampled_classes
from trak_lite.modelout_functions.language_modeling import pooled
from trak_lite.types import Batch, OutputTerms

_QUERY, _POSITIVE, _NEGATIVE, _LABELS = "query_", "positive_", "negative_", "labels"
_PREFIXES = (_QUERY, _POSITIVE, _NEGATIVE)
_STATES = ("sentence_embedding", "embeddings", "last_hidden_state")


@final
@dataclass(eq=False, kw_only=True)
class ContrastiveModelOutput(AbstractModelOutput):
    r"""Margin of the positive over the negatives of the same row, as in InfoNCE without negatives from the batch.

    With the similarity s of two embeddings, a temperature T, a query u, its positive p and its negatives
    :math:`n_1, \dots`: :math:`f = s(u, p)/T - \log \sum_j e^{s(u, n_j)/T}`. L is the cross-entropy of the positive
    among these candidates, :math:`L = \log(1 + e^{-f})`, so :math:`q = \sigma(-f)` and :math:`w = q (1 - q)`.

    Other rows of a batch are no negatives, because f of a row must not depend on its batch. For image-text pairs with
    negatives from the train set see :class:`CLIPModelOutput`.

    Batches: a mapping or dataclass whose columns begin with ``query_``, ``positive_`` and ``negative_``: the inputs of
    the model with these prefixes. Columns of negatives are ``(B, n, ...)``. Columns without prefix are inputs of all
    calls. Or a tuple ``(query, positive, negatives)``. The model is called once for queries, positives and each of the
    n negatives. It returns ``(B, d)`` embeddings; a mapping or object with ``sentence_embedding`` or ``embeddings``; or
    ``last_hidden_state`` ``(B, T, d)`` (also as a tensor), which is pooled. ``labels`` (optional, ``(B,)``) numbers the
    candidate that is the positive: 0 is that of ``positive_``, j the j-th negative.

    Source: van den Oord et al. (arXiv:1807.03748), equation 4.
    """

    name: ClassVar[str] = "contrastive"

    temperature: float = 0.05
    """T, above 0."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """Cosine or inner product of two embeddings."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """How states of tokens become an embedding: their mean, or the state of the first or the last token, over positions
    where ``attention_mask`` is not 0."""
    _checks: ClassVar = {
        "temperature": positive_real,
        "similarity": partial(one_of, ("cosine", "dot")),
        "pooling": partial(one_of, ("mean", "first", "last")),
    }

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        fields, labels = _parts(batch)
        logits = self._similarities(model_call, fields)
        if labels is None:
            labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        labels = class_labels(
            labels_tensor(labels, "(B,)"), shape=logits.shape[:1], num_classes=logits.shape[1]
        )
        return multiclass_terms(logits, labels, temperature=1.0)

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw which candidate is the positive; see :meth:`AbstractModelOutput.sample_labels`."""
        fields, _ = _parts(batch)
        return {**fields, _LABELS: sampled_classes(self._similarities(model_call, fields), noise)}

    def _similarities(self, model_call: ModelCall, fields: dict[str, Any]) -> Tensor:
        """Return the similarities of query and candidates over the temperature, ``(B, 1 + n)``."""
        query, positive, negatives = (prefixed(fields, prefix, _PREFIXES) for prefix in _PREFIXES)
        names = {name.removeprefix(_NEGATIVE) for name in fields if name.startswith(_NEGATIVE)}
        counts = {
            value.shape[1] if isinstance(value, Tensor) and value.dim() >= 2 else 0
            for name, value in negatives.items()
            if name in names
        }
        if len(counts) != 1 or 0 in counts:
            raise InvalidInputError(
                "The columns of negatives do not have the same number of negatives. Expected tensors of shape "
                "(B, n, ...), with n of at least 1."
            )
        # One call for each: rows of a batch of B n texts would not be the samples of the batch.
        each = (
            {name: value[:, index] if name in names else value for name, value in negatives.items()}
            for index in range(counts.pop())
        )
        anchor = self._embedding(model_call, query)
        similar = [(anchor * self._embedding(model_call, inputs)).sum(1) for inputs in (positive, *each)]
        return torch.stack(similar, dim=1) / self.temperature

    def _embedding(self, model_call: ModelCall, inputs: dict[str, Any]) -> Tensor:
        """Return embeddings ``(B, d)``, of length 1 for cosines."""
        kwargs = dict(inputs)
        args = (kwargs.pop(""),) if "" in kwargs else ()
        states = tensor_of(model_call(*args, **kwargs), *_STATES)
        if states.dim() == 3:
            states = pooled(states, kwargs.get("attention_mask"), self.pooling)
        if states.dim() != 2:
            raise InvalidInputError(
                f"The model gave embeddings of shape {shape_texts(states.shape)[0]}. Expected (B, d), or states "
                "(B, T, d)."
            )
        return F.normalize(states, dim=1) if self.similarity == "cosine" else states


def _parts(batch: Batch) -> tuple[dict[str, Any], Any]:
    """Return the columns without labels, and the labels or ``None``."""
    if isinstance(batch, tuple | list) and len(batch) == 3:
        return dict(zip(_PREFIXES, batch, strict=True)), None
    fields = columns_of(batch, [])
    for prefix in _PREFIXES:
        if not any(name.startswith(prefix) for name in fields):
            raise InvalidInputError(
                f"The batch has the columns {list(fields)}, none of which begins with {prefix!r}. Expected the inputs "
                f"of the model with the prefixes {list(_PREFIXES)}."
            )
    return fields, fields.pop(_LABELS, None)


_FEATURE_KEYS = (("image_features", "text_features"), ("image_embeds", "text_embeds"))


class _Pairs(NamedTuple):
    """Output of a contrastive model: two ``(B, d)`` tensors and its scale, if any."""

    image: Tensor
    text: Tensor
    scale: Tensor | None


@final
@dataclass(eq=False)
class CLIPModelOutput(AbstractModelOutput):
    r"""Sum of the image's and the text's margin, computed against a fixed subset S of embedded pairs.

    With image features :math:`\phi`, text features :math:`\psi` and negatives :math:`\Phi_S, \Psi_S`:
    :math:`f = -\log\sum_S e^{-\phi \cdot (\psi - \Psi_S)} - \log\sum_S e^{-\psi \cdot (\phi - \Phi_S)}`.

    The two margins have different q, so the gradient of the summed contrastive loss is not a multiple of the
    gradient of f, and no scalar q exists for it. L is therefore the loss at the mean margin with the
    model's scale s, :math:`(2/s) \log(1 + e^{-s f/2})`: :math:`q = \sigma(-s f/2)`,
    :math:`w = (s/2) q (1 - q)`. A q computed over the batch, as in the original TRAK, would depend on the other
    samples and be 0 for a batch of one.

    S is drawn uniformly without replacement, from a seed, and stored in this instance. The negatives depend on the
    checkpoint: given ``pairs``, :meth:`prepare` embeds them with the weights of each loaded checkpoint. Without
    ``pairs``, call :meth:`set_embeddings` or :meth:`get_embeddings` for every checkpoint yourself.

    Batches: ``(images, texts)``, or a mapping or dataclass that becomes keyword arguments. The model returns
    ``(image_features, text_features, scale)``, or a mapping or object with ``image_features`` and
    ``text_features`` (or ``image_embeds`` and ``text_embeds``) and ``logit_scale``, which is the factor, not
    its logarithm.
    """

    name: ClassVar[str] = "clip"

    temperature: float | None = None
    """The factor s on the similarities (named as in the original TRAK); ``None`` uses the model's scale."""
    simulated_batch_size: int = 300
    """Number of negatives S."""
    seed: int = field(default=0, kw_only=True)
    """Seed of the draw of negatives."""
    input_names: Sequence[str] | None = field(default=("image", "text"), kw_only=True)
    """Keywords for the two parts of a positional batch; ``None`` passes them by position."""
    pairs: Iterable[Batch] | None = field(default=None, kw_only=True, repr=False)
    """Batches of pairs that are embedded for every checkpoint, see :meth:`get_embeddings`: a list or a loader that
    yields the same batches in the same order each time."""
    _negatives: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)
    _checks: ClassVar = {
        "temperature": optional(positive_real),
        "simulated_batch_size": positive_int,
        "seed": integer,
        "input_names": optional(partial(distinct_names, ("image", "text"))),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = self.pairs
        # The next checkpoint would have other negatives.
        if pairs is not None and (isinstance(pairs, Iterator) or not isinstance(pairs, Iterable)):
            raise InvalidInputError(
                f"pairs is a {type(pairs).__name__}. Expected a list of batches or a loader, which can be read again "
                "for every checkpoint."
            )
        if isinstance(pairs, DataLoader) and isinstance(pairs.sampler, RandomSampler):
            raise InvalidInputError(
                "pairs is a DataLoader that shuffles. Expected the same order each time, so that every checkpoint "
                "has the same negatives and a stopped run can go on: DataLoader(..., shuffle=False)."
            )

    def prepare(self, model: nn.Module) -> None:
        """Call :meth:`get_embeddings` with ``pairs``, if there are any: the same pairs for every checkpoint."""
        if self.pairs is not None:
            self.get_embeddings(model, self.pairs)

    def set_embeddings(self, image: Tensor, text: Tensor) -> None:
        """Draw the negatives from embedded pairs.

        Args:
            image: Image embeddings ``(N, d)``, as the model returns them.
            text: Text embeddings ``(N, d)`` of the same pairs.

        Raises:
            InvalidInputError: If the shapes differ or N is below ``simulated_batch_size``.
        """
        if image.dim() != 2 or image.shape != text.shape:
            raise InvalidInputError(
                f"The embeddings have shapes {tuple(image.shape)} (image) and {tuple(text.shape)} (text). "
                "Expected the same (N, d) for both."
            )
        count = self.simulated_batch_size
        if image.shape[0] < count:
            raise InvalidInputError(
                f"There are {image.shape[0]} embedded pairs. Expected at least simulated_batch_size = "
                f"{count}; embed more pairs or lower simulated_batch_size."
            )
        # Draw on the CPU, so that the subset does not depend on the device.
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(image.shape[0], generator=generator, device="cpu")[:count]
        chosen = drawn.to(image.device)
        image, text = precise(image, what="image"), precise(text, what="text")
        self._negatives = (image.detach()[chosen].clone(), text.detach()[chosen.to(text.device)].clone())

    def get_embeddings(
        self,
        model: nn.Module,
        loader: Iterable[Batch],
        *,
        batch_size: int | None = None,
        embedding_dim: int | None = None,
        size: int = 50_000,
        preprocess_fn_img: Callable[[Any], Any] | None = None,
        preprocess_fn_txt: Callable[[Any], Any] | None = None,
    ) -> None:
        """Embed pairs in eval mode and draw the negatives from them; the model's modes are restored.

        Args:
            model: The contrastive model, with the checkpoint's weights loaded.
            loader: Batches of pairs.
            batch_size: Ignored; accepted for compatibility with the original TRAK.
            embedding_dim: Width d that the embeddings must have, if given.
            size: Largest number of pairs to embed.
            preprocess_fn_img: Applied to the images of a positional batch.
            preprocess_fn_txt: Applied to the texts of a positional batch.

        Raises:
            InvalidInputError: If the loader is empty, yields too few pairs, or the width differs from
                ``embedding_dim``.
        """
        size = positive_int(size=size)
        steps = (preprocess_fn_img, preprocess_fn_txt)
        tensors = (*model.parameters(), *model.buffers())
        device = tensors[0].device if tensors else torch.device("cpu")
        embedded: list[_Pairs] = []
        with evaluating(model):
            for batch in loader:
                if isinstance(batch, tuple | list) and len(batch) == 2:
                    batch = [
                        part if step is None else step(part) for step, part in zip(steps, batch, strict=True)
                    ]
                with passes_undone(model):
                    embedded.append(_pairs_of(self._call(ModelCall(model), move_batch(batch, device))))
                if sum(len(pairs.image) for pairs in embedded) >= size:
                    break
        if not embedded:
            raise InvalidInputError(
                "The loader gave no batch. Expected at least one batch of pairs to embed."
            )
        image = torch.cat([pairs.image for pairs in embedded])
        text = torch.cat([pairs.text for pairs in embedded])
        if embedding_dim is not None and image.shape[1] != embedding_dim:
            raise InvalidInputError(
                f"The embeddings have width {image.shape[1]}, expected embedding_dim = {embedding_dim}."
            )
        self.set_embeddings(image[:size], text[:size])

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`.

        Raises:
            StateError: If no embeddings have been set.
        """
        if self._negatives is None:
            raise StateError(
                "The task 'clip' has no negatives yet. Call task.get_embeddings(model, loader) or "
                "task.set_embeddings(image, text) before featurizing, or give CLIPModelOutput(pairs=loader), "
                "which embeds for every checkpoint."
            )
        pairs = _pairs_of(self._call(model_call, batch))
        scale = self._scale_of(pairs)
        images, texts = (part.to(pairs.image) for part in self._negatives)
        if pairs.image.shape[1] != images.shape[1]:
            raise InvalidInputError(
                f"The model gave features of width {pairs.image.shape[1]}, the negatives have width "
                f"{images.shape[1]}. Embed them with the same model: task.get_embeddings(model, loader)."
            )
        dot = (pairs.image * pairs.text).sum(1, keepdim=True)
        with torch.autocast(dot.device.type, enabled=False):  # it would compute products in half precision
            output = -(pairs.image @ texts.T - dot).logsumexp(1) - (pairs.text @ images.T - dot).logsumexp(1)
        output = output * nan_unless(scale > 0, scale)
        mean = output.detach() * scale / 2
        wrong = torch.sigmoid(-mean)
        return OutputTerms(output, wrong, wrong * torch.sigmoid(mean) * scale / 2)

    def state_digest(self) -> str | None:
        """Return the SHA-256 of the negatives in hex; ``None`` if none have been set."""
        if self._negatives is None:
            return None
        digest = hashlib.sha256()
        for part in self._negatives:
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(tensor_bytes(part))
        return digest.hexdigest()

    def _call(self, model_call: Callable[..., Any], batch: Batch) -> Any:
        fields = fields_of(batch)
        if fields is not None:
            return model_call(**fields)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise InvalidInputError(
                f"The batch is a {type(batch).__name__}{size}. Expected (images, texts), or a dict of "
                "keyword arguments."
            )
        if self.input_names is None:
            return model_call(*batch)
        return model_call(**dict(zip(self.input_names, batch, strict=True)))

    def _scale_of(self, pairs: _Pairs) -> Tensor:
        """Return s ``(B,)`` or ``()`` in the features' dtype, detached."""
        if self.temperature is not None:
            return pairs.image.new_full((), self.temperature)
        if pairs.scale is None or pairs.scale.numel() not in (1, pairs.image.shape[0]):
            returned = "no scale" if pairs.scale is None else f"a scale of shape {tuple(pairs.scale.shape)}"
            raise InvalidInputError(
                f"The model gave {returned}. Expected (image_features, text_features, scale) with one positive "
                "number as scale, or CLIPModelOutput(temperature=...)."
            )
        scale = pairs.scale.detach().to(pairs.image).reshape(-1)
        refuse_invalid(
            scale > 0, scale, expected="a positive factor (exp of the model's parameter)", what="scale"
        )
        return scale.squeeze() if scale.numel() == 1 else scale


def _pairs_of(answer: Any) -> _Pairs:
    """Return features and scale of a model output, the features in float32 or wider."""
    get: Callable[[str], Any]
    get = answer.get if isinstance(answer, Mapping) else lambda key: getattr(answer, key, None)
    names = next((keys for keys in _FEATURE_KEYS if isinstance(get(keys[0]), Tensor)), None)
    if names is not None:
        image, text, scale = get(names[0]), get(names[1]), get("logit_scale")
    elif isinstance(answer, tuple | list) and len(answer) >= 2:
        image, text, scale = (*answer, None)[:3]
    else:
        image = text = scale = None
    if not isinstance(image, Tensor) or not isinstance(text, Tensor):
        raise InvalidInputError(
            f"The model gave a {type(answer).__name__}. Expected (image_features, text_features, scale), or "
            "a mapping or object with image_features and text_features, or image_embeds and text_embeds."
        )
    if image.dim() != 2 or image.shape != text.shape:
        shapes = shape_texts(image.shape, text.shape)
        raise InvalidInputError(
            f"The model gave features of shapes {shapes[0]} (image) and {shapes[1]} (text). Expected the same "
            "(B, d) for both."
        )
    image, text = precise(image, what="The image features"), precise(text, what="The text features")
    if scale is not None and not isinstance(scale, Tensor):
        scale = torch.tensor(float(scale), device=image.device)
    return _Pairs(image, text, scale)
