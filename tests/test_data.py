"""Tokens: loading, refusing, splitting, sampling; and the bigram baseline counted on them."""

import math
from pathlib import Path

import numpy as np
import pytest

from graphrt import data
from graphrt.bigram import bigram_loss
from graphrt.settings import InputError, make_settings


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(256)) * 8)
    return file


def write_tokens(path, values, dtype):
    np.array(values, dtype=dtype).tofile(path)
    return str(path)


class TestText:
    def test_default_text_is_the_same_each_time(self):
        first, second = data.load_default_text(), data.load_default_text()
        assert len(first.tokens) > 300_000
        assert first.fingerprint() == second.fingerprint()

    def test_any_bytes_are_tokens(self, text_file):
        corpus = data.load_text([str(text_file)])
        assert corpus.is_bytes
        assert corpus.num_symbols == 256
        assert corpus.tokens[:256].tolist() == list(range(256))

    def test_one_file_stays_memory_mapped(self, text_file):
        assert isinstance(data.load_text([str(text_file)]).tokens, np.memmap)

    def test_directories_are_read_recursively_sorted_and_without_hidden_files(self, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / ".git").mkdir()
        for name, content in (("b.txt", "B"), ("sub/c.txt", "C"), ("a.txt", "A"), (".git/x", "X"), (".hidden", "H"), ("empty", "")):
            (tmp_path / name).write_text(content)
        assert bytes(data.load_text([str(tmp_path)]).tokens) == b"ABC"

    def test_globs_are_expanded_and_no_file_is_taken_twice(self, tmp_path):
        (tmp_path / "sub").mkdir()
        for name in ("a.txt", "sub/b.txt", "c.py"):
            (tmp_path / name).write_text(Path(name).stem)
        assert bytes(data.load_text([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"]).tokens) == b"ab"

    @pytest.mark.parametrize("name", ["missing.txt", "*.nothing", "folder"])
    def test_what_matches_nothing_is_named(self, tmp_path, name):
        (tmp_path / "folder").mkdir()
        with pytest.raises(InputError, match=name.replace("*", r"\*")):
            data.load_text([str(tmp_path / name)])

    def test_an_empty_file_is_named(self, tmp_path):
        (tmp_path / "void.txt").touch()
        with pytest.raises(InputError, match=r"void\.txt is empty"):
            data.load_text([str(tmp_path / "void.txt")])

    def test_run_folders_are_left_out_of_what_expands(self, tmp_path):
        for folder in ("text", "runs/first", "runs/first/tensorboard", "runs/new"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "text/settings.json").write_text('{"mine": 1}')
        (tmp_path / "runs/first/settings.json").write_text(make_settings({}).to_json())
        for name in ("runs/first/metrics.jsonl", "runs/first/tensorboard/events", "runs/new/report.txt"):
            (tmp_path / name).write_text("R")
        for pattern in (str(tmp_path), f"{tmp_path}/**/*"):
            corpus = data.load_text([pattern], run_folder=tmp_path / "runs/new")
            assert bytes(corpus.tokens) == b'{"mine": 1}'
            assert corpus.left_out == "4 in run folders"
        with pytest.raises(InputError, match="matches no text, but files left out: 3 in run folders"):
            data.load_text([f"{tmp_path}/runs/first"])
        assert bytes(data.load_text([f"{tmp_path}/runs/first/metrics.jsonl"]).tokens) == b"R"

    def test_binary_files_are_left_out_of_what_expands_and_taken_where_they_are_named(self, tmp_path):
        (tmp_path / "a.txt").write_text("text")
        (tmp_path / "b.bin").write_bytes(b"bin\0ary")
        (tmp_path / "late.txt").write_bytes(b"x" * 8000 + b"\0")
        for pattern in (str(tmp_path), f"{tmp_path}/*"):
            corpus = data.load_text([pattern])
            assert len(corpus.tokens) == 4 + 8001
            assert corpus.left_out == "1 binary"
        assert bytes(data.load_text([str(tmp_path / "b.bin")]).tokens) == b"bin\0ary"

    def test_the_first_that_is_missing_is_named(self, tmp_path):
        with pytest.raises(InputError, match="first"):
            data.load_text([str(tmp_path / "first.txt"), str(tmp_path / "second*")])

    def test_many_sources_are_shortened(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in "abcd":
            (tmp_path / name).write_text(name)
        assert data.load_text([str(tmp_path / name) for name in "abcd"]).source == "4 files from a, b, c, ..."
        assert data.load_text([str(tmp_path / name) for name in "abc"]).source == "3 files from a, b, c"


class TestTokens:
    def test_a_directory_is_refused_with_what_to_give(self, tmp_path):
        with pytest.raises(InputError, match=r"is a directory\. Give --tokens one file"):
            data.load_tokens(str(tmp_path), "auto", 256)

    @pytest.mark.parametrize("dtype", ["uint16", "uint32"])
    def test_files_are_memory_mapped_in_the_dtype_given(self, tmp_path, dtype):
        corpus = data.load_tokens(write_tokens(tmp_path / "t.bin", range(1000), dtype), dtype, 1000)
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.tokens.tolist() == list(range(1000))
        assert not corpus.is_bytes

    @pytest.mark.parametrize(("vocab", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
    def test_auto_takes_the_smallest_dtype_the_vocabulary_fits_in(self, tmp_path, vocab, dtype):
        file = write_tokens(tmp_path / "t.bin", [1, 2, vocab - 1], dtype)
        assert data.load_tokens(file, "auto", vocab).tokens.tolist() == [1, 2, vocab - 1]

    def test_a_size_that_cannot_be_is_named(self, tmp_path):
        (tmp_path / "odd.bin").write_bytes(b"12345")
        with pytest.raises(InputError, match=r"odd\.bin has 5 bytes"):
            data.load_tokens(str(tmp_path / "odd.bin"), "auto", 256)

    def test_a_token_out_of_range_is_named_with_its_place_whatever_chunk_it_is_in(self, tmp_path, monkeypatch):
        monkeypatch.setattr(data, "_CHUNK", 100)
        values = np.arange(1000) % 256
        values[731] = 256
        with pytest.raises(InputError, match=r"token 256 at position 731 .* vocabulary has 256"):
            data.load_tokens(write_tokens(tmp_path / "t.bin", values, "uint16"), "auto", 256)


class TestSplit:
    def test_parts_are_the_whole_in_order(self):
        tokens = np.arange(1000) % 256
        split = data.split_corpus(data.Corpus(tokens, 256, "x", True), 16)
        assert np.array_equal(np.concatenate((split.train, split.validation)), tokens)
        assert len(split.validation) == 100

    def test_validation_holds_a_sequence_of_a_short_text(self):
        split = data.split_corpus(data.Corpus(np.zeros(66, np.uint8), 256, "x", True), 32)
        assert (len(split.train), len(split.validation)) == (33, 33)

    def test_a_text_too_short_is_named_with_what_is_needed(self):
        with pytest.raises(InputError, match=r"There are 65 tokens in short\.txt, .* at least 66"):
            data.split_corpus(data.Corpus(np.zeros(65, np.uint8), 256, "short.txt", True), 32)


class TestWindows:
    def test_a_batch_is_a_function_of_seed_and_step(self):
        tokens = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
        a, b = (data.sample_windows(tokens, 32, 4, seed=3, step=7)[0] for _ in range(2))
        assert np.array_equal(a, b)
        for other in ({"seed": 4, "step": 7}, {"seed": 3, "step": 8}):
            assert not np.array_equal(a, data.sample_windows(tokens, 32, 4, **other)[0])

    def test_labels_are_the_next_tokens(self):
        tokens, labels = data.sample_windows(np.arange(100, dtype=np.uint8), 16, 8, 0, 0)
        assert tokens.shape == labels.shape == (8, 16)
        assert tokens.dtype == labels.dtype == np.int64
        assert np.array_equal(labels, tokens + 1)

    def test_a_text_of_one_sequence_is_sampled(self):
        tokens, labels = data.sample_windows(np.arange(17, dtype=np.uint8), 16, 2, 0, 0)
        assert tokens[:, 0].tolist() == [0, 0]
        assert labels[:, -1].tolist() == [16, 16]

    def test_validation_windows_cover_the_text_once(self):
        tokens, labels = data.validation_windows(np.arange(101), 10, 1 << 20)
        assert np.array_equal(tokens.ravel(), np.arange(100))
        assert np.array_equal(labels.ravel(), np.arange(1, 101))

    def test_fewer_validation_windows_are_spread_over_the_text(self):
        tokens, _ = data.validation_windows(np.arange(1001), 10, 50)
        assert tokens[:, 0].tolist() == [0, 200, 400, 600, 800]


class TestBigram:
    def test_equals_the_formula(self):
        train = np.random.default_rng(0).integers(0, 5, 2000)
        tokens, labels = train[:500], train[1:501]
        counts = np.zeros((5, 5))
        np.add.at(counts, (train[:-1], train[1:]), 1)
        losses = [
            -np.log((counts[tokens, labels] + s) / (counts[tokens].sum(1) + 5 * s)).mean() for s in (1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
        ]
        assert min(losses) - 1e-12 <= bigram_loss(train, tokens, labels, 5) <= max(losses) + 1e-12

    def test_knows_a_text_that_repeats(self):
        train = np.tile(np.arange(10), 500)
        assert bigram_loss(train, train[:100], train[1:101], 10) < 0.01

    def test_gives_an_unseen_text_the_uniform_loss_at_worst(self):
        train = np.zeros(1000, np.int64)
        loss = bigram_loss(train, np.full(10, 7), np.full(10, 8), 256)
        assert loss == pytest.approx(math.log(256))
