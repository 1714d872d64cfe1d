"""The exercises: every solution passes, every stub reads "not attempted yet", and plausible
wrong answers get a hint of their own."""

import inspect
import itertools
import linecache
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from companion.classroom.checks import HINT, OPEN, PASSED, Hint, Verdict, check, faults, unchanged
from companion.classroom.checks import baseline as checks

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
_cells = itertools.count()


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a kernel does: its source can be read back, its last value returned."""
    name = f"<cell {next(_cells)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    if source.startswith("check."):
        return eval(source, names)
    exec(compile(source, name, "exec"), names)
    return None


def cells(path: Path, *tags: str) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [c.source for c in notebook.cells if set(tags) & set(c.metadata.get("tags", []))]


def names() -> dict[str, Any]:
    return {"check": checks, "torch": torch, "F": F, "nn": nn, "np": np, "math": math}


def verdicts(path: Path, tag: str) -> dict[str, Verdict]:
    space = names()
    results = {source: run_cell(source, space) for source in cells(path, tag, "check")}
    return {source: result for source, result in results.items() if result is not None}


def test_every_stub_of_notebook_01_reads_not_attempted():
    found = verdicts(NOTEBOOKS / "01_baseline.ipynb", "exercise")
    assert len(found) == 10
    assert {source: v.status for source, v in found.items()} == dict.fromkeys(found, OPEN)


def test_every_solution_of_notebook_01_passes():
    found = verdicts(NOTEBOOKS / "solutions" / "01_baseline.ipynb", "solution")
    assert len(found) == 10
    failed = {source: str(v) for source, v in found.items() if v.status != PASSED}
    assert not failed


def test_the_solutions_answer_the_notebooks_exercises():
    exercises = cells(NOTEBOOKS / "01_baseline.ipynb", "check")
    assert exercises == cells(NOTEBOOKS / "solutions" / "01_baseline.ipynb", "check")


def test_the_loops_handed_out_are_the_ones_the_checks_know():
    space = names()
    for source in cells(NOTEBOOKS / "01_baseline.ipynb", "exercise"):
        run_cell(source, space)
    for name in ("train_a", "train_b", "seconds_per_step", "train_d", "train_e"):
        assert unchanged(space[name], getattr(faults, name)), name


LOOP = """
def answer(model, optimizer, batches):
    losses = []
    {before}
    for inputs, targets in batches:
        {clear}
        loss = {loss}
        loss.backward()
        {between}
        optimizer.step()
        losses.append({kept})
    return {returned}
"""


def loop(
    before="pass",
    clear="optimizer.zero_grad()",
    loss="F.cross_entropy(model(inputs), targets)",
    between="pass",
    kept="loss.item()",
    returned="losses",
):
    return LOOP.format(**locals())


TIMER = """
def answer(step, synchronize, clock, steps=20):
    {warm}
    {wait}
    start = clock()
    for _ in range(steps):
        step()
    {last}
    return {seconds}
"""


def timer(warm="step()", wait="synchronize()", last="synchronize()",
          seconds="(clock() - start) / steps"):  # fmt: skip
    return TIMER.format(**locals())


DROPOUT = """
def answer(model, optimizer, batches, held_out):
    x, y = held_out
    history = []
    {before}
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        {on}
        with torch.{grad}():
            loss = F.cross_entropy(model(x), y)
        {off}
        history.append(loss.item())
    return history
"""


def dropout(before="pass", on="model.eval()", off="model.train()", grad="no_grad"):
    return DROPOUT.format(**locals())


LEAK = """
def answer(model, optimizer, inputs, targets, steps=60):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[{train}]), targets[{train}])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(inputs[{judge}]), targets[{judge}]).item()
"""


def leak(train="20:", judge=":20"):
    return LEAK.format(**locals())


EVALUATE = """
def answer(model, batches):
    flags = [(m, m.training) for m in model.modules()]
    total, count = 0.0, 0
    try:
        {on}
        with torch.{grad}():
            for x, y in batches:
                total += F.cross_entropy(model(x), y, reduction={reduction!r}).item()
                count += {count}
    {finally_}
        {off}
    return total / count
"""


BACK = "[setattr(m, 'training', t) for m, t in flags]"


def evaluation(on="model.eval()", grad="no_grad", reduction="sum", count="len(y)",
               finally_="finally:", off=BACK):  # fmt: skip
    return EVALUATE.format(**locals())


def bigram(counts="train", axis="axis=1", log="np.log", tail=".mean()", start="np.ones", sign="-"):
    return f"""
def answer(train, held_out):
    counts = {start}((256, 256))
    np.add.at(counts, ({counts}[:-1], {counts}[1:]), 1)
    with np.errstate(divide="ignore"):
        chances = counts / counts.sum({axis}, keepdims=True)
        return float({sign}({log}(chances[held_out[:-1], held_out[1:]])){tail})
"""


def accumulation(loss, before="pass"):
    return f"""
def answer(model, pieces):
    count = sum(int((y != -100).sum()) for _, y in pieces)
    for x, y in pieces:
        {before}
        ({loss}).backward()
"""


MODEL = """
class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.gru = nn.GRU(64, 64, batch_first=True{more})
        self.head = nn.Linear({width}, 256)
        {extra}

    def forward(self, tokens):
        x = self.embedding(tokens)
        return {out}


made = Mine()


def answer():
    return {made}
"""


def own(more="", width=64, extra="pass", out="self.head(self.gru(x)[0])", made="Mine()"):
    return MODEL.format(**locals())


SUM = "F.cross_entropy(model(x), y, reduction='sum')"
RIGHT = [
    ("loop_a", loop()),
    ("loop_a", loop(clear="model.zero_grad()")),
    ("loop_b", loop(loss="F.nll_loss(model(inputs).log_softmax(-1), targets)")),
    ("loop_c", timer()),
    ("loop_c", timer(warm="[step() for _ in range(3)]")),
    ("loop_d", dropout()),
    ("loop_e", leak()),
    ("evaluate", evaluation()),
    ("accumulate", accumulation(f"{SUM} / count")),
    ("bigram", bigram()),
    ("own_model", own()),
]
WRONG = [
    ("loop_a", loop(before="optimizer.zero_grad()", clear="pass"), "still add up"),
    ("loop_a", loop(clear="pass", between="optimizer.zero_grad()"), "never move"),
    ("loop_a", loop(before="C = torch.optim.SGD", clear="optimizer = C(model.parameters(), lr=0.2);"
                    " optimizer.zero_grad()"), "momentum is lost"),
    ("loop_a", loop(kept="loss"), "keeps its autograd graph"),
    ("loop_a", loop(returned="losses[-1]"), "return the list"),
    ("loop_a", loop(loss="F.cross_entropy(model(inputs), targets, reduction='sum')"),
     "how the loss is computed"),
    ("loop_a", loop(between="if len(losses) == 4: return losses + [loss.item()]"),
     "the first 5 losses are right"),
    ("loop_b", loop(loss="F.cross_entropy(model(inputs).softmax(1), targets)"),
     "still gets probabilities"),
    ("loop_b", loop(loss="F.nll_loss(model(inputs).softmax(-1), targets)"),
     "log-probabilities, and"),
    ("loop_b", loop(loss="F.nll_loss(model(inputs), targets)"), "no floor"),
    ("loop_b", loop(loss="F.cross_entropy(model(inputs).softmax(0), targets)"),
     "mixes the samples"),
    ("loop_b", loop(loss="F.cross_entropy(model(inputs).sigmoid(), targets)"), "sigmoid"),
    ("loop_c", timer(warm="pass"), "first step is still in the time"),
    ("loop_c", timer(last="pass"), "*ask for*"),
    ("loop_c", timer(wait="pass"), "busy with the warm-up"),
    ("loop_c", timer(seconds="clock() - start"), "all steps together"),
    ("loop_c", timer(seconds="1000 * (clock() - start) / steps"), "milliseconds"),
    ("loop_c", timer(warm="pass", wait="pass", last="pass"), "10 ms a step"),
    ("loop_d", dropout(on="pass"), "dropout on"),
    ("loop_d", dropout(before="model.train()", off="pass"), "before the loop is not enough"),
    ("loop_d", dropout(before="model.eval()"), "came too early"),
    ("loop_d", dropout(grad="enable_grad"), "torch.no_grad()"),
    ("loop_e", leak(train="10:"), "10 of the 20"),
    ("loop_e", leak(train=":20", judge="20:"), "hold out the first 20"),
    ("loop_e", leak(train="50:"), "you train on 50"),
    ("loop_e", leak(judge=":"), "of the 100 samples"),
    ("evaluate", evaluation(off="model.train()"), "frozen on purpose"),
    ("evaluate", evaluation(off="pass"), "stays in eval mode: put the flags back before"),
    ("evaluate", evaluation(finally_="except ZeroDivisionError: pass\n    else:"),
     "when the loader raises an error half-way, the model stays in eval mode"),
    ("evaluate", evaluation(on="pass"), "dropout was on"),
    ("evaluate", evaluation(grad="enable_grad"), "a graph was built"),
    ("evaluate", evaluation(reduction="mean", count="1"), "mean of the batch means"),
    ("evaluate", evaluation(finally_="except Exception: pass\n    finally:"), "swallowed"),
    ("accumulate", accumulation("F.cross_entropy(model(x), y) / len(pieces)"), "weighs a third"),
    ("accumulate", accumulation("F.cross_entropy(model(x), y)"), "three means added up"),
    ("accumulate", accumulation(SUM), "its mean also divides"),
    ("accumulate", accumulation(f"{SUM} / sum(len(y) for _, y in pieces)"), "all 9 targets"),
    ("accumulate", accumulation(f"{SUM} / count", "model.zero_grad()"), "only the last piece"),
    ("accumulate", accumulation("torch.zeros(1, requires_grad=True)"), "there is no gradient"),
    ("bigram", bigram(counts="held_out"), "seen the answers"),
    ("bigram", bigram(start="np.zeros"), "probability 0"),
    ("bigram", bigram(axis="axis=0"), "the byte *before*"),
    ("bigram", bigram(axis="axis=(0, 1)"), "loss of a *pair*"),
    ("bigram", bigram(log="np.log2"), "in bits"),
    ("bigram", bigram(tail=".sum()"), "that is the sum"),
    ("bigram", bigram(sign=""), "the sign"),
    ("own_model", own(made="made"), "where they should give equal new ones"),
    ("own_model", own(more=", bidirectional=True", width=128), "it looks ahead"),
    ("own_model", own(out="self.head(self.gru(x)[0][:, -1])"), "not [4, 256]"),
    ("own_model", own(extra="self.spare = nn.Linear(2, 2)"), "spare.weight"),
    ("own_model", own(out="self.head(self.gru(x)[0]).softmax(-1)"), "below 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "source"), RIGHT)
def test_another_right_answer_passes(name: str, source: str):
    space = names()
    run_cell(source, space)
    verdict = getattr(checks, name)(space["answer"])
    assert verdict.status == PASSED, str(verdict)


@pytest.mark.parametrize(("name", "source", "words"), WRONG)
def test_a_wrong_answer_gets_its_own_hint(name: str, source: str, words: str):
    space = names()
    run_cell(source, space)
    verdict = getattr(checks, name)(space["answer"])
    assert verdict.status == HINT and words in verdict.text, str(verdict)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("sum(t) / sum(s)", "warm-up step is counted in"),  # T05
        ("len(s[w:]) * t[0] / sum(s[w:])", "short last batch"),  # T05
        ("sum(t) / sum(s[w:])", "not out of the tokens"),
        ("sum(t[w:]) / sum(s)", "not out of the seconds"),
        ("sum(b / a for a, b in zip(s[w:], t[w:])) / len(s[w:])", "mean of each step's speed"),
        ("sum(s[w:]) / sum(t[w:])", "upside down"),
        ("sum(t[w:]) / sum(s[w:])", "nothing is left"),  # T05: all warm-up must be refused
        ("sum(t[1:]) / sum(s[1:]) if len(s) > 1 else 0", "a warm-up of 0"),
    ],
)
def test_a_wrong_throughput_gets_its_own_hint(value: str, words: str):
    space = names()
    run_cell(f"def answer(s, t, w):\n    return {value}\n", space)
    verdict = checks.throughput(space["answer"])
    assert verdict.status == HINT and words in verdict.text, str(verdict)


def test_each_exercise_knows_three_wrong_answers_or_more():
    per_exercise: dict[str, set[str]] = {}
    for name, _, words in WRONG:
        per_exercise.setdefault(name, set()).add(words)
    assert min(map(len, per_exercise.values())) >= 3
    assert len(per_exercise) == 9  # and throughput, above


EVERY = ("loop_a", "loop_b", "loop_c", "loop_d", "loop_e", "throughput", "evaluate",
         "accumulate", "bigram", "own_model")  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("answer", [None, 3.5, lambda: None, lambda *args: None, print, exit])
def test_a_check_never_raises(name: str, answer: Any):
    verdict = getattr(checks, name)(answer)
    assert verdict.status == HINT and verdict.text


def test_an_error_of_the_learner_is_told_with_its_line():
    space = names()
    run_cell("def answer(train, held_out):\n    return train.shap\n", space)
    text = checks.bigram(space["answer"]).text
    assert "line 2" in text and "train.shap" in text and "AttributeError" in text


def test_a_not_implemented_error_of_torch_is_not_a_stub():
    class Unfinished(nn.Module):
        pass

    assert checks.own_model(Unfinished).status == HINT


def test_a_check_leaves_the_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    checks.loop_d(faults.train_e)
    assert torch.equal(torch.rand(3), expected)


def test_a_verdict_shows_itself():
    @check
    def judge(answer: int) -> str:
        if answer < 3:
            raise Hint("a < b")
        return "well done"

    assert str(judge(3)) == "✔ passed: well done"
    assert repr(judge(2)) == "✘ hint: a < b"
    assert "a &lt; b" in judge(2)._repr_html_()


def test_comments_and_layout_are_no_attempt():
    source = textwrap.dedent(inspect.getsource(faults.train_a))
    space = names()
    run_cell("# mine\n" + source.replace("    losses = []", "    losses = []  # here?"), space)
    assert checks.loop_a(space["train_a"]).status == OPEN


def test_the_bigram_check_agrees_with_the_course(tmp_path: Path):
    from companion import corpus

    (tmp_path / "text.txt").write_bytes(b"how much wood would a woodchuck chuck " * 50)
    text = corpus.prepare(tmp_path / "text.txt", cache=tmp_path / "cache")
    space = names()
    run_cell(bigram(), space)
    answer: Callable[..., float] = space["answer"]
    assert math.isclose(
        answer(text.train, text.held_out), corpus.reference_losses(text).bigram, rel_tol=1e-9
    )
