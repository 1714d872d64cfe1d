"""Randomness inside a step comes from (seed, step, rank), and nothing else.

What a loop body draws cannot change training, and training changes nothing that it draws.
"""

import contextlib
from collections.abc import Iterator

import torch


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


class step_randomness:
    """Draws inside depend on (seed, step, rank) only; draws outside go on as if none were made.

    A class, not a generator: it stands in the hot path.
    """

    __slots__ = ("generators", "seed", "states")

    def __init__(self, seed: int, step: int, rank: int, device: torch.device) -> None:
        self.seed = step_seed(seed, step, rank)
        self.generators = _generators(device)

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
        torch.cuda.init()  # before it there are no default generators
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators


@contextlib.contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, saved in zip(generators, states, strict=True):
            generator.set_state(saved)
