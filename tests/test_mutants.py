"""The tool that proves the tests: it tells a caught fault from a survivor, in a copy."""

from pathlib import Path

import pytest

from tools import mutants

ROOT = Path(__file__).resolve().parent.parent
ENTRY = """
[[mutant]]
name = "wrong sum"
file = "companion/adding.py"
find = "{find}"
replace = "{replace}"
tests = ["tests/test_adding.py"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "companion").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "companion" / "__init__.py").touch()
    (tmp_path / "companion" / "adding.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "tests" / "test_adding.py").write_text(
        "from companion.adding import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n"
    )
    return tmp_path


def planted(tree: Path, find: str, replace: str) -> list[mutants.Mutant]:
    path = tree / "adding.toml"
    path.write_text(ENTRY.format(find=find, replace=replace))
    return mutants.read_list(path, tree)


@pytest.mark.parametrize(
    ("replace", "said"),
    [
        ("a - b", "caught"),
        ("b + a", "SURVIVED"),
        ("a * b", "SURVIVED"),  # 2 * 2 is 4 as well: the test is too weak, and it shows
        ("a +", "caught (does not import)"),
    ],
)
def test_a_survivor_is_told_from_a_caught_fault(tree, replace, said):
    (mutant,) = planted(tree, "a + b", replace)
    assert mutants.verdict(mutant, tree) == said
    assert "return a + b" in (tree / "companion" / "adding.py").read_text()


@pytest.mark.parametrize("find", ["a - b", "a"])
def test_a_list_that_is_behind_the_code_is_refused(tree, find):
    with pytest.raises(ValueError, match=r"adding\.toml, mutant 1 .* stands \d times"):
        planted(tree, find, "x")


def test_a_mutant_that_lacks_something_is_refused(tree):
    (tree / "adding.toml").write_text('[[mutant]]\nname = "x"\nfile = "y"\n')
    with pytest.raises(ValueError, match="lacks find, replace, tests"):
        mutants.read_list(tree / "adding.toml", tree)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "mutants").glob("*.toml")), ids=lambda p: p.stem
)
def test_every_list_fits_the_code_and_names_tests_that_are_there(path):
    planted_here = mutants.read_list(path)
    assert planted_here
    for mutant in planted_here:
        for test in mutant.tests:
            assert (ROOT / test.split("::")[0]).exists(), test
