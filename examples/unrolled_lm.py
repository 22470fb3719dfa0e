"""A fine-tuned GPT-2: predict what the fine-tuning without some rows would change, exactly to first order.

A small GPT-2 of transformers learns to predict the bytes of some modules of Python's standard library, and is then
fine-tuned with LoRA (peft) and AdamW on pieces of twelve others. ``unrolled`` replays the fine-tuning backwards for
held-out pieces: the derivative of the log-probability of each by the weight of every piece. The test: the same
fine-tuning without the ten of 240 pieces that help a target most.

Adam is made smooth by ``eps_root=1e-4`` under its root, with a larger learning rate in return. Measured with Python
3.11: metasmoothness 0.999, and a median error of 17 % of the predicted changes of six targets. ``eps_root=1e-8`` with
learning rate 2e-3 has metasmoothness 0.962, and errors of a factor of two.

Run:  python examples/unrolled_lm.py       (a minute of CPU time; needs the extra hf)
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from trak_lite import Rows
from trak_lite.modelout_functions import CausalLanguageModelingModelOutput, ModelCall
from trak_lite.unrolled import AdamW, Recipe, unrolled

BEFORE = ["argparse", "ast", "configparser", "copy", "datetime", "gettext", "inspect", "locale", "pathlib"]
BEFORE += ["pickle", "shutil", "tempfile", "zipfile"]
MODULES = ["calendar", "colorsys", "csv", "difflib", "fractions", "heapq"]
MODULES += ["mailbox", "sched", "statistics", "tarfile", "textwrap", "timeit"]
LENGTH = 64  # bytes of a piece
ONE_OF = 24  # one of so many train rows is left out


class Pieces(Dataset):
    """Bytes ``(N, 64)`` as input rows of a causal language model of transformers."""

    def __init__(self, ids: Tensor) -> None:
        """Store the bytes."""
        self.ids = ids

    def __len__(self) -> int:
        """Return N."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one row."""
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def pieces_of(module: str) -> Tensor:
    """Return the pieces of a module in a fixed random order, ``(n, 64)``."""
    source = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_bytes()
    pieces = torch.frombuffer(bytearray(source), dtype=torch.uint8)[: len(source) // LENGTH * LENGTH].long()
    return pieces.view(-1, LENGTH)[
        torch.from_numpy(np.random.default_rng(0).permutation(len(source) // LENGTH))
    ]


def loss(model: ModelCall | nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the bytes of every piece."""
    logits = model(input_ids=batch["input_ids"]).logits
    losses = nn.functional.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")
    return losses.mean(1)


def pretrained(steps: int) -> nn.Module:
    """Return a GPT-2 with two narrow layers that was trained on other modules."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    ids = torch.cat([pieces_of(module) for module in BEFORE])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = ids[torch.randint(len(ids), (16,))]
        optimizer.zero_grad()
        loss(model, {"input_ids": batch, "labels": batch}).mean().backward()
        optimizer.step()
    return model


def adapted(base: nn.Module) -> Callable[[int], nn.Module]:
    """Return a function that gives the model to fine-tune, with the same weights in every call with a seed.

    LoRA's weights alone require grad, so they alone are trained.
    """

    def build(seed: int) -> nn.Module:
        lora = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        return get_peft_model(copy.deepcopy(base), lora)

    return build


@torch.no_grad()
def log_probabilities(model: nn.Module, pieces: Pieces) -> NDArray[np.float64]:
    """Return log p of every piece, ``(M,)``."""
    batch = {"input_ids": pieces.ids, "labels": pieces.ids}
    return CausalLanguageModelingModelOutput().evaluate(ModelCall(model), batch).output.double().numpy()


def main(pretraining: int = 400, rows_per_module: int = 20, epochs: int = 3) -> float:
    """Return the median relative error of the predicted changes."""
    per_module = [pieces_of(module) for module in MODULES]
    train = Pieces(torch.cat([pieces[1 : 1 + rows_per_module] for pieces in per_module]))
    held_out = Pieces(torch.stack([pieces[0] for pieces in per_module]))

    steps = epochs * -(-len(train) // 16)
    recipe = Recipe(
        adapted(pretrained(pretraining)),
        loss,
        train,
        AdamW(lr=3e-3, eps_root=1e-4),
        batch_size=16,
        steps=steps,
        schedule=lambda step: min(1, (step + 1) / 5) * (1 - step / steps),
    )
    run = recipe.train()
    trained = sum(tensor.numel() for tensor in run.final.parameters.values())
    print(f"{run.num_steps} steps on {trained} LoRA weights; metasmoothness {run.metasmoothness():.3f}")
    before, after = (log_probabilities(model, held_out) for model in (recipe.model(0).eval(), run.model()))
    print(f"log p of a held-out piece: {before.mean():.1f} before, {after.mean():.1f} after fine-tuning")

    scores = unrolled(run, Rows(held_out, batch_size=len(held_out)), "causal_language_modeling")
    removed = len(train) // ONE_OF
    print(f"change of log p without the {removed} most helpful rows: predicted, actual")
    errors = []
    for target in range(0, len(held_out), 2):
        best = scores.top(removed, target=target)
        repeated = run.leave_out_fn(np.setdiff1d(np.arange(len(train)), best.indices), recipe.seed)
        predicted = -float(best.scores.sum())
        actual = float((log_probabilities(repeated, held_out) - after)[target])
        print(f"{MODULES[target]:10s} {predicted:+.3f} {actual:+.3f}")
        errors.append(abs(predicted / actual - 1))
    assert run.metasmoothness() > 0.99
    error = float(np.median(errors))
    print(f"median relative error {error:.0%}")
    assert error < 0.2
    return error


if __name__ == "__main__":
    main()
