"""What torch.compile costs and gains: cold and warm starts, its cache, break-even, regions.

Where the graph breaks is in :mod:`companion.breaks`, how often it is compiled again in
:mod:`companion.recompiles`.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from companion import device as devices
from companion import tracer
from companion.device import Finding

WITHOUT_COMPILER = (
    "what needs no compiler still works with backend='eager' or 'aot_eager': graphs, graph breaks "
    "and recompiles are the same there, only nothing gets faster"
)


def compiler_ready(device: torch.device | None = None) -> Finding:
    """Whether torch.compile really works here, found out by compiling one pointwise operation.

    (A bare ``Linear`` proves nothing: it needs no generated code.) The first time takes seconds.
    The finding's remedy says what to install and what works until then.
    """
    device = device or devices.choose()
    name = "torch.compile"
    if device.type == "cpu":
        if devices.cpp_compiler() is None:
            found, remedy = "no working C++ compiler", "install g++, or point CXX to a compiler"
            return Finding(name, False, found, f"{remedy}; {WITHOUT_COMPILER}", needed=False)
        if devices.python_headers() is None:
            found, remedy = "no Python.h", "install this Python's development headers"
            return Finding(name, False, found, f"{remedy}; {WITHOUT_COMPILER}", needed=False)

    def probe(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    try:
        with tracer.set_aside(), torch.no_grad():
            torch.compile(probe)(torch.ones(4, device=device))
    except Exception as error:  # whatever the generated code's compiler says
        first = str(error).strip().partition("\n")[0]
        remedy = "run `python -m companion doctor`"
        return Finding(name, False, first, f"{remedy}; {WITHOUT_COMPILER}", needed=False)
    return Finding(name, True, f"inductor works on {device.type}", "", needed=False)


def break_even(cold_seconds: float, eager_step: float, compiled_step: float) -> int | None:
    """The first step at which compiling has paid: ``cold_seconds`` over the saving per step.

    All in seconds; ``cold_seconds`` is what the first call takes longer than a later one. None
    where a compiled step is not faster, so that it never pays.

    Raises:
        ValueError: a time is negative or not a number, or a step takes no time.
    """
    times = {"cold_seconds": cold_seconds, "eager_step": eager_step, "compiled_step": compiled_step}
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0 and (value or name == "cold_seconds")):
            raise ValueError(f"{name} is {value!r}: give seconds above 0")
    saving = eager_step - compiled_step
    if saving <= 0:
        return None
    steps = cold_seconds / saving
    # 8 / (0.010 - 0.006) is not exactly 2000 in binary
    return max(1, round(steps) if math.isclose(steps, round(steps)) else math.ceil(steps))


def compile_blocks(model: nn.Module, **options: Any) -> list[str]:
    """Compile each repeated block of a model in place, and nothing else of it.

    The blocks are the members of every ``nn.ModuleList`` of two or more modules of one class:
    they share one compilation. State keys stay as they are. ``options`` go to torch.compile.
    Returns the names of the blocks.

    Raises:
        ValueError: there are no repeated blocks, or they are of a class that lives in torch.nn.
    """
    blocks = {
        f"{prefix}.{name}".lstrip("."): block
        for prefix, parent in model.named_modules()
        if isinstance(parent, nn.ModuleList)
        and len(parent) > 1
        and len({type(block) for block in parent}) == 1
        for name, block in parent.named_children()
    }
    # a block inside a block is compiled with it
    blocks = {
        name: block
        for name, block in blocks.items()
        if not any(name.startswith(f"{other}.") for other in blocks)
    }
    kind = type(model).__name__
    if not blocks:
        raise ValueError(
            f"{kind} has no repeated blocks (an nn.ModuleList of several modules of one class): "
            "compile the whole model with torch.compile(model)"
        )
    for name, block in blocks.items():
        if type(block).__module__.startswith("torch.nn."):
            raise ValueError(
                f"{kind}.{name} is torch.nn.{type(block).__name__} itself, whose .compile() "
                "captures nothing before torch 2.14: put it in a class of your own"
            )
    for block in blocks.values():
        block.compile(**options)
    return list(blocks)


# ── the cache ────────────────────────────────────────────────────────────────────────────────

KINDS = {
    "fxgraph": "FX graphs with what Inductor made of them",
    "aotautograd": "forward and backward graphs of AOTAutograd",
    "triton": "GPU kernels",
}
"""Folders of the cache that have a name; the two-letter ones hold generated code and binaries."""


def cache_directory() -> Path:
    """Where Inductor keeps what it compiled: ``TORCHINDUCTOR_CACHE_DIR``, or a folder of the
    system's temporary directory, which a container loses when it ends."""
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(named)
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir())


def cache_contents(cache: Path | str | None = None) -> dict[str, tuple[int, int]]:
    """Files and bytes by kind: ``{"fxgraph": (4, 60_000), ..., "code": (12, 3_000_000)}``."""
    root = Path(cache) if cache is not None else cache_directory()
    contents: dict[str, tuple[int, int]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            top = path.relative_to(root).parts[0]
            kind = top if top in KINDS else "code"
            files, size = contents.get(kind, (0, 0))
            contents[kind] = files + 1, size + path.stat().st_size
    return contents


def clear_cache(cache: Path | str | None = None) -> int:
    """Delete an Inductor cache with all that is in it; returns the bytes freed.

    Raises:
        ValueError: the folder holds something else than an Inductor cache.
    """
    root = Path(cache) if cache is not None else cache_directory()
    if not root.exists():
        return 0
    _refuse_foreign(root)
    size = sum(size for _, size in cache_contents(root).values())
    shutil.rmtree(root)
    return size


def copy_cache(target: Path | str, cache: Path | str | None = None) -> int:
    """Copy the cache to ``target``, to be used there or on another machine of the same kind (CPU
    or GPU, Python and torch) with ``TORCHINDUCTOR_CACHE_DIR=target``; returns the bytes copied.

    Entries that are there already are kept. PyTorch's mega-cache does less on a CPU: what it
    carries is compiled by g++ once more.

    Raises:
        ValueError: the source is no Inductor cache, or the target holds something else.
    """
    root, target = Path(cache) if cache is not None else cache_directory(), Path(target)
    if not root.is_dir():
        raise ValueError(f"there is no cache at {root}: compile something first")
    _refuse_foreign(root)
    if target.exists():
        _refuse_foreign(target)
    shutil.copytree(root, target, dirs_exist_ok=True)
    return sum(size for _, size in cache_contents(root).values())


def _refuse_foreign(root: Path) -> None:
    if root.is_symlink() or not root.is_dir():
        raise ValueError(f"{root} is not a folder, so it is no Inductor cache: name the folder")
    names = {path.name for path in root.iterdir()}
    known = {
        *KINDS, "cache", "dynamo", "gcc", "locks", "precompiled_headers", "torch_cutlass",
    }  # fmt: skip
    # two letters: generated code; tmp…: left by a process that was killed
    foreign = sorted(n for n in names - known if not (re.fullmatch("[a-z0-9]{2}|tmp.*", n)))
    if foreign or (names and not names & {"fxgraph", "aotautograd", "locks", "cache"}):
        what = f"it holds {foreign[0]}" if foreign else "it lacks Inductor's folders"
        raise ValueError(f"{root} is not an Inductor cache ({what}): nothing was touched")


# ── cold and warm ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Start:
    """One process that ran a program with a compiler in it; imports are subtracted."""

    cpu_seconds: float
    """Of the process and its children (g++), user and system."""
    wall_seconds: float
    import_cpu_seconds: float
    """What was subtracted: importing torch with its compiler."""
    fx_hits: int
    aot_hits: int
    """Graphs found in the caches of FX graphs and of AOTAutograd."""

    def __str__(self) -> str:
        hits = f"cache hits: {self.fx_hits} FX, {self.aot_hits} AOTAutograd"
        return f"{self.cpu_seconds:.1f} CPU-s, {self.wall_seconds:.1f} s wall; {hits}"


@dataclass(frozen=True, repr=False)
class ColdWarm:
    """A cold start, and a warm one in a second process on the cache that the first one left."""

    cold: Start
    warm: Start
    contents: dict[str, tuple[int, int]]
    """Of the cache: files and bytes by kind."""

    @property
    def ratio(self) -> float:
        """How many times less CPU time the warm start took."""
        return self.cold.cpu_seconds / self.warm.cpu_seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        lines = [f"cold  {self.cold}", f"warm  {self.warm}", f"ratio {self.ratio:.1f} in CPU time"]
        for kind, (files, size) in self.contents.items():
            what = KINDS.get(kind, "generated code and binaries")
            lines.append(f"{kind:<12} {files:>4} files {size / 2**20:7.2f} MiB  {what}")
        return "\n".join(lines)

    __repr__ = __str__


def cold_and_warm(program: str, setup: str = "", timeout: float = 900) -> ColdWarm:
    """Run Python text in two fresh processes that share a cache of their own, empty at first.

    ``setup`` runs before the clock starts and imports what the program needs: build the model and
    the batch there, and make the first compiled call in ``program``, which sees its names. The
    cache is deleted afterwards; yours is not touched. (Precompiled C++ headers lie outside of it,
    in the default place: the first compilation ever on a machine takes longer than ``cold``.)

    Raises:
        RuntimeError: the program failed; with its last line.
        TimeoutError: it took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="companion_cache_") as folder:
        cold = fresh_start(program, setup, folder, timeout)
        contents = cache_contents(folder)
        return ColdWarm(cold, fresh_start(program, setup, folder, timeout), contents)


def fresh_start(
    program: str, setup: str = "", cache: Path | str | None = None, timeout: float = 900
) -> Start:
    """Run ``program`` once in a fresh process on this cache, as in :func:`cold_and_warm`."""
    root = Path(cache) if cache is not None else cache_directory()
    with tempfile.TemporaryDirectory(prefix="companion_start_") as folder:
        result = Path(folder) / "result.json"
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(root),
            "COMPANION_START": json.dumps([setup, program, str(result)]),
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", _STARTER],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=timeout)
        except BaseException as error:
            # its compilers are in its process group: none of them may be left behind
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(
                    f"the program was not done after {timeout:g} s: give it a longer timeout"
                ) from None
            raise
        if process.returncode or not result.exists():
            last = said.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
            raise RuntimeError(f"the program failed in its fresh process: {last[0]}")
        return Start(**json.loads(result.read_text()))


_STARTER = """
import json, os, resource, time

def cpu():
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)

setup, program, result = json.loads(os.environ.pop("COMPANION_START"))
import torch, torch._dynamo, torch._inductor.compile_fx
imports = cpu()
names = {"__name__": "__main__"}
exec(compile(setup, "<setup>", "exec"), names)
before, start = cpu(), time.perf_counter()
exec(compile(program, "<program>", "exec"), names)
if torch.cuda.is_available():
    torch.cuda.synchronize()
wall = time.perf_counter() - start
# workers that compile in parallel count only once they have ended
from torch._inductor.async_compile import shutdown_compile_workers
shutdown_compile_workers()
counters = torch._dynamo.utils.counters
figures = {
    "cpu_seconds": cpu() - before,
    "wall_seconds": wall,
    "import_cpu_seconds": imports,
    "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
    "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
}
with open(result, "w") as file:
    json.dump(figures, file)
"""
