"""Planted faults, each of which must make a named test fail: ``make mutants [LIST=measure]``.

``tests/mutants/<list>.toml`` lists them::

    [[mutant]]
    name = "position off by one"
    file = "companion/corpus.py"
    find = "first + count"                # stands exactly once in the file
    replace = "first + count + 1"
    tests = ["tests/test_corpus.py"]      # pytest arguments; one of these tests must fail

Each runs in a copy of the tree, so your files are never touched. A fault that no test notices
is reported as SURVIVED, and the exit status is 1.
"""

import argparse
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("companion", "examples", "tests", "tools", "notebooks", "conftest.py", "pyproject.toml")
ALSO = ("ARCHITECTURE.md", "README.md", "Makefile", "requirements.lock", "environment.yml")
SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    list: str
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


def read_list(path: Path, root: Path = ROOT) -> list[Mutant]:
    """The mutants of one list.

    Raises:
        ValueError: a mutant lacks a key, or its ``find`` does not stand exactly once.
    """
    mutants = []
    for number, entry in enumerate(tomllib.loads(path.read_text()).get("mutant", []), start=1):
        where = f"{path.name}, mutant {number}"
        missing = {"name", "file", "find", "replace", "tests"} - entry.keys()
        if missing:
            raise ValueError(f"{where} lacks {', '.join(sorted(missing))}")
        mutant = Mutant(path.stem, **(entry | {"tests": tuple(entry["tests"])}))
        count = (root / mutant.file).read_text().count(mutant.find)
        if count != 1:
            raise ValueError(
                f"{where} ({mutant.name}): `find` stands {count} times in {mutant.file}, "
                "it must be once; bring the list up to the code"
            )
        mutants.append(mutant)
    return mutants


def copy_tree(target: Path, root: Path = ROOT) -> None:
    ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in COPIED + ALSO:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, target / name)


def run_tests(
    tree: Path, tests: Sequence[str], seconds: float = SECONDS
) -> subprocess.CompletedProcess[str] | None:
    """pytest in ``tree``, on the ``companion`` of that tree; None if it ran out of time."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None


def verdict(mutant: Mutant, root: Path = ROOT) -> str:
    """``caught``, ``SURVIVED``, or what else went wrong."""
    with tempfile.TemporaryDirectory(prefix="companion-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree, root)
        path = tree / mutant.file
        path.write_text(path.read_text().replace(mutant.find, mutant.replace))
        done = run_tests(tree, mutant.tests)
    if done is None:
        return "caught (time-out)"
    # 1: a test failed; 2: an import failed while collecting; 4, 5: nothing was run at all
    outcomes = {0: "SURVIVED", 1: "caught", 2: "caught (does not import)"}
    return outcomes.get(done.returncode, f"NOT RUN (pytest {done.returncode})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Planted faults that tests must notice.")
    parser.add_argument("lists", nargs="*", help="lists in tests/mutants (default: all)")
    parser.add_argument("--minutes", type=float, help="start no more after that; says what is left")
    parser.add_argument(
        "--tests-pass", action="store_true", help="they have just run on the tree as it is"
    )
    options = parser.parse_args()
    folder = ROOT / "tests" / "mutants"
    lists = [folder / f"{name}.toml" for name in options.lists] or sorted(folder.glob("*.toml"))
    try:
        mutants = [mutant for path in lists for mutant in read_list(path)]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"{len(mutants)} mutants", flush=True)
    if not options.tests_pass:
        check_tests(mutants)
    until = math.inf
    if options.minutes is not None:
        until = time.monotonic() + 60 * options.minutes
        # another part of them each day
        random.Random(date.today().toordinal()).shuffle(mutants)

    def judge(mutant: Mutant) -> str | None:
        return verdict(mutant) if time.monotonic() < until else None

    caught = survived = 0
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for mutant, said in zip(mutants, pool.map(judge, mutants), strict=True):
            if said is None:
                continue
            caught += said.startswith("caught")
            survived += not said.startswith("caught")
            print(f"{said:<26} {mutant.list:<10} {mutant.file:<28} {mutant.name}", flush=True)
    left = len(mutants) - caught - survived
    print(f"{caught} caught, {survived} not" + (f", {left} left for want of time" if left else ""))
    sys.exit(bool(survived))


def check_tests(mutants: Sequence[Mutant]) -> None:
    """Exit where the mutants' tests fail without any mutant."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    print("first their tests on the tree as it is", flush=True)
    with tempfile.TemporaryDirectory(prefix="companion-mutant-") as copy:
        copy_tree(Path(copy))
        clean = run_tests(Path(copy), tests, 6 * SECONDS)
    if clean is None or clean.returncode:
        print(clean.stdout[-3000:] if clean else "")
        sys.exit("The tests do not pass without a mutant; mend that first.")


if __name__ == "__main__":
    main()
