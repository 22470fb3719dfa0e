"""Parts ``replays``, ``gradients``, ``simple_cnn``, ``projection`` and ``scoring``: wall time, between idle states."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

from benchmarks import bench_gradients, bench_projection, models
from benchmarks.bench_gradients import ENGINES, TOLERANCE, largest_error
from benchmarks.bench_projection import METHODS, Inputs, on_factors, on_matrix, on_vector
from benchmarks.gpu.bench import Bench, Call, NotHere, milliseconds, ratio
from trak_lite import Attributor
from trak_lite.core.devices import full_float32, model_pass
from trak_lite.featurizing.passes import compute_features
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer, collect_gradients
from trak_lite.linalg.gram import GramAccumulator
from trak_lite.linalg.kernel import KernelSettings, factorise
from trak_lite.linalg.products import score_block
from trak_lite.modelout_functions import CallableModelOutput
from trak_lite.projectors import CountSketchProjector, RademacherProjector, _kernels
from trak_lite.projectors.sketch import base as sketches
from trak_lite.types import FeatureLayout

Case = Callable[[Bench], dict[str, Any]]

# ---------------------------------------------------------------- gradients

MODELS = ("cnn", "resnet9_gn", "vit", "gpt", "mlp", "lstm", "gpt768")
GRADIENT_ENGINES = ("stream", "dense", "collect", "functional", "opacus", "expanded weights", "backpack")


def gradient_cases(small: bool) -> dict[str, Case]:
    names = ("cnn", "mlp") if small else MODELS
    return {
        f"{engine}, {name}": partial(gradients, name, engine) for engine in GRADIENT_ENGINES for name in names
    }


def gradients(name: str, engine_name: str, bench: Bench) -> dict[str, Any]:
    """Measure one engine on one model in turn with plain forward and backward passes of the same batch.

    Plain passes use full float32, as our computers do, and once more torch's settings, which allow TF32.
    """
    torch.manual_seed(0)
    make_model, make_batch, output = bench_gradients.CASES[name]
    model = make_model().eval().to(bench.device)
    plain = make_model().eval().to(bench.device)
    plain.load_state_dict(model.state_dict())
    batch = tuple((part[:3] if bench.small else part).to(bench.device) for part in make_batch())
    try:
        engine = ENGINES[engine_name](model, output)
    except ImportError as error:
        raise NotHere(str(error)) from error
    with model_pass(plain):
        wrong = largest_error(engine, (plain, batch, output))
    if wrong is None or wrong > TOLERANCE:
        return {"fails": f"wrong gradients: relative error {wrong}"}
    params = list(plain.parameters())

    def plain_pass() -> None:
        torch.autograd.grad(output(plain, batch).sum(), params)

    calls: dict[str, Call] = {
        "engine": _in_float32(plain, partial(engine, batch)),
        "plain": _in_float32(plain, plain_pass),
    }
    if name != "lstm":  # cuDNN's backward pass is for train mode
        calls["plain, torch's settings"] = plain_pass
    times = bench.interleaved(calls)
    return {
        "ratio": ratio(times, "engine", "plain"),
        "ms": milliseconds(times),
        "peak_mib": bench.peak_mib(calls["engine"]),
        "plain_peak_mib": bench.peak_mib(calls["plain"]),
        "error": wrong,
    }


def _in_float32(model: nn.Module, call: Call) -> Call:
    """Return the call in the surroundings of our computers' passes: full float32 products, no recurrent cuDNN."""

    def run() -> None:
        with model_pass(model):
            call()

    return run


# ---------------------------------------------------------------- replays


def replay_cases(small: bool) -> dict[str, Case]:
    return {name: partial(replays, name) for name in (("cnn", "mlp") if small else MODELS)}


def replays(name: str, bench: Bench) -> dict[str, Any]:
    """Measure a pass to its features, its replay with and without a CUDA graph, and a plain pass of the same batch.

    Replays include their comparisons with the pass, on their schedule. ``equal`` compares the features of a graph;
    ``pass_repeats`` says whether the pass itself has the same bits twice, which cuDNN does not promise.
    """
    torch.manual_seed(0)
    make_model, make_batch, output = bench_gradients.CASES[name]
    model = make_model().eval().to(bench.device)
    batch = tuple((part[:3] if bench.small else part).to(bench.device) for part in make_batch())
    rows, params = np.arange(len(batch[0])), list(model.parameters())

    def features(to_come: float, graphs: bool) -> tuple[HookGradientComputer, Callable[[], Tensor]]:
        computer, projector = (
            HookGradientComputer(model, CallableModelOutput(output)),
            CountSketchProjector(512),
        )
        computer._replays._can_capture = graphs
        settings = {"model_id": 0, "rows": rows, "what": "benchmark", "to_come": to_come}
        return computer, lambda: compute_features(computer, projector, batch, **settings)[0]

    def plain_pass() -> None:
        torch.autograd.grad(output(model, batch).sum(), params)

    made = {
        "pass": features(0, False),
        "replay": features(math.inf, False),
        "graph": features(math.inf, True),
    }
    for _, call in made.values():
        for _ in range(12):  # the recording, its first comparisons, and the capture
            call()
    calls = {way: call for way, (_, call) in made.items()} | {"plain": _in_float32(model, plain_pass)}
    times = bench.interleaved(calls)
    kinds = {way: next(iter(computer._replays._kinds.values())) for way, (computer, _) in made.items()}
    return {
        "ms": milliseconds(times),
        "to_plain": {way: ratio(times, way, "plain") for way in made},
        "equal": torch.equal(made["graph"][1](), made["pass"][1]()),
        "pass_repeats": torch.equal(made["pass"][1](), made["pass"][1]()),
        "operations": getattr(kinds["replay"].recording, "num_operations", None),
        "replayed": kinds["replay"].recording is not None,
        "captured": kinds["graph"].graph is not None,
        "refusal": kinds["graph"].refusal,
        "peak_mib": {way: bench.peak_mib(call) for way, call in calls.items()},
    }


# ---------------------------------------------------------------- the network of the functorch notebook


def simple_cnn_cases(small: bool) -> dict[str, Case]:
    return {"batch of 64": simple_cnn}


def simple_cnn(bench: Bench) -> dict[str, Any]:
    """Measure per-sample gradients of the loss: the notebook's loop and its vmap, and our computers."""
    torch.manual_seed(0)
    model = models.SimpleCNN().eval().to(bench.device)
    count = 4 if bench.small else 64
    images = torch.randn(count, 1, 28, 28, device=bench.device)
    labels = torch.randint(10, (count,), device=bench.device)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loop() -> list[Any]:
        """The notebook's ``compute_sample_grads``."""
        kept = list(model.parameters())
        samples = zip(images.split(1), labels.split(1), strict=True)
        return [torch.autograd.grad(nn.functional.nll_loss(model(x), y), kept) for x, y in samples]

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.nll_loss(functional_call(model, weights, image[None]), label[None])

    of_samples = vmap(grad(loss), in_dims=(None, 0, 0))

    def negative_loss(call: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return -nn.functional.nll_loss(call(batch[0]), batch[1], reduction="none")

    task = CallableModelOutput(negative_loss)
    functional, hook = FunctionalGradientComputer(model, task), HookGradientComputer(model, task)
    in_tf32 = HookGradientComputer(model, task, float32_products="tf32")
    batch = (images, labels)
    plain = list(model.parameters())
    calls: dict[str, Call] = {
        "naive loop": loop,
        "vmap, as the notebook": lambda: of_samples(params, images, labels),
        "functional": lambda: collect_gradients(functional, batch),
        "hook": lambda: collect_gradients(hook, batch),
        "hook, streamed": lambda: hook.stream_gradients(batch, lambda _: None),
        "hook, streamed, TF32": lambda: in_tf32.stream_gradients(batch, lambda _: None),
        "plain pass": lambda: torch.autograd.grad(negative_loss(model, batch).sum(), plain),
    }
    times = bench.interleaved(calls)
    slowest = {name: ratio(times, "naive loop", name) for name in calls}
    return {
        "ms": milliseconds(times),
        "faster_than_loop": slowest,
        "goal": "hook at least 40x",
        "batch": count,
    }


# ---------------------------------------------------------------- projection

PROJ_DIMS = (8192, 2048, 512)
FAST_JL = "traker, fast_jl"


def projection_cases(small: bool) -> dict[str, Case]:
    dims = (64, 32) if small else PROJ_DIMS
    variant = dims[1]
    return {
        **{f"countsketch float32, K={k}": partial(sketch, k, torch.float32) for k in dims},
        **{f"{FAST_JL} float32, K={k}": partial(fast_jl, k, torch.float32) for k in dims},
        f"countsketch bfloat16, K={variant}": partial(sketch, variant, torch.bfloat16),
        f"countsketch by torch operations, K={variant}": partial(
            sketch, variant, torch.float32, kernels=False
        ),
        **{f"factors of {t}, K={variant}": partial(factors, variant, t) for t in (1, 64)},
        **{f"rademacher {way}, K={variant}": partial(rademacher, variant, way) for way in ("tf32", "ieee")},
        f"{FAST_JL} float16, K={variant}": partial(fast_jl, variant, torch.float16),
    }


def drawn(bench: Bench, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return 64 gradients of 10^8 entries."""
    size = 100 if bench.small else 10**4
    return replace(Inputs.draw(size**2, size**2, bench.device, dtype), shape=(size, size))


def against_the_floor(bench: Bench, inputs: Inputs, calls: dict[str, Call]) -> dict[str, Any]:
    """Measure calls in turn with reading the same bytes, and with copying them in pieces to the same memory."""
    rows = inputs.rows.view(-1)
    target = torch.empty_like(rows[: 1 << 28])
    pieces = rows.split(len(target))

    def copy() -> None:
        for piece in pieces:
            target[: len(piece)].copy_(piece)

    with torch.no_grad():
        times = bench.interleaved({"read": rows.sum, "copy": copy, **calls})
        peaks = {name: bench.peak_mib(call) for name, call in calls.items()}
    found = milliseconds(times)
    floor = min(found["read"], found["copy"] / 2)
    return {
        "ms": found,
        "floor_ms": floor,
        "to_floor": {name: found[name] / floor for name in calls},
        "gb_per_s": {name: 1e-6 * rows.nbytes / found[name] for name in found},
        "peak_mib": peaks,
        "entries": inputs.rows.shape[1],
    }


def sketch(proj_dim: int, dtype: torch.dtype, bench: Bench, *, kernels: bool = True) -> dict[str, Any]:
    """Measure the default projector on gradients of a vector and of a matrix parameter.

    Without kernels, a hundredth of the entries is measured: torch's operations take seconds.
    """
    inputs = (
        drawn(bench, dtype)
        if kernels
        else replace(Inputs.draw(10**6, 10**8, bench.device), shape=(10**3, 10**3))
    )
    devices = _kernels._DEVICES
    if not kernels:
        _kernels._DEVICES = frozenset()
    try:
        calls = {
            "vector": METHODS[bench_projection.OURS](inputs, proj_dim),
            "matrix": on_matrix(inputs, proj_dim),
        }
        found = against_the_floor(bench, inputs, calls)
    finally:
        _kernels._DEVICES = devices
    by_triton = kernels and sketches.triton_kernels(inputs.rows[:, :8]) is not None
    return {**found, "by": "triton" if by_triton else "torch", "goal": "K=8192: at most 12 ms on an H100"}


def factors(proj_dim: int, positions: int, bench: Bench) -> dict[str, Any]:
    """Measure gradients of the same matrix in factors, which are smaller than the gradients."""
    size = 100 if bench.small else 10**4
    inputs = Inputs(torch.empty(1, 1, device=bench.device), (size, size), 1.0)
    times = bench.interleaved({"factors": on_factors(CountSketchProjector, positions)(inputs, proj_dim)})
    return {"ms": milliseconds(times), "entries": size**2}


def rademacher(proj_dim: int, precision: str, bench: Bench) -> dict[str, Any]:
    """Measure the dense projection on fewer entries, and scale it."""
    entries = 10**3 if bench.small else 10**7
    inputs = Inputs.draw(entries, 10**8, bench.device)
    make = partial(RademacherProjector, precision=precision)
    times = bench.interleaved({"rademacher": on_vector(make)(inputs, proj_dim)})
    scaled = {name: value * inputs.stand_for for name, value in milliseconds(times).items()}
    return {"ms": scaled, "scaled_from": entries}


def fast_jl(proj_dim: int, dtype: torch.dtype, bench: Bench) -> dict[str, Any]:
    """Measure the original's projection on CUDA."""
    bench.needs_cuda("fast_jl")
    try:
        import fast_jl as _  # noqa: F401 - traker imports it late
        from trak.projectors import CudaProjector, ProjectionType
    except ImportError as error:
        raise NotHere(str(error)) from error
    if proj_dim % 512:
        raise NotHere("fast_jl needs a multiple of 512")
    inputs = drawn(bench, dtype)
    projector = CudaProjector(
        inputs.rows.shape[1], proj_dim, 0, ProjectionType.rademacher, bench.device, max_batch_size=32
    )
    return against_the_floor(bench, inputs, {"fast_jl": lambda: projector.project(inputs.rows, model_id=0)})


# ---------------------------------------------------------------- scoring

WIDTH = 2048


def scoring_cases(small: bool) -> dict[str, Case]:
    return {
        "one target": partial(products, 1),
        "512 targets": partial(products, 512),
        "4096 targets": partial(products, 4096),
        "gram, float64": grams,
        "factorise": factorisation,
        "a whole call of score": whole_score,
    }


def some_rows(bench: Bench, count: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(count, 64 if bench.small else WIDTH, device=bench.device).to(dtype)


def products(targets: int, bench: Bench) -> dict[str, Any]:
    """Score float16 rows, beside reading them and beside torch's products in float32, TF32 and bfloat16."""
    rows = some_rows(bench, 512 if bench.small else (1 << 20 if targets == 1 else 1 << 16))
    columns = some_rows(bench, min(targets, 16) if bench.small else targets, torch.float32)
    wide, narrow = rows.float() if len(columns) > 1 else None, columns.bfloat16()
    brain = rows.bfloat16()
    out = torch.zeros(len(rows), len(columns), device=bench.device)
    calls: dict[str, Call] = {"score_block": lambda: score_block(rows, columns, out=out), "read": rows.sum}
    if wide is not None:
        calls |= {
            "float32 product": lambda: _product(wide, columns, "ieee", bench),
            "tf32 product": lambda: _product(wide, columns, "tf32", bench),
        }
    calls["bfloat16 product"] = lambda: brain @ narrow.T
    times = milliseconds(bench.interleaved(calls))
    operations = 2e-9 * rows.numel() * len(columns)
    return {
        "ms": times,
        "tflops": {name: operations / ms for name, ms in times.items() if name != "read"},
        "gb_per_s": {name: 1e-6 * rows.nbytes / times[name] for name in ("score_block", "read")},
        "rows": list(rows.shape),
        "targets": len(columns),
    }


def _product(a: Tensor, b: Tensor, precision: str, bench: Bench) -> Tensor:
    if precision == "ieee":
        with full_float32(bench.device):
            return a @ b.T
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return a @ b.T
    finally:
        torch.set_float32_matmul_precision(before)


def gram(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the gram matrix of rows."""
    sums = GramAccumulator(FeatureLayout.joint(rows.shape[1]), rows.device)
    sums.add(rows, weights)
    return sums.result()[0]


def grams(bench: Bench) -> dict[str, Any]:
    """Sum a gram matrix from float16 rows, beside one product in float64."""
    rows = some_rows(bench, 512 if bench.small else 1 << 15)
    wide, weights = rows.double(), torch.ones(len(rows), device=bench.device)
    calls: dict[str, Call] = {
        "gram": lambda: gram(rows, weights),
        "product": lambda: _product(wide.T, wide.T, "ieee", bench),
    }
    times = milliseconds(bench.interleaved(calls))
    return {
        "ms": times,
        "tflops": {name: 2e-9 * rows.numel() * rows.shape[1] / ms for name, ms in times.items()},
    }


def factorisation(bench: Bench) -> dict[str, Any]:
    """Damp and factorise a gram matrix."""
    rows = some_rows(bench, 512 if bench.small else 2 * WIDTH)
    matrix = gram(rows)
    given = {"num_rows": len(rows), "layout": FeatureLayout.joint(rows.shape[1])}
    times = bench.interleaved({"factorise": lambda: factorise([matrix], KernelSettings(), **given)})
    return {"ms": milliseconds(times), "width": rows.shape[1]}


def whole_score(bench: Bench) -> dict[str, Any]:
    """Score from a store on disk: the first target set also sums and factorises the gram matrix."""
    torch.manual_seed(0)
    count, targets, batch = (64, 8, 32) if bench.small else (1 << 16, 512, 4096)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(bench.device)
    data = TensorDataset(torch.randn(count, 128), torch.randint(10, (count,)))
    others = [TensorDataset(torch.randn(targets, 128), torch.randint(10, (targets,))) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        made = Attributor(
            model,
            "image_classification",
            f"{folder}/run.zarr",
            proj_dim=64 if bench.small else WIDTH,
            layout="joint",
            batch_size=batch,
            progress=False,
        )
        featurized = bench.seconds(lambda: made.featurize(data))
        first, second = (
            bench.seconds(lambda other=other, name=name: made.score(other, name=name))
            for name, other in zip("ab", others, strict=True)
        )
        row_bytes = made.row_bytes
    return {
        "featurize_s": featurized,
        "first_s": first,
        "second_s": second,
        "second_gb_per_s": 1e-9 * count * row_bytes / second,
        "rows": count,
        "targets": targets,
    }
