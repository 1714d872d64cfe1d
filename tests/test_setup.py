"""The set-up holds together: lock, pyproject, environment.yml, install.py, lab.py, Makefile."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import install, lab

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lock() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def pinned(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    return Version(specifier.version)


def asked_for() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for text in PROJECT["dependencies"] + [t for e in extras for t in e]]


# The lock, pyproject.toml and environment.yml


def test_every_lock_line_is_one_exact_public_version():
    for pin in lock().values():
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        assert "*" not in specifier.version, pin
        assert Version(specifier.version).local is None, pin
        assert pin.url is None, pin
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text and "@" not in text and not re.search(r"^-", text, re.MULTILINE)


def test_the_lock_satisfies_what_pyproject_asks_for():
    pins = lock()
    for requirement in asked_for():
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned(pin)), (requirement, pin)


def test_the_lock_is_what_pyproject_needs_and_nothing_else():
    """Both ways: nothing is left to chance, and nothing is installed that nobody asked for."""
    needed, todo = set(), [(r, "") for r in asked_for()]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for own in requirement.extras | {""}:
            if (name, own) in needed:
                continue
            needed.add((name, own))
            todo += [(Requirement(text), own) for text in metadata.requires(name) or []]
    names = {name for name, _ in needed}
    here = {name for name, pin in lock().items() if pin.marker is None or pin.marker.evaluate()}
    # a CUDA build of torch pins its own libraries, and setuptools is the build backend
    assert {n for n in names - here if not n.startswith(("nvidia-", "cuda-", "triton"))} == set()
    assert here - names - {"setuptools"} == set()


def test_the_environment_that_runs_this_is_the_locked_one():
    for name, pin in lock().items():
        if pin.marker is None or pin.marker.evaluate():
            assert Version(metadata.version(name)).public == str(pinned(pin)), name


def test_every_locked_version_runs_on_the_oldest_python_that_is_promised():
    """Debian 12 has 3.11.2, so a package that wants 3.11.5 must not be locked."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    for name, pin in lock().items():
        if pin.marker is None or pin.marker.evaluate():
            wants = metadata.metadata(name).get("Requires-Python") or ""
            assert SpecifierSet(wants).contains(oldest), (name, wants)


def test_environment_yml_gives_conda_the_same_versions_and_a_compiler():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"][0] == "conda-forge"
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    (python,) = [d for d in plain if d.startswith("python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    assert {"pip", "cxx-compiler"} <= set(plain)
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    # every version comes from the lock: nothing here could differ from it
    assert pip == ["-r requirements.lock", "-e ."]


# install.py


def fake_program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: x)'", True),
        ("echo 'NVIDIA-SMI has failed'; exit 9", False),
        ("true", False),
    ],
)
def test_a_driver_is_there_only_if_it_lists_a_gpu(tmp_path, monkeypatch, body, found):
    fake_program(tmp_path / "bin", "nvidia-smi", body)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert install.nvidia_driver() is found


def test_no_python_that_is_new_enough_is_one_sentence(tmp_path):
    fake_program(tmp_path / "bin", "python3", "exit 1")
    (tmp_path / "bin" / "dirname").symlink_to(shutil.which("dirname"))
    done = subprocess.run(
        [shutil.which("sh"), ROOT / "tools" / "setup.sh"],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Python 3.11 or newer" in done.stderr and done.stderr.count("\n") == 1


def test_what_an_interrupted_pip_left_is_removed(tmp_path):
    """pip takes such a package for installed: torch then stays without torchrun for ever."""
    records = {
        "whole-1.0.dist-info": "whole.py,,\nwhole-1.0.dist-info/INSTALLER,,\n",
        "torn-1.0.dist-info": "torn.py,,\ntorn-1.0.dist-info/METADATA,,\n",  # the wheel's own
        "bare-1.0.dist-info": None,
        "~orch": None,
    }
    for name, record in records.items():
        (tmp_path / name).mkdir()
        if record is not None:
            (tmp_path / name / "RECORD").write_text(record)
    removed = install.remove_half_installed(tmp_path)
    assert removed == ["bare-1.0.dist-info", "torn-1.0.dist-info", "~orch"]
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.0.dist-info"]


def test_what_pip_has_finished_is_whole():
    site = Path(metadata.distribution("pytest").locate_file("")).resolve()
    for package in site.glob("*.dist-info"):
        assert install.is_whole(package), package.name


@pytest.mark.skipif(
    not install.wanted().items() <= install.read_stamp().items(), reason="not installed by make"
)
def test_a_second_call_installs_nothing_and_needs_no_network():
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    done = subprocess.run(
        ["sh", ROOT / "tools" / "setup.sh"],
        env=os.environ | nowhere | {"PIP_NO_INDEX": "1", "TORCH_INDEX": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_stamp_changes_with_the_lock_and_the_place(tmp_path, monkeypatch):
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    here = install.wanted()
    monkeypatch.setattr(install, "ROOT", tmp_path)
    there = install.wanted()
    assert there["content"] == here["content"] and there["root"] != here["root"]
    (tmp_path / "requirements.lock").write_text("torch==2.9.0\n")
    assert install.wanted()["content"] != here["content"]


# lab.py


def shipped(folder: Path, source: str) -> Path:
    notebook = nbformat.v4.new_notebook()
    cell = nbformat.v4.new_code_cell(source, execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", text="spoiler\n")]
    notebook.cells = [nbformat.v4.new_markdown_cell("# One"), cell]
    folder.mkdir(exist_ok=True)
    nbformat.write(notebook, folder / "01_one.ipynb")
    return folder


def test_copies_have_no_outputs_and_are_made_once(tmp_path):
    notebooks, work = shipped(tmp_path / "notebooks", "1 + 1"), tmp_path / "work"
    assert lab.learner_copies(notebooks, work) == []
    copy = nbformat.read(work / "01_one.ipynb", as_version=4)
    assert copy.cells[1].source == "1 + 1"
    assert copy.cells[1].outputs == [] and copy.cells[1].execution_count is None
    before = (work / "01_one.ipynb").stat().st_mtime_ns
    assert lab.learner_copies(notebooks, work) == []
    assert (work / "01_one.ipynb").stat().st_mtime_ns == before


def test_a_learners_answers_survive_an_update(tmp_path):
    notebooks, work = shipped(tmp_path / "notebooks", "1 + 1"), tmp_path / "work"
    lab.learner_copies(notebooks, work)
    copy = nbformat.read(work / "01_one.ipynb", as_version=4)
    copy.cells[1].source = "my answer"
    nbformat.write(copy, work / "01_one.ipynb")
    assert lab.learner_copies(notebooks, work) == []  # nothing new was shipped

    shipped(tmp_path / "notebooks", "1 + 2")
    (said,) = lab.learner_copies(notebooks, work)
    assert "01_one.new.ipynb" in said
    assert "my answer" in (work / "01_one.ipynb").read_text()
    assert "1 + 2" in (work / "01_one.new.ipynb").read_text()
    assert lab.learner_copies(notebooks, work) == []  # told once

    shipped(tmp_path / "notebooks", "1 + 3")
    lab.learner_copies(notebooks, work)
    assert "1 + 2" in (work / "01_one.new.ipynb").read_text()
    assert "1 + 3" in (work / "01_one.new-2.ipynb").read_text()
    assert sorted(p.name for p in work.iterdir()) == [
        "01_one.ipynb",
        "01_one.new-2.ipynb",
        "01_one.new.ipynb",
    ]


def test_running_the_shipped_notebook_again_is_no_update(tmp_path):
    notebooks, work = shipped(tmp_path / "notebooks", "1 + 1"), tmp_path / "work"
    lab.learner_copies(notebooks, work)
    again = nbformat.read(notebooks / "01_one.ipynb", as_version=4)
    again.cells[1].outputs = []
    nbformat.write(again, notebooks / "01_one.ipynb")
    assert lab.learner_copies(notebooks, work) == []


def test_a_copy_that_is_not_a_notebook_is_left_alone(tmp_path):
    notebooks, work = shipped(tmp_path / "notebooks", "1 + 1"), tmp_path / "work"
    work.mkdir()
    (work / "01_one.ipynb").write_text("torn")
    lab.learner_copies(notebooks, work)
    assert (work / "01_one.ipynb").read_text() == "torn"
    assert "1 + 1" in (work / "01_one.new.ipynb").read_text()


def test_a_taken_port_is_one_sentence_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "tools.lab", "--port", str(port), "--work", tmp_path / "work"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "work").exists()


def test_overrides_turn_the_news_off_and_keep_what_was_there(tmp_path):
    path = tmp_path / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"other": {"kept": true}}')
    lab.write_overrides(tmp_path)
    written = json.loads(path.read_text())
    assert written["other"] == {"kept": True}
    assert written["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"


def test_the_server_listens_on_loopback_with_its_token(tmp_path):
    (tmp_path / "01_one.ipynb").touch()
    command = lab.server_command(tmp_path, 8888, browser=False)
    assert "--ServerApp.ip=127.0.0.1" in command and "--no-browser" in command
    assert "--ServerApp.port_retries=0" in command
    assert not [word for word in command if "token" in word.lower() or "password" in word.lower()]


# Makefile and scripts


def test_make_help_names_every_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert {line.split()[1] for line in shown.splitlines()} == targets
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert set(phony) == targets


@pytest.mark.parametrize("script", ["tools/setup.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    shell = path.read_text().splitlines()[0].split("/")[-1].split()[-1]
    assert subprocess.run([shell, "-n", path]).returncode == 0
