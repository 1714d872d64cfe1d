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
"""The section of notebook 01 that produces a figure."""
PROFILE_SECTIONS = {
    "warmup_steps": "Capture the real loop",
    "steps": "Capture the real loop",
    "steps_recorded": "Capture the real loop",
    "windows": "Capture the real loop",
    "windows_planned": "Capture the real loop",
    "activities": "Capture the real loop",
    "host_spans": "Capture the real loop",
    "device_spans": "Capture the real loop",
    "shapes_recorded": "Shapes and memory, when you need them",
    "memory_peak_bytes": "Shapes and memory, when you need them",
    "overhead_times": "What recording costs",
    "overhead_all": "What recording costs",
    "busy_share": "Where the time goes",
    "verdict": "From a trace to a decision",
    "top_operator": "The top operators, by self time",
    "top_share": "The top operators, by self time",
    "optimised": "Optimise what is on top",
    "optimised_ratio": "Optimise what is on top",
    "optimised_low": "Optimise what is on top",
    "optimised_high": "Optimise what is on top",
}
"""The section of notebook 03 that produces a figure."""


def missing(
    figures: dict[str, Any], *names: str, sections: dict[str, str] = SECTIONS
) -> Verdict | None:
    """What to run for the figures that are not there, or None where all are."""
    lacking = [name for name in names if figures.get(name) is None]
    if not lacking:
        return None
    to_run = dict.fromkeys(f"“{sections[name]}”" for name in lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return OPEN, f"{', '.join(lacking)} {verb} not recorded: run {' and '.join(to_run)}"


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


def profile_warmed_up(f: dict[str, Any]) -> Verdict:
    if lacking := missing(f, "warmup_steps", sections=PROFILE_SECTIONS):
        return lacking
    return _all([(f["warmup_steps"] > 0, f"{f['warmup_steps']} steps before the first recorded")])


def profile_captured(f: dict[str, Any]) -> Verdict:
    names = ("activities", "host_spans", "device_spans")
    if lacking := missing(f, *names, sections=PROFILE_SECTIONS):
        return lacking
    activities, host, device = (f[name] for name in names)
    parts = [(host > 0, f"{host:,} operators on the CPU")]
    if activities == ["CPU"]:
        parts.append((True, "no device here that can be recorded"))
    else:
        parts.append((device > 0, f"{device:,} pieces of work on the device"))
    return _all(parts)


def profile_shapes_and_memory(f: dict[str, Any]) -> Verdict:
    names = ("shapes_recorded", "memory_peak_bytes", "overhead_times", "overhead_all")
    if lacking := missing(f, *names, sections=PROFILE_SECTIONS):
        return lacking
    peak, times, everything = (f[name] for name in names[1:])
    return _all(
        [
            (bool(f["shapes_recorded"]), "shapes"),
            (peak > 0, f"memory peak {peak / 1e6:,.1f} MB"),
            (True, f"a step takes {times:.2f} times as long with times only, {everything:.2f} "
             "times with all there is"),
        ]
    )  # fmt: skip


def profile_schedule(f: dict[str, Any]) -> Verdict:
    names = ("steps", "steps_recorded", "windows", "windows_planned")
    if lacking := missing(f, *names, sections=PROFILE_SECTIONS):
        return lacking
    return _all(
        [
            (f["windows"] == f["windows_planned"] > 0,
             f"{f['windows']} of {f['windows_planned']} windows written"),
            (0 < f["steps_recorded"] < f["steps"],
             f"{f['steps_recorded']} of {f['steps']} steps recorded"),
        ]
    )  # fmt: skip


def profile_utilisation(f: dict[str, Any]) -> Verdict:
    if lacking := missing(f, "busy_share", "verdict", sections=PROFILE_SECTIONS):
        return lacking
    return _all(
        [
            (True, f"{100 * f['busy_share']:.0f} % of the recorded time computing"),
            (f["verdict"] != "unclear", f"verdict: {f['verdict']}"),
        ]
    )


def profile_top_operation(f: dict[str, Any]) -> Verdict:
    gain = ("optimised", "optimised_ratio", "optimised_low", "optimised_high")
    if lacking := missing(f, "top_operator", "top_share", *gain, sections=PROFILE_SECTIONS):
        return lacking
    what, ratio, low, high = (f[name] for name in gain)
    return _all(
        [
            (True, f"{f['top_operator']} {100 * f['top_share']:.0f} % of the self time"),
            (low > 1, f"{what} {ratio:.2f} times as fast [{low:.2f}, {high:.2f}]"),
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
        Item("Warmed up before profiling", profile_warmed_up),
        Item("CPU and device captured", profile_captured),
        Item("Shapes and memory recorded where needed", profile_shapes_and_memory),
        Item("A schedule for long runs", profile_schedule),
        Item("Utilisation analysed: device full, else CPU or input", profile_utilisation),
        Item("Top operations by self time identified and optimised", profile_top_operation),
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
