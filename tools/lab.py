"""Open JupyterLab on the course: ``make lab``, or ``python -m tools.lab`` in your own environment.

It prepares the corpus, makes your copies of the notebooks in ``work/`` and starts the server on
this machine's loopback address, with a token.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat

from companion import corpus, device

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """Of what the learner reads and edits: outputs and execution counts do not enter."""
    parts = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def shipped_version(path: Path) -> str:
    """The fingerprint of the shipped notebook that a copy was made from; empty if unknown."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["metadata"]["companion"]["shipped"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def free_name(work: Path, stem: str) -> Path:
    path, number = work / f"{stem}.ipynb", 1
    while path.exists():
        suffix = ".new" if number == 1 else f".new-{number}"
        path, number = work / f"{stem}{suffix}.ipynb", number + 1
    return path


def learner_copies(notebooks: Path, work: Path) -> list[str]:
    """Copy each notebook to ``work``, outputs cleared; never overwrite. Returns what to tell.

    Where a shipped notebook has changed since its copy was made, the copy stays and the new
    version is laid beside it as ``NAME.new.ipynb``, once.
    """
    work.mkdir(parents=True, exist_ok=True)
    said = []
    for shipped in sorted(notebooks.glob("*.ipynb")):
        notebook = nbformat.read(shipped, as_version=4)
        version = fingerprint(notebook)
        copies = [work / f"{shipped.stem}.ipynb", *work.glob(f"{shipped.stem}.new*.ipynb")]
        if any(shipped_version(copy) == version for copy in copies):
            continue
        target = free_name(work, shipped.stem)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        notebook.metadata["companion"] = {"shipped": version}
        # written aside and linked into place, so that nothing is overwritten, nor left half done
        aside = work / f".{target.name}.{os.getpid()}"
        nbformat.write(notebook, aside)
        try:
            os.link(aside, target)
        except FileExistsError:
            continue
        finally:
            aside.unlink()
        if target.stem != shipped.stem:
            said.append(
                f"{shipped.name} has changed since you got your copy. Your copy is as you left "
                f"it; the new version is beside it: {target.name}"
            )
    return said


def write_overrides(prefix: Path) -> None:
    """Set the course's JupyterLab defaults (no news pop-up); other keys there are kept."""
    path = prefix / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    try:
        there = json.loads(path.read_text())
    except (OSError, ValueError):
        there = {}
    ours = json.loads((ROOT / "tools" / "overrides.json").read_text())
    if ours.items() <= there.items():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(there | ours, indent=1) + "\n")


def prepare(work: Path) -> None:
    """The corpus, the learner's copies and one line that says what is here."""
    print(device.doctor_line())
    text = corpus.prepare()
    print(f"Corpus: {text.bytes / 1e6:.1f} MB of text from {text.files} files")
    said = learner_copies(NOTEBOOKS, work)
    print(f"Your notebooks: {work}")
    for line in said:
        print(line)


def warm_compiler() -> None:
    """Compile the course's training step once: every learner's first call then finds it."""
    if device.cpp_compiler() is None:
        print("No C++ compiler works here, so nothing was compiled ahead.")
        return
    print("Compiling the training step of `tiny` once (about a minute)", flush=True)
    command = ["train", "--preset", "tiny", "--steps", "2", "--compile", "--log-every", "0"]
    done = subprocess.run([sys.executable, "-m", "companion", *command], stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit("The training step could not be compiled; the message above says why.")


def server_command(work: Path, port: int, browser: bool) -> list[str]:
    first = min(work.glob("*.ipynb"))
    root = ROOT if work.is_relative_to(ROOT) else work
    command = [sys.executable, "-m", "jupyterlab", "--log-level=WARN"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={root}"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--LabApp.default_url=/lab/tree/{first.relative_to(root).as_posix()}"]
    if not browser:
        command += ["--no-browser"]
    if os.geteuid() == 0:  # in a container the only user is often root
        command += ["--allow-root"]
    return command


def main() -> None:
    parser = argparse.ArgumentParser(description="Open JupyterLab on the course.")
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--work", type=Path, default=ROOT / "work", help="where your copies are")
    parser.add_argument("--prepare-only", action="store_true", help="start no server")
    options = parser.parse_args()
    work = options.work.resolve()
    try:
        if not options.prepare_only and not device.port_is_free(options.port):
            raise ValueError(
                f"port {options.port} is taken: stop what uses it, or choose another one, "
                f"for example `make lab PORT={options.port + 1}`"
            )
        prepare(work)
    except (OSError, ValueError) as error:
        sys.exit(f"Cannot start: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped before JupyterLab started; nothing is left half done.")
    if options.prepare_only:
        return warm_compiler()
    write_overrides(Path(sys.prefix))
    # `torchrun` and `python` in cells and terminals must be this environment's own
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    print("Starting JupyterLab; stop it with Ctrl-C here, twice.", flush=True)
    command = server_command(work, options.port, not options.no_browser)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
