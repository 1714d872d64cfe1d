"""Run the notebooks and keep what is worth keeping of their outputs::

python -m tools.notebooks store NOTEBOOK...   run, normalise, write back in place
python -m tools.notebooks html NOTEBOOK...    run, write HTML to build/, leave the files alone
python -m tools.notebooks check NOTEBOOK...   run nothing; say what may not be committed
"""

import argparse
import os
import re
import socket
import sys
import sysconfig
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from tools.nbval_fixes import time_limit

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
CELL_SECONDS = 600.0
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_METADATA = {"tags", "jupyter", "slideshow"}
KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
MACHINE_PATH = re.compile(r"/(?:root|home|Users|work|tmp|private|var/folders)/\w[\w./-]*")


def execute(path: Path) -> NotebookNode:
    """Run a notebook where it lies; once more if it ran out of time or lost its kernel.

    Raises:
        CellExecutionError: a cell failed.
        CellTimeoutError, DeadKernelError: it happened twice.
    """
    for last in (False, True):
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout_func=lambda cell: time_limit(cell.metadata.get("tags", []), CELL_SECONDS),
            record_timing=False,
            resources={"metadata": {"path": str(path.parent)}},
        )
        try:
            return client.execute()
        except (CellTimeoutError, DeadKernelError) as error:
            if last:
                raise
            print(f"{path.name}: {type(error).__name__}; once more", flush=True)
    raise AssertionError


def scrub(text: str) -> str:
    """``text`` without what only this machine has: its folders, its name."""
    text = re.sub(r"(?:/[\w.-]+)+/ipykernel_\d+/\d+\.py", "<cell>", text)
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    text = text.replace(sysconfig.get_paths()["stdlib"], "<stdlib>")
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/[\w.-]+", "<tmp>", text)
    text = text.replace(str(Path.home()), "~")
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "<host>", text) if len(host) > 3 else text


def normalise_outputs(outputs: list[NotebookNode]) -> list[NotebookNode]:
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            text = scrub(output.text)
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += text
            else:
                kept.append(nbformat.v4.new_output("stream", name=output.name, text=text))
            continue
        if output.output_type == "error":
            output.traceback = [scrub(line) for line in output.traceback]
            output.evalue = scrub(output.evalue)
        else:
            # a stored widget is blank in every viewer: its still twin is what is kept
            if "image/png" in output.data or "text/html" in output.data:
                output.data.pop(WIDGET, None)
            # a timeline's page holds all of its spans: hundreds of kilobytes for each cell
            if "image/png" in output.data and "data-timeline=" in output.data.get("text/html", ""):
                del output.data["text/html"]
            for mime, value in output.data.items():
                if mime.startswith("text/"):
                    output.data[mime] = scrub(value)
        kept.append(output)
    return kept


def normalise(notebook: NotebookNode) -> NotebookNode:
    """The notebook as it is committed. A second time, nothing changes."""
    notebook.metadata = nbformat.from_dict(KERNEL)
    for cell in notebook.cells:
        for key in set(cell.metadata) - CELL_METADATA:
            del cell.metadata[key]
        if cell.cell_type == "code":
            cell.outputs = normalise_outputs(cell.outputs)
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
    return notebook


def problems(notebook: NotebookNode) -> list[str]:
    """What may not be committed, each with the cell's number among the code cells."""
    found = []
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    for number, cell in enumerate(code, start=1):
        tags = cell.metadata.get("tags", [])
        if cell.execution_count != number:
            found.append(f"code cell {number} has count {cell.execution_count}: not run in order")
        if "nbval-check-output" in tags and not cell.outputs:
            found.append(f"code cell {number} is to be compared and has no output")
        if re.search(r"^\s*!", cell.source, re.MULTILINE):
            found.append(f"code cell {number} has a `!` command, whose failure nobody would see")
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags:
                found.append(f"code cell {number} ends in {output.ename}: {output.evalue}")
            if WIDGET in output.get("data", {}):
                found.append(f"code cell {number} shows a widget that has no still twin")
    if not any(cell.outputs for cell in code):
        found.append("no cell has an output")
    for number, cell in enumerate(notebook.cells):
        for text in readable(cell):
            for match in MACHINE_PATH.finditer(text):
                found.append(f"cell {number} of all holds a path of one machine: {match[0]}")
    if nbformat.from_dict(notebook) != normalise(nbformat.from_dict(notebook)):
        found.append("outputs or metadata are not normalised: run `make notebooks`")
    return found


def readable(cell: NotebookNode) -> list[str]:
    """Every text of a cell that a person reads: source, printed text, HTML, tracebacks."""
    texts = [cell.source]
    for output in cell.get("outputs", []):
        texts += [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
        texts += [v for mime, v in output.get("data", {}).items() if mime.startswith("text/")]
    return texts


def store(path: Path) -> None:
    notebook = normalise(execute(path))
    nbformat.write(notebook, path)


def html(path: Path) -> None:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(embed_images=True)
    # the picture, not the widget that nothing would draw
    exporter.config.NbConvertBase.display_data_priority = [
        "image/png",
        "text/html",
        "image/svg+xml",
        "text/markdown",
        "text/plain",
    ]
    body, _ = exporter.from_notebook_node(normalise(execute(path)))
    BUILD.mkdir(exist_ok=True)
    (BUILD / f"{path.stem}.html").write_text(body, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run, normalise and check notebooks.")
    parser.add_argument("what", choices=("store", "html", "check"))
    parser.add_argument("notebooks", type=Path, nargs="+")
    options = parser.parse_args()
    if options.what == "check":
        bad = 0
        for path in options.notebooks:
            for problem in problems(nbformat.read(path, as_version=4)):
                print(f"{path}: {problem}")
                bad += 1
        sys.exit(bool(bad))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # one lab book for all of them, so that a later notebook finds the earlier one's figures
    with tempfile.TemporaryDirectory(prefix="companion-home-") as home:
        os.environ["COMPANION_HOME"] = home
        for path in options.notebooks:
            print(f"running {path}", flush=True)
            try:
                (store if options.what == "store" else html)(path.resolve())
            except CellExecutionError as error:
                sys.exit(f"{path}: a cell failed, the file is as it was\n{error}")
            except (CellTimeoutError, DeadKernelError) as error:
                sys.exit(f"{path}: {error}\nTwice; the file is as it was.")


if __name__ == "__main__":
    main()
