"""Everything about a trace on one page of text, for a terminal."""

from collections.abc import Sequence

from companion.trace.breakdown import breakdown, launches, per_step
from companion.trace.diagnose import diagnose
from companion.trace.memory import memory_peak
from companion.trace.model import Job, Trace
from companion.trace.operators import categories, top
from companion.trace.ranks import stragglers
from companion.trace.shapes import shapes


def report(trace: Trace | Job, count: int = 10) -> str:
    """The page: what it is, the verdict, where the time goes, the top ``count`` operations."""
    return _job(trace, count) if isinstance(trace, Job) else "\n".join(_one(trace, count))


def _one(trace: Trace, count: int) -> list[str]:
    lines = [str(trace), *(f"note: {note}" for note in trace.notes), "", str(diagnose(trace)), ""]
    lines += ["Where the time goes", f"  {breakdown(trace)}"]
    steps = per_step(trace)
    lines += [f"  {step}" for step in steps[:20]]
    if len(steps) > 20:
        lines.append(f"  ... and {len(steps) - 20} more steps")
    of = "kernels" if trace.has_device else "operators of the host"
    lines += ["", f"Top {of} by self time"]
    lines += _table(
        ("ms", "share", "calls", "name", "shapes", "place"),
        [
            (
                f"{op.self_time / 1e3:.3f}",
                f"{100 * op.share:.1f} %",
                f"{op.calls:,}",
                op.name[:60],
                op.shapes[:40],
                op.place[-60:],
            )
            for op in top(trace, count)
        ],
    )
    kinds = categories(trace)
    whole = sum(kinds.values()) or 1.0
    listed = ", ".join(f"{kind} {100 * time / whole:.1f} %" for kind, time in kinds.items())
    lines += ["", f"Kinds of work: {listed or 'none'}"]
    if ahead := launches(trace):
        lines.append(f"Host ahead of the device: {ahead}")
    churn = shapes(trace)
    if churn.recorded:
        worst = f"; most on {churn.worst[0][0]} ({churn.worst[0][1]})" if churn.worst else ""
        lines.append(f"New shapes by step: {', '.join(map(str, churn.new[:20]))}{worst}")
    if churn.recompiles:
        lines.append(
            f"Compilations while recording: {churn.recompiles}, {churn.compile_time / 1e3:,.1f} ms"
        )
    if peak := memory_peak(trace):
        held = "; ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in peak.holders[:3])
        lines.append(
            f"Memory peak: {peak.bytes / 1e6:,.1f} MB, {peak.before / 1e6:,.1f} MB of it from "
            f"before the recording{'; ' + held if held else ''}"
        )
    return lines


def _job(job: Job, count: int) -> str:
    lines = [str(job), *(f"note: {note}" for note in job.notes), "", str(diagnose(job)), ""]
    if len(job) > 1:
        lines += ["Ranks, the one that is waited for most first"]
        lines += _table(
            ("rank", "others waited ms", "waited ms", "last to", "compute ms", "data ms"),
            [
                (
                    str(row.rank),
                    f"{row.late / 1e3:.3f}",
                    f"{row.waited / 1e3:.3f}",
                    f"{100 * row.last:.0f} %",
                    f"{row.compute / 1e3:.3f}",
                    f"{row.loading / 1e3:.3f}",
                )
                for row in stragglers(job)
            ],
        )
    for trace in job:
        lines += ["", f"── rank {trace.rank} ──", *_one(trace, count)]
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
