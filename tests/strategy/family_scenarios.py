"""Scenarios of tensor_scenarios.py for other models: GPT-2's Conv1D, and relative positions of DeBERTa-v2."""

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.strategy import tensor_scenarios as base
from tests.support.nets import largest_difference, weights


def families(found, folder):
    """Compare steps with one process; those of GPT-2 with a split vocabulary and shares of the tokens, resumed."""
    plain, _ = base.one_process("deberta", base.WORLD // 2, count=2)
    module, _ = base.fit("deberta", 2, count=2)
    found["deberta weights"] = largest_difference(weights(plain), base.whole(module))
    found["deberta positions"] = module.net.deberta.encoder.layer[0].attention.self.pos_key_proj.weight.to_local().shape
    batches = base.batches_of("gpt2", 0, 4)
    plain, _ = base.one_process("gpt2", 1, count=4)
    strategy = FSDP2Strategy(tensor_parallel=2, sequence_parallel=True)
    _, t = base.fit("gpt2", 2, [ft.FusedLossHead()], batches=batches[:2], strategy=strategy)
    t.save_checkpoint(folder / "gpt2")
    module, _ = base.fit("gpt2", 1, batches=batches[2:], max_epochs=2, resume=folder / "gpt2")
    found["gpt2 weights"] = largest_difference(weights(plain), base.whole(module))
