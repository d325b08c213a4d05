"""The base class of techniques, their joint application, their arguments, and the refusal of conflicts."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, ClassVar, Self, TypeVar, cast
from weakref import WeakSet

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_fasttrain.core.checks import (
    bind_arguments,
    check_arguments,
    find_place,
    list_untested,
    refuse_mixed_lightning,
    show,
)
from lightning_fasttrain.core.host.late_parameters import (
    refuse_all_frozen,
    refuse_earlier_shards,
    refuse_late_parameters,
)
from lightning_fasttrain.core.host.lightning import (
    after_configure_model,
    refuse_float16_on_cpu,
    refuse_second_stateful,
)
from lightning_fasttrain.core.messages import explain, note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique.declarations import (
    Capability,
    Conflict,
    Exactness,
    Facts,
    PredictedStep,
    Setting,
    Surgery,
    refuse_conflicts,
)
from lightning_fasttrain.technique.run_summary import RunSummary, leave_out_empty_hooks


def remember_arguments(cls: Any) -> None:
    """Let ``cls`` check its arguments against their annotations, and remember them as text.

    As text, since a reference to a teacher, say, would be copied with the technique.
    """
    make = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = bind_arguments(make, type(self).__name__, cls.ways_out, self, *args, **kwargs)
        given, named = bound.args, bound.kwargs  # in plain Python, and without defaults
        # A subclass that calls this __init__ has remembered its own arguments.
        if type(self).__init__ is __init__:
            self._given, self._settings = _describe_arguments(bound)
        make(*given, **named)

    cls.__init__ = __init__


def describe(made: object) -> str:
    """Return the call that made an object: without defaults, with modules and tensors by their class.

    Example:
        >>> from lightning_fasttrain.micro_batching import MicroBatching
        >>> describe(MicroBatching(4, count="samples"))
        "MicroBatching(n=4, count='samples')"
    """
    settings = getattr(made, "_settings", {})
    given = ", ".join(f"{name}={settings[name]}" for name in getattr(made, "_given", ()))
    return f"{type(made).__name__}({given})"


def settings_of(made: object) -> dict[str, str]:
    """Return each argument, defaults included, as text that is the same in every process.

    Example:
        >>> from lightning_fasttrain.micro_batching import TokenWeightedAccumulation
        >>> settings_of(TokenWeightedAccumulation(4))
        {'factor': '4', 'by': "'epoch'", 'count': "'auto'", 'check': 'True'}
    """
    return {name: _ADDRESS.sub("", words) for name, words in getattr(made, "_settings", {}).items()}


_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of a function, or of an object of a class that says nothing of itself


def _describe_arguments(bound: inspect.BoundArguments) -> tuple[tuple[str, ...], dict[str, str]]:
    given = tuple(bound.arguments)[1:]  # the first is self
    bound.apply_defaults()
    return given, {name: _in_words(value) for name, value in list(bound.arguments.items())[1:]}


def _in_words(value: object) -> str:
    if isinstance(value, nn.Module | Tensor):
        return type(value).__name__
    # Sorted, so that the words are the same in each process.
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    # A YAML file may turn 32 into 32.0, which is the same setting.
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    return repr(value)


def needs_an_object(hook: _Hook) -> _Hook:
    """Make a hook refuse to be called on the class, as Lightning does if a list of callbacks holds a class."""

    @functools.wraps(hook)
    def called(self: object, *args: object, **kwargs: object) -> Any:
        if isinstance(self, L.Trainer):
            names = [callback.__name__ for callback in self.callbacks if isinstance(callback, type)]
            way_out = f"Use {', '.join(f'{name}(...)' for name in names)}"
            raise TypeError(explain(f"callbacks=[{', '.join(names)}]", "expected objects, got classes", way_out))
        return hook(self, *args, **kwargs)

    return cast(_Hook, called)


class Technique(L.Callback):
    """One way to train faster or in less memory: a Lightning callback that can also act without a Trainer.

    A subclass says what it is in class attributes and overrides one or both of two methods: :meth:`apply`, for
    what is done to a model, and :meth:`attach`, for what is done to a Trainer. Each returns how to undo it. This
    class does the rest: it acts once, in the suite's own order, after ``configure_model`` and before the optimizer
    exists, on every entry point of the Trainer, and undoes everything at teardown or when the run fails.

    Attributes:
        exactness: its class of agreement with the plain run.
        bound: maximum relative error of loss and gradients of a float32 step, for the class tolerance.
        bitwise: whether the values of a step are bitwise those of the plain step.
        keeps_draws: whether random layers, such as dropout, draw the same numbers as in the plain step.
        capabilities: effects that conflicts of other techniques name; :meth:`does` is asked of an object.
        surgery: its place in the order of surgery; None, with :meth:`apply` not overridden, if it changes no model.
        effect: one line for the table of techniques.
        when: when it pays, and when not, in half a sentence.
        in_a_loop: what to call in a Fabric or bare loop.
        predicted: whether :meth:`predict` describes everything it changes about a step's memory.
        worth_trying: settings that the planner looks at; subclasses bring their own.
        names_elsewhere: another library's name of an argument → how ours is written, for the error that answers it.
        ways_out: by argument, what to do instead of a wrong value, where more can be said than what was expected.
        acting: whether a Trainer or :func:`apply` ever put it to use.
    """

    exactness: ClassVar[Exactness] = Exactness.EXACT
    bound: ClassVar[float] = 0.0
    bitwise: ClassVar[bool] = False
    keeps_draws: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    surgery: ClassVar[Surgery | None] = None
    effect: ClassVar[str] = ""
    when: ClassVar[str] = ""
    in_a_loop: ClassVar[str] = "apply(model, [...])"
    predicted: ClassVar[bool] = False
    worth_trying: ClassVar[tuple[Setting, ...]] = ()
    names_elsewhere: ClassVar[Mapping[str, str]] = {}
    ways_out: ClassVar[Mapping[str, str]] = {}

    acting: bool = False
    _undo: ExitStack | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            remember_arguments(cls)  # once for each __init__: one that is inherited is wrapped already

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Not when the class is made: one that others inherit from may leave its place to them.
        calls_apply = cls.surgery is not None or cls.attach is not Technique.attach
        if cls.apply is not Technique.apply and not calls_apply:
            why = "what operates on the model does so at its place in the suite's order, so it would never be called"
            way_out = "Set surgery = Surgery.ADAPT, or another place that Surgery lists, beside it"
            raise TypeError(explain(f"{cls.__name__} has apply(), but neither surgery nor attach()", why, way_out))
        return super().__new__(cls)

    def __repr__(self) -> str:
        return describe(self)

    @property
    def state_key(self) -> str:
        """Its name among the states in a checkpoint, which is that of its class."""
        refuse_second_stateful(self)
        return super().state_key

    def does(self, capability: Capability) -> bool:
        """Whether it has this capability with its current settings."""
        return capability in self.capabilities

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        """Declare what it cannot be combined with; each pair is declared once, by the one that knows the other."""
        return ()

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        """Return why it cannot, or need not, act there; None if it may be worth trying."""
        return None

    def apply(self, model: nn.Module) -> Undo | None:
        """Operate on ``model`` in place; return how to undo it, or None if it cannot be undone."""
        why = "this technique acts in the training loop, not on the model"
        way_out = f"In a Fabric or bare loop call {self.in_a_loop}"
        raise TypeError(explain(f"apply(model, [{type(self).__name__}])", why, way_out))

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        """Attach to ``trainer`` before the model is configured; return how to detach, if anything is to be undone."""
        return None

    def predict(self, step: PredictedStep) -> "Technique | None":
        """Write its changes into ``step``; return the technique to apply to the predicted model, if any."""
        return self if self.surgery is not None else None

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        """Return, after the first training batch, why it had no effect and what to do; None if it had one."""
        return None

    def describe_effect(self, model: nn.Module) -> str:
        """Return half a sentence on what it acts on, for the start of a run; "" if its arguments say enough."""
        return ""

    def exactness_on(self, model: nn.Module) -> Exactness:
        """Return its exactness on this model with its settings; by default that of its class."""
        return self.exactness

    def outcome(self, model: nn.Module) -> str:
        """Return half a sentence on its fall-backs and findings, for the end of a run; "" if there are none."""
        return ""

    def count_windows(self, batches: int, epoch: int, before: int) -> int | None:
        """Return its number of optimizer steps in an epoch; None to step as the Trainer is set.

        Args:
            batches: number of batches in the epoch.
            epoch: index of the epoch.
            before: number of optimizer steps before it.
        """
        return None

    def measurements(self) -> Mapping[str, float]:
        """Return its measurements of a run, out of ``step_ms``, ``tokens_per_s``, ``mfu`` and ``peak_bytes``."""
        return {}

    @needs_an_object
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: Lightning's earliest. The first technique of the list acts for all, so that order is ours."""
        refuse_mixed_lightning(trainer, pl_module, *trainer.callbacks)
        techniques = techniques_of(trainer)
        check_together(techniques, trainer.strategy, trainer.callbacks)
        if self is not techniques[0]:
            return
        self._close()
        refuse_earlier_shards(pl_module, trainer.strategy)
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyObserver):
                callback.look(trainer, pl_module)
        self._undo = undo = ExitStack()
        if stage == "fit":
            refuse_float16_on_cpu(trainer)
            divides = trainer.accumulate_grad_batches > 1  # before a technique that does not divide changes it
            undo.callback(RunSummary(self, techniques, divides).install())
        for technique in techniques:
            technique.acting = True
            _push(undo, technique.attach(trainer, pl_module))
            leave_out_empty_hooks(technique, undo)  # after attach, which may give the technique a hook
        with_surgery = [technique for technique in techniques if technique.surgery is not None]

        def operate() -> None:
            undo.enter_context(apply(pl_module, with_surgery))  # on the stack of the run, which undoes the last first
            if stage == "fit":
                refuse_all_frozen(pl_module)

        after_configure_model(pl_module, undo, operate)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: the last one of a run that ended well."""
        if stage == "fit" and self._undo is not None and trainer.num_training_batches == 0:
            warn("fit trained nothing: the training loader is empty. Check the dataset and its filters.")
        self._close()

    @needs_an_object
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: the only one that is called when a run fails."""
        self._close()

    def on_after_setup(self, fabric: L.Fabric | None = None, module: nn.Module | None = None) -> None:
        """Hook of Fabric: refuse a technique in its list of callbacks, where it would never act."""
        name = type(self).__name__
        why = "Fabric calls none of the hooks in which techniques act, so nothing would happen"
        way_out = f"Leave it out, and call {self.in_a_loop}"
        if self.surgery is not None:
            way_out = f"Leave it out, and before fabric.setup call apply(model, [{name}(...)])"
        raise TypeError(explain(f"Fabric(callbacks=[{name}])", why, way_out))

    def _close(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()

    def __getstate__(self) -> dict[str, Any]:  # spawned processes get the technique, never its live patches
        runs = self._undo is not None  # what the run has put for hooks acts for this object alone
        kept = {name: value for name, value in vars(self).items() if not (runs and name.startswith("on_"))}
        return {**kept, "_undo": None}


class EarlyObserver(L.Callback):
    """A callback that looks at model and Trainer while they are as the user made them, before any technique acts."""

    def look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the run. Called by the first technique and by :meth:`setup`, so possibly twice."""

    @needs_an_object
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: Lightning's earliest, for runs without techniques."""
        self.look(trainer, pl_module)


def techniques_of(trainer: L.Trainer) -> list[Technique]:
    """Return the techniques among a Trainer's callbacks, in the user's order."""
    return [callback for callback in trainer.callbacks if isinstance(callback, Technique)]


def find_with_surgery(techniques: Iterable[Technique], step: PredictedStep) -> list[Technique]:
    """Return the techniques that operate on a predicted model; each writes into ``step`` what it changes about it."""
    with_surgery: list[Technique] = []
    for technique in techniques:
        with suppress(ValueError):  # one that decides by measuring cannot be predicted
            surgeon = technique.predict(step)
            with_surgery += [] if surgeon is None else [surgeon]
    return with_surgery


def predict_window(techniques: Iterable[Technique]) -> int:
    """Return the number of batches that techniques combine into one optimizer step; 1 if they combine none."""
    planned = PredictedStep()
    find_with_surgery(techniques, planned)
    return planned.window


@check_arguments
def apply(model: nn.Module, techniques: Iterable[Technique]) -> ExitStack:
    """Operate on ``model`` in place with all ``techniques``, in the suite's order; for Fabric and bare loops.

    Call it before the optimizer is made and before ``fabric.setup``. Applying twice is the same as once.

    Args:
        model: any module.
        techniques: in any order.

    Returns:
        A stack that undoes everything: call ``.close()``, or use it in a ``with``, or ignore it.

    Raises:
        ValueError: one technique twice, or two that do not go together.
        TypeError: a technique that acts in the training loop; the message names the function to call there.
        RuntimeError: new parameters train and Fabric has set the model up already. Where only the optimizer was made
            before, its tenth step raises it; its second, if all its parameters are frozen by then.

    Example:
        >>> import lightning_fasttrain as ft
        >>> net = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2)])
        >>> with ft.apply(net, [ft.ActivationCheckpointing()]):
        ...     "forward" in vars(net[0])
        True
        >>> "forward" in vars(net[0])
        False
    """
    techniques = check_together(techniques)
    refuse_mixed_lightning(*techniques)
    what = f"apply(model, [{', '.join(type(t).__name__ for t in techniques)}])"
    _operated.add(model)
    with ExitStack() as undo:  # takes back what was done so far, if a technique raises
        with refuse_late_parameters(model, what) as end_watch:
            for technique in sorted(techniques, key=lambda t: t.surgery or 0):
                technique.acting = True
                _push(undo, technique.apply(model))
        undo.callback(end_watch)
        return undo.pop_all()


_operated: WeakSet[nn.Module] = WeakSet()  # not a mark on the model, which its copies would carry


def is_operated_on(model: object) -> bool:
    """Whether a Trainer or :func:`apply` ever operated on a model."""
    return model in _operated


def _push(undo: ExitStack, action: Undo | None) -> None:
    if action is not None:
        undo.callback(action)


@check_arguments
def check_together(
    techniques: Iterable[Technique], strategy: Strategy | None = None, callbacks: Sequence[L.Callback] = ()
) -> list[Technique]:
    """Return techniques as a list; refuse one that is listed twice, and those that conflict with anything in use.

    Args:
        techniques: all techniques of the run.
        strategy, callbacks: those of the Trainer, if there is one.

    Raises:
        TypeError: not a list of techniques.
        ValueError: what conflicts · why · the cheapest way out.
    """
    listed = list_techniques(techniques)
    for sentence in list_untested():
        note_once(sentence)
    for first, second in itertools.combinations(listed, 2):
        if type(first) is type(second):
            _refuse_twice(f"{type(first).__name__} is listed twice")
    for technique in listed:
        refuse_conflicts(technique, technique.conflicts(), [*listed, strategy, *callbacks])
    # After the conflicts, which know more: why the two do not go together, and a better way out.
    for first, second in itertools.permutations(listed, 2):
        if isinstance(first, type(second)):
            _refuse_twice(f"{type(first).__name__} + {type(second).__name__}, which it is a kind of")
    return listed


def list_techniques(techniques: object) -> list[Technique]:
    """Return ``techniques`` as a list; a TypeError says what else was given."""
    if isinstance(techniques, Technique):
        why = "expected a list, got one technique"
        raise TypeError(explain(f"techniques={techniques}", why, f"Use [{techniques}]"))
    if not isinstance(techniques, Iterable):
        why = f"expected a list of techniques, got {type(techniques).__name__}"
        raise TypeError(explain(f"techniques={techniques!r}", why, "Use a list, as [MicroBatching(4)]"))
    listed = list(techniques)
    for one in listed:
        if not isinstance(one, Technique):
            way_out = find_place(one) or "Give objects, as MicroBatching(4)"
            if isinstance(one, type):
                way_out = f"Make one: {one.__name__}(...)"
            elif isinstance(one, L.Callback) and not find_place(one):
                way_out = "List it in Trainer(callbacks=[...]), or return it from configure_callbacks"
            raise TypeError(explain(f"{show(one)} among techniques", "expected a Technique", way_out))
    return listed


def _refuse_twice(what: str) -> None:
    raise ValueError(explain(what, "both would act on the same thing", "Remove one of them"))


def conflict_with_early_averages(what: str) -> Conflict:
    """Return the conflict of a technique that adds parameters with ``StochasticWeightAveraging``.

    Args:
        what: the addition, such as "the adapter is added".
    """
    return Conflict(StochasticWeightAveraging, f"it copies the model before {what}", "Use WeightAveraging")


def refuse_average_before(trainer: L.Trainer, name: str, what: str) -> None:
    """Refuse a ``WeightAveraging`` callback before the first technique, since it would copy the model too early."""
    for callback in trainer.callbacks:
        if isinstance(callback, Technique):
            return
        if isinstance(callback, WeightAveraging):
            why = f"it copies the model before {what}"
            raise ValueError(explain(f"{type(callback).__name__} before {name}", why, f"List it after {name}"))
