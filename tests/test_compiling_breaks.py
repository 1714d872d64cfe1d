"""graph_breaks(): every break at its line, none invented, none missed; nothing leaks (T16)."""

import copy
import html
import importlib.util
import inspect
import logging
import random
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from companion import advice
from companion.breaks import BreakReport, graph_breaks

X = torch.tensor([1.0, 2.0, 3.0])

# ── the table: a comment `# break` ends each line that breaks, in the order of execution ────


def branch(x):
    if x.sum() > 0:  # break
        return x * 2
    return x


def item(x):
    y = x.sin()
    if y.sum().item() > 0:  # break
        y = y + 1
    print("", end="")  # break
    return y.cos()


def item_used_as_a_number(x):
    scale = x.sum().item()  # break
    return x * scale


def as_float(x):
    return x * float(x.sum())  # break


def as_index(x):
    return x[int(x.sum()) % 2]  # break


def two_numbers_in_one_line(x):
    return x * (x.sum().item() + x.max().item())  # break


def as_list(x):
    return x + len(x.tolist())  # break


def truth_of_a_tensor(x):
    if bool((x > 0).all()):  # break
        return x + 1
    return x - 1


def mask(x):
    return x[x > 0].sum()  # break


def nonzero(x):
    return x.nonzero().sum()  # break


def print_first(x):
    print("", end="")  # break
    return x + 1


def print_last(x):
    y = x + 1
    print("", end="")  # break
    return y


def three_in_one_frame(x):
    x = x + 1
    print("", end="")  # break
    x = x * 2
    time.time()  # break
    x = x.cos()
    torch._dynamo.graph_break()  # break
    return x.sin()


def warns(x):
    x = x + 1
    warnings.warn("careful", stacklevel=1)  # break
    return x * 2


def logs(x):
    x = x + 1
    logging.getLogger(__name__).info("here")  # break
    return x * 2


@torch.compiler.disable
def switched_off(x):
    return x + 1


def calls_what_is_switched_off(x):
    x = switched_off(x.sin())  # break
    return x.cos()


def reads_a_file(x):
    open(__file__).close()  # break
    return x + 1


def seeds(x):
    torch.manual_seed(0)  # break
    return x + torch.rand(3)


def copies(x):
    y = copy.deepcopy(x)  # break
    return y + 1


def helper(x):
    y = x.sin()
    print("", end="")  # break
    return y.cos()


def in_a_called_function(x):
    return helper(x + 1) * 2


def in_a_function_called_twice(x):
    return helper(helper(x) * 2)


def two_functions_deep(x):
    x = in_a_called_function(x)
    x = x + 1
    torch._dynamo.graph_break()  # break
    return x


def before_and_after_a_call(x):
    x = x * 2
    time.time()  # break
    return helper(x)


def in_a_loop(x):
    for step in range(3):
        x = x + step
        print("", end="")  # break
    return x.cos()


def after_a_loop(x):
    for step in range(3):
        x = x + step
    print("", end="")  # break
    return x.cos()


def while_loop(x):
    while x.sum() < 10:  # break
        x = x + 1
    return x


def in_a_try(x):
    try:
        y = x + 1
        print("", end="")  # break
        y = y * 2
    finally:
        x = x + 1
    return y + x


def under_no_grad(x):
    with torch.no_grad():
        y = x + 1
        print("", end="")  # break
        y = y * 2
    return y


class Toy(nn.Module):
    """The guide's."""

    def forward(self, x):
        if x.sum() > 0:  # break
            return x * 2
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        print("", end="")  # break
        return y.relu()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), Block()

    def forward(self, x):
        x = self.second(self.first(x))
        return x * x.sum().item()  # break


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + 1


class Inherits(Block):
    def forward(self, x):
        x = super().forward(x)
        time.time()  # break
        return x + 1


def library_of_distributions(x):
    x = x + 1
    normal = torch.distributions.Normal(x, x.abs() + 1)
    return normal.log_prob(x)


def where(x):
    return torch.where(x.sum() > 0, x * 2, x)


def comprehension(x):
    return torch.stack([x + step for step in range(3)])


def lists(x):
    parts = []
    for step in range(3):
        parts.append(x * step)
    return sum(list(parts))


def caught_exception(x):
    try:
        y = x + 1
        raise ValueError
    except ValueError:
        y = x - 1
    return y


def shape_decides(x):
    return x * 2 if x.shape[0] > 2 else x


def through_numpy(x):
    return torch.from_numpy(x.numpy() * 2) + 1


def formats(x):
    name = f"{x.shape[0]}"
    return x + len({name: 1})


class Clean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return F.softmax(x, -1)


BREAKING = [
    branch, item, item_used_as_a_number, as_float, as_index, two_numbers_in_one_line, as_list,
    truth_of_a_tensor, mask, nonzero, print_first, print_last, three_in_one_frame, warns, logs,
    calls_what_is_switched_off, reads_a_file, seeds, copies, in_a_loop, after_a_loop, while_loop,
    in_a_try, under_no_grad, Toy, Block,
]  # fmt: skip
ACROSS = {
    in_a_called_function: [helper],
    in_a_function_called_twice: [helper],
    two_functions_deep: [helper, two_functions_deep],
    before_and_after_a_call: [before_and_after_a_call, helper],
    Nested: [Block, Nested],
    Stack: [Block],
    Inherits: [Block, Inherits],
}
"""Where the breaks are in other functions: these, in this order."""
CLEAN = [where, comprehension, lists, caught_exception, shape_decides, through_numpy, formats]
CASES = {case: [case] for case in BREAKING} | ACROSS | {case: [] for case in [*CLEAN, Clean]}


def marked(case) -> list[int]:
    """Lines that end in ``# break``."""
    lines, first = inspect.getsourcelines(case.forward if inspect.isclass(case) else case)
    return [first + n for n, line in enumerate(lines) if line.rstrip().endswith("# break")]


def made(case):
    return case() if inspect.isclass(case) else case


def lines_of(report: BreakReport) -> list[int]:
    return [found.line for found in report.breaks]


def test_the_table_is_long_enough():
    assert len(CASES) >= 25 and len(CLEAN) >= 5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_break_is_found_and_none_invented(case):
    expected = [line for function in CASES[case] for line in marked(function)]
    report = graph_breaks(made(case), X)
    assert lines_of(report) == expected, str(report)
    assert not report.error
    for found in report.breaks:
        assert found.file == __file__
        assert found.source.endswith("# break")
        assert found.reason and found.rewrite


@pytest.mark.parametrize("case", [*CLEAN, Clean], ids=lambda case: case.__name__)
def test_a_clean_function_is_one_graph(case):
    report = graph_breaks(made(case), X)
    assert (report.graphs, report.breaks, report.fullgraph) == (1, (), True), str(report)


def test_t16_three_graphs_two_breaks_and_the_user_s_line_in_strict_mode():
    report = graph_breaks(item, X)
    assert (report.graphs, len(report.breaks)) == (3, 2)
    assert not report.fullgraph
    assert f"{Path(__file__).name}:{marked(item)[0]}" in report.fullgraph_message


@pytest.mark.parametrize("case", [branch, Toy, print_first, in_a_loop, logs])
def test_fullgraph_refuses_what_it_cannot_take(case):
    report = graph_breaks(made(case), X)
    assert not report.fullgraph
    assert report.fullgraph_message


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="until then fullgraph=True took no .item() into the graph"
)
@pytest.mark.parametrize("case", [item_used_as_a_number, mask])
def test_fullgraph_passes_is_not_the_same_as_no_breaks(case):
    report = graph_breaks(case, X)
    assert report.fullgraph
    assert lines_of(report) == marked(case)
    assert "though there are breaks" in str(report)


def test_a_break_in_a_library_is_told_at_the_user_s_line():
    report = graph_breaks(copies, X)
    assert lines_of(report) == marked(copies)
    if report.breaks[0].library:  # 2.9 stops at the call itself
        assert report.breaks[0].library.rpartition(":")[0].endswith("copy.py")


def test_a_break_in_an_installed_package(tmp_path, monkeypatch):
    """Both calls into the package are told, each at the line that makes it."""
    package = tmp_path / "package.py"
    package.write_text("def broken(x):\n    print('', end='')\n    return x + 1\n")
    spec = importlib.util.spec_from_file_location("package", package)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("companion.breaks.LIBRARIES", (f"{tmp_path.resolve()}/",))

    def uses_it(x):
        x = module.broken(x.sin())  # break
        x = x * 2
        return module.broken(x)  # break

    report = graph_breaks(uses_it, X)
    assert lines_of(report) == marked(uses_it), str(report)
    assert all(found.library.endswith("package.py:2") for found in report.breaks)
    assert graph_breaks(module.broken, X).breaks[0].place == "package.py:2"


def test_what_gives_up_the_whole_function_is_said():
    found = graph_breaks(in_a_loop, X).breaks[0]
    if torch.__version__ >= "2.13":
        assert "in_a_loop" in found.gives_up
        assert "runs eagerly" in str(graph_breaks(in_a_loop, X))
    assert not graph_breaks(print_last, X).breaks[0].gives_up


def test_modules_of_torch_itself_are_captured():
    assert graph_breaks(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), X).graphs == 1
    assert graph_breaks(nn.Linear(3, 3), X).graphs == 1


def test_nothing_to_capture_is_not_called_a_graph():
    report = graph_breaks(lambda n: n + 1, 1)
    assert report.graphs == 0 and "nothing was captured" in str(report)


def test_keyword_inputs():
    def scaled(x, *, by):
        print("", end="")
        return x * by

    assert len(graph_breaks(scaled, X, by=2.0).breaks) == 1


# ── random compositions ──────────────────────────────────────────────────────────────────────

PIECES = {
    "clean": ["x = x.sin() + 1", "x = torch.where(x > 0, x, -x)", "x = x @ torch.eye(3)"],
    "breaking": [
        "print('', end='')",
        "x = x * x.sum().item()",
        "time.time()",
        "torch._dynamo.graph_break()",
        "x = off(x)",
        "x = x + x[x > 0].sum()",
        "x = x * 2 if x.sum() > 0 else x * 3",
    ],
}
HEADER = [
    "import time",
    "import torch",
    "from torch import nn",
    "@torch.compiler.disable",
    "def off(x): return x + 1",
]


def composed(seed: int) -> tuple[str, list[int], bool]:
    """A program whose ``entry`` is made of known pieces, the lines that break, in order, and
    whether they all stand in one frame."""
    draw = random.Random(seed)
    program, order, flat = list(HEADER), [], True

    def body() -> tuple[list[str], list[int]]:
        lines, breaks = [], []
        for _ in range(draw.randint(1, 4)):
            lines.append(draw.choice(PIECES["clean"]))
            if draw.random() < 0.5:
                breaks.append(len(lines))
                lines.append(draw.choice(PIECES["breaking"]))
        return [*lines, draw.choice(PIECES["clean"])], breaks

    entry: list[tuple[str, list[int]]] = []
    for number in range(draw.randint(1, 3)):
        lines, breaks = body()
        kind = draw.choice(("inline", "function", "module"))
        if kind == "inline":
            entry += [(line, [-1] if n in breaks else []) for n, line in enumerate(lines)]
            continue
        flat = flat and not breaks
        if kind == "function":
            program.append(f"def part{number}(x):")
        else:
            program += [f"class Part{number}(nn.Module):", "  def forward(self, x):"]
        first = len(program) + 1
        program += [f"    {line}" for line in [*lines, "return x"]]
        program += [] if kind == "function" else [f"part{number} = Part{number}()"]
        entry.append((f"x = part{number}(x)", [first + n for n in breaks]))
    program.append("def entry(x):")
    for line, breaks in entry:
        program.append(f"    {line}")
        order += [len(program) if where == -1 else where for where in breaks]
    return "\n".join([*program, "    return x"]) + "\n", order, flat


@pytest.mark.parametrize("seed", range(20))
def test_random_compositions(seed, tmp_path):
    text, expected, flat = composed(seed)
    path = tmp_path / f"composed{seed}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = graph_breaks(module.entry, X)
    assert lines_of(report) == expected, f"{text}\n{report}"
    if flat:
        assert report.graphs == len(expected) + 1, f"{text}\n{report}"


def test_the_compositions_are_of_many_kinds():
    drawn = [composed(seed) for seed in range(20)]
    assert len({text for text, _, _ in drawn}) == 20
    assert {flat for _, _, flat in drawn} == {True, False}
    assert any(not lines for _, lines, _ in drawn) and any(len(lines) > 3 for _, lines, _ in drawn)


# ── words ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (branch, "torch.where"),
        (while_loop, "while_loop"),
        (item, "tensor"),
        (mask, "torch.where(mask"),
        (print_first, "print it outside"),
        (reads_a_file, "files outside"),
        (calls_what_is_switched_off, "take the mark off"),
        (copies, "clone"),
        (warns, "warn outside"),
        (logs, "log outside"),
        (seeds, "seed it outside"),
    ],
)
def test_each_kind_has_its_own_rewrite(case, word):
    assert word in graph_breaks(case, X).breaks[0].rewrite


def test_an_unknown_kind_is_told_in_pytorch_s_words():
    message = (
        "A new kind\n  Explanation: Something\n    went wrong.\n"
        "  Hint: Please report an issue to PyTorch.\n  Hint: Use another thing.\n\n"
        "  Developer debug context: none"
    )
    assert advice.explain(message, "") == ("Something went wrong", "Use another thing")
    assert advice.explain("Only a title", "")[0] == "Only a title"


def test_what_a_hint_mentions_is_not_the_reason():
    message = "A kind\n  Explanation: A thing.\n  Hint: Use torch.compiler.disable on it.\n"
    assert advice.explain(message, "") == ("A thing", "Use torch.compiler.disable on it")


def test_text_and_html_show_every_break():
    report = graph_breaks(three_in_one_frame, X)
    text, page = str(report), report._repr_html_()
    for found in report.breaks:
        for part in (found.place, found.source, found.reason, found.rewrite):
            assert part in text
            assert html.escape(part) in page
    assert page.count("<tr>") == 1 + 3
    assert "<table" not in graph_breaks(where, X)._repr_html_()
    assert "4 graphs, 3 breaks" in text


def test_a_cell_s_file_is_called_cell():
    assert advice.place("/tmp/ipykernel_4711/1887735938.py", 3) == "cell:3"
    assert advice.place("<ipython-input-1-abc>", 3) == "cell:3"
    assert advice.place("/home/me/model.py", 3) == "model.py:3"


def test_html_is_escaped():
    def compares(x):
        if x.sum() < 0:
            return x
        return x + 1

    assert "&lt; 0:" in graph_breaks(compares, X)._repr_html_()


# ── wrong input ──────────────────────────────────────────────────────────────────────────────


def test_not_callable():
    with pytest.raises(TypeError, match="takes a function or a module, not a tensor"):
        graph_breaks(X, X)


@pytest.mark.parametrize("inputs", [(), (X, X)])
def test_wrong_arity(inputs):
    with pytest.raises(TypeError, match=r"Toy.*cannot be called with these inputs"):
        graph_breaks(Toy(), *inputs)


def test_a_model_s_own_error_is_not_called_a_break():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="by itself, without torch.compile, so this is no gr"):
        graph_breaks(model, X)


def test_a_model_s_own_error_names_the_line():
    def fails(x):
        return x.view(7)

    with pytest.raises(RuntimeError, match=r"test_compiling_breaks\.py:\d+.*mend that first"):
        graph_breaks(fails, X)


def test_what_only_the_compiler_refuses_is_told_apart():
    def for_three(x):
        return x.view(3) + 1

    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)  # promises any length; the function takes one only
    report = graph_breaks(for_three, x)
    assert not report.breaks
    assert "torch.compile fails on it, though the code itself runs" in str(report)


# ── nothing leaks ────────────────────────────────────────────────────────────────────────────


def test_reports_do_not_leak_into_one_another():
    alone = graph_breaks(three_in_one_frame, X)
    for other in (in_a_loop, Stack(), helper, where):
        graph_breaks(other, X)
    assert graph_breaks(three_in_one_frame, X) == alone
    loop = graph_breaks(in_a_loop, X)
    assert graph_breaks(in_a_loop, X) == loop
    assert lines_of(graph_breaks(in_a_called_function, X)) == marked(helper)


def test_lengths_seen_before_do_not_matter():
    """Dynamo remembers that a size changed, and would make it dynamic in the next report."""
    graphs = [graph_breaks(in_a_called_function, torch.ones(n)).graphs for n in (3, 4, 5)]
    assert len(set(graphs)) == 1


def count_compiles(function, **options):
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, **options), compiles


def test_what_the_caller_compiled_stays_compiled():
    stack = Stack()
    compiled, compiles = count_compiles(stack)
    compiled(X)
    before = len(compiles)
    graph_breaks(stack, X)
    graph_breaks(compiled, X)
    graph_breaks(Block(), X)
    compiled(X)
    assert len(compiles) == before


def test_a_function_the_caller_s_compiler_gave_up_is_reported_in_full():
    compiled, _ = count_compiles(in_a_loop)
    compiled(X)  # Dynamo now skips this code
    assert lines_of(graph_breaks(in_a_loop, X)) == marked(in_a_loop)


def test_reports_do_not_use_up_the_recompile_limit():
    def fresh(x):
        return helper(x)

    for _ in range(10):
        graph_breaks(fresh, X)
    compiled, compiles = count_compiles(fresh, dynamic=False)
    for length in range(3, 9):
        compiled(torch.ones(length))
    assert len(compiles) == 6 * 2  # two graphs for each length


def test_dynamo_s_counters_settings_and_loggers_stay():
    from torch._dynamo import config, utils

    utils.counters["stats"]["unique_graphs"] += 0
    breaks = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")

    def seen():
        return (
            {name: dict(counter) for name, counter in utils.counters.items()},
            config.get_config_copy() if hasattr(config, "get_config_copy") else None,
            (breaks.level, breaks.propagate, breaks.handlers[:]),
            len(utils.graph_break_reasons),
            torch.random.get_rng_state().tolist(),
        )

    wrong = nn.Linear(7, 7)
    before = seen()
    graph_breaks(seeds, X)
    with pytest.raises(RuntimeError):
        graph_breaks(wrong, X)
    assert seen() == before


def test_the_model_and_its_inputs_stay():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.norm = 0, nn.BatchNorm1d(3)

        def forward(self, x):
            self.calls += 1
            x.add_(1)
            return self.norm(x)

    model, inputs = Counts(), torch.randn(4, 3)
    before, state = inputs.clone(), copy.deepcopy(model.state_dict())
    graph_breaks(model, inputs)
    assert model.calls == 0
    assert torch.equal(inputs, before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_nothing_is_printed(capfd):
    def loud(x):
        print("loud")
        warnings.warn("louder", stacklevel=1)
        return x * x.sum().item()

    graph_breaks(loud, X)
    assert capfd.readouterr() == ("", "")
