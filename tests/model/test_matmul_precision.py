import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.core import messages
from lightning_fasttrain.model import MatmulPrecision, matmul_precision_

NEW = [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]


def views() -> dict[object, object]:
    """Return all torch settings of float32 precision, from its new and its old API."""
    seen: dict[object, object] = {key: torch._C._get_fp32_precision_getter(*key) for key in NEW}
    for read in (
        torch.get_float32_matmul_precision,
        torch._C._get_cublas_allow_tf32,
        torch._C._get_cudnn_allow_tf32,
    ):
        try:
            seen[read.__name__] = read()
        except RuntimeError:
            seen[read.__name__] = "unreadable"
    return seen


def nothing() -> None: ...


def by_old_word_medium() -> None:
    torch.set_float32_matmul_precision("medium")


def by_old_flags() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = False


def by_new_names() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"


@pytest.fixture(autouse=True)
def as_in_a_fresh_process():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for backend, op in NEW:
        torch._C._set_fp32_precision_setter(backend, op, "none")
    for op in ("conv", "rnn"):
        torch._C._set_fp32_precision_setter("cuda", op, "tf32")


@pytest.mark.parametrize("found", [nothing, by_old_word_medium, by_old_flags, by_new_names])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_sets_all_three_operations_and_restores_them(found, precision):
    found()
    before = views()
    undo = matmul_precision_(precision)
    during = views()
    undo()
    assert [during["cuda", op] for op in ("matmul", "conv", "rnn")] == [precision] * 3
    assert views() == before


@pytest.mark.parametrize("found", [nothing, by_old_word_medium, by_old_flags])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_the_old_api_stays_readable_and_consistent(found, precision):
    found()
    matmul_precision_(precision)
    assert (torch.get_float32_matmul_precision() != "highest") is (precision == "tf32")
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is (precision == "tf32")


def test_the_cpu_keeps_its_own_precision():
    matmul_precision_("tf32")
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_applying_twice_and_undoing_in_reverse_order_restores():
    before = views()
    outer, inner = matmul_precision_("tf32"), matmul_precision_("ieee")
    inner()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    outer()
    assert views() == before


@pytest.mark.parametrize("make", [matmul_precision_, MatmulPrecision])
def test_an_unknown_precision_is_refused(make):
    with pytest.raises(ValueError, match=r"precision='tf16'.*Use one of 'tf32', 'ieee'"):
        make("tf16")


def test_in_the_trainer_it_applies_only_during_the_fit(tmp_path):
    class Spy(BoringModel):
        def training_step(self, batch, batch_idx):
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().training_step(batch, batch_idx)

    seen, before = [], views()
    trainer = L.Trainer(
        callbacks=[MatmulPrecision()], fast_dev_run=1, accelerator="cpu", default_root_dir=tmp_path, logger=False
    )
    trainer.fit(Spy())
    assert seen == ["tf32"]
    assert views() == before


def test_in_a_bare_loop_it_is_applied_to_a_model():
    before = views()
    with ft.apply(nn.Linear(2, 2), [MatmulPrecision("tf32")]):
        assert torch.backends.cudnn.rnn.fp32_precision == "tf32"
    assert views() == before


def test_no_effect_without_cuda_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    messages.say_once.cache_clear()
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        for _ in range(2):
            matmul_precision_("tf32")
    assert [record.message.count("no effect here") for record in caplog.records] == [1]


def test_torch_compile_works_with_either_setting():
    net = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    for precision in ("tf32", "ieee"):
        matmul_precision_(precision)
        torch.testing.assert_close(torch.compile(net, backend="eager")(x), net(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_rounds_the_factors_to_ten_bits():
    a = torch.full((512, 512), 1 + 2.0**-12, device="cuda")  # 12 bits of mantissa: TF32 rounds it to 1
    for precision, expected in (("tf32", 512.0), ("ieee", 512 * (1 + 2.0**-12))):
        matmul_precision_(precision)
        product = (a @ torch.ones(512, 512, device="cuda"))[0, 0].item()
        assert product == pytest.approx(expected, abs=1e-3)
