"""Virtual tokens before the input, which are all that trains: prompt tuning and prefix tuning."""
import copy
from contextlib import ExitStack
from typing import Any
import warnings
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from lightning_fasttrain.finetune.prompt_forward import PromptForward, prompts_on

def quick(root, config, name="default"):
    import peft
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING as KINDS
    kind = KINDS[config.task_type]
    frame = peft.PeftModel(root, config, adapter_name=name)
    frame.__class__ = kind
    if config.task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
        frame.base_model_prepare_inputs_for_generation = root.prepare_inputs_for_generation
    f = PromptForward(root, frame)
    root.prompt_encoder = frame.prompt_encoder
    root.peft_config = frame.peft_config
    f.install()
    return f
