"""Everything that the package takes from Lightning and torchmetrics although they keep it to themselves.

A new Lightning that lacks a name fails here first, with the file to read.
"""

import ast
import functools
import inspect
from pathlib import Path

import lightning.fabric.loggers.logger
import pytest

import lightning_fasttrain

PACKAGE = Path(lightning_fasttrain.__file__).parent
FABRIC, PYTORCH = "lightning.fabric", "lightning.pytorch"
LOOPS, CONNECTORS = f"{PYTORCH}.loops", f"{PYTORCH}.trainer.connectors"

# name → (the module of the host that has it, the files of the package that use it)
NAMES = {
    # the door
    "_FabricDataLoader": (f"{FABRIC}.wrappers", ["core/host/lightning"]),
    "_FabricModule": (f"{FABRIC}.wrappers", ["core/host/lightning"]),
    "_FabricOptimizer": (f"{FABRIC}.wrappers", ["core/host/lightning"]),
    "_accelerator_connector": (f"{PYTORCH}.trainer.trainer", ["core/host/lightning"]),
    "_batches_that_stepped": (f"{LOOPS}.training_epoch_loop", ["core/host/lightning"]),
    "_call_callback_hooks": (f"{PYTORCH}.trainer.call", ["core/host/lightning"]),
    "_call_lightning_module_hook": (f"{PYTORCH}.trainer.call", ["core/host/lightning"]),
    "_call_strategy_hook": (f"{PYTORCH}.trainer.call", ["core/host/lightning"]),
    "_combined_loader": (
        f"{LOOPS}.fit_loop",
        ["core/host/lightning", "core/host/loader_wrapper", "checkpoint/resume_state"],
    ),
    "_configure_optimizers": (f"{PYTORCH}.core.optimizer", ["core/host/lightning"]),
    "_current_fx_name": (f"{PYTORCH}.core.module", ["core/host/lightning"]),
    "_data_source": (f"{LOOPS}.fit_loop", ["core/host/lightning"]),
    "_dataloader": (f"{FABRIC}.wrappers", ["core/host/lightning"]),
    "_ddp_kwargs": (f"{PYTORCH}.strategies.ddp", ["core/host/lightning"]),
    "_make_closure": (f"{LOOPS}.optimization.automatic", ["core/host/lightning"]),
    "_make_zero_grad_fn": (f"{LOOPS}.optimization.automatic", ["core/host/lightning"]),
    "_model_averaging_period": (f"{PYTORCH}.strategies.ddp", ["core/host/lightning"]),
    "_num_iter_calls": (f"{FABRIC}.wrappers", ["core/host/lightning"]),
    "_num_ready_batches_reached": (f"{LOOPS}.training_epoch_loop", ["core/host/lightning"]),
    "_pl_static_graph_delay_done": (f"{PYTORCH}.strategies.ddp", ["core/host/lightning"]),
    "_should_accumulate": (f"{LOOPS}.training_epoch_loop", ["core/host/lightning"]),
    "_teardown": (f"{PYTORCH}.trainer.trainer", ["core/host/lightning"]),
    "_validate_callbacks_list": (f"{CONNECTORS}.callback_connector", ["core/host/lightning"]),
    "_trainer": (f"{PYTORCH}.core.module", ["core/host/lightning"]),
    "_logger_connector": (
        f"{PYTORCH}.trainer.trainer",
        ["core/host/lightning", "checkpoint/resume_state"],
    ),
    # positions in loops
    "_first_loop_iter": (f"{CONNECTORS}.logger_connector.logger_connector", ["checkpoint/resume_state"]),
    "_has_run": (f"{LOOPS}.evaluation_loop", ["checkpoint/resume_state"]),
    "_is_training_done": (f"{LOOPS}.training_epoch_loop", ["checkpoint/resume_state"]),
    "_restarting": (f"{LOOPS}.loop", ["checkpoint/resume_state"]),
    "_resuming_from_checkpoint": (f"{LOOPS}.loop", ["checkpoint/resume_state"]),
    "_skip_next_val": (f"{LOOPS}.training_epoch_loop", ["checkpoint/resume_state"]),
    # loaders under way
    "_DataFetcher": (f"{LOOPS}.fetchers", ["core/host/lightning"]),
    "_PrefetchDataFetcher": (f"{LOOPS}.fetchers", ["core/host/loader_wrapper"]),
    "_DataLoaderIterDataFetcher": (f"{LOOPS}.fetchers", ["checkpoint/resume_state"]),
    "_MaxSizeCycle": (f"{PYTORCH}.utilities.combined_loader", ["checkpoint/resume_state"]),
    "_mode": (f"{PYTORCH}.utilities.combined_loader", ["proof/rehearsal/context"]),
    "_consumed": (f"{PYTORCH}.utilities.combined_loader", ["checkpoint/resume_state"]),
    "_data_connector": (f"{PYTORCH}.trainer.trainer", ["core/host/loader_wrapper"]),
    "_data_fetcher": (f"{LOOPS}.fit_loop", ["core/host/loader_wrapper", "checkpoint/resume_state"]),
    "_iterator": (
        f"{PYTORCH}.utilities.combined_loader",
        [
            "loaders/sample_guard",
            "proof/rehearsal/context",
            "checkpoint/resume_state",
            "checkpoint/loader_state/dataset_state",
        ],
    ),  # torch's too
    "_prepare_dataloader": (f"{CONNECTORS}.data_connector", ["core/host/loader_wrapper"]),
    # metrics that were logged
    "_Metadata": (f"{CONNECTORS}.logger_connector.result", ["checkpoint/resume_state"]),
    "_ResultMetric": (f"{CONNECTORS}.logger_connector.result", ["checkpoint/resume_state"]),
    "_Sync": (f"{CONNECTORS}.logger_connector.result", ["checkpoint/resume_state"]),
    "_callback_metrics": (f"{CONNECTORS}.logger_connector.logger_connector", ["checkpoint/resume_state"]),
    "_results": (f"{LOOPS}.training_epoch_loop", ["checkpoint/resume_state"]),
    "_computed": ("torchmetrics.metric", ["core/state/metric_state"]),
    "_copy_state_dict": ("torchmetrics.metric", ["core/state/metric_state"]),
    "_forward_cache": ("torchmetrics.metric", ["core/state/metric_state"]),
    "_reduce_states": ("torchmetrics.metric", ["core/state/metric_state"]),
    "_update_count": ("torchmetrics.metric", ["core/state/metric_state", "checkpoint/resume_state"]),
    # what checkpoints forget
    "_last_checkpoint_saved": (f"{PYTORCH}.callbacks.model_checkpoint", ["core/host/lightning"]),
    "_every_n_train_steps": (f"{PYTORCH}.callbacks.model_checkpoint", ["core/host/lightning"]),
    "_train_time_interval": (f"{PYTORCH}.callbacks.model_checkpoint", ["core/host/lightning"]),
    "_last_global_step_saved": (f"{PYTORCH}.callbacks.model_checkpoint", ["core/host/lightning"]),
    # signals and processes
    "_ChildProcessObserver": (f"{FABRIC}.strategies.launchers.subprocess_script", ["core/host/lightning"]),
    "_SubprocessScriptLauncher": (f"{PYTORCH}.strategies.launchers.subprocess_script", ["core/host/lightning"]),
    "_broadcast_sigterm_tensor": (f"{LOOPS}.training_epoch_loop", ["core/host/lightning"]),
    "_child_processes": (f"{FABRIC}.strategies.launchers.subprocess_script", ["core/host/lightning"]),
    "_signal_connector": (f"{PYTORCH}.trainer.trainer", ["core/host/lightning"]),
    # functions and types of strategies
    "_BackwardSyncControl": (
        f"{FABRIC}.strategies.strategy",
        ["core/host/lightning"],
    ),
    "_Stateful": (f"{FABRIC}.utilities.types", ["core/host/lightning"]),
    "_optimizers_to_device": (f"{FABRIC}.utilities.optimizer", ["core/host/lightning"]),
    "_update_properties": (f"{FABRIC}.utilities.device_dtype_mixin", ["core/host/lightning"]),
}

# the same, for what subclasses of its strategies override or call on themselves
INHERITED = {
    "_configure_launcher": (f"{PYTORCH}.strategies.ddp", ["strategy/zero/zero_host"]),
    "_format_config": (f"{FABRIC}.strategies.deepspeed", ["strategy/zero/zero_strategy"]),
    "_init_config_if_needed": (f"{PYTORCH}.strategies.deepspeed", ["strategy/zero/zero_strategy"]),
    "_init_deepspeed_distributed": (f"{PYTORCH}.strategies.deepspeed", ["strategy/zero/zero_host"]),
    "_init_optimizers": (f"{PYTORCH}.strategies.deepspeed", ["strategy/zero/zero_strategy"]),
    "_set_world_ranks": (f"{FABRIC}.strategies.ddp", ["strategy/zero/zero_host", "strategy/zero/zero_strategy"]),
    "_setup_distributed": (f"{PYTORCH}.strategies.model_parallel", ["strategy/fsdp2/sharding"]),
    "_timeout": (f"{PYTORCH}.strategies.ddp", ["strategy/fsdp2/sharding"]),
}


def foreign_names(tree):
    """(name, line) of what the module reads or sets on other objects, imports from the host, or patches by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("patch", "getattr", "setattr", "hasattr"):
            yield from ((one.value, node.lineno) for one in node.args[1:2] if isinstance(one, ast.Constant))


@functools.cache
def uses():
    """Private name → the files that use it."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name, _ in foreign_names(ast.parse(file.read_text())):
            if name.startswith("_") and not name.startswith("__"):
                found.setdefault(name, set()).add(file.relative_to(PACKAGE).with_suffix("").as_posix())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_host_has_it_and_one_door_leads_there(name):
    host, files = NAMES[name]
    source = inspect.getsource(__import__(host, fromlist=["any"]))
    assert name in source, f"{host} has no {name} any more: mend {', '.join(files)}"
    assert uses()[name] == set(files)


@pytest.mark.parametrize("name", INHERITED)
def test_the_host_has_what_its_subclasses_override(name):
    host, files = INHERITED[name]
    assert name in inspect.getsource(__import__(host, fromlist=["any"])), f"{host} has no {name} any more"
    for file in files:
        assert name in (PACKAGE / f"{file}.py").read_text(), file


@functools.cache
def names_of_lightning():
    """Every private name that Lightning's own classes and modules define."""
    found = set()
    for root in (Path(lightning.__file__).parent / part for part in ("fabric", "pytorch")):
        for file in root.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def own_names():
    """What the package's own classes define."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if ast.unparse(node.value) == "self" else "")
    return found


TORCHS = {  # of the same names
    *("_parameters", "_buffers", "_modules", "_version", "_base", "_load_state_dict_pre_hooks"),
    *("_forward_hooks", "_forward_pre_hooks", "_spec"),
}


def test_no_name_of_lightning_is_used_that_is_not_listed():
    used = {name for name in uses() if name in names_of_lightning()}
    assert used - set(NAMES) - set(INHERITED) - own_names() - TORCHS == set()
