"""Kills of whole runs, on every path through the product: what was acknowledged stays, and the end has the same bits.

A path is a function that a script would be: it makes everything from a folder on, may be called again after a kill, and
returns bytes. It runs in processes forked off one that has imported torch and never run it. A process is killed at a
random moment, or when it comes to a random step of the store for the n-th time; after each kill another one looks
whether every row whose ``put`` had returned is done, and then the path is called again. The last call has to return the
bytes of an undisturbed run.
"""

import contextlib
import faulthandler
import hashlib
import io
import json
import logging
import os
import random
import re
import select
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import trak_lite
from trak_lite import Attributor, TRAKer, verify
from trak_lite import cli as command_line
from trak_lite.errors import InvalidInputError, MissingStoreError
from trak_lite.methods import EKFAC, Fisher
from trak_lite.store import AbstractRowTable, RemotePlace, check_store, open_store
from trak_lite.unrolled import Adam, Recipe, unrolled

__all__ = ["PATHS", "Kills"]

PATIENCE = 150
"""Seconds until a process counts as hanging."""
MOST_ATTEMPTS = 6
"""Kills of one run; then it is let go on to its end."""
N, M, CLASSES = 96, 5, 3
_FAILPOINTS = sorted(
    name
    for path in Path(trak_lite.__file__).parent.rglob("*.py")
    for name in re.findall(r'(?:failpoint\(|step=)"(\w+)"', path.read_text())
)
"""Steps of the store at which a process may be killed."""


def samples(count, seed):
    generator = np.random.default_rng(seed)
    inputs = torch.from_numpy(generator.normal(size=(count, 4)).astype(np.float32))
    return TensorDataset(inputs, torch.from_numpy(generator.integers(CLASSES, size=count)))


class Tokens(Dataset):
    """Token lists, each sample a mapping, as a tokenizer gives them."""

    def __init__(self, count, seed):
        self.ids = np.random.default_rng(seed).integers(11, size=(count, 6))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row):
        ids = torch.from_numpy(self.ids[row])
        return ids, ids


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embedding(ids).cumsum(1))))


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def states(count):
    return [classifier(10 + number).state_dict() for number in range(count)]


def attributor(folder, **settings):
    path = settings.pop("path", f"{folder}/run.zarr")
    return Attributor(
        classifier(), "image_classification", path, proj_dim=8, batch_size=8, progress=False, **settings
    )


def featurize_and_score(folder):
    made = attributor(folder)
    made.featurize(samples(N, 0), states(2))
    return made.score(samples(M, 1), "t").numpy().tobytes()


def quantised_norms(folder):
    made = attributor(folder, dtype="int8", store_norms=True)
    made.featurize(samples(N, 0), states(2))
    return made.gradient_norms().tobytes() + made.score(samples(M, 1), "t").numpy().tobytes()


def fisher(folder):
    torch.manual_seed(0)
    made = Attributor(
        LanguageModel(),
        "causal_language_modeling",
        f"{folder}/run.zarr",
        proj_dim=8,
        batch_size=8,
        progress=False,
    )
    made.featurize(Tokens(N, 0))  # fits the attributor's own method
    return made.score(Tokens(M, 1), "t", method=Fisher(samples_per_feature=6)).numpy().tobytes()


def ekfac(folder):
    made = attributor(folder)
    made.featurize(samples(N, 0), states(2))
    return made.score(samples(M, 1), "t", method=EKFAC()).numpy().tobytes()


def append(folder):
    whole = samples(N, 0)
    made = attributor(folder)
    half = TensorDataset(*(tensor[: N // 2 + 3] for tensor in whole.tensors))
    if not os.path.exists(f"{folder}/grown"):
        made.featurize(half, states(2))
        note(folder, "grown")
    made.featurize(whole, states(2), append=True)
    return made.score(samples(M, 1), "t").numpy().tobytes()


def drop(folder):
    made = attributor(folder)
    if not os.path.exists(f"{folder}/featurized"):
        made.featurize(samples(N, 0), states(3))
        made.score(samples(M, 1), "all")
        note(folder, "featurized")
    with contextlib.suppress(InvalidInputError):  # an earlier call has dropped it
        made.drop_checkpoint("ckpt-1")
    kept = [states(3)[0], states(3)[2]]
    made.featurize(samples(N, 0), kept)
    return made.score(samples(M, 1), "left", checkpoints=kept).numpy().tobytes()


def sparse(folder):
    made = attributor(folder)
    made.featurize(samples(N, 0), states(2))
    best = made.score(samples(M, 1), "t", dense=False, k=4).top(4)
    return best.indices.tobytes() + best.scores.tobytes()


class Step:
    """One step of gradient descent, from scratch."""

    def __call__(self, rows, seed):
        model = classifier(seed)
        inputs, labels = samples(N, 0)[torch.from_numpy(rows)]
        nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
        return model


def verified(folder):
    made = attributor(folder)
    made.featurize(samples(N, 0))
    scores = made.score(samples(M, 1), "t")
    verdict = verify(scores, Step(), samples(M, 1), budget=4, seeds=(0, 1)).to_json()
    return json.dumps({**verdict, "compared": None}).encode()  # which trainings a resumed call has repeated


RECIPE = """
from benchmarks.killed_runs import M, N, samples
from benchmarks.killed_runs import classifier as build_model


def train_data():
    return samples(N, 0)


def target_data():
    return samples(M, 1)
"""


def by_command_line(folder):
    with open(f"{folder}/recipe.py", "w") as file:
        file.write(RECIPE)
    with open(f"{folder}/run.yaml", "w") as file:
        file.write(
            f"recipe: recipe.py\npath: {folder}/run.zarr\ntask: image_classification\nproj_dim: 8\nprogress: false\n"
            "score:\n  name: held-out\n"
        )
    for command in ("featurize", "score"):
        status = command_line.main([command, f"{folder}/run.yaml"])
        if status:
            raise RuntimeError(f"trak-lite {command} ended with {status}")
    return attributor(folder).scores("held-out").numpy().tobytes()


def object_store(folder):
    from obstore.store import LocalStore

    place = RemotePlace(LocalStore(f"{folder}/objects", mkdir=True), staging=f"{folder}/staging")
    made = attributor(folder, path=place)
    made.featurize(samples(N, 0), states(2))
    return made.score(samples(M, 1), "t").numpy().tobytes()


def traker(folder):
    data, targets = samples(N, 0), samples(M, 1)
    made = TRAKer(
        classifier(),
        "image_classification",
        N,
        save_dir=folder,
        proj_dim=8,
        logging_level=logging.WARNING,
        lambda_reg=1.0,
    )
    for number, state in enumerate(states(2)):
        made.load_checkpoint(state, number)
        for start in range(0, N, 8):
            made.featurize(data[start : start + 8], num_samples=8)
    made.finalize_features()
    for number, state in enumerate(states(2)):
        made.start_scoring_checkpoint("t", state, number, M)
        made.score(targets[:], num_samples=M)
    return made.finalize_scores("t").tobytes()


def row_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def training_and_replay(folder):
    recipe = Recipe(
        classifier,
        row_loss,
        samples(N, 0),
        Adam(lr=0.01),
        batch_size=16,
        epochs=4,
        clip_norm=0.5,
        accumulate=2,
    )
    run = recipe.train(f"{folder}/run", progress=False)
    scores = unrolled(run, samples(M, 1), "image_classification", name="t", block=2, progress=False)
    final = run.final.parameters["0.weight"]
    return scores.numpy().tobytes() + final.numpy().tobytes()


def warm_up():
    """Import in this process what a run imports late, so that no fork has to."""
    torch.set_num_threads(1)
    made = attributor(None, path=None)
    made.featurize(samples(N, 0))
    made.score(samples(M, 1), "t", method=EKFAC())
    verify(made.score(samples(M, 1), "u"), Step(), samples(M, 1), budget=2)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        command_line.main(["featurize", "no such file"])


def note(folder, name):
    """Leave a word for later calls."""
    with open(f"{folder}/.{name}", "w"):
        pass
    os.rename(f"{folder}/.{name}", f"{folder}/{name}")


@dataclass(frozen=True)
class Path:
    """A path, and by how many processes at once it is taken."""

    run: object
    processes: int = 1


PATHS = {
    "featurize and score": Path(featurize_and_score),
    "int8 and norms": Path(quantised_norms),
    "Fisher fit": Path(fisher),
    "EK-FAC fit": Path(ekfac),
    "append": Path(append),
    "drop": Path(drop),
    "sparse scores": Path(sparse),
    "verify": Path(verified),
    "command line": Path(by_command_line),
    "several processes": Path(featurize_and_score, 3),
    "several processes, Fisher fit": Path(fisher, 2),
    "several processes, verify": Path(verified, 2),
    "object store": Path(object_store),
    "object store, several processes": Path(object_store, 2),
    "TRAKer": Path(traker),
    "training and replay": Path(training_and_replay),
}


def record_acknowledged(file):
    """Note every row of a table whose ``put`` has returned: with a digest of its values, as they are read later."""

    def noting(table_class):
        put = table_class.put

        def noted(self, rows, values):
            put(self, rows, values)
            first = int(rows) if np.ndim(rows) == 0 else None
            count = len(next(iter(values.values())))
            numbers = range(first, first + count) if first is not None else np.asarray(rows).tolist()
            os.write(file, (json.dumps([_name_of(self), list(numbers)]) + "\n").encode())

        table_class.put = noted

    for table_class in AbstractRowTable.__subclasses__():
        noting(table_class)


def _name_of(table):
    """Return what tells a table from one of the same name that was dropped: its name and what determines its rows."""
    spec = json.dumps([table.spec.fingerprint, [c.name for c in table.spec.columns]], sort_keys=True)
    return hashlib.sha256(spec.encode()).hexdigest()


def acknowledged(path):
    """Return the rows in such a file, by table; a line cut off by a kill was no acknowledgement."""
    found = {}
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        for line in file.read().rpartition("\n")[0].splitlines():
            name, rows = json.loads(line)
            found.setdefault(name, set()).update(rows)
    return found


def lost_rows(folder):
    """Return how many acknowledged rows of tables that exist are not done any more, by table."""
    stores = [f"{folder}/run.zarr", f"{folder}/trak.zarr"]
    if os.path.isdir(f"{folder}/staging"):
        stores += [f"{folder}/staging/{name}" for name in os.listdir(f"{folder}/staging")]
    if os.path.isdir(f"{folder}/objects"):
        from obstore.store import LocalStore

        stores.append(RemotePlace(LocalStore(f"{folder}/objects"), staging=f"{folder}/staging"))
    noted = acknowledged(f"{folder}/acknowledged")
    done, names = {}, {}
    for path in stores:
        with contextlib.suppress(MissingStoreError), open_store(path) as store:
            for name in store.table_names():
                table = store.open_table(name)
                names[_name_of(table)] = name
                done.setdefault(_name_of(table), set()).update(np.flatnonzero(table.done()).tolist())
    lost = {names[key]: len(rows - done[key]) for key, rows in noted.items() if key in done}
    return {name: count for name, count in lost.items() if count}


def check(folder):
    """Return what is wrong with the stores in a folder, as text; nothing if all is well."""
    lost = lost_rows(folder)
    for name in ("run.zarr", "trak.zarr"):
        if os.path.isdir(f"{folder}/{name}"):
            report = check_store(f"{folder}/{name}")
            if not report.ok:
                return f"{lost} rows lost; {report}".encode()
    return f"{lost} rows lost".encode() if lost else b""


@dataclass
class Child:
    """A process that was forked off, and what it answers."""

    pid: int
    pipe: int
    answer: bytes = b""
    began: float = field(default_factory=time.monotonic)

    def wait(self, until=None):
        """Return its status and answer, or ``None`` if it has not ended by then."""
        while True:
            left = (
                PATIENCE + 5 - (time.monotonic() - self.began) if until is None else until - time.monotonic()
            )
            ready, _, _ = select.select([self.pipe], [], [], max(left, 0))
            if not ready:
                if until is not None:
                    return None
                os.kill(self.pid, signal.SIGKILL)
                until = None
                self.began = time.monotonic()
                continue
            part = os.read(self.pipe, 1 << 16)
            if not part:
                break
            self.answer += part
        os.close(self.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.answer

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def fork(action, folder, *, failpoint=None):
    """Run ``action(folder)`` in a process of its own; what it returns is its answer, an error ends it with status 1."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return Child(pid, ours)
    status = 1
    try:
        os.close(ours)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        silent = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(silent, stream)
        faulthandler.dump_traceback_later(PATIENCE - 5, file=2)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        if failpoint is not None:
            os.environ["TRAK_LITE_FAILPOINT"] = failpoint
        record_acknowledged(os.open(f"{folder}/acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        answer = action(folder)
        status = 0
    except BaseException:
        answer = traceback.format_exc().encode()
    try:
        while answer:
            answer = answer[os.write(theirs, answer) :]
    finally:
        os._exit(status)


class Kills:
    """Runs paths, kills them, and counts.

    Args:
        seed: Of everything that is drawn; what depends on timing is drawn the same way again, and need not hit the
            same step.
        paths: Names in ``PATHS``.
    """

    def __init__(self, seed, paths):
        self.seed, self.paths = seed, list(paths)
        self.minutes = 0.0
        self.by_path = {name: Counter() for name in self.paths}
        self.broken = []
        self._whole = {}
        warm_up()
        fast = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = tempfile.mkdtemp(dir=fast)

    def go_on(self, summary):
        """Take up the counts of an earlier campaign of the same seed and paths."""
        for name, counts in summary["paths"].items():
            self.by_path[name].update(counts)
        self.broken.extend(summary["broken"])
        self.minutes = summary["minutes"]

    def total(self, name):
        """Return a count over all paths."""
        return sum(counts[name] for counts in self.by_path.values())

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, number):
        """Kill one run, up to some times, and let it come to its end; note what is broken."""
        name = self.paths[number % len(self.paths)]
        pick = random.Random(f"{self.seed}/{name}/{number}")
        folder = os.path.join(self.folder, f"run-{number}")
        os.mkdir(folder)
        counts = self.by_path[name]
        try:
            self._run(name, folder, pick, counts)
        except AssertionError as error:
            self.broken.append(
                {"run": number, "path": name, "error": str(error).replace(f"{os.getcwd()}/", "")[-2000:]}
            )
        counts["runs"] += 1
        shutil.rmtree(folder, ignore_errors=True)

    def _run(self, name, folder, pick, counts):
        path, self._folder = PATHS[name], folder
        want, seconds = self._undisturbed(name)
        for _ in range(pick.randint(1, MOST_ATTEMPTS)):
            by_step = pick.random() < 0.5
            step = f"{pick.choice(_FAILPOINTS)}:{pick.randint(1, 12)}" if by_step else None
            children = [
                fork(path.run, folder, failpoint=step if place == 0 else None)
                for place in range(path.processes)
            ]
            ended = []
            for place, child in enumerate(children):
                # A step that does not come is no loss: the process is killed all the same, later.
                least = 0.5 if by_step and place == 0 else 0.0
                found = child.wait(time.monotonic() + seconds * pick.uniform(least, 1) / (place + 1))
                if found is None:
                    child.kill()
                    found = child.wait()
                ended.append(found)
            kills = sum(self._judge(status, answer, want, counts) for status, answer in ended)
            counts["kills"] += kills
            if kills:
                self._check(folder, counts)
            if kills < len(ended):
                break
        last = [fork(path.run, folder) for _ in range(path.processes)]
        for status, answer in [child.wait() for child in last]:
            killed = self._judge(status, answer, want, counts)
            assert not killed, "killed by nobody"
        self._check(folder, counts)

    def _judge(self, status, answer, want, counts):
        """Return whether a process was killed; what it gave otherwise must be the bytes of an undisturbed run."""
        if status == -signal.SIGKILL:
            return 1
        if status == -signal.SIGALRM:
            counts["hangs"] += 1
            with open(f"{self._folder}/output") as output:
                raise AssertionError(f"no end after {PATIENCE} s\n{output.read()}")
        if status:
            counts["failures"] += 1
            raise AssertionError(answer.decode(errors="replace"))
        if answer != want:
            counts["other bits"] += 1
            raise AssertionError("the final scores are not those of an undisturbed run")
        counts["ends with the same bits"] += 1
        return 0

    def _check(self, folder, counts):
        status, answer = fork(check, folder).wait()
        counts["checks"] += 1
        if status or answer:
            counts["rows lost" if b"rows lost" in answer else "unsound stores"] += 1
            raise AssertionError(answer.decode(errors="replace"))

    def _undisturbed(self, name):
        """Return what a path gives, and how long it takes alone."""
        if name not in self._whole:
            folder = os.path.join(self.folder, f"whole-{len(self._whole)}")
            os.mkdir(folder)
            child = fork(PATHS[name].run, folder)
            status, answer = child.wait()
            if status:
                raise RuntimeError(f"{name} fails undisturbed: {answer.decode(errors='replace')}")
            self._whole[name] = answer, time.monotonic() - child.began
        return self._whole[name]

    def summary(self):
        """Return the counts as JSON values."""
        names = ("kills", "runs", "checks", "ends with the same bits")
        zero = ("rows lost", "other bits", "hangs", "failures", "unsound stores")
        return {
            "seed": self.seed,
            "minutes": round(self.minutes, 1),
            "totals": {key: self.total(key) for key in (*names, *zero)},
            "paths": {name: dict(sorted(counts.items())) for name, counts in self.by_path.items()},
            "broken": self.broken,
        }
