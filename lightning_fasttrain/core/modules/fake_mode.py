"""Make tensors with shapes but without memory, which may be copied."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

_CPU = torch.device("cpu")
_LIFT = torch.ops.aten.lift_fresh.default  # called by torch.tensor()


class FakeMode(FakeTensorMode):
    """Makes fake tensors, beside real ones; copies of them are in the same mode.

    ``copy.deepcopy`` of a fake tensor, as by PEFT and ``nn.TransformerEncoder``, copies PyTorch's mode too, and with it
    the ``StorageWeakRef`` of each constant. Every copy of such a reference releases it when it dies, so that memory in
    use is freed, and the process crashes later, in another place.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._attributes: dict[str, object] = {}  # of a fake tensor on the CPU

    def wrap(self, like: Tensor) -> FakeTensor:
        """Return what ``FakeTensor(self, like, "cpu")`` does, in a fifth of its time: copy the attributes of another.

        Args:
            like: a meta tensor, whose sizes, strides and dtype it has; without a gradient.
        """
        if not self._attributes:
            made = FakeTensor(self, like, _CPU)
            self._attributes.update(vars(made))
            return made
        made = Tensor._make_subclass(FakeTensor, like, False, dispatch_device=True, device_for_backend_keys=_CPU)
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made

    @cached_property
    def avoid_device_init(self) -> bool:
        """Whether there is no device to start; PyTorch looks for one, and for its driver, at each operator."""
        return super().avoid_device_init

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on fake tensors; a number is made one here, in a tenth of PyTorch's time."""
        number = args[0] if func is _LIFT else None
        if type(number) is Tensor and number.numel() == 1 and number.layout is torch.strided and number.is_cpu:
            return self._lift(number)
        return super().dispatch(func, types, args, kwargs or {})

    def _lift(self, number: Tensor) -> FakeTensor:
        # An optimizer has a count of steps for each parameter.
        with no_dispatch():
            like, constant = torch.empty_like(number, device="meta"), number.clone()
        fake = FakeTensor(self, like, number.device, constant=constant)
        self.fake_tensor_converter.add_constant_storage_mapping(fake)  # by which it is forgotten once it is written to
        return fake

    def __deepcopy__(self, _: object) -> "FakeMode":
        return self
