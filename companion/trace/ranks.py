"""Several ranks of one job: read them together, and find the one that the others wait for."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from companion.trace.breakdown import breakdown
from companion.trace.model import Job, Trace
from companion.trace.reader import files_of, read_file

APART = 60.0
"""Seconds between two ranks' recordings beyond which they are not of one run."""


def read_directory(path: Path) -> Job:
    """Every rank's trace in a directory. See :func:`companion.trace.read`."""
    files = list(files_of(path))
    if not files:
        below = sorted(d for d in path.iterdir() if d.is_dir() and list(files_of(d)))
        if len(below) == 1:
            return read_directory(below[0])
        if below:
            raise ValueError(
                f"{path}: there are {len(below)} recordings in it; name one of them: "
                f"{', '.join(d.name for d in below)}"
            )
        raise ValueError(f"{path}: there is no .json or .json.gz file in this directory")
    traces = [read_file(file) for file in files]
    _check_one_job(path, traces)
    return Job(path, {trace.rank: trace for trace in sorted(traces, key=lambda t: t.rank)})


def _check_one_job(path: Path, traces: list[Trace]) -> None:
    seen: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank in seen:
            raise ValueError(
                f"{path}: rank {trace.rank} is there twice ({seen[trace.rank].path.name} and "
                f"{trace.path.name}), so these are different jobs or windows; keep the files of "
                "one window in a directory of their own"
            )
        seen[trace.rank] = trace
    first = traces[0]
    for trace in traces[1:]:
        both = f"{first.path.name} and {trace.path.name}"
        for what in ("world", "backend"):
            a, b = getattr(first, what), getattr(trace, what)
            if a != b:
                word = {"world": "number of ranks", "backend": "backend"}[what]
                raise ValueError(
                    f"{path}: {both} are of different jobs: their {word} is {a} and {b}; keep "
                    "each job's files in a directory of its own"
                )
        a, b = first.begins_at, trace.begins_at
        if a is not None and b is not None and abs(a - b) > APART:
            raise ValueError(
                f"{path}: {both} were recorded {abs(a - b):,.0f} s apart, so they are of "
                "different jobs; keep each job's files in a directory of its own"
            )
        numbers = ({s.number for s in first.steps}, {s.number for s in trace.steps})
        if all(numbers) and not numbers[0] & numbers[1]:
            raise ValueError(
                f"{path}: {both} hold no step in common, so they are of different windows; keep "
                "each window's files in a directory of its own"
            )
    for trace in traces:
        if trace.world is not None and trace.rank >= trace.world:
            raise ValueError(
                f"{trace.path}: it says rank {trace.rank} of {trace.world}; ranks count from 0"
            )
    if first.world and len(traces) < first.world:
        first.notes.append(f"{path.name}: {len(traces)} of the job's {first.world} ranks are here")


@dataclass(frozen=True)
class RankTime:
    """One rank beside the others, over the collectives that all of them recorded. Times in µs."""

    rank: int
    collectives: int
    """How many collectives could be matched."""
    waited: float
    """What its collectives lasted beyond the shortest one of each: time spent waiting."""
    late: float
    """What the others waited for it: per collective the longest of all less its own, summed."""
    last: float
    """Share of the collectives that it came last to, 0 to 1; a tie counts for nobody."""
    typical: float
    """What is waited for it in the median collective; noise hits every rank now and then, and
    leaves this near 0."""
    compute: float
    """Its :class:`Breakdown`'s compute."""
    loading: float
    """Idle while it fetched data."""


def collectives(trace: Trace) -> dict[tuple[int, str, int], int]:
    """Span number by (step number, name, how many of that name came before in the step)."""
    which = trace.device_communication if trace.has_device else trace.host_communication
    found: dict[tuple[int, str, int], int] = {}
    seen: dict[tuple[int, str], int] = defaultdict(int)
    for index in np.flatnonzero(which):
        step = int(trace.step_of[index]) if trace.steps else -1
        number = trace.steps[step].number if step >= 0 else -1
        # NCCL's names carry arguments that may differ by rank
        name = trace.names[trace.name[index]].partition("(")[0]
        found[number, name, seen[number, name]] = int(index)
        seen[number, name] += 1
    return found


def stragglers(job: Job) -> list[RankTime]:
    """Each rank beside the others, the one that is waited for most first.

    A collective ends for all ranks together, so whoever came last has the shortest one. That
    needs no common clock.

    Raises:
        ValueError: there is one rank only.
    """
    if len(job) < 2:
        raise ValueError(
            f"{job.path}: one rank alone waits for no other; give a directory of several"
        )
    spans = {trace.rank: collectives(trace) for trace in job}
    shared = sorted(set.intersection(*(set(found) for found in spans.values())))
    lasted = np.array(
        [[job[rank].duration[found[key]] for key in shared] for rank, found in spans.items()]
    ).reshape(len(job), len(shared))
    shortest = np.sort(lasted, axis=0)[:2] if shared else np.zeros((2, 0))
    alone = shortest[0] < shortest[1]
    rows = []
    for row, trace in enumerate(job):
        whole = breakdown(trace)
        rows.append(
            RankTime(
                rank=trace.rank,
                collectives=len(shared),
                waited=float((lasted[row] - lasted.min(0)).sum()) if shared else 0.0,
                late=float((lasted.max(0) - lasted[row]).sum()) if shared else 0.0,
                last=float(((lasted[row] == shortest[0]) & alone).mean()) if shared else 0.0,
                typical=float(np.median(lasted.max(0) - lasted[row])) if shared else 0.0,
                compute=whole.compute,
                loading=whole.loading,
            )
        )
    return sorted(rows, key=lambda r: -r.late)
