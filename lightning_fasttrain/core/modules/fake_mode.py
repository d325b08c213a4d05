"""Make tensors with shapes but without memory, which may be copied."""

from functools import cached_property

from torch._subclasses.fake_tensor import FakeTensorMode


class FakeMode(FakeTensorMode):
    """Makes fake tensors, beside real ones; copies of them are in the same mode.

    ``copy.deepcopy`` of a fake tensor, as by PEFT and ``nn.TransformerEncoder``, copies PyTorch's mode too, and with it
    the ``StorageWeakRef`` of each constant. Every copy of such a reference releases it when it dies, so that memory in
    use is freed, and the process crashes later, in another place.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @cached_property
    def avoid_device_init(self) -> bool:
        """Whether there is no device to start; PyTorch looks for one, and for its driver, at each operator."""
        return super().avoid_device_init

    def __deepcopy__(self, _: object) -> "FakeMode":
        return self
