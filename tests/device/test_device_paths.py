"""What is made of features, on a device and on the CPU: curvatures, views, checkpoints, stores, TRAKer, verdicts."""

import device_runs as cases
import numpy as np
import pytest
import torch
from device_models import NUM_ROWS, NUM_TARGETS, make
from safetensors.torch import save_file
from tiny_runs import Counting
from torch.utils.data import DataLoader, Subset

from trak_lite import Attributor, Refine, Rows, TRAKer, named_optimizer_state, token_scores
from trak_lite.cli import main
from trak_lite.errors import InvalidInputError
from trak_lite.methods import CG, EKFAC, TRAK, GaussNewton, GradCos, GradDot, LiSSA, TracIn
from trak_lite.modelout_functions import QuestionsModelOutput

METHODS = [
    cases.PLAIN, GradDot(), GradCos(q="inside"), GaussNewton(), TRAK(damping=None),
    TracIn(learning_rates=(0.1, 0.2)),
]  # fmt: skip


def ekfac(where, folder, name):
    made, case = cases.attributor(name, where)
    made.featurize(case.train)
    return {"scores": made.score(case.targets, name="t", method="EKFAC").numpy().copy()}


def scores_of_unprojected_gradients(where, folder, method):
    made, case = cases.attributor("mlp", where)
    states = cases.checkpoints("mlp")
    made.featurize(case.train, states)
    streamed = made.stream_scores(case.train, case.targets, checkpoints=states, method=method)
    refined = made.score(case.targets, name="t", refine=Refine(candidates=2, method=method))
    return {"streamed": streamed.numpy(), "refined": refined.top(2).scores}


def rows_of_the_state_of_adam(where, folder, kind):
    made, case = cases.attributor("mlp", where, normalize=kind)
    inputs, labels = (tensor.to(where) for tensor in case.train.tensors)
    optimizer = torch.optim.AdamW(case.model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(case.model(inputs), labels).backward()
        optimizer.step()
    state = {"model": case.model.state_dict(), "optimizer": named_optimizer_state(optimizer, case.model)}
    made.featurize(case.train, state)
    return {**cases.stored(made), "scores": made.score(case.targets, name="t").numpy()}


def methods_and_what_is_said_of_scores(where, folder):
    made, case = cases.attributor("mlp", where)
    made.featurize(case.train, cases.checkpoints("mlp"))
    found = {}
    for number, method in enumerate(METHODS):
        found[f"dense {number}"] = made.score(case.targets, name="t", method=method).numpy().copy()
        sparse = made.score(case.targets, name="t", dense=False, k=3, method=method)
        found[f"sparse {number}"] = sparse.top(3, target=1).scores
    scores = made.scores("t", method=cases.PLAIN)
    said = {"agreement": scores.checkpoint_agreement(), "self": scores.self_influence()}
    return {**found, **said, "dampings": scores.damping_path([0.01, 1.0]).numpy()}


def scores_of_tokens(where, folder):
    """In forward mode: what is computed per token instead would hide a failure of it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trak_lite.featurizing.session.FeaturizingSession.features", None)
        made, case = cases.attributor("gpt", where, method=cases.PLAIN)
        made.featurize(case.train)
        scores = made.score(case.targets, name="t")
        return {str(row): tokens for row, tokens in token_scores(scores, case.train, [0, 3]).items()}


def rows_that_are_appended(where, folder):
    path = folder / f"{where.type}.zarr"
    made, case = cases.attributor("mlp", where, path, normalize="unit", store_norms=True)
    made.featurize(Rows(Subset(case.train, range(8)), name="z"))
    made.featurize(Rows(case.train, name="z"), append=True)
    scores = made.score(case.targets, name="t").numpy().copy()
    return {"scores": scores, "norms": made.gradient_norms()}


def traker(where, folder, model_on, runs_on):
    at = {"cpu": cases.CPU, "device": where}
    case, states = make("cnn"), cases.checkpoints("cnn")
    settings = {"proj_dim": 8, "device": at[runs_on], "use_half_precision": False}
    model, path = case.model.to(at[model_on]), folder / where.type
    made = TRAKer(model, "image_classification", NUM_ROWS, save_dir=path, **settings)
    for number, state in enumerate(states):
        made.load_checkpoint(state, model_id=number)
        for rows in (slice(0, 7), slice(7, NUM_ROWS)):
            batch = [tensor[rows].to(at["device" if number else "cpu"]) for tensor in case.train.tensors]
            made.featurize(batch, num_samples=7)
    made.finalize_features()
    for number, state in enumerate(states):
        made.start_scoring_checkpoint("q", state, number, num_targets=NUM_TARGETS)
        made.score([tensor.to(where) for tensor in case.targets.tensors], num_samples=NUM_TARGETS)
    scores = np.array(made.finalize_scores("q"))
    made.close()
    return {"scores": scores}


UNPROJECTED = [
    GradDot(), GradCos(), EKFAC(damping=0.3), EKFAC(samples=7), CG(damping=30.0), CG(draws=2, damping=30.0),
    LiSSA(depth=5, scale=1e4),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:LiSSA did not converge")
@pytest.mark.parametrize(("run", "arguments"), [
    *((ekfac, [name]) for name in ("mlp", "cnn", "gpt")),
    *((scores_of_unprojected_gradients, [method]) for method in UNPROJECTED),
    *((rows_of_the_state_of_adam, [kind]) for kind in ("adam", "adam_update")),
    (methods_and_what_is_said_of_scores, []),
    (scores_of_tokens, []),
    (cases.verification, []),
    (rows_that_are_appended, []),
    *((traker, [model_on, runs_on]) for model_on in ("cpu", "device") for runs_on in ("cpu", "device")),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_runs_give_what_they_give_on_the_cpu(run, arguments, device, tmp_path):
    # Iterations carry the rounding of their first products on, and the stand-in aligns memory otherwise.
    fused = any(str(one) in cases.REGROUPED or isinstance(one, (CG, LiSSA)) for one in arguments)
    cases.assert_same_on_both(device, lambda where: run(where, tmp_path, *arguments), fused=fused)


def test_checkpoints_from_files_and_from_either_device(device, tmp_path):
    states = cases.checkpoints("cnn")
    moved = [{key: value.to(device) for key, value in state.items()} for state in states]
    files = [str(tmp_path / "0.pt"), str(tmp_path / "1.pt")]
    torch.save(states[0], files[0])
    torch.save(moved[1], files[1])
    (tmp_path / "folder").mkdir()
    for number, state in enumerate(states):
        save_file(state, tmp_path / "folder" / f"{number}.safetensors")

    def scores(given, where):
        made, case = cases.attributor("cnn", where)
        made.featurize(case.train, given)
        return {"scores": made.score(case.targets, name="t").numpy()}

    expected = scores(states, cases.CPU)
    for given in (files, str(tmp_path / "folder"), states, moved):
        cases.assert_same(scores(given, device), expected, device, fused=True)


def test_a_run_goes_on_on_another_device(device, tmp_path):
    whole, case = cases.attributor("mlp", cases.CPU)
    whole.featurize(Rows(case.train, name="x"))
    expected = whole.score(case.targets, name="t").numpy()
    made, case = cases.attributor("mlp", device, tmp_path / "s.zarr")
    rows = Counting(case.train, fail_at=NUM_ROWS - 1)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(rows, name="x"))
    rows.fail_at = None
    made, case = cases.attributor("mlp", cases.CPU, tmp_path / "s.zarr")
    assert 0 < made.featurize(Rows(rows, name="x")).rows_found < NUM_ROWS
    opened = Attributor.open(tmp_path / "s.zarr", make("mlp").model.to(device), progress=False)
    assert opened.device == device
    cases.assert_same({"scores": opened.score(case.targets, name="t").numpy()}, {"scores": expected}, device)


def test_the_command_line_reads_what_a_device_has_written(device, tmp_path, capsys):
    made, case = cases.attributor("mlp", device, tmp_path / "s.zarr")
    made.featurize(case.train)
    made.score(case.targets, name="t")
    assert main(["inspect", str(tmp_path / "s.zarr")]) in (0, None)
    said = capsys.readouterr().out
    assert str(device) in said
    assert "ieee" in said


def test_a_model_on_another_device_comes_back(device, second_device):
    def run(where):
        runs_on = cases.CPU if where == cases.CPU else second_device
        made, case = cases.attributor("mlp", runs_on, place=False, batch_size=None)
        case.model.to(where)
        loader = DataLoader(case.train, batch_size=5, pin_memory=where != cases.CPU)
        made.featurize(loader, cases.checkpoints("mlp"))
        scores = made.score(case.targets, name="t").numpy().copy()
        assert {p.device for p in case.model.parameters()} == {where}
        return {"scores": scores}

    cases.assert_same_on_both(device, run)


def test_an_invalid_label_is_named_although_no_batch_reads_labels(device):
    made, case = cases.attributor("mlp", device)
    rows = [(x, torch.tensor(99) if i == 5 else y) for i, (x, y) in enumerate(case.train)]
    with pytest.raises(InvalidInputError, match=r"Row 5 of .*is 99"):
        made.featurize(rows)


def test_rows_that_wait_for_their_copy_are_written_when_the_next_batch_fails(device):
    made, case = cases.attributor("mlp", device)
    bad = case.train[12][0].to(device)

    def fail(module, args):
        if bool((args[0] == bad).all(-1).any()):
            raise ValueError("the model fails")

    handle = case.model.register_forward_pre_hook(fail)
    with pytest.raises(InvalidInputError, match="the model fails"):
        made.featurize(case.train)
    handle.remove()
    assert made.featurize(case.train).rows_written == len(case.train) - 10


def test_a_target_of_another_question_is_refused_although_no_batch_reads_it(device):
    case = make("mlp")
    first = QuestionsModelOutput(case.task, {"length": lambda call, batch: call(batch[0]).square().sum(1)})
    other = QuestionsModelOutput(case.task, {"length": lambda call, batch: call(batch[0]).sum(1)})
    made = Attributor(case.model.to(device), other, None, device=device, progress=False)
    made.featurize(case.train)
    with pytest.raises(InvalidInputError, match="the question 'length' of this task"):
        made.score(first.ask("length", case.targets), name="asked")
