"""The clinic of notebook 03: five loops, each ill in one way, run for real on this machine.

A patient is a generator, as the training loop is: it yields its loss after every step. The
fifth one is a function that two DDP ranks share their batch by. They live on the CPU, on one
thread, so that everybody meets the same illness: with several threads on a busy machine every
operator waits for the thread that was put aside. The notebook's cells and the functions here
are the same text (a test holds them together).
"""

import contextlib
import inspect
import itertools
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from companion import launch, measure, parallel, profiling, trace
from companion.measure import Comparison, median_interval, phase
from companion.profiling import Schedule, capture
from companion.state import Execution
from companion.trace import Job, Trace

CPU = torch.device("cpu")
SCHEDULE = Schedule(wait=1, warmup=1, active=5)
RANKS = Schedule(wait=2, warmup=1, active=10)
LENGTHS = (14, 30, 47, 61, 78, 92, 110, 123)
"""Of the sequences that patient C meets."""


# ── the patients, as they are handed out ─────────────────────────────────────────────────────


def patient_a(read, model, optimizer, steps):
    """Train on what `read(first, count)` fetches from a network disk. Yields each loss."""
    for index in range(steps):
        with phase("data"):
            inputs, targets = read(128 * index, 128)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss.item()


def patient_b(head, hidden, targets, weights, steps):
    """Train a classifier in which every token has a weight of its own. Yields each loss."""
    for _ in range(steps):
        loss = torch.zeros(())
        for logits, target, weight in zip(head(hidden), targets, weights, strict=True):
            loss = loss + weight * F.cross_entropy(logits, target)
        head.zero_grad()
        loss.backward()
        yield loss.item()


def patient_c(model, pieces, backend, steps):
    """Score sequences as long as they come, with a compiled model. Yields each score."""
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for index in range(steps):
        piece = pieces[index % len(pieces)]
        yield compiled(piece).item()


def patient_d(first, second, inputs, steps):
    """Two layers with a GELU between them, written as in the paper. Yields each loss."""
    for _ in range(steps):
        x = first(inputs)
        x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        loss = second(x).square().mean()
        loss.backward()
        yield loss.item()


def patient_e(lengths, rank, world):
    """Which sequences of a batch this rank takes: a list of their numbers."""
    by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
    count = len(lengths) // world
    return by_length[rank * count : (rank + 1) * count]


PATIENTS: dict[str, Callable[..., Any]] = {
    "a": patient_a,
    "b": patient_b,
    "c": patient_c,
    "d": patient_d,
    "e": patient_e,
}
VERDICTS = {"a": "data", "b": "cpu", "c": "shapes", "d": "kernels", "e": "communication"}
"""What each is ill with."""


# ── what they work with ──────────────────────────────────────────────────────────────────────


class Disk:
    """Batches that take ``seconds`` to come, as from a disk at the other end of a network."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples ``first`` to ``first + count - 1``: inputs ``[count, 256]``, targets."""
        time.sleep(self.seconds)
        draw = torch.Generator().manual_seed(first)
        inputs = torch.randn(count, 256, generator=draw)
        return inputs, torch.randint(10, (count,), generator=draw)


class Compilations:
    """A backend for ``torch.compile`` that counts what it is asked to compile.

    It makes a graph and stops before any C++ is written, so it needs no compiler and takes a
    tenth of a second where inductor takes seconds.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, example_inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)


class _Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.embedding(tokens)))).square().mean()


def _ward_a(seconds: float) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model.insert(2, nn.Linear(1024, 1024))
    model.insert(3, nn.ReLU())
    return Disk(seconds), model, torch.optim.SGD(model.parameters(), lr=0.01)


def ward(which: str) -> tuple[Any, ...]:
    """What a patient is called with, before ``steps``; the same at each call.

    The disk of patient A is as slow as this machine's step is long, or there would be no
    illness on a slow machine and no cure on a fast one.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if which == "a":
            laps = [time.perf_counter()]
            read, model, optimizer = _ward_a(0.0)
            for _ in patient_a(read, model, optimizer, 9):
                laps.append(time.perf_counter())
            torch.manual_seed(0)
            return _ward_a(max(0.004, float(np.median(np.diff(laps)[2:]))))
        if which == "b":
            hidden, targets = torch.randn(300, 256), torch.randint(512, (300,))
            return nn.Linear(256, 512), hidden, targets, torch.rand(300)
        if which == "c":
            pieces = [torch.randint(256, (length,)) for length in LENGTHS]
            return _Scorer().requires_grad_(False), pieces, Compilations()
        if which == "d":
            return nn.Linear(48, 2048), nn.Linear(2048, 48), torch.randn(1024, 48)
    raise ValueError(f"there is no ward for {which!r}: choose one of a, b, c, d")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def admit(which: str, loop: Callable[..., Iterator[float]], steps: int) -> Iterator[float]:
    """The patient's loop, ready to go; ``loop`` in its place where it has been mended."""
    if which == "c":
        torch._dynamo.reset()
    return loop(*ward(which), steps)


@_one_thread()
def examine(which: str, mended: Callable[..., Any] | None = None) -> Trace | Job:
    """Run a patient and record it: a trace; a :class:`Job` of two ranks for patient E.

    Args:
        which: ``a`` to ``e``.
        mended: the learner's function in the place of the patient's.

    Raises:
        ValueError: there is no such patient, or the loop ended too early.
        LaunchError: a rank failed.
    """
    loop = mended or PATIENTS.get(which)
    if loop is None:
        raise ValueError(f"there is no patient {which!r}: choose one of {', '.join(PATIENTS)}")
    directory = profiling.new_directory("runs/clinic")
    if which == "e":
        _launch(loop, directory)
        return trace.read(directory / "traces")
    steps = SCHEDULE.skip_first + SCHEDULE.cycle
    with contextlib.closing(_closable(admit(which, loop, steps + 1))) as losses:
        with capture(directory, SCHEDULE, steps=steps, shapes=True) as recording:
            for _ in itertools.islice(losses, steps):
                recording.step()
    if not recording.files:
        raise ValueError(f"the loop yielded {recording.steps} times and should {steps} times")
    return trace.read(recording.files[0])


def losses(which: str, loop: Callable[..., Iterator[float]], steps: int) -> list[float]:
    """What the loop yields in its first ``steps`` steps, or before if it ends there."""
    with contextlib.closing(_closable(admit(which, loop, steps))) as values:
        return list(itertools.islice(values, steps))


def _closable(loop: Any) -> Any:
    """The loop itself; an iterator without ``close`` gets one that does nothing."""
    return loop if hasattr(loop, "close") else (value for value in loop)


def compilations(loop: Callable[..., Iterator[float]]) -> int:
    """How often patient C's loop makes ``torch.compile`` compile, over all its lengths."""
    torch._dynamo.reset()
    arguments = ward("c")
    for _ in loop(*arguments, len(LENGTHS)):
        pass
    return arguments[-1].count


@_one_thread()
def gain(which: str, mended: Callable[..., Any], rounds: int = 10) -> Comparison:
    """The patient's time over the mended loop's, in paired rounds. Above 1: it is faster.

    Patient C's illness is counted, not timed: see :func:`compilations`.

    Raises:
        ValueError: there is no such patient, or it is C.
    """
    if which == "e":
        return _launch(mended, profiling.new_directory("runs/clinic"), rounds)
    if which not in "abd":
        raise ValueError(f"the gain of {which!r} is not timed: choose one of a, b, d, e")
    sick = PATIENTS[which]
    # several steps at a time: a loader that runs ahead must not profit from the other's turn
    steps = {"a": 6, "b": 1, "d": 2}[which]
    long = 100 * rounds * steps
    with (
        contextlib.closing(_closable(admit(which, sick, long))) as a,
        contextlib.closing(_closable(admit(which, mended, long))) as b,
    ):
        return measure.compare(
            lambda: list(itertools.islice(a, steps)),
            lambda: list(itertools.islice(b, steps)),
            CPU,
            rounds=rounds,
            names=(f"patient {which.upper()}", "yours"),
        )


# ── patient E: two ranks ─────────────────────────────────────────────────────────────────────


def lengths_of(step: int, count: int = 48) -> list[int]:
    """Tokens in each sequence of a batch: 32 to 2,048, short ones as often as long ones in
    every octave, as texts are; the same on every rank."""
    octaves = np.random.default_rng(step).uniform(5, 11, count)
    return np.exp2(octaves).astype(int).tolist()


def _launch(share: Callable[..., Any], directory: Path, rounds: int = 0) -> Any:
    """Two ranks that share by ``share``: traces in ``directory``, or, with rounds, the gain."""
    source = textwrap.dedent(inspect.getsource(share))
    (directory / "share.py").write_text(source)
    result = launch.torchrun(
        "-m companion.classroom.clinic",
        directory,
        share.__name__,
        rounds,
        nproc=2,
        env={"OMP_NUM_THREADS": 1},
        timeout=240,
    )
    if not rounds:
        return None
    seconds = next(m["seconds"] for m in result.metrics if m["rank"] == 0)
    sick, mended = np.array(seconds["sick"]), np.array(seconds["mended"])
    ratio, low, high = median_interval(sick / mended)
    medians = float(np.median(sick)), float(np.median(mended))
    return Comparison(("patient E", "yours"), ratio, low, high, *medians, rounds, 2)


def _rank(directory: str, name: str, rounds: int) -> None:
    """What each of the ranks runs."""
    space: dict[str, Any] = {"torch": torch, "np": np, "math": math}
    exec((Path(directory) / "share.py").read_text(), space)
    share = space[name]
    torch.manual_seed(0)
    with parallel.session(Execution(device="cpu", strategy="ddp")) as mesh:
        layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        model = nn.parallel.DistributedDataParallel(layers)

        def step(share: Callable[..., Any], index: int) -> None:
            lengths = lengths_of(index)
            tokens = sum(lengths[i] for i in share(lengths, mesh.rank, mesh.world))
            model.zero_grad()
            loss = model(torch.ones(tokens, 64)).square().sum() * (mesh.world / sum(lengths))
            loss.backward()

        if rounds == 0:
            steps = RANKS.cycle
            with capture(directory, RANKS, steps=steps, shapes=True) as recording:
                for index in range(steps):
                    step(share, index)
                    recording.step()
            return
        seconds: dict[str, list[float]] = {"sick": [], "mended": []}
        for index in range(rounds + 2):
            turn = [("sick", patient_e), ("mended", share)]
            for which, by in turn if index % 2 else turn[::-1]:
                torch.distributed.barrier()
                start = time.perf_counter()
                step(by, index)
                seconds[which].append(time.perf_counter() - start)
        launch.report(seconds={which: took[2:] for which, took in seconds.items()})


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
