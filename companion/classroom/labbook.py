"""The lab book: figures with the conditions they were taken under, and the checklists.

One file, ``labbook.jsonl`` under ``COMPANION_HOME`` (default ``~/.companion``). A record is one
line, appended in one write, so two notebooks may record at once. The file is never rewritten:
a damaged line is left where it is and left out.
"""

import contextlib
import fcntl
import html
import json
import math
import os
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from companion.classroom.items import CHECKLISTS, DONE, FAILED, WORDS
from companion.device import differences, same_device

FORMAT = 1
STAGES = tuple(CHECKLISTS)


@dataclass(frozen=True)
class Entry:
    """One record of the lab book."""

    stage: str
    figures: dict[str, Any]
    conditions: dict[str, Any]
    time: str
    """UTC, ISO 8601."""


def path() -> Path:
    """The lab book's file; it need not exist."""
    home = os.environ.get("COMPANION_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".companion") / "labbook.jsonl"


def record(stage: str, figures: dict[str, Any], *, conditions: dict[str, Any]) -> Entry:
    """Append the figures of a stage, with :func:`companion.device.conditions`.

    Figures are plain numbers, text, booleans, None, and lists and dicts of them.

    Raises:
        ValueError: an unknown stage, NaN or infinity, or conditions without a device.
        TypeError: a figure that is not plain, such as a tensor.
        OSError: the lab book cannot be written.
    """
    _known(stage)
    for what, values in (("figures", figures), ("conditions", conditions)):
        if not isinstance(values, dict):
            raise TypeError(f"{what} is a {type(values).__name__}: give a dict of names and values")
    if "device" not in conditions:
        raise ValueError(
            "conditions has no 'device', so nobody could tell what the figures are of: "
            "pass companion.device.conditions(device)"
        )
    figures, conditions = _plain(figures, "figures"), _plain(conditions, "conditions")
    entry = Entry(stage, figures, conditions, datetime.now(UTC).isoformat(timespec="seconds"))
    _append({"format": FORMAT, **vars(entry)})
    return entry


def latest(stage: str, conditions: dict[str, Any] | None = None) -> Entry | None:
    """The newest record of a stage, or None; with ``conditions``, the newest taken under them.

    Says in one warning what it left out: damaged lines, or records from another device.

    Raises:
        ValueError: an unknown stage.
        OSError: the lab book is there and cannot be read.
    """
    entry, notes = _find(stage, conditions)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return entry


def _find(stage: str, conditions: dict[str, Any] | None) -> tuple[Entry | None, list[str]]:
    _known(stage)
    entries, notes = _read()
    entries = [entry for entry in entries if entry.stage == stage]
    if conditions is not None:
        fitting = [entry for entry in entries if same_device(entry.conditions, conditions)]
        if entries and not fitting:
            differ = "; ".join(differences(entries[-1].conditions, conditions))
            notes.append(
                f"the lab book's {stage} records were taken under other conditions ({differ}) "
                f"and are not compared: run the {stage} notebook here"
            )
        entries = fitting
    return (entries[-1] if entries else None), notes


def ratio(name: str, after: Entry, before: Entry) -> float:
    """Figure ``name`` of ``after``, divided by that of ``before``.

    Raises:
        ValueError: the two were taken under other conditions, or losses on other corpora, or
            one of them lacks the figure.
    """
    if found := differences(after.conditions, before.conditions):
        raise ValueError(
            f"{name} of {after.stage} and of {before.stage} were taken under other conditions "
            f"({'; '.join(found)}), so they are not compared: record both on one machine"
        )
    corpora = [entry.figures.get("corpus_sha256") for entry in (after, before)]
    if "loss" in name and corpora[0] != corpora[1]:
        raise ValueError(
            f"{name} of {after.stage} and of {before.stage} come from two corpora, so they are "
            "not compared: record both on one corpus"
        )
    for entry in (after, before):
        value = entry.figures.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value:
            raise ValueError(
                f"{name} of {entry.stage} is {value!r}, which has no ratio: record it again"
            )
    return float(after.figures[name] / before.figures[name])


# --- the file ----------------------------------------------------------------------------


def _known(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"no stage {stage!r}; there are {', '.join(STAGES)}")


def _plain(value: Any, where: str) -> Any:
    """A copy in the types that JSON has; ``torch.__version__`` is a kind of str, for example."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"{where} is {value}: the lab book keeps finite numbers; find out what went wrong "
            "before you record"
        )
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {strange[0]!r}: use text for names")
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    kind = type(value)
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__name__}: record a plain number, for example "
        "float(value)"
    )


def _append(line: dict[str, Any]) -> None:
    file = path()
    data = (json.dumps(line, allow_nan=False) + "\n").encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # between looking at the last byte and writing, nobody else may write; some network
            # file systems have no locks, and there the worst is an empty line
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # a line that a crash has torn must not swallow this one
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unusable(error, file, "written") from error
    if written < len(data):
        raise OSError(f"the lab book {file} took only part of a record: free some disk space")


def _unusable(error: OSError, file: Path, verb: str) -> OSError:
    reason = (error.strerror or str(error)).lower()
    # os.path answers where pathlib raises, in a directory that may not be searched
    if os.path.isfile(file.parent):
        reason = f"{file.parent} is a file"
    return type(error)(
        f"the lab book {file} cannot be {verb} ({reason}): set COMPANION_HOME to a directory "
        "of yours"
    )


def _read() -> tuple[list[Entry], list[str]]:
    """Every whole record, oldest first, and a sentence on each kind of line left out."""
    file = path()
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise _unusable(error, file, "read") from error
    entries, damaged, newer = [], [], []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_not_json)
            if row["format"] > FORMAT:
                newer.append(str(number))
                continue
            if not all(isinstance(row[name], kind) for name, kind in _SHAPE.items()):
                raise TypeError
            entries.append(Entry(**{name: row[name] for name in _SHAPE}))
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.append(str(number))
    notes = []
    if damaged:
        notes.append(
            f"{file}: damaged, and left out: line {', '.join(damaged)}; the other "
            f"{len(entries)} records are used, and the file is left as it is"
        )
    if newer:
        notes.append(
            f"{file}: written by a newer Companion, and left out: line {', '.join(newer)}; "
            "update this one to read it"
        )
    return entries, notes


_SHAPE = {"stage": str, "figures": dict, "conditions": dict, "time": str}


def _not_json(constant: str) -> None:
    raise ValueError(constant)


# --- the checklists ----------------------------------------------------------------------


@dataclass(frozen=True)
class Checklist:
    """A stage's items, each with its mark and evidence; shows itself in a notebook."""

    stage: str
    rows: list[tuple[str, str, str]]
    """Mark, item, evidence."""
    source: str
    notes: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(mark == DONE for mark, _, _ in self.rows)

    def __str__(self) -> str:
        met = sum(mark == DONE for mark, _, _ in self.rows)
        lines = [f"Checklist {self.stage}: {met} of {len(self.rows)}"]
        for mark, text, evidence in self.rows:
            lines += [f"{mark} {text}", f"    {evidence}"]
        return "\n".join([*lines, self.source, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        met = sum(mark == DONE for mark, _, _ in self.rows)
        rows = "".join(
            f'<tr><td><span role="img" aria-label="{WORDS[mark]}" title="{WORDS[mark]}">'
            f'{mark}</span></td><td style="text-align: left"><b>{html.escape(text)}</b><br>'
            f"{html.escape(evidence)}</td></tr>"
            for mark, text, evidence in self.rows
        )
        below = "<br>".join(html.escape(line) for line in [self.source, *self.notes])
        return (
            f'<div class="companion-checklist"><p><b>Checklist {self.stage}: {met} of '
            f"{len(self.rows)}</b></p><table>{rows}</table><p><small>{below}</small></p></div>"
        )


def checklist(stage: str, conditions: dict[str, Any] | None = None) -> Checklist:
    """The guide's checklist of a stage, judged from its newest record alone.

    With ``conditions``, from the newest record taken under them.

    Raises:
        ValueError: an unknown stage.
        OSError: the lab book is there and cannot be read.
    """
    entry, notes = _find(stage, conditions)
    figures = entry.figures if entry else {}
    rows = []
    for item in CHECKLISTS[stage]:
        try:
            mark, evidence = item.judge(figures)
        except (TypeError, ValueError):
            mark, evidence = FAILED, "a figure of the record is of the wrong kind: record it again"
        rows.append((mark, item.text, evidence))
    source = "Nothing is recorded yet."
    if entry:
        source = f"Recorded {entry.time} on {entry.conditions.get('device')}."
    return Checklist(stage, rows, source, notes)
