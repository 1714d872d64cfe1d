"""Several ranks from a notebook cell or a script: torchrun, with its rough edges off.

``torchrun("train.py", nproc=2)`` is ``torchrun --standalone --nproc-per-node=2 train.py``, plus:
lines of two ranks never mix, the first failing rank's own traceback is the error you see, and
nothing is left running, however it ends.

This file is also what the launcher and every rank execute, as a script (see the end). It
imports nothing but the standard library at the top, so that a rank is under control before
the slow imports of its own script begin.
"""

import contextlib
import faulthandler
import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPORT_FILE = "COMPANION_REPORT_FILE"
GRACE_SECONDS = 10.0
"""How long ranks may take to end by themselves once they are told to stop."""
_STOPPED = ("SystemExit", "KeyboardInterrupt")
"""What a rank ends with that was told to stop."""
_PEER_LOST = re.compile(
    r"closed by (remote )?peer|reset by peer|Connection was likely closed|Broken pipe"
    r"|got 0 bytes|ncclRemoteError|Socket closed|remote process (has )?exited",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LaunchResult:
    """How a launch went."""

    returncode: int
    lines: list[str] = field(repr=False)
    """What the ranks wrote, line by line, each beginning with ``[rank] ``."""
    metrics: list[dict[str, Any]]
    """What ranks handed to :func:`report`, in order of arrival; ``rank`` is one of the keys."""


class LaunchError(RuntimeError):
    """A launch failed. The fields tell about the rank that failed first.

    Attributes:
        rank: which rank, or None where no rank had started.
        type: name of the exception's class; the signal's name where one killed the rank.
        message: the exception's message.
        traceback: the rank's own traceback, or the last lines it wrote.
        exitcode: status of its process, negative for a signal; None if unknown.
        signal: name of the signal that killed it, such as ``SIGKILL``, or None.
        lines: everything the ranks wrote.
    """

    def __init__(
        self,
        rank: int | None,
        type: str,
        message: str,
        traceback: str = "",
        exitcode: int | None = None,
        also: str = "",
        lines: list[str] | None = None,
    ) -> None:
        self.rank, self.type, self.message, self.traceback = rank, type, message, traceback
        self.exitcode, self.lines = exitcode, lines or []
        self.signal = _signal_name(exitcode)
        who = "the launcher" if rank is None else f"rank {rank}"
        text = f"{who} failed first: {type}: {message}" if rank is not None else message
        super().__init__("\n".join(part for part in (text, traceback.rstrip(), also) if part))

    def _render_traceback_(self) -> list[str]:
        """IPython shows this: the rank's traceback is the one that helps, not the launcher's."""
        return [f"LaunchError: {self}"]


def torchrun(
    target: str | Path,
    *args: object,
    nproc: int = 2,
    env: Mapping[str, object] | None = None,
    timeout: float = 600,
    port: int | None = None,
) -> LaunchResult:
    """Run a script or module on ``nproc`` ranks of this machine and wait for them.

    ``torchrun("train.py", "--steps", 20)`` runs a file and ``torchrun("-m companion", "train")``
    a module, with this interpreter, in this working directory. What ranks write is shown at
    once, in whole lines that begin with ``[rank]``.

    Args:
        target: a file's path, or ``-m`` and a module's name.
        args: passed on to it, as text.
        nproc: number of ranks.
        env: variables added to the ranks' environment. ``OMP_NUM_THREADS`` is the share of the
            cores that each rank gets, unless it is set here or was set before.
        timeout: seconds until the ranks are stopped.
        port: the port where ranks meet; a free one if None, which is what you want.

    Raises:
        LaunchError: a rank failed; it names the first one and shows its traceback.
        TimeoutError: the ranks were not done in time; they have been stopped.
        ValueError: an argument is wrong; nothing was started.
        FileNotFoundError: there is no such script.
        TypeError: the target is a function.
    """
    command = _target(target, args)
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc is {nproc!r}: give a whole number of ranks, at least 1")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}: give a number of seconds above 0")
    with tempfile.TemporaryDirectory(prefix="companion_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = _environment(env, nproc, folder)
        options = [*_meeting(port), f"--nproc-per-node={nproc}", "--redirects=3"]
        output = _Output(folder)
        try:
            with _agent(folder, environment, [*options, __file__, "rank", *command]) as agent:
                _follow(agent, output, timeout)
        finally:
            output.show(all_of_it=True)  # what ranks wrote while they were being stopped, too
        metrics = _read_reports(folder)
        if agent.returncode:
            raise _first_failure(folder, agent.returncode, port, output.lines)
    return LaunchResult(agent.returncode, output.lines, metrics)


def say(text: object) -> None:
    """Print from a rank in one write, so that lines of several ranks never mix.

    (torchrun starts ranks with ``python -u``, where ``print`` writes the text and the line's
    end separately.) Under plain torchrun each line begins with ``[rank] ``; under
    :func:`torchrun` the launcher adds that.
    """
    rank = None if REPORT_FILE in os.environ else os.environ.get("RANK")
    prefix = "" if rank is None else f"[{rank}] "
    sys.stdout.write("".join(f"{prefix}{line}\n" for line in str(text).split("\n")))
    sys.stdout.flush()


def report(**metrics: Any) -> None:
    """Hand figures from a rank back to the cell: they arrive in ``LaunchResult.metrics``.

    Numbers, text, lists and dictionaries of them; tensors become numbers or nested lists.
    Does nothing where :func:`torchrun` did not start this process.

    Raises:
        TypeError: a value is none of these.
    """
    path = os.environ.get(REPORT_FILE)
    try:
        line = json.dumps({"rank": int(os.environ.get("RANK", "0")), **metrics}, default=_plain)
    except TypeError as error:
        raise TypeError(f"report can't send this: {error}; give numbers, text or lists") from None
    if path:
        # One append: the lines of two ranks can't mix.
        with open(path, "ab", buffering=0) as file:
            file.write(f"{line}\n".encode())


def _plain(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):  # tensors and NumPy's arrays and numbers
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not a plain value")


# -- before the start ---------------------------------------------------------------------------


def _target(target: object, args: tuple[object, ...]) -> list[str]:
    """What a rank runs: ``["path" or "module", name, *arguments]``, checked beforehand, since
    a mistake found by every rank after seconds of imports is hard to read."""
    if callable(target):
        name = getattr(target, "__name__", "it")
        raise TypeError(
            f"{name} is a function, and ranks are new processes that can't see what is typed in "
            "a cell: write it to a file (%%writefile train.py) and launch that file"
        )
    words = [str(target), *map(str, args)]
    if words[0] == "-m" or words[0].startswith("-m "):
        module, *rest = [*words[0].split()[1:], *words[1:]] or [""]
        _check_module(module)
        return ["module", module, *rest]
    path = Path(words[0])
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the path of a Python script")
    if not path.exists():
        raise FileNotFoundError(f"there is no script {path} in {Path.cwd()}: check the path")
    return ["path", str(path.resolve()), *words[1:]]


def _check_module(module: str) -> None:
    try:
        spec = importlib.util.find_spec(module) if module else None
        if spec is not None and spec.submodule_search_locations is not None:
            if importlib.util.find_spec(f"{module}.__main__") is None:
                raise ValueError(
                    f"{module} is a package without a __main__.py, so it can't be run: "
                    "name a module in it"
                )
    except (ModuleNotFoundError, AttributeError):
        spec = None
    if spec is None:
        raise ValueError(f"there is no module {module!r} here: check its name after -m")


def _environment(extra: Mapping[str, object] | None, nproc: int, folder: Path) -> dict[str, str]:
    from companion import device

    environment = {**os.environ, **{key: str(value) for key, value in (extra or {}).items()}}
    if not environment.get("TORCH_LOGS", "").isascii():
        raise ValueError(
            f"TORCH_LOGS is {environment['TORCH_LOGS']!r}, with typographic quotes, and torch "
            "would not start: write it with plain ones"
        )
    cores = device.cores()
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    if nproc > cores:
        print(f"note: {nproc} ranks share {cores} cores, so this run shows no speed", flush=True)
    environment[REPORT_FILE] = str(folder / "reports.jsonl")
    return environment


def _meeting(port: int | None) -> list[str]:
    """Where ranks find each other. A fixed port is what two notebooks collide on."""
    from companion import device

    if port is None:
        return ["--standalone"]
    if not device.port_is_free(port):
        raise ValueError(f"port {port} is taken: leave port out, and a free one is found")
    return ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}"]


# -- while it runs ------------------------------------------------------------------------------


@contextlib.contextmanager
def _agent(
    folder: Path, environment: dict[str, str], arguments: list[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The launching process; on the way out it and its ranks are gone, whatever happened."""
    # The agent and the ranks hold the read end of this pipe. When this process dies, even by
    # SIGKILL (a kernel restart), the system closes the write end and they see it.
    lifeline_read, lifeline_write = os.pipe()
    agent = None
    try:
        with open(folder / "agent.log", "wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-u", __file__, "agent", str(folder), *arguments],
                env=environment,
                stdin=lifeline_read,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        yield agent
    finally:
        try:
            if agent is not None and agent.poll() is None:
                # SIGTERM lets the agent stop its ranks, and lets ranks save and leave.
                agent.send_signal(signal.SIGTERM)
                agent.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when the user interrupts a second time
            os.close(lifeline_read)
            os.close(lifeline_write)
            _kill_groups(folder, agent)


def _kill_groups(folder: Path, agent: subprocess.Popen[bytes] | None) -> None:
    """SIGKILL whatever is left in the sessions of the agent and the ranks."""
    if agent is not None:
        if agent.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    for file in folder.glob("*/attempt_*/*/pid"):
        with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


def _follow(agent: subprocess.Popen[bytes], output: "_Output", timeout: float) -> None:
    """Show what ranks write until the agent ends."""
    end = time.monotonic() + timeout
    while agent.poll() is None:
        output.show()
        if time.monotonic() > end:
            seen = {line.partition("]")[0]: line for line in output.lines}
            last = "; ".join(seen[rank] for rank in sorted(seen)) or "none wrote a line"
            raise TimeoutError(
                f"the ranks were not done after {timeout:g} s and were stopped; they said last: "
                f"{last}"
            )
        time.sleep(0.05)


@dataclass
class _Output:
    """What ranks write, each into a file of its own, as one stream of whole lines."""

    folder: Path
    lines: list[str] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def show(self, all_of_it: bool = False) -> None:
        """Print the lines that have been finished since last time; unfinished ones too where
        this is ``all_of_it``."""
        fresh = []
        for path in sorted(self.folder.glob("*/attempt_*/*/std*.log")):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            if not all_of_it:
                data = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(data)
            text = data.decode(errors="replace").removesuffix("\n")
            for line in text.split("\n") if data else []:
                # A progress bar redraws itself after \r: its last state is the line.
                fresh.append(f"[{path.parent.name}] " + line.rstrip("\r").rpartition("\r")[2])
        if fresh:
            self.lines += fresh
            sys.stdout.write("".join(f"{line}\n" for line in fresh))
            sys.stdout.flush()


def _read_reports(folder: Path) -> list[dict[str, Any]]:
    try:
        text = (folder / "reports.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


# -- afterwards ---------------------------------------------------------------------------------


def _signal_name(exitcode: int | None) -> str | None:
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def _first_failure(folder: Path, status: int, port: int | None, lines: list[str]) -> LaunchError:
    """The failure that came first in cause, not in the order in which processes ended: a rank
    that loses its peer fails as well, and often before the launcher sees the one that died."""
    exitcodes: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        pairs = json.loads((folder / "failures.json").read_text())
        exitcodes = {int(rank): code for rank, code in pairs.items()}
    errors: dict[int, dict[str, Any]] = {}
    for file in folder.glob("*/attempt_*/*/error.json"):
        with contextlib.suppress(KeyError, json.JSONDecodeError):
            errors[int(file.parent.name)] = json.loads(file.read_text())["companion"]
    if not exitcodes and not errors:
        return _launcher_failure(folder, status, port, lines)

    def order(rank: int) -> tuple[int, float]:
        error, code = errors.get(rank), exitcodes.get(rank)
        stopped = code in (-signal.SIGTERM, 143)
        if error is not None and not (stopped and error["type"] in _STOPPED):
            # Even if it was stopped: an exception comes before a process's slow end.
            return (3 if error["peer_lost"] else 1, error["time"])
        if stopped:
            return (4, 0.0)
        # Aborts follow from lost peers (NCCL's watchdog); other signals come from outside.
        return (0 if code is not None and code < 0 and code != -signal.SIGABRT else 2, 0.0)

    ranks = sorted(exitcodes.keys() | errors.keys(), key=order)
    first = ranks[0]
    error, code = errors.get(first), exitcodes.get(first)
    later = [_in_short(rank, errors.get(rank), exitcodes.get(rank)) for rank in ranks[1:]]
    also = f"(after it: {'; '.join(later)})" if later else ""
    if error is not None:
        message = error["message"]
        if error["peer_lost"]:
            message += " (no rank failed before it: did one rank end its steps early?)"
        return LaunchError(first, error["type"], message, error["traceback"], code, also, lines)
    own = [line for line in lines if line.startswith(f"[{first}] ")]
    name = _signal_name(code)
    message = f"it ended with status {code} and no exception"
    if name:
        message = f"killed by {name}"
        if name == "SIGKILL":
            message += " (often the system ran out of memory; or someone killed it)"
        if "terminate called without an active exception" in "\n".join(own):
            message += " (it ended with its process group open: call destroy_process_group last)"
    return LaunchError(
        first, name or "SystemExit", message, "\n".join(own[-15:]), code, also, lines
    )


def _in_short(rank: int, error: dict[str, Any] | None, code: int | None) -> str:
    if _signal_name(code) == "SIGTERM":
        return f"rank {rank} was stopped"
    if error is None:
        return f"rank {rank}: {_signal_name(code) or f'status {code}'}"
    head = error["message"].split("\n")[0][:80]
    return f"rank {rank}: {error['type']}: {head}"


def _launcher_failure(folder: Path, status: int, port: int | None, lines: list[str]) -> LaunchError:
    """No rank failed, so torchrun itself did."""
    log = (folder / "agent.log").read_text(errors="replace").splitlines()
    said = next(
        (line for line in reversed(log) if re.match(r"[\w.]+(Error|Exception)\b", line)), ""
    )
    if port is not None and "EADDRINUSE" in "\n".join(log):
        message = f"port {port} is taken: leave port out, and a free one is found"
    elif name := _signal_name(status):
        message = f"torchrun was ended by {name}; its ranks have been stopped"
    else:
        message = f"torchrun itself failed with status {status}: {said}"
    kind = said.partition(":")[0].rpartition(".")[2] or "LaunchError"
    return LaunchError(None, kind, message, "\n".join(log[-15:]), status, "", lines)


# -- what the launched processes do -------------------------------------------------------------


def _run_agent(folder: str, arguments: list[str]) -> None:
    """torchrun's own main, writing down each failed rank's exit status."""
    # Standard input is the lifeline, and stays so: the ranks inherit it.
    _watch_lifeline(0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main([f"--log-dir={folder}", *arguments])
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Path(folder, "failures.json").write_text(json.dumps(codes))
        raise


def _run_rank(kind: str, target: str, arguments: list[str]) -> None:
    """Run the target as ``python`` would, and write down the exception it ends with."""
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    (error_file.parent / "pid").write_text(str(os.getpid()))
    os.dup2(1, 2)  # one file, so that stdout and stderr keep their order
    faulthandler.enable(all_threads=False)  # a segmentation fault then shows where it was
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # nobody can type into a rank
        os.dup2(nothing.fileno(), 0)
    _watch_lifeline(lifeline, _kill_own_group)
    sys.argv = [target, *arguments]
    # Ranks find this package even where it is not installed.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    try:
        if kind == "module":
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(target))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):  # a number says no more than the exit status
            _write_error(error_file, error, "")
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, _FROZEN):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        _write_error(error_file, error, text)
        sys.stderr.write(text)
        sys.exit(1)


_FROZEN = "<frozen runpy>"


def _write_error(path: Path, error: BaseException, text: str) -> None:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    record = {
        # torchrun reads this part,
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        # and the launcher this one.
        "companion": {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": text,
            "time": time.time(),
            "peer_lost": any(_PEER_LOST.search(str(link)) for link in chain),
        },
    }
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        path.write_text(json.dumps(record))


def _watch_lifeline(lifeline: int, cut: Callable[[], None]) -> None:
    """Call ``cut`` when the process that called :func:`torchrun` is gone."""

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        cut()

    threading.Thread(target=wait, daemon=True, name="lifeline").start()


def _kill_own_group() -> None:
    time.sleep(GRACE_SECONDS)  # the agent sends SIGTERM first; a rank may save and leave
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.path.pop(0)  # Python put this file's folder there; its names are not for import
    role, first, *rest = sys.argv[1:]
    if role == "agent":
        _run_agent(first, rest)
    else:
        _run_rank(first, rest[0], rest[1:])
