"""The command line on real runs: what it prints, its exit status, one sentence when it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from companion.__main__ import main
from companion.launch import torchrun

TRAIN = ["train", "--sequence", "32", "--global-batch", "4", "--steps", "2", "--log-every", "1"]


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "companion", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def test_train_prints_steps_and_what_to_beat(capsys):
    assert main(TRAIN) == 0
    out = capsys.readouterr().out
    assert "4 × 32 tokens a step" in out
    assert "step     2  loss" in out and "held-out loss" in out and "to beat: bigram" in out


def test_same_seed_same_lines(capsys):
    def losses():
        main([*TRAIN, "--seed", "3"])
        return [line.split("lr")[0] for line in capsys.readouterr().out.splitlines()]

    assert losses() == losses()


def test_doctor_as_json_and_text():
    done = run("doctor", "--json")
    findings = json.loads(done.stdout)
    assert {"name", "ok", "found", "remedy"} <= findings[0].keys()
    assert done.returncode in (0, 1)
    text = run("doctor").stdout
    assert all(finding["name"] in text for finding in findings)


def test_own_corpus_and_tensorboard(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text("the quick brown fox " * 40)
    assert main([*TRAIN, "--corpus", f"{tmp_path}/text", "--tensorboard", f"{tmp_path}/tb"]) == 0
    assert list(Path(tmp_path, "tb").glob("events*"))


def test_trace_of_a_file_and_bad_ones(capsys, tmp_path):
    data = Path(__file__).parent / "data"
    page = tmp_path / "timeline.html"
    assert main(["trace", str(data / "cuda.json"), "--html", str(page)]) == 0
    assert "idle" in capsys.readouterr().out
    assert "<canvas" in page.read_text() or "data-timeline" in page.read_text()
    (tmp_path / "cut.json").write_text('{"traceEvents": [{"ph": "X"')
    assert main(["trace", str(tmp_path / "cut.json")]) == 2
    error = capsys.readouterr().err
    assert "cut.json" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "no preset 'huge'"),
        (["--steps", "-1"], "--steps is -1"),
        (["--total-steps", "-5"], "total_steps is -5"),
        (["--total-steps", "0"], "total_steps is 0"),
        (["--global-batch", "0"], "global_batch is 0"),
        (["--sequence", "999"], "sequence is 999, the model's context is 256"),
        (["--corpus", "/nowhere/at/all"], "corpus /nowhere/at/all: no such file or directory"),
        (["--device", "tpu"], "tpu"),
        (["--strategy", "ddp"], "strategy ddp needs several ranks"),
        (["--learning-rate", "nan"], "learning_rate is nan"),
        (["--learning-rate", "1e9"], "the loss is"),
        (["--micro-batch", "0"], "micro_batch is 0"),
        (["--log-every", "-1"], "--log-every is negative"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments, message, capsys):
    steps = [] if "1e9" not in arguments else ["--steps", "30"]
    assert main([*TRAIN, *steps, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("companion: ") and error.count("\n") == 1
    assert "Traceback" not in error


def test_traceback_when_asked_for():
    with pytest.raises(ValueError, match="no preset"):
        main(["--traceback", *TRAIN, "--preset", "huge"])


def test_typographic_quotes_in_torch_logs():
    """Copied from a document, they stop `import torch` itself, with pages of text."""
    done = run("doctor", env={**os.environ, "TORCH_LOGS": "“graph_breaks ”"})
    assert done.returncode == 2
    assert "write it with plain ones" in done.stderr and "Traceback" not in done.stderr


def test_a_signal_to_one_rank_stops_all_of_them(tmp_path):
    """S3's kind: the others must not go on to an evaluation that it takes no part in."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 400)
    script = tmp_path / "one_rank.py"
    script.write_text(
        "import os, signal, sys\n"
        "from companion import loop\n"
        "from companion.__main__ import main\n"
        "real = loop.optimizer_step\n"
        "def step(state, batch, count=None):\n"
        "    if state.step == 3 and state.mesh.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return real(state, batch, count)\n"
        "loop.optimizer_step = step\n"
        "status = main(sys.argv[1:])\n"
        "print('status', status, flush=True)\n"
    )
    arguments = ["--strategy", "ddp", "--corpus", tmp_path / "text.txt", "--steps", 1000]
    result = torchrun(script, *TRAIN, *arguments, nproc=2, timeout=120)
    assert sum("status 143" in line for line in result.lines) == 2, result.lines
    assert any("stopped by another rank after step 4" in line for line in result.lines)


def test_no_compiler_is_said_before_anything_runs(monkeypatch, capsys):
    """T13: without it the failure comes at the first call, as pages of text."""
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    assert main([*TRAIN, "--device", "cpu", "--compile"]) == 2
    assert "--compile needs a C++ compiler" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -u -m companion {' '.join(TRAIN)} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_tensorboard_on_a_file(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main([*TRAIN, "--tensorboard", str(tmp_path / "taken")]) == 2
    assert "give a directory" in capsys.readouterr().err
