"""Skip residual blocks at random during training."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

from lightning_fasttrain.architecture.residual_blocks import (
    ResidualForm,
    choose_blocks,
    find_hidden,
    find_residual_form,
    first_output,
    replace_output,
)
from lightning_fasttrain.core.checks import PositiveShare, check_arguments
from lightning_fasttrain.core.modules.blocks import Blocks, disable_cache_
from lightning_fasttrain.core.modules.select import as_list
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    count_wrapped,
    undo_all,
    why_none_ran,
    wrapper_on,
)
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep, why_no_blocks

Mode = Literal["batch", "row"]


class StochasticForward(WrappedForward):
    """A residual block's forward that is skipped with probability ``drop_rate`` in training.

    Args:
        module: the block.
        name: its qualified name.
        drop_rate: the probability.
        mode: whether the whole batch or each sample is drawn for.
    """

    def __init__(self, module: nn.Module, name: str, drop_rate: float, mode: Mode) -> None:
        super().__init__(module)
        self.name, self.drop_rate, self.mode = name, drop_rate, mode
        self.form: ResidualForm | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not self.module.training or self.drop_rate == 0:
            return self.inner(*args, **kwargs)
        self.ran = True
        compiling = torch.compiler.is_compiling()
        if self.form is None and not compiling:
            self.form = find_residual_form(self.module, self.name, "StochasticDepth", args, kwargs)
        _, x = find_hidden(args, kwargs)
        if self.mode == "batch" and not compiling:
            return self._skip_or_run(x, args, kwargs)
        # Compiled code has no branches, so a block inside of it is computed and multiplied by zero.
        size = [1] * x.ndim
        if self.mode == "row":
            size[0] = x.shape[0]
        survival = 1.0 - self.drop_rate
        factor = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(survival)
        if survival > 0:
            factor = factor / survival
        return self._scaled(self.inner(*args, **kwargs), x, factor)

    def _skip_or_run(self, x: Tensor, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        survival = 1.0 - self.drop_rate
        # Drawn on the CPU, so that the decision does not wait for a GPU.
        if torch.empty((), device="cpu").bernoulli_(survival):
            return self._scaled(self.inner(*args, **kwargs), x, 1 / survival)
        assert self.form is not None
        named = self.module.named_parameters()
        used = [p for name, p in named if p.requires_grad and name not in self.form.unused]
        return self.form.skip(SkippedBlock.apply(x, *used))

    def _scaled(self, output: object, x: Tensor, factor: Tensor | float) -> Any:
        form = self.form or ResidualForm()
        return replace_output(output, form.combine(x, first_output(output), factor))


class SkippedBlock(torch.autograd.Function):
    """The identity, in which the given parameters have a gradient of zero, as if multiplied by zero.

    So a step is the same as with the block multiplied by zero, and DDP finds a gradient for each parameter.
    """

    @staticmethod
    def forward(ctx: object, x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.parameters = parameters
        return x.clone()  # as the sum with zero is: a model may write into what its block returns

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradient, *map(torch.zeros_like, ctx.parameters)


@check_arguments
def stochastic_depth_(
    model: nn.Module,
    rate: PositiveShare = 0.2,
    *,
    mode: Mode = "row",
    blocks: Blocks | None = None,
    skip: Blocks = (),
) -> dict[str, Undo]:
    """Skip residual blocks at random in training, in place: x + f(x) becomes x, or x + f(x) / p.

    Block l of L survives with probability p_l = 1 - rate · l / L. Evaluation runs every block, without a factor: f(x) /
    p_l has the expectation f(x). Recomputation by activation checkpointing draws the same blocks again, and
    micro-batches draw their own.

    At its first call in training each block runs once more, without a trace, and the graph of its output shows whether
    the input is one of its terms; relu after the sum, as in a ResNet, is taken into account.

    Args:
        model: any module. The key-value cache of Hugging Face models is disabled.
        rate: probability that the last block is skipped, above 0 and at most 1.
        mode: ``"row"`` draws for each sample, as torchvision's ``"row"``, and computes the block for all of them;
            ``"batch"`` draws once for a batch, and does not compute a skipped block. Its parameters then have a
            gradient of zero, and of a block that returns a tuple all but the hidden states are None. Inside a block
            that is compiled afterwards it is multiplied by zero instead.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.
        skip: blocks to leave as they are, such as those of a ResNet that change the shape.

    Returns:
        Qualified name of each changed block → how to undo it. If some were changed before, their names, and nothing is
        done. If a model's cache was disabled, the name of that setting too.

    Raises:
        ValueError: no blocks were found, or ``skip`` matches nothing or all of them; at the first call: a block is not
            residual.

    Example:
        >>> net = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, norm_first=True) for _ in range(4)])
        >>> list(stochastic_depth_(net, 0.2))  # with rates of 0.05, 0.1, 0.15 and 0.2
        ['0', '1', '2', '3']

    Source:
        Huang et al. 2016, "Deep Networks with Stochastic Depth", https://arxiv.org/abs/1603.09382, which multiplies by
        p_l in evaluation instead; the factors are those of ``torchvision.ops.stochastic_depth``, on which the formulas
        were checked.
    """
    found = choose_blocks(model, blocks, skip)
    undos: dict[str, Undo] = {
        name: _do_nothing for name, block in found.items() if wrapper_on(block, StochasticForward)
    }
    if undos:
        return undos
    for number, (name, block) in enumerate(found.items(), start=1):
        undos[name] = StochasticForward(block, name, rate * number / len(found), mode).install()
    return {**undos, **disable_cache_(model)}


def _do_nothing() -> None:
    pass


class StochasticDepth(Technique):
    """Skip residual blocks at random during training; see :func:`stochastic_depth_`.

    Acts right after ``configure_model``, after blocks are recomputed and compiled, so that a skipped block is neither;
    undone at teardown.

    Args:
        rate, mode, blocks, skip: as for :func:`stochastic_depth_`.

    Raises:
        ValueError: when the run begins, see :func:`stochastic_depth_`. ``mode="batch"`` with a strategy that shards
            parameters, where all ranks must run the same blocks.

    Example:
        >>> shallow = StochasticDepth(0.2, mode="batch")

    Source:
        Huang et al. 2016, "Deep Networks with Stochastic Depth", https://arxiv.org/abs/1603.09382.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    keeps_draws: ClassVar[bool] = False
    surgery: ClassVar[Surgery | None] = Surgery.ROUTE
    effect: ClassVar[str] = "residual blocks are skipped at random, later ones more often"
    when: ClassVar[str] = "a deep residual model overfits; mode='batch' saves the time of the blocks it skips"
    in_a_loop: ClassVar[str] = "architecture.stochastic_depth_(model)"
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **{"p": "rate=", "drop_path_rate": "rate=", "stochastic_depth_prob": "rate="},
        "drop_rate": "rate=",
    }

    def __init__(
        self, rate: PositiveShare = 0.2, *, mode: Mode = "row", blocks: Blocks | None = None, skip: Blocks = ()
    ) -> None:
        self.rate, self.blocks = rate, blocks
        self.mode: Mode = mode
        self.skip: Blocks = tuple(as_list(skip))

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "each rank would skip other blocks, while all of them gather the parameters of the same one"
        by_batch = lambda technique, _: technique.mode == "batch"  # noqa: E731
        sharded = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
        packs = lambda technique, other: technique.mode == "row" and other.surgery is Surgery.UNPAD  # noqa: E731
        one_row = "blocks run on the tokens of all samples as one row, so samples cannot be skipped on their own"
        return (
            *[Conflict(strategy, why, "Use StochasticDepth(mode='row')", by_batch) for strategy in sharded],
            Conflict(Capability.TRIMS_PADDING, one_row, "Use StochasticDepth(mode='batch')", packs),
        )

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return why_no_blocks(facts)

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "a step in which no block is skipped takes the most memory, so this is an upper bound")

    def apply(self, model: nn.Module) -> Undo:
        changed = stochastic_depth_(model, self.rate, mode=self.mode, blocks=self.blocks, skip=self.skip)
        return undo_all(changed.values())

    def describe_effect(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, StochasticForward)
        drawn = {"row": "sample", "batch": "batch"}[self.mode]
        return blocks and f"{blocks} skipped at random for each {drawn}, the last one in {self.rate:.0%}"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, StochasticForward)
