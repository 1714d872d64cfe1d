"""A 200 MB trace: time and memory to read it and break it down, beside HolisticTraceAnalysis.

    python -m benchmarks.trace_read --hta-python /path/to/venv/bin/python

The other Python needs HolisticTraceAnalysis (``pip install HolisticTraceAnalysis==0.5.0``, in
an environment of its own); without it only our own figures are measured. Both read the same
made-up file of a CUDA run, and both compute the temporal and the kernel-type breakdown, each in
a fresh process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import save, table

OURS = """
from companion import trace
t = trace.read(PATH)
from companion.trace import hta
trace.breakdown(t), trace.kernel_types(t)
figures = hta.temporal(t)
"""
THEIRS = """
import logging, pathlib, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
job = TraceAnalysis(trace_files={0: PATH}, trace_dir=str(pathlib.Path(PATH).parent))
row = job.get_temporal_breakdown(visualize=False).iloc[0]
job.get_gpu_kernel_breakdown(visualize=False)
names = ("idle", "compute", "non_compute", "kernel")
figures = {name: float(row[name + "_time(us)"]) for name in names}
"""
MEASURED = """
import json, resource, sys, time
PATH = sys.argv[1]
start = time.perf_counter()
{body}
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.platform != "darwin":
    peak *= 1024
print(json.dumps({{"seconds": seconds, "peak_bytes": peak, "figures": figures}}))
"""


def make_trace(path: Path, megabytes: float) -> int:
    """Write a CUDA trace of about this size; returns its number of events.

    Each operator launches one kernel; an eighth of the kernels are collectives on a stream of
    their own, and now and then there is a copy. A step is 2,000 operators.
    """
    events, written = 0, 0
    host, device = {"pid": 4000, "tid": 4000}, {"pid": 0}
    with open(path, "w") as file:
        file.write(
            '{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, '
            '"world_size": 1},\n "traceEvents": [\n'
        )
        now, busy, number, step, step_start = 1_000_000, [1_000_000, 1_000_000], 0, 0, 1_000_000
        separator = ""
        while written < megabytes * 1e6:
            number += 1
            stream = int(number % 8 == 0)
            start = max(now + 9, busy[stream])
            length = 4 + number * 7919 % 13
            busy[stream] = start + length
            kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            if not stream:
                kernel = f"void at::native::vectorized_elementwise_kernel<4, functor_{number % 40}>"
            shapes = [[128, 64 + number % 5], [64 + number % 5, 256]]
            rows: list[dict[str, Any]] = [
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": f"aten::op_{number % 60}",
                    **host,
                    "ts": now,
                    "dur": 11,
                    "args": {"External id": number, "Input Dims": shapes, "Ev Idx": number},
                },
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    **host,
                    "ts": now + 3,
                    "dur": 5,
                    "args": {"External id": number, "cbid": 211, "correlation": number},
                },
                {
                    "ph": "X",
                    "cat": "kernel" if number % 50 else "gpu_memcpy",
                    "name": kernel if number % 50 else "Memcpy DtoD (Device -> Device)",
                    **device,
                    "tid": 7 + stream,
                    "ts": start,
                    "dur": length,
                    "args": {
                        "External id": number,
                        "device": 0,
                        "context": 1,
                        "stream": 7 + stream,
                        "correlation": number,
                        "grid": [128, 1, 1],
                        "block": [256, 1, 1],
                    },
                },
                {
                    "ph": "s",
                    "id": number,
                    **host,
                    "ts": now + 3,
                    "cat": "ac2g",
                    "name": "ac2g",
                },
            ]
            now += 13
            if number % 2000 == 0:
                rows.append(
                    {
                        "ph": "X",
                        "cat": "user_annotation",
                        "name": f"ProfilerStep#{step}",
                        **host,
                        "ts": step_start,
                        "dur": now - step_start,
                        "args": {"External id": number},
                    }
                )
                step, step_start = step + 1, now
            for row in rows:
                written += file.write(separator + json.dumps(row, indent=1))
                separator = ",\n"
            events += len(rows)
        file.write('\n],\n"traceName": "made up"}\n')
    return events


def measure(python: str, body: str, path: Path) -> dict[str, Any]:
    """Run it in a process of its own; seconds, peak memory and the figures it found."""
    done = subprocess.run(
        [python, "-c", MEASURED.format(body=body), str(path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hta-python", help="a Python that has HolisticTraceAnalysis")
    arguments = parser.parse_args()
    sides = {"companion": (sys.executable, OURS)}
    if arguments.hta_python:
        sides["HolisticTraceAnalysis"] = (arguments.hta_python, THEIRS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        events = make_trace(path, arguments.megabytes)
        print(f"{path.stat().st_size / 1e6:.0f} MB, {events:,} events")
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, (python, body) in sides.items():
                runs[name].append(measure(python, body, path))
    best = {name: min(found, key=lambda run: run["seconds"]) for name, found in runs.items()}
    print(
        table(
            ("", "seconds", "peak MB", "compute ms", "idle ms"),
            [
                (
                    name,
                    f"{run['seconds']:.2f}",
                    f"{run['peak_bytes'] / 1e6:.0f}",
                    f"{run['figures']['compute'] / 1e3:.3f}",
                    f"{run['figures']['idle'] / 1e3:.3f}",
                )
                for name, run in best.items()
            ],
        )
    )
    figures: dict[str, Any] = {"megabytes": arguments.megabytes, "events": events, "runs": runs}
    if len(best) == 2:
        ours, theirs = best["companion"], best["HolisticTraceAnalysis"]
        figures["times_faster"] = theirs["seconds"] / ours["seconds"]
        figures["share_of_memory"] = ours["peak_bytes"] / theirs["peak_bytes"]
        print(
            f"{figures['times_faster']:.1f} times faster, with "
            f"{100 * figures['share_of_memory']:.0f} % of the memory"
        )
    save("trace_read", figures, torch.device("cpu"))


if __name__ == "__main__":
    main()
