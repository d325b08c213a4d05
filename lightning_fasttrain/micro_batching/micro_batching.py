"""Train one batch from the loader in micro-batches: the same step in a fraction of the activation memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import lightning as L
from torch import nn

from lightning_fasttrain.core.batch.leaves import split_batch
from lightning_fasttrain.core.batch.padded_axes import padding_in
from lightning_fasttrain.core.checks import PositiveInt, positive_int
from lightning_fasttrain.core.host.lightning import refuse_static_graph, replaced_closures
from lightning_fasttrain.core.messages import explain, number_of
from lightning_fasttrain.core.modules.select import as_list
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.micro_batching.find_backbone import Through
from lightning_fasttrain.micro_batching.micro_batch_closure import BatchClosures
from lightning_fasttrain.micro_batching.micro_batch_graphs import refuse_run
from lightning_fasttrain.micro_batching.normalizer.count_targets import (
    Count,
    CountRule,
    named_count,
    rule_in,
    rule_state,
)
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit
from lightning_fasttrain.micro_batching.out_of_memory import (
    FittingSearch,
    FurtherSavings,
    fitting_search_of,
    refuse_collectives,
)
from lightning_fasttrain.micro_batching.padding.trim_search import LOOKED_FOR, TrimPadding, TrimSearch, check_budget
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Technique, check_together
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.technique import techniques_of
from lightning_fasttrain.trial.deterministic_step import list_batch_statistics


class MicroBatching(Technique):
    """Run each batch as ``n`` micro-batches inside one step, with the same result as the unsplit step.

    ``training_step`` is called once a micro-batch and returns its loss, as always. Each loss is weighted by its
    normalizer, which is read from its graph. Where that cannot give the gradient of the unsplit batch, the submodule in
    which samples do not depend on one another runs in micro-batches with recomputation instead, and ``training_step``
    is called once, with the whole batch; one log line reports which of the two is used. Batch size, ``batch_idx``,
    ``global_step``, schedules, clipping and the values of ``self.log`` are those of the unsplit step; it composes with
    ``accumulate_grad_batches``, and under DDP gradients are synchronized once a step. ``on_before_backward`` is called
    once a batch, with the loss of its first micro-batch, and ``on_after_backward`` once its gradient is complete. Where
    the step returns None for a micro-batch and would do so for the batch, the batch is skipped. What a step changes,
    such as a counter or a teacher, must change once a batch, too: otherwise the second way is taken. For the arithmetic
    and its limits (BatchNorm, dropout) see :func:`~lightning_fasttrain.accumulate_gradients`.

    Acts in the closure of the optimizer step, since Lightning zeroes gradients after ``training_step``.

    Args:
        n: number of micro-batches; a batch with fewer samples is run one sample at a time. ``"auto"`` starts with one
            and doubles whenever a step runs out of memory, repeating that batch from a restored state: see
            :func:`~lightning_fasttrain.micro_batching.split_until_it_fits`. The number found is kept, also in
            checkpoints. On several processes, with DDP, all double when one runs out of memory. For this they exchange
            one message a step, and average gradients after the backward rather than during it. Once the number is
            known, setting it saves both. A ``training_step`` that communicates by itself is refused where this is
            detected, and padding is looked for in the first batch only.
        count: the normalizer of micro-batches, as for :func:`~lightning_fasttrain.accumulate_gradients`. ``"auto"``
            reads it from each micro-batch's own loss.
        split: how to split a batch, for batches that :func:`~lightning_fasttrain.micro_batching.split_batch` refuses.
        check: raise on the first batch if the training would change, as with BatchNorm in training mode. False
            continues with the nearest weighting and reports its error.
        then: with ``"auto"``, techniques to apply one after another once single samples do not fit either:
            ``[ActivationCheckpointing(), ActivationOffload()]``. After each, the search restarts with one micro-batch.
            Applied techniques stay, also in checkpoints.
        through: the submodule, several of them or a class that runs in micro-batches, such as ``"encoder"``, while the
            loss sees the whole batch; see :func:`~lightning_fasttrain.micro_batching.micro_batch_forward_`. By default
            it is found where a loss cannot be split.
        trim_padding: sort the rows of a batch by length before they are split, and cut each micro-batch to its own
            longest row, so that less padding runs. None does so where the padding is found (masks, lengths, labels of
            -100, token ids) and a trial on a few samples shows that the gradient stays the same; True refuses a run in
            which it would change; a :class:`~lightning_fasttrain.micro_batching.TrimPadding` names what shows the
            padding. What the step returns for each sample keeps the batch's order, with zeros where padding was cut
            off. Lengths are read on the host, where Lightning moves the batch to the device; where
            they are known on a device alone, the host waits for them once a batch.
        max_tokens: instead of n: as few micro-batches as hold at most so many tokens each, the remaining padding
            included; a longer row runs alone. Where attention stores its weights (eager attention), long rows take
            more memory than as many tokens in short ones, so choose it for the longest. Where rows also hold pictures,
            or sequences that keep their length, micro-batches have no more rows than with padding.
        cuda_graph: True records the forward and backward of a micro-batch as one CUDA graph and replays it, so that the
            host launches one graph instead of thousands of kernels; the first three batches run without. None does not,
            as long as this has not been measured on a GPU. What Python decides is that of the recorded
            micro-batch: ``training_step`` must depend on nothing but its batch, weights and random numbers of the
            device. Micro-batches of other shapes, or with padding where the recorded one had none, have graphs of
            their own, eight at most. Where a loss is divided by something else than was counted, a flag on the device
            makes the optimizer, which must be a fused one of torch, leave the step out, and the next step raises an
            error. Has run on a simulated CUDA driver only, which checks calls and memory, and no values.

    Raises:
        TypeError: n is not an integer; ``then`` holds an object that is not a technique; ``through`` is neither a name
            nor a class.
        ValueError: n is less than 1; ``then`` holds another kind of technique; in ``fit``: manual optimization, a
            strategy that accumulates by itself, ``"auto"`` with ``FSDP2Strategy``, or on several processes with a
            strategy other than DDP, or a step that communicates; a loss that can be split neither by itself nor at a
            backbone; with ``cuda_graph=True``: a device other than CUDA, several processes, accumulated batches, a loss
            scaler, hooks in the backward, and what else a replayed graph would leave out, by name.
        RuntimeError: with ``cuda_graph=True``: the step before was left out.
        torch.OutOfMemoryError: in ``fit``: nothing is left to try; with the missing memory, and further options.

    Example:
        >>> import lightning as L
        >>> import lightning_fasttrain as ft
        >>> fixed, fitting = MicroBatching(4), MicroBatching("auto", then=[ft.ActivationCheckpointing()])
        >>> trainer = L.Trainer(accelerator="cpu", callbacks=[fitting], logger=False,
        ...                     enable_checkpointing=False, enable_progress_bar=False)

    Source:
        See :func:`~lightning_fasttrain.accumulate_gradients`.
    """

    keeps_draws: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.SPLITS_BATCHES, Capability.TRIMS_PADDING})
    effect: ClassVar[str] = "only the activations of one micro-batch are in memory at a time, and padding does not run"
    when: ClassVar[str] = (
        "a batch does not fit, or much of it is padding; not with micro-batches so small that the GPU waits for work"
    )
    in_a_loop: ClassVar[str] = "accumulate_gradients(step, batch, n)"
    predicted: ClassVar[bool] = True
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        "accumulate_grad_batches": "n=, which splits each batch; TokenWeightedAccumulation sums several batches",
        "gradient_accumulation_steps": "n=, which splits each batch; TokenWeightedAccumulation sums several batches",
        **{"micro_batch_size": "n=, the number of micro-batches", "batch_size": "n=, the number of micro-batches"},
    }

    def __init__(
        self,
        n: PositiveInt | Literal["auto"] | None = None,
        count: Count = "auto",
        split: Callable[[Any, int], list[Any]] | None = None,
        check: bool = True,
        then: Sequence[Technique] = (),
        through: Through | None = None,
        trim_padding: bool | TrimPadding | None = None,
        max_tokens: PositiveInt | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        self.adaptive = n == "auto"
        self.cuda_graph = bool(cuda_graph)
        if cuda_graph and self.adaptive:
            why = "the search for a number that fits runs out of memory, where a graph cannot be recorded"
            raise ValueError(explain("cuda_graph=True with n='auto'", why, "Set the number that was found"))
        self.n = 1 if n is None or n == "auto" else n
        self.trimming = TrimSearch(trim_padding, check_budget(max_tokens, n))
        if split is not None and self.trimming.is_asked_for:
            what = "split= with max_tokens=" if max_tokens is not None else "split= with trim_padding=True"
            why = "rows are sorted by length, which only the suite's own split can do"
            raise ValueError(explain(what, why, "Leave split= out"))
        if split is not None and not callable(split):
            raise TypeError(explain(f"split={split!r}", "expected a function of a batch", "Give a function"))
        self.count: Count = named_count(count)
        self.split = split or split_batch
        self.check = check
        self.through = _refuse_what_is_no_name(through)
        self.then = list(then)
        self.savings = FurtherSavings(then)
        if then and not self.adaptive:
            why, way_out = "only n='auto' uses them", "List them among the callbacks, or use n='auto'"
            raise ValueError(explain(f"then={self.then} with n={n}", why, way_out))
        self.found: LossSplit | None = None
        self.found_before: CountRule | None = None
        self.parts = 0  # micro-batches of the last batch
        self.fitting = FittingSearch()

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "'auto' repeats batches that do not fit, and the other ranks would wait in a gather meanwhile"
        way_out = "Give a number, such as MicroBatching(8); predict_memory(strategy=..., world=...) says which fits"
        gathers = Conflict(Capability.GATHERS_PARAMETERS, why, way_out, lambda technique, _: technique.adaptive)
        why, way_out = "a replayed CUDA graph leaves it out", "Leave cuda_graph out"
        acts = Conflict(Capability.ACTS_IN_BACKWARD, why, way_out, lambda technique, _: technique.cuda_graph)
        return gathers, acts

    def does(self, capability: Capability) -> bool:
        if capability is Capability.TRIMS_PADDING:
            return self._trims
        return self._splits and super().does(capability)

    @property
    def _splits(self) -> bool:
        return self.adaptive or self.n > 1 or self.trimming.max_tokens is not None

    @property
    def _trims(self) -> bool:
        is_tried = self.check or self.trimming.wanted is True
        is_cut = self.split is split_batch and (self._splits or self.trimming.is_asked_for)
        return is_cut and is_tried and self.trimming.is_open

    def predict(self, step: PredictedStep) -> None:
        """Predict micro-batches with their padding: without it none is larger, and a later batch may have none."""
        if self.adaptive:
            step.notes.append("MicroBatching('auto') is predicted with the number of micro-batches it starts with.")
        if self._trims and (self.n > 1 or self.trimming.is_asked_for):
            step.split = lambda batch: self.trimming.list_largest(batch, self.n)
        elif self.n > 1 or self.trimming.max_tokens is not None:
            step.split = lambda batch: self.split(batch, self.trimming.count_parts(batch, self.n))

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        leave = BatchClosures.join(trainer, pl_module, micro=self)
        self.trimming.begin()
        if not self.adaptive:
            return leave
        # Techniques applied later must be compatible with the others: this is checked now, not during the run.
        check_together([*techniques_of(trainer), *self.savings.techniques], trainer.strategy)
        self.fitting = fitting_search_of(trainer)

        def undo() -> None:
            leave()
            self.savings.close()
            self.fitting.leave()
            self.fitting = FittingSearch()

        return undo

    def describe_effect(self, model: nn.Module) -> str:
        if self.trimming.max_tokens is not None:
            return f"micro-batches hold at most {self.trimming.max_tokens} tokens"
        parts = f"each batch runs in {number_of(self.n, 'micro-batch', 'micro-batches')}"
        if self.adaptive:
            return f"{parts}, in twice as many when memory runs out"
        return parts

    def exactness_on(self, model: nn.Module) -> Exactness:
        """Batch statistics are refused unless ``check=False`` accepts them."""
        if not self.check and any(list_batch_statistics(model)):
            return Exactness.CHANGES_TRAINING
        return self.exactness

    def outcome(self, model: nn.Module) -> str:
        found: list[str] = []
        if self.adaptive:
            found.append(f"batches fit with {number_of(self.n, 'micro-batch', 'micro-batches')}")
        if self.trimming.saved:
            found.append(f"{self.trimming.saved:.0%} of the tokens were padding that did not run")
        return "; ".join(found)

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        if self.trimming.wanted and self.trimming.padding is None and self.trimming.is_open:
            return f"no padding was found in the first batch ({LOOKED_FOR})", "Use TrimPadding(lengths=...)"
        if self.adaptive or self.parts > 1 or self.n == 1:
            return None
        if self.parts == 0:
            return "no batch was split", "Do not replace the closure of automatic optimization"
        return f"batches of one sample cannot be split into {self.n} micro-batches", "Use larger batches"

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the first one at which the model is complete."""
        if self.cuda_graph:
            refuse_run(trainer)
        if self.adaptive and trainer.world_size > 1:
            refuse_collectives(pl_module)
        if self._splits:
            refuse_static_graph(trainer, "MicroBatching")
        self.savings.try_on(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called after the checkpoint is loaded."""
        self.savings.take_again(pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: save the number of micro-batches and the counting rule that were found."""
        state: dict[str, Any] = {}
        if self.adaptive:
            state.update(n=self.n, then=self.savings.taken)
        if self.trimming.padding is not None:
            state["padding"] = self.trimming.padding.as_state()
        closures = replaced_closures(trainer)
        if isinstance(closures, BatchClosures) and closures.graphs is not None:
            closures.graphs.refuse_left_out()  # its batch is not in these weights
        checkpoint["MicroBatching"] = {**state, **rule_state(self.found and self.found.count)}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: start with the number of micro-batches and the counting rule of the checkpoint."""
        state = checkpoint.get("MicroBatching", {})
        if self.adaptive and "n" in state:
            self.n = positive_int("n", state["n"])
            # The run that wrote the checkpoint may have had a longer list.
            self.savings.taken = min(state.get("then", 0), len(self.savings.techniques))
        self.found_before = rule_in(state)
        if self.trimming.wanted is not False:
            self.trimming.padding = padding_in(state.get("padding", ()))


def _refuse_what_is_no_name(through: Through | None) -> Through | None:
    """Raises: TypeError: neither a name, nor a module class, nor several of these."""
    if through is None:
        return None
    names = as_list(through) if isinstance(through, Iterable) else [through]
    for name in names:
        is_class = isinstance(name, type) and issubclass(name, nn.Module)
        if not is_class and not (isinstance(name, str) and name):
            why = "expected the qualified name of a submodule, a pattern, a module class, or a list of these"
            raise TypeError(explain(f"through={through!r}", why, "Use through='encoder'"))
    if not names:
        raise ValueError(explain(f"through={through!r}", "it is empty", "Use through='encoder', or leave it out"))
    return through
