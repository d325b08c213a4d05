"""Random numbers inside split layers, which differ between the ranks of a tensor group."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class SplitRandomness:
    """Switches the random generator between the state that a group shares and one of this rank.

    Activations that all ranks have must be dropped by the same mask, and those of single ranks by different ones. The
    state of a rank is seeded by a number that the shared one draws, so that a forward that is recomputed from the
    same shared state has the same masks, and that the shared state is all that a checkpoint must contain.

    Args:
        rank: in the tensor group.

    Source:
        The two streams of Megatron-LM's ``CudaRNGStatesTracker``; here the second is derived from the first.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._shared: tuple[torch.Generator, Tensor, int] | None = None

    def enter(self, device: torch.device) -> None:
        """Draw from this rank's own state from now on."""
        self.leave()
        seed = int(torch.randint(2**62, (), device="cpu")) + self.rank
        generator = _generator_of(device)
        self._shared = generator, generator.get_state(), seed
        generator.manual_seed(seed)

    def leave(self) -> None:
        """Draw from the shared state again."""
        if self._shared is None:
            return
        generator, state, seed = self._shared
        self._shared = None
        # An error, or a recomputation that ends early, may have left the rank's state by itself.
        if generator.initial_seed() == seed:
            generator.set_state(state)

    def between_(self, columns: list[nn.Module], rows: list[nn.Module]) -> None:
        """Draw from this rank's state between column- and row-parallel layers, and from the shared one inside them."""
        for layer in (*columns, *rows):
            layer.register_forward_pre_hook(self._leave_before)
        for layer in columns:
            layer.register_forward_hook(self._enter_after)

    def inside_(self, blocks: list[nn.Module]) -> None:
        """Draw from this rank's state inside blocks."""
        for block in blocks:
            block.register_forward_pre_hook(self._enter_before, with_kwargs=True)
            block.register_forward_hook(self._leave_after)

    def _leave_before(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            self.leave()

    def _enter_after(self, module: nn.Module, args: object, output: Tensor) -> None:
        if module.training and not torch.compiler.is_compiling():
            self.enter(output.device)

    def _enter_before(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if module.training and given and not torch.compiler.is_compiling():
            self.enter(given[0].device)

    def _leave_after(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            self.leave()


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
