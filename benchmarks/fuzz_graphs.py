"""A fuzzer of random module graphs: layers x engines x dtypes x batch sizes x settings, through all public calls.

Each case is featurized, scored, interrupted and resumed. Its stored rows are compared with the projected gradients
of a loop over samples in float64; these with finite differences; rows of batch size 1 with those of a larger batch;
scores with dense NumPy; a resumed store bit by bit; the model with its original state. With batches of one sample every
pass that can be recorded is, so that most of these rows are replays. A case is right, refused by a
named error, or WRONG. An error without a name, or a case that does not end, is WRONG too. A wrong case is repeated
with fewer layers and simpler settings while it stays wrong. The exit status is 1 if any case was wrong.

Run:  python -m benchmarks.fuzz_graphs --minutes 60 --seed 0       (writes benchmarks/results/fuzz_graphs.json)
      python -m benchmarks.fuzz_graphs --seed 0 --case 17          (one case again, with its traceback)
      python -m benchmarks.fuzz_graphs --spec '{...}'              (one case from the results)
"""

from __future__ import annotations

import copy
import json
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.architectures import class_margin, next_token_log_prob
from benchmarks.drawn_graphs import (
    KINDS,
    MIXING,
    NOT_DIFFERENTIABLE,
    NOT_IN_BFLOAT16,
    READS_AHEAD,
    WRONG_IN_TORCH,
    Graph,
    drawn_model,
    drawn_sample,
)
from benchmarks.measuring import parser_of, surroundings
from benchmarks.whole_path import (
    COLUMNS,
    Samples,
    Wrong,
    batch_in_float64,
    check_same_bits,
    check_scores,
    check_top,
    computed_gradients,
    every_pass_recorded,
    expected_scores,
    in_float64,
    left_as_it_was,
    loop_gradients,
    reference,
    relative_errors,
    require,
    resumed,
    slope,
    stored_table,
)
from trak_lite import Attributor, Rows, clip
from trak_lite.errors import TrakLiteError
from trak_lite.gradient_computers import GRADIENT_COMPUTERS, choose_gradient_computer, select_parameters
from trak_lite.methods import TRAK
from trak_lite.modelout_functions import resolve_task

Array = np.ndarray
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
LEVELS = {"int8": 127, "int4": 7}
SECONDS_PER_CASE = 120
MOST_WRONG = 30
MOST_SHRINKS = 60


@dataclass(frozen=True)
class Spec:
    """Everything that determines a case."""

    modality: str = "vector"
    layers: tuple[str, ...] = ()
    seed: int = 0
    task: str = "class"
    engine: str = "auto"
    dtype: str = "float64"
    rows: str = "float32"
    projector: str = "none"
    proj_dim: int = 8
    layout: str = "auto"
    method: str = "auto"
    normalize: str = "none"
    grad_wrt: str = "all"
    batch_size: int = 2
    train: int = 4
    targets: int = 2

    @property
    def mixes(self) -> bool:
        return any(name in MIXING for name in self.layers)

    @property
    def differentiable(self) -> bool:
        return not any(name in NOT_DIFFERENTIABLE for name in self.layers)


def drawn(seed: int, number: int) -> Spec:
    """Return the case with this number."""
    chance = random.Random(f"{seed}:{number}")
    modality = chance.choice(list(KINDS))
    known = [name for name in KINDS[modality] if modality != "language" or name not in READS_AHEAD]
    layers = [chance.choice(known) for _ in range(chance.choice((1, 2, 2, 3, 3, 4, 5)))]
    if chance.random() < 0.12:
        layers.insert(chance.randrange(len(layers) + 1), chance.choice(list(MIXING)))
    if not NOT_DIFFERENTIABLE.isdisjoint(
        layers
    ):  # no finite differences to say that torch's own backward is wrong
        layers = [name for name in layers if name not in WRONG_IN_TORCH]
    batch_size = chance.choice((1, 2, 3, 4, 5))
    task = "language" if modality == "language" else chance.choice(("class", "class", "f"))
    normalize = chance.choice(("none", "none", "none", "unit", "clip", "clip module"))
    methods = ["auto", "auto", "TRAK"]
    methods += ["GaussNewton"] * (task == "class") + ["Fisher"] * (task != "f" and normalize == "none")
    dtypes = ["float32", "float32", "float32", "float64", "float64"]
    dtypes += ["bfloat16"] * NOT_IN_BFLOAT16.isdisjoint(layers)
    return Spec(
        modality=modality,
        layers=tuple(layers),
        seed=chance.getrandbits(31),
        task=task,
        engine=chance.choice(("auto", "auto", "auto", "hook", "functional", "iterative")),
        dtype=chance.choice(dtypes),
        rows=chance.choice(("float32", "float32", "float16", "int8", "int4")),
        projector=chance.choice(
            ("countsketch", "gaussian", "rademacher", "mask", "grass", "two_sided", "none")
        ),
        proj_dim=chance.choice((4, 8, 16)),
        layout=chance.choice(("auto", "joint", "module")),
        method=chance.choice(methods),
        normalize=normalize,
        grad_wrt=chance.choice(("all", "all", "all", "layers.*", "head", "linear", "half")),
        batch_size=batch_size,
        train=batch_size + chance.randrange(1, 13),
        targets=chance.choice((1, 2, 3)),
    )


# --- What a case is made of ------------------------------------------------------------------------------


def own_f(call: Any, batch: Any) -> Tensor:
    """Return a custom f that every logit affects differently."""
    logits = call(batch[0]).flatten(1)
    weights = torch.arange(1, logits.shape[1] + 1, dtype=logits.dtype)
    return (logits * weights.cos() + (logits * weights).sin()).sum(1)


TASKS: dict[str, tuple[Any, Callable[[nn.Module, Any], Tensor]]] = {
    "class": ("image_classification", class_margin),
    "language": ("causal_language_modeling", next_token_log_prob),
    "f": (own_f, own_f),
}


def samples_of(spec: Spec, count: int, seed: int) -> Samples:
    """Return samples whose floating point entries have the model's dtype."""
    generator = torch.Generator().manual_seed(seed)

    def cast(part: Tensor) -> Tensor:
        return part.to(DTYPES[spec.dtype]) if part.is_floating_point() else part

    return Samples([tuple(map(cast, drawn_sample(spec.modality, generator))) for _ in range(count)])


def built(spec: Spec) -> Graph:
    with torch.random.fork_rng(devices=[]):
        return drawn_model(spec.modality, spec.layers, spec.seed).to(DTYPES[spec.dtype])


def chosen_parameters(spec: Spec, model: nn.Module) -> Any:
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    choices: dict[str, Any] = {
        "all": None,
        "layers.*": "layers.*" if any(name.startswith("layers.") for name in names) else "head.*",
        "head": "head.*",
        "linear": nn.Linear,
        "half": names[::2],
    }
    return choices[spec.grad_wrt]


def attributor_of(spec: Spec, path: Path, model: nn.Module | None = None) -> Attributor:
    model = built(spec) if model is None else model
    normalizations = {"unit": "unit", "clip": clip(0.5), "clip module": clip(0.2, scope="module")}
    return Attributor(
        model,
        TASKS[spec.task][0],
        path,
        proj_dim=spec.proj_dim,
        dtype=spec.rows,
        grad_wrt=chosen_parameters(spec, model),
        gradient_computer=spec.engine,
        projector=spec.projector,
        layout=spec.layout,
        # A few rows are fewer than features: TRAK as published has no inverse for them.
        method=TRAK(damping=None, layout="stored") if spec.method == "TRAK" else spec.method,
        normalize=normalizations.get(spec.normalize, "none"),
    )


# --- References ------------------------------------------------------------------------------------------


def normalized(spec: Spec, gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Divide each sample's gradient by the factor for its norm, or for the norm of the module's part."""
    if spec.normalize == "none":
        return dict(gradients)

    def group(name: str) -> str:
        return name.rpartition(".")[0] if spec.normalize == "clip module" else ""

    squares: dict[str, Array] = {}
    for name, grad in gradients.items():
        squares[group(name)] = squares.get(group(name), 0.0) + np.square(grad).reshape(len(grad), -1).sum(1)
    found = {}
    for name, grad in gradients.items():
        norms = np.sqrt(squares[group(name)])
        if spec.normalize == "unit":
            factors = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
        else:
            limit = 0.2 if spec.normalize == "clip module" else 0.5
            factors = np.minimum(1.0, np.divide(limit, norms, out=np.ones_like(norms), where=norms > 0))
        found[name] = grad * factors.reshape(-1, *(1,) * (grad.ndim - 1))
    return found


def arbitrated(
    spec: Spec, model: nn.Module, samples: Samples, gradients: dict[str, Array]
) -> tuple[dict[str, Array], bool]:
    """Return the loop's gradients, or finite differences if these show that torch's backward pass is wrong.

    torch's backward pass of one sample is wrong for some channels-last strides, so a loop is not always right.
    """
    if not spec.differentiable:
        return gradients, False
    output, precise = TASKS[spec.task][1], in_float64(model)
    generator = torch.Generator().manual_seed(1)
    wrong = False
    for row in range(len(samples)):
        sample = batch_in_float64(samples.batch([row]))
        direction = {
            name: torch.randn(grad.shape[1:], generator=generator, dtype=torch.float64)
            for name, grad in gradients.items()
        }
        expected = sum(float((direction[name].numpy() * grad[row]).sum()) for name, grad in gradients.items())
        scale = np.sqrt(sum(float(np.square(grad[row]).sum()) for grad in gradients.values()))
        wrong = wrong or abs(slope(precise, output, sample, direction, 1e-6) - expected) > 1e-4 * scale + 1e-7
    if not wrong:
        return gradients, False
    found = {name: grad.copy() for name, grad in gradients.items()}
    for row in range(len(samples)):
        sample = batch_in_float64(samples.batch([row]))
        coarse, fine = (differences(precise, output, sample, gradients, step) for step in (1e-5, 1e-7))
        size = np.sqrt(sum(float(np.square(part).sum()) for part in fine.values()))
        off = np.sqrt(sum(float(np.square(coarse[name] - fine[name]).sum()) for name in fine))
        if (
            off < 1e-5 * size + 1e-7
        ):  # else there is a kink between the points, which no engine is to blame for
            for name, part in coarse.items():
                found[name][row] = part
    error = relative_errors(reference.flatten(gradients), reference.flatten(found)).max()
    return (found, True) if error > 1e-4 else (gradients, False)


def differences(
    model: nn.Module,
    output: Callable[[nn.Module, Any], Tensor],
    sample: Any,
    like: Mapping[str, Array],
    step: float,
) -> dict[str, Array]:
    """Return the gradient of one sample by central differences."""
    found = {}
    for name, grad in like.items():
        found[name] = np.zeros(grad.shape[1:])
        for place in np.ndindex(grad.shape[1:]):
            one = torch.zeros(grad.shape[1:], dtype=torch.float64)
            one[place] = 1.0
            found[name][place] = slope(model, output, sample, {name: one}, step)
    return found


def storage_rounding(rows: str, values: Array) -> Array:
    """Return the largest difference ``(N,)`` of stored rows from their values that the format explains."""
    norms, root = np.linalg.norm(values, axis=1), np.sqrt(values.shape[1])
    if rows in LEVELS:  # half a step of each entry, in units of the largest one
        return 0.51 * np.abs(values).max(1) / LEVELS[rows] * root
    return 6e-4 * norms + 6e-8 * root if rows == "float16" else 2e-7 * norms


def own_rounding(spec: Spec, model: nn.Module, samples: Samples, gradients: Mapping[str, Array]) -> float:
    """Return the difference of a plain loop in the model's dtype from the reference."""
    if spec.dtype == "float64":
        return 1e-9
    singles = [samples.batch([row]) for row in range(len(samples))]
    own = copy.deepcopy(model)
    for name, p in own.named_parameters():
        p.requires_grad_(p.requires_grad or name in gradients)  # a choice of parameters may name frozen ones
    loop = reference.per_sample_gradients(own, TASKS[spec.task][1], singles, list(gradients))
    # After the norms were divided out: clipping module by module leaves what had the largest rounding the shortest.
    parts = [reference.flatten(normalized(spec, each)) for each in (loop, gradients)]
    error = float(relative_errors(*parts).max())
    return min(4 * error + 1e-5, 0.02) if spec.dtype == "float32" else 4 * error + 0.02


def float32_rounding(scores: Any, train: Mapping[str, Array]) -> Array:
    """Return the allowed error ``(N, M)`` of products of rows and preconditioned targets: 4 ulp of their lengths."""
    (term,) = scores.source.terms()
    targets = np.linalg.norm(term.targets.double().cpu().numpy(), axis=1)
    rows = np.linalg.norm(train["features"].astype(np.float64), axis=1)
    return 2.4e-7 * np.outer(rows * np.abs(train["out_to_loss"]), targets)


# --- One case --------------------------------------------------------------------------------------------


def check_engine(
    spec: Spec, model: nn.Module, samples: Samples, gradients: Mapping[str, Array], exact: bool
) -> str:
    """Compare an engine's gradients of a whole batch in float64 with the reference; return the engine's name."""
    task = resolve_task(TASKS[spec.task][0])
    precise, batch = in_float64(model), batch_in_float64(samples.batch(range(len(samples))))
    names = list(gradients)
    if spec.engine == "auto":
        name, _, computer = choose_gradient_computer(precise, task, batch, names)
    else:
        name, computer = spec.engine, GRADIENT_COMPUTERS[spec.engine](precise, task, grad_wrt=names)
    error = relative_errors(computed_gradients(computer, batch), reference.flatten(gradients)).max()
    require(
        error < (1e-8 if exact else 1e-4), f"gradients of the {name} engine are off by {error:.2g} in float64"
    )
    return name


def run_case(spec: Spec, folder: Path) -> dict[str, Any]:
    """Check one case; return counts for the summary.

    Raises:
        TrakLiteError: If it is refused.
        Wrong: If a number is wrong.
    """
    model = built(spec)
    train, targets = samples_of(spec, spec.train, 1), samples_of(spec, spec.targets, 2)
    names = list(select_parameters(model, chosen_parameters(spec, model)))
    loop = loop_gradients(model, TASKS[spec.task][1], train, names)
    gradients, torch_is_wrong = arbitrated(spec, model, train, loop)
    rounding = own_rounding(spec, model, train, gradients)

    path, alone, again = (folder / f"{name}.zarr" for name in ("run", "alone", "again"))
    engine = check_engine(spec, model, train, gradients, not torch_is_wrong)
    with left_as_it_was(model):
        attributor = attributor_of(spec, path, model)
        attributor.featurize(Rows(train, batch_size=spec.batch_size))
        found = stored_table(path, "ckpt-0")["features"].astype(np.float64)
        whole = {name: torch.from_numpy(grad) for name, grad in normalized(spec, gradients).items()}
        expected = attributor.projector.project(whole, 0).double().numpy()
        # A projection may make a row much shorter than its gradient: what is left of it has the gradient's rounding.
        lengths = np.sqrt(sum(np.square(g.numpy()).reshape(len(expected), -1).sum(1) for g in whole.values()))
        scale = np.maximum(np.linalg.norm(expected, axis=1), lengths)
        allowed = storage_rounding(spec.rows, expected) + scale * (rounding + 1e-4 * torch_is_wrong) + 1e-12
        error = np.linalg.norm(found - expected, axis=1)
        require(
            bool((error < allowed).all()),
            f"stored rows are off by {(error / allowed).max():.2g} x the rounding",
        )
        scores = attributor.score(Rows(targets, batch_size=spec.batch_size), name="targets")
        lost = float32_rounding(scores, stored_table(path, "ckpt-0"))
        check_scores(
            scores.numpy(), expected_scores(attributor, path, "targets/targets/ckpt-0"), rounding=lost
        )
        check_top(scores)
        scores.self_influence()
        with every_pass_recorded() as told:
            attributor_of(spec, alone, model).featurize(Rows(train, batch_size=1))
    one = stored_table(alone, "ckpt-0")["features"].astype(np.float64)
    error = np.linalg.norm(found - one, axis=1)
    require(
        bool((error < 2 * allowed).all()),
        f"rows of batch size 1 differ from those of {spec.batch_size} by {(error / allowed).max():.2g} x the rounding",
    )
    second = resumed(lambda: attributor_of(spec, again), train, again, batch_size=spec.batch_size)
    check_same_bits(path, again, ["ckpt-0"], COLUMNS)
    repeated = second.score(Rows(targets, batch_size=spec.batch_size), name="targets")
    require(scores.numpy().tobytes() == repeated.numpy().tobytes(), "scores are other bits after a resume")
    recorded = any("is recorded" in text for text in told)
    return {"engine": engine, "torch is wrong": torch_is_wrong, "recorded": recorded}


@dataclass(frozen=True)
class Outcome:
    """Result of a case."""

    result: str
    """``right``, ``refused`` or ``WRONG``."""
    kind: str = ""
    """Of a refusal, or of what is wrong."""
    message: str = ""
    facts: Mapping[str, Any] | None = None


def kind_of(error: BaseException) -> str:
    """Return the class of an error and the beginning of its message, without names and numbers."""
    text = re.sub(r"\[.*?\]|'[^']*'|\b[\w]+\.[\w.]+\b|-?\b\d[\w.+-]*", "_", str(error).split("\n")[0])
    return f"{type(error).__name__}: {text[:90]}"


class TooSlow(Exception):
    """Raised if a case does not end."""


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"not done after {SECONDS_PER_CASE} s")


def outcome_of(spec: Spec, *, show: bool = False) -> Outcome:
    """Run a case in a separate folder; unexpected warnings of trak_lite are errors."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS_PER_CASE)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome("right", facts=run_case(spec, Path(folder)))
    except TrakLiteError as error:
        if show:
            traceback.print_exc()
        return Outcome("refused", kind_of(error), str(error))
    except (Wrong, Exception) as error:
        if show:
            traceback.print_exc()
        return Outcome("WRONG", kind_of(error), str(error)[:500])
    finally:
        signal.alarm(0)


# --- Many cases ------------------------------------------------------------------------------------------


def plainer(spec: Spec) -> Iterator[Spec]:
    """Yield cases with one layer less, or with one setting at its default."""
    for place in range(len(spec.layers)):
        yield replace(spec, layers=spec.layers[:place] + spec.layers[place + 1 :])
    plain = Spec()
    for name in (
        "normalize",
        "grad_wrt",
        "method",
        "layout",
        "rows",
        "projector",
        "dtype",
        "batch_size",
        "targets",
    ):
        if getattr(spec, name) != getattr(plain, name):
            yield replace(spec, **{name: getattr(plain, name)})
    if spec.train > spec.batch_size + 1:
        yield replace(spec, train=spec.batch_size + 1)


def shrunk(spec: Spec) -> Spec:
    """Return the simplest case found that is also wrong."""
    tries = 0
    while True:
        for candidate in plainer(spec):
            tries += 1
            if tries > MOST_SHRINKS:
                return spec
            if candidate.train > candidate.batch_size and outcome_of(candidate).result == "WRONG":
                spec = candidate
                break
        else:
            return spec


def spec_from(text: str) -> Spec:
    fields = json.loads(text)
    return Spec(**{**fields, "layers": tuple(fields.get("layers", ()))})


class Campaign:
    """Counts the results of many cases."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.results: Counter[str] = Counter()
        self.engines: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        self.refusals: dict[str, dict[str, Any]] = {}
        self.wrong: list[dict[str, Any]] = []
        self.torch_is_wrong = self.recorded = 0

    def add(self, number: int, spec: Spec, outcome: Outcome) -> None:
        self.results[outcome.result] += 1
        self.layers.update(spec.layers)
        if outcome.facts is not None:
            self.engines[f"{spec.engine}: {outcome.facts['engine']}"] += 1
            self.torch_is_wrong += outcome.facts["torch is wrong"]
            self.recorded += outcome.facts["recorded"]
        if outcome.result == "refused":
            known = self.refusals.setdefault(
                outcome.kind,
                {"cases": 0, "of auto, without mixing": 0, "example": number, "message": outcome.message},
            )
            known["cases"] += 1
            known["of auto, without mixing"] += spec.engine == "auto" and not spec.mixes
        if outcome.result == "WRONG":
            least = shrunk(spec)
            self.wrong.append(
                {
                    "case": number,
                    "kind": outcome.kind,
                    "message": outcome.message,
                    "spec": asdict(spec),
                    "shrunk": asdict(least),
                }
            )
            print(f"WRONG {number}: {outcome.message}\n  {json.dumps(asdict(least))}", flush=True)

    def to_json(self, minutes: float) -> dict[str, Any]:
        return {
            **surroundings(),
            "seed": self.seed,
            "minutes": round(minutes, 1),
            "cases": self.results.total(),
            **{name: self.results[name] for name in ("right", "refused", "WRONG")},
            "torch's own backward pass is wrong": self.torch_is_wrong,
            "with a recorded pass": self.recorded,
            "right by engine (asked for: taken)": dict(self.engines.most_common()),
            "refusals": dict(sorted(self.refusals.items(), key=lambda item: -item[1]["cases"])),
            "wrong": self.wrong,
            "layers drawn": dict(sorted(self.layers.items())),
        }


def main() -> int:
    parser = parser_of(__doc__, "fuzz_graphs.json")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--case", type=int, help="run the case of this number alone, and write nothing")
    parser.add_argument("--spec", help="run this case alone, and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.spec is not None or options.case is not None:
        spec = drawn(options.seed, options.case) if options.spec is None else spec_from(options.spec)
        print(json.dumps(asdict(spec)))
        outcome = outcome_of(spec, show=True)
        print(outcome.result, outcome.message)
        return int(outcome.result == "WRONG")
    campaign, start, number = Campaign(options.seed), time.monotonic(), 0
    while time.monotonic() < start + 60 * options.minutes and len(campaign.wrong) < MOST_WRONG:
        spec = drawn(options.seed, number)
        campaign.add(number, spec, outcome_of(spec))
        number += 1
    found = campaign.to_json((time.monotonic() - start) / 60)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print({name: found[name] for name in ("cases", "right", "refused", "WRONG")})
    return int(bool(campaign.wrong))


if __name__ == "__main__":
    sys.exit(main())
