"""The exercises of notebook 03 and its clinic: what every answer is told, and every patient's
verdict, run for real."""

import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_checks import NOTEBOOKS, cells, run_cell

from companion import trace
from companion.classroom import clinic
from companion.classroom.checks import HINT, OPEN, PASSED, Verdict, unchanged
from companion.classroom.checks import patients as beds
from companion.classroom.checks import profile as checks
from companion.corpus import Prefetch
from companion.measure import Comparison, phase
from companion.profiling import Schedule, capture

NOTEBOOK = NOTEBOOKS / "03_profile.ipynb"
SOLUTIONS = NOTEBOOKS / "solutions" / "03_profile.ipynb"


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the clinic's recordings
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler|nothing was recorded")
        yield


def names() -> dict[str, Any]:
    return {
        "check": checks,
        "torch": torch,
        "F": F,
        "math": math,
        "phase": phase,
        "Prefetch": Prefetch,
        "Schedule": Schedule,
        "capture": capture,
    }


def verdicts(path: Path, tag: str, *, but: tuple[str, ...] = ()) -> dict[str, Verdict]:
    space, found = names(), {}
    for source in cells(path, tag, "check"):
        if not any(name in source for name in but) or not source.startswith("check."):
            result = run_cell(source, space)
            if result is not None:
                found[source] = result
    return found


def test_every_stub_of_notebook_03_reads_not_attempted():
    found = verdicts(NOTEBOOK, "exercise")
    assert len(found) == 9
    assert {source: v.status for source, v in found.items()} == dict.fromkeys(found, OPEN)


def test_every_solution_of_notebook_03_passes_on_one_process():
    found = verdicts(SOLUTIONS, "solution", but=("patient_e",))
    assert len(found) == 8
    assert not {source: str(v) for source, v in found.items() if v.status != PASSED}


@pytest.mark.slow
def test_the_solution_on_two_ranks_passes():
    found = verdicts(SOLUTIONS, "solution", but=("patient_a", "patient_b", "patient_c", "check.r"))
    said = found["check.patient_e(diagnosis_e, patient_e)"]
    assert said.status == PASSED and "no rank is late" in said.text, said


def test_the_solutions_answer_the_notebooks_exercises():
    assert cells(NOTEBOOK, "check") == cells(SOLUTIONS, "check")


def test_the_patients_handed_out_are_the_ones_the_clinic_knows():
    space = names()
    for source in cells(NOTEBOOK, "exercise"):
        run_cell(source, space)
    for which, patient in clinic.PATIENTS.items():
        assert unchanged(space[patient.__name__], patient), which
        assert space[f"diagnosis_{which}"] is None
    assert space["spans"] == checks.SPANS


# ── live: every patient's verdict ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("which", "abcd")
def test_a_patient_is_diagnosed_rightly(which):
    assert trace.diagnose(clinic.examine(which)).verdict == clinic.VERDICTS[which]


@pytest.mark.slow
def test_the_late_rank_is_named():
    found = trace.diagnose(clinic.examine("e"))
    assert (found.verdict, found.rank) == ("communication", 1)
    assert "comes last to" in found.why[0]


def test_patients_are_the_same_at_each_call_and_leave_the_generator_as_it_was():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for which in "abcd":
        patient = clinic.PATIENTS[which]
        assert clinic.losses(which, patient, 2) == clinic.losses(which, patient, 2)
    assert torch.equal(torch.get_rng_state(), before)
    threads = torch.get_num_threads()
    clinic.examine("d")
    assert torch.get_num_threads() == threads


def test_patients_and_wards_that_are_not_there_are_named():
    with pytest.raises(ValueError, match="there is no patient 'z': choose one of a, b, c, d, e"):
        clinic.examine("z")
    with pytest.raises(ValueError, match="there is no ward for 'e'"):
        clinic.ward("e")
    with pytest.raises(ValueError, match="the gain of 'c' is not timed"):
        clinic.gain("c", clinic.patient_c)
    with pytest.raises(ValueError, match="the loop yielded 0 times and should 7 times"):
        clinic.examine("d", lambda first, second, inputs, steps: iter(()))


def test_compilations_are_counted():
    assert clinic.compilations(clinic.patient_c) == len(clinic.LENGTHS)


# ── wrong answers ────────────────────────────────────────────────────────────────────────────


def hint(check: Any, *answers: Any) -> str:
    said = check(*answers)
    assert said.status == HINT, said
    return said.text


def make(source: str, name: str) -> Any:
    space = names()
    run_cell(source, space)
    return space[name]


def test_recorded_steps():
    def answer(**mistake: Any) -> Any:
        return lambda *case: checks._recorded(*case, **mistake)

    assert checks.recorded_steps(answer()).status == PASSED
    told = {hint(checks.recorded_steps, answer(mistake=m)) for m in checks._MISUNDERSTOOD}
    assert len(told) == len(checks._MISUNDERSTOOD) == 6
    assert all(any(h in text for text in told) for h in checks._MISUNDERSTOOD.values())
    assert "return a list of step numbers" in hint(checks.recorded_steps, lambda *case: 6)
    assert "steps [2, 3, 4, 7, 8, 9] are recorded" in hint(checks.recorded_steps, lambda *c: [1])


@pytest.mark.parametrize("steps", range(1, 30))
def test_the_right_answer_is_pytorchs_own(steps):
    for skip, wait, warmup, active, repeat in ((0, 1, 1, 3, 2), (5, 2, 1, 2, 2), (0, 1, 1, 3, 0)):
        plan = Schedule(skip, wait, warmup, active, repeat)
        own = [i for i, action in enumerate(plan.actions(steps)) if action.startswith("record")]
        assert checks._recorded(steps, skip, wait, warmup, active, repeat) == own


def test_self_times():
    assert checks._self_times(checks.SPANS) == {"step": 20, "linear": 22, "mm": 38, "relu": 20}
    told = set()
    for mistake, text in checks._SELF.items():
        said = hint(checks.self_times, lambda spans, m=mistake: checks._self_times(spans, m))
        assert said == text
        told.add(said)
    assert len(told) == 5
    assert "return a dict" in hint(checks.self_times, lambda spans: 100)
    known = checks._self_times(checks.SPANS)
    assert "wrong when a second one follows" in hint(checks.self_times, lambda spans: dict(known))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda c, k: 10, "that is the part which is hidden"),
        (lambda c, k: 25, "that is all communication: leave out"),
        (lambda c, k: sum(e - s for s, e in c), "all communication, added up"),
        (lambda c, k: 20, "the compute is taken off rightly"),
        (lambda c, k: 9, "you take off more than there is"),
        (lambda c, k: 14, "pair by pair"),
        (lambda c, k: 99, "15 µs of these are exposed"),
        (lambda c, k: 15, "with no compute at all, 0 to 6 is exposed"),
        (lambda c, k: "15", "return one number"),
    ],
)
def test_exposed(answer, said):
    assert said in hint(checks.exposed, answer)


RECORD = """
def answer(step, directory):
    schedule = Schedule(wait={wait}, warmup={warmup}, active={active})
    with capture(directory, schedule, shapes={shapes}) as recording:
        for _ in range(schedule.cycle):
            {calls}
            recording.step()
    return recording.files[0]
"""
PLAIN = """
def answer(step, directory):
    {open}
    for _ in range(5):
        step()
    {close}
    prof.export_chrome_trace(str(directory / "t.json"))
    return directory / "t.json"
"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wait": 0, "warmup": 1}, "call 1 of step is in the trace"),
        ({"active": 4}, "the trace has 4 step marks and 4 calls"),
        ({"calls": "step(), step()"}, "3 step marks and 6 calls"),
        ({"shapes": False}, "the shapes are missing"),
    ],
)
def test_record_three(changes, said):
    right = {"wait": 1, "warmup": 1, "active": 3, "shapes": True, "calls": "step()"}
    assert checks.record_three(make(RECORD.format(**right), "answer")).status == PASSED
    assert said in hint(checks.record_three, make(RECORD.format(**right | changes), "answer"))


def test_record_three_without_a_schedule():
    source = PLAIN.format(open="prof = torch.profiler.profile(); prof.start()", close="prof.stop()")
    assert "no step marks" in hint(checks.record_three, make(source, "answer"))
    assert "return the path" in hint(checks.record_three, lambda step, directory: None)
    said = hint(checks.record_three, lambda step, directory: directory / "none.json")
    assert "there is no file none.json" in said


def test_t21_a_profiler_left_running_is_named_and_stopped():
    def leaves_it_open(step, directory):
        kept.append(torch.profiler.profile())
        kept[-1].start()
        return directory / "t.json"

    kept: list[Any] = []
    try:
        assert "the profiler still runs" in hint(checks.record_three, leaves_it_open)
        assert not torch.autograd._profiler_enabled()
    finally:
        # Python may crash at its exit with one open
        if torch.autograd._profiler_enabled():
            kept[-1].stop()


# ── the clinic ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("which", "abcde")
def test_the_diagnosis_comes_first(which):
    check, sick = getattr(checks, f"patient_{which}"), clinic.PATIENTS[which]
    wrong = [name for name in beds.NAMES if name != clinic.VERDICTS[which]]
    told = [hint(check, name, sick) for name in wrong]
    assert all(text.startswith(f"not {name}: ") for name, text in zip(wrong, told, strict=True))
    assert len({text.partition(": ")[2] for text in told}) >= 3
    assert "'slow' is no diagnosis" in hint(check, "slow", sick)
    assert "first say what it is ill with" in hint(check, None, lambda *a: None)
    assert "rightly diagnosed" in hint(check, clinic.VERDICTS[which], sick)


def edited(which: str, *replacements: tuple[str, str]) -> Any:
    """The patient with pieces of its text replaced."""
    source = inspect.getsource(clinic.PATIENTS[which])
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return make(source, f"patient_{which}")


@pytest.mark.parametrize(
    ("replacements", "said"),
    [
        ([("128 * index, 128", "128 * (index + 1), 128")], "the first batch is missing"),
        ([("128 * index, 128", "0, 128")], "one batch again and again"),
        ([("yield loss.item()", "yield loss.item() + 1")], "mend the speed and leave the numbers"),
        ([("yield loss.item()", "yield loss")], "yield one float a step"),
    ],
)
def test_patient_a(replacements, said):
    assert said in hint(checks.patient_a, "data", edited("a", *replacements))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("F.cross_entropy(head(hidden), targets)", "the mean without the weights"),
        ("F.cross_entropy(head(hidden), targets, reduction='sum')", "the tokens' weights are lost"),
        ("(weights * {each}).mean()", "a mean over the tokens"),
        ("(weights * {each}).sum() / weights.sum()", "divided by the sum of the weights"),
        (
            "sum(w * F.cross_entropy(z, t) for z, t, w in zip(head(hidden), targets, weights))",
            "operators: a comprehension",
        ),
        ("(weights * {each}).sum().detach().requires_grad_()", "the gradient is not"),
    ],
)
def test_patient_b(body, said):
    source = (
        "def answer(head, hidden, targets, weights, steps):\n"
        "    for _ in range(steps):\n"
        "        loss = BODY\n"
        "        head.zero_grad()\n"
        "        loss.backward()\n"
        "        yield loss.item()\n"
    )
    each = "F.cross_entropy(head(hidden), targets, reduction='none')"
    answer = make(source.replace("BODY", body.format(each=each)), "answer")
    assert said in hint(checks.patient_b, "cpu", answer)


@pytest.mark.parametrize(
    ("replacements", "said"),
    [
        (
            [("torch.compile(model, backend=backend, dynamic=False)", "model")],
            "nothing is compiled",
        ),
        (
            [("dynamic=False", "dynamic=False, fullgraph=True")],
            "8 compilations for 8 lengths, and the patient has 8",
        ),
        ([("yield compiled(piece)", "yield compiled(piece[:10])")], "leave the numbers"),
        ([("piece = pieces[index % len(pieces)]", "piece = pieces[0]")], "leave the numbers"),
    ],
)
def test_patient_c(replacements, said):
    assert said in hint(checks.patient_c, "shapes", edited("c", *replacements))


FORMULA = "0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))"


@pytest.mark.parametrize(
    ("replacements", "said"),
    [
        ([(FORMULA, "F.gelu(x)")], "that is the exact GELU"),
        ([(FORMULA, "F.relu(x)")], "a ReLU is fast and another function"),
        ([(FORMULA, "F.silu(x)")], "a SiLU is another function"),
        (
            [(FORMULA, "F.gelu(x, approximate='tanh')"), ("loss.backward()", "pass")],
            "the first layer gets no gradient",
        ),
    ],
)
def test_patient_d(replacements, said):
    assert said in hint(checks.patient_d, "kernels", edited("d", *replacements))


@pytest.mark.parametrize(
    ("which", "replacement"),
    [
        ("a", ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=True)")),
        ("d", ("x = first(inputs)", "x = first(inputs) + 0")),
    ],
)
def test_the_same_numbers_with_no_gain_shown_are_no_cure(which, replacement, monkeypatch):
    """Which interval a loop gets is the machine's; what is said of one that holds 1 is ours."""
    asked = []

    def gain(patient, answer):
        asked.append(patient)
        return Comparison(("ill", "yours"), 1.02, 0.99, 1.07, 1.0, 1.0, 9, 1)

    monkeypatch.setattr(clinic, "gain", gain)
    check = getattr(checks, f"patient_{which}")
    said = hint(check, clinic.VERDICTS[which], edited(which, replacement))
    assert "no gain is shown: 1.02 [0.99, 1.07] times" in said and asked == [which]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda n, rank, world: list(range(len(n)))[:12], "both ranks take the same sequence"),
        (lambda n, rank, world: list(range(rank, 20, 2)), "20 of 48 sequences are taken"),
        (lambda n, rank, world: [] if rank else list(range(len(n))), "one rank gets no sequence"),
        (
            lambda n, r, w: sorted(range(48), key=lambda i: -n[i])[24 * r : 24 * r + 24],
            "Equal numbers of sequences are not equal work",
        ),
        (lambda n, rank, world: range(rank, len(n), world), "return a list of sequence numbers"),
        (lambda n, rank, world: [0, 1] if rank else list(range(2, 48)), "times the mean number"),
    ],
)
def test_patient_e(answer, said):
    assert said in hint(checks.patient_e, "communication", answer)
