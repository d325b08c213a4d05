"""Find techniques by name or by what they are for, and show what each states about itself, without importing it.

``technique_cards.json`` has the cards, written from the classes by ``docs/describe_techniques.py``; so no card waits
for torch.
"""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

import yaml

from lightning_fasttrain.core.messages import ReportTable, explain, output_width, wrap

FILE = "technique_cards.json"
_CODE = ("Trainer", "mixin", "loop", "YAML")  # lines of a card that are not to be broken

# Words of the field, without spaces and dashes → techniques, the first to try first.
_MEMORY = "MicroBatching ActivationCheckpointing FusedLossHead EagerGradientRelease OptimizerInBackward QLoRA"
_SPEED = "CompileBlocks FusedLossHead MicroBatching DevicePrefetch MatmulPrecision ChannelsLast AttentionBackend"
_ADAPTERS = "LoRA QLoRA Adapter IA3 PromptTuning PrefixTuning"
_SYNONYMS = {
    "accumulation gradientaccumulation accumulategradbatches largebatch": (
        "MicroBatching TokenWeightedAccumulation GlobalBatch BatchSizeWarmup"
    ),
    "gradientcheckpointing activationcheckpoint recompute recomputation remat": "ActivationCheckpointing TiledMLP",
    "mixedprecision amp bf16 fp16 lowprecision": "FusedClipping MatmulPrecision LowPrecisionProducts",
    "fp8 float8 int8": "LowPrecisionProducts QuantizedBase",
    "tf32": "MatmulPrecision",
    "ema swa weightaveraging averaging": "WeightEMA",
    "packing pack padding varlen": "MicroBatching PaddingFree",
    "offload cpuoffload": "ActivationOffload",
    "flashattention flash sdpa attention": "AttentionBackend",
    "quantization quantize 4bit 8bit nf4 bitsandbytes": "QuantizedBase QLoRA",
    "peft adapters finetuning finetune": _ADAPTERS,
    "outofmemory oom memory lessmemory": f"{_MEMORY} ActivationOffload TiledMLP",
    "slow speed faster throughput": _SPEED,
    "dataloading loader dataloader prefetching": "DevicePrefetch SampleGuard EvenEpochs",
    "clipping gradientclipping": "FusedClipping AdaptiveClipping WeightClipping",
    "cudagraphs cudagraph torchcompile inductor": "CompileBlocks",
    "nan inf divergence lossspike spike": "FiniteGuard SpikeGuard",
    "spot preemptible slurm signal": "Preemption AtomicCheckpoints ExactResume",
    "hang deadlock stuck": "HangWatch",
    "resume checkpointing checkpoints": "ExactResume AtomicCheckpoints Preemption",
    "distill kd knowledgedistillation teacher": "Distillation",
    "moe mixtureofexperts experts": "Upcycling MixtureOfDepths",
    "droppath layerdrop": "StochasticDepth",
    "freezing freeze unfreezing": "GradualUnfreezing FrozenCache",
    "chunkedloss crossentropy logits vocabulary largevocabulary": "FusedLossHead",
    "profiler profiling mfu throughputmonitor": "StepMeter MemoryMeter MemoryTimeline",
    "criticalbatchsize": "GradientNoiseScale",
}
# What is no technique, but is looked for among them.
_ELSEWHERE = {
    "zero deepspeed": "ZeRO is a strategy: Trainer(strategy=ft.ZeROStrategy('auto')); `fasttrain shard` compares",
    "fsdp fsdp2 ddp sharding shard distributed tensorparallel contextparallel": (
        "sharding is a strategy: Trainer(strategy=ft.FSDP2Strategy()); `fasttrain shard` compares"
    ),
    "optimizer optimizers adamw muon lion 8bitoptimizer": "optimizers are built by name: ft.build_optimizer",
    "schedule scheduler warmup learningrate": "schedules are built by name: ft.build_schedule (fasttrain schedule)",
}


@dataclass(frozen=True)
class TechniqueCard:
    """Statements of a technique about itself.

    Attributes:
        name: of the class.
        path: under which users find it, below ``lightning_fasttrain``.
        subpackage: it is in.
        summary: first paragraph of its docstring, as Markdown.
        effect: what is done.
        when: when it pays.
        exactness: class of exactness.
        promise: class of exactness with its bound.
        arguments: of its constructor, with their defaults.
        made: Python that makes one.
        config: YAML for LightningCLI that makes one; None if YAML cannot represent it.
        loop: use in a Fabric or bare loop.
        excluded: techniques that it cannot be combined with: name, reason and alternative of each.
        measured: machine → variant → time and peak memory, as factors of the ladder's rung below.
        source: paper or reference implementation.
    """

    name: str
    path: str
    subpackage: str
    summary: str
    effect: str
    when: str
    exactness: str
    promise: str
    arguments: str
    made: str
    config: str | None
    loop: str
    excluded: list[list[str]]
    measured: dict[str, dict[str, list[str]]]
    source: str


def read_cards() -> list[TechniqueCard]:
    """Return the cards of all techniques, one subpackage after another.

    Example:
        >>> [card.name for card in read_cards()][:2]
        ['MicroBatching', 'PaddingFree']
    """
    written = resources.files("lightning_fasttrain.cli").joinpath(FILE).read_text()
    return [TechniqueCard(**fields) for fields in json.loads(written)]


def find_cards(words: str) -> list[TechniqueCard]:
    """Return the techniques of a name in any spelling, or for what the words say; the first to try first.

    Raises:
        ValueError: there is none; the message names what is close.

    Example:
        >>> [card.name for card in find_cards("micro-batching")]
        ['MicroBatching']
        >>> [card.path for card in find_cards("optim.weight_ema")]
        ['optim.WeightEMA']
        >>> [card.name for card in find_cards("gradient accumulation")][:2]
        ['MicroBatching', 'TokenWeightedAccumulation']
    """
    cards, wanted = read_cards(), plain_spelling(words)
    by_name = {card.name: card for card in cards}
    named = [card for card in cards if wanted in (plain_spelling(card.name), plain_spelling(card.path))]
    if named:
        return named
    meant = _meant_by(wanted)
    if meant:
        return [by_name[name] for name in meant]
    what = f"no technique is called {words!r}"
    for synonyms, advice in _ELSEWHERE.items():
        if wanted in synonyms.split():
            why, _, way_out = advice.partition(": ")
            raise ValueError(explain(what, why, f"Use {way_out}"))
    found = _find_described(cards, words)
    if found:
        return found
    for word in words.split():  # as in "slow dataloader"
        found += [by_name[name] for name in _meant_by(plain_spelling(word)) if by_name[name] not in found]
    if found:
        return found
    raise ValueError(_explain_unknown(what, wanted, by_name))


def _explain_unknown(what: str, wanted: str, names: Iterable[str]) -> str:
    known = {plain_spelling(name): name for name in names}
    for synonyms in _SYNONYMS:
        known.update({word: word for word in synonyms.split()})
    near = [known[word] for word in difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)]
    why = "nor does one describe itself by these words"
    if near:
        return f"{what}: {why}. Did you mean {' or '.join(near)}?"
    return explain(what, why, "`fasttrain techniques` lists all")


def _meant_by(wanted: str) -> list[str]:
    """Return the names of the techniques that one of the field's words stands for."""
    return next((names.split() for synonyms, names in _SYNONYMS.items() if wanted in synonyms.split()), [])


def _find_described(cards: Sequence[TechniqueCard], words: str) -> list[TechniqueCard]:
    """Return the techniques whose names contain the words, then those that use all of them about themselves."""
    wanted, parts = plain_spelling(words), words.lower().split()
    if len(wanted) < 3:
        return []
    containing = [card for card in cards if wanted in plain_spelling(card.name)]
    for card in cards:
        described = f"{card.effect} {card.when}".lower()
        if card not in containing and all(part in described for part in parts):
            containing.append(card)
    return containing


def plain_spelling(words: str) -> str:
    """Return the letters and digits of a name, in lower case, by which spellings are compared."""
    return "".join(filter(str.isalnum, words.lower()))


def as_text(card: TechniqueCard, idle: str | None = None) -> str:
    """Return a card for a terminal.

    Args:
        card: of a technique.
        idle: why there is nothing to do on this machine.

    Example:
        >>> offload = next(card for card in read_cards() if card.name == "ActivationOffload")
        >>> print(as_text(offload).partition("not with")[0])
        ActivationOffload: saved activations are kept in host memory, or on disk
        <BLANKLINE>
        when       activations of long sequences do not fit, and recomputing them would cost more than moving them; not
                   on a CPU
        exactness  exact
        arguments  min_mib=1.0, *, in_flight_mib=1024.0, folder=None, blocks=None; help(ft.ActivationOffload)
        <BLANKLINE>
    """
    lines = [("when", card.when), ("exactness", card.exactness)]
    if idle is not None:
        lines.append(("not here", idle))
    help_on = f"help(ft.{card.path})"
    lines.append(("arguments", f"{card.arguments}; {help_on}" if card.arguments else f"none; {help_on}"))
    for machine, variants in card.measured.items():
        factors = [" ".join(filter(None, [name, *numbers])) for name, numbers in variants.items()]
        lines.append(("measured", f"{'; '.join(factors)} (time, peak memory) in the ladder, {machine}"))
    for other, why, way_out in card.excluded:
        lines.append(("not with", f"{other}: {why}. {way_out}."))
    lines += [
        ("Trainer", f"L.Trainer(callbacks=[{card.made}])"),
        ("mixin", f"class Net(ft.FastTrainMixin, L.LightningModule): techniques = [{card.made}]"),
        ("loop", card.loop),
    ]
    if card.config is not None:
        # So wide that yaml never breaks the line, which is to be pasted as it is.
        trainer = yaml.safe_load(card.config)["trainer"]
        flow = yaml.safe_dump(trainer, default_flow_style=True, sort_keys=False, width=1000)
        lines.append(("YAML", f"trainer: {flow.strip()}"))
    lines.append(("source", card.source))
    width = output_width()
    shown = [*wrap(f"{card.name}: {card.effect}", width), ""]
    for head, text in lines:
        line = f"{head:<11}{text}"
        shown += [line] if head in _CODE else wrap(line, width, hanging=" " * 11)
    return "\n".join(shown)


def as_table(cards: Sequence[TechniqueCard]) -> ReportTable:
    """Return techniques as a table for a terminal, with what the ladder measured of some of them."""
    columns = {"technique": "name", "time": "name", "memory": "name", "exactness": "name", "what it does": "prose"}
    machines = {machine: None for card in cards for machine in card.measured}
    machine = next(iter(machines), "")
    notes = ["`fasttrain techniques NAME` prints all about one; words such as `out of memory` find those for it."]
    if machine:
        notes.append(f"Time and memory: factors of the rung below in the ladder, {machine}; ≈ is within its variation.")
    table = ReportTable(f"{len(cards)} techniques", columns, notes)
    for card in cards:
        times, memories = [], []
        for variant, (time, memory) in card.measured.get(machine, {}).items():
            times.append(f"{variant} {time}".strip())
            memories.append(memory)
        table.add(card.path, "\n".join(times), "\n".join(memories), card.exactness, card.effect)
    return table
