"""Shapes that change from step to step, and what torch.compile compiled again for them."""

import re
from dataclasses import dataclass

import numpy as np

from companion.trace.model import Trace
from companion.trace.nesting import top_level


@dataclass(frozen=True)
class Shapes:
    """How much the shapes change from step to step."""

    new: list[int]
    """Per step: (operator, shapes) pairs that no step before it had."""
    pairs: int
    """Different pairs in all."""
    worst: list[tuple[str, int]]
    """Operators with the most different shapes, the most first."""
    recompiles: int
    """Compilations while recording."""
    compile_time: float
    """µs in them."""
    compiled_in: list[int]
    """Numbers of the steps in which something was compiled."""

    @property
    def recorded(self) -> bool:
        """False where shapes were not recorded: then ``new`` and ``worst`` say nothing."""
        return self.pairs > 0


_COMPILED = re.compile(r"^_compile\.compile_inner|^entire_frame_compile")


def shapes(trace: Trace) -> Shapes:
    """Shape churn and recompiles. Shapes need ``capture(..., shapes=True)``."""
    which = np.flatnonzero(trace.operators & (trace.shape > 0))
    step = trace.step_of[which] if trace.steps else np.zeros(len(which), int)
    key = trace.name[which].astype(np.int64) << 32 | trace.shape[which]
    _, first = np.unique(key, return_index=True)
    pairs = np.unique(key)
    new = np.bincount(step[first][step[first] >= 0], minlength=max(len(trace.steps), 1))
    by_name, counts = np.unique(pairs >> 32, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:10]
    compiled = np.flatnonzero(trace.compiling & trace.is_named(_COMPILED))
    compiled = top_level(trace, np.isin(np.arange(len(trace)), compiled))
    steps = sorted(set(trace.step_of[compiled].tolist()) - {-1}) if trace.steps else []
    time = trace.covered(trace.compiling)
    return Shapes(
        new=new.tolist(),
        pairs=len(pairs),
        worst=[(trace.names[by_name[i]], int(counts[i])) for i in order],
        recompiles=len(compiled),
        compile_time=float((time[1] - time[0]).sum()),
        compiled_in=[trace.steps[index].number for index in steps],
    )
