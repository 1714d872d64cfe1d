"""What compiling costs: break-even (T12), the probe (T13), blocks, logs, cold and warm, keys."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from companion import compiling
from companion.compiling import (
    break_even,
    cache_contents,
    cache_directory,
    clear_cache,
    cold_and_warm,
    compile_blocks,
    compiler_ready,
    copy_cache,
    fresh_start,
)
from companion.model import ModelConfig, Transformer
from companion.recompiles import recompiles
from companion.tracer import catch_logs

ROOT = Path(__file__).resolve().parent.parent
SMALL = ModelConfig(context=16, layers=3, width=16, heads=2, kv_heads=1, hidden=24)
HAS_COMPILER = compiling.devices.cpp_compiler() and compiling.devices.python_headers()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")


# ── break-even ───────────────────────────────────────────────────────────────────────────────


def test_t12_break_even():
    assert break_even(8.0, 0.010, 0.006) == 2000


def test_break_even_is_the_first_step_that_pays():
    for cold, eager, compiled in ((8.0, 0.01, 0.0061), (3.3, 0.2, 0.13), (1.0, 0.5, 0.4999)):
        step = break_even(cold, eager, compiled)
        assert cold + step * compiled <= step * eager * (1 + 1e-9)
        assert cold + (step - 1) * compiled > (step - 1) * eager


def test_what_is_not_faster_never_pays():
    assert break_even(8.0, 0.010, 0.010) is None
    assert break_even(8.0, 0.010, 0.020) is None
    assert break_even(0.0, 0.010, 0.006) == 1


@pytest.mark.parametrize(
    "times", [(-1.0, 0.1, 0.1), (1.0, 0.0, 0.1), (1.0, 0.1, float("nan")), (float("inf"), 1, 1)]
)
def test_break_even_refuses_what_is_no_time(times):
    with pytest.raises(ValueError, match="give seconds above 0"):
        break_even(*times)


# ── the probe ────────────────────────────────────────────────────────────────────────────────


@needs_compiler
def test_the_probe_really_compiles():
    with recompiles() as seen:
        finding = compiler_ready(torch.device("cpu"))
    assert finding.ok and not finding.remedy
    assert seen.graphs == 0  # and leaves Dynamo as it was


def test_t13_no_compiler_is_said_before_the_first_call(tmp_path):
    program = (
        "import torch; from companion.compiling import compiler_ready\n"
        "finding = compiler_ready(torch.device('cpu'))\n"
        "print(finding.ok, finding.needed, finding.found, '|', finding.remedy)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())\n"
        "for backend in ('eager', 'aot_eager'):\n"
        "    torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()\n"
        "print('both backends ran')"
    )
    environment = {
        **os.environ,
        "CXX": "/nonexistent/g++",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    finding, ran = done.stdout.splitlines()
    assert finding.startswith("False False no working C++ compiler | install g++, or point CXX")
    assert "backend='eager' or 'aot_eager'" in finding
    assert ran == "both backends ran"


def test_no_headers(monkeypatch):
    monkeypatch.setattr(compiling.devices, "cpp_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(compiling.devices, "python_headers", lambda: None)
    finding = compiler_ready(torch.device("cpu"))
    assert (finding.ok, finding.found) == (False, "no Python.h")


@needs_compiler
def test_a_compiler_that_fails_at_the_first_call(monkeypatch):
    def broken(*inputs, **named):
        raise OSError("disk full")

    monkeypatch.setattr(torch, "compile", lambda function: broken)
    finding = compiler_ready(torch.device("cpu"))
    assert (finding.ok, finding.found) == (False, "disk full")


# ── blocks, keys ─────────────────────────────────────────────────────────────────────────────


def test_blocks_share_one_compilation():
    torch.manual_seed(0)
    model, tokens = Transformer(SMALL), torch.randint(256, (2, 8))
    plain, keys = model(tokens), list(model.state_dict())
    assert compile_blocks(model, backend="eager") == ["blocks.0", "blocks.1", "blocks.2"]
    with recompiles() as seen:
        torch.testing.assert_close(model(tokens), plain)
    assert seen.graphs == 1
    assert list(model.state_dict()) == keys


def test_blocks_inside_blocks_are_compiled_with_them():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

    assert compile_blocks(Deep(), backend="eager") == ["layers.0", "layers.1"]


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear has no repeated blocks"):
        compile_blocks(nn.Linear(2, 2))


def test_blocks_of_torch_nn_are_refused_as_they_capture_nothing():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    with pytest.raises(ValueError, match="captures nothing before torch 2.14"):
        compile_blocks(model)


def test_state_goes_from_compiled_to_eager_and_back_without_key_surgery():
    torch.manual_seed(0)
    eager, other = Transformer(SMALL), Transformer(SMALL)
    compiled = torch.compile(other, backend="eager")
    tokens = torch.randint(256, (2, 8))
    compiled(tokens)
    assert next(iter(compiled.state_dict())).startswith("_orig_mod.")  # the trap
    eager.load_state_dict(get_model_state_dict(compiled))
    torch.testing.assert_close(eager(tokens), compiled(tokens))

    torch.manual_seed(1)
    in_place = Transformer(SMALL)
    compile_blocks(in_place, backend="eager")
    in_place.load_state_dict(eager.state_dict())
    eager.load_state_dict(in_place.state_dict())
    torch.testing.assert_close(in_place(tokens), eager(tokens))


def test_t14_equal_within_a_tolerance_not_bit_by_bit():
    """Without dropout only; with it the compiled run may draw another random stream."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))
    x = torch.randn(16, 8)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)


# ── logs ─────────────────────────────────────────────────────────────────────────────────────


def noisy(x):
    print("", end="")
    return x + 1


def test_channels_are_caught_and_put_back(capfd, monkeypatch):
    def local(x):
        return noisy(x * 2)

    with catch_logs("graph_breaks", "recompiles") as log:
        compiled = torch.compile(local, backend="eager", dynamic=False)
        compiled(torch.ones(3))
        compiled(torch.ones(4))
    assert "Graph break in user code" in log.getvalue()
    assert "Recompiling function" in log.getvalue()
    caught = log.getvalue()
    compiled(torch.ones(5))
    assert log.getvalue() == caught
    assert capfd.readouterr() == ("", "")


def test_a_set_variable_is_overruled_and_put_back(monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "graph_breaks")
    torch._logging._internal._init_logs()
    try:
        with catch_logs("recompiles") as log:
            compiled = torch.compile(lambda x: noisy(x * 3), backend="eager", dynamic=False)
            compiled(torch.ones(3))
            compiled(torch.ones(4))
        assert "Recompiling" in log.getvalue() and "Graph break" not in log.getvalue()
        assert os.environ["TORCH_LOGS"] == "graph_breaks"
        state = torch._logging._internal.log_state
        assert state.is_artifact_enabled("graph_breaks")
        assert not state.is_artifact_enabled("recompiles")
    finally:
        monkeypatch.delenv("TORCH_LOGS")
        torch._logging._internal._init_logs()


def test_logging_is_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), catch_logs("recompiles"):
        raise ZeroDivisionError
    assert not torch._logging._internal.log_state.is_artifact_enabled("recompiles")


@pytest.mark.parametrize("channels", [("graph_breaks ",), ("“graph_breaks”",), ("nothing",), ()])
def test_an_unknown_channel_is_one_sentence(channels):
    with pytest.raises(ValueError, match="channel"), catch_logs(*channels):
        pass


# ── the cache, cold and warm ─────────────────────────────────────────────────────────────────

SETUP = """
import torch
def norm(x): return torch.nn.functional.layer_norm(x.sin() * 2, (64,)).relu()
compiled, x = torch.compile(norm), torch.ones(8, 64)
"""


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cache_directory().name.startswith("torchinductor_")


def fake_cache(root: Path) -> Path:
    for name in ("fxgraph/ab/graph", "aotautograd/cd/entry", "ab/code.cpp", "locks/ab.lock"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("12345")
    return root


def test_clear_takes_a_cache_whole(tmp_path):
    root = fake_cache(tmp_path / "cache")
    assert cache_contents(root) == {"aotautograd": (1, 5), "fxgraph": (1, 5), "code": (2, 10)}
    assert clear_cache(root) == 20
    assert not root.exists()
    assert clear_cache(root) == 0


@pytest.mark.parametrize("foreign", ["notes.txt", ".git", "project"])
def test_clear_refuses_what_is_not_a_cache(tmp_path, foreign):
    root = fake_cache(tmp_path / "cache")
    (root / foreign).mkdir()
    with pytest.raises(ValueError, match=f"not an Inductor cache .it holds {foreign}"):
        clear_cache(root)
    assert (root / "ab/code.cpp").exists()


def test_clear_refuses_folders_of_two_letter_names_files_and_links(tmp_path):
    (tmp_path / "plain" / "ab").mkdir(parents=True)
    with pytest.raises(ValueError, match="lacks Inductor's folders"):
        clear_cache(tmp_path / "plain")
    root = fake_cache(tmp_path / "cache")
    (tmp_path / "link").symlink_to(root)
    for name in ("link", "cache/ab/code.cpp"):
        with pytest.raises(ValueError, match="is not a folder"):
            clear_cache(tmp_path / name)
    with pytest.raises(ValueError):
        clear_cache(Path.home())
    assert (root / "ab/code.cpp").exists()


def test_copy_keeps_what_is_there(tmp_path):
    root, target = fake_cache(tmp_path / "a"), fake_cache(tmp_path / "b")
    (target / "fxgraph/zz").write_text("kept")
    assert copy_cache(target, root) == 20
    assert (target / "fxgraph/zz").read_text() == "kept"
    (target / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="mine.txt"):
        copy_cache(target, root)
    with pytest.raises(ValueError, match="compile something first"):
        copy_cache(target, tmp_path / "none")


def test_a_program_that_fails_is_told_in_its_own_words():
    with pytest.raises(RuntimeError, match="fresh process: ZeroDivisionError: division by zero"):
        fresh_start("1 / 0")


def test_children_count_and_imports_do_not(tmp_path):
    burn = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {burn!r}])"
    start = fresh_start(program, cache=tmp_path)
    assert 0.6 <= start.cpu_seconds < start.import_cpu_seconds
    assert (start.fx_hits, start.aot_hits) == (0, 0)


def test_a_program_that_takes_too_long_leaves_nothing_behind(tmp_path):
    mark = tmp_path / "alive"
    setup = (
        "import pathlib, subprocess, sys\n"
        f"command = [sys.executable, '-c', 'import time; time.sleep(300)', {str(mark)!r}]\n"
        "subprocess.Popen(command, stderr=subprocess.DEVNULL)\n"
        f"pathlib.Path({str(mark)!r}).touch()"
    )
    for timeout in (10, 30, 90):  # a busy machine may take long to get as far as the child
        with pytest.raises(TimeoutError, match="longer timeout"):
            fresh_start("import time; time.sleep(300)", setup, tmp_path, timeout=timeout)
        if mark.exists():
            break
    assert mark.exists()
    time.sleep(0.5)
    commands = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it may end while we look
            commands.append(process.read_bytes())
    assert not any(str(mark).encode() in command for command in commands)


@pytest.mark.slow
@needs_compiler
def test_warm_takes_much_less_than_cold_and_the_cache_travels(tmp_path):
    result = cold_and_warm("compiled(x)", SETUP)
    assert (result.cold.fx_hits, result.cold.aot_hits) == (0, 0)
    assert (result.warm.fx_hits, result.warm.aot_hits) == (1, 1)
    assert {"fxgraph", "aotautograd", "code"} <= result.contents.keys()
    assert result.cold.import_cpu_seconds > 0.5
    fresh_start("compiled(x)", SETUP, tmp_path / "here")
    copy_cache(tmp_path / "there", tmp_path / "here")
    clear_cache(tmp_path / "here")
    carried = fresh_start("compiled(x)", SETUP, tmp_path / "there")
    assert (carried.fx_hits, carried.aot_hits) == (1, 1)
