"""The corpus and its batches: stateless, seeded, prepared once, and clear when it cannot be."""

import json
import math
import multiprocessing
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from companion.corpus import Prefetch, Windows, pairs, prepare, reference_losses


@pytest.fixture
def text(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    root.mkdir()
    for i in range(40):
        (root / f"file{i:02}.txt").write_text(f"file {i}\n" * (i + 1))
    return root


def test_standard_library_is_real_text_split_by_file():
    corpus = prepare()
    assert corpus.source == "standard library"
    assert corpus.bytes > 5_000_000
    assert 0.05 < len(corpus.held_out) / corpus.bytes < 0.2
    assert b"import " in corpus.train[:200_000].tobytes()


def test_prepared_once_and_found_again(text, tmp_path):
    first = prepare(text, tmp_path / "cache")
    (made,) = (tmp_path / "cache").iterdir()
    before = made.stat().st_mtime_ns
    second = prepare(text, tmp_path / "cache")
    assert made.stat().st_mtime_ns == before
    assert first.sha256 == second.sha256
    assert first.files == 40
    total = sum(p.stat().st_size for p in text.iterdir())
    # one newline joins two files
    assert first.bytes == total + 40 - 2


def test_a_changed_file_is_another_corpus(text, tmp_path):
    before = prepare(text, tmp_path / "cache").sha256
    (text / "file03.txt").write_text("something else\n" * 9)
    assert prepare(text, tmp_path / "cache").sha256 != before


def test_adding_a_file_moves_no_other_between_the_parts(text, tmp_path):
    before = prepare(text, tmp_path / "cache").held_out.tobytes()
    (text / "aaa.txt").write_text("new\n" * 50)
    after = prepare(text, tmp_path / "cache").held_out.tobytes()
    for line in set(before.split(b"\n")):
        assert line in after


def test_damaged_cache_is_made_again(text, tmp_path):
    corpus = prepare(text, tmp_path / "cache")
    (made,) = (tmp_path / "cache").iterdir()
    (made / "train.bin").write_bytes(b"torn")
    assert prepare(text, tmp_path / "cache").sha256 == corpus.sha256
    for torn in ('{"sha256":', "null", '{"bytes": [1]}', '"text"'):
        (made / "manifest.json").write_text(torn)
        assert prepare(text, tmp_path / "cache").sha256 == corpus.sha256
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [made.name]


def _prepare(arguments):
    return prepare(*arguments).sha256


def test_several_processes_prepare_at_once(text, tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        hashes = pool.map(_prepare, [(text, tmp_path / "cache")] * 3)
    assert len(set(hashes)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_single_file_is_split_inside(tmp_path):
    (tmp_path / "one.txt").write_bytes(bytes(range(200)) * 5)
    corpus = prepare(tmp_path / "one.txt", tmp_path / "cache")
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)


# --- bad input: one clear sentence each ---------------------------------------------------


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 300
    return text


def test_missing_path(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        prepare(tmp_path / "nowhere", tmp_path / "cache")
    assert "nowhere" in one_sentence(error.value)


def test_path_that_is_empty_or_of_an_unknown_user(tmp_path, monkeypatch):
    """Empty, as an unset shell variable leaves it, would mean the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("not meant " * 100)
    with pytest.raises(ValueError, match="corpus is an empty path"):
        prepare("", tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match="corpus ~nobody-of-this-name/x: no such file"):
        prepare("~nobody-of-this-name/x", tmp_path / "cache")


def test_empty_file_is_named(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"a\.txt: there is no text"):
        prepare(tmp_path / "a.txt", tmp_path / "cache")


def test_empty_directory_and_empty_files(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no files"):
        prepare(tmp_path / "empty", tmp_path / "cache")
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises(ValueError, match="no text"):
        prepare(tmp_path / "empty", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_unreadable_file_is_named(tmp_path):
    # root reads anything but this: it has no page at address 0
    with pytest.raises(OSError, match="/proc/self/mem cannot be read"):
        prepare("/proc/self/mem", tmp_path / "cache")


def test_text_shorter_than_one_window():
    data = np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="has 128 bytes, one window needs 129"):
        Windows(data, 128)
    assert len(Windows(np.zeros(129, np.uint8), 128)) == 1


def test_full_disk(text, tmp_path):
    """A real limit on file size stands in for a full disk: the write itself fails."""
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from companion.corpus import prepare\n"
        "try: prepare(sys.argv[1], sys.argv[2])\n"
        "except OSError as error: print(error)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", code, text, tmp_path / "cache"], capture_output=True, text=True
    )
    assert "cannot be written to" in done.stdout and "free some disk space" in done.stdout
    assert list((tmp_path / "cache").iterdir()) == []


# --- batches ------------------------------------------------------------------------------


@pytest.fixture
def windows() -> Windows:
    return Windows(np.arange(1000).astype(np.uint8), sequence=8, seed=3)


def test_shapes_and_targets(windows):
    inputs, targets = windows(0, 5)
    assert inputs.shape == targets.shape == (5, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 1) % 256)


def test_stateless_and_cut_anywhere(windows):
    whole = windows(100, 60)[0]
    parts = torch.cat([windows(100, 7)[0], windows(107, 23)[0], windows(130, 30)[0]])
    windows(0, 3)
    assert torch.equal(whole, parts)
    assert torch.equal(whole, Windows(windows.data, 8, seed=3)(100, 60)[0])


def test_a_pass_sees_every_window_once_and_orders_differ(windows):
    n = len(windows)
    data = np.arange(1000)
    distinct = Windows(data, sequence=8, seed=3)
    for epoch in (0, 1):
        first = distinct(epoch * n, n)[0][:, 0]
        assert len(set(first.tolist())) == n
    assert not torch.equal(distinct(0, n)[0], distinct(n, n)[0])
    assert not torch.equal(distinct(0, n)[0], Windows(data, 8, seed=4)(0, n)[0])


def test_batch_across_the_end_of_a_pass(windows):
    n = len(windows)
    across = windows(n - 2, 5)[0]
    assert torch.equal(across[:2], windows(n - 2, 2)[0])
    assert torch.equal(across[2:], windows(n, 3)[0])
    assert len(windows(0, 3 * n + 1)[0]) == 3 * n + 1


def test_prefetch_gives_the_same_batches_in_any_order(windows):
    asked = [(0, 4), (12, 4), (24, 4), (36, 4), (7, 2), (9, 2), (0, 4)]
    with Prefetch(windows, ahead=2) as prefetched:
        for first, count in asked:
            assert torch.equal(prefetched(first, count)[0], windows(first, count)[0])


def test_prefetch_works_ahead_and_raises_where_asked():
    seen = []

    def batches(first, count):
        seen.append(first)
        if first == 24:
            raise OSError("disk gone")
        return first

    with Prefetch(batches, ahead=2) as prefetched:
        assert [prefetched(0, 12), prefetched(12, 12)] == [0, 12]
        with pytest.raises(OSError, match="disk gone"):
            prefetched(24, 12)
    assert seen[:3] == [0, 12, 24]


# --- reference losses ---------------------------------------------------------------------


def test_references_by_hand(tmp_path):
    root = tmp_path / "two"
    root.mkdir()
    (root / "one.txt").write_bytes(b"abab" * 225 + b"abab" * 25)
    corpus = prepare(root / "one.txt", tmp_path / "cache")
    known = reference_losses(corpus)
    assert known.uniform == pytest.approx(math.log(256))
    # 900 bytes to count, 450 of each letter, and one added to all 256
    assert known.unigram == pytest.approx(-math.log(451 / 1156))
    # held out: 50 times a→b, 49 times b→a; counted: 450 and 449
    bigram = -(50 * math.log(451 / 706) + 49 * math.log(450 / 705)) / 99
    assert known.bigram == pytest.approx(bigram)


def test_pairs():
    assert pairs(np.array([1, 2, 3], np.uint8)).tolist() == [258, 515]


def test_manifest_is_plain_json(text, tmp_path):
    prepare(text, tmp_path / "cache")
    (made,) = (tmp_path / "cache").iterdir()
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["files"] == 40 and len(manifest["sha256"]) == 64
