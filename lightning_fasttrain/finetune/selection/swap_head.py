"""Replace the head of a trained model by one with another number of outputs, or by another module."""

from typing import Any

import torch
from torch import nn

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.host.late_parameters import notices_late_parameters
from lightning_fasttrain.core.messages import explain, say, warn
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.select import (
    HUGGING_FACE_MODEL,
    Sharing,
    base_of,
    has_parameters,
    is_a,
    list_places,
    replace_modules_,
)
from lightning_fasttrain.core.modules.wrapped_forward import output_embeddings_of
from lightning_fasttrain.finetune.selection.base_fingerprint import prefix_of


@check_arguments
@notices_late_parameters
def swap_head_(model: nn.Module, new_head: PositiveInt | nn.Module, head: str | None = None) -> str:
    """Replace the head of ``model``, in place. Call it before adapters are added and the optimizer is created.

    A number creates an ``nn.Linear`` with this number of outputs: inputs, presence of a bias, dtype and device are
    those of the old head; the weights are drawn from a normal distribution with standard deviation 0.02, and the bias
    is zero. If the old head shared its weight, for example with the embedding, the new head has its own and the other
    module keeps the old one; this is logged. For Hugging Face models, the number of labels or the vocabulary size, with
    which they compute the loss, is updated in the configuration, and the head is no longer tied.

    Args:
        model: any module.
        new_head: number of outputs, or a module, which is used as it is.
        head: qualified name of the head. By default the module that ``get_output_embeddings()`` of a model inside
            returns, else the last linear layer after the model's blocks.

    Returns:
        Qualified name of the head.

    Raises:
        TypeError: ``new_head`` is neither an integer nor a module; the head has an adapter.
        ValueError: ``new_head`` is less than 1; no head was found, or none of that name; its number of inputs is
            unknown, or differs from that of ``new_head``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1000))
        >>> swap_head_(net, 3), net[2]
        ('2', Linear(in_features=8, out_features=3, bias=True))

    Source:
        Yosinski et al. 2014, "How transferable are features in deep neural networks?", https://arxiv.org/abs/1411.1792.
        The scale of the weights is that of Hugging Face's models (``initializer_range``).
    """
    name, named = _find(model, head)
    old = model.get_submodule(name)
    if base_of(old) is not old:
        raise TypeError(explain(f"head '{name}'", "it has an adapter", "Swap the head before adapters are added"))
    new = new_head if isinstance(new_head, nn.Module) else _linear_like(old, new_head, name)
    if isinstance(old, nn.Linear) and isinstance(new, nn.Linear) and new.in_features != old.in_features:
        why = f"the input of '{name}' has {old.in_features} features"
        way_out = f"Make it nn.Linear({old.in_features}, {new.out_features})"
        raise ValueError(explain(f"new_head has {new.in_features} inputs", why, way_out))
    tied = ", ".join(Sharing(model).outside([old]))
    replace_modules_(list_places(model), {old: new})
    if tied:
        say("swap_head_: %s was tied to %s, which does not change; the new head has its own weights", name, tied)
    if isinstance(old, nn.Linear) and isinstance(new, nn.Linear):
        _tell_transformers(model, name, named, old.out_features, new.out_features)
    return name


def _find(model: nn.Module, head: str | None) -> tuple[str, bool]:
    """Return the name of the head, and whether the model itself declares it as its output embedding."""
    modules: dict[str, Any] = dict(model.named_modules())
    heads = output_embeddings_of(model)
    named = [name for name, module in modules.items() if module in heads]
    if head is not None:
        meant = dict(model.named_modules(remove_duplicate=False)).get(head)
        found = [name for name, module in modules.items() if module is meant]
    else:
        holders = [name for name, module in modules.items() if has_parameters(module, recurse=False)]
        # In a network with a single linear layer, that is the head if no other layer follows.
        found = named or find_heads(model) or [name for name in holders[-1:] if isinstance(modules[name], nn.Linear)]
    found = list(filter(None, found))
    if not found:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name][-4:]
        why = "there is no such layer" if head is not None else "no linear layer follows the model's blocks"
        way_out = f"Name the head; the last linear layers are {', '.join(map(repr, linear)) or 'none'}"
        raise ValueError(explain(f"{head=} in {type(model).__name__}", why, way_out))
    # The last of several, as a model registers its head at the end.
    return found[-1], found[-1] in named


def _linear_like(old: nn.Module, outputs: int, name: str) -> nn.Linear:
    if not isinstance(old, nn.Linear):
        inside = [f"{name}.{inner}" for inner, module in old.named_modules() if isinstance(module, nn.Linear)]
        why, way_out = "its number of input features is unknown", f"Pass a module instead of {outputs}"
        if inside:
            way_out += f", or name the layer inside it: head={inside[-1]!r}"
        raise ValueError(explain(f"head '{name}' ({type(old).__name__})", why, way_out))
    weight = old.weight  # a quantised weight is packed into integers
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    new = nn.Linear(old.in_features, outputs, bias=old.bias is not None, device=weight.device, dtype=dtype)
    nn.init.normal_(new.weight, std=0.02)  # Hugging Face's ``initializer_range``
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    return new.train(old.training)


def _tell_transformers(model: nn.Module, name: str, named: bool, before: int, outputs: int) -> None:
    """Update the configuration of Hugging Face models, which their losses read, and remove the ties of the head."""
    modules: dict[str, Any] = dict(model.named_modules())
    for place, owner in modules.items():
        prefix = prefix_of(place)
        if not is_a(owner, HUGGING_FACE_MODEL) or not name.startswith(prefix):
            continue
        config, relative = owner.config, name.removeprefix(prefix)
        if named:
            _set_vocabulary(owner, config.get_text_config(), outputs)
        elif vars(owner).get("num_labels") == before:
            if (before == 1) != (outputs == 1):
                # Regression or classification is inferred again from the first labels.
                config.problem_type = None
            owner.num_labels = config.num_labels = outputs
        ties = owner.all_tied_weights_keys
        mine = [key for key in ties if key.startswith(f"{relative}.")]
        for key in mine:
            del ties[key]
        if mine and not ties:
            # Otherwise loading would tie the head to the embedding again.
            config.tie_word_embeddings = False


def _set_vocabulary(owner: object, config: object, outputs: int) -> None:
    config.vocab_size = outputs
    if "vocab_size" in vars(owner):
        owner.vocab_size = outputs
    embedding = owner.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.num_embeddings != outputs:
        why = f"the embedding of {type(owner).__name__} has {embedding.num_embeddings} rows, so what save_pretrained "
        why += "writes cannot be loaded by from_pretrained, which gives both the same size"
        way_out = f"For another vocabulary call model.resize_token_embeddings({outputs}) instead"
        warn(explain(f"swap_head_(model, {outputs})", why, way_out))
