"""What the processes of the tests in this folder do; imported by each of them."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_runs import LanguageModel, random_states
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trak_lite import Attributor, Rows, TRAKer, cli, verify
from trak_lite.core import meeting
from trak_lite.core import ranks as internals
from trak_lite.core.ranks import Ranks, joined_ranks
from trak_lite.errors import RankError
from trak_lite.gradient_computers import self_check
from trak_lite.store import ZarrFeatureStore, _grid

N, R, M, BATCH = 140, 32, 5, 14
IMAGES, LM = "image_classification", "causal_language_modeling"


def small_chunks(rows: int = R) -> None:
    """Let tables of this process have chunks of so many rows."""
    _grid._FEWEST_ROWS_PER_COMMIT = rows
    _grid.CHEAP_CHUNK_BYTES = rows // 256 << 20


def ranks_of(store: Any, rank: int, group: Any = None) -> Any:
    """Return one of two ranks by itself, which talks to a key-value store."""
    made = internals._TorchRanks(store, rank, 2, number=1)
    made._group = group
    return made


def quick_process() -> None:
    """Use one thread, and leave it to the system when files come to the disk: a kill leaves the page cache alone."""
    torch.set_num_threads(1)
    small_chunks()
    self_check._SAMPLES_AT_FIRST = 2
    self_check.is_scheduled = lambda number: number % 64 == 0
    os.fsync = lambda fd: None  # type: ignore[assignment]


def answered(answers: Any, job: Callable[..., Any], *arguments: Any) -> None:
    """Do a job in a process of its own, and answer with what it returns."""
    quick_process()
    answers.put(job(*arguments))


def as_rank(
    answers: Any, rank: int, size: int, ports: tuple[int, int], job: Callable[..., Any], given: Sequence[Any]
) -> None:
    """Do a job as torchrun would have it done, and answer with what it returns or raises."""
    quick_process()
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "WORD_PORT": str(ports[1])}
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
    try:
        answers.put((rank, ("done", job(*given))))
    except Exception as error:
        traceback.print_exc()
        answers.put((rank, (type(error).__name__, str(error))))


def own_rank() -> int:
    return int(os.environ["RANK"])


words: list[Any] = []


def word() -> Any:
    """Return a key-value store in which ranks leave word for each other, whatever their speed."""
    if not words:
        size, port = int(os.environ["WORLD_SIZE"]), int(os.environ["WORD_PORT"])
        words.append(dist.TCPStore("127.0.0.1", port, size, own_rank() == 0, timeout=timedelta(seconds=300)))
    return words[0]


# --- Model, data, results --------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data(count: int, seed: int = 0, task: str = IMAGES) -> TensorDataset:
    """Rows of which the first ones do not depend on their number."""
    generator = torch.Generator().manual_seed(seed)
    if task == LM:
        ids = torch.randint(5, (count, 4), generator=generator)
        return TensorDataset(ids, ids)
    return TensorDataset(torch.randn(300, 4, generator=generator)[:count], torch.arange(count) % 3)


def states(net: nn.Module, count: int) -> list[dict[str, Tensor]]:
    return random_states(lambda: net, count)


def attributor(path: Any, net: nn.Module | None = None, **changes: Any) -> Attributor:
    settings = {"proj_dim": 16, "dtype": "float32", "progress": False, "task": IMAGES, **changes}
    return Attributor(network() if net is None else net, path=path, batch_size=BATCH, **settings)


def contents(path: Path | str) -> dict[str, np.ndarray]:
    """Return every column of a finished store."""
    with ZarrFeatureStore.open(path) as store:
        tables = [(name, store.open_table(name)) for name in store.table_names()]
        return {f"{name}/{c.name}": table.read(c.name) for name, table in tables for c in table.spec.columns}


# --- Jobs of processes that know nothing of each other ---------------------------------------------------


def featurize_together(path: str, count: int = N, workers: int = 0) -> int:
    """Featurize two checkpoints and score; return how many rows of features this process wrote."""
    rows = data(count) if workers == 0 else Subset(data(count), range(count))  # tensors need no worker
    made = attributor(path)
    loader = DataLoader(rows, batch_size=BATCH, num_workers=workers)
    summary = made.featurize(loader, states(network(), 2), append=True)
    made.score(data(M, 2), f"of-{count}")
    return summary.rows_written


class Told(Dataset[Any]):
    """Data that call a function before a row is loaded."""

    def __init__(self, before: Callable[[int], Any]) -> None:
        self.before, self.rows = before, data(N)

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        self.before(row)
        return self.rows[row]


def held_up(path: str, at: int) -> int:
    """Featurize two checkpoints, make a file at a row and stop for ever; return how many rows this process wrote."""

    def hold(row: int) -> None:
        if row == at:
            Path(f"{path}.held").touch()
            time.sleep(3600)

    return attributor(path).featurize(Rows(Told(hold), name="data"), states(network(), 2)).rows_written


# --- Jobs of ranks ---------------------------------------------------------------------------------------


def featurize_and_score(path: str, task: str, count: int, checkpoints: int) -> tuple[int, bool]:
    """Return the rows that this rank wrote, and whether it left a process group behind."""
    net = LanguageModel(5, 3) if task == LM else network()
    made = attributor(path, net, task=task)
    files = [Path(f"{path}-{number}", "final.pt") for number in range(checkpoints)]  # all have one name
    for file, state in zip(files, states(net, checkpoints), strict=True):
        file.parent.mkdir(exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        torch.save(state, own)
        own.replace(file)
    written = made.featurize(data(count, task=task), files).rows_written
    made.score(data(M, 2, task), "dense")
    made.score(data(M, 2, task), "top", dense=False, k=4)
    return written, dist.is_initialized()


def best_rows(path: str) -> list[list[int]]:
    """Return the best and the worst rows of scores that are not kept."""
    scores = attributor(path).score(data(M, 2), "top", dense=False, k=4)
    return [scores.top(4, sign=sign).indices.tolist() for sign in ("helpful", "harmful")]


def score_by_index(path: str) -> tuple[int, list[list[int]]]:
    """Return the number of candidates of an index, which the call measures, and the rows that it finds."""
    made = attributor(path)
    made.featurize(data(300), states(network(), 1))
    scores = made.score(data(160, 3), "new", dense=False, k=4, recall=0.9)
    return scores.settings["candidates"], scores.top(4).indices.tolist()


def with_own_group(path: str, meeting: str, backend: str, size: int) -> tuple[int, bool]:
    dist.init_process_group(backend, init_method=meeting, rank=own_rank(), world_size=size)
    found = featurize_and_score(path, IMAGES, N, 1)
    dist.destroy_process_group()
    return found


class SlowOnRank0(Dataset[Any]):
    """Data that take their time on rank 0 once rank 1 has rows of its own, and may be broken on rank 1.

    The first batch is as fast as any: a rank that waits for the table would be waited for.
    """

    def __init__(self, rank_1: Callable[[], float]) -> None:
        self.rank_1 = rank_1
        word()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        value = 1.0
        if own_rank() == 1:
            if index >= BATCH:
                word().set("rank 1 loads", "")
            value = self.rank_1()
        elif index >= BATCH:
            word().wait(["rank 1 loads"])
            time.sleep(0.02)
        return torch.full((4,), value), index % 3


def lost_file() -> float:
    word().set("rank 1 loads", "")
    raise OSError("no such file")


def not_a_number() -> float:
    return torch.nan


def featurize_slowly(path: str, rank_1: Callable[[], float]) -> None:
    attributor(path).featurize(Rows(SlowOnRank0(rank_1), name="slow"))


def shown_bar(path: str, output: str) -> int:
    """Return the rows that this rank wrote; its bar goes to a file."""
    with open(f"{output}-{own_rank()}", "w") as sys.stderr:
        made = attributor(path, progress=True)
        return made.featurize(Rows(SlowOnRank0(lambda: 1.0), name="slow")).rows_written


def dropped(path: str) -> list[str]:
    """Return the tables that are left when rank 1 comes late to what both drop, and reads it before."""
    made = attributor(path)
    made.featurize(data(40), states(network(), 2))
    made.score(data(M, 2), "test")
    drops = (lambda: made.drop_scores("test"), lambda: made.drop_checkpoint("ckpt-1"))
    for drop in drops:
        time.sleep(0.5 * own_rank())
        with ZarrFeatureStore.open(path) as store:
            assert "targets/test/ckpt-1" in store.table_names()
            assert ("scores/test" in store.table_names()) == (drop is drops[0])
        drop()
    with ZarrFeatureStore.open(path) as store:
        return store.table_names()


def with_other_weights(path: str) -> None:
    torch.manual_seed(own_rank())
    attributor(path, network()).featurize(data(N))


def other_calls(path: str) -> None:
    made = attributor(path)
    made.featurize(data(N)) if own_rank() == 0 else made.score(data(M))


def columns_of_rank_0(path: str) -> None:
    columns = {"source": ["web"] * N} if own_rank() == 0 else None
    attributor(path).featurize(data(N), states(network(), 1), columns=columns)


def columns_with_other_values(path: str) -> None:
    columns = {"source": [f"web-{own_rank()}"] * N}
    attributor(path).featurize(data(N), states(network(), 1), columns=columns)


def in_another_folder(path: str) -> None:
    folder = Path(path).parent / f"of-{own_rank()}"
    folder.mkdir()
    os.chdir(folder)
    attributor("a.zarr").featurize(data(N), states(network(), 1))


def with_a_part_of_the_data(path: str) -> None:
    attributor(path).featurize(data(N - own_rank()), states(network(), 1))


def with_another_seed(path: str) -> None:
    attributor(path, seed=own_rank()).featurize(data(N), states(network(), 1))


def ends(owner: int | None = None) -> None:
    """Import the package as a script of this rank does, or as a process that ``owner`` started, and end."""
    os.environ |= {} if owner is None else {"TRAK_LITE_RANK_PROCESS": str(owner)}
    registered: list[Callable[[], Any]] = []
    atexit.register = registered.append
    importlib.reload(meeting)
    for call in registered:
        call()


def featurized_with_ddp(path: str, computer: str) -> tuple[int, bool, bool]:
    """Featurize a model with buffers that DDP wraps: 100 rows are no equal number of batches for two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{path}-meeting", rank=own_rank(), world_size=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    wrapped = nn.parallel.DistributedDataParallel(net)
    rows = attributor(path, wrapped, gradient_computer=computer).featurize(data(100)).rows_written
    return rows, wrapped.will_sync_module_buffers(), wrapped.require_backward_grad_sync


def trained_with_ddp(path: str) -> int:
    """Featurize the checkpoints of a generator that trains a model in DDP."""
    dist.init_process_group("gloo", init_method=f"file://{path}-meeting", rank=own_rank(), world_size=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    wrapped = nn.parallel.DistributedDataParallel(net)
    inputs, labels = data(100).tensors

    def training() -> Iterator[dict[str, Tensor]]:
        for start in (0, 50):
            wrapped.train()
            for own in (slice(first + own_rank(), first + 20, 2) for first in (start, start + 20)):
                wrapped.zero_grad()
                nn.functional.cross_entropy(wrapped(inputs[own]), labels[own]).backward()
                torch.optim.SGD(wrapped.parameters(), 0.1).step()
            wrapped(inputs[:8])  # all ranks have the buffers of rank 0 before it
            yield {name: value.clone() for name, value in wrapped.state_dict().items()}

    return attributor(path, wrapped).featurize(data(100), training()).rows_written


def scores_differently(path: str, *of_ranks: dict[str, Any]) -> None:
    """Score with the arguments of this rank; the targets are drawn by a seed."""
    made, asked = attributor(path), of_ranks[own_rank()]
    made.featurize(data(40), states(network(), 1))
    more = {"checkpoints": states(network(), 1)} if "seed" in asked else {}
    made.score(data(M, asked.pop("seed", 2)), "test", **asked, **more)


def scored_by_rank_0(path: str, calls: int, own_group: bool) -> None:
    """Make calls on both ranks, then end rank 1 and score on rank 0; an agent serves the store of the ranks."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if own_group:
        dist.init_process_group("gloo", init_method=f"file://{path}-meeting", rank=own_rank(), world_size=2)
    made = attributor(path)
    for _ in range(calls):
        made.featurize(data(N), states(network(), 1))
    made.score(data(M, 2)) if own_rank() == 0 else ends()


def starts_another_process(path: str) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if own_rank() == 1:
        ends(owner=os.getpid() + 1)
        time.sleep(0.5)
    attributor(path).featurize(data(N), states(network(), 1))


def rank_0_comes_late_with_other_weights(path: str) -> None:
    torch.manual_seed(own_rank())
    made, told = attributor(path, network()), word()
    told_of("a first call", lambda ranks: None)  # rank 0 serves the store in which ranks meet
    if own_rank() == 0:
        told.wait(["rank 1 waits"])
    else:
        internals.__dict__["_PATIENCE"] = 0.5  # seconds until it says that it waits
        warnings.warn = lambda *said, **more: told.set("rank 1 waits", "")
    made.featurize(data(N))


def only_on_rank_0(path: str) -> int | None:
    made = attributor(path, distributed=False)
    return made.featurize(data(N), states(network(), 1)).rows_written if own_rank() == 0 else None


RECIPE = """
import os
import time
from pathlib import Path
from rank_cases import IMAGES, N, data, network

def build_model():
    return network()

def train_data():
    return data(N)

def target_data():
    return data(5, 2)

def train(indices, seed):
    Path(__file__).with_name(f"trained-by-{os.environ['RANK']}").touch()
    time.sleep(0.3)
    return network().state_dict()
"""


def run_of_command_line(path: str) -> int:
    """Train a recipe, featurize and score. Return the exit status."""
    folder = Path(path).parent
    if own_rank() == 0:
        (folder / "recipe.py").write_text(RECIPE)
        config = {"recipe": "recipe.py", "path": path, "checkpoints": str(folder / "trained"), "task": IMAGES}
        (folder / "run.yaml").write_text(json.dumps({**config, "proj_dim": 16, "score": {"name": "new"}}))
        word().set("config", "")
    word().wait(["config"])
    return cli.main(["run", str(folder / "run.yaml")])


def verified(path: str) -> dict[str, Any]:
    """Return the verdict, and how many models this rank trained for it."""
    trained = []

    def train(rows: Any, seed: int) -> nn.Module:
        trained.append(seed)
        torch.manual_seed(len(rows) + int(rows[0]))
        return network()

    made = attributor(path)
    made.featurize(data(40), states(network(), 1))
    verdict = verify(made.score(data(M, 2), "test"), train, data(M, 2), budget=4, train_id="none")
    return verdict.to_json() | {"trained": len(trained)}


def featurized_by_both(path: str) -> None:
    """Featurize one model id of a TRAKer on both ranks: rank 1 begins when rank 0 holds rows."""
    net = network()
    made = TRAKer(net, IMAGES, N, save_dir=path, proj_dim=16, use_half_precision=False)
    made.load_checkpoint(net.state_dict(), model_id=3)
    if own_rank() == 1:
        word().wait(["rank 0 holds rows"])
    batch = tuple(tensor[:BATCH] for tensor in data(N).tensors)
    try:
        made.featurize(batch, num_samples=BATCH)
        word().set("rank 0 holds rows", "")
        word().wait(["rank 1 was refused"])
    finally:
        word().set("rank 1 was refused", "")


# --- Jobs without a store --------------------------------------------------------------------------------


def drawn(rank: int) -> Tensor:
    return torch.rand(1000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def talks() -> tuple[list[int], list[bytes], bool]:
    """Return the ranks in the order in which they are merged, sums of numbers that round, made twice, on rank 0, and
    whether the script can make and use a process group of its own meanwhile."""
    with joined_ranks("list") as ranks:
        merged = ranks.merged([ranks.rank], lambda low, high: low + high)
    sums = []
    for _ in range(2):
        with joined_ranks("sum") as ranks:
            tensor = drawn(ranks.rank)
            ranks.add_up([tensor])
            sums.append(tensor.numpy().tobytes() if ranks.rank == 0 else b"")
    with joined_ranks("a call") as ranks:
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return merged, sums, ranks.merged(1, lambda low, high: low + high) == total.item()


def told_of(name: str, call: Callable[[Ranks], Any]) -> str:
    """Return the first line of the error that a call ends with."""
    try:
        with joined_ranks(name) as ranks:
            call(ranks)
    except (RankError, LookupError) as error:
        return str(error).splitlines()[0]
    return "no error"


def fail(*_: Any) -> None:
    raise LookupError("not there")


def fails_again_after_a_failure() -> list[str]:
    """Return what ended two calls of this rank; each fails on rank 1, and rank 0 waits for it."""
    first = told_of("first", lambda ranks: fail() if ranks.rank == 1 else ranks.merged(0, max))
    return [first, told_of("second", lambda ranks: ranks.agree("number", str(ranks.rank)))]


def fails_when_others_are_done() -> list[str]:
    """Return what ended two calls of this rank; rank 0 fails in the first when rank 1 has done its part of it."""

    def first(ranks: Ranks) -> None:
        if ranks.rank == 0:
            word().wait(["rank 1 is done"])
            fail()
        word().set("rank 1 is done", "")

    word()
    return [told_of("first", first), told_of("second", lambda ranks: ranks.merged(0, max))]


def fails_beside_a_busy_rank() -> list[str]:
    """Return what ended the call of this rank: rank 2 fails, rank 0 looks for it only when rank 1 was told."""

    def call(ranks: Ranks) -> None:
        if ranks.rank == 1:
            ranks.merged(0, max)
        if ranks.rank == 0:
            word().wait(["rank 1 was told"])
            while True:
                ranks.watch()
        fail()

    word()
    said = told_of("a call", call)
    if own_rank() == 1:
        word().set("rank 1 was told", "")
    return [said]


def lost_in_a_sum() -> None:
    reduce = dist.ProcessGroupGloo.reduce

    def dying(*given: Any) -> None:
        reduce(*given)
        os._exit(0)

    with joined_ranks("sum") as ranks:
        tensor = torch.ones(3)
        ranks.add_up([tensor])
        if ranks.rank == 1:
            dist.ProcessGroupGloo.reduce = dying
        ranks.add_up([tensor])
        ranks.add_up([tensor])
