"""Record what this machine's GPU does, for those who read the notebooks without one.

Run it through ``benchmarks/record_gpu.sh``. It needs torch >= 2.9 and numpy, takes under eight
minutes and writes ``data/recorded/<device>/``: one JSON file for each section, each with the
conditions, and two traces. A section that fails is recorded as failed and the others go on.

    python -m benchmarks.record --rehearse     # every section, minute sizes, on the CPU, in build/
"""

import argparse
import gzip
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common import RESULTS, save
from benchmarks.work import FOREVER, Work, mlp, tiny
from companion import corpus as corpora
from companion import device as devices
from companion.corpus import Windows
from companion.flops import data_sheet_peak, matmul_peak, mfu, model_flops
from companion.loop import build, train
from companion.measure import compare, interleaved, median_interval, phases, same_batch, throughput
from companion.model import parameter_count
from companion.state import Execution, RunConfig, TrainState

RECORDED = Path(__file__).resolve().parent.parent / "data" / "recorded"
MOST_SECONDS = 330.0
"""No new configuration is begun after this, so that the whole stays under eight minutes."""


@dataclass(frozen=True)
class Size:
    """A preset as it is recorded; the largest wants a GPU of about 24 GB."""

    preset: str
    precision: str
    changes: dict[str, Any]


FULL = (
    Size("tiny", "fp32", {}),
    Size("small", "bf16", {}),
    Size("gpt2", "bf16", {"global_batch": 8}),
    Size("tiny", "bf16", {}),
    Size("small", "fp32", {}),
)
REHEARSAL = (Size("tiny", "fp32", {"sequence": 16, "global_batch": 2}),)


@dataclass(frozen=True)
class Recording:
    device: torch.device
    sizes: tuple[Size, ...]
    rounds: int
    folder: Path
    started: float

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() - self.started > MOST_SECONDS


def prepare(size: Size, device: torch.device, **how: Any) -> tuple[TrainState, Windows]:
    run = RunConfig.preset(size.preset, **{**size.changes, "total_steps": FOREVER})
    windows = Windows(corpora.prepare().train, run.sequence, run.seed)
    how = {"device": device.type, "precision": size.precision, **how}
    return build(run, Execution(**how), batches=windows), windows


# ── Sections: each returns its figures ───────────────────────────────────────────────────────


def conditions(recording: Recording) -> dict[str, Any]:
    """The GPU's own settings, which torch does not know."""
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.sm,temperature.gpu"
    figures: dict[str, Any] = {"cuda": torch.version.cuda, "numpy": np.__version__}
    if recording.device.type == "cuda":
        properties = torch.cuda.get_device_properties(recording.device)
        figures["memory_bytes"] = properties.total_memory
        figures["capability"] = f"{properties.major}.{properties.minor}"
        figures["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        if shutil.which("nvidia-smi"):
            line = subprocess.run(
                ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=30,
            ).stdout.splitlines()  # fmt: skip
            if line:
                values = [value.strip() for value in line[0].split(",")]
                figures["nvidia_smi"] = dict(zip(query.split(","), values, strict=False))
    return figures


def peaks(recording: Recording) -> dict[str, Any]:
    """Measured and published matmul peaks, FLOP/s."""
    name = devices.device_name(recording.device)
    return {
        str(dtype).removeprefix("torch."): {
            "measured": matmul_peak(recording.device, dtype),
            "data_sheet": data_sheet_peak(name, dtype),
        }
        for dtype in (torch.float32, torch.bfloat16)
    }


def speed(recording: Recording) -> dict[str, Any]:
    """Each size in turn; one that does not fit is recorded as such."""
    figures: dict[str, Any] = {}
    for size in recording.sizes:
        name = f"{size.preset} {size.precision}"
        if recording.out_of_time:
            figures[name] = {"left_out": "out of time"}
            continue
        try:
            figures[name] = speed_of(size, recording)
        except torch.OutOfMemoryError:
            figures[name] = {"left_out": "out of memory"}
        torch.compiler.reset()
        if recording.device.type == "cuda":
            torch.cuda.empty_cache()
    return figures


def speed_of(size: Size, recording: Recording) -> dict[str, Any]:
    """Tokens per second, eager and compiled, interleaved; MFU; memory; cost of compiling."""
    device, of, loops = recording.device, {}, {}
    dtype = torch.bfloat16 if size.precision == "bf16" else torch.float32
    peak = matmul_peak(device, dtype)
    published = data_sheet_peak(devices.device_name(device), dtype)
    for kind in ("eager", "compiled"):
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        state, _ = prepare(size, device, compile=kind == "compiled")
        loop = train(state, FOREVER)
        begun = time.perf_counter()
        _ = next(loop).loss
        of[kind] = {"first_step_seconds": time.perf_counter() - begun}
        for _ in range(3):
            _ = next(loop).loss
        if device.type == "cuda":
            # the eager run is still there while the compiled one is measured
            of[kind]["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) - before
        begun = time.perf_counter()
        _ = next(loop).loss
        step_seconds = time.perf_counter() - begun
        loops[kind] = loop.__next__
    run = state.run
    tokens = run.global_batch * run.sequence
    flops = model_flops(run.model, run.global_batch, run.sequence)
    # up to ten steps between two synchronisations: a loop does not read its loss every step
    calls = min(10, max(1, int(0.5 / step_seconds)))
    seconds = interleaved(loops, device, recording.rounds, calls)
    for kind, values in seconds.items():
        rate = throughput(values, tokens, warmup=0)
        of[kind] |= {
            "tokens_per_second": [rate.per_second, rate.low, rate.high],
            "step_seconds": list(median_interval(values)),
            "mfu_of_measured_peak": mfu(flops, rate.step_seconds, peak),
            "mfu_of_data_sheet": published and mfu(flops, rate.step_seconds, published),
        }
    print(f"  {size.preset} {size.precision}: {of['eager']['tokens_per_second'][0]:,.0f} tokens/s "
          f"eager, {of['compiled']['tokens_per_second'][0]:,.0f} compiled", flush=True)  # fmt: skip
    return of | {
        "eager_over_compiled": list(median_interval(seconds["eager"] / seconds["compiled"])),
        "peak_flops": peak,
        "data_sheet_flops": published,
        "parameters": parameter_count(state.model),
        "global_batch": run.global_batch,
        "sequence": run.sequence,
        "steps_between_synchronisations": calls,
        "model_flops_per_step": flops,
    }


def hand_written(work: Work, device: torch.device) -> Iterator[None]:
    """The loop that the companion is held against; the loss is read every tenth step."""
    model, optimizer, scheduler = work.parts(device.type)
    parameters = list(model.parameters())
    for step in range(FOREVER):
        batch = tuple(t.to(device, non_blocking=True) for t in work.fetch(step))
        optimizer.zero_grad(set_to_none=True)
        loss = work.mean_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, work.run.clip)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            loss.item()
        yield


def companion_loop(work: Work, device: torch.device) -> Iterator[None]:
    state = build(
        work.run, Execution(device=device.type), model=work.model, loss=work.summed_loss,
        batches=lambda first, count: work.fetch(first // count),
    )  # fmt: skip
    for record in train(state, FOREVER):
        if record.step % 10 == 1:
            _ = record.loss
        yield


def loop_overhead(recording: Recording) -> dict[str, Any]:
    """Microseconds a step over a hand-written loop, with a control."""
    figures = {}
    for work in (mlp(), tiny()):
        if recording.out_of_time:
            figures[work.name] = {"left_out": "out of time"}
            continue
        loops = {
            "hand-written": hand_written(work, recording.device),
            "hand-written again": hand_written(work, recording.device),
            "companion.train": companion_loop(work, recording.device),
        }
        # a whole number of readings of the loss in each chunk
        seconds = interleaved(
            {name: loop.__next__ for name, loop in loops.items()},
            recording.device,
            2 * recording.rounds,
            calls=50 if recording.sizes == FULL else 1,
        )
        base = seconds["hand-written"]
        figures[work.name] = {
            name: {
                "step_us": 1e6 * median_interval(values)[0],
                "overhead_us": list(median_interval(1e6 * (values - base))),
                "ratio": list(median_interval(values / base)),
            }
            for name, values in seconds.items()
        }
    return figures


def data_path(recording: Recording) -> dict[str, Any]:
    """Waiting for the next batch, and the real batches against one batch again and again."""
    figures = {}
    for size in recording.sizes[:2]:
        state, windows = prepare(size, recording.device)
        with phases(recording.device) as times:
            for _ in train(state, 20 * recording.rounds):
                pass
        waited = np.array([step["data"] for step in times.steps[times.warmup :]])
        same = build(state.run, state.how, batches=same_batch(windows))
        result = compare(
            train(state, FOREVER).__next__,
            train(same, FOREVER).__next__,
            recording.device,
            rounds=4 * recording.rounds,
            names=("real batches", "the same batch again and again"),
        )
        figures[f"{size.preset} {size.precision}"] = {
            "blocked_median_ms": 1e3 * float(np.median(waited)),
            "blocked_p99_ms": 1e3 * float(np.quantile(waited, 0.99)),
            "phases": times.as_dict(),
            "against_same_batch": result.as_dict(),
        }
    return figures


def trace(recording: Recording) -> dict[str, Any]:
    """Three steps, eager and compiled, as Chrome traces."""
    size, figures = recording.sizes[min(1, len(recording.sizes) - 1)], {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if recording.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for kind in ("eager", "compiled"):
        state, _ = prepare(size, recording.device, compile=kind == "compiled")
        loop = train(state, FOREVER)
        for _ in range(5):
            _ = next(loop).loss
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            for _ in range(3):
                next(loop)
            devices.synchronize(recording.device)
        path = recording.folder / f"trace_{size.preset}_{size.precision}_{kind}.json.gz"
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
        figures[kind] = {"file": path.name, "bytes": path.stat().st_size, "steps": 3}
    return figures


def checkpoint_stall(recording: Recording) -> dict[str, Any]:
    """How long ``torch.save`` of model and optimizer stops training."""
    size = recording.sizes[min(2, len(recording.sizes) - 1)]
    state, _ = prepare(size, recording.device)
    for record in train(state, 2):
        _ = record.loss
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        for _ in range(4):
            devices.synchronize(recording.device)
            begun = time.perf_counter()
            content = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
            torch.save(content, path)
            seconds.append(time.perf_counter() - begun)
        stored = path.stat().st_size
    return {
        "preset": size.preset,
        "method": "torch.save, no fsync",
        "bytes": stored,
        "stall_seconds": list(median_interval(seconds[1:])),
        "first_seconds": seconds[0],
    }


SECTIONS: tuple[Callable[[Recording], dict[str, Any]], ...] = (
    conditions,
    peaks,
    loop_overhead,
    data_path,
    checkpoint_stall,
    speed,
    trace,
)
"""``trace`` last: it finds its model compiled, and ``speed`` must not."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="minute sizes on the CPU")
    arguments = parser.parse_args()
    if not (arguments.rehearse or torch.cuda.is_available()):
        print("No GPU that torch can use is here, so nothing was recorded.")
        return 0
    device = torch.device("cpu") if arguments.rehearse else devices.choose("cuda")
    slug = re.sub(r"[^a-z0-9]+", "-", devices.device_name(device).lower()).strip("-")
    folder = RESULTS / "rehearsal" if arguments.rehearse else RECORDED / slug
    folder.mkdir(parents=True, exist_ok=True)
    sizes, rounds = (REHEARSAL, 3) if arguments.rehearse else (FULL, 15)
    recording = Recording(device, sizes, rounds, folder, time.monotonic())
    command = "python -m benchmarks.record --rehearse" if arguments.rehearse else (
        "bash benchmarks/record_gpu.sh"
    )  # fmt: skip
    failed = []
    for section in SECTIONS:
        begun = time.monotonic()
        print(f"{section.__name__} …", flush=True)
        try:
            figures = section(recording)
        except Exception as error:
            figures = {"failed": f"{type(error).__name__}: {error}"}
            failed.append(section.__name__)
        figures |= {"command": command, "seconds_taken": time.monotonic() - begun}
        save(section.__name__, figures, device, folder)
    took = time.monotonic() - recording.started
    print(f"recorded in {took:.0f} s" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
