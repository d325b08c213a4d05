"""The scan of transformers' classes compares with what does not use the techniques, and can find them wrong."""

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
scan = pytest.importorskip("examples.transformers_classes")


@pytest.mark.parametrize(
    ("kind", "name", "setting"),
    [("gpt2", "GPT2LMHeadModel", "LoRA on 4 bits"), ("mixtral", "MixtralForCausalLM", "LoRA on 4 bits")],
)
def test_adapters_train_as_parametrizations_do(kind, name, setting, monkeypatch):
    assert scan.is_right(scan.compare("causal", kind, name, setting, {}))
    monkeypatch.setattr(
        scan.LowRank, "forward", lambda self, weight: weight + 1.01 * self.scale * (self.b @ self.a).sum()
    )
    assert not scan.is_right(scan.compare("causal", kind, name, setting, {}))


def test_weights_are_compared_with_those_of_the_plain_run():
    which = ("masked", "bert", "BertForMaskedLM")
    net = scan.build(*which)
    plain = scan.fit(net, scan.make_batch("masked", net), [])
    assert scan.is_right(scan.compare(*which, "micro-batches", plain))
    name = next(iter(plain))
    plain[name] = plain[name] + 1e-3 * torch.ones_like(plain[name])
    assert not scan.is_right(scan.compare(*which, "micro-batches", plain))


def test_classes_are_counted_as_right_refused_or_neither():
    row = {"difference": 1e-7, "moved": 1e-2}
    rows = {"right": row, "still": {**row, "moved": 0.0}, "refused": {"refused": "why"}, "raised": {"raised": "why"}}
    classes = {name: {"plain": {"difference": 0.0}, "LoRA": row} for name, row in rows.items()}
    lines = scan.summarize({**classes, "other": {"not built": "why"}}).splitlines()
    assert lines[0] == "5 classes, 4 built small"
    assert "LoRA: 1 right, 1 refused, 2 others still raised" in lines
    with pytest.raises(ValueError, match="language"):
        scan.build("causal", "xmod", "XmodForCausalLM")
