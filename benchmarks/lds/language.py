"""The language-model settings: a byte-level GPT, trained on a part of a text source, then fine-tuned on other parts.

``python`` is code of Python's standard library, ``topics`` the English of Python's reference (``pydoc_data.topics``),
``docstrings`` those of scikit-learn.
The weights before fine-tuning are in ``benchmarks/data`` as float16, so that every machine fine-tunes the same model.

Run:  python -m benchmarks.lds.language {python, topics, docstrings}   (trains these weights again: minutes)
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import models
from benchmarks.lds import data

CHUNK = 128
NUM_TRAIN, NUM_TARGETS = 600, 150
FINE_TUNED_ON = (
    "bisect heapq colorsys textwrap cmd sched shlex fnmatch getopt calendar csv difflib statistics fractions graphlib "
    "pprint queue stat tabnanny timeit"
)
TRAINED_ON = (
    "argparse ast configparser contextlib copy dataclasses datetime doctest enum functools gettext inspect locale "
    "optparse os pathlib pdb pickle platform random shutil smtplib socket subprocess tarfile tempfile threading "
    "traceback typing zipfile"
)
FINE_TUNED_ON_DOCSTRINGS = "mixture semi_supervised svm tree"
TRAINED_ON_DOCSTRINGS = (
    "cluster decomposition ensemble linear_model metrics model_selection neighbors preprocessing"
)
STEPS, BATCH, LEARNING_RATE = 3000, 16, 4e-3
TOPICS_BEFORE = 0.6
"""Share of the topics that the model is trained on before it is fine-tuned."""


def base(source: str) -> Path:
    """Return the file of the weights before fine-tuning."""
    return Path(__file__).parents[1] / "data" / f"lds_{source}_lm_base.npz"


def module_text(module: str) -> bytes:
    """Return the source of a module of the standard library; of a package, its ``__init__``."""
    folder = Path(sysconfig.get_path("stdlib"))
    file = folder / f"{module}.py"
    return (file if file.exists() else folder / module / "__init__.py").read_bytes()


def topics() -> list[bytes]:
    """Return the topics of Python's reference in a fixed random order."""
    from pydoc_data.topics import topics as texts

    order = np.random.default_rng(9).permutation(len(texts))
    return [texts[name].encode() for name in np.array(sorted(texts))[order]]


@cache
def python_chunks() -> data.Data:
    """Return train chunks of bytes ``(N, 128)``, their labels (the same), and targets ``(M, 128)`` with labels."""
    return _chunks([module_text(module) for module in FINE_TUNED_ON.split()], NUM_TRAIN)


@cache
def topics_chunks() -> data.Data:
    """Return chunks of the topics that the model has not seen before, N = 450."""
    texts = topics()
    return _chunks(texts[int(TOPICS_BEFORE * len(texts)) :], 450)


def docstrings(package: str) -> bytes:
    """Return the docstrings of a package of scikit-learn, without those of its tests."""
    import sklearn

    files = sorted((Path(sklearn.__file__).parent / package).rglob("*.py"))
    trees = [ast.parse(file.read_bytes()) for file in files if "tests" not in file.parts]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n".join(text for text in found if text).encode()


@cache
def docstring_chunks() -> data.Data:
    """Return chunks of docstrings of packages that the model has not seen before, N = 400."""
    return _chunks([docstrings(package) for package in FINE_TUNED_ON_DOCSTRINGS.split()], 400)


def _chunks(texts: list[bytes], num_train: int) -> data.Data:
    cut = [text[i : i + CHUNK] for text in texts for i in range(0, len(text) - CHUNK + 1, CHUNK)]
    order = np.random.default_rng(0).permutation(len(cut))[: num_train + NUM_TARGETS]
    ids = torch.tensor([list(cut[i]) for i in order])
    return ids[:num_train], ids[:num_train], ids[num_train:], ids[num_train:]


def gpt() -> nn.Module:
    """Return an untrained GPT over bytes of width 64 with 2 layers and 4 heads."""
    model = models.GPT(256, CHUNK, 64, 2, 4)
    model.head = nn.Linear(64, 256, bias=False)  # not tied: every tool takes a plain linear layer
    nn.init.normal_(model.tokens.weight, std=0.2)
    nn.init.normal_(model.positions.table.weight, std=0.05)
    return model


def pretrained_gpt(source: str) -> nn.Module:
    """Return the model before fine-tuning."""
    model = gpt()
    with np.load(base(source)) as stored:
        model.load_state_dict({name: torch.from_numpy(stored[name]).float() for name in stored.files})
    return model


def next_byte_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    """Train the model that is fine-tuned later."""
    source = sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if source == "topics":
        texts = topics()
        parts = texts[: int(TOPICS_BEFORE * len(texts))]
    elif source == "python":
        parts = [module_text(module) for module in TRAINED_ON.split()]
    else:
        parts = [docstrings(package) for package in TRAINED_ON_DOCSTRINGS.split()]
    text = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).long()
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS)
    for step in range(STEPS):
        starts = torch.randint(len(text) - CHUNK, (BATCH, 1))
        ids = text[starts + torch.arange(CHUNK)]
        optimizer.zero_grad()
        loss = next_byte_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: {loss.item():.3f}", flush=True)
    np.savez_compressed(
        base(source), **{name: p.detach().half().numpy() for name, p in model.named_parameters()}
    )
    chunks = {"python": python_chunks, "topics": topics_chunks, "docstrings": docstring_chunks}
    inputs, _, targets, _ = chunks[source]()
    with torch.no_grad():
        values = [next_byte_loss(model(ids), ids).item() for ids in (inputs, targets)]
    print("before fine-tuning: train {:.3f}, targets {:.3f} nats per byte".format(*values))


if __name__ == "__main__":
    main()
