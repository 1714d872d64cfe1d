"""Real text with no download: the Python source of the interpreter's own standard library.

The corpus is read as bytes, split 90/10 by file, prepared once into a cache directory and
memory-mapped from there. It differs between Python builds, so its SHA-256 goes with every
figure that depends on it. ``prepare("my/texts")`` takes your own directory or file instead.
"""

import functools
import hashlib
import json
import math
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BatchFn = Callable[[int, int], Any]
"""``batches(first, count)`` returns samples ``first … first + count - 1`` of a fixed order.

It holds no state: the same call gives the same samples, so the position of a run is one
integer, and any rank can take any share.
"""


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus; ``train`` and ``held_out`` are memory-mapped bytes."""

    train: np.ndarray
    held_out: np.ndarray
    sha256: str
    """Of the two parts, in order."""
    source: str
    files: int
    python: str

    @property
    def bytes(self) -> int:
        return len(self.train) + len(self.held_out)


def default_cache() -> Path:
    """``COMPANION_CACHE``, else a checkout's ``data/cache``, else ``~/.cache/companion``."""
    if folder := os.environ.get("COMPANION_CACHE"):
        return Path(folder).expanduser()
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "notebooks").is_dir():
        return checkout / "data" / "cache"
    return Path.home() / ".cache" / "companion"


def prepare(source: str | Path | None = None, cache: str | Path | None = None) -> Corpus:
    """Read ``source`` (default: the standard library) into the cache, or find it there.

    The text goes into a temporary directory that is renamed when it is whole, so several
    processes may prepare at once and an interrupted one leaves nothing half done.

    Raises:
        FileNotFoundError: ``source`` does not exist.
        ValueError: ``source`` holds no text.
        OSError: a file cannot be read, or the cache's disk is full.
    """
    root, files = _files(source)
    cache = Path(cache) if cache is not None else default_cache()
    key = hashlib.sha256()
    for path in files:
        stat = path.stat()
        key.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogatepass"))
    target = cache / f"corpus-{key.hexdigest()[:16]}"
    prepared = _open(target)
    if prepared is None:
        _write("standard library" if source is None else str(root), root, files, target)
        prepared = _open(target)
        assert prepared is not None
    return prepared


def _files(source: str | Path | None) -> tuple[Path, list[Path]]:
    if source is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        files = []
        for directory, inside, names in os.walk(root):
            inside[:] = [name for name in inside if name not in skip]
            files += [Path(directory, name) for name in names if name.endswith(".py")]
        files.sort()
        return root, files
    # os.path leaves an unknown ~name as it is, where pathlib raises
    root = Path(os.path.expanduser(source))
    if not os.fspath(source):
        raise ValueError("corpus is an empty path: give a directory or a file of text")
    if not root.exists():
        raise FileNotFoundError(
            f"corpus {root}: no such file or directory; give a path that exists"
        )
    if root.is_file():
        return root.parent, [root]
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
    ]
    if not files:
        raise ValueError(f"corpus {root}: the directory holds no files; put text files into it")
    return root, files


def _write(source: str, root: Path, files: list[Path], target: Path) -> None:
    parts: dict[str, list[bytes]] = {"train": [], "held_out": []}
    for path in files:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise OSError(
                f"corpus file {path} cannot be read ({error.strerror}); "
                "make it readable or move it out of the corpus"
            ) from None
        if len(files) == 1:
            cut = len(text) * 9 // 10
            parts["train"].append(text[:cut])
            parts["held_out"].append(text[cut:])
        else:
            # by a hash of the name, not by order: adding a file moves no other file
            name = path.relative_to(root).as_posix()
            held = hashlib.sha256(name.encode(errors="surrogatepass")).digest()[0] < 26
            parts["held_out" if held else "train"].append(text)
    if len(files) > 1 and not all(parts.values()):
        everything = parts["train"] or parts["held_out"]
        parts = {"train": everything[:-1], "held_out": everything[-1:]}
    data = {part: b"\n".join(texts) for part, texts in parts.items()}
    if not data["train"] or not data["held_out"]:
        where = files[0] if len(files) == 1 else root
        raise ValueError(f"corpus {where}: there is no text in it; give files that are not empty")
    digest = hashlib.sha256(data["train"] + data["held_out"]).hexdigest()
    manifest = {
        "sha256": digest,
        "source": source,
        "files": len(files),
        "python": platform.python_version(),
        "bytes": {part: len(text) for part, text in data.items()},
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".preparing-", dir=target.parent))
        try:
            for part, text in data.items():
                (aside / f"{part}.bin").write_bytes(text)
            (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
            if target.exists() and _open(target) is None:
                shutil.rmtree(target)
            try:
                aside.rename(target)
            except OSError:
                # another process may have been first, with the same bytes
                if _open(target) is None:
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        size = sum(map(len, data.values())) / 1e6
        raise OSError(
            f"the corpus ({size:.0f} MB) cannot be written to {target.parent} ({error.strerror}); "
            "free some disk space, or set COMPANION_CACHE to another directory"
        ) from None


def _open(target: Path) -> Corpus | None:
    """The prepared corpus, or None where it is missing or damaged."""
    try:
        manifest = json.loads((target / "manifest.json").read_text())
        parts = {}
        for part, size in manifest["bytes"].items():
            parts[part] = np.memmap(target / f"{part}.bin", dtype=np.uint8, mode="r")
            if len(parts[part]) != size:
                return None
        return Corpus(
            train=parts["train"],
            held_out=parts["held_out"],
            sha256=manifest["sha256"],
            source=manifest["source"],
            files=manifest["files"],
            python=manifest["python"],
        )
    except (ValueError, TypeError, AttributeError, KeyError, OSError):
        return None


class Windows:
    """Non-overlapping windows of a byte array, in an order fixed by the seed.

    Calling it gives ``(inputs, targets)``, each ``[count, sequence]`` int64; a target is the
    byte after its input. Every pass (epoch) over the data has its own order and its own offset,
    both functions of the seed and the epoch, so sample ``i`` is the same whoever asks for it.

    Raises:
        ValueError: the array is shorter than one window.
    """

    def __init__(self, data: np.ndarray, sequence: int, seed: int = 0, shuffle: bool = True):
        if sequence < 1:
            raise ValueError(f"sequence is {sequence}: give at least 1")
        if len(data) < sequence + 1:
            raise ValueError(
                f"the text has {len(data)} bytes, one window needs {sequence + 1}: "
                "give more text or a shorter sequence"
            )
        self.data, self.sequence, self.seed, self.shuffle = data, sequence, seed, shuffle
        # one sequence less than fits, so that a pass can start at any offset below `sequence`
        self.windows = max(1, (len(data) - 1) // sequence - 1)
        self._span = np.arange(sequence + 1)
        self._order = functools.lru_cache(maxsize=2)(self._epoch_starts)

    def __len__(self) -> int:
        """Windows in one pass."""
        return self.windows

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        starts = np.arange(self.windows) * self.sequence
        if self.shuffle:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            spare = len(self.data) - 1 - self.windows * self.sequence
            offset = generator.integers(min(self.sequence, spare + 1))
            starts = generator.permutation(starts) + offset
        return starts

    def __call__(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        epoch, index = divmod(first, self.windows)
        parts = [self._order(epoch)[index : index + count]]
        missing = count - len(parts[0])
        while missing:
            epoch += 1
            parts.append(self._order(epoch)[:missing])
            missing -= len(parts[-1])
        starts = np.concatenate(parts) if len(parts) > 1 else parts[0]
        window = torch.from_numpy(self.data[starts[:, None] + self._span].astype(np.int64))
        return window[:, :-1], window[:, 1:]


class Prefetch:
    """Fetch the next batches on a thread while the caller computes; use it in ``with``.

    It expects each call to go on where the last one ended, as a training loop's does; any
    other call is answered too, only later. It helps where ``batches`` waits (disk, network)
    or works outside Python's lock. An error in ``batches`` is raised by the call that asked
    for that batch.
    """

    def __init__(self, batches: BatchFn, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}: give at least 1")
        self.batches, self.ahead = batches, ahead
        self._last: int | None = None
        self._pending: dict[tuple[int, int], Future[Any]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")

    def __call__(self, first: int, count: int) -> Any:
        # from call to call the position moves by the global batch, not by this rank's share
        stride = count if self._last is None else first - self._last
        self._last = first
        wanted = [(first + ahead * stride, count) for ahead in range(self.ahead + 1)]
        for key in self._pending.keys() - set(wanted):
            self._pending.pop(key).cancel()
        for key in wanted:
            if key not in self._pending:
                self._pending[key] = self._pool.submit(self.batches, *key)
        return self._pending.pop((first, count)).result()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class ReferenceLosses:
    """Held-out nats per byte of three predictors that know no context beyond one byte."""

    uniform: float
    unigram: float
    bigram: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def reference_losses(corpus: Corpus) -> ReferenceLosses:
    """Losses to beat: counts of the training bytes (add one), evaluated on held-out files.

    Uniform is ``ln 256``. A model whose held-out loss is not below ``bigram`` has learnt
    less than a table of byte pairs.
    """
    train = np.bincount(pairs(corpus.train), minlength=256 * 256).reshape(256, 256) + 1.0
    held = np.bincount(pairs(corpus.held_out), minlength=256 * 256).reshape(256, 256)
    unigram = np.bincount(corpus.train, minlength=256) + 1.0
    seen = np.bincount(corpus.held_out, minlength=256)
    return ReferenceLosses(
        uniform=math.log(256),
        unigram=float(-(seen * np.log(unigram / unigram.sum())).sum() / seen.sum()),
        bigram=float(-(held * np.log(train / train.sum(1, keepdims=True))).sum() / held.sum()),
    )


def pairs(data: np.ndarray) -> np.ndarray:
    """Each byte pair of ``data`` as one number, ``first * 256 + second``."""
    return data[:-1].astype(np.int32) * 256 + data[1:]
