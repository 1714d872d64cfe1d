"""The guide's checklists, and how each item is judged: by figures of the lab book alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Verdict = tuple[str, str]
"""Mark and evidence."""
DONE, FAILED, OPEN = "✔", "✘", "–"
WORDS = {DONE: "shown", FAILED: "not met", OPEN: "not recorded"}

OVERFIT_BELOW = 0.5
"""Nats per token; only a batch learnt by heart comes this far below the bigram's loss."""
STEADY_WITHIN = 0.2
"""Width of the throughput's interval, as a fraction of the throughput."""
DATA_BELOW = 0.05
"""Share of a step that may be spent waiting for data."""

SECTIONS = {
    "loss_heldout": "Train the real workload",
    "loss_bigram": "Train the real workload",
    "corpus_sha256": "Train the real workload",
    "overfit_loss": "Overfit one batch",
    "same_seed_equal": "Same seed, same losses",
    "tokens_per_second": "Throughput, with its spread",
    "tokens_per_second_low": "Throughput, with its spread",
    "tokens_per_second_high": "Throughput, with its spread",
    "step_seconds": "Throughput, with its spread",
    "utilisation": "Is the device busy?",
    "mfu": "Is the device busy?",
    "data_share": "Where a step's time goes",
    "same_batch_ratio": "The same batch again and again",
    "same_batch_low": "The same batch again and again",
    "same_batch_high": "The same batch again and again",
}
"""The section of the notebook that produces a figure."""


def missing(figures: dict[str, Any], *names: str) -> Verdict | None:
    """What to run for the figures that are not there, or None where all are."""
    lacking = [name for name in names if figures.get(name) is None]
    if not lacking:
        return None
    sections = dict.fromkeys(f"“{SECTIONS[name]}”" for name in lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return OPEN, f"{', '.join(lacking)} {verb} not recorded: run {' and '.join(sections)}"


def baseline_correct(f: dict[str, Any]) -> Verdict:
    names = ("loss_heldout", "loss_bigram", "corpus_sha256", "overfit_loss", "same_seed_equal")
    if lacking := missing(f, *names):
        return lacking
    parts = [
        (
            f["loss_heldout"] < f["loss_bigram"],
            f"held-out loss {f['loss_heldout']:.3f}, bigram {f['loss_bigram']:.3f}",
        ),
        (f["overfit_loss"] < OVERFIT_BELOW, f"one batch learnt to {f['overfit_loss']:.3f}"),
        (
            f["same_seed_equal"],
            "same seed, same losses" if f["same_seed_equal"] else "same seed, other losses",
        ),
    ]
    return _all(parts, f" (corpus {f['corpus_sha256'][:8]})")


def baseline_recorded(f: dict[str, Any]) -> Verdict:
    rate = ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high")
    if lacking := missing(f, *rate, "step_seconds", "utilisation"):
        return lacking
    value, low, high = (f[name] for name in rate)
    spread = f"{value:,.0f} tokens/s [{low:,.0f}, {high:,.0f}]"
    parts = [
        (high - low <= STEADY_WITHIN * value, spread),
        (True, f"{1e3 * f['step_seconds']:.3g} ms a step"),
        (True, f"device busy {100 * f['utilisation']:.0f} %"),
    ]
    if f.get("mfu") is not None:
        parts.append((True, f"MFU {100 * f['mfu']:.0f} %"))
    return _all(parts, "" if parts[0][0] else "; not steady: measure again on a quiet machine")


def baseline_no_bottleneck(f: dict[str, Any]) -> Verdict:
    same = ("same_batch_ratio", "same_batch_low", "same_batch_high")
    if lacking := missing(f, "data_share", *same):
        return lacking
    value, low, high = (f[name] for name in same)
    return _all(
        [
            (f["data_share"] < DATA_BELOW, f"waits for data {100 * f['data_share']:.1f} %"),
            (
                low <= 1 + DATA_BELOW,
                f"time over the same batch again and again {value:.3f} [{low:.3f}, {high:.3f}]",
            ),
        ]
    )


def _all(parts: list[tuple[bool, str]], end: str = "") -> Verdict:
    texts = [text if good else f"{FAILED} {text}" for good, text in parts]
    return (DONE if all(good for good, _ in parts) else FAILED), "; ".join(texts) + end


def not_yet(figures: dict[str, Any]) -> Verdict:
    """For items whose figures no notebook records yet."""
    return OPEN, "this stage's notebook does not record it yet"


@dataclass(frozen=True)
class Item:
    """One item of the guide's checklists; ``judge`` reads figures and nothing else."""

    text: str
    judge: Callable[[dict[str, Any]], Verdict] = not_yet


CHECKLISTS: dict[str, tuple[Item, ...]] = {
    "baseline": (
        Item("Functional correctness: it trains and is right on one device", baseline_correct),
        Item("Baseline performance recorded: time per batch, utilisation", baseline_recorded),
        Item("No obvious bottleneck: the data path keeps the device busy", baseline_no_bottleneck),
    ),
    "compile": (
        Item("Wrapped with torch.compile, inductor unless there is a reason"),
        Item("Warmed up before timing"),
        Item("Checked for graph breaks"),
        Item("Dynamic shapes adjusted where recompiles are frequent"),
        Item("Speed-up over the baseline confirmed in the steady state"),
    ),
    "profile": (
        Item("Warmed up before profiling"),
        Item("CPU and device captured"),
        Item("Shapes and memory recorded where needed"),
        Item("A schedule for long runs"),
        Item("Utilisation analysed: device full, else CPU or input"),
        Item("Top operations by self time identified and optimised"),
    ),
    "scale": (
        Item("Determinism: one seed for the model, data apart by rank"),
        Item("Data split over ranks and reshuffled each epoch"),
        Item("DDP: learning rate or batch size scaled with ranks"),
        Item("FSDP: wrapped before the optimizer, wrap policy chosen, shards fit"),
        Item("Communication backend chosen and looked at"),
        Item("Gradients accumulated without needless synchronisation"),
    ),
    "checkpoint": (
        Item("All state included: model, optimizer, scheduler, RNG, data position, step"),
        Item("Restore drill in a clean process, on the same and another number of ranks"),
        Item("Storage managed: the last k are kept"),
        Item("Async discipline: never two in flight, waited for, errors surfaced"),
        Item("Consistency: all ranks load alike, the model on its device first"),
    ),
}
