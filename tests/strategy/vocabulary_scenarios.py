"""Scenarios of tensor_scenarios.py in which the vocabulary is split over a tensor group, and tokens are divided."""

from typing import NamedTuple

import lightning as L
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy, FSDP2Strategy
from tests.strategy import tensor_scenarios as base
from tests.support.nets import as_loader, largest_difference, weights

UNEVEN = 35  # classes: neither 2 nor 4 ranks have equal shares
TOKENS = base.ROWS * 8


class Case(NamedTuple):
    """A model, the head of which FusedLossHead knows, and a norm that computes on a share of the tokens, if any."""

    kind: str
    settings: dict
    head: str | None
    norm: str | None


TIED = {"tie_word_embeddings": True, "pad_token_id": 3}
MODELS = {
    "tied gpt": Case("gpt", {"vocabulary": UNEVEN}, "net.head", "blocks.1.norm_1"),
    "untied llama": Case("llama", {}, "net.lm_head", None),
    "tied llama": Case("llama", TIED, "net.lm_head", "model.layers.0.post_attention_layernorm"),
    "divided bert": Case("bert", {"num_hidden_layers": 2}, None, "bert.encoder.layer.1.attention.output.LayerNorm"),
}
KINDS = {2: tuple(MODELS), 4: ("tied gpt",)}
LOSSES = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1, "reduction": "sum"},
    "z": {"z_loss": 0.01},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0},
    "none": {"reduction": "none", "label_smoothing": 0.1},
}


class Logits(TorchDispatchMode):
    """Counts plain tensors as large as the logits of all tokens and classes."""

    def __init__(self, classes):
        super().__init__()
        self.classes, self.count = classes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and not isinstance(made, DTensor):
                large = made.numel() >= TOKENS * self.classes and not made.is_meta
                self.count += large and made.shape[-1] == self.classes
        return result


class CountLogits(L.Callback):
    """Counts them in the second batch: its forward, backward and step."""

    def __init__(self, classes):
        self.mode = Logits(classes)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.mode.__exit__(None, None, None)


class Tokens(L.Callback):
    """Notes the number of tokens of which a norm computes."""

    def __init__(self, norm):
        self.norm, self.seen = norm, 0

    def on_fit_start(self, trainer, module):
        if self.norm is not None:
            module.net.get_submodule(self.norm).register_forward_hook(self.note)

    def note(self, norm, args, output):
        self.seen = args[0].shape[1]


def split(found):
    """Compare clipped steps with one process; count logits and tokens; validate."""
    for name in KINDS[base.WORLD]:
        kind, settings, head, norm = MODELS[name]
        expected, losses = base.one_process(kind, base.WORLD // 2, clip=0.5, **settings)
        counted, tokens = CountLogits(settings.get("vocabulary", base.VOCABULARY)), Tokens(norm)
        fused = [ft.FusedLossHead(head if kind == "gpt" else None)] if head else []
        strategy = FSDP2Strategy(tensor_parallel=2, sequence_parallel=norm is not None)
        module, t = base.fit(
            kind, 2, [*fused, counted, tokens], settings=settings, strategy=strategy, gradient_clip_val=0.5
        )
        mine = [row[base.RANK // 2] for row in losses]
        found[f"{name} losses"] = max(abs(a - b.item()) for a, b in zip(mine, module.losses, strict=True))
        found[f"{name} weights"] = largest_difference(weights(expected), base.whole(module))
        found[f"{name} tokens"] = tokens.seen
        if not head:
            continue
        found[f"{name} logits"] = counted.mode.count
        found[f"{name} rows"] = module.get_submodule(head).weight.to_local().shape[0]
        batch = base.batches_of(kind, 0, 1)
        t.validate(module, as_loader(batch), verbose=False)
        with torch.no_grad():
            plain = expected.net.eval()(batch[0]["inputs"])
        seen, plain = (getattr(output, "logits", output) for output in (module.outputs, plain))
        found[f"{name} validated"] = (seen - plain).abs().max().item()


def split_beside_others(found, folder):
    """Train with other techniques, and without the fused loss; resume on a mesh of another shape."""
    settings, batches = {"vocabulary": UNEVEN, "layers": 1}, base.batches_of("gpt", 0, 4)
    counted = CountLogits(UNEVEN)
    base.fit("gpt", 2, [counted], settings=settings, batches=batches[:2])
    found["logits of a replicated head"] = counted.mode.count
    expected, _ = base.one_process("gpt", 1, count=4, **settings)
    others = [ft.FusedLossHead("net.head"), ft.MicroBatching(2), ft.ActivationCheckpointing()]
    _, t = base.fit("gpt", 2, others, settings=settings, batches=batches[:2])
    t.save_checkpoint(folder / "split")
    more = {"settings": settings, "batches": batches[2:], "max_epochs": 2, "resume": folder / "split"}
    module, _ = base.fit("gpt", 1, **more)
    found["split resumed unsplit"] = largest_difference(weights(expected), base.whole(module))
    layers = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    for name, head in (("torch's", ColwiseParallel(use_local_output=False)), ("gathered", "vocabulary")):
        plan = {f"net.model.layers.*.mlp.{layer}": style for layer, style in layers.items()}
        strategy = FSDP2Strategy(tensor_parallel=2, tensor_plan={**plan, "net.lm_head": head})
        plain, _ = base.one_process("llama", 1, count=2)
        batches = base.batches_of("llama", 0, 2)
        module, _ = base.fit("llama", 2, batches=batches, strategy=strategy)
        found[f"loss of {name} logits"] = largest_difference(weights(plain), base.whole(module))


def split_in_fabric(found):
    """Train with a bias of the head, class weights and label smoothing in a Fabric loop."""
    class_weights = torch.linspace(0.5, 2.0, UNEVEN)

    def loss_of(net, batch):
        logits = net(batch["inputs"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["targets"].flatten(), class_weights, label_smoothing=0.1)

    def make():
        module = base.Net("gpt", vocabulary=UNEVEN, layers=1)
        module.net.head.bias = nn.Parameter(torch.linspace(-1, 1, UNEVEN))
        return module.net

    plain = make()
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    net = make()
    ft.apply(net, [ft.FusedLossHead("head")])
    fabric = L.Fabric(accelerator="cpu", devices=base.WORLD, strategy=FabricFSDP2Strategy(tensor_parallel=base.WORLD))
    fabric.launch()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in base.batches_of("gpt", 0, 2):
        for model, step in ((plain, stepper), (net, optimizer)):
            step.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            step.step()
    found["split in fabric"] = largest_difference(weights(plain), base.whole(net.module))


def losses_of_a_split_weight(found):
    """Compare each kind of loss, and its gradients, with those of the complete weight in float64."""
    mesh = init_device_mesh("cpu", (base.WORLD,))
    g = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*shape, generator=g).double() for shape in ((24, 6), (UNEVEN, 6), (UNEVEN,)))
    targets = torch.randint(UNEVEN, (24,), generator=g)
    targets[::5] = -100
    class_weights = torch.rand(UNEVEN, generator=g).double()
    for name, options in LOSSES.items():
        for classes in (None, class_weights):
            plain = [values.clone().requires_grad_() for values in (hidden, weight, bias)]
            mine = [values.clone().requires_grad_() for values in (hidden, bias)]
            rows = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
            everywhere = DTensor.from_local(mine[0], mesh, [Replicate()])
            more = {"chunk": 7, "class_weights": classes, **options}
            expected = ft.linear_cross_entropy(plain[0], plain[1], targets, bias=plain[2], **more)
            loss = ft.linear_cross_entropy(everywhere, rows, targets, bias=mine[1], **more)
            for one in (expected, loss):
                one.square().sum().backward()
            pairs = {"loss": (expected, loss), "hidden": (plain[0].grad, mine[0].grad)}
            pairs |= {"bias": (plain[2].grad, mine[1].grad), "weight": (plain[1].grad, rows.grad.full_tensor())}
            apart = max(((a - b).abs().max() / (1 + a.abs().max())).item() for a, b in pairs.values())
            found[f"{name} loss"] = max(apart, found.get(f"{name} loss", 0.0))
