"""Record the forward and backward of a micro-batch as one CUDA graph, and replay it for the others.

A micro-batch of a small model costs the host thousands of kernel launches, and the device waits for them. A graph
costs one. It repeats what was recorded: the values of the micro-batch and its weight are copied into the places that
were recorded, and its loss, and the values that it logs, are copied out of theirs. Gradients are added up in one
buffer for each parameter.

What Python decided when the graph was recorded is repeated too. So masks are decided by the values that are known on
the host (:mod:`~lightning_fasttrain.core.host.host_answers`), and micro-batches of which other things are known there
have another graph; what cannot be repeated is refused.
"""

import dis
import inspect
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric

from lightning_fasttrain.core.batch.host_copies import forget_on_host, host_values, keep_on_host, noting_reads
from lightning_fasttrain.core.batch.leaves import list_leaves, walk_leaves
from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.core.host.lightning import call_strategy, replicates
from lightning_fasttrain.core.host.optimizer_steps import skip_on_device, stop_skipping, unwrap_optimizer
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.wrapped_forward import (
    WrappedForward,
    has_dropout,
    is_compiled,
    is_replayed,
    wrappers_in,
)
from lightning_fasttrain.micro_batching.micro_batch_logging import BatchLogs
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit
from lightning_fasttrain.micro_batching.normalizer.step_weights import MicroBatchWeights, StepWeights
from lightning_fasttrain.trial.read_normalizers import Number
from lightning_fasttrain.trial.runs import loss_of

_WAY_OUT = "Leave cuda_graph out"
_MOST_GRAPHS = 8  # each keeps its inputs; activations share one pool of memory
_PLAIN = (str, bytes, int, float, type(None))
_FIRST_BATCHES = 3  # run as before: the split is found, code compiled and checked, the optimizer's state made

Forward = Callable[[Any, int], tuple[Tensor, Any]]


def refuse_off_cuda(device: torch.device) -> None:
    """Raises: ValueError: the step does not run on a CUDA device."""
    if device.type != "cuda":
        why = "only a CUDA device replays graphs"
        raise ValueError(explain(f"cuda_graph=True on {device.type}", why, _WAY_OUT))


def refuse_graphs(modules: Sequence[nn.Module], optimizer: Optimizer | None, split: LossSplit) -> None:
    """Refuse what a replayed graph would leave out, or what cannot be recorded.

    Args:
        modules: the modules that the step runs.
        optimizer: the optimizer of the step, which must skip a step by a flag on the device; None where the flag is
            read before a step.
        split: how the loss is split.

    Raises:
        ValueError: names it.
    """
    hooked = next((name for module in modules for name in _list_hooked(module)), None)
    refused = [
        (hooked is not None, f"a hook on '{hooked}'", "a replayed graph does not call it", _WAY_OUT),
        (
            any(map(is_replayed, modules)),
            "blocks that are replayed as CUDA graphs",
            "a graph cannot be recorded inside of another",
            "Use CompileBlocks() in its default mode",
        ),
        (
            any(is_compiled(module) and has_dropout(module) for module in modules),
            "compiled blocks with dropout",
            "where they are recomputed, each replay could draw the recorded numbers again",
            "Set dropout to 0, or leave cuda_graph out",
        ),
        (
            optimizer is not None and not _is_fused(optimizer),
            type(optimizer).__name__,
            "a step with a wrong weight is left out by a flag on the device, which only fused optimizers read",
            "Use torch.optim.AdamW(..., fused=True)",
        ),
        (split.is_sum, "a loss that is a sum", "what it logs cannot be told from means in a graph", _WAY_OUT),
        (
            split.read is not None and split.count is None,
            f"micro-batches weighted by {split}",
            "their weight must be known before they run, and no count of targets or samples gives it",
            "Give count=, such as count='targets'",
        ),
    ]
    for applies, what, why, way_out in refused:
        if applies:
            raise ValueError(explain(f"cuda_graph=True with {what}", why, way_out))


def _list_hooked(model: nn.Module) -> Iterator[str]:
    """List modules and parameters with hooks that are not of this package."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    kinds = (*kinds, "_post_accumulate_grad_hooks")
    for name, one in (*model.named_modules(), *model.named_parameters()):
        for kind in kinds:
            for hook in (getattr(one, kind, None) or {}).values():
                if kind.startswith(("_backward", "_post")) or not _is_own(hook):
                    yield name


def _is_own(hook: Any) -> bool:
    return getattr(hook, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def _is_fused(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim") and all(
        group.get("fused") for group in optimizer.param_groups
    )


@dataclass
class _Graph:
    """One recorded micro-batch.

    Attributes:
        graph: the CUDA graph.
        inputs: the recorded inputs, by path.
        weight: the number that its loss is multiplied by, and what the loss should be divided by, up to a constant.
        loss: its loss.
        kept: what else it leaves behind.
        facts: what is known of the inputs whose values were read on the host, by path.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    weight: Tensor
    loss: Tensor
    kept: Any
    facts: dict[str, object]

    def repeats(self, leaves: dict[str, Any]) -> bool:
        """Whether Python would decide for these leaves what it decided for the recorded ones."""
        return all(_list_facts(leaves[path]) == facts for path, facts in self.facts.items())


class MicroBatchGraphs:
    """The CUDA graphs of the micro-batches of a run.

    Args:
        modules: the modules that the step runs.
        parameters: the parameters that are trained.
        device: the CUDA device.

    Attributes:
        mismatch: 1 where a micro-batch of the step had another normalizer than was counted; on the device.
        replays: number of micro-batches that were replayed.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Iterable[Tensor], device: torch.device) -> None:
        # Weak: what is kept for a step function must not keep its model, nor memory once the model is gone.
        self._modules, self._parameters = list(map(weakref.ref, modules)), list(map(weakref.ref, parameters))
        self.mismatch = torch.zeros((), device=device)
        self.replays = 0
        self._batches = 0
        self._is_open = False
        self._compares = False  # whether the graphs read a normalizer, which may be another than was counted
        self._table = self.mismatch  # the weights of this batch
        self._recorded_with: Any = None
        self._gradients: Any = WeakTensorKeyDictionary()  # parameter → the buffer that the graphs add to
        self._graphs: dict[Any, list[_Graph]] = {}  # by the shapes of a micro-batch
        for module in modules:
            weakref.finalize(module, self._graphs.clear)
        self._pool: Any = None
        self._factors: tuple[Number, ...] | None = None
        self._unread: AsyncReading | None = None  # the mismatch of the last step

    def begin_batch(self, weights: StepWeights) -> None:
        """Put the gradients of this batch where the graphs add to them; the first batches run without graphs."""
        self._batches += 1
        known = weights.known
        is_counted = known is not None and (isinstance(known.total, Tensor) or known.total > 0)
        self._is_open = self._batches > _FIRST_BATCHES and is_counted and not self._is_undecided()
        if known is None or not self._is_open:
            return
        self.mismatch.zero_()
        self._table = known.table_on(self.mismatch.device)
        now = [weights.split, *self._read_modules()]
        if now != self._recorded_with:
            self._graphs.clear()
            self._gradients.clear()
            self._recorded_with, self._factors = now, None
            self._pool = torch.cuda.graph_pool_handle()  # one without graphs is gone
        unset: list[Tensor] = []
        for parameter, buffer in self._gradients.items():
            if parameter.grad is None:
                unset.append(buffer)
            elif parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if unset:
            torch._foreach_zero_(unset)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules, as far as they still exist."""
        return list(filter(None, (reference() for reference in self._modules)))

    def _is_undecided(self) -> bool:
        """Whether a technique still measures the modules, and may change them."""
        wrappers = (wrapper for module in self.modules for wrapper in wrappers_in(module, WrappedForward))
        return any(wrapper.is_undecided or wrapper.is_measuring for wrapper in wrappers)

    def _read_modules(self) -> list[object]:
        """Return what a graph depends on: where tensors lie, which are trained, modes, and wrapped forwards."""
        found: list[object] = []
        for module in self.modules:
            for tensor in (*module.parameters(), *module.buffers()):
                found += [tensor.data_ptr(), tensor.requires_grad]
            for one in module.modules():
                found += [one.training, id(one.__dict__.get("forward"))]
        return found

    def run(
        self, part: Any, i: int, weights: StepWeights, forward: Forward, backward: Callable[[Tensor], object]
    ) -> _Graph | None:
        """Add the gradient of a micro-batch, and return the graph that did; None if it has to run without one.

        Args:
            part: the micro-batch.
            i: its index.
            weights: the weights of the step, to which its loss is added.
            forward: maps a micro-batch and its index to its loss and what else it leaves behind; called to record it.
            backward: adds the gradient of a weighted loss; called to record it.
        """
        if not self._is_open:
            return None
        if not self._gradients:
            if i == 0:
                return None  # it shows which parameters have a gradient
            for reference in self._parameters:
                parameter = reference()
                if parameter is not None and parameter.grad is not None:
                    self._gradients[parameter] = parameter.grad
        leaves = list_leaves(part)
        key = _key_of(leaves)
        graph = next((one for one in self._graphs.get(key, []) if one.repeats(leaves)), None)
        if graph is None:
            if sum(map(len, self._graphs.values())) == _MOST_GRAPHS:
                note_once(f"MicroBatching: micro-batches of more than {_MOST_GRAPHS} kinds run without a CUDA graph")
                return None
            graph = self._record(part, i, weights.split, forward, backward)
            self._graphs.setdefault(key, []).append(graph)
        for path, static in graph.inputs.items():
            static.copy_(leaves[path], non_blocking=True)
        graph.weight.copy_(self._table[i])
        graph.graph.replay()
        self.replays += 1
        weights.losses.append(graph.loss.clone())
        weights.held.append(i)
        return graph

    def _record(
        self, part: Any, i: int, split: LossSplit, forward: Forward, backward: Callable[[Tensor], object]
    ) -> _Graph:
        """Record a micro-batch. Raises: ValueError: it cannot be recorded, or would not be repeated exactly."""
        inputs: dict[str, Tensor] = {}

        def keep(leaf: Any, path: str) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            inputs[path] = leaf.clone()
            values = host_values(leaf)
            if values is not None:
                keep_on_host(inputs[path], values.clone())
            return inputs[path]

        static = walk_leaves(part, keep, "batch")
        weight, graph, before = self._table[i].clone(), torch.cuda.CUDAGraph(), _random_state()
        try:
            # Threads that load data may pin memory meanwhile.
            recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with recording, noting_reads() as reads:
                loss, kept = forward(static, i)
                inner = StepWeights(split, [static], known=MicroBatchWeights.of_row(weight))
                backward(inner.scale_loss(loss, 0))
                self._note_mismatch(inner)
                loss = loss.detach()
        except RuntimeError as error:
            why = f"this step cannot be recorded as a CUDA graph: {str(error).splitlines()[0]}"
            raise ValueError(explain("cuda_graph=True", why, _WAY_OUT)) from error
        for one in inputs.values():
            forget_on_host(one)  # other values are copied into it
        self._refuse_recorded(inner, loss, has_drawn=_random_state() != before)
        facts: dict[str, object] = {}
        for path, one in inputs.items():
            if any(one is read for read in reads):
                facts[path] = _list_facts(list_leaves(part)[path])
        return _Graph(graph, inputs, weight, loss, kept, facts)

    def _note_mismatch(self, inner: StepWeights) -> None:
        mismatch = inner.compare()
        if mismatch is not None:
            self._compares = True
            self.mismatch.copy_(torch.maximum(self.mismatch, mismatch.to(self.mismatch.dtype)))

    def _refuse_recorded(self, inner: StepWeights, loss: Tensor, has_drawn: bool) -> None:
        """Raises: ValueError: what was recorded would not be repeated exactly."""
        readings = inner.readings
        factors = readings[0].factors if readings else ()
        self._factors = factors if self._factors is None else self._factors
        on_device = any(isinstance(factor, Tensor) for factor in factors)
        several = on_device or any(reading.others for reading in readings)
        refused = [
            (has_drawn, "the step draws random numbers on the host, which a replayed graph would repeat"),
            (loss.dtype == torch.float64, "the loss is in float64, and weights in float32"),
            (several, "the loss has several normalizers, or a factor that the host does not know"),
            (not several and factors != self._factors, "the factors of the loss differ between micro-batches"),
        ]
        for applies, why in refused:
            if applies:
                raise ValueError(explain("cuda_graph=True", why, _WAY_OUT))

    def guard_step(self, optimizer: Any) -> None:
        """Have a fused optimizer leave out the coming step if the weights of its micro-batches were wrong.

        The host learns of it in the next step, before the weights change again, so that it need not wait now.

        Raises:
            RuntimeError: the step before was left out.
        """
        self.refuse_left_out()
        if self._is_open and self._compares:
            self._unread = AsyncReading(self.mismatch)
            skip_on_device(optimizer, self.mismatch)

    def refuse_left_out(self) -> None:
        """Raises: RuntimeError: the last step was left out, since weights of its micro-batches were wrong."""
        unread, self._unread = self._unread, None
        if unread is not None and unread.wait():
            why = "the loss of a batch is divided by something else than was counted, so its update was left out"
            way_out = "Resume from the last checkpoint without cuda_graph, which finds another split for such a batch"
            raise RuntimeError(explain("MicroBatching(cuda_graph=True)", why, way_out))

    def close(self) -> None:
        """Free the graphs. Raises: RuntimeError: the last step was left out."""
        self._graphs.clear()
        self._gradients.clear()
        self.refuse_left_out()

    def has_mismatch(self) -> bool:
        """Whether weights of this batch's micro-batches were wrong; waits for the device."""
        return self._is_open and self._compares and bool(AsyncReading(self.mismatch).wait())


def _key_of(leaves: dict[str, Any]) -> Any:
    """Return the shapes of a micro-batch, and its leaves that are no tensors.

    Raises:
        ValueError: a leaf may hold tensors that no graph would be given.
    """
    key: list[Any] = []
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            held = leaf if isinstance(leaf, list | tuple) else [leaf]
            if not all(isinstance(one, _PLAIN) for one in held):
                why = "what lies in such an object cannot be copied into a graph"
                raise ValueError(explain(f"cuda_graph=True with {path}, a {type(leaf).__name__}", why, _WAY_OUT))
            key.append((path, repr(leaf)))
            continue
        key.append((path, leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
    return tuple(key)


def _list_facts(leaf: Tensor) -> tuple[bool, bool] | None:
    """Return whether a mask hides nothing, and whether positions never start anew, if the host knows.

    Other attention kernels run otherwise.
    """
    values = host_values(leaf)
    if values is None:
        return None
    return bool(values.all()), bool((values.long().diff(dim=-1) == 1).all())


def _random_state() -> Any:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


class RunGraphs:
    """The graphs of a Trainer's run, and what a replayed micro-batch returns and logs.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self._graphs: MicroBatchGraphs | None = None
        self._optimizer: Any = None

    def replay_of(
        self,
        weights: StepWeights,
        logs: BatchLogs,
        outputs: list[Any],
        rest: Sequence[Any],
        optimizer: Optimizer,
        backward: Callable[[Tensor], object],
    ) -> Callable[[Any, int], bool]:
        """Begin a batch, and return what replays a micro-batch of it, as ``add_gradients`` calls it.

        Raises:
            ValueError: the run has something that graphs cannot repeat.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        if self._graphs is None:
            self._optimizer = unwrap_optimizer(optimizer)
            refuse_graphs([module], self._optimizer, weights.split)
            self._graphs = MicroBatchGraphs([module], module.parameters(), trainer.strategy.root_device)
        graphs = self._graphs
        stop_skipping(self._optimizer)
        graphs.begin_batch(weights)

        def forward(part: object, i: int) -> tuple[Tensor, Any]:
            logs.part = i
            output = call_strategy(trainer, "training_step", part, *rest)
            if output is None:
                raise RuntimeError("training_step returned None")
            logs.note_output(output)
            return loss_of(output), (apply_to_collection(output, Tensor, Tensor.detach), logs.take(i))

        def replay(part: Any, i: int) -> bool:
            graph = graphs.run(part, i, weights, forward, backward)
            if i == len(logs.parts) - 1:
                graphs.guard_step(self._optimizer)
            if graph is None:
                return False
            output, calls = graph.kept
            outputs.append(apply_to_collection(output, Tensor, torch.clone))
            logs.give(calls, i)
            return True

        return replay

    def refuse_left_out(self) -> None:
        """Raises: RuntimeError: the last step was left out."""
        if self._graphs is not None:
            self._graphs.refuse_left_out()

    def close(self) -> None:
        """Free the graphs. Raises: RuntimeError: the last step was left out."""
        if self._graphs is not None:
            stop_skipping(self._optimizer)
            graphs, self._graphs = self._graphs, None
            graphs.close()


def refuse_run(trainer: L.Trainer) -> None:
    """Refuse a Trainer that does more between micro-batches than a graph repeats.

    Raises:
        ValueError: names it.
    """
    refuse_off_cuda(trainer.strategy.root_device)
    module, precision = trainer.lightning_module, trainer.strategy.precision_plugin
    watching = list(filter(_watches_backward, [module, *trainer.callbacks]))
    has_metric = any(isinstance(one, Metric) for one in module.modules())
    in_python = "it acts between the micro-batches of a step, in Python"
    refused = [
        (
            trainer.world_size > 1 or not replicates(trainer.strategy),
            type(trainer.strategy).__name__,
            "other processes or an engine take part in the backward",
            _WAY_OUT,
        ),
        (trainer.accumulate_grad_batches > 1, "accumulate_grad_batches", in_python, "Use larger batches"),
        (
            getattr(precision, "scaler", None) is not None,
            "a loss scaler",
            "it takes the flag by which a wrong step is left out for an overflow",
            "Use precision='bf16-mixed'",
        ),
        (bool(watching), type(next(iter(watching), None)).__name__, in_python, "Remove it, or leave cuda_graph out"),
        (has_metric, "a torchmetrics object", "it is updated in Python", "Log the value instead"),
        (
            _reads_index(type(module).training_step),
            "a training_step that reads batch_idx",
            "a replayed graph would repeat what it decided for one batch",
            "Read it in on_train_batch_start",
        ),
        (is_overridden("backward", module), f"{type(module).__name__}.backward", in_python, _WAY_OUT),
    ]
    for applies, what, why, way_out in refused:
        if applies:
            raise ValueError(explain(f"MicroBatching(cuda_graph=True) with {what}", why, way_out))


def _reads_index(training_step: Any) -> bool:
    code = inspect.unwrap(training_step).__code__
    names = set(code.co_varnames[2 : code.co_argcount])
    return any(
        one.opname.startswith("LOAD") and not names.isdisjoint(one.argrepr.split(", "))
        for one in dis.get_instructions(code)
    )


def _watches_backward(one: Any) -> bool:
    base = L.LightningModule if isinstance(one, L.LightningModule) else L.Callback
    hooks = ("on_before_backward", "on_after_backward")
    return any(getattr(type(one), hook) is not getattr(base, hook) for hook in hooks)
