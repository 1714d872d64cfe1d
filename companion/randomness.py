"""Randomness inside a step comes from (seed, step, rank), and nothing else.

What a loop body draws cannot change training, and training changes nothing that it draws.
"""

import functools

import torch


def step_seed(seed: int, step: int, rank: int) -> int:
    """One 63-bit seed from the three, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    z = (seed + 0x9E3779B97F4A7C15 * (step + 1) + 0xD1B54A32D192ED03 * rank) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


_MASK = 2**64 - 1


class seeded:
    """Draws inside depend on ``seed`` only; draws outside go on as if none were made.

    A class, not a generator, and the accelerator apart: it stands in the hot path.
    """

    __slots__ = ("accelerator", "saved", "saved_accelerator", "seed")

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.accelerator = seed, _accelerator_generator(device)

    def __enter__(self) -> None:
        cpu, accelerator = torch.default_generator, self.accelerator
        self.saved = cpu.get_state()
        cpu.manual_seed(self.seed)
        if accelerator:
            self.saved_accelerator = accelerator.get_state()
            accelerator.manual_seed(self.seed)

    def __exit__(self, *exc: object) -> None:
        torch.default_generator.set_state(self.saved)
        if self.accelerator:
            self.accelerator.set_state(self.saved_accelerator)


@functools.cache
def _accelerator_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cuda":
        torch.cuda.init()  # before it there are no default generators
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else None
