"""Ranks of one run: what they share, tell each other, and end with, against one process and plain arithmetic."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_cases as cases
import torch
from forked import answers_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import IMAGES, LM, N, contents, internals

from trak_lite import Attributor
from trak_lite.core.ranks import Ranks
from trak_lite.errors import RankError
from trak_lite.featurizing.train_work import TrainWork
from trak_lite.linalg.gram import GramAccumulator
from trak_lite.models.borrowing import resolve_device
from trak_lite.models.checkpoints import Checkpoint
from trak_lite.scoring.grams import _share as share_of_chunks
from trak_lite.scoring.matrix import merged_ends, top_and_bottom_of
from trak_lite.store import check_store
from trak_lite.types import FeatureLayout

Answers = list[tuple[str, Any]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_ranks(size: int, job: Callable[..., Any], *arguments: Any) -> Answers:
    """Return what every rank answers, in order."""
    return answers_of(size, cases.as_rank, size, (free_port(), free_port()), job, arguments)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a.zarr")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, np.ndarray]]:
    """What one process writes."""
    found: dict[Any, dict[str, np.ndarray]] = {}

    def of(*job: Any) -> dict[str, np.ndarray]:
        if job not in found:
            path = str(tmp_path_factory.mktemp("alone") / "a.zarr")
            assert [kind for kind, _ in on_ranks(1, cases.featurize_and_score, path, *job)] == ["done"]
            found[job] = contents(path)
        return found[job]

    return of


@pytest.mark.parametrize(
    ("size", "job"),
    [
        (2, (IMAGES, N, 2)),
        (4, (IMAGES, N, 2)),
        (4, (IMAGES, 40, 3)),  # more checkpoints than chunks: two at once, of one name
        (2, (LM, N, 1)),  # whose kernel is fitted
    ],
    ids=["two", "four", "few-rows", "fisher"],
)
def test_ranks_write_every_row_once_with_the_bits_of_one_process(
    path: str, alone: Any, size: int, job: tuple[str, int, int]
) -> None:
    expected = alone(*job)
    found = on_ranks(size, cases.featurize_and_score, path, *job)

    assert [kind for kind, _ in found] == ["done"] * size, found
    assert sum(written for _, (written, _) in found) == job[1] * job[2]
    assert not any(left_behind for _, (_, left_behind) in found)
    here = contents(path)
    assert here.keys() == expected.keys()
    for name, values in here.items():
        if name.startswith("scores"):
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-5 * np.abs(values).max())
        else:
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert check_store(path).findings == ()
    if size == 2 and job[0] == IMAGES:
        scores = Attributor.open(path, cases.network(), IMAGES).scores("dense").numpy()
        best, worst = (np.argsort(sign * scores, axis=0, kind="stable")[:4].T.tolist() for sign in (-1, 1))
        # The best rows are those of all scores, whoever found them.
        assert on_ranks(3, cases.best_rows, path) == [("done", [best, worst])] * 3


def test_ranks_share_an_index_and_find_the_rows_of_one_process(tmp_path: Path) -> None:
    found = on_ranks(2, cases.score_by_index, str(tmp_path / "two.zarr"))

    alone = on_ranks(1, cases.score_by_index, str(tmp_path / "one.zarr"))
    assert found == alone * 2
    assert alone[0][0] == "done"


@pytest.mark.parametrize("backend", ["cuda:gloo", "gloo"])  # the first carries nothing of the CPU, as NCCL
def test_a_process_group_of_the_script_is_used_and_left_to_it(path: str, alone: Any, backend: str) -> None:
    found = on_ranks(2, cases.with_own_group, path, f"file://{path}-meeting", backend, 2)

    assert [kind for kind, _ in found] == ["done"] * 2, found
    assert all(still_there for _, (_, still_there) in found)
    expected = alone(IMAGES, N, 2)
    np.testing.assert_array_equal(contents(path)["ckpt-0/features"], expected["ckpt-0/features"])


@pytest.mark.parametrize("computer", ["auto", "hook", "iterative"])
def test_ranks_with_a_model_in_ddp_do_not_wait_for_each_others_passes(path: str, computer: str) -> None:
    found = on_ranks(2, cases.featurized_with_ddp, path, computer)

    assert [(kind, *syncs) for kind, (_, *syncs) in found] == [("done", True, True)] * 2, found
    assert sum(rows for _, (rows, *_) in found) == 100


def test_a_generator_may_train_a_model_in_ddp(path: str) -> None:
    found = on_ranks(2, cases.trained_with_ddp, path)

    assert [kind for kind, _ in found] == ["done"] * 2, found
    assert sum(rows for _, rows in found) == 200


def test_one_rank_may_work_alone_if_it_says_so(path: str) -> None:
    assert on_ranks(2, cases.only_on_rank_0, path) == [("done", N), ("done", None)]


def test_of_several_ranks_the_first_one_retrains_and_tells_the_others(path: str) -> None:
    (first, own), (second, told) = on_ranks(2, cases.verified, path)

    assert (first, second) == ("done", "done")
    assert (own.pop("trained"), told.pop("trained")) == (4, 0)
    assert own == told
    assert own["num_subsets"] == 4


def test_of_several_ranks_the_first_one_trains_the_recipe_of_a_command(path: str, tmp_path: Path) -> None:
    found = on_ranks(2, cases.run_of_command_line, path)

    assert found == [("done", 0)] * 2
    assert [file.name for file in tmp_path.glob("trained-by-*")] == ["trained-by-0"]
    assert check_store(path).findings == ()


def test_of_several_ranks_the_first_one_drops_when_all_have_come(path: str) -> None:
    assert on_ranks(2, cases.dropped, path) == [("done", ["ckpt-0", "targets/test/ckpt-0"])] * 2


def test_the_bar_of_rank_0_counts_the_rows_of_all(path: str, tmp_path: Path) -> None:
    found = on_ranks(2, cases.shown_bar, path, str(tmp_path / "bar"))
    shown = (tmp_path / "bar-0").read_text()

    assert f"{N}/{N}" in shown
    assert found[0][1] < N
    assert "waiting" not in shown.splitlines()[-1].split("\r")[-1]
    assert (tmp_path / "bar-1").read_text() == ""


# ------------------------------------------------------------------------ what ends a run


@pytest.mark.parametrize(
    ("rank_1", "kind", "said"),
    [
        (cases.not_a_number, "NonFiniteError", r"rows \[\d+, .*\].* of the train data"),
        (cases.lost_file, "", "no such file"),
    ],
    ids=["not finite", "not readable"],
)
def test_an_error_of_one_rank_ends_the_others(path: str, rank_1: Any, kind: str, said: str) -> None:
    (own, reason), (other, message) = on_ranks(2, cases.featurize_slowly, path, rank_1)

    assert (own, kind or other) == ("RankError", other)
    assert re.search(said, message)
    assert re.match(rf"Rank 1 failed in featurize \(.*a\.zarr\) \({other}: ", reason)
    assert message in reason


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (cases.with_other_weights, "the checkpoint 'current' (digest of its weights) '"),
        (cases.rank_0_comes_late_with_other_weights, "the checkpoint 'current' (digest of its weights) '"),
        (cases.other_calls, 'the call "'),
        (cases.columns_of_rank_0, "the call 'featurize"),
        (cases.columns_with_other_values, "the columns (digest of their values) '"),
        (cases.in_another_folder, "the call 'featurize"),
    ],
    ids=["weights", "late", "calls", "columns", "values of columns", "folders"],
)
def test_ranks_that_do_not_do_the_same_are_told_before_any_writes(path: str, job: Any, said: str) -> None:
    found = on_ranks(2, job, path)

    assert [kind for kind, _ in found] == ["RankError"] * 2, found
    assert all(message.startswith(f"Rank 1 has {said}") for _, message in found)
    assert all(", but another rank has '" in message for _, message in found)
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (cases.with_a_part_of_the_data, "dataset.num_rows is 140 there, 139 here"),
        (cases.with_another_seed, "projector.seed is 0 there, 1 here"),
    ],
    ids=["data", "settings"],
)
def test_ranks_with_other_data_or_settings_are_told_the_difference_before_any_writes(
    path: str, job: Any, said: str
) -> None:
    found = on_ranks(2, job, path)

    assert [kind for kind, _ in found] == ["RankError"] * 2, found
    assert all(message.startswith("Rank 1 differs from rank 0. ") and said in message for _, message in found)
    assert not Path(path).exists()


def test_ranks_do_not_share_a_model_id_of_traker_and_are_told(tmp_path: Path) -> None:
    (held, _), (refused, message) = on_ranks(2, cases.featurized_by_both, str(tmp_path))

    assert (held, refused) == ("done", "BusyError")
    assert (
        "the train data (model id 3) among processes or ranks of torchrun: give each other model" in message
    )
    assert "Attributor" in message


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (({"seed": 2}, {"seed": 3}), r"targets\.tensors is '\w+' there, '\w+' here"),
        (({"method": "TRAK"}, {"method": "TracIn"}), "method.name is 'TRAK' there, 'TracIn' here"),
        (({"dense": False, "k": 3}, {"dense": False, "k": 4}), "k is 3 there, 4 here"),
        (({"dense": True}, {"dense": False}), "dense is True there, False here"),
    ],
    ids=["targets", "method", "k", "dense"],
)
def test_ranks_that_score_otherwise_are_told_the_difference(path: str, asked: Any, said: str) -> None:
    found = on_ranks(2, cases.scores_differently, path, *asked)

    assert [kind for kind, _ in found] == ["RankError"] * 2, found
    assert all(re.match(rf"Rank 1 differs from rank 0\. .*{said}", message) for _, message in found), found
    assert (
        "Rank 0 therefore stops. Finished rows are stored. Remove the cause and make the call" in found[0][1]
    )


OF_RANK_0, OF_RANK_1, OF_RANK_2 = (
    rf"Rank {rank} failed in .* \(LookupError: not there\)\. " for rank in range(3)
)
STOPS_0, STOPS_1 = (f"{OF_RANK_2}Rank {rank} therefore stops" for rank in range(2))
AFTER_FAILURES = {
    # A call after one that failed tells of errors like any other.
    cases.fails_again_after_a_failure: [
        [OF_RANK_1, "Rank 1 has the number '1', but another rank has '0'"],
        ["not there", "Rank 1 has"],
    ],
    # An error after others are done ends the same call on all ranks.
    cases.fails_when_others_are_done: [["not there", "no error"], [OF_RANK_0, "no error"]],
    # A rank that waits is told of an error while a third one computes.
    cases.fails_beside_a_busy_rank: [[STOPS_0], [STOPS_1], ["not there"]],
}


@pytest.mark.parametrize("job", AFTER_FAILURES, ids=["again", "after", "beside"])
def test_what_a_failed_call_ends_with_on_every_rank(job: Any) -> None:
    expected = AFTER_FAILURES[job]
    found = on_ranks(len(expected), job)

    for (kind, messages), texts in zip(found, expected, strict=True):
        assert (kind, len(messages)) == ("done", len(texts))
        assert all(map(re.match, texts, messages)), found


def test_a_rank_that_is_lost_in_the_middle_of_a_sum_is_missed() -> None:
    ((kind, message),) = on_ranks(2, cases.lost_in_a_sum)

    assert kind == "RankError"
    assert "lost the others during a sum over train rows" in message


@pytest.fixture
def agent() -> Iterator[int]:
    """The port of the key-value store of an agent of torchrun."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.mark.parametrize(
    ("calls", "own_group"),
    [(1, False), (0, False), (0, True)],
    ids=["after a call", "before any", "own group"],
)
def test_a_rank_whose_script_has_ended_is_not_waited_for(
    path: str, agent: int, calls: int, own_group: bool
) -> None:
    ports = agent, free_port()
    found = answers_of(2, cases.as_rank, 2, ports, cases.scored_by_rank_0, (path, calls, own_group))

    (waiting, reason), (ended, _) = found
    assert (waiting, ended) == ("RankError", "done")
    assert "Rank 0 of 2 waits for ranks 1 to make the call score 'targets' (" in reason
    assert "the scripts of ranks 1 have ended" in reason
    assert "Attributor(distributed=False)" in reason


def test_the_end_of_a_process_that_a_rank_has_started_is_not_that_of_the_rank(path: str, agent: int) -> None:
    found = answers_of(2, cases.as_rank, 2, (agent, free_port()), cases.starts_another_process, (path,))

    assert [kind for kind, _ in found] == ["done"] * 2, found


# ------------------------------------------------------------------------ how they talk


def test_ranks_merge_in_their_order_sum_alike_and_leave_process_groups_to_the_script() -> None:
    found = on_ranks(3, cases.talks)

    assert [(kind, merged, used) for kind, (merged, _, used) in found] == [("done", [0, 1, 2], True)] * 3
    one, other = found[0][1][1]
    assert one == other
    parts = torch.stack([cases.drawn(rank) for rank in range(3)])
    np.testing.assert_allclose(np.frombuffer(one), parts.sum(0).numpy(), rtol=1e-15)


def test_checkpoints_of_one_name_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    visits = iter([False, False])  # both are left to others at first, and then taken up
    monkeypatch.setattr(Ranks, "agree", lambda self, what, value, wait=True: told.append(what))
    monkeypatch.setattr(TrainWork, "_is_featurized", lambda *_: next(visits, True))
    monkeypatch.setattr(TrainWork, "_is_left_alone", lambda *_: True)
    net = cases.network()
    same_name = [Checkpoint("final", None, lambda state=state: state) for state in cases.states(net, 2)]
    cases.attributor(None, net).featurize(cases.data(N), same_name)

    of_both = [what for what in told if what.startswith("checkpoint 'final'")]
    assert len(of_both) == 2, "every rank takes them up in an order of its own"


class SilentStore:
    """Keys that were on a machine which is lost: no question is answered, and no connection closed."""

    def __init__(self) -> None:
        self.never = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return not self.never.wait()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.never.wait()
        return value.encode()


class LostStore:
    """Keys that were in a process which has ended: every request fails."""

    def check(self, keys: list[str]) -> bool:
        raise torch.distributed.DistNetworkError("Connection reset")

    compare_set = check


class Pending:
    """A group whose operations wait for a rank that does not come."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        return self

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (SilentStore, r"key-value store does not reply for 0 s\. Rank 1 therefore stops"),
        (LostStore, r"key-value store cannot be reached \(Connection reset\)\. Rank 1 therefore"),
    ],
)
def test_a_rank_without_an_answer_goes_on_with_rows_and_does_not_wait_for_sums(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: Any, said: str
) -> None:
    for name, value in (("_PATIENCE", 0.1), ("_LOOK_EVERY", 0.01), ("part_of", lambda name, store: store)):
        monkeypatch.setattr(internals, name, value)
    store = lost()
    ranks = cases.ranks_of(store, 1, Pending())

    if lost is SilentStore:
        ranks.watch()
        ranks.agree("checkpoint", "this one", wait=False)
        assert "did not reply for 0 s; rank 1 continues without it." in caplog.text
        ranks.watch()
    with pytest.raises(RankError, match=said):
        ranks.broadcast("whether", lambda: "yes")
    ranks.report(ValueError("of which nobody hears"))
    ranks.close()
    if lost is SilentStore:
        store.never.set()


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        (None, r"no route to host\)\. On several machines, set GLOO_SOCKET_IFNAME"),
        ("Rank 1 was interrupted.", r"Rank 1 was interrupted\. Rank 0 therefore stops"),
    ],
    ids=["refused", "failed after it arrived"],
)
def test_a_rank_that_cannot_connect_says_why(
    monkeypatch: pytest.MonkeyPatch, failed: str | None, said: str
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("connect: no route to host")

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", refused)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_call = torch.distributed.PrefixStore("1", store)
    of_call.add("arrived", 1)
    if failed is not None:
        of_call.set("failed", failed)
    ranks = cases.ranks_of(store, 0)

    with pytest.raises(RankError, match=said):
        ranks.enter()
    ranks.close()


def test_a_rank_that_is_waited_for_is_asked_for_and_at_last_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "_PATIENCE", 0.5)
    monkeypatch.setattr(internals, "_LONGEST_WAIT", timedelta(seconds=1))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = cases.ranks_of(store, 0)
    said = r"Rank 0 of 2 waits for ranks 1 to make the call a call\. Every rank must"

    with pytest.warns(RuntimeWarning, match=said) as warned, pytest.raises(RankError, match=said):
        ranks.enter()
    ranks.close()
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("given", "local_rank", "chosen", "count", "expected"),
    [
        ("cuda:0", "2", 0, 4, "cuda:2"),
        ("cuda:0", "0", 0, 4, "cuda:0"),
        ("cuda:1", "2", 0, 4, "cuda:1"),  # the script has said so
        ("cuda:0", "2", 1, 4, "cuda:0"),
        ("cuda:0", "2", 0, 1, "cuda:0"),  # the launcher shows each rank its own one
        ("cuda:0", "", 0, 4, "cuda:0"),
        ("cpu", "2", 0, 4, "cpu"),
    ],
)
def test_every_rank_takes_its_own_gpu_unless_the_script_has_chosen(
    monkeypatch: Any, given: str, local_rank: str, chosen: int, count: int, expected: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if not local_rank:
        monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr("trak_lite.models.borrowing.model_device", lambda _: torch.device(given))

    assert resolve_device("auto", cases.network()) == torch.device(expected)


# ------------------------------------------------------------------------ arithmetic


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
def test_shares_cover_every_chunk_of_every_part_once(num_ranks: int, num_parts: int, num_chunks: int) -> None:
    num_parts = min(num_parts, num_ranks)
    shares = [share_of_chunks(rank, num_ranks, num_parts, num_chunks) for rank in range(num_ranks)]

    covered = sorted((part, chunk) for part, chunks in shares for chunk in chunks)
    assert covered == [(part, chunk) for part in range(num_parts) for chunk in range(num_chunks)]


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 5))
def test_the_best_of_parts_are_the_best_of_all(seed: int, cut: int, k: int) -> None:
    scores = torch.randint(-2, 3, (13, 2), generator=torch.Generator().manual_seed(seed)).float()
    parts = [top_and_bottom_of([part], 2, k, Ranks()) for part in ((cut, scores[cut:]), (0, scores[:cut]))]

    merged = merged_ends(*parts, k)

    assert merged is not None
    np.testing.assert_array_equal(merged, top_and_bottom_of([(0, scores)], 2, k, Ranks()))


def test_weights_block_by_block_give_the_gram_of_all_and_a_bad_one_is_named_by_its_row() -> None:
    rows, layout = torch.randn(700, 5, generator=torch.Generator().manual_seed(0)), FeatureLayout.joint(5)
    weights = torch.rand(700, generator=torch.Generator().manual_seed(1))
    sums = GramAccumulator(layout, torch.device("cpu"), first_row=64)
    for start, stop in ((0, 1), (1, 300), (300, 700)):
        sums.add(rows[start:stop], weights[start:stop])

    at_once = GramAccumulator(layout, torch.device("cpu"))
    at_once.add(rows, weights)
    assert torch.equal(sums.result()[0], at_once.result()[0])
    with pytest.raises(ValueError, match="the first at row 765"):
        sums.add(rows[:2], torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="There are 1 weights"):
        sums.add(rows[:2], torch.ones(1))
