"""GPT-2 fine-tuned on WikiText-2: find the train paragraphs behind a target paragraph.

transformers and datasets download model and data on first use. ``source: stand-in`` uses a GPT-2 of two narrow
layers with random weights, and random tokens, to try the whole run in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

Source = Literal["hub", "stand-in"]
NAME, TEXTS = "openai-community/gpt2", ("Salesforce/wikitext", "wikitext-2-raw-v1")
NUM_STAND_IN, STAND_IN_VOCABULARY = 24, 100


class Chunks(Dataset):
    """Token ids ``(N, T)`` as input rows of a causal language model of transformers."""

    def __init__(self, ids: Tensor) -> None:
        """Store the ids."""
        self.ids = ids

    def __len__(self) -> int:
        """Return N."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one row."""
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@cache
def token_ids(source: Source, part: str, length: int) -> Tensor:
    """Return the tokens of a part of the texts as rows ``(N, length)``."""
    if source == "stand-in":
        generator = torch.Generator().manual_seed(["train", "validation"].index(part))
        return torch.randint(STAND_IN_VOCABULARY, (NUM_STAND_IN, length), generator=generator)
    from datasets import load_dataset

    texts = load_dataset(*TEXTS, split=part)["text"]
    flat = tokenizer()("".join(texts))["input_ids"]
    return torch.tensor(flat[: len(flat) // length * length]).view(-1, length)


@cache
def tokenizer():  # noqa: ANN201  # transformers is imported on use only
    """Return the tokenizer of GPT-2."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(NAME)


def build_model(source: Source = "hub") -> nn.Module:
    """Return the released GPT-2.

    Args:
        source: ``hub``, or ``stand-in`` for a tiny model and random tokens.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    if source == "stand-in":
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=STAND_IN_VOCABULARY, n_embd=16, n_layer=2, n_head=2))
    return GPT2LMHeadModel.from_pretrained(NAME)


def train_data(source: Source = "hub", length: int = 512, num_train: int | None = None) -> Chunks:
    """Return chunks of the train part.

    Args:
        source: ``hub``, or ``stand-in`` for a tiny model and random tokens.
        length: Tokens of a chunk.
        num_train: Number of chunks, from the first; null uses all.
    """
    return Chunks(token_ids(source, "train", length)[:num_train])


def target_data(source: Source = "hub", length: int = 512, num_targets: int | None = 100) -> Chunks:
    """Return chunks of the validation part.

    Args:
        source: ``hub``, or ``stand-in`` for a tiny model and random tokens.
        length: Tokens of a chunk.
        num_targets: Number of chunks, from the first; null uses all.
    """
    return Chunks(token_ids(source, "validation", length)[:num_targets])


def train(
    indices: NDArray[np.int64],
    seed: int,
    *,
    source: Source = "hub",
    length: int = 512,
    num_train: int | None = None,
    epochs: int = 3,
    batch: int = 8,
) -> Iterator[dict[str, Tensor]]:
    """Fine-tune on some chunks and yield the weights after every epoch.

    Args:
        indices: Rows of the train data.
        seed: Seed of the order.
        source: ``hub``, or ``stand-in`` for a tiny model and random tokens.
        length: Tokens of a chunk.
        num_train: Number of chunks.
        epochs: Passes over the chunks.
        batch: Chunks per step.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = train_data(source, length, num_train).ids[torch.as_tensor(indices)]
    model = build_model(source).to(device).train()
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for _ in range(epochs):
        for rows in torch.randperm(len(ids)).split(batch):
            chunk = ids[rows].to(device)
            optimizer.zero_grad()
            model(input_ids=chunk, labels=chunk).loss.backward()
            optimizer.step()
        yield model.state_dict()


def render(index: int, *, source: Source = "hub", length: int = 512) -> str:
    """Return the text of a train row."""
    return _text(token_ids(source, "train", length)[index], source)


def render_target(index: int, *, source: Source = "hub", length: int = 512) -> str:
    """Return the text of a target."""
    return _text(token_ids(source, "validation", length)[index], source)


def _text(ids: Tensor, source: Source) -> str:
    return " ".join(map(str, ids.tolist())) if source == "stand-in" else tokenizer().decode(ids)
