"""From a clean copy in an empty directory with an empty HOME: an install that is killed on the
way, taken up again, and the course served. It downloads what `make lab` downloads."""

import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from companion import device
from tools import install

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 1200

pytestmark = pytest.mark.slow


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path / "a clone"
    for name in done.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (tmp_path / "home").mkdir()
    yield folder
    shutil.rmtree(folder)  # over a gigabyte


def start(clone: Path, *words: str) -> subprocess.Popen[str]:
    """``make`` in the clone, as one process group, knowing nothing of this environment."""
    ours = {"VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONPATH", "COMPANION_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    path = environment["PATH"].split(os.pathsep)
    environment["PATH"] = os.pathsep.join(p for p in path if ".venv" not in p)
    environment["HOME"] = str(clone.parent / "home")
    return subprocess.Popen(
        ["make", *words],
        cwd=clone,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    return said


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_install_that_was_killed_is_taken_up_and_the_course_is_served(clone: Path) -> None:
    def torch_is_torn() -> bool:
        found = clone.glob(".venv/lib/python*/site-packages/torch-*.dist-info")
        return any(not install.is_whole(package) for package in found)

    first = start(clone, "setup")
    wait_for(torch_is_torn, first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert torch_is_torn()

    finish(start(clone, "setup"))
    assert not torch_is_torn()
    binaries = clone / ".venv" / "bin"
    assert (binaries / "torchrun").exists() and (binaries / "companion").exists()
    check = subprocess.run([binaries / "python", "-m", "pip", "check"], capture_output=True)
    assert check.returncode == 0, check.stdout
    assert finish(start(clone, "-s", "setup")) == ""

    port = device.free_port()
    server = start(clone, "lab", "NO_BROWSER=1", f"PORT={port}")
    try:
        address = None
        while address is None:
            line = server.stdout.readline()
            assert line, "the server has ended"
            address = re.search(rf"http://127\.0\.0\.1:{port}/lab/tree/work/01\S*token=\w+", line)
        assert urllib.request.urlopen(address[0], timeout=60).status == 200
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/contents", timeout=60)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.communicate(timeout=60)
    assert {path.name for path in (clone / "work").glob("*.ipynb")} == {
        path.name for path in (clone / "notebooks").glob("*.ipynb")
    }
