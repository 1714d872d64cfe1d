"""The training loop, as a generator: what you add to it is plain code in your own loop body.

    state = build(RunConfig.preset("tiny"))
    for record in train(state, steps=200):
        if record.step % 50 == 0:
            print(record.step, record.loss)

Read it from the bottom up: ``train`` fetches this rank's share of the next global batch and
calls ``optimizer_step``; the rest makes that exact on any number of ranks and micro-batches.
"""

import contextlib
import functools
import math
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
from companion.randomness import kept_randomness, reseed, step_seed
from companion.record import Clock, NonFiniteLoss, Record
from companion.state import CountFn, Execution, LossFn, Mesh, RunConfig, TrainState
from companion.stopping import Stop, stop_requested, undisturbed

__all__ = [
    "NonFiniteLoss",
    "Record",
    "Stop",
    "build",
    "evaluate",
    "optimizer_step",
    "stop_requested",
    "train",
]

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
    count: CountFn | int | None = None,
) -> TrainState:
    """Model, optimizer and data of a run, at position 0.

    The same call twice gives the same run. Bring your own with ``model`` (a function that
    makes the module, never a trained module), ``batches(first, count)`` (samples of a fixed
    order; see :data:`companion.corpus.BatchFn`), ``loss(model, batch)`` (**summed**) and
    ``count``, what the sum is over: a function of the batch, or a number where every sample
    has as many. By default the targets of ``(inputs, targets)`` other than -100 are counted.

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
    with kept_randomness(mesh.device):
        reseed(run.seed, mesh.device)
        module = model() if model else Transformer(run.model)
    if not isinstance(module, nn.Module):
        raise ValueError(f"model() returned {type(module).__name__}; return a torch.nn.Module")
    module.to(mesh.device, getattr(torch, run.dtype))
    for name, given in (("batches", batches), ("held_out", held_out), ("loss", loss)):
        if not (given is None or callable(given)):
            raise ValueError(
                f"{name} is a {type(given).__name__}: give a function"
                + ("" if name == "loss" else ", batches(first, count), that returns samples")
            )
    if not (count is None or callable(count) or isinstance(count, int)):
        raise ValueError(f"count is {count!r}: give a whole number or a function of a batch")
    known_count: int | None = None
    if batches is None:
        text = corpora.prepare(run.corpus)
        batches = Windows(text.train, run.sequence, run.seed)
        held_out = held_out or Windows(text.held_out, run.sequence, seed=0)
    if isinstance(batches, Windows) and count is None:
        count = batches.sequence
    if isinstance(count, int):
        if count < 1:
            raise ValueError(f"count is {count}: give the targets in a sample, at least 1")
        known_count, count = count, None
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
        parameters=[p for group in optimizer.param_groups for p in group["params"]],
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
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and torch.is_tensor(batch[1])):
        raise ValueError(
            "a batch is not (inputs, targets), so its targets cannot be counted; "
            "pass build(..., count=your_function)"
        )
    return int(torch.count_nonzero(batch[1] != -100))


# --- one step ----------------------------------------------------------------------------


def optimizer_step(state: TrainState, batch: Any, count: int | None = None) -> Record:
    """One optimizer step on this rank's share of a global batch; moves the position on.

    Every micro-batch's loss is a sum, divided by the number of targets of the whole global
    batch, so the gradient is that of the global mean however it is cut up. DDP averages over
    ranks, hence the factor ``world``. ``count`` is that number where the caller knows it.

    It seeds the random number generators, and leaves them so; ``train`` puts them back.

    Raises:
        NonFiniteLoss: on a CPU at once, before the weights are touched; on an accelerator
            when the loss is read.
    """
    run, mesh, device, compute = state.run, state.mesh, state.mesh.device, state.compute
    step = state.position // run.global_batch
    learning_rate = run.learning_rate * run.learning_rate_factor(step)
    if count is None:
        count = parallel.total(state.count(batch), mesh)
    if count == 0:
        raise ValueError(f"step {step + 1}: no target in the batch carries loss; check its mask")
    on_cpu = device.type == "cpu"
    if not on_cpu:
        batch = to_device(batch, device)
    gradient, pieces, loss_sum = mesh.world / count, micro_batches(batch, state.how), None
    reseed(step_seed(run.seed, step, mesh.rank), device)
    state.optimizer.zero_grad(set_to_none=True)
    for index, piece in enumerate(pieces, start=1):
        with _NOTHING if index == len(pieces) else parallel.no_sync(compute):
            with phase("forward"), _autocast(state):
                loss = state.loss(compute, piece)
            if not (torch.is_tensor(loss) and loss.dim() == 0 and loss.requires_grad):
                raise ValueError(_wrong_loss(loss))
            with phase("backward"):
                # as (loss * gradient).backward(), without two operators
                loss.backward(_scalar(gradient, loss.dtype, device))
        loss = loss.detach()
        loss_sum = loss if loss_sum is None else loss_sum + loss
    assert loss_sum is not None
    value, work = loss_sum.item() if on_cpu else None, None
    if value is not None and not math.isfinite(value):
        raise NonFiniteLoss(step + 1, value)
    if mesh.world > 1:
        loss_sum, value = loss_sum.clone(), None
        work = parallel.start_sum(loss_sum, mesh)
    with phase("optimizer"):
        grad_norm = None
        if run.clip:
            grad_norm = nn.utils.clip_grad_norm_(state.parameters, run.clip)
        undisturbed(lambda: _update(state, learning_rate))
    return Record(step + 1, state.position, count, learning_rate, loss_sum, value, work, grad_norm)


def _wrong_loss(loss: Any) -> str:
    what = type(loss).__name__
    if torch.is_tensor(loss):
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if loss.dim() else "cut off from the weights"
        )
    return (
        f"loss(model, batch) is {what}: return one number, the sum over the batch's targets, "
        "as a tensor with its graph"
    )


def _update(state: TrainState, learning_rate: float) -> None:
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate
    state.optimizer.step()
    state.position += state.run.global_batch


@functools.lru_cache(maxsize=8)
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def micro_batches(batch: Any, how: Execution) -> list[Any]:
    """``batch`` cut along the first dimension into near-equal pieces, small enough for ``how``."""
    size = how.micro_batch
    if size is None or (samples := _length(batch)) <= size:
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
        items = [_map(fn, item) for item in batch]
        # a named tuple takes its fields one by one
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
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
    return _map(lambda t: t.to(device, non_blocking=True), batch)


_NOTHING = contextlib.nullcontext()


def _autocast(state: TrainState) -> contextlib.AbstractContextManager[Any]:
    if state.how.precision == "bf16":
        return torch.autocast(state.mesh.device.type, dtype=torch.bfloat16)
    return _NOTHING


# --- the loop ----------------------------------------------------------------------------


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
        state, ready = self.state, self.ready
        if ready is not None and ready[0] == state.position:
            here = torch.cuda.current_stream(state.mesh.device)
            here.wait_event(ready[3])
            # the allocator must not hand the memory out while this stream still reads it
            _map(functools.partial(_used_by, here), ready[1])
            return ready[1], ready[2]
        first, asked = state.position + self.low, self.high - self.low
        try:
            batch = state.batches(first, asked)
        except StopIteration:
            raise ValueError(
                f"batches({first}, {asked}) raised StopIteration: it is a function of its two "
                "numbers, not an iterator; start again at the end of the data"
            ) from None
        if self.count is not None:
            if (given := _length(batch)) < asked:
                raise ValueError(
                    f"batches({first}, {asked}) gave {given} samples: "
                    "start again at the end of the data, so that every batch is full"
                )
            return batch, self.count
        return batch, parallel.total(state.count(batch), state.mesh)

    def prepare(self) -> None:
        """Start copying the batch that comes next."""
        if self.stream is None:
            return
        self.ready = None
        try:
            batch, count = self.fetch()
        except Exception:
            return  # it comes again when the batch is needed, after this step's record
        with torch.cuda.stream(self.stream):
            batch = _map(lambda t: t.pin_memory() if t.device.type == "cpu" else t, batch)
            batch = to_device(batch, self.state.mesh.device)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self.ready = (self.state.position, batch, count, copied)


def _used_by(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    tensor.record_stream(stream)
    return tensor


def train(state: TrainState, steps: int) -> Iterator[Record]:
    """Train ``steps`` more optimizer steps, one at a time, as you ask for them.

    The generator owns no thread, signal handler or file, so it may be left where it is. A
    ``break`` on one rank ends the loop on all of them at the next step. When it ends or is
    closed, the random number generators are put back to where it found them.

    Raises:
        ValueError: ``steps`` is negative.
        NonFiniteLoss: see :func:`optimizer_step`.
    """
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps is {steps!r}: give a whole number of at least 0")
    return _train(state, steps)


def _train(state: TrainState, steps: int) -> Iterator[Record]:
    clock, feed, alone = Clock(state.mesh.device), _Feed(state), state.mesh.world == 1
    unread: deque[Record] = deque(maxlen=64)
    if not state.model.training:
        # not where it trains already: a BatchNorm that was frozen on purpose stays frozen
        state.compute.train()
    with kept_randomness(state.mesh.device):
        for index in range(steps):
            if not alone and parallel.any_rank(False, state.mesh):
                return
            clock.start()
            with phase("data"):
                batch, count = feed.fetch()
            record = optimizer_step(state, batch, count)
            if index + 1 < steps:
                feed.prepare()
            clock.stop(count)
            record._clock = clock
            if state.mesh.device.type != "cpu":
                unread.append(record)
                if len(unread) == unread.maxlen:
                    _read_all(unread)
            try:
                yield record
            except GeneratorExit:
                # the others are about to ask whether anyone has left
                if not alone and index + 1 < steps:
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
        NonFiniteLoss: the held-out loss is NaN or infinite.
    """
    batches = batches or state.held_out
    if batches is None:
        raise ValueError("there are no held-out batches; pass build(..., held_out=...)")
    if samples < 1:
        raise ValueError(f"samples is {samples}: give at least 1")
    mesh, size = state.mesh, state.how.micro_batch or state.run.global_batch
    # not `compute`: nothing is compiled for a few batches, and DDP's forward meets other ranks
    module = state.model
    low, high = samples * mesh.rank // mesh.world, samples * (mesh.rank + 1) // mesh.world
    flags = [(m, m.training) for m in module.modules()]
    loss_sum, count = torch.zeros((), device=mesh.device, dtype=torch.float64), 0
    if mesh.device.type == "mps":
        loss_sum = loss_sum.float()
    with kept_randomness(mesh.device):
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
    if not math.isfinite(value := loss_sum.item()):
        raise NonFiniteLoss(state.step, value)
    return value / count
