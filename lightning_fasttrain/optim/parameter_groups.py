"""Parameter groups: weight decay where it helps, layer-wise learning rates, and those of LoRA+."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveFloat, check_arguments
from lightning_fasttrain.core.messages import explain, list_some, note_once, number_of
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.heads import heads_beside, is_inside, warn_of_blocks_beyond
from lightning_fasttrain.core.modules.parameters import parameters_of_kinds
from lightning_fasttrain.core.modules.select import Sharing, as_list, find_module, matches_pattern, modules_of

# Other norms have one-dimensional parameters anyway.
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Names of bare tensors that are embeddings: learned positions, class tokens, and the latents and queries that a model
# starts with; or logarithms, as in Mamba, which weight decay would draw towards a rate of 1.
_EMBEDDED = re.compile(r"embed|token|position|latent|queries|prompt|registers|(^|_)pos(_|$)|(^|_)logs?$|^log_", re.I)


@check_arguments
def decay_groups(
    model: nn.Module,
    weight_decay: NonNegativeFloat = 0.01,
    *,
    decayed: str | Iterable[str] = (),
    spared: str | Iterable[str] = (),
    frozen: bool = False,
) -> list[dict[str, Any]]:
    """Return two groups for any optimizer: parameters with weight decay, and those without.

    Without weight decay are norms, biases and other one-dimensional parameters (gains of weight norms and attention's
    ``bias_k``, regardless of axes of size one), embeddings (also if the head shares them), bare tensors whose name
    marks them as embeddings (``pos_embed``, ``cls_token``, ``latents``) or logarithms (Mamba's ``A_log``), and those
    that the model itself exempts, by ``_no_weight_decay`` on a parameter or a method ``no_weight_decay()`` that lists
    names. One log line names them. A parameter that several modules share is listed once; quantized weights are
    excluded.

    Args:
        model: any module.
        weight_decay: weight decay of the first group.
        decayed: names of parameters that are decayed in any case, or patterns of names in which ``*`` stands for one
            name and ``**`` for any number (``"**.embed.weight"``).
        spared: the same for parameters that are not decayed; it takes precedence over ``decayed``.
        frozen: also list parameters that are frozen now, for a run that unfreezes them later.

    Returns:
        The groups ``"decay"`` and ``"no_decay"``, without empty ones.

    Raises:
        ValueError: a negative weight decay, a pattern that matches no parameter, or no trainable parameters.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in decay_groups(net, 0.1)]
        [('decay', 1, 0.1), ('no_decay', 4, 0.0)]

    Source:
        Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, for the decay. Norms and biases are spared as in
        BERT's training, and embeddings as in :func:`~lightning_fasttrain.optim.layer_decay_groups`.
    """
    names = {name: p for name, p in model.named_parameters() if p.is_floating_point() and (frozen or p.requires_grad)}
    if not names:
        why = "all its parameters are frozen"
        raise ValueError(explain(f"decay_groups of {type(model).__name__}", why, "Unfreeze some, or use frozen=True"))
    always, never = _match_names(model, names, decayed, "decayed"), _match_names(model, names, spared, "spared")
    undecayed = never_decayed(model)
    members: dict[str, dict[str, Tensor]] = {"decay": {}, "no_decay": {}}
    for name, parameter in names.items():
        label = "decay"
        # Names given by the user take precedence over the search.
        if parameter in never or (parameter not in always and parameter in undecayed):
            label = "no_decay"
        members[label][name] = parameter
    if weight_decay > 0:
        matrices = sorted(name for name, parameter in members["no_decay"].items() if parameter.ndim > 1)
        _note_decay(weight_decay, members, matrices)
    groups: list[dict[str, Any]] = []
    for label, rate in (("decay", weight_decay), ("no_decay", 0.0)):
        if members[label]:
            groups.append({"params": list(members[label].values()), "name": label, "weight_decay": rate})
    return groups


def _note_decay(weight_decay: float, members: dict[str, dict[str, Tensor]], matrices: list[str]) -> None:
    """Log how many parameters are decayed; matrices that are not are named, since they are rarely spared."""
    spoken = ""
    if matrices:
        spoken = f", including {list_some(matrices, 6)}"
    count = number_of(len(members["decay"]), "parameter")
    note_once(f"decay_groups: weight decay {weight_decay} on {count}, none on {len(members['no_decay'])}{spoken}")


def _match_names(
    model: nn.Module, known: dict[str, nn.Parameter], wanted: str | Iterable[str], argument: str
) -> set[Tensor]:
    """Return those of the ``known`` parameters that a pattern means by any of their names."""
    listed, found = set(known.values()), set[Tensor]()
    for pattern in as_list(wanted):
        named = model.named_parameters(remove_duplicate=False)
        matches = {parameter for name, parameter in named if parameter in listed and matches_pattern(name, pattern)}
        if not matches:
            way_out = f"The parameters are {list_some(list(known), 6)}"
            raise ValueError(explain(f"{argument}={pattern!r}", "no trainable parameter has this name", way_out))
        found |= matches
    return found


@check_arguments
def layer_decay_groups(
    model: nn.Module,
    lr: PositiveFloat | Tensor,
    decay: float = 0.9,
    weight_decay: NonNegativeFloat = 0.01,
    *,
    blocks: Blocks | None = None,
    head: str | Iterable[str] = (),
    frozen: bool = True,
) -> list[dict[str, Any]]:
    """Return groups whose learning rate falls with the distance from the head, for any optimizer.

    With L blocks, the head has the learning rate ``lr``, block i (the first is 1) lr · decay^(L + 1 − i), and the stem
    lr · decay^(L + 1). The stem consists of the modules that the model lists before its first block (embeddings, the
    first convolution), the head of those after the last one (the final norm, the classifier) and those that
    :func:`~lightning_fasttrain.finetune.find_heads` finds elsewhere; modules between two blocks belong to the earlier
    one. One log line reports the result. A parameter that several modules share is listed once, where the model names
    it first: a head that is tied to the embeddings is in the stem.

    Parameters without weight decay in :func:`~lightning_fasttrain.optim.decay_groups` have none here either, nor have
    the stem's bare tensors (position embeddings, a class token).

    Args:
        model: any module with repeated blocks.
        lr: learning rate of the head.
        decay: ratio from one layer to the next below, above 0; 1 gives all layers the same learning rate.
        weight_decay: weight decay of the matrices and kernels.
        blocks: as for :func:`~lightning_fasttrain.model.find_blocks`; by default the repeated blocks of the model.
        head: names of modules that belong to the head wherever they are listed, in addition to those that are found,
            such as ``"classifier"`` in a LightningModule that creates it before its backbone.
        frozen: also list parameters that are frozen now. They take no memory, and train once they are unfrozen, which
            is impossible if the optimizer does not hold them. Quantized weights are excluded in any case.

    Returns:
        Up to two groups each from stem to head, without empty ones: ``"name"`` is ``"stem"``, the block's qualified
        name or ``"head"``, with ``"/no_decay"`` for those without weight decay.

    Raises:
        ValueError: a learning rate out of range, no blocks, a head that does not exist, no trainable parameters.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> for group in layer_decay_groups(net, lr=0.8, decay=0.5):
        ...     print(group["name"], len(group["params"]), group["lr"], group["weight_decay"])
        stem/no_decay 1 0.1 0.0
        1 1 0.2 0.01
        1/no_decay 1 0.2 0.0
        2 1 0.4 0.01
        2/no_decay 1 0.4 0.0
        head/no_decay 2 0.8 0.0

    Source:
        Howard and Ruder 2018 (ULMFiT), https://arxiv.org/abs/1801.06146; with these exponents as in Bao et al. 2021
        (BEiT), https://arxiv.org/abs/2106.08254.
    """
    if not 0 < decay <= 1:
        why = "expected the ratio of a layer's learning rate to that of the one above"
        raise ValueError(explain(f"decay={decay}", why, "Use 0.75 to 0.95"))
    named = as_list(head)
    layers = ["stem", *find_blocks(model, blocks), "head"]
    if blocks is not None:
        warn_of_blocks_beyond(model, layers[1:-1], named, f"layer_decay_groups(blocks={blocks!r})")
    members: dict[tuple[int, bool], list[Tensor]] = {}
    outside: dict[int, dict[str, None]] = {0: {}, len(layers) - 1: {}}  # dicts, as ordered sets
    undecayed = never_decayed(model)
    for name, parameter, layer in _with_layers(model, layers, named):
        if not parameter.is_floating_point() or not (frozen or parameter.requires_grad):
            continue
        # The stem's own tensors, such as a class token, are embeddings with other names.
        bare = layer == 0 and "weight" not in name.rpartition(".")[2]
        members.setdefault((layer, bare or parameter in undecayed), []).append(parameter)
        if layer in outside:
            outside[layer][name.rpartition(".")[0] or name] = None
    if not members:
        why = "all its parameters are frozen"
        raise ValueError(explain(f"{type(model).__name__} with frozen=False", why, "Unfreeze some first"))
    stem, top = (", ".join(names) or "nothing" for names in outside.values())
    note_once(f"layer_decay_groups: the stem is {stem}; then {len(layers) - 2} blocks; the head is {top}")
    groups: list[dict[str, Any]] = []
    for layer, spared in sorted(members):
        group = {"params": members[layer, spared], "name": layers[layer], "weight_decay": weight_decay}
        if spared:
            group |= {"name": f"{layers[layer]}/no_decay", "weight_decay": 0.0}
        groups.append({**group, "lr": lr * decay ** (len(layers) - 1 - layer)})
    return groups


@check_arguments
def lora_plus_groups(
    model: nn.Module,
    lr: PositiveFloat | Tensor,
    ratio: PositiveFloat = 16.0,
    weight_decay: NonNegativeFloat = 0.0,
    *,
    embedding_lr: PositiveFloat = 1e-6,
) -> list[dict[str, Any]]:
    """Return the groups of LoRA+: adapters' B matrices have ``ratio`` times the learning rate of their A matrices.

    As in the reference implementation, one-dimensional parameters (DoRA's magnitudes, trained biases and norms) are
    grouped with B, adapters of embeddings have their own learning rate, and other trainable parameters, such as a new
    head, are grouped with A. Frozen parameters are excluded.

    Args:
        model: a model with adapters whose parameters are named as by PEFT (``lora_A``, ``lora_B``).
        lr: learning rate of A.
        ratio: ratio of B's learning rate to that of A.
        weight_decay: weight decay of matrices; one-dimensional parameters have none.
        embedding_lr: learning rate of both factors if the adapted layer is an embedding.

    Returns:
        The groups ``"A"``, ``"embedding"``, ``"B"`` and ``"B/no_decay"``, without empty ones.

    Raises:
        ValueError: a learning rate out of range, or no trainable B matrix.

    Example:
        >>> net = nn.ModuleDict({"lora_A": nn.Linear(8, 2, bias=False), "lora_B": nn.Linear(2, 8, bias=False)})
        >>> [(group["name"], group["lr"]) for group in lora_plus_groups(net, lr=0.25, ratio=4)]
        [('A', 0.25), ('B', 1.0)]

    Source:
        Hayou et al. 2024, "LoRA+: Efficient Low Rank Adaptation of Large Models", https://arxiv.org/abs/2402.12354.
        Checked against PEFT's ``create_loraplus_optimizer``.
    """
    if not embedding_lr >= 0:
        raise ValueError(explain(f"{embedding_lr=}", "expected a learning rate of at least 0", "Use 1e-6"))
    rates = {"A": lr, "embedding": embedding_lr, "B": lr * ratio, "B/no_decay": lr * ratio}
    members: dict[str, list[Tensor]] = {name: [] for name in rates}
    found = 0
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            found += 1
        if parameter.requires_grad:
            members[_group_of_lora(name, parameter)].append(parameter)
    if not members["B"] and not members["embedding"]:
        what, way_out = "no lora_B", "Add LoRA to the model before creating its optimizer"
        if found:
            what, way_out = f"{found} B matrices, all frozen", "Enable the adapter first"
        raise ValueError(explain(f"{type(model).__name__} has {what}", "no adapter can be trained", way_out))
    decays = {**dict.fromkeys(rates, weight_decay), "B/no_decay": 0.0}
    groups = []
    for name, parameters in members.items():
        if parameters:
            groups.append({"params": parameters, "name": name, "lr": rates[name], "weight_decay": decays[name]})
    return groups


def _group_of_lora(name: str, parameter: Tensor) -> str:
    if "lora_embedding_" in name:
        return "embedding"
    if parameter.ndim == 1:
        return "B/no_decay"
    if "lora_B" in name:
        return "B"
    return "A"


def _with_layers(model: nn.Module, layers: list[str], head: list[str]) -> Iterable[tuple[str, Tensor, int]]:
    """Yield every parameter with its name and the index in ``layers`` of its layer."""
    sharing = Sharing(model)
    head = [sharing.names[find_module(model, name, "head")][0] for name in head]
    named = list(model.named_parameters())
    # A head that shares the embedding belongs to it, which is listed first.
    tied = sharing.outside(list(modules_of(model, _EMBEDDINGS)))
    head += [one for one in heads_beside(model, layers[1:-1]) if f"{one}.weight" not in tied]
    of_block = [_block_of(name, layers[1:-1]) for name, _ in named]
    last = max((position for position, block in enumerate(of_block) if block is not None), default=-1)
    layer = 0
    for position, (name, parameter) in enumerate(named):
        if is_inside(name, head):
            yield name, parameter, len(layers) - 1
            continue
        block = of_block[position]
        if block is not None:
            layer = block
        # After the last parameter of any block; earlier ones belong to the preceding block.
        elif position >= last:
            layer = len(layers) - 1
        yield name, parameter, layer


def _block_of(name: str, blocks: list[str]) -> int | None:
    """Return which block, counted from 1, a parameter of this name is in."""
    return next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)


def never_decayed(model: nn.Module) -> set[Tensor]:
    """Return the parameters that are not weights of products.

    These are parameters of norms and embeddings (also if a head shares them), those whose shape or name shows it, and
    those that the model itself exempts, by ``_no_weight_decay`` on a parameter (Mamba) or ``no_weight_decay()`` (timm).
    """
    exempted: set[str] = set()
    for prefix, module in model.named_modules():
        exempt: Callable[[], Iterable[str]] | None = getattr(module, "no_weight_decay", None)
        if callable(exempt):
            exempted |= {f"{prefix}.{name}".lstrip(".") for name in exempt()}
    found = parameters_of_kinds(model, *_NORMS, *_EMBEDDINGS, recurse=False)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in exempted or _is_no_product(name, parameter):
            found.add(parameter)
    return found


def _is_no_product(name: str, parameter: Tensor) -> bool:
    own = name.rpartition(".")[2]
    # In a weight norm the first tensor is its gain, [n, 1, ...]; the original of any other parametrization is judged by
    # its result.
    made = re.search(r"parametrizations\.(\w+)\.original(1?)$", name)
    if made is not None:
        own = made[1]
    if parameter.ndim < 2 or own.endswith("bias") or getattr(parameter, "_no_weight_decay", False):
        return True
    is_bare = "weight" not in own or own.endswith("weight_g")
    # Such as bias_k of attention, a gain, or the scale of a channel.
    has_one_axis = parameter.numel() == max(parameter.shape)
    return is_bare and (has_one_axis or _EMBEDDED.search(own) is not None)
