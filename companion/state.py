"""What is trained (:class:`RunConfig`), how it is executed (:class:`Execution`), and the
state of a run (:class:`TrainState`).

The two configurations are kept apart on purpose. A resumed run must match in everything that
RunConfig holds; it may change anything that Execution holds: device, ranks, precision.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from companion.corpus import BatchFn
from companion.model import MODELS, ModelConfig

LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss(model, batch)``: the loss **summed** over what ``count(batch)`` counts."""
CountFn = Callable[[Any], int]
"""``count(batch)``: how many targets of the batch carry loss."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What is trained. Equal RunConfigs on one corpus are the same run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    corpus: str | None = None
    """A directory or file of text; None is the interpreter's standard library."""
    sequence: int = 128
    """Tokens in a sample."""
    global_batch: int = 12
    """Samples in one optimizer step, over all ranks and micro-batches."""
    total_steps: int = 300
    """The horizon of the learning-rate schedule."""
    optimizer: str = "adamw"
    """``adamw`` or ``sgd``."""
    learning_rate: float = 3e-3
    """At the end of the warm-up."""
    final_fraction: float = 0.1
    """Learning rate at ``total_steps``, as a fraction of ``learning_rate``."""
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """Of matrices only."""
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    seed: int = 0
    dtype: str = "float32"
    """Of the parameters and the optimizer state."""

    def __post_init__(self) -> None:
        for name in ("sequence", "global_batch", "total_steps"):
            value = getattr(self, name)
            if not _whole(value) or value < 1:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")
        if self.sequence > self.model.context:
            raise ValueError(
                f"sequence is {self.sequence}, the model's context is {self.model.context}: "
                "shorten the sequence or raise the context"
            )
        if self.optimizer not in ("adamw", "sgd"):
            raise ValueError(f"optimizer is {self.optimizer!r}: choose adamw or sgd")
        if not _whole(self.warmup_steps) or self.warmup_steps < 0:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps!r}: give a whole number, 0 or more"
            )
        for name in ("learning_rate", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}: give a finite number of at least 0")
        if not (_whole(self.seed) and 0 <= self.seed < 2**63):
            raise ValueError(f"seed is {self.seed!r}: give a whole number from 0 to 2**63 - 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}: give two numbers from 0 up to, not 1")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction is {self.final_fraction}: give a number from 0 to 1")
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}: choose float32, float64 or bfloat16")

    @classmethod
    def preset(cls, name: str, *, dropout: float = 0.0, **changes: Any) -> "RunConfig":
        """A named run, for example ``RunConfig.preset("tiny", total_steps=600)``.

        Raises:
            ValueError: no such preset, or a change that is out of range.
            TypeError: a change that RunConfig does not have.
        """
        if name not in MODELS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(MODELS)}")
        model = replace(MODELS[name], dropout=dropout)
        defaults: dict[str, Any] = {
            "tiny": {},
            "small": {"sequence": 256, "global_batch": 24, "learning_rate": 1e-3},
        }.get(
            name,
            {
                "sequence": model.context,
                "global_batch": 480 if name == "gpt2" else 1024,
                "learning_rate": 6e-4 if name == "gpt2" else 3e-4,
                "warmup_steps": 2000,
                "total_steps": 100_000,
            },
        )
        known = {f.name for f in fields(cls)}
        if unknown := sorted(changes.keys() - known):
            raise TypeError(
                f"RunConfig has no {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        return cls(**{"model": model, **defaults, **changes})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to ``final_fraction``, as a factor.

        A function of the step alone: there is no scheduler whose state could be lost.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_fraction + (1 - self.final_fraction) * cosine


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed. Any of it may change when the run is resumed."""

    device: str = "auto"
    """``auto`` takes the accelerator that is here, else the CPU."""
    strategy: str = "none"
    """``none`` on one process, ``ddp`` on several."""
    compile: bool = False
    precision: str = "fp32"
    """Of the computation: ``fp32`` or ``bf16`` (autocast)."""
    micro_batch: int | None = None
    """Most samples in one forward pass on one rank; None takes the rank's whole share."""

    def __post_init__(self) -> None:
        if self.strategy not in ("none", "ddp"):
            raise ValueError(f"strategy is {self.strategy!r}: choose none or ddp")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}: choose fp32 or bf16")
        if self.micro_batch is not None and not (_whole(self.micro_batch) and self.micro_batch > 0):
            raise ValueError(
                f"micro_batch is {self.micro_batch!r}: give a whole number of at least 1, or None"
            )


@dataclass(frozen=True)
class Mesh:
    """This process's place in the run."""

    device: torch.device
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    cpu_group: Any = None
    """Process group for small agreements on the CPU; None on one process."""


@dataclass
class TrainState:
    """A run in progress: what a checkpoint holds, and what is needed to go on."""

    run: RunConfig
    how: Execution
    mesh: Mesh
    model: nn.Module
    """The module itself: its keys are the same whatever wraps it."""
    compute: nn.Module
    """What is called: the model, compiled and wrapped as ``how`` asks."""
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    """What the optimizer trains."""
    batches: BatchFn
    held_out: BatchFn | None
    loss: LossFn
    count: CountFn
    known_count: int | None
    """Targets in a sample where all samples have the same number, else None."""
    position: int = 0
    """Samples consumed by completed steps, over all ranks."""

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.position // self.run.global_batch
