import numpy as np
import pytest
import torch

from lightning_fasttrain.bench.text import Windows, batches, encode_text, read_text


def test_the_standard_library_is_there_and_the_same_every_time():
    text = read_text(max_mib=0.5)
    assert len(text) == 2**19
    assert text == read_text(max_mib=0.5)
    assert text.count(b"import ") > 20


def test_a_folder_is_read_in_the_order_of_names_without_binaries_and_hidden_files(tmp_path):
    for name, data in {"b.txt": b"two", "a/x.txt": b"one", "z.bin": b"\0\1", ".git/c": b"no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert read_text(tmp_path) == b"one\ntwo"


def test_a_file_is_cut_at_the_limit(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 3000)
    assert len(read_text(tmp_path / "a.txt", max_mib=1 / 1024)) == 1024


@pytest.mark.parametrize("data", [b"", b" \n\n"])
def test_empty_text_is_refused(tmp_path, data):
    (tmp_path / "empty.txt").write_bytes(data)
    with pytest.raises(ValueError, match=r"it holds no text.*--text PATH"):
        read_text(tmp_path / "empty.txt")


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it holds no text"):
        read_text(tmp_path)


def test_missing_text_is_refused():
    with pytest.raises(ValueError, match=r"text /nowhere/at/all: no such file or folder"):
        read_text("/nowhere/at/all")


def test_bytes_are_their_own_tokens():
    assert encode_text("é!".encode(), "bytes", 256).tolist() == [0xC3, 0xA9, 0x21]


def test_bpe_uses_the_vocabulary_and_gives_the_text_back():
    tokenizers = pytest.importorskip("tokenizers")
    assert tokenizers
    text = read_text(max_mib=0.05)
    tokens = encode_text(text, "bpe", 400)
    assert tokens.dtype == np.int32
    assert 256 < tokens.max() < 400
    assert len(tokens) < 0.8 * len(text)
    assert np.array_equal(tokens, encode_text(text, "bpe", 400))


def test_windows_are_text_and_its_continuation_and_repeat_by_seed():
    tokens = np.arange(10_000)
    one, same, other = (list(batches(tokens, 16, 4, 3, seed=seed)) for seed in (0, 0, 1))
    for (inputs, targets), (again, _) in zip(one, same, strict=True):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, again)
    assert not torch.equal(one[0][0], other[0][0])


def test_every_target_lies_inside_the_text():
    inputs, targets = next(iter(batches(np.arange(65), context=8, batch=8, steps=1)))
    assert targets.max() <= 64
    assert inputs.min() >= 0


def test_a_text_shorter_than_one_batch_is_refused():
    with pytest.raises(ValueError, match=r"64 tokens: .*shorter than one batch of 8 windows of 8 tokens, 65 in all"):
        batches(np.arange(64), context=8, batch=8, steps=1)


def test_padded_windows_are_the_same_text_cut_to_lengths_that_differ():
    whole, padded = (Windows(np.arange(1000) % 200 + 1, 64, 200, padded=cut) for cut in (False, True))
    lengths = []
    for index in range(200):
        (inputs, targets), (cut_inputs, cut_targets) = whole[index], padded[index]
        length = int((cut_targets != -100).sum())
        assert torch.equal(cut_inputs[:length], inputs[:length])
        assert torch.equal(cut_targets[:length], targets[:length])
        assert not cut_inputs[length:].any()
        lengths.append(length)
    assert 10 < sorted(lengths)[100] < 32  # the median is about a third of the context
    assert max(lengths) == 64
