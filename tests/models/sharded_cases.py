"""What the ranks of ``test_sharded_models`` do; imported by each of them."""

import contextlib
import copy
import traceback
import warnings
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from rank_cases import contents, quick_process, small_chunks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import Dataset, TensorDataset
from versioned import Old, Versioned

from trak_lite import Attributor, Rows, TRAKer, token_scores, verify
from trak_lite.errors import TrakLiteError
from trak_lite.gradient_computers import (
    HookGradientComputer,
    IterativeGradientComputer,
    register_gradient_rule,
)
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.models.borrowing import borrow_model  # no public call moves a model on a machine of one device

__all__ = ["contents", "small_chunks"]  # from here, too
N, BATCH = 70, 32
"""Rows of more than two commits of 32, so that ranks have something to share, and unevenly."""


class Divided(nn.Module):
    """Ends in an operation whose rule wants the parameter itself."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, width))

    def forward(self, x):
        return x / self.scale


class Hidden(torch.autograd.Function):
    """A product that no operation of torch shows."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Ruled(nn.Module):
    """Known by a gradient rule."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, width))

    def forward(self, x):
        return Hidden.apply(x, self.weight)


@register_gradient_rule(Ruled)
def ruled_gradient(module, args, kwargs, grad):
    return {"weight": grad * args[0]}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        out = self.mlp(x)
        out += x
        return out


class Transformer(nn.Module):
    """Tokens to classes, or to the next token. Widths that no number of ranks divides."""

    def __init__(self, classes=3, *, causal=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(17, 10), nn.Embedding(5, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, classes)
        self.causal = causal

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x if self.causal else x.mean(1))


class Sorting(nn.Module):
    """Sorts rows by value before a part that is sharded on its own."""

    def __init__(self, *, sorts=True):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)
        self.sorts = sorts

    def forward(self, x):
        x = self.inner(x)
        if not self.sorts:
            return self.outer(x)
        order = x.detach()[:, 0].argsort()
        return self.outer(x[order])[order.argsort()]


def transformer():
    torch.manual_seed(1)
    return Transformer()


def mlp():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 7), nn.Tanh(), Divided(7), nn.Linear(7, 6), Ruled(6), nn.Tanh(), nn.Linear(6, 3)
    )
    model[3].weight.requires_grad_(False)
    return model


MODELS = {"mlp": mlp, "transformer": transformer}


def data(kind, count=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = {"mlp": partial(torch.randn, count, 4), "transformer": partial(torch.randint, 17, (count, 5))}[
        kind
    ](generator=generator)
    return TensorDataset(inputs, torch.arange(count) % 3)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model, **options):
    """Shard every block and the rest, as one does for training."""
    options.setdefault("mesh", mesh())
    parts = model.blocks if isinstance(model, Transformer) else model.children()
    for part in [part for part in parts if list(part.parameters())]:
        fully_shard(part, **options)
    return fully_shard(model, **options)


def attributor(model, path, **settings):
    defaults = {"proj_dim": 16, "projector": "two_sided", "dtype": "float32", "progress": False}
    defaults["batch_size"] = BATCH
    return Attributor(model, "image_classification", path, **{**defaults, **settings})


def run(model, kind, path, checkpoints=None, **settings):
    """Featurize and score; return how many rows of features this rank wrote."""
    made = attributor(model, path, **settings)
    written = made.featurize(data(kind), checkpoints).rows_written
    made.score(data(kind, 5, seed=2))
    return written


def answer(answers, rank, world, file, job, arguments):
    """Run a job as one rank; answer with the rank and what the job returned, or its error."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "(?s).*heuristic to set the device_id")  # where there are GPUs
    quick_process()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        answers.put((rank, job(*arguments)))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


# ---- Jobs
def featurize_both(folder, states):
    """Featurize and score with two checkpoints of full state dicts; return how many rows this rank wrote."""
    models = {kind: shard(MODELS[kind]()) for kind in states}
    return sum(run(models[kind], kind, f"{folder}/{kind}.zarr", files) for kind, files in states.items())


def featurize_copies(folder):
    """Shard over two of four ranks, and keep copies of the shards on the other two."""
    two_by_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))
    run(shard(transformer(), mesh=two_by_two), "transformer", f"{folder}/copies.zarr")


def featurize_in_other_ways(folder):
    """Keep parameters gathered until the backward pass, and project in other ways."""
    model = shard(transformer(), reshard_after_forward=False)
    run(model, "transformer", f"{folder}/sketch.zarr", projector="countsketch")
    settings = {"projector": "rademacher", "normalize": "unit", "store_norms": True}
    run(model, "transformer", f"{folder}/norms.zarr", **settings)


def rows_missing(path, sharded):
    """Return how many rows of a finished store a model writes, whole or sharded."""
    return run(shard(mlp()) if sharded else mlp(), "mlp", path)


class Failing(Dataset):
    """Rows of which those from number 50 on cannot be read."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index >= 50:
            raise OSError(f"row {index} is gone")
        return self.rows[index]


def featurize_rest(path, sharded):
    model = shard(mlp()) if sharded else mlp()
    return attributor(model, path).featurize(Rows(data("mlp"), name="rows")).rows_written


def break_off(path, sharded):
    model = shard(mlp()) if sharded else mlp()
    try:
        attributor(model, path).featurize(Rows(Failing(data("mlp")), name="rows"))
    except (OSError, TrakLiteError):  # on the rank that reads it, and on those that are told
        return
    raise AssertionError("no row was gone")


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs, labels = data("mlp", 8, seed=5 + dist.get_rank()).tensors
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    return [p.full_tensor().detach() for p in model.parameters()]


def train_after(use):
    """Return whether a use of a model leaves the next training step's bits and the flags as they are."""
    plain, used = shard(mlp()), shard(mlp())
    plain(data("mlp").tensors[0])  # leaves the outermost parameters gathered, as a use may find them
    used(data("mlp").tensors[0])
    use(used)
    models = used, shard(mlp())
    flags, expected = ([(p.requires_grad, type(p)) for p in model.parameters()] for model in models)
    same = all(torch.equal(a, b) for a, b in zip(trained(plain), trained(used), strict=True))
    return [same, flags == expected and used.training]


def run_with_other_weights(model):
    state = {name: p + 1 for name, p in mlp().state_dict().items()}
    run(model, "mlp", None, [state], grad_wrt=["3.weight", "0.bias"])


class Broken(HookGradientComputer):
    """Fails in the middle of a backward pass."""

    def stream_gradients(self, batch, consume):
        return super().stream_gradients(batch, _fail)


def fail_halfway(model):
    with contextlib.suppress(KeyError, TrakLiteError):
        run(model, "mlp", None, gradient_computer=Broken)
        raise AssertionError("nothing failed")


def _fail(block):
    raise KeyError(block.name)


def gathered_at_once():
    """Return for every block of gradients its name, and the parts of the model that are gathered at that moment."""
    model = shard(transformer())
    found = []

    def look(block):
        whole = [p for p in model.blocks.named_parameters() if not isinstance(p[1], DTensor)]
        found.append((block.name, sorted({int(name.partition(".")[0]) for name, _ in whole})))

    computer = HookGradientComputer(model, ImageClassificationModelOutput())
    computer.stream_gradients(data("transformer", 4).tensors, look)
    return found


def a_row_is_infinite(path):
    """Featurize rows of which one is infinite; return the error."""
    rows = data("mlp")
    rows.tensors[0][40] = float("inf")
    try:
        attributor(shard(mlp()), path).featurize(rows)
    except TrakLiteError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def explain_language_model(path, sharded=False):
    """Featurize, fit and score with the kernel of language models."""
    torch.manual_seed(1)
    model = Transformer(17, causal=True)
    model = shard(model) if sharded else model
    ids = data("transformer", 20).tensors[0]
    settings = {"proj_dim": 4, "dtype": "float32", "progress": False, "batch_size": BATCH}
    made = Attributor(model, "causal_language_modeling", path, **settings)
    made.featurize(TensorDataset(ids, ids))
    scores = made.score(TensorDataset(ids[:3], ids[:3]))
    tokens = token_scores(scores, TensorDataset(ids, ids), [4])[4]
    np.testing.assert_allclose(tokens.sum(0), scores.rows([4])[0], rtol=1e-3, atol=1e-4)


def coverage(model):
    found = HookGradientComputer(model, ImageClassificationModelOutput()).explain(data("mlp").tensors)
    return [f"{line.name} {line.how} {line.why}" for line in found.parameters]


def checkpoints_found():
    """Return of how many checkpoints rows were written, and found; weights are whole, sharded, and of other shards."""
    model, other = shard(mlp()), mlp()
    with torch.no_grad():
        for p in other.parameters():
            p += 1
    states = [{name: p.clone() for name, p in other.state_dict().items()}, shard(other).state_dict()]
    states.append({name: p.redistribute(placements=[Replicate()]) for name, p in states[1].items()})
    states.append(model.state_dict())
    return _found(model, [None, *states])


def versions_found():
    """The same for whole and sharded weights of a module with a version, the present one, none and an old one."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(Versioned(4, 3)) for _ in range(2))
    before = nn.Sequential(Old(4, 3))
    before.load_state_dict({"0.weight": -other[0].weight, "0.bias": other[0].bias})
    states = [other.state_dict(), dict(other.state_dict()), before.state_dict()]
    states = copy.deepcopy(states)
    fully_shard(other, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return _found(model, [*states, other.state_dict()])


def _found(model, checkpoints):
    summary = attributor(model, None).featurize(data("mlp", 8), checkpoints)
    return summary.rows_written // 8, summary.rows_found // 8


def refused():
    """Return what each thing that is not supported says, by what it has to say."""
    task = ImageClassificationModelOutput()
    batch = data("mlp", 4).tensors
    sharded = shard(mlp())
    with torch.device("meta"):
        elsewhere = mlp()

    def stream(model, **settings):
        return HookGradientComputer(model, task, **settings).stream_gradients(batch, lambda _: None)

    def two_meshes():
        model = mlp()
        fully_shard(model[0], mesh=mesh())
        other = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("copy", "part"))
        return fully_shard(model, mesh=other)

    def fsdp1():
        return FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))

    def mixed(**dtypes):
        return fully_shard(mlp(), mesh=mesh(), mp_policy=MixedPrecisionPolicy(**dtypes))

    def by_columns():
        return parallelize_module(mlp(), mesh(), {"0": ColwiseParallel()})

    iterative, first = IterativeGradientComputer, dist.get_rank() == 0
    of_one_rank = "selects, sorts" if first else "The samples of another rank were refused"
    cases = {
        "gradient_computer='functional'": lambda: attributor(sharded, None, gradient_computer="functional"),
        "IterativeGradientComputer": lambda: attributor(sharded, None, gradient_computer=partial(iterative)),
        "Use gradient_computer='hook'": lambda: iterative(sharded, task).stream_gradients(batch, print),
        "use a smaller batch_size": lambda: stream(sharded, chunk_size=2),
        "Use Attributor": lambda: TRAKer(sharded, "image_classification", 4),
        "verify was called": lambda: verify(scored(sharded), print, data("mlp", 8)),
        "Use device='auto'": lambda: borrow_model(sharded, torch.device("meta")).__enter__(),
        "Use method='Fisher', or score with a whole model": lambda: scored(sharded, method="EKFAC"),
        "FSDP1": lambda: attributor(fsdp1(), None),
        "tensor or expert parallelism": lambda: attributor(by_columns(), None),
        "another device mesh": lambda: attributor(two_meshes(), None),
        "meta device": lambda: attributor(shard(elsewhere), None),
        "MixedPrecisionPolicy runs": lambda: stream(mixed(param_dtype=torch.bfloat16)),
        "MixedPrecisionPolicy converts a result": lambda: stream(mixed(output_dtype=torch.bfloat16)),
        "selects, sorts or moves rows depending on values": lambda: stream(shard(Sorting())),
        of_one_rank: lambda: stream(shard(Sorting(sorts=first))),
        "the number of rows per sample differs from the first batch": stream_ragged,
        "does not fit Sequential": lambda: run(shard(mlp()), "mlp", None, [{"a": torch.ones(1)}]),
        "fully_shard on the module itself": lambda: stream(_ruled_parts()),
    }
    return {said: _message(case) for said, case in cases.items()}


class Ragged(nn.Module):
    """Has two rows of every sample, or one less of the last one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.num_missing = 0

    def forward(self, x):
        rows = self.layer(torch.cat([x, x[self.num_missing :]]))
        first, second = rows[: len(x)], rows[len(x) :]
        return first + nn.functional.pad(second, (0, 0, self.num_missing, 0))


def stream_ragged():
    model = shard(Ragged())
    computer = HookGradientComputer(model, ImageClassificationModelOutput())
    for model.num_missing in (0, 1):
        computer.stream_gradients(data("mlp", 4).tensors, lambda _: None)


def _message(case):
    try:
        case()
    except TrakLiteError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def scored(model, **settings):
    made = attributor(model, None)
    made.featurize(data("mlp", 8))
    return made.score(data("mlp", 8), **settings)


class RuledOuter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x)


@register_gradient_rule(RuledOuter)
def ruled_outer(module, args, kwargs, grad):
    return {"inner.weight": (args[0][:, None], grad[:, None]), "inner.bias": grad}


def _ruled_parts():
    model = nn.Sequential(RuledOuter())
    fully_shard(model[0].inner, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def looked_at():
    """Return what each of these says, for one start of the ranks."""
    uses = [run_with_other_weights]
    if hasattr(FSDPModule, "reset_iter_state"):  # torch below 2.13 cannot forget a pass that was not ended
        uses.append(fail_halfway)
    return {
        "training": {use.__name__: train_after(use) for use in uses},
        "gathered": gathered_at_once(),
        "coverage": (coverage(shard(mlp())), coverage(mlp())),
        "checkpoints": checkpoints_found(),
        "versions": versions_found(),
        "refused": refused(),
    }
