"""Real torchrun launches: what comes back, what is said about failures, what is left behind."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from companion import device, launch
from companion.launch import LaunchError, torchrun

ROOT = Path(__file__).resolve().parent.parent
GLOO = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script with a name of its own, so that its processes can be told from others'."""

    def write(text: str) -> Path:
        path = tmp_path / f"ranks_{os.getpid()}_{time.monotonic_ns()}.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def processes(word: str) -> list[str]:
    """Command lines of running processes (zombies aside) that have this word in them."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        dead = process.info["status"] == psutil.STATUS_ZOMBIE
        if word in line and not dead and process.pid != os.getpid():
            found.append(line)
    return found


def until(condition: Callable[[], object], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


class Watcher(io.StringIO):
    """A stdout that calls ``act`` once, when all of ``words`` have been written to it."""

    def __init__(self, *words: str, act: Callable[[], object]) -> None:
        super().__init__()
        self.words, self.act, self.done = words, act, False

    def write(self, text: str) -> int:
        count = super().write(text)
        if not self.done and all(word in self.getvalue() for word in self.words):
            self.done = True
            self.act()
        return count


UP = ("[0] up", "[1] up")


def interrupt() -> None:
    raise KeyboardInterrupt


# -- when all goes well -------------------------------------------------------------------------


def test_two_ranks_meet_and_hand_back_figures(script, capsys):
    path = script(
        GLOO
        + """
import sys
from companion.launch import report, say
x = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(x)
say(f"sum {x.item()} args {sys.argv[1:]} main {__name__}")
report(total=x, row=torch.arange(2), text="ä")
dist.destroy_process_group()
"""
    )
    result = torchrun(path, "--steps", 20, "a b", nproc=2)
    assert result.returncode == 0
    said = "sum 3.0 args ['--steps', '20', 'a b'] main __main__"
    assert sorted(result.lines) == [f"[0] {said}", f"[1] {said}"]
    assert capsys.readouterr().out.splitlines() == result.lines
    metrics = sorted(result.metrics, key=lambda row: row["rank"])
    assert metrics == [{"rank": r, "total": 3.0, "row": [0, 1], "text": "ä"} for r in (0, 1)]
    assert "lines" not in repr(result)


def test_a_module_of_the_working_directory_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "job.py").write_text(
        "import sys, mine\nprint(__name__, sys.argv[1:], sys.stdin.read() == '')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torchrun("-m mine.job", "x", nproc=1).lines == ["[0] __main__ ['x'] True"]
    words = ["module", "mine.job", "x", "3"]
    assert launch._target("-m mine.job", ("x", 3)) == words
    assert launch._target("-m", ("mine.job", "x", 3)) == words


def test_lines_of_two_ranks_stay_whole_and_in_order(script, capsys):
    path = script(
        """
        import os, sys
        for i in range(400):  # print under python -u: the text and the line's end apart
            print(os.environ["RANK"], i, "é" * 30, file=sys.stderr if i % 2 else sys.stdout)
        print("10 %\\r50 %\\r100 %")
        print("no end", end="")
        """
    )
    result = torchrun(path)
    for rank in "01":
        own = [line for line in result.lines if line.startswith(f"[{rank}] ")]
        numbered = [f"[{rank}] {rank} {i} {'é' * 30}" for i in range(400)]
        assert own == [*numbered, f"[{rank}] 100 %", f"[{rank}] no end"]
    assert len(result.lines) == 804
    assert capsys.readouterr().out.splitlines() == result.lines


def test_lines_are_shown_while_the_ranks_run_and_only_when_they_are_whole(script, tmp_path):
    """Rank 0 stops in mid-line; rank 1 speaks then; when that is seen, rank 0 goes on."""
    half, go = tmp_path / "half", tmp_path / "go"
    path = script(
        f"""
        import os, pathlib, sys, time

        def wait_for(name):
            end = time.monotonic() + 40
            while not os.path.exists(name):
                assert time.monotonic() < end, "nobody saw the line"
                time.sleep(0.05)

        if os.environ["RANK"] == "0":
            sys.stdout.write("first half, ")
            pathlib.Path({str(half)!r}).touch()
            wait_for({str(go)!r})
            print("second half")
        else:
            wait_for({str(half)!r})
            time.sleep(0.5)
            print("up")
        """
    )
    with contextlib.redirect_stdout(Watcher("[1] up", act=go.touch)):
        assert torchrun(path).lines == ["[1] up", "[0] first half, second half"]


def test_workers_may_be_spawned_from_a_script_that_ranks_run(script, capsys):
    path = script(
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return i * i

        if __name__ == "__main__":
            loader = DataLoader(Squares(), 4, num_workers=1, multiprocessing_context="spawn")
            print(next(iter(loader)).tolist())
        """
    )
    assert torchrun(path, nproc=1).lines == ["[0] [0, 1, 4, 9]"]


def test_cores_are_shared_out_unless_the_user_said_otherwise(script, monkeypatch, capsys):
    path = script("import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ.get('MINE'))\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = device.cores()
    many = torchrun(path, nproc=cores + 1, env={"MINE": 7})
    assert sorted(many.lines) == sorted(f"[{rank}] 1 7" for rank in range(cores + 1))
    assert f"note: {cores + 1} ranks share {cores} cores" in capsys.readouterr().out

    def threads(nproc: int, **env: int) -> str:
        return launch._environment(env, nproc, path.parent)["OMP_NUM_THREADS"]

    assert threads(1) == str(cores)
    monkeypatch.setattr(device, "cores", lambda: 7)
    assert [threads(nproc) for nproc in (2, 3, 4, 7)] == ["3", "2", "1", "1"]
    assert threads(2, OMP_NUM_THREADS=5) == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads(2) == "4"
    assert "note:" not in capsys.readouterr().out


# -- failures -----------------------------------------------------------------------------------


def test_the_first_failure_is_named_with_its_own_traceback(script, capsys):
    path = script(
        GLOO
        + """
def step():
    raise ValueError("bad sample 7")
if dist.get_rank() == 1:
    dist.destroy_process_group()  # left open, it may abort the process as it ends
    step()
dist.all_reduce(torch.ones(1))
"""
    )
    with pytest.raises(LaunchError) as caught:
        torchrun(path)
    error = caught.value
    assert (error.rank, error.type, error.message) == (1, "ValueError", "bad sample 7")
    assert (error.exitcode, error.signal) == (1, None)
    first, *frames, last = error.traceback.rstrip().splitlines()
    assert first == "Traceback (most recent call last):" and last == "ValueError: bad sample 7"
    assert f'File "{path}"' in frames[0], "no frame of the launcher above the user's own"
    assert "in step" in error.traceback
    assert str(error).startswith("rank 1 failed first: ValueError: bad sample 7\nTraceback")
    assert "rank 0" in str(error).splitlines()[-1]
    assert any("bad sample 7" in line for line in error.lines)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(9)"])
def test_a_rank_that_died_silently_comes_before_the_one_that_missed_it(script, end, capsys):
    path = script(
        GLOO
        + f"""
import os, signal
if dist.get_rank() == 1:
    print("last words")
    {end}
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    raise RuntimeError("training failed") from error
"""
    )
    with pytest.raises(LaunchError) as caught:
        torchrun(path)
    error = caught.value
    assert error.rank == 1
    assert error.traceback == "[1] last words"
    if "SIGKILL" in end:
        assert (error.type, error.signal, error.exitcode) == ("SIGKILL", "SIGKILL", -9)
        assert "killed by SIGKILL (often the system ran out of memory" in str(error)
    else:
        assert (error.signal, error.exitcode) == (None, 9)
        assert "ended with status 9 and no exception" in str(error)


class Told(Exception):
    pass


LOST = RuntimeError("Connection closed by peer [127.0.0.1]:1")
WRAPPED = RuntimeError("training failed")
WRAPPED.__cause__ = LOST


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        # exit code and exception of rank 0, 1, ... in order of time; which one is at fault
        ([(1, WRAPPED), (-9, None)], 1),
        ([(1, WRAPPED), (9, None)], 1),
        ([(1, LOST), (1, Told("late"))], 1),
        ([(1, LOST), (-15, Told("its process was slow to end, and was stopped"))], 1),
        ([(-6, None), (1, Told("first")), (1, Told("second")), (-15, None)], 1),
        ([(143, SystemExit("stopped")), (-15, KeyboardInterrupt()), (3, None)], 2),
    ],
    ids=["killed", "exited", "lost", "slow", "aborted", "stopped"],
)
def test_the_first_in_cause_is_named_whatever_the_order_in_time(tmp_path, ranks, first):
    """Which process the launcher sees first is chance, so the orders are laid out here."""
    for rank, (_, error) in enumerate(ranks):
        folder = tmp_path / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        if error is not None:
            launch._write_error(folder / "error.json", error, "")
    codes = {rank: code for rank, (code, _) in enumerate(ranks)}
    (tmp_path / "failures.json").write_text(json.dumps(codes))
    told = launch._first_failure(tmp_path, 1, None, [])
    assert (told.rank, told.exitcode) == (first, codes[first])


def test_a_rank_that_ends_early_is_hinted_at(script, capsys):
    path = script(
        GLOO
        + """
for step in range(2 if dist.get_rank() else 1):
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
    )
    with pytest.raises(LaunchError, match="did one rank end its steps early") as caught:
        torchrun(path)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("text", "type", "message"),
    [
        ("import sys\nsys.exit('no data here')", "SystemExit", "no data here"),
        ("import sys\nsys.exit(3)", "SystemExit", "it ended with status 3 and no exception"),
        ("x = = 1", "SyntaxError", "invalid syntax"),
        (
            "print('terminate called without an active exception')\nimport os\nos.abort()",
            "SIGABRT",
            "killed by SIGABRT (it ended with its process group open: call destroy_process_group",
        ),
        ("breakpoint()", "BdbQuit", ""),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV", "killed by SIGSEGV"),
    ],
)
def test_every_way_to_fail_has_its_name(script, text, type, message, capsys):
    with pytest.raises(LaunchError) as caught:
        torchrun(script(text), nproc=1)
    assert (caught.value.rank, caught.value.type) == (0, type)
    assert caught.value.message.startswith(message)
    if type == "SIGSEGV":
        assert "Segmentation fault" in caught.value.traceback


def test_torchruns_own_record_decorator_does_not_get_in_the_way(script, capsys):
    path = script(
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("recorded")

        main()
        """
    )
    with pytest.raises(LaunchError) as caught:
        torchrun(path, nproc=1)
    assert (caught.value.type, caught.value.message) == ("ValueError", "recorded")


def test_t26_a_function_typed_in_a_cell_is_refused_in_one_sentence():
    def worker(rank):
        pass

    for target in (worker, lambda: None, print, torchrun):
        with pytest.raises(TypeError, match="is a function.*%%writefile train.py") as caught:
            torchrun(target)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("nproc", [0, -1, True, 2.0, "2", None])
def test_the_number_of_ranks_is_checked(script, nproc):
    with pytest.raises(ValueError, match="nproc is .*at least 1"):
        torchrun(script(""), nproc=nproc)


def test_what_cannot_be_run_is_refused_before_anything_starts(script, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no script nowhere\.py in .*check the path"):
        torchrun("nowhere.py")
    with pytest.raises(ValueError, match="is a folder: give the path"):
        torchrun(tmp_path)
    with pytest.raises(ValueError, match="json is a package without a __main__"):
        torchrun("-m json")
    for module in ("-m no_such_module", "-m no_such.module", "-m sys.nothing", "-m", "-m "):
        with pytest.raises(ValueError, match="there is no module"):
            torchrun(module)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout is"):
            torchrun(script(""), timeout=seconds)
    with pytest.raises(ValueError, match="TORCH_LOGS.*plain"):
        torchrun(script(""), env={"TORCH_LOGS": "“recompiles”"})
    with pytest.raises(ValueError, match="port is 70000"):
        torchrun(script(""), port=70000)


# -- ports (T25) --------------------------------------------------------------------------------


def test_t25_no_fixed_port_is_used_and_two_launches_go_at_once(script, capsys):
    path = script(GLOO + "dist.barrier()\nprint('met')\ndist.destroy_process_group()\n")
    with socket.socket() as occupied:
        with contextlib.suppress(OSError):  # taken by someone else: just as well
            occupied.bind(("", 29500))
            occupied.listen()
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(torchrun(path))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [sorted(result.lines) for result in results] == [["[0] met", "[1] met"]] * 2


def test_t25_an_explicit_port_that_is_taken_is_named(script, capsys):
    path = script(
        GLOO
        + """
import os
dist.barrier()
print(os.environ["MASTER_PORT"])
dist.destroy_process_group()
"""
    )
    with socket.socket() as occupied:
        occupied.bind(("", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is taken: leave port out"):
            torchrun(path, port=port)
    assert sorted(torchrun(path, port=port).lines) == [f"[0] {port}", f"[1] {port}"]


# -- nothing is left behind (T28) ---------------------------------------------------------------

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)", __file__])
print("up")
time.sleep(90)
"""
PLAIN = "import time\nprint('up')\ntime.sleep(90)\n"


def test_t28_after_a_timeout_nothing_runs(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    path = script(PLAIN)
    with pytest.raises(TimeoutError, match=r"not done after 9 s and were stopped"):
        torchrun(path, timeout=9)
    assert processes(path.name) == []
    assert list((tmp_path / "temp").iterdir()) == [], "temporary files stay"


@pytest.mark.parametrize("text", [PLAIN, STUBBORN], ids=["plain", "stubborn"])
def test_t28_after_an_interrupt_nothing_runs(script, monkeypatch, text):
    """Stubborn ranks ignore SIGTERM and have a process of their own beside them."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    path = script(text)
    with contextlib.redirect_stdout(Watcher(*UP, act=interrupt)):
        with pytest.raises(KeyboardInterrupt):
            torchrun(path)
    # sooner than the ranks' own lifeline would end them
    assert until(lambda: not processes(path.name), 4), processes(path.name)


def test_t28_what_a_rank_says_while_it_is_stopped_is_shown(script):
    path = script(
        """
        import signal, sys, time
        def leave(*_):
            print("saved")
            sys.exit(143)
        signal.signal(signal.SIGTERM, leave)
        print("up")
        time.sleep(90)
        """
    )
    output = Watcher(*UP, act=interrupt)
    with contextlib.redirect_stdout(output), pytest.raises(KeyboardInterrupt):
        torchrun(path)
    assert "[0] saved" in output.getvalue() and "[1] saved" in output.getvalue()
    assert processes(path.name) == []


def test_ranks_live_as_long_as_they_need(script, capsys):
    """Longer than the grace that a rank has once its launcher is gone."""
    path = script(f"import time\ntime.sleep({launch.GRACE_SECONDS + 2})\nprint('done')\n")
    assert sorted(torchrun(path).lines) == ["[0] done", "[1] done"]


@pytest.mark.parametrize("agent_too", [False, True])
def test_t28_when_the_launching_process_is_killed_its_ranks_end(script, agent_too):
    """A kernel restart is a SIGKILL. Each process must notice by itself."""
    path = script(PLAIN)
    code = f"from companion.launch import torchrun\ntorchrun({str(path)!r})"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(path.parent)},  # a killed process can't tidy up
        stdout=subprocess.PIPE,
    )
    try:
        heard = {parent.stdout.readline(), parent.stdout.readline()}
        assert heard == {b"[0] up\n", b"[1] up\n"}
        assert len(processes(path.name)) >= 3
        (agent,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        if agent_too:
            agent.kill()
        parent.wait()
        parent.stdout.close()
    assert until(lambda: not processes(path.name), 40), processes(path.name)


def test_t28_when_the_agent_is_killed_its_ranks_end(script):
    path = script(PLAIN)

    def kill_agent() -> None:
        children = psutil.Process().children()
        (agent,) = [child for child in children if path.name in " ".join(child.cmdline())]
        agent.kill()

    with contextlib.redirect_stdout(Watcher(*UP, act=kill_agent)):
        with pytest.raises(LaunchError, match="torchrun was ended by SIGKILL") as caught:
            torchrun(path)
    assert (caught.value.rank, caught.value.signal) == (None, "SIGKILL")
    assert until(lambda: not processes(path.name), 10), processes(path.name)


def test_t28_the_kernels_stop_button_ends_the_ranks(script, tmp_path):
    """In a real kernel: interrupt, then the next cells work, and errors read well."""
    from jupyter_client.manager import start_new_kernel

    path, broken = script(PLAIN), script("raise ValueError('typed wrong')")
    kernel, client = start_new_kernel(cwd=str(ROOT))

    def run(code: str, on_stream: Callable[[str], None] = lambda text: None) -> dict:
        def hook(message):
            if message["msg_type"] == "stream":
                on_stream(message["content"]["text"])

        return client.execute_interactive(
            code, timeout=90, allow_stdin=False, output_hook=hook, store_history=False
        )["content"]

    heard: list[str] = []

    def stop_when_up(text: str) -> None:
        heard.append(text)
        if "".join(heard).count("up") == 2 and heard[-1] != "stopped":
            heard.append("stopped")
            kernel.interrupt_kernel()

    try:
        assert run("from companion.launch import torchrun")["status"] == "ok"
        reply = run(f"torchrun({str(path)!r})", stop_when_up)
        assert (reply["status"], reply.get("ename")) == ("error", "KeyboardInterrupt")
        assert processes(path.name) == []

        reply = run(f"torchrun({str(broken)!r}, nproc=1)")
        shown = "\n".join(reply["traceback"])
        assert reply["ename"] == "LaunchError" and "typed wrong" in shown
        assert "subprocess" not in shown and "_first_failure" not in shown

        reply = run("def worker(rank): pass\ntorchrun(worker)")  # T26
        assert reply["ename"] == "TypeError" and "worker is a function" in reply["evalue"]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


# -- say and report -----------------------------------------------------------------------------


def test_say_writes_whole_lines_under_plain_torchrun(script):
    path = script(
        f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from companion.launch import report, say
        for i in range(200):
            say(f"{{i}}\\n{"x" * 40}")
        report(loss=1.0)
        """
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in "01":
        expected = [text for i in range(200) for text in (f"[{rank}] {i}", f"[{rank}] {'x' * 40}")]
        assert [line for line in lines if line.startswith(f"[{rank}]")] == expected
    assert len(lines) == 800


def test_say_and_report_without_ranks(capsys, monkeypatch, tmp_path):
    for name in ("RANK", launch.REPORT_FILE):
        monkeypatch.delenv(name, raising=False)
    launch.say("alone")
    launch.report(loss=1.0)
    assert capsys.readouterr().out == "alone\n"
    with pytest.raises(TypeError, match="report can't send this: a set is not a plain value"):
        launch.report(samples={1, 2})
    monkeypatch.setenv(launch.REPORT_FILE, str(tmp_path / "reports.jsonl"))
    launch.report(step=1, loss=float("nan"))
    launch.report(step=2)
    first, second = launch._read_reports(tmp_path)
    assert first["loss"] != first["loss"] and second == {"rank": 0, "step": 2}


def test_a_signal_from_outside_is_told_apart(script, capsys):
    """torchrun stopped by someone else: no rank is blamed."""
    path = script("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)")
    with pytest.raises(LaunchError, match="torchrun itself failed.*signal: 15") as caught:
        torchrun(path, nproc=1)
    assert caught.value.rank is None and caught.value.exitcode == 1
    assert signal.SIGTERM == 15 and processes(path.name) == []
