"""What this machine has, and what to do about what it lacks.

The first half answers the questions of the training code: which device, which process-group
backend, which conditions a figure was taken under. The second half is the doctor.
"""

import functools
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GIB = 2**30


def choose(name: str = "auto") -> torch.device:
    """The device to train on: ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:1``.

    ``auto`` takes the accelerator that is here, else the CPU.

    Raises:
        ValueError: the name is not one of these, or the device is not on this machine.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device is {name!r}: choose auto, cpu, cuda, cuda:<number> or mps")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {name!r}, but this torch ({torch.__version__}) sees no CUDA device: "
            "choose auto or cpu, or run `python -m companion doctor`"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device is {name!r}, but MPS is not available here: choose auto or cpu")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.index is not None and device.index >= count:
        raise ValueError(
            f"device is {name!r}, but there are {count} of its kind, counted from 0: "
            f"choose {device.type}:{count - 1} or less"
        )
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it. The CPU never lags."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def process_group_backend(device: torch.device) -> str:
    """The backend for ``init_process_group``. On CUDA there is gloo beside NCCL, for what
    ranks agree on without stopping the GPU (stop flags, asynchronous checkpoints)."""
    if device.type == "cuda" and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def cores() -> int:
    """CPU cores this process may use: affinity and a container's CPU quota count."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        count = os.cpu_count() or 1
    for quota in _cgroup_texts("cpu", "cpu.max", ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        allowed, _, period = quota.partition(" ")
        if allowed.isdigit() and period.isdigit() and int(period) > 0:
            count = min(count, max(1, math.ceil(int(allowed) / int(period))))
    return count


def device_name(device: torch.device) -> str:
    """A stable readable name, such as ``NVIDIA H200`` or ``AMD EPYC 7763 (2 cores)``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"{_processor()} GPU"
    count = cores()
    return f"{_processor()} ({count} core{'s' if count > 1 else ''})"


def conditions(device: torch.device) -> dict[str, Any]:
    """What a measured figure depends on, as plain JSON values."""
    return {
        "device": device_name(device),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Why figures taken under ``a`` and ``b`` may not be compared, for example
    ``["threads: 2 and 1"]``. Python's version alone does not matter."""
    found = []
    for key in ("device", "cores", "threads", "vector", "torch", "platform"):
        left, right = a.get(key, "not recorded"), b.get(key, "not recorded")
        if left != right:
            found.append(f"{key}: {left} and {right}")
    return found


def same_device(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether figures taken under these :func:`conditions` may be compared."""
    return not differences(a, b)


def free_port() -> int:
    """A TCP port that was free on the loopback interface a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port now, on every interface.

    Raises:
        ValueError: not a port number.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"port is {port}: give a number from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # a port in TIME_WAIT can be listened on again
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile will call, if a small OpenMP program builds with it.

    It is ``CXX`` where that is set, else ``g++`` (``clang++`` on macOS), as in inductor.
    """
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return _working_compiler(shutil.which(command))


@functools.cache
def _working_compiler(path: str | None) -> str | None:
    if path is None:
        return None
    # Apple's clang finds OpenMP in torch itself, so the flag proves nothing there.
    linux = sys.platform == "linux"
    source = "#include <cmath>\n#include <vector>\n" + ("#include <omp.h>\n" if linux else "")
    source += "int f(int x) { std::vector<int> v(1, x); return v[0]; }\n"
    with tempfile.TemporaryDirectory(prefix="companion_") as folder:
        flags = ["-x", "c++", "-std=c++17", "-shared", "-fPIC", *(["-fopenmp"] if linux else [])]
        try:
            built = subprocess.run(
                [path, *flags, "-", "-o", f"{folder}/probe.so"],
                input=source,
                text=True,
                capture_output=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
    return path if built.returncode == 0 else None


def python_headers() -> str | None:
    """The folder of ``Python.h``, which torch.compile's generated C++ includes."""
    folder = sysconfig.get_path("include")
    return folder if folder and os.path.isfile(os.path.join(folder, "Python.h")) else None


# -- the doctor ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One thing the doctor looked at."""

    name: str
    ok: bool
    found: str
    """What is here."""
    remedy: str
    """The one thing to do; empty where all is well."""
    needed: bool
    """Nothing runs without it; otherwise only a part of the course suffers."""


def doctor() -> list[Finding]:
    """Look at everything the course depends on. About a second; leaves nothing behind."""
    device = choose()
    return [
        _platform(),
        _torch(),
        _accelerator(device),
        _cpu(),
        _backend(device),
        _compiler(),
        _headers(),
        _memory(),
        _shared_memory(),
        _disk(),
        _port(),
        _torchrun(),
        _environment(),
    ]


def doctor_report(findings: list[Finding]) -> str:
    """The findings as a text table, one line each, with what to do under what is wrong."""
    width = max(len(f.name) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{'✔' if f.ok else '✘'} {f.name:<{width}}  {f.found}")
        if not f.ok:
            lines.append(f"  {'':<{width}}  → {f.remedy}")
    needed = sum(not f.ok and f.needed for f in findings)
    minor = sum(not f.ok for f in findings) - needed
    if needed:
        lines.append(f"{needed} to mend before the course runs.")
    elif minor:
        lines.append(f"The course runs; {minor} to mend for all of it.")
    else:
        lines.append("All is well.")
    return "\n".join(lines)


def doctor_line() -> str:
    """The doctor in one line, for the first cell of a notebook."""
    findings = doctor()
    device = choose()
    wrong = [f.name for f in findings if not f.ok]
    verdict = "✔ all is well"
    if wrong:
        verdict = f"✘ {', '.join(wrong)}: run `python -m companion doctor`"
    backend = process_group_backend(device)
    return f"torch {torch.__version__} · {device_name(device)} · {backend} · {verdict}"


def _platform() -> Finding:
    system, release = platform.system(), platform.release()
    found = f"{system} {platform.machine()}, Python {platform.python_version()}"
    remedy = ""
    if system == "Windows":
        remedy = "native Windows is not supported: work in WSL2 (`wsl --install`)"
    elif "microsoft" in release.lower():
        found += ", WSL"
        if "wsl2" not in release.lower() and "microsoft-standard" not in release.lower():
            remedy = "this is WSL1: turn it into WSL2 (`wsl --set-version <name> 2`)"
    return Finding("platform", not remedy, found, remedy, needed=True)


def _torch() -> Finding:
    build = "CPU build"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda} build"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip} build"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    ok = release >= (2, 9)
    remedy = "" if ok else "install torch 2.9 or newer"
    return Finding("torch", ok, f"{torch.__version__} ({build})", remedy, needed=True)


def _accelerator(device: torch.device) -> Finding:
    if device.type == "cpu":
        if sys.platform == "linux" and os.path.exists("/proc/driver/nvidia/version"):
            if torch.version.cuda is None:
                remedy = "install torch from its default index (this one is the CPU build)"
            else:
                remedy = "unset CUDA_VISIBLE_DEVICES, or update the NVIDIA driver for this torch"
            return Finding("accelerator", False, "a GPU that torch can't use", remedy, False)
        return Finding("accelerator", True, "none; the CPU does all of the course", "", False)
    found = device_name(device)
    if device.type == "cuda":
        found = f"{torch.cuda.device_count()} × {found}"
    try:
        # A build without kernels for this GPU says "available" and fails at the first operation.
        torch.ones(2, 2, device=device).matmul(torch.ones(2, 2, device=device)).sum().item()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        remedy = "install a torch build for this GPU, or hide it (CUDA_VISIBLE_DEVICES=)"
        return Finding("accelerator", False, f"{found}: {first}", remedy, needed=True)
    return Finding("accelerator", True, found, "", needed=False)


def _cpu() -> Finding:
    vector = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    found = f"{_processor()}, {cores()} cores, {vector}, torch uses {threads} threads"
    ok = threads <= cores()
    remedy = "" if ok else f"set OMP_NUM_THREADS={cores()}: more threads than cores are slow"
    return Finding("cpu", ok, found, remedy, needed=False)


def _backend(device: torch.device) -> Finding:
    wanted = process_group_backend(device)
    remedy = "install a torch build with distributed and gloo: several ranks need it"
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("backend", False, "no gloo in this torch", remedy, needed=False)
    try:
        # Gloo looks up this machine's own address; that fails behind some VPNs and host names.
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        name = "lo0" if sys.platform == "darwin" else "lo"
        remedy = f"set GLOO_SOCKET_IFNAME={name}"
        return Finding("backend", False, f"gloo can't start: {first}", remedy, needed=False)
    return Finding("backend", True, wanted, "", needed=False)


def _compiler() -> Finding:
    path = cpp_compiler()
    if path:
        return Finding("c++ compiler", True, path, "", needed=False)
    asked = os.environ.get("CXX")
    found = "none that builds a small program" + (f" (CXX={asked})" if asked else "")
    remedy = "apt-get install g++ (torch.compile needs it)"
    if asked:
        remedy = "unset CXX, or point it to a C++ compiler (torch.compile needs it)"
    elif os.environ.get("CONDA_PREFIX"):
        remedy = "conda install -c conda-forge cxx-compiler (torch.compile needs it)"
    elif sys.platform == "darwin":
        remedy = "xcode-select --install (torch.compile needs it)"
    return Finding("c++ compiler", False, found, remedy, needed=False)


def _headers() -> Finding:
    folder = python_headers()
    if folder:
        return Finding("python headers", True, folder, "", needed=False)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"install the headers of Python {version} (torch.compile needs Python.h)"
    if sys.platform == "linux":
        remedy = f"apt-get install python{version}-dev (torch.compile needs Python.h)"
    return Finding("python headers", False, "no Python.h", remedy, needed=False)


def memory() -> tuple[int, int]:
    """Total and available bytes of memory; a container's limit counts. (0, 0) if unknown."""
    total = available = 0
    try:
        table = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total = int(table["MemTotal"].split()[0]) * 1024
        available = int(table["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            import psutil  # type: ignore[import-untyped]  # comes with ipykernel; macOS has no /proc

            total, available = psutil.virtual_memory()[:2]
        except ImportError:
            return 0, 0
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    names = ("memory.max", "memory.current", "memory.stat")
    for limit, used, stat in _cgroup_groups("memory", names, files):
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total = int(limit)
            # Pages of files read long ago count as used and are given back on demand.
            rows = dict(row.split() for row in stat.splitlines() if len(row.split()) == 2)
            cached = int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
            available = min(available, total - int(used) + cached)
    return total, available


def _memory() -> Finding:
    total, available = memory()
    if not total:
        return Finding("memory", True, "unknown on this system", "", needed=False)
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    ok = available >= 3 * GIB
    remedy = "" if ok else "close other programs, or give the container at least 4 GiB"
    return Finding("memory", ok, found, remedy, needed=False)


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", True, "not used on this system", "", needed=False)
    free = shutil.disk_usage("/dev/shm").free
    ok = free >= GIB / 4
    remedy = "" if ok else "start the container with --shm-size=1g"
    return Finding("/dev/shm", ok, f"{free / GIB:.2f} GiB free", remedy, needed=False)


def _disk() -> Finding:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    found = f"{free / GIB:.1f} GiB free here"
    remedy = ""
    if free < 2 * GIB:
        remedy = "free some space: the course writes up to 2 GiB"
    elif not os.access(here, os.W_OK):
        found += ", not writable"
        remedy = f"work in a folder you may write to; {here} is read-only for you"
    return Finding("disk", not remedy, found, remedy, needed=False)


def _port() -> Finding:
    try:
        port = free_port()
    except OSError as error:
        remedy = "bring up the loopback interface (`ip link set lo up`)"
        return Finding("free port", False, f"none on 127.0.0.1 ({error.strerror})", remedy, True)
    return Finding("free port", True, f"{port} on 127.0.0.1, for example", "", needed=True)


def _torchrun() -> Finding:
    """The torchrun that a ``%%bash`` cell would find must belong to this interpreter."""
    path = shutil.which("torchrun")
    own = Path(sys.executable).parent
    folders = {os.path.realpath(own), os.path.realpath(sysconfig.get_path("scripts"))}
    folders.add(os.path.realpath(sysconfig.get_path("scripts", f"{os.name}_user")))
    remedy = f'put this Python first: export PATH="{own}:$PATH", or start with `make lab`'
    if path is None:
        return Finding("torchrun", False, "not on PATH", remedy, needed=False)
    if os.path.realpath(os.path.dirname(path)) not in folders:
        return Finding("torchrun", False, f"{path}, of another Python", remedy, needed=False)
    return Finding("torchrun", True, path, "", needed=False)


def _environment() -> Finding:
    """Variables that quietly change what torch does. The first one found is named."""
    env = os.environ
    problem = remedy = ""
    if not env.get("TORCH_LOGS", "").isascii():
        problem = f"TORCH_LOGS={env['TORCH_LOGS']} has curly quotes: the next `import torch` fails"
        remedy = 'write it with plain quotes, for example TORCH_LOGS="recompiles"'
    elif "TORCHELASTIC_RUN_ID" not in env and {"RANK", "WORLD_SIZE"} & env.keys():
        problem = "RANK or WORLD_SIZE is set, but torchrun did not start this process"
        remedy = "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
    else:
        for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "CUDA_LAUNCH_BLOCKING"):
            if env.get(name, "0") not in ("", "0"):
                problem = f"{name}={env[name]}"
                remedy = f"unset {name}: it falsifies what you measure"
    return Finding("environment", not problem, problem or "nothing odd set", remedy, False)


@functools.cache
def _processor() -> str:
    """The CPU's model name, the same on every call and every boot."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.check_output(command, text=True).strip()
        except (OSError, subprocess.SubprocessError):
            return platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cgroup_groups(
    controller: str,
    v2: tuple[str, ...],
    v1: tuple[str, ...],
    root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> Iterator[tuple[str, ...]]:
    """The named files of this process's control group and of every group above it, since the
    tightest limit on the way up holds. Nothing where there are no control groups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, v2
        elif controller in controllers.split(","):
            base, names = root / controller, v1
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            try:
                yield tuple((folder / name).read_text().strip() for name in names)
            except OSError:
                continue


def _cgroup_texts(controller: str, v2: str, v1: tuple[str, ...]) -> Iterator[str]:
    for values in _cgroup_groups(controller, (v2,), v1):
        yield " ".join(values)
