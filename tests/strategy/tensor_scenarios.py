"""Run by two and by four processes (see test_tensor_parallel.py): each scenario writes its results."""

import faulthandler
import gc
import os
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy, FSDP2Strategy
from tests.strategy.muon_scenarios import divided_in_a_tensor_group
from tests.support.end_of_rank import run_rank, write_findings
from tests.support.nets import as_loader, largest_difference, trainer, weights

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, ROWS, VOCABULARY, CLASSES = 3, 4, 32, 5
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
_OF_BART = {"layers": 1, "attention_heads": 4, "ffn_dim": 24}


class Net(L.LightningModule):
    """One of the models, with its loss; the weights are the same in every process."""

    def __init__(self, kind, **settings):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.net = {**MODELS, **OTHERS}[kind](**settings)
        self.kind, self.losses = kind, []

    def loss(self, batch):
        if self.kind in ("bert", "vit", "deberta"):
            return self.net(batch["inputs"], labels=batch["labels"]).loss
        logits = self.net(batch["inputs"])
        logits = getattr(logits, "logits", logits)
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.outputs = self.net(batch["inputs"])

    def configure_optimizers(self):
        if self.kind == "llama":
            return torch.optim.AdamW(self.parameters(), lr=3e-3)
        # Adam would divide the gradient of keys' biases, which is rounding alone, by its own size.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _llama(**settings):
    config = LlamaConfig(**{**SMALL, "vocab_size": VOCABULARY, "num_key_value_heads": 2, **settings})
    return LlamaForCausalLM(config)


def _bert(**settings):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(**{**SMALL, **off, "vocab_size": VOCABULARY, "num_labels": CLASSES, **settings})
    )


def _deberta():
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {**SMALL, **off, "vocab_size": VOCABULARY, "num_labels": CLASSES, "max_position_embeddings": 16}
    return DebertaV2ForSequenceClassification(
        DebertaV2Config(**sizes, relative_attention=True, pos_att_type=["c2p", "p2c"])
    )


def _gpt2():
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=4, vocab_size=VOCABULARY, n_positions=16, **off))


def _bart():
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _OF_BART.items()}
    config = BartConfig(d_model=16, vocab_size=VOCABULARY, max_position_embeddings=16, dropout=0.0, **sizes)
    return BartForConditionalGeneration(config)


def _vit(**settings):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(
        ViTConfig(**{**SMALL, **off, "image_size": 8, "patch_size": 4, "num_labels": CLASSES})
    )


def _gpt(**settings):
    return GPT(GPTConfig(**{"vocabulary": VOCABULARY, "context": 8, "layers": 2, "heads": 4, "width": 16, **settings}))


def _short_gpt(**settings):
    """One block, where no test is about what passes from a block to the next."""
    return _gpt(layers=1, **settings)


def _dropping_gpt():
    net = _gpt(dropout=0.4)
    for block in net.blocks:
        block.attention.dropout = 0.0  # not a layer, whose mask could be seen
    return net


class Encoder(nn.Module):
    """torch's own encoder, whose attention cannot be split by heads, on token ids."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=24, dropout=dropout, batch_first=True)
        layer.self_attn.dropout = 0.0  # not a layer, whose mask could be seen
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids):
        return self.head(self.encoder(self.tokens(ids)))


MODELS = {"gpt": _gpt, "llama": _llama, "bert": _bert, "vit": _vit}
KINDS = {2: tuple(MODELS), 4: ("gpt",)}  # of two and of four processes, whose meshes have two dimensions
OTHERS = {
    "short gpt": _short_gpt,
    "gpt2": lambda: _gpt2(),
    "bart": lambda: _bart(),
    "deberta": lambda: _deberta(),
    "encoder": Encoder,
    "dropping encoder": lambda: Encoder(dropout=0.4),
    "dropping gpt": lambda: _dropping_gpt(),
    "scaled": lambda: Scaled(),
}


def batches_of(kind, data_rank, count=STEPS):
    g = torch.Generator().manual_seed(100 + data_rank)
    made = []
    for _ in range(count):
        inputs = torch.randint(VOCABULARY, (ROWS, 8), generator=g)
        if kind == "vit":
            inputs = torch.randn(ROWS, 3, 8, 8, generator=g)
        labels = torch.randint(CLASSES, (ROWS,), generator=g)
        targets = torch.randint(VOCABULARY, (ROWS, 8), generator=g)
        made.append({"inputs": inputs, "labels": labels, "targets": targets})
    return made


def one_process(kind, data_ranks, clip=None, count=STEPS, **settings):
    """Train in one process with plain PyTorch; return the module, and the losses of each data rank."""
    module = Net(kind, **settings)
    return module, train_alone(module, data_ranks, clip, count)


def train_alone(module, data_ranks, clip=None, count=STEPS):
    """Train a module on the batches of all data ranks; return the losses of each."""
    module.train()
    stepper = module.configure_optimizers()
    data = [batches_of(module.kind, rank, count) for rank in range(data_ranks)]
    losses = []
    for step in zip(*data, strict=True):
        several = [module.loss(batch) for batch in step]
        (sum(several) / data_ranks).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        stepper.step()
        stepper.zero_grad()
        losses.append([loss.item() for loss in several])
    return losses


def fit(kind, tensor, callbacks=(), settings=None, batches=None, strategy=None, resume=None, count=STEPS, **options):
    gc.freeze()
    torch.manual_seed(21 + RANK)  # so that ranks do not agree by chance
    module = Net(kind, **(settings or {}))
    strategy = strategy or FSDP2Strategy(tensor_parallel=tensor)
    t = trainer(callbacks, devices=WORLD, strategy=strategy, **options)
    t.fit(
        module,
        as_loader(batches or batches_of(kind, RANK // tensor, count)),
        **({"ckpt_path": resume} if resume else {}),
    )
    return module, t


def whole(module):
    found = {}
    for name, value in module.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = value.detach().clone()
    return found


def equal_to_one_process(found):
    """Compare the losses of all steps with clipping, and the weights after them."""
    for kind in KINDS[WORLD]:
        tensor = 2
        expected, losses = one_process(kind, WORLD // tensor, clip=0.5)
        module, _ = fit(kind, tensor, gradient_clip_val=0.5)
        mine = [row[RANK // tensor] for row in losses]
        found[f"{kind} losses"] = max(abs(a - b.item()) for a, b in zip(mine, module.losses, strict=True))
        found[f"{kind} moved"] = largest_difference(weights(Net(kind)), weights(expected))
        found[f"{kind} weights"] = largest_difference(weights(expected), whole(module))


def refusal(action, kinds=ValueError):
    try:
        action()
    except kinds as error:
        return str(error)
    return "nothing was refused"


def resharded(found, folder):
    """Resume a checkpoint on other meshes; all data ranks have the same batches, so that the number does not matter."""
    batches = batches_of("short gpt", 0, 4)
    path = folder / "one.ckpt"
    expected, _ = two_epochs(batches)
    # Each is resumed from the one before; the first is that of one process.
    for data, tensor in MESHES[WORLD]:
        module, t = fit("short gpt", tensor, batches=batches[2:], max_epochs=2, resume=path)
        found[f"resumed on {data}x{tensor}"] = largest_difference(weights(expected), whole(module))
        path = folder / f"{data}x{tensor}"
        if not path.exists():
            module, t = fit("short gpt", tensor, batches=batches[:2])
            t.save_checkpoint(path)


def two_epochs(batches, count=4):
    module = Net("short gpt")
    stepper = module.configure_optimizers()
    for batch in batches[:count]:
        stepper.zero_grad()
        module.loss(batch).backward()
        stepper.step()
    return module, stepper


MESHES = {2: [(2, 1), (1, 2), (2, 1)], 4: [(1, 4), (2, 2)]}


def techniques(found):
    """Compare techniques with the plain run of one process over two steps."""
    mine = batches_of("short gpt", RANK // 2, 2)
    plain, _ = one_process("short gpt", WORLD // 2, count=2)
    for name, callbacks in (
        ("CompileBlocks", [ft.CompileBlocks(backend="aot_eager")]),
        ("FusedLossHead", [ft.FusedLossHead()]),
        ("others", [ft.ActivationCheckpointing(), ft.MicroBatching(2), ft.EagerGradientRelease()]),
    ):
        module, _ = fit("short gpt", 2, callbacks, batches=mine)
        found[f"with {name}"] = largest_difference(weights(plain), whole(module))
    torch._dynamo.reset()
    batches = batches_of("llama", 0, 2)
    for name, callbacks in (("AdaptiveClipping", [ft.optim.AdaptiveClipping(1e-3)]), ("LoRA", [ft.LoRA(rank=2)])):
        torch.manual_seed(21)  # the adapters of rank zero
        alone = Net("llama")
        trainer(callbacks, strategy=SingleDeviceStrategy("cpu")).fit(alone, as_loader(batches))
        module, _ = fit("llama", 2, callbacks, batches=batches)
        adapted = whole(module)
        found[f"with {name}"] = largest_difference(weights(alone), adapted)
    found["LoRA moved"] = max(value.abs().max().item() for name, value in adapted.items() if "lora_B" in name)


def plans(found):
    """Compare plans of the user, and of a model whose MLPs alone are split, with one process; in eval mode too."""
    batches = batches_of("short gpt", RANK // 2, 2)
    plain, _ = one_process("short gpt", WORLD // 2, count=2)
    for name, up, down in (("torch's", ColwiseParallel(), RowwiseParallel()), ("ours", "colwise", "rowwise")):
        strategy = FSDP2Strategy(tensor_parallel=2, tensor_plan={"net.blocks.*.up": up, "net.blocks.*.down": down})
        module, _ = fit("short gpt", 2, batches=batches, strategy=strategy)
        found[f"plan with {name} styles"] = largest_difference(weights(plain), whole(module))
    plain, _ = one_process("encoder", WORLD // 2, count=2)
    module, t = fit("encoder", 2, batches=batches)
    found["plan of an encoder"] = largest_difference(weights(plain), whole(module))
    t.validate(module, as_loader(batches[:1]), verbose=False)
    with torch.no_grad():
        expected = plain.net.eval()(batches[0]["inputs"])
    found["encoder in eval mode"] = (module.outputs - expected).abs().max().item()
    found["encoder is split"] = module.net.encoder.layers[0].linear1.weight.to_local().shape


def consistency(found):
    """Dropout and samples agree inside a tensor group, and differ between data ranks."""
    module, _ = fit("short gpt", 2, settings={"dropout": 0.5}, count=2)
    mine = module.net.tokens.weight.to_local().clone()
    others = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(others, mine)
    found["dropout"] = (mine - others[RANK // 2 * 2]).abs().max().item()
    seen = Seen("short gpt")
    strategy = FSDP2Strategy(tensor_parallel=2)
    t = trainer(devices=WORLD, strategy=strategy, use_distributed_sampler=True)
    t.fit(seen, DataLoader(as_loader(batches_of("short gpt", 0, 4)).dataset, batch_size=None, shuffle=True))
    found["samples"] = seen.sums
    found["other batches"] = refusal(lambda: fit("short gpt", 2, batches=batches_of("short gpt", RANK, 2)))


class Seen(Net):
    """Records which batches it sees."""

    def training_step(self, batch, batch_idx):
        self.sums = [*getattr(self, "sums", []), int(batch["inputs"].sum())]
        return super().training_step(batch, batch_idx)


class Scaled(nn.Module):
    """A GPT whose logits have a temperature, a parameter without a dimension."""

    def __init__(self):
        super().__init__()
        self.gpt, self.scale = _short_gpt(), nn.Parameter(torch.tensor(0.5))

    def forward(self, ids):
        return self.gpt(ids) * self.scale.exp()


def scalars(found, folder):
    """Train a parameter without a dimension over data ranks and in a tensor group; save it, and resume."""
    for tensor in (1, 2):
        expected, _ = one_process("scaled", WORLD // tensor, clip=0.5, count=2)
        mine = batches_of("scaled", RANK // tensor, 2)
        module, t = fit("scaled", tensor, batches=mine[:1], gradient_clip_val=0.5)
        path = folder / f"scaled{tensor}"
        t.save_checkpoint(path)
        clip = {"gradient_clip_val": 0.5, "max_epochs": 2}
        module, _ = fit("scaled", tensor, [ft.MicroBatching(2)], batches=mine[1:], resume=path, **clip)
        found[f"scalar {tensor}"] = largest_difference(weights(expected), whole(module))
        clipping = [ft.optim.AdaptiveClipping(1e-3)]
        alone = Net("scaled")
        trainer(clipping, strategy=SingleDeviceStrategy("cpu")).fit(alone, as_loader(batches_of("scaled", 0, 1)))
        clipped, _ = fit("scaled", tensor, clipping, batches=batches_of("scaled", 0, 1))
        found[f"scalar {tensor} clipped"] = largest_difference(weights(alone), whole(clipped))
        found[f"scalar {tensor} moved"] = abs(module.net.scale.item() - 0.5)


def options(found):
    """Compare options of the strategy with the plain run of one process over two steps."""
    plain, _ = one_process("short gpt", WORLD // 2, count=2)
    strategies = {"replicas": FSDP2Strategy(replicas=WORLD // 2, tensor_parallel=2)}
    if WORLD == 2:
        strategies["offload"] = FSDP2Strategy(tensor_parallel=2, offload="cpu")
        strategies["reshard_after_forward"] = FSDP2Strategy(False, tensor_parallel=2)
    for name, strategy in strategies.items():
        module, _ = fit("short gpt", 2, strategy=strategy, count=2)
        found[f"option {name}"] = largest_difference(weights(plain), whole(module))


def refused(found):
    for name, kind, tensor, callbacks in (
        ("QLoRA", "llama", 2, [ft.QLoRA(rank=2)]),
        ("world", "short gpt", 3, []),
    ):
        found[f"refused {name}"] = refusal(
            lambda k=kind, n=tensor, c=callbacks: fit(k, n, c, batches=batches_of(k, 0, 1))
        )
    strategy = FSDP2Strategy(tensor_parallel=2, tensor_plan={"net.head": ColwiseParallel()})
    found["refused tied"] = refusal(
        lambda: fit("short gpt", 2, strategy=strategy, batches=batches_of("short gpt", 0, 1))
    )


def fabric_loop(found, folder):
    """Train with clipping in a Fabric loop, save, and load on a mesh of another shape."""
    expected, _ = one_process("short gpt", WORLD // 2, clip=0.5, count=2)
    fabric = L.Fabric(accelerator="cpu", devices=WORLD, strategy=FabricFSDP2Strategy(tensor_parallel=2))
    fabric.launch()
    module = Net("short gpt")
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for batch in batches_of("short gpt", RANK // 2, 2):
        fabric.backward(model.training_step(batch, 0))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    found["fabric"] = largest_difference(weights(expected), whole(module))
    fabric.save(folder / f"fabric{WORLD}", {"model": model, "optimizer": optimizer})
    other = L.Fabric(accelerator="cpu", devices=WORLD, strategy=FabricFSDP2Strategy())
    other.launch()
    again = Net("short gpt")
    model, optimizer = other.setup(again, again.configure_optimizers())
    other.load(folder / f"fabric{WORLD}", {"model": model, "optimizer": optimizer})
    found["fabric loaded"] = largest_difference(weights(expected), whole(again))


def main(path, folder, *only):
    # Which import this file.
    from tests.strategy import context_scenarios, family_scenarios, sequence_scenarios, vocabulary_scenarios

    faulthandler.dump_traceback_later(200, exit=True)  # a rank that hangs prints its stack
    warnings.simplefilter("ignore")
    found, folder = {}, Path(folder)
    every = {
        "equal": lambda: equal_to_one_process(found),
        "resharded": lambda: resharded(found, folder),
        "techniques": lambda: techniques(found),
        "plans": lambda: plans(found),
        "consistency": lambda: consistency(found),
        "refused": lambda: refused(found),
        "scalars": lambda: scalars(found, folder),
        "options": lambda: options(found),
        "fabric": lambda: fabric_loop(found, folder),
        "families": lambda: family_scenarios.families(found, folder),
        "sequence beside others": lambda: sequence_scenarios.beside_others(found),
        "dropout on shares": lambda: sequence_scenarios.dropout(found),
        "vocabulary": lambda: vocabulary_scenarios.split(found),
        "vocabulary beside others": lambda: vocabulary_scenarios.split_beside_others(found, folder),
        "vocabulary in fabric": lambda: vocabulary_scenarios.split_in_fabric(found),
        "vocabulary losses": lambda: vocabulary_scenarios.losses_of_a_split_weight(found),
        "muon": lambda: divided_in_a_tensor_group(found),
        "context": lambda: context_scenarios.equal_to_one_process(found),
        "context beside others": lambda: context_scenarios.beside_others(found, folder),
    }
    for name, scenario in every.items():
        if not only or name in only:
            began = time.time()
            scenario()
            found.setdefault("seconds", {})[name] = time.time() - began
    write_findings(path, found)


if __name__ == "__main__":
    run_rank(main, *sys.argv[1:])
