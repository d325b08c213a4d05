"""What techniques that change training do, written out as one would without them: what they are compared with."""

import lightning as L
import peft


class Inject(L.Callback):
    """An adapter put in with PEFT's own function, at the only moment at which a plain callback can."""

    def config(self):
        raise NotImplementedError

    def setup(self, trainer, pl_module, stage):
        if not hasattr(pl_module, "peft_config"):
            peft.inject_adapter_in_model(self.config(), pl_module)


class LoRA(Inject):
    def config(self):
        return peft.LoraConfig(r=2, lora_alpha=32, target_modules=["up", "down"])


class IA3(Inject):
    def config(self):
        return peft.IA3Config(target_modules=["up"], feedforward_modules=[])


class LoHa(Inject):
    def config(self):
        return peft.LoHaConfig(r=2, target_modules=["down"])
