"""Randomness inside a step comes from (seed, step, rank), and nothing else.

So what a loop body draws cannot change training. Nor does a loop change what you draw after it.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed of its own for each step and rank.

    Plain arithmetic with odd constants keeps them apart, also in the 32 bits that the CPU's
    Mersenne Twister takes; that generator and CUDA's Philox mix what they are given.
    """
    return (seed + 0x1E3779B97F4A7C15 * step + 0x51B54A32D192ED03 * rank) & 0x7FFF_FFFF_FFFF_FFFF


def reseed(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and the device's, not those of other devices."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        _accelerator_generator(device).manual_seed(seed)


@contextlib.contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """On the way out the generators go on as if nothing had been drawn inside."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(_accelerator_generator(device))
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, kept in zip(generators, states, strict=True):
            generator.set_state(kept)


@functools.cache
def _accelerator_generator(device: torch.device) -> torch.Generator:
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    torch.cuda.init()  # before it there are no default generators
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]
