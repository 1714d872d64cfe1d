"""For every test and notebook run: its own COMPANION_HOME, and this environment's own programs."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # the user's lab book is never read or written by a test
    config.companion_home = tempfile.mkdtemp(prefix="companion-home-")
    os.environ["COMPANION_HOME"] = config.companion_home
    # `torchrun` in a notebook cell must be the one beside this Python, activated or not
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.companion_home, ignore_errors=True)
