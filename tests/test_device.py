"""The device's answers, and a doctor that is made to find each kind of trouble for real."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from companion import device

CPU = torch.device("cpu")


def finding(name: str) -> device.Finding:
    (found,) = [one for one in device.doctor() if one.name == name]
    return found


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)
    return path


# -- answers ------------------------------------------------------------------------------------


def test_choose_takes_what_is_here():
    assert device.choose("cpu") == CPU
    assert device.choose() == device.choose("auto")
    torch.ones(1, device=device.choose()).sum().item()


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "meta", "xla", "auto:0", "cpu:1", "cuda:99"])
def test_choose_refuses_in_one_sentence(name):
    with pytest.raises(ValueError, match="^device is ") as caught:
        device.choose(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test misses")
def test_choose_says_what_to_do_where_there_is_no_gpu():
    with pytest.raises(ValueError, match="sees no CUDA device: choose auto or cpu"):
        device.choose("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    chosen = device.choose()
    assert chosen.type == "cuda" and device.choose("cuda:0").index == 0
    assert device.process_group_backend(chosen) == "cpu:gloo,cuda:nccl"
    assert device.device_name(chosen) == torch.cuda.get_device_name(0)
    x = torch.ones(2048, 2048, device=chosen)
    for _ in range(50):
        x = x @ x * 1e-4
    done = torch.cuda.Event()
    done.record()
    device.synchronize(chosen)
    assert done.query()
    assert finding("accelerator").ok


def test_backend_on_the_cpu_is_gloo_and_synchronize_does_nothing():
    assert device.process_group_backend(CPU) == "gloo"
    assert device.synchronize(CPU) is None


def test_device_name_is_stable_and_names_the_cores():
    name = device.device_name(CPU)
    assert re.fullmatch(r".+ \(\d+ cores?\)", name)
    code = "from companion.device import *; print(device_name(choose('cpu')))"
    other = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=Path.cwd())
    assert other.strip() == name


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_cores_follow_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert device.cores() == 1
        assert device.device_name(CPU).endswith("(1 core)")
    finally:
        os.sched_setaffinity(0, before)


def test_conditions_are_plain_and_decide_what_may_be_compared():
    here = device.conditions(CPU)
    assert json.loads(json.dumps(here)) == here
    assert here["threads"] == torch.get_num_threads() and here["torch"] == torch.__version__
    assert device.same_device(here, dict(here))
    assert device.same_device(here, here | {"python": "3.99.0"}), "Python alone does not matter"
    for key in ("device", "cores", "threads", "vector", "torch", "platform"):
        other = here | {key: "another"}
        assert not device.same_device(here, other)
        assert device.differences(here, other) == [f"{key}: {here[key]} and another"]
        missing = {k: v for k, v in here.items() if k != key}
        assert device.differences(missing, here) == [f"{key}: not recorded and {here[key]}"]


def test_threads_are_part_of_the_conditions_t05():
    before = torch.get_num_threads()
    one = device.conditions(CPU)
    try:
        torch.set_num_threads(before + 1)
        two = device.conditions(CPU)
    finally:
        torch.set_num_threads(before)
    assert device.differences(one, two) == [f"threads: {before} and {before + 1}"]


def test_ports():
    port = device.free_port()
    assert device.port_is_free(port)
    for address in ("", "127.0.0.1"):
        with socket.socket() as server:
            server.bind((address, port))
            server.listen()
            assert not device.port_is_free(port)
        assert device.port_is_free(port)
    for wrong in (0, -1, 65536):
        with pytest.raises(ValueError, match="1 to 65535"):
            device.port_is_free(wrong)


def test_without_psutil_and_jupyter_the_doctor_works():
    """The training path needs torch and numpy only."""
    code = """
import sys
for name in ("psutil", "IPython", "ipykernel", "matplotlib"):
    sys.modules[name] = None
from companion import device
print(device.doctor_report(device.doctor()))
"""
    text = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "memory" in text


# -- the compiler -------------------------------------------------------------------------------


def test_compiler_is_one_that_really_builds(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    real = device.cpp_compiler()
    if real is None:
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setenv("CXX", str(program(tmp_path / "good" / "c++", f'exec {real} "$@"')))
    assert device.cpp_compiler() == str(tmp_path / "good" / "c++")
    # one that answers --version, as inductor asks, and can't compile
    broken = program(tmp_path / "bad" / "c++", '[ "$1" = --version ] && echo "g++ 12"; exit 1')
    monkeypatch.setenv("CXX", str(broken))
    assert device.cpp_compiler() is None
    # no OpenMP: torch.compile's code would not build
    without = f'for a in "$@"; do [ "$a" = -fopenmp ] && exit 1; done; exec {real} "$@"'
    monkeypatch.setenv("CXX", str(program(tmp_path / "noomp" / "c++", without)))
    assert (device.cpp_compiler() is None) == (sys.platform == "linux")


def test_t13_no_compiler_is_said_up_front(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    found = finding("c++ compiler")
    assert not found.ok and not found.needed
    assert "CXX=/nonexistent/g++" in found.found and "unset CXX" in found.remedy
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    found = finding("c++ compiler")
    assert not found.ok and ("g++" in found.remedy or "xcode-select" in found.remedy)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    assert "cxx-compiler" in finding("c++ compiler").remedy or sys.platform == "darwin"


def test_nothing_is_left_of_the_compile_check(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    device._working_compiler.cache_clear()
    device.cpp_compiler()
    assert list(tmp_path.iterdir()) == []


def test_python_headers(monkeypatch, tmp_path):
    folder = device.python_headers()
    assert folder is None or (Path(folder) / "Python.h").is_file()
    monkeypatch.setattr("sysconfig.get_path", lambda *a: str(tmp_path))
    found = finding("python headers")
    assert not found.ok and "Python.h" in found.remedy


# -- the doctor ---------------------------------------------------------------------------------


def test_the_doctor_looks_at_everything_and_turns_into_json():
    findings = device.doctor()
    names = [found.name for found in findings]
    assert len(names) == len(set(names))
    assert set(names) >= {
        *("platform", "torch", "accelerator", "cpu", "backend", "c++ compiler"),
        *("python headers", "memory", "/dev/shm", "disk", "free port", "torchrun"),
    }
    for found in findings:
        assert bool(found.remedy) != found.ok, f"{found}: a remedy exactly where one is needed"
        assert found.found and "\n" not in found.found + found.remedy
    rows = json.loads(json.dumps([dataclasses.asdict(found) for found in findings]))
    assert list(rows[0]) == ["name", "ok", "found", "remedy", "needed"]


def test_the_report_shows_each_finding_and_what_to_do():
    good = device.Finding("cpu", True, "2 cores", "", False)
    bad = device.Finding("torchrun", False, "not on PATH", "put it there", False)
    worse = device.Finding("platform", False, "Windows", "work in WSL2", True)
    text = device.doctor_report([good, bad])
    assert text.splitlines() == [
        "✔ cpu       2 cores",
        "✘ torchrun  not on PATH",
        "            → put it there",
        "The course runs; 1 to mend for all of it.",
    ]
    assert device.doctor_report([good, bad, worse]).endswith("1 to mend before the course runs.")
    assert device.doctor_report([good]).endswith("All is well.")


def test_the_line_for_notebooks_is_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    line = device.doctor_line()
    assert (
        "\n" not in line
        and torch.__version__ in line
        and device.device_name(device.choose()) in line
    )
    assert "✘" in line and "c++ compiler" in line and "python -m companion doctor" in line
    monkeypatch.setattr(device, "doctor", lambda: [device.Finding("cpu", True, "", "", True)])
    assert device.doctor_line().endswith("✔ all is well")


def test_torchrun_of_another_environment_is_told_apart(tmp_path, monkeypatch):
    """JupyterLab started from elsewhere: a %%bash cell would find another torch, or none."""
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    found = finding("torchrun")
    assert not found.ok and found.found == "not on PATH" and str(own) in found.remedy
    program(tmp_path / "other" / "torchrun", "exit 0")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "other"), str(own)]))
    found = finding("torchrun")
    assert not found.ok and "of another Python" in found.found
    if (own / "torchrun").exists():
        monkeypatch.setenv("PATH", os.pathsep.join([str(own), str(tmp_path / "other")]))
        assert finding("torchrun").ok


@pytest.mark.parametrize(
    ("name", "value", "found", "remedy"),
    [
        ("TORCH_LOGS", "“recompiles”", "curly quotes", 'TORCH_LOGS="recompiles"'),
        ("RANK", "0", "torchrun did not start", "unset RANK"),
        ("TORCH_COMPILE_DISABLE", "1", "TORCH_COMPILE_DISABLE=1", "unset TORCH_COMPILE_DISABLE"),
    ],
)
def test_odd_variables_are_named(monkeypatch, name, value, found, remedy):
    for clean in ("RANK", "WORLD_SIZE", "TORCH_LOGS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(clean, raising=False)
    assert finding("environment").ok
    monkeypatch.setenv(name, value)
    odd = finding("environment")
    assert not odd.ok and found in odd.found and remedy in odd.remedy
    if name == "RANK":  # torchrun sets it too
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        assert finding("environment").ok


def test_native_windows_and_wsl1_are_sent_to_wsl2(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert "WSL2" in device._platform().remedy and device._platform().needed
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.release", lambda: "4.4.0-19041-Microsoft")
    assert "WSL1" in device._platform().remedy
    monkeypatch.setattr("platform.release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    assert device._platform().ok and "WSL" in device._platform().found


def test_an_old_torch_is_refused(monkeypatch):
    assert device._torch().ok
    for version, ok in (
        ("2.8.1", False),
        ("1.13.0+cpu", False),
        ("2.9.0", True),
        ("3.0.0a0", True),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        assert device._torch().ok is ok, version


def test_more_threads_than_cores_is_said(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(device.cores() + 1)
        found = finding("cpu")
    finally:
        torch.set_num_threads(before)
    assert not found.ok and f"OMP_NUM_THREADS={device.cores()}" in found.remedy


def test_little_disk_shm_and_memory_are_said(monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "free some space" in device._disk().remedy
    if os.path.isdir("/dev/shm"):
        assert "--shm-size" in device._shared_memory().remedy
    monkeypatch.setattr(device, "memory", lambda: (4 * 2**30, 2**30))
    assert not device._memory().ok and "1.0 of 4.0 GiB" in device._memory().found


# -- containers ---------------------------------------------------------------------------------


def groups(folder: Path, membership: str, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "cgroup").write_text(membership)
    return {"root": folder / "root", "membership": folder / "cgroup"}


def test_control_groups_of_both_kinds_are_read_up_to_the_root(tmp_path):
    names, old = ("memory.max",), ("memory.limit_in_bytes",)
    two = groups(
        tmp_path / "two",
        "0::/docker/abc\n",
        {"docker/abc/memory.max": "max\n", "docker/memory.max": "4096\n"},
    )
    assert list(device._cgroup_groups("memory", names, old, **two)) == [("max",), ("4096",)]
    one = groups(
        tmp_path / "one",
        "12:cpu,cpuacct:/x\n4:memory:/x\n0::/\n",
        {"memory/x/memory.limit_in_bytes": "1000\n", "memory/memory.limit_in_bytes": "2000\n"},
    )
    assert list(device._cgroup_groups("memory", names, old, **one)) == [("1000",), ("2000",)]
    none = {"root": tmp_path, "membership": tmp_path / "nothing"}
    assert list(device._cgroup_groups("memory", names, old, **none)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_containers_limit_counts_as_the_memory(monkeypatch):
    total, available = device.memory()
    assert 0 < available <= total
    limit, used, cached = total // 2, total // 4, total // 8
    stat = f"anon 5\ninactive_file {cached}\nactive_file 3"
    rows = [("max", str(used), stat), (str(limit), str(used), stat)]
    monkeypatch.setattr(device, "_cgroup_groups", lambda *a: iter(rows))
    got_total, got_available = device.memory()
    assert got_total == limit
    assert got_available == min(device_available(), limit - used + cached)


def device_available() -> int:
    table = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable:\s+(\d+)", table)[1]) * 1024


def test_a_containers_cpu_quota_counts(monkeypatch):
    everything = device.cores()
    for text, expected in (
        ("max 100000", everything),
        ("50000 100000", 1),
        ("-1 100000", everything),
        (f"{100000 * everything * 4} 100000", everything),
    ):
        monkeypatch.setattr(device, "_cgroup_texts", lambda *a, text=text: iter([text]))
        assert device.cores() == expected, text
    if everything > 1:
        monkeypatch.setattr(device, "_cgroup_texts", lambda *a: iter(["150000 100000"]))
        assert device.cores() == 2
