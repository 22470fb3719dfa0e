"""Ranks of one run: what they share, tell each other, and end with, against one process and plain arithmetic."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_cases as cases
import torch
from forked import forkserver
from hypothesis import given
from hypothesis import strategies as st
from rank_cases import LM, N, contents

from trak_lite import Attributor
from trak_lite.errors import RankError
from trak_lite.featurizing.session import FeaturizingSession
from trak_lite.linalg.kernel import GramAccumulator, gram
from trak_lite.linalg.topk import TopK, merged_top
from trak_lite.models import borrowing as _session
from trak_lite.models.checkpoints import Checkpoint
from trak_lite.parallel import ranks as distributed
from trak_lite.parallel.ranks import Ranks
from trak_lite.scoring.grams import _share
from trak_lite.store import check_store
from trak_lite.types import FeatureLayout

Answers = list[tuple[str, Any]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_ranks(size: int, job: Callable[..., Any], *arguments: Any, each: tuple[Any, ...] = ()) -> Answers:
    """Return what every rank answers, in order; ``each`` names what else a job is told: its rank and their number."""
    processes = forkserver()
    answers, port = processes.SimpleQueue(), free_port()
    started = []
    for rank in range(size):
        own = [{"rank": rank, "size": size}[name] for name in each]
        target = (answers, rank, size, port, job, (*arguments, *own))
        started.append(processes.Process(target=cases.as_rank, args=target))
        started[-1].start()
    for process in started:
        process.join(600)
    for process in started:
        process.kill()  # one that waits for ever must not keep the others waiting
    assert [process.exitcode for process in started] == [0] * size
    found = {}
    while not answers.empty():
        rank, *found[rank] = answers.get()
    return [tuple(found[rank]) for rank in sorted(found)]


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
        (2, ("image_classification", N, 2)),
        (4, ("image_classification", N, 2)),
        (4, ("image_classification", 40, 3)),  # more checkpoints than chunks: two at once
        (2, (LM, N, 1)),  # whose kernel is fitted
    ],
    ids=["two", "four", "few-rows", "fisher"],
)
def test_ranks_write_every_row_once_with_the_bits_of_one_process(
    tmp_path: Path, alone: Any, size: int, job: tuple[str, int, int]
) -> None:
    expected = alone(*job)
    found = on_ranks(size, cases.featurize_and_score, str(tmp_path / "a.zarr"), *job)

    assert [kind for kind, _ in found] == ["done"] * size
    assert sum(written for _, (written, _) in found) == job[1] * job[2]
    assert not any(left_behind for _, (_, left_behind) in found)
    here = contents(tmp_path / "a.zarr")
    assert here.keys() == expected.keys()
    for name, values in here.items():
        if name.startswith("scores"):
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-5 * np.abs(values).max())
        else:
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert check_store(tmp_path / "a.zarr").findings == ()


def test_the_best_rows_are_those_of_all_scores_whoever_found_them(tmp_path: Path) -> None:
    path = str(tmp_path / "a.zarr")
    on_ranks(3, cases.featurize_and_score, path, "image_classification", N, 1)
    scores = Attributor.open(path, cases.network(), "image_classification").scores("dense").numpy()

    expected = np.argsort(-scores, axis=0, kind="stable")[:4].T.tolist()
    assert [found for _, found in on_ranks(2, cases.score_again, path)] == [expected] * 2


def test_ranks_share_an_index_and_find_the_rows_of_one_process(tmp_path: Path) -> None:
    found = on_ranks(2, cases.score_by_index, str(tmp_path / "two.zarr"))

    alone = on_ranks(1, cases.score_by_index, str(tmp_path / "one.zarr"))
    assert found == alone * 2
    assert alone[0][0] == "done"


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])  # the second carries nothing of the CPU, as NCCL
def test_a_process_group_of_the_script_is_used_and_left_to_it(
    tmp_path: Path, alone: Any, backend: str
) -> None:
    path, meeting = str(tmp_path / "a.zarr"), f"file://{tmp_path}/meeting"
    found = on_ranks(2, cases.with_own_group, path, meeting, backend, each=("rank", "size"))

    assert [kind for kind, _ in found] == ["done"] * 2
    assert all(still_there for _, (_, still_there) in found)
    expected = alone("image_classification", N, 2)
    np.testing.assert_array_equal(contents(path)["ckpt-0:features"], expected["ckpt-0:features"])


# ------------------------------------------------------------------------ what ends a run


def test_an_error_of_one_rank_ends_the_others_with_the_rows_named(tmp_path: Path) -> None:
    (own, reason), (kind, message) = on_ranks(2, cases.one_fails, str(tmp_path / "a.zarr"))

    assert (own, kind) == ("RankError", "NonFiniteError")
    assert re.search(r"rows \[\d+, .*\].* of the train data", message)
    assert re.match(r"Rank 1 failed in featurize \(.*a\.zarr\) \(NonFiniteError: ", reason)
    assert message in reason


def test_a_rank_that_cannot_read_the_data_ends_the_others(tmp_path: Path) -> None:
    (own, reason), (_, message) = on_ranks(2, cases.one_cannot_read, str(tmp_path / "a.zarr"))

    assert own == "RankError"
    assert reason.startswith("Rank 1 failed in featurize (")
    assert message in reason
    assert "no such file" in message


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (cases.with_other_weights, "the checkpoint 'current' (digest of its weights) '"),
        (cases.other_calls, 'the call "'),
        (cases.columns_of_rank_0, "the call 'featurize"),
    ],
    ids=["weights", "calls", "columns"],
)
def test_ranks_that_do_not_do_the_same_are_told(tmp_path: Path, job: Any, said: str) -> None:
    found = on_ranks(2, job, str(tmp_path / "a.zarr"))

    failures = [message for kind, message in found if kind == "RankError"]
    assert len(failures) == 2
    assert all(message.startswith(f"Rank 1 has {said}") for message in failures)
    assert all(", but another rank has '" in message for message in failures)


def test_a_call_after_one_that_failed_tells_of_errors_like_any_other() -> None:
    (_, (first, second)), (_, (own, again)) = on_ranks(2, cases.fails_again_after_a_failure)

    assert own == "not there"
    assert re.match(r"Rank 1 failed in .* \(LookupError: not there\)\. ", first)
    assert again == second
    assert second.startswith("Rank 1 has the number '1', but another rank has '0'")


def test_an_error_after_others_are_done_ends_the_same_call_on_all_ranks() -> None:
    (_, (own, after)), (_, (late, again)) = on_ranks(2, cases.fails_when_others_are_done)

    assert own == "not there"
    assert re.match(r"Rank 0 failed in first \(LookupError: not there\)\. ", late)
    assert (after, again) == ("no error", "no error")


def test_a_rank_that_waits_is_told_of_an_error_while_a_third_one_computes() -> None:
    (_, computing), (_, waiting), (_, own) = on_ranks(3, cases.fails_beside_a_busy_rank)

    assert own == "not there"
    assert re.match(r"Rank 2 failed in a call \(LookupError: not there\)\. Rank 1 therefore stops", waiting)
    assert re.match(r"Rank 2 failed in a call \(LookupError: not there\)\. Rank 0 therefore stops", computing)


def test_a_call_leaves_process_groups_to_the_script() -> None:
    assert on_ranks(2, cases.makes_a_group_within_a_call) == [("done", True)] * 2


def test_a_rank_that_is_lost_in_the_middle_of_a_sum_is_missed() -> None:
    ((kind, message),) = on_ranks(2, cases.lost_in_a_sum)

    assert kind == "RankError"
    assert "lost the others during a sum over train rows" in message


def test_one_rank_may_work_alone_if_it_says_so(tmp_path: Path) -> None:
    assert on_ranks(2, cases.only_on_rank_0, str(tmp_path / "a.zarr")) == [("done", N), ("done", None)]


def test_of_several_ranks_the_first_one_retrains_and_tells_the_others(tmp_path: Path) -> None:
    (first, own), (second, told) = on_ranks(2, cases.verified, str(tmp_path / "a.zarr"))

    assert (first, second) == ("done", "done")
    assert (own.pop("trained"), told.pop("trained")) == (4, 0)
    assert own == told
    assert own["num_subsets"] == 4


def test_of_several_ranks_the_first_one_drops_when_all_have_come(tmp_path: Path) -> None:
    assert (
        on_ranks(2, cases.dropped, str(tmp_path / "a.zarr"))
        == [("done", ["ckpt-0", "targets/test/ckpt-0"])] * 2
    )


def test_checkpoints_of_one_name_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    visits = iter([False, False])  # both are left to others at first, and then taken up
    monkeypatch.setattr(Ranks, "agree", lambda self, what, value, wait=True: told.append(what))
    monkeypatch.setattr(FeaturizingSession, "_is_featurized", lambda *_: next(visits, True))
    monkeypatch.setattr(FeaturizingSession, "_is_left_alone", lambda *_: True)
    net = cases.network()
    same_name = [
        Checkpoint("final", None, lambda state=state: state)  # type: ignore[misc]
        for state in cases.states(net, 2)
    ]
    cases.attributor(None, net).featurize(cases.data(N), same_name)

    of_both = [what for what in told if what.startswith("checkpoint 'final'")]
    assert len(of_both) == 2, "every rank takes them up in an order of its own"


@pytest.mark.parametrize(
    ("given", "local_rank", "chosen", "count", "expected"),
    [
        ("cuda:0", "2", 0, 4, "cuda:2"),
        ("cuda:0", "0", 0, 4, "cuda:0"),
        ("cuda:1", "2", 0, 4, "cuda:1"),  # the script has said so
        ("cuda:0", "2", 1, 4, "cuda:0"),
        ("cuda:0", "2", 0, 1, "cuda:0"),  # the launcher shows each rank its own one
        ("cuda:0", None, 0, 4, "cuda:0"),
        ("cpu", "2", 0, 4, "cpu"),
    ],
)
def test_every_rank_takes_its_own_gpu_unless_the_script_has_chosen(
    given: str,
    local_rank: str | None,
    chosen: int,
    count: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(_session, "model_device", lambda _: torch.device(given))

    assert _session.resolve_device("auto", cases.network()) == torch.device(expected)


class SilentStore:
    """Keys that were on a machine which is lost: no question is answered, and no connection closed."""

    def __init__(self) -> None:
        self.never = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.never.wait()
        return False

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.never.wait()
        return value.encode()


class LostStore:
    """Keys that were in a process which has ended: every request fails."""

    def check(self, keys: list[str]) -> bool:
        raise torch.distributed.DistNetworkError("Connection reset")


class Pending:
    """A group whose operations wait for a rank that does not come."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        return self

    def is_completed(self) -> bool:
        return False


def test_a_rank_whose_questions_are_not_answered_goes_on_with_rows_and_does_not_wait_for_sums(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SilentStore()
    monkeypatch.setattr(distributed, "_PATIENCE", 0.1)
    monkeypatch.setattr(distributed, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(distributed, "_part_of", lambda name, store: store)
    ranks = distributed._TorchRanks(store, 1, 2, number=1)
    ranks._group = Pending()

    ranks.watch()
    ranks.agree("checkpoint", "this one", wait=False)
    assert "did not reply for 0 s; rank 1 continues without it." in caplog.text
    ranks.watch()
    with pytest.raises(RankError, match=r"key-value store does not reply for 0 s\. Rank 1 therefore stops"):
        ranks.broadcast("whether", lambda: "yes")
    ranks.report(ValueError("of which nobody hears"))
    ranks.close()
    store.never.set()


def test_a_rank_does_not_wait_for_sums_if_the_store_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_PATIENCE", 0.1)
    monkeypatch.setattr(distributed, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(distributed, "_part_of", lambda name, store: store)
    ranks = distributed._TorchRanks(LostStore(), 1, 2, number=1)
    ranks._group = Pending()

    with pytest.raises(
        RankError, match=r"key-value store cannot be reached \(Connection reset\)\. Rank 1 therefore"
    ):
        ranks.broadcast("whether", lambda: "yes")
    ranks.report(ValueError("not sent"))
    ranks.close()


def test_a_rank_that_cannot_connect_names_the_setting_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("connect: no route to host")

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", refused)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed._part_of("1", store).add("arrived", 1)
    ranks = distributed._TorchRanks(store, 0, 2, number=1)

    with pytest.raises(RankError, match=r"no route to host\)\. On several machines, set GLOO_SOCKET_IFNAME"):
        ranks.enter()
    ranks.close()


def test_a_rank_that_is_waited_for_is_asked_for_and_at_last_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_PATIENCE", 2.0)
    monkeypatch.setattr(distributed, "_LONGEST_WAIT", timedelta(seconds=3))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = distributed._TorchRanks(store, 0, 2, number=1)
    said = r"Rank 0 of 2 waits for others to make the call a call\. Every rank must"

    with pytest.warns(RuntimeWarning, match=said) as warned, pytest.raises(RankError, match=said):
        ranks.enter()
    ranks.close()
    assert len(warned) == 1


def test_a_rank_that_failed_after_it_arrived_is_not_connected_to() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_call = distributed._part_of("1", store)
    of_call.add("arrived", 1)
    of_call.set("failed", "Rank 1 was interrupted.")
    ranks = distributed._TorchRanks(store, 0, 2, number=1)

    with pytest.raises(RankError, match=r"Rank 1 was interrupted\. Rank 0 therefore stops"):
        ranks.enter()
    ranks.close()


def test_a_rank_whose_script_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    (waiting, reason), (ended, _) = on_ranks(2, cases.scored_by_rank_0, str(tmp_path / "a.zarr"))

    assert (waiting, ended) == ("RankError", "done")
    assert "make the call score 'targets' (" in reason
    assert "the scripts of ranks 1 have ended" in reason
    assert "Attributor(distributed=False)" in reason


def test_no_rank_writes_rows_before_all_have_the_same_model(tmp_path: Path) -> None:
    found = on_ranks(2, cases.rank_0_comes_late_with_other_weights, str(tmp_path / "a.zarr"))

    assert [kind for kind, _ in found] == ["RankError", "RankError"]
    assert all("Rank 1 has the checkpoint 'current'" in reason for _, reason in found)
    assert not (tmp_path / "a.zarr").exists()


# ------------------------------------------------------------------------ what they say


def test_the_bar_of_rank_0_counts_the_rows_of_all(tmp_path: Path) -> None:
    found = on_ranks(2, cases.shown_bar, str(tmp_path / "a.zarr"), str(tmp_path / "bar"))
    shown = (tmp_path / "bar-0").read_text()

    assert f"{N}/{N}" in shown
    assert found[0][1] < N
    assert "waiting" not in shown.splitlines()[-1].split("\r")[-1]
    assert (tmp_path / "bar-1").read_text() == ""


@pytest.mark.parametrize("size", [2, 3, 5])
def test_values_are_merged_in_the_order_of_ranks(size: int) -> None:
    assert on_ranks(size, cases.listed) == [("done", list(range(size)))] * size


def test_a_sum_is_the_same_whenever_it_is_made() -> None:
    (_, (one, other)), *_ = on_ranks(3, cases.summed_twice)

    assert one == other
    parts = [
        torch.rand(1000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(3)
    ]
    np.testing.assert_allclose(np.frombuffer(one), torch.stack(parts).sum(0).numpy(), rtol=1e-15)


def test_one_rank_by_itself_says_everything() -> None:
    ranks = Ranks()
    ranks.watch()
    ranks.agree("call", "anything")
    tensor = torch.ones(2)
    ranks.add_up([tensor])
    ranks.send_to_all(tensor)

    assert tensor.tolist() == [1, 1]
    assert ranks.broadcast("whether", lambda: "yes") == "yes"
    assert ranks.merged("own", lambda low, high: low + high) == "own"
    assert ranks.comes_first("table")


# ------------------------------------------------------------------------ arithmetic


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
def test_shares_cover_every_chunk_of_every_part_once(num_ranks: int, num_parts: int, num_chunks: int) -> None:
    num_parts = min(num_parts, num_ranks)
    shares = [_share(rank, num_ranks, num_parts, num_chunks) for rank in range(num_ranks)]

    covered = sorted((part, chunk) for part, chunks in shares for chunk in chunks)
    assert covered == [(part, chunk) for part in range(num_parts) for chunk in range(num_chunks)]


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 5), st.sampled_from(["helpful", "harmful"]))
def test_the_best_of_parts_are_the_best_of_all(seed: int, cut: int, k: int, sign: Any) -> None:
    scores = torch.randint(-2, 3, (13, 2), generator=torch.Generator().manual_seed(seed)).float()
    parts = []
    for start, part in ((0, scores[:cut]), (cut, scores[cut:])):
        best = TopK(2, k, sign=sign)
        best.update(start, part)
        parts.append(best.result())
    whole = TopK(2, k, sign=sign)
    whole.update(0, scores)

    for found, expected in zip(merged_top(parts[::-1], k, sign=sign), whole.result(), strict=True):
        assert torch.equal(found, expected)


def test_rows_with_weights_block_by_block_give_the_gram_of_all() -> None:
    rows, layout = torch.randn(700, 5, generator=torch.Generator().manual_seed(0)), FeatureLayout.joint(5)
    weights = torch.rand(700, generator=torch.Generator().manual_seed(1))
    sums = GramAccumulator(layout, torch.device("cpu"))
    for start, stop in ((0, 1), (1, 300), (300, 700)):
        sums.add(rows[start:stop], weights[start:stop])

    assert torch.equal(sums.result()[0], gram([rows], weights, layout=layout)[0])


def test_a_bad_weight_is_named_by_its_row() -> None:
    sums = GramAccumulator(FeatureLayout.joint(1), torch.device("cpu"), first_row=64)
    sums.add(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(ValueError, match="the first at row 68"):
        sums.add(torch.ones(2, 1), torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="There are 1 weights"):
        sums.add(torch.ones(2, 1), torch.ones(1))
