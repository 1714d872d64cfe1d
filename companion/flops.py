"""How much arithmetic a step asks for, and what share of the device's peak it reaches.

FLOPs are those of the model, not of the hardware: a multiply and an add are two, and what is
computed again (activation checkpointing, a fused attention's backward) counts once.
"""

from time import perf_counter

import torch

from companion.device import synchronize
from companion.model import ModelConfig

DATA_SHEET: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12}),
    ("H200", {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}),
    ("H100 PCIe", {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12}),
    ("H100", {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}),
    ("A100", {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
    ("L40S", {"bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12}),
    ("NVIDIA L4", {"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12}),
    ("V100", {"float16": 125e12, "float32": 15.7e12}),
    ("Tesla T4", {"float16": 65e12, "float32": 8.1e12}),
    ("RTX 4090", {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12}),
    ("RTX 3090", {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12}),
)
"""Dense peaks in FLOP/s from the makers' data sheets (no sparsity; float32 without TF32), by a
part of the device's name. The first that fits holds."""


def model_flops(config: ModelConfig, samples: int, sequence: int) -> float:
    """FLOPs of one training step's matrix products and attention, forward and backward.

    ``samples`` sequences of ``sequence`` tokens. A product costs 2 · m · n · k forward and
    twice that backward. Attention counts every pair of positions, the masked ones as well: the
    convention of the PaLM paper and of ``torch.utils.flop_counter``, though a causal kernel
    may skip half. Norms, rotary positions, softmax and the optimizer are left out.
    """
    kv_width = config.width // config.heads * config.kv_heads
    products = config.width * (2 * config.width + 2 * kv_width + 3 * config.hidden)
    attention = 2 * sequence * config.width
    per_token = config.layers * (products + attention) + config.width * config.vocabulary
    return 3.0 * 2.0 * per_token * samples * sequence


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The highest rate of a square matrix product on this device now, in FLOP/s.

    The best of several sizes, each the fastest of several runs. It swings with temperature and
    with other work on the machine: measure it in the process whose figures it goes with. The
    settings in force hold (threads, ``torch.set_float32_matmul_precision``).
    """
    best = 0.0
    for size in (512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192, 16384):
        # random, not ones: constant data draws less power and flatters a GPU
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        fastest, spent = float("inf"), 0.0
        for attempt in range(30):
            synchronize(device)
            start = perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            seconds = perf_counter() - start
            if attempt:  # the first run chooses a kernel
                fastest = min(fastest, seconds)
            spent += seconds
            if attempt and spent > 0.3:
                break
        best = max(best, 2.0 * size**3 / fastest)
    return best


def data_sheet_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a device by its name (``torch.cuda.get_device_name``); None where unknown."""
    for part, peaks in DATA_SHEET:
        if part in name:
            return peaks.get(str(dtype).removeprefix("torch."))
    return None


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation: the share, 0 to 1, of ``peak`` FLOP/s that a step reached.

    Raises:
        ValueError: seconds or peak is not above 0.
    """
    if not (seconds > 0 and peak > 0):
        raise ValueError(f"seconds ({seconds}) and peak ({peak}) must both be above 0")
    return flops / seconds / peak
