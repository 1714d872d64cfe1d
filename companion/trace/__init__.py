"""Read a profiler trace and say what to do about it.

    t = trace.read("runs/a/traces/window-1/rank-0.json.gz")   # a Job for a directory of ranks
    print(trace.diagnose(t))                                  # a verdict, why, what next
    print(trace.breakdown(t))                                 # where the time goes

Everything works on traces of CPU-only runs too, and then says nothing about a device.
"""

from pathlib import Path

from companion.trace.breakdown import (
    Breakdown,
    Launches,
    breakdown,
    kernel_types,
    launches,
    per_step,
)
from companion.trace.diagnose import Diagnosis, diagnose
from companion.trace.memory import Peak, memory_peak
from companion.trace.model import Job, Trace
from companion.trace.nesting import nesting
from companion.trace.operators import Comparison, Operation, categories, compare, top
from companion.trace.ranks import RankTime, read_directory, stragglers
from companion.trace.reader import read_file
from companion.trace.report import report
from companion.trace.shapes import Shapes, shapes


def read(path: str | Path) -> Trace | Job:
    """A trace file (.json or .json.gz), or a directory with one file per rank.

    Returns:
        A :class:`Trace` for a file, a :class:`Job` for a directory. What is odd about a file
        but does not hinder reading it stands in ``notes``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: no trace, or a damaged one; files of different jobs in one directory. One
            sentence with the file's name.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or directory")
    return read_directory(path) if path.is_dir() else read_file(path)


__all__ = [
    "Breakdown",
    "Comparison",
    "Diagnosis",
    "Job",
    "Launches",
    "Operation",
    "Peak",
    "RankTime",
    "Shapes",
    "Trace",
    "breakdown",
    "categories",
    "compare",
    "diagnose",
    "kernel_types",
    "launches",
    "memory_peak",
    "nesting",
    "per_step",
    "read",
    "report",
    "shapes",
    "stragglers",
    "top",
]
