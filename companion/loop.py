"""The training loop, as a generator: what you add to it is plain code in your own loop body.

    state = build(RunConfig.preset("tiny"))
    for record in train(state, steps=200):
        if record.step % 50 == 0:
            print(record.step, record.loss)

Read it from the bottom up: ``train`` fetches this rank's share of the next global batch and
calls ``optimizer_step``; the rest makes that exact on any number of ranks and micro-batches.
"""

import _signal
import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from companion import corpus as corpora
from companion import device as devices
from companion import parallel
from companion.corpus import BatchFn, Windows
from companion.measure import phase
from companion.model import Transformer, next_token_loss
from companion.state import CountFn, Execution, LossFn, Mesh, RunConfig, TrainState


class NonFiniteLoss(ArithmeticError):
    """The loss is NaN or infinite; the message names the step."""


# --- build -------------------------------------------------------------------------------


def build(
    run: RunConfig,
    how: Execution | None = None,
    mesh: Mesh | None = None,
    *,
    model: Callable[[], nn.Module] | None = None,
    loss: LossFn | None = None,
    batches: BatchFn | None = None,
    held_out: BatchFn | None = None,
    count: CountFn | None = None,
) -> TrainState:
    """Model, optimizer, scheduler and data of a run, at position 0.

    The same call twice gives the same run. Bring your own with ``model`` (a function that
    makes the module, never a trained module), ``batches(first, count)`` (samples of a fixed
    order; see :data:`companion.corpus.BatchFn`), ``loss(model, batch)`` (**summed**) and
    ``count(batch)`` (what the sum is over; by default the targets of ``(inputs, targets)``
    other than -100).

    Raises:
        ValueError: an argument that cannot work, in one sentence.
        FileNotFoundError, OSError: from :func:`companion.corpus.prepare`.
    """
    how = how or Execution()
    mesh = mesh or Mesh(device=devices.choose(how.device))
    if isinstance(model, nn.Module) and not isinstance(model, type):
        raise ValueError(
            "model is a module that exists already, so a second run would start from trained "
            "weights; give a function that makes it: model=lambda: MyModel()"
        )
    parallel.share(run.global_batch, mesh.rank, mesh.world)
    with _fork_rng(mesh.device):
        torch.manual_seed(run.seed)
        module = model() if model else Transformer(run.model)
    if not isinstance(module, nn.Module):
        raise ValueError(f"model() returned {type(module).__name__}; return a torch.nn.Module")
    module.to(mesh.device, getattr(torch, run.dtype))
    known_count = None
    if batches is None:
        text = corpora.prepare(run.corpus)
        batches = Windows(text.train, run.sequence, run.seed)
        held_out = held_out or Windows(text.held_out, run.sequence, seed=0)
    if isinstance(batches, Windows) and count is None:
        known_count = batches.sequence
    # torch.compile on a module gives a module; its signature only promises a callable
    compiled = cast(nn.Module, torch.compile(module)) if how.compile else module
    compute = parallel.wrap(compiled, how, mesh)
    optimizer = make_optimizer(module, run)
    return TrainState(
        run=run,
        how=how,
        mesh=mesh,
        model=module,
        compute=compute,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, run.learning_rate_factor),
        batches=batches,
        held_out=held_out,
        loss=loss or next_token_loss,
        count=count or count_targets,
        known_count=known_count,
    )


def make_optimizer(model: nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters; weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient: nothing to train")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": run.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    # DCP cannot bring back an empty group
    groups = [group for group in groups if group["params"]]
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=run.learning_rate)
    fused = trained[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=run.learning_rate, betas=run.betas, fused=fused)


def count_targets(batch: Any) -> int:
    """Targets of ``(inputs, targets)`` other than -100, which cross-entropy ignores."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2 and torch.is_tensor(batch[1])):
        raise ValueError(
            "a batch is not (inputs, targets), so its targets cannot be counted; "
            "pass build(..., count=your_function)"
        )
    return int((batch[1] != -100).sum())


# --- one step ----------------------------------------------------------------------------


class StepResult:
    """What one optimizer step knows, still on the device: nothing here has been waited for."""

    __slots__ = ("count", "grad_norm", "loss_sum", "work")

    def __init__(self, loss_sum: Tensor, count: int, grad_norm: Tensor | None, work: Any) -> None:
        self.loss_sum = loss_sum
        """This rank's sum; the sum over all ranks once ``work`` is done."""
        self.count = count
        """Targets over all ranks."""
        self.grad_norm = grad_norm
        """Before clipping; None where the run does not clip."""
        self.work = work


def optimizer_step(state: TrainState, batch: Any, count: int | None = None) -> StepResult:
    """One optimizer step on this rank's share of a global batch; moves the position on.

    Every micro-batch's loss is a sum, divided by the number of targets of the whole global
    batch, so the gradient is that of the global mean however it is cut up. DDP averages over
    ranks, hence the factor ``world``. ``count`` is that number where the caller knows it.

    Raises:
        NonFiniteLoss: on a CPU at once, before the weights are touched; on an accelerator
            when the loss is read.
    """
    run, mesh, device = state.run, state.mesh, state.mesh.device
    step = state.step
    if count is None:
        count = parallel.total(state.count(batch), mesh)
    if count == 0:
        raise ValueError(f"step {step}: no target in the batch carries loss; check its mask")
    batch = to_device(batch, device)
    scale = mesh.world / count
    pieces = micro_batches(batch, state.how.micro_batch)
    loss_sum: Tensor | None = None
    state.optimizer.zero_grad(set_to_none=True)
    with _step_randomness(run.seed, step, mesh):
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with _NOTHING if last else parallel.no_sync(state.compute):
                with phase("forward"), _autocast(state):
                    loss = state.loss(state.compute, piece)
                with phase("backward"):
                    (loss * scale).backward()
            loss = loss.detach()
            loss_sum = loss if loss_sum is None else loss_sum + loss
    assert loss_sum is not None
    if device.type == "cpu":
        _check_finite(loss_sum.item(), step)
    work = None
    if mesh.world > 1:
        loss_sum = loss_sum.clone()
        work = parallel.start_sum(loss_sum, mesh)
    with phase("optimizer"):
        grad_norm = None
        if run.clip:
            parameters = [p for g in state.optimizer.param_groups for p in g["params"]]
            grad_norm = nn.utils.clip_grad_norm_(parameters, run.clip)
        with _Undisturbed():
            state.optimizer.step()
            state.scheduler.step()
            state.position += run.global_batch
    return StepResult(loss_sum, count, grad_norm, work)


def micro_batches(batch: Any, size: int | None) -> list[Any]:
    """``batch`` cut along the first dimension into near-equal pieces of at most ``size``."""
    samples = _length(batch)
    if size is None or samples <= size:
        return [batch]
    n = math.ceil(samples / size)
    bounds = [samples * i // n for i in range(n + 1)]
    return [_cut(batch, low, high) for low, high in zip(bounds, bounds[1:], strict=False)]


def _cut(batch: Any, low: int, high: int) -> Any:
    return _map(lambda tensor: tensor[low:high], batch)


def _map(fn: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if torch.is_tensor(batch):
        return fn(batch)
    if isinstance(batch, tuple | list):
        return type(batch)(_map(fn, item) for item in batch)
    if isinstance(batch, dict):
        return {key: _map(fn, value) for key, value in batch.items()}
    return batch


def _length(batch: Any) -> int:
    while not torch.is_tensor(batch):
        items = list(batch.values()) if isinstance(batch, dict) else batch
        if not isinstance(items, tuple | list) or not items:
            raise ValueError(
                f"a batch holds {type(batch).__name__}; give tensors, or tuples or dicts of them"
            )
        batch = items[0]
    return len(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``; tensors that are there already are not copied."""
    if device.type == "cpu":
        return batch
    return _map(lambda t: t.to(device, non_blocking=True), batch)


_NOTHING = contextlib.nullcontext()


def _autocast(state: TrainState) -> contextlib.AbstractContextManager[Any]:
    if state.how.precision == "bf16":
        return torch.autocast(state.mesh.device.type, dtype=torch.bfloat16)
    return _NOTHING


def _check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"step {step}: the loss is {loss}; the weights from then on are not to be trusted. "
            "Lower the learning rate, lengthen the warm-up, or look at that step's batch"
        )


# --- randomness and interrupts -----------------------------------------------------------


def step_seed(seed: int, step: int, rank: int) -> int:
    """One 63-bit seed from the three, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    mask = 2**64 - 1
    z = seed
    for value in (step, rank):
        z = (z + 0x9E3779B97F4A7C15 * (value + 1)) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z >> 1


class _step_randomness:
    """Draws inside depend on (seed, step, rank) only; draws outside go on as if none were made.

    A class, not a generator: it stands in the hot path.
    """

    __slots__ = ("generators", "seed", "states")

    def __init__(self, seed: int, step: int, mesh: Mesh) -> None:
        self.seed = step_seed(seed, step, mesh.rank)
        self.generators = _generators(mesh.device)

    def __enter__(self) -> None:
        self.states = [generator.get_state() for generator in self.generators]
        for generator in self.generators:
            generator.manual_seed(self.seed)

    def __exit__(self, *exc: object) -> None:
        for generator, saved in zip(self.generators, self.states, strict=True):
            generator.set_state(saved)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators


@contextlib.contextmanager
def _fork_rng(device: torch.device) -> Iterator[None]:
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, saved in zip(generators, states, strict=True):
            generator.set_state(saved)


_SIGINT = int(signal.SIGINT)


class _Undisturbed:
    """Holds an interrupt back while weights, schedule and position change together.

    It calls ``_signal``: the wrappers in ``signal`` look up enums, 10 µs a step.
    """

    __slots__ = ("arrived", "before")

    def __enter__(self) -> None:
        self.arrived: tuple[int, Any] | None = None
        self.before: Any = None
        if threading.current_thread() is threading.main_thread():
            self.before = _signal.getsignal(_SIGINT)
            if callable(self.before):
                _signal.signal(_SIGINT, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self.arrived = (signum, frame)

    def __exit__(self, *exc: object) -> None:
        if callable(self.before):
            _signal.signal(_SIGINT, self.before)
            if self.arrived:
                self.before(*self.arrived)


class Stop:
    """True once a signal has arrived, or :meth:`request` was called."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal's number, None where there was none."""
        self._requested = False

    def request(self) -> None:
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested


@contextlib.contextmanager
def stop_requested() -> Iterator[Stop]:
    """Turn Ctrl-C, a kernel interrupt and SIGTERM into a flag that you read between steps.

    A second Ctrl-C raises KeyboardInterrupt, so a step that hangs can still be left. Outside
    the main thread no signal arrives and only :meth:`Stop.request` sets the flag.
    """
    stop = Stop()

    def note(signum: int, frame: Any) -> None:
        if stop and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = int(signum)
        stop.request()

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            before[signum] = signal.signal(signum, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


# --- the loop ----------------------------------------------------------------------------


class Record:
    """One completed step. Reading ``loss`` or a speed is what waits for the device."""

    __slots__ = ("_clock", "_loss", "_rate", "_result", "learning_rate", "position", "step")

    def __init__(
        self, step: int, position: int, learning_rate: float, result: StepResult, clock: "_Clock"
    ) -> None:
        self.step = step
        """Number of this step; the first is 1."""
        self.position = position
        """Samples consumed, over all ranks."""
        self.learning_rate = learning_rate
        """That this step used."""
        self._result, self._clock = result, clock
        self._loss: float | None = None
        self._rate: tuple[float, float] | None = None

    @property
    def tokens(self) -> int:
        """Targets in this step, over all ranks."""
        return self._result.count

    @property
    def loss(self) -> float:
        """Mean loss per target over the global batch.

        Raises:
            NonFiniteLoss: it is NaN or infinite.
        """
        if self._loss is None:
            self._clock.wait()
            if self._result.work is not None:
                self._result.work.wait()
            self._loss = self._result.loss_sum.item() / self._result.count
            _check_finite(self._loss, self.step - 1)
        return self._loss

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient before clipping; None where the run does not clip."""
        return None if self._result.grad_norm is None else self._result.grad_norm.item()

    @property
    def tokens_per_second(self) -> float:
        """Over the steps since a speed was last read; your own loop body is left out."""
        return self._speed()[0]

    @property
    def step_seconds(self) -> float:
        """Mean over the same steps."""
        return self._speed()[1]

    def _speed(self) -> tuple[float, float]:
        if self._rate is None:
            self._rate = self._clock.close()
        return self._rate

    def row(self) -> dict[str, float | int | None]:
        """Plain numbers, ready for JSON."""
        return {
            "step": self.step,
            "position": self.position,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
        }


class _Clock:
    """Seconds inside steps and targets seen, over a window that a reader closes.

    CUDA runs behind the host, so there a step's time is taken between two events in the
    stream, of the last 64 steps at most; nothing waits until the window is read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque(maxlen=64)
        self.seconds, self.tokens, self.steps = 0.0, 0, 0
        self.last = (math.nan, math.nan)

    def start(self) -> None:
        if self.device.type == "cuda":
            self.started = torch.cuda.Event(enable_timing=True)
            self.started.record()
        else:
            self.began = time.perf_counter()

    def stop(self, tokens: int) -> None:
        if self.device.type == "cuda":
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            self.events.append((self.started, ended, tokens))
        else:
            self.seconds += time.perf_counter() - self.began
            self.tokens += tokens
            self.steps += 1

    def wait(self) -> None:
        """Wait for the device; where steps are timed by the host that wait is step time."""
        if self.device.type == "mps":
            before = time.perf_counter()
            devices.synchronize(self.device)
            self.seconds += time.perf_counter() - before

    def close(self) -> tuple[float, float]:
        self.wait()
        if self.events:
            self.events[-1][1].synchronize()
            self.seconds = sum(a.elapsed_time(b) for a, b, _ in self.events) / 1e3
            self.tokens = sum(tokens for _, _, tokens in self.events)
            self.steps = len(self.events)
            self.events.clear()
        if self.steps:
            self.last = (self.tokens / self.seconds, self.seconds / self.steps)
        self.seconds, self.tokens, self.steps = 0.0, 0, 0
        return self.last


class _Feed:
    """This rank's share of the next global batch; on CUDA copied while the step before runs."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        run, mesh = state.run, state.mesh
        self.low, self.high = parallel.share(run.global_batch, mesh.rank, mesh.world)
        self.count = None
        if state.known_count is not None:
            self.count = state.known_count * run.global_batch
        self.ready: tuple[int, Any, int, torch.cuda.Event] | None = None
        self.stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None

    def fetch(self) -> tuple[Any, int]:
        """The batch at the state's position, and its targets over all ranks."""
        state, position = self.state, self.state.position
        ready, self.ready = self.ready, None
        if ready is not None and ready[0] == position:
            torch.cuda.current_stream(state.mesh.device).wait_event(ready[3])
            # the allocator must not hand the memory out while this stream still reads it
            _map(_used_here, ready[1])
            return ready[1], ready[2]
        return self._load(position)

    def _load(self, position: int) -> tuple[Any, int]:
        batch = self.state.batches(position + self.low, self.high - self.low)
        count = self.count
        if count is None:
            count = parallel.total(self.state.count(batch), self.state.mesh)
        return batch, count

    def prepare(self) -> None:
        """Start copying the batch that comes next."""
        if self.stream is None:
            return
        batch, count = self._load(self.state.position)
        with torch.cuda.stream(self.stream):
            batch = _map(lambda t: t.pin_memory() if t.device.type == "cpu" else t, batch)
            batch = to_device(batch, self.state.mesh.device)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self.ready = (self.state.position, batch, count, copied)


def _used_here(tensor: Tensor) -> Tensor:
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def train(state: TrainState, steps: int) -> Iterator[Record]:
    """Train ``steps`` more optimizer steps, one at a time, as you ask for them.

    The generator owns no thread, signal handler or file, so it may be left where it is. A
    ``break`` on one rank ends the loop on all of them at the next step.

    Raises:
        ValueError: ``steps`` is negative.
        NonFiniteLoss: see :func:`optimizer_step`.
    """
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps is {steps!r}: give a whole number of at least 0")
    return _train(state, steps)


def _train(state: TrainState, steps: int) -> Iterator[Record]:
    clock, feed = _Clock(state.mesh.device), _Feed(state)
    unread: deque[Record] = deque(maxlen=64)
    state.compute.train()
    for index in range(steps):
        if parallel.any_rank(False, state.mesh):
            return
        clock.start()
        with phase("data"):
            batch, count = feed.fetch()
        learning_rate = state.optimizer.param_groups[0]["lr"]
        result = optimizer_step(state, batch, count)
        if index + 1 < steps:
            feed.prepare()
        clock.stop(count)
        record = Record(state.step, state.position, learning_rate, result, clock)
        if state.mesh.device.type != "cpu":
            unread.append(record)
            if len(unread) == unread.maxlen:
                _read_all(unread)
        try:
            yield record
        except GeneratorExit:
            # the others are about to ask whether anyone has left
            if index + 1 < steps:
                parallel.any_rank(True, state.mesh)
            raise
    _read_all(unread)


def _read_all(records: deque[Record]) -> None:
    """Name the first step whose loss is not finite; once in 64 steps, as it waits."""
    for record in records:
        _ = record.loss
    records.clear()


@torch.no_grad()
def evaluate(state: TrainState, samples: int = 480, batches: BatchFn | None = None) -> float:
    """Mean held-out loss per target over the first ``samples`` samples, each counted once.

    Leaves everything as it was, also when it raises: the training flag of every submodule
    (a frozen BatchNorm stays frozen) and the random number generators.

    Raises:
        ValueError: there are no held-out batches, or none of them carries loss.
    """
    batches = batches or state.held_out
    if batches is None:
        raise ValueError("there are no held-out batches; pass build(..., held_out=...)")
    if samples < 1:
        raise ValueError(f"samples is {samples}: give at least 1")
    mesh, size = state.mesh, state.how.micro_batch or state.run.global_batch
    module = parallel.local_module(state.compute)
    low, high = samples * mesh.rank // mesh.world, samples * (mesh.rank + 1) // mesh.world
    flags = [(m, m.training) for m in module.modules()]
    loss_sum, count = torch.zeros((), device=mesh.device, dtype=torch.float64), 0
    if mesh.device.type == "mps":
        loss_sum = loss_sum.float()
    with _fork_rng(mesh.device):
        try:
            module.eval()
            for first in range(low, high, size):
                batch = batches(first, min(size, high - first))
                count += state.count(batch)
                with _autocast(state):
                    loss_sum += state.loss(module, to_device(batch, mesh.device))
        finally:
            for submodule, training in flags:
                submodule.training = training
    if work := parallel.start_sum(loss_sum, mesh):
        work.wait()
    count = parallel.total(count, mesh)
    if count == 0:
        raise ValueError(f"none of the {samples} held-out samples carries loss; check the mask")
    return loss_sum.item() / count
