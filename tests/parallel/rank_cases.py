"""What the ranks of ``test_ranks`` do; imported by each of them."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import Dataset, TensorDataset

from trak_lite import Attributor, Rows, verify
from trak_lite.errors import RankError
from trak_lite.parallel import ranks as distributed
from trak_lite.parallel.ranks import joined_ranks
from trak_lite.store import ZarrFeatureStore, _grid

N, R, M, BATCH = 300, 32, 5, 7
LM = "causal_language_modeling"


def as_rank(
    answers: Any, rank: int, size: int, port: int, job: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Do a job as torchrun would have it done, and answer with what it returns or raises."""
    torch.set_num_threads(1)
    _grid._FEWEST_ROWS_PER_COMMIT = R
    os.fsync = lambda fd: None  # type: ignore[assignment]  # a kill leaves the page cache alone
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    try:
        answers.put((rank, "done", job(*arguments)))
    except Exception as error:
        traceback.print_exc()
        answers.put((rank, type(error).__name__, str(error)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class LanguageModel(nn.Module):
    """Says the next token from the sum of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))


def data(count: int, seed: int = 0, task: str = "image_classification") -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    if task == LM:
        ids = torch.randint(5, (count, 4), generator=generator)
        return TensorDataset(ids, ids)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


def states(net: nn.Module, count: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{name: torch.randn_like(v) for name, v in net.state_dict().items()} for _ in range(count)]


def attributor(path: Any, net: nn.Module | None = None, **changes: Any) -> Attributor:
    settings = {"proj_dim": 16, "dtype": "float32", "progress": False, **changes}
    task = settings.pop("task", "image_classification")
    return Attributor(network() if net is None else net, task, path, batch_size=BATCH, **settings)


# ------------------------------------------------------------------------ jobs


def featurize_and_score(path: str, task: str, count: int, checkpoints: int) -> tuple[int, bool]:
    """Return the rows that this rank wrote, and whether it left a process group behind."""
    net = LanguageModel() if task == LM else network()
    made = attributor(path, net, task=task)
    written = made.featurize(data(count, task=task), states(net, checkpoints)).rows_written
    made.score(data(M, 2, task), "dense")
    made.score(data(M, 2, task), "top", dense=False, k=4)
    return written, dist.is_initialized()


def score_again(path: str) -> list[list[int]]:
    top = attributor(path).score(data(M, 2), "top", dense=False, k=4).top(4)
    return top.indices.tolist()


def score_by_index(path: str) -> tuple[int, list[list[int]]]:
    """Return the number of candidates of an index, which the call measures, and the rows that it finds."""
    net = network()
    made = attributor(path, net)
    made.featurize(data(N), states(net, 2))
    scores = made.score(data(160, 3), "new", dense=False, k=4, recall=0.9)
    return scores.settings["candidates"], scores.top(4).indices.tolist()


def with_own_group(path: str, init_method: str, backend: str, rank: int, size: int) -> tuple[int, bool]:
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    found = featurize_and_score(path, "image_classification", N, 1)
    dist.destroy_process_group()
    return found


def keys() -> Any:
    """Return a key-value store in which ranks leave word for each other, whatever their speed."""
    found = distributed._meeting_place()
    assert found is not None
    return dist.PrefixStore("test", found[0])  # type: ignore[attr-defined]  # public, but not listed


class SlowOnRank0(Dataset[Any]):
    """Data that take their time on rank 0 once rank 1 has rows of its own, and may be broken on rank 1.

    The first batch is as fast as any: a rank that waits for the table would be waited for.
    """

    def __init__(self, rank_1: float) -> None:
        self.rank_1 = rank_1

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.environ["RANK"] == "1":
            if index >= BATCH:
                keys().set("rank 1 loads", "")
            return torch.full((4,), self.rank_1), index % 3
        if index >= BATCH:
            keys().wait(["rank 1 loads"])
            time.sleep(0.02)
        return torch.ones(4), index % 3


class LostOnRank1(SlowOnRank0):
    """Data whose files rank 1 does not find."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.environ["RANK"] == "1":
            keys().set("rank 1 loads", "")
            raise OSError("no such file")
        return super().__getitem__(index)


def one_cannot_read(path: str) -> None:
    attributor(path).featurize(LostOnRank1(1.0))


def dropped(path: str) -> list[str]:
    """Return the tables that are left when rank 1 comes late to what both drop, and reads it before."""
    made = attributor(path)
    made.featurize(data(40), states(network(), 2))
    made.score(data(M, 2), "test")
    drops = (lambda: made.drop_scores("test"), lambda: made.drop_checkpoint("ckpt-1"))
    for drop in drops:
        time.sleep(0.5 * int(os.environ["RANK"]))
        with ZarrFeatureStore.open(path) as store:
            assert "targets/test/ckpt-1" in store.table_names()
            assert ("scores/test" in store.table_names()) == (drop is drops[0])
        drop()
    with ZarrFeatureStore.open(path) as store:
        return store.table_names()


def one_fails(path: str) -> None:
    attributor(path).featurize(Rows(SlowOnRank0(torch.nan), name="slow"))


def with_other_weights(path: str) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    attributor(path, network()).featurize(data(N))


def other_calls(path: str) -> None:
    made = attributor(path)
    made.featurize(data(N)) if os.environ["RANK"] == "0" else made.score(data(M))


def columns_of_rank_0(path: str) -> None:
    columns = {"source": ["web"] * N} if os.environ["RANK"] == "0" else None
    attributor(path).featurize(data(N), states(network(), 1), columns=columns)


def scored_by_rank_0(path: str) -> None:
    made = attributor(path)
    made.featurize(data(N), states(network(), 1))
    if os.environ["RANK"] == "0":
        made.score(data(M, 2))
    else:
        distributed._record_end(distributed._meeting_place()[0], 1)  # as at the end of a script


def rank_0_comes_late_with_other_weights(path: str) -> None:
    store = keys()
    torch.manual_seed(int(os.environ["RANK"]))
    made = attributor(path, network())
    if os.environ["RANK"] == "0":
        store.wait(["rank 1 waits"])
    else:
        miss = distributed._TorchRanks._miss

        def missing(*given: Any) -> None:
            store.set("rank 1 waits", "")
            miss(*given)

        distributed._TorchRanks._miss = missing  # type: ignore[method-assign]
    made.featurize(data(N))


def only_on_rank_0(path: str) -> int | None:
    made = attributor(path, distributed=False)
    return made.featurize(data(N), states(network(), 1)).rows_written if os.environ["RANK"] == "0" else None


def shown_bar(path: str, output: str) -> int:
    """Return the rows that this rank wrote; its bar goes to a file."""
    with open(f"{output}-{os.environ['RANK']}", "w") as sys.stderr:
        made = attributor(path, progress=True)
        return made.featurize(Rows(SlowOnRank0(1.0), name="slow")).rows_written


def verified(path: str) -> dict[str, Any]:
    """Return the verdict, and how many models this rank trained for it."""
    trained = []

    def train(rows: Any, seed: int) -> nn.Module:
        trained.append(seed)
        torch.manual_seed(len(rows) + int(rows[0]))
        return network()

    made = attributor(path)
    made.featurize(data(40), states(network(), 1))
    scores = made.score(data(M, 2), "test")
    verdict = verify(scores, train, data(M, 2), budget=4, train_id="none")
    return verdict.to_json() | {"trained": len(trained)}


def listed() -> list[int]:
    """Return the ranks in the order in which they were merged."""
    with joined_ranks("list") as ranks:
        return ranks.merged([ranks.rank], lambda low, high: low + high)


def summed_twice() -> list[bytes]:
    """Return sums over ranks of numbers that round, made twice, on rank 0."""
    found = []
    for _ in range(2):
        with joined_ranks("sum") as ranks:
            tensor = torch.rand(
                1000, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64
            )
            ranks.add_up([tensor])
            found.append(tensor.numpy().tobytes() if ranks.rank == 0 else b"")
    return found


def told_of(call: Callable[[], None]) -> str:
    """Return the first line of the error that a call ends with."""
    try:
        call()
    except (RankError, LookupError) as error:
        return str(error).splitlines()[0]
    return "no error"


def fails_again_after_a_failure() -> list[str]:
    """Return what ended two calls of this rank; each fails on rank 1, and rank 0 waits for it."""

    def first() -> None:
        with joined_ranks("first") as ranks:
            if ranks.rank == 1:
                raise LookupError("not there")
            ranks.merged(0, max)

    def second() -> None:
        with joined_ranks("second") as ranks:
            ranks.agree("number", str(ranks.rank))

    return [told_of(first), told_of(second)]


def fails_when_others_are_done() -> list[str]:
    """Return what ended two calls of this rank; rank 0 fails in the first when rank 1 has done its part of it."""

    def first() -> None:
        with joined_ranks("first") as ranks:
            if ranks.rank == 0:
                keys().wait(["rank 1 is done"])
                raise LookupError("not there")
            keys().set("rank 1 is done", "")

    def second() -> None:
        with joined_ranks("second") as ranks:
            ranks.merged(0, max)

    return [told_of(first), told_of(second)]


def fails_beside_a_busy_rank() -> str:
    """Return what ended the call of this rank: rank 2 fails, rank 0 looks for it only when rank 1 was told."""

    def call() -> None:
        with joined_ranks("a call") as ranks:
            if ranks.rank == 1:
                ranks.merged(0, max)
            if ranks.rank == 0:
                keys().wait(["rank 1 was told"])
                while True:
                    ranks.watch()
            raise LookupError("not there")

    said = told_of(call)
    if os.environ["RANK"] == "1":
        keys().set("rank 1 was told", "")
    return said


def makes_a_group_within_a_call() -> bool:
    """Return whether the script can make and use a process group of its own while ranks are joined."""
    with joined_ranks("a call") as ranks:
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return ranks.merged(1, lambda low, high: low + high) == total.item()


def lost_in_a_sum() -> None:
    with joined_ranks("sum") as ranks:
        tensor = torch.ones(3)
        ranks.add_up([tensor])
        if ranks.rank == 1:
            ranks._wait = lambda _: os._exit(0)
        ranks.add_up([tensor])
        ranks.add_up([tensor])


def contents(path: Path | str) -> dict[str, np.ndarray]:
    """Return every column of a finished store."""
    with ZarrFeatureStore.open(path) as store:
        tables = [(name, store.open_table(name)) for name in store.table_names()]
        return {f"{name}:{c.name}": table.read(c.name) for name, table in tables for c in table.spec.columns}
