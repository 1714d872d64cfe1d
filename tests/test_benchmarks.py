"""The benchmarks are run by hand; here only that they can be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record")
def test_recording_without_a_gpu_says_so_in_one_sentence():
    done = run("bash", "benchmarks/record_gpu.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "No GPU that torch can use is here, so nothing was recorded.\n"


def test_recordings_hold_their_conditions_and_the_command():
    for path in (ROOT / "data" / "recorded").glob("*/*.json"):
        record = json.loads(path.read_text())
        assert record["conditions"]["device"] and record["conditions"]["torch"], path
        assert record["figures"]["command"] == "bash benchmarks/record_gpu.sh", path


@pytest.mark.parametrize(
    "name",
    [
        "loop_overhead",
        "next_batch",
        "import_time",
        "baseline_losses",
        "compile_cases",
        "compile_cold",
        "trace_read",
        "timeline_frames",
        "record",
    ],
)
def test_every_benchmark_starts(name):
    if name == "loop_overhead":
        pytest.importorskip("greenlet")
    done = run(sys.executable, "-m", f"benchmarks.{name}", "--help")
    assert done.returncode == 0, done.stderr
    command = "record_gpu.sh" if name == "record" else f"benchmarks.{name}`"
    assert command in (ROOT / "benchmarks" / "README.md").read_text()
