"""Virtual tokens that train before the input of a frozen Hugging Face model, put in and saved."""

import copy
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lightning_fasttrain._heads import find_heads
from lightning_fasttrain._late_parameters import notices_late_parameters
from lightning_fasttrain._messages import explain, say
from lightning_fasttrain.finetune.adapters._adapter_checks import check_name, is_there, without_namesakes
from lightning_fasttrain.finetune.adapters._float32_adapters import keep_in_float32_
from lightning_fasttrain.finetune.adapters.add_adapter import count_parameters, train_mode
from lightning_fasttrain.finetune.parts.freezing import freeze_
from lightning_fasttrain.finetune.parts.prompt_forward import PromptForward, prompts_on
from lightning_fasttrain.finetune.parts.targets import find_targets, refuse_tied, require_peft
from lightning_fasttrain.finetune.prompts._prompt_checks import (
    HEADS,
    check_config,
    check_model,
    fill_,
    hugging_face_model,
    task_of,
)

DERIVED = ("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules", "encoder_hidden_size")


@notices_late_parameters
def add_prompt_(model: nn.Module, config: Any, *, train: Iterable[str] = (), name: str = "default") -> str:
    """Put virtual tokens before the input of the Hugging Face model in ``model``, in place, and freeze all else.

    The model keeps its type, its attributes and the keys of its ``state_dict``; the new ones begin with
    ``prompt_encoder``. It is called as before, and returns what it would under ``peft.get_peft_model``, with the
    positions of the virtual tokens cut from logits and hidden states, so that these are as long as the labels.
    ``generate`` works too, with its cache; to ``forward`` a cache cannot be given. A causal model that is given labels
    learns to predict the first token as well, from the virtual ones.

    Prompt tuning a decoder for classification needs inputs that are padded on the left: Hugging Face's take the last
    position for the last token.

    Args:
        model: a Hugging Face model, or a module that holds just one: a causal or an encoder-decoder language model, a
            sequence classifier, or the bare model without a head.
        config: ``peft.PromptTuningConfig``, ``peft.PrefixTuningConfig`` or ``peft.PromptEncoderConfig``. A copy of it
            is used, with what the model tells filled in.
        train: names of modules in the Hugging Face model that train whole, such as a new head; they are saved with
            the adapter.
        name: of this adapter, among several.

    Returns:
        Qualified name of the Hugging Face model. If there is an adapter of this name and kind, nothing is done.

    Raises:
        TypeError: ``config`` is none of those; there is no Hugging Face model, or one for another task.
        ValueError: there are several models, or an adapter of another kind; the model has no key-value cache, which a
            prefix is put into; a module of ``train`` is outside the model, or tied.
        ModuleNotFoundError: PEFT is not installed.

    Example:
        >>> import peft, transformers
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
        >>> net = nn.ModuleDict({"lm": transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))})
        >>> add_prompt_(net, peft.PromptTuningConfig(num_virtual_tokens=3))
        'lm'
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['lm.prompt_encoder.default.embedding.weight']
        >>> net["lm"](torch.tensor([[1, 2, 3, 4]])).logits.shape
        torch.Size([1, 4, 9])

    Source:
        ``peft.get_peft_model``. Checked against it, bit for bit, on four kinds of models.
    """
    peft = require_peft()
    check_config(peft, config)
    check_name(name)
    prefix, root = hugging_face_model(model)
    config = copy.deepcopy(config)
    config.task_type = config.task_type or task_of(root)
    whole = find_targets(model, list(train)) if train else {}
    check_model(root, config, [one for one in whole if not one.startswith(prefix)])
    refuse_tied(model, whole)
    fill_(config, root)
    if whole:
        config.modules_to_save = without_namesakes([one.removeprefix(prefix) for one in whole], root)
    if is_there(_adapters_in(model), name, _as_there(config, vars(root).get("peft_config", {}).get(name))):
        train_mode(root)
        return prefix.removesuffix(".")
    heads = [head for head in find_heads(model) if head not in whole]
    with ExitStack() as on_error:
        on_error.callback(freeze_(model))
        for one in whole:
            parent, _, last = one.rpartition(".")
            on_error.callback(setattr, model.get_submodule(parent), last, model.get_submodule(one))
        prompts = prompts_on(root)
        if prompts is None:
            prompts = PromptForward(root, _wrap_in_peft(peft, root, config, name))
            root.prompt_encoder, root.peft_config = prompts.frame.prompt_encoder, prompts.frame.peft_config
            prompts.install()
        else:
            peft.PeftModel.add_adapter(prompts.frame, name, config)
        prompts.frame.word_embeddings = root.get_input_embeddings()  # PEFT goes by their size
        prompts.use(name)
        keep_in_float32_(prompts.frame.prompt_encoder)
        on_error.pop_all()
    train_mode(root)
    trained, total = count_parameters(model)
    besides = f", and {', '.join(whole)} whole" if whole else ""
    if heads:
        besides += f"; heads left as they are: {', '.join(heads)}"
    say(
        "%s '%s': %d virtual tokens before the input of %s%s; trains %s of %s parameters (%.2f%%)",
        config.peft_type.value, name, config.num_virtual_tokens, type(root).__name__, besides,
        f"{trained:,}", f"{total:,}", 100 * trained / total,
    )  # fmt: skip
    return prefix.removesuffix(".")


def prompt_state(root: nn.Module, name: str = "default") -> dict[str, Tensor]:
    """The tensors that PEFT's file of these virtual tokens holds, by the names that it gives them.

    Where the virtual tokens come out of a network, which a prefix with ``projection`` and P-tuning have, it is what
    comes out: such a file can be used, but not trained on. Lightning's checkpoints hold the network.

    Args:
        root: the Hugging Face model itself.
        name: of the adapter.

    Example:
        >>> import peft, transformers
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
        >>> net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
        >>> _ = add_prompt_(net, peft.PrefixTuningConfig(num_virtual_tokens=3))
        >>> {key: tuple(tensor.shape) for key, tensor in prompt_state(net).items()}
        {'prompt_embeddings': (3, 32)}

    Source:
        ``peft.get_peft_model_state_dict``.
    """
    frame = _prompts_of(root).frame
    given = frame.peft_config[name].inference_mode
    weight = frame.prompt_encoder[name].embedding.weight if given else frame.get_prompt_embedding_to_save(name)
    state = {"prompt_embeddings": weight, **_whole_modules(root, name), **_untrained_heads(root)}
    return {key: tensor.detach().cpu() for key, tensor in state.items()}


def set_prompt_state_(root: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Give the virtual tokens of this name the values of a file, as :func:`prompt_state` returns them, in place.

    Raises:
        ValueError: names or shapes differ from what the model has, which is then unchanged; or the virtual tokens are
            those of a network that trains, and were not added with ``inference_mode=True``.
    """
    frame = _prompts_of(root).frame
    encoder, config = frame.prompt_encoder[name], frame.peft_config[name]
    if any(child is not encoder.embedding for child in encoder.children()):
        why = "they come out of a network here, and files hold what came out"
        way_out = "Add them with inference_mode=True in the config to use them, or resume from Lightning's checkpoint"
        raise ValueError(explain(f"virtual tokens '{name}' of {config.peft_type.value}", why, way_out))
    trained = {"prompt_embeddings": encoder.embedding.weight, **_whole_modules(root, name)}
    heads = _untrained_heads(root)
    shapes = {key: tuple(tensor.shape) for key, tensor in (trained | heads).items()}
    given = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    wrong = [key for key in {**shapes, **given} if shapes.get(key) != given.get(key)]
    if wrong:
        theirs = {key: given.get(key, "missing") for key in wrong[:3]}
        ours = {key: shapes.get(key, "none") for key in wrong[:3]}
        why = f"the model's are {ours}"
        raise ValueError(explain(f"the file's tensors {theirs}", why, "Use the model it was saved from"))
    other = [key for key, tensor in heads.items() if not torch.equal(tensor.cpu(), tensors[key].cpu().to(tensor.dtype))]
    if other:
        head = other[0].split(".")[1]
        why = "its head was trained, and this one is not"
        raise ValueError(explain(f"the file's '{other[0]}'", why, f"Add train=['{head}']"))
    with torch.no_grad():
        for key, tensor in trained.items():
            tensor.copy_(tensors[key])


def _adapters_in(model: nn.Module) -> dict[str, Any]:
    return {
        name: config
        for module in model.modules()
        for name, config in (vars(module).get("peft_config") or {}).items()
    }  # fmt: skip


def _as_there(config: Any, there: Any) -> Any:
    """The config with what PEFT had filled in when the adapter was added, so that the two can be compared."""
    if there is None:
        return config
    unknown = [name for name in DERIVED if vars(config).get(name, 0) is None]
    as_there = copy.copy(config)
    for name in unknown:
        setattr(as_there, name, getattr(there, name, None))
    return as_there


def _wrap_in_peft(peft: Any, root: Any, config: Any, name: str) -> Any:
    """PEFT's model for this one, and for its task; the classes of the tasks would let heads train unasked."""
    fake = any(isinstance(parameter, FakeTensor) for parameter in root.parameters())
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
        if fake:  # whose rows cannot be taken for a start; what is made now becomes fake later
            stack.enter_context(unset_fake_temporarily())
            stack.callback(setattr, config, "prompt_tuning_init", getattr(config, "prompt_tuning_init", None))
            config.prompt_tuning_init = "RANDOM"
        frame = peft.PeftModel(root, config, adapter_name=name)
    frame.__class__ = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING[config.task_type]
    if config.task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
        frame.base_model_prepare_inputs_for_generation = root.prepare_inputs_for_generation
    if config.task_type == "SEQ_CLS":
        frame.cls_layer_name = next((child for child, _ in root.named_children() if child in HEADS), None)
    return frame


def _prompts_of(root: nn.Module) -> PromptForward:
    prompts = prompts_on(root)
    if prompts is None:
        way_out = "Add some: add_prompt_(model, …)"
        raise ValueError(explain(f"{type(root).__name__} has no virtual tokens", "none were added", way_out))
    return prompts


def _whole_modules(root: nn.Module, name: str) -> dict[str, Tensor]:
    """What trains whole beside the virtual tokens, by the names that PEFT's file has for it."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, Tensor] = {}
    for place, module in root.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            state, names = module.state_dict(), module.adapter_state_dict_load_map(name)
            found |= {f"base_model.{place}.{key}": state[mine] for key, mine in names.items()}
    return found


def _untrained_heads(root: Any) -> dict[str, Tensor]:
    """The head of a classifier that does not train: PEFT has every classifier's in its file, and looks for it there."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    if _prompts_of(root).frame.active_peft_config.task_type != "SEQ_CLS":
        return {}
    return {
        f"base_model.{child}.{key}": tensor
        for child, module in root.named_children()
        if child in HEADS and not isinstance(module, AuxiliaryTrainingWrapper)
        for key, tensor in module.state_dict().items()
    }
