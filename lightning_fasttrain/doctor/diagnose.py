"""Put together a diagnosis from what was watched."""

from collections.abc import Iterator

from lightning_fasttrain.core.messages import first_line, number_of
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.doctor.diagnosis import Diagnosis, Finding, most_expensive, rank
from lightning_fasttrain.doctor.findings.operators import (
    find_compiler_work,
    find_growing_memory,
    find_host_syncs,
    find_operators,
)
from lightning_fasttrain.doctor.findings.run_costs import (
    find_data_waits,
    find_padding,
    find_rank_faults,
    find_run_costs,
)
from lightning_fasttrain.doctor.findings.training_faults import (
    find_module_modes,
    find_scheduler_faults,
    find_slow_optimizers,
    find_training_faults,
)
from lightning_fasttrain.doctor.observation.step_records import LineTime, Measured
from lightning_fasttrain.doctor.observation.watch import LOOP_PHASES, Watch
from lightning_fasttrain.step_time.machine import Machine, machine_of_device
from lightning_fasttrain.step_time.predict_time import refuse_unknown_peaks, uses_tf32
from lightning_fasttrain.step_time.simulate_step import simulate_step

# Memory first, since later families hold tensors of their own.
_FAMILIES = (
    find_growing_memory,
    find_training_faults,
    find_module_modes,
    find_scheduler_faults,
    find_host_syncs,
    find_data_waits,
    find_padding,
    find_operators,
    find_run_costs,
    find_slow_optimizers,
    find_compiler_work,
    find_rank_faults,
)


def diagnose(watch: Watch, machine: Machine | None = None) -> Diagnosis:
    """Return the diagnosis of what was watched so far; the random state is kept, and nothing of the run changes.

    Args:
        watch: what was watched.
        machine: the rates that the step is compared with; by default those of the GPU's data sheet.
    """
    watch.close()
    measured = watch.measure()
    with keep_random_state():
        found: list[Finding] = []
        failed: list[str] = []
        # Without any time there is nothing that a finding could be compared with.
        for find in _FAMILIES if measured.times else ():
            try:
                found += find(watch, measured)
            except Exception as error:  # the training must not fail because of what is said about it
                failed.append(f"{find.__name__} failed with {type(error).__name__}: {error}")
    machine = machine or machine_of_device(watch.device)
    needed_ms: dict[str, float] = {}
    if machine is not None and measured.times:
        try:
            needed_ms = _find_needs(watch, machine)
        except Exception as error:  # as above
            failed.append(f"The step was not compared with {machine.name}: {first_line(error).rstrip('.')}")
    shown, minor = rank(found, measured.step_ms)
    phases = {name: measured.typical(name) for name in (*LOOP_PHASES[:-1], "other")}
    return Diagnosis(
        device=watch.device.type,
        steps=len(measured.times),
        step_ms=measured.step_ms,
        phase_ms=phases,
        findings=shown,
        minor=minor,
        operator_ms=watch.operator_ms(),
        lines=most_expensive(list(_lines_by_phase(measured))),
        block_ms=watch.blocks.read(len(measured.times)),
        memory=watch.memory,
        needed_ms=needed_ms,
        compared_with=machine.name if needed_ms and machine is not None else "",
        notes=(*_notes(watch, measured), *failed),
    )


def _find_needs(watch: Watch, machine: Machine) -> dict[str, float]:
    """Return the milliseconds of a step's kernels on a machine by kind.

    Raises:
        ValueError: the kernels are not known, or the machine has no peak of their dtype.
    """
    step, tf32 = watch.read_kernels(), uses_tf32(())
    refuse_unknown_peaks(step, machine, tf32)
    by_kind = simulate_step(step, machine, 1, tf32).by_kind
    return {kind: 1e3 * seconds for kind, seconds in by_kind.items() if seconds > 0}


def _lines_by_phase(measured: Measured) -> Iterator[tuple[str, LineTime]]:
    for phase in (*LOOP_PHASES[:-1], "other"):
        for timed in measured.lines(lambda running, phase=phase: running.phase == phase):
            yield phase, timed


def _notes(watch: Watch, measured: Measured) -> Iterator[str]:
    if not measured.times:
        yield f"The run ended after {watch.done} steps, within the warm-up: nothing was timed"
    elif not watch.looks:
        yield "The model is compiled, so its operators were not looked at: host syncs and float64 are not reported"
    for cure, count in watch.trials.left_out.items():
        yield f"{cure} was not tried on {number_of(count, 'operator')}, for lack of time: watch more steps"
