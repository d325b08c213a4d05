"""The command ``fasttrain tune``: measure a user's script, choose techniques for it, and show what to change."""

import argparse
import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fasttrain.cli.command import CommandError, note, refusing
from lightning_fasttrain.cli.rehearsal.rehearse import ask_script

TUNE = "FASTTRAIN_TUNE"  # in the environment of the script: what is asked for, as JSON
KEEPS = ("exact", "tolerance", "anything")
_POINT = "lightning_fasttrain.cli.tuned_script:make_callbacks"
_NOISE = 0.03  # of a step's time: a gain below it, or one whose interval contains 1, is none


@dataclass(frozen=True)
class Advice:
    """Result of tuning a script.

    Attributes:
        before_ms, after_ms: time of a step of the script as it is, 0 if that does not fit, and as advised, measured in
            turn. Techniques of the script are left out of the first.
        gain: how many times as fast, and the ends of the interval that contains it with a confidence of 95%.
        before_bytes, after_bytes: peak memory of a step.
        techniques: Python that makes each technique; empty if none gains anything.
        precision: the Trainer's precision; None to leave it.
        reasons: what each of them contributes.
        notes: about the loader, padding and the optimizer.
        verdict: whether the steps with the techniques are those without.
        is_same: whether they are, within what the techniques promise.
        replaced: techniques of the script, instead of which the others were measured.
        yaml: the same for LightningCLI.
    """

    before_ms: float
    after_ms: float
    gain: tuple[float, float, float]
    before_bytes: float
    after_bytes: float
    techniques: list[str]
    precision: str | None
    reasons: list[str]
    notes: list[str]
    verdict: str
    is_same: bool
    replaced: list[str]
    yaml: str

    @property
    def is_worth_it(self) -> bool:
        """Whether the steps are the same training, and faster or in clearly less memory."""
        faster = self.gain[0] > 1 + _NOISE and self.gain[1] > 1
        return self.is_same and (faster or self.after_bytes < 0.9 * self.before_bytes)


def tune_script(options: argparse.Namespace) -> int:
    """Run ``fasttrain tune``: print what to add to a script, and what it gains there."""
    script = Path(options.script)
    if options.minutes <= 0:
        raise CommandError(f"--minutes {options.minutes:g}: no time to measure anything. Use --minutes 5.")
    if options.memory != "fit" and not _is_positive(options.memory):
        raise CommandError(f"--memory {options.memory}: expected GiB, as in --memory 20, or fit.")
    orders = {"memory": options.memory, "keep": options.keep, "seconds": 60 * options.minutes}
    told = {TUNE: json.dumps(orders)}
    result, code = ask_script(options.script, options.arguments, told, quiet=options.json, point=_POINT)
    if result is None and code == 0:
        raise CommandError("the script ended without a Trainer.fit. For a loop of your own, see fasttrain doctor.")
    if result is None:
        raise CommandError(f"the script ended with {code} before its first step, see above.", 1)
    if not result["ok"]:
        raise CommandError(result["error"], 1)
    advice = Advice(**result["advice"])
    if options.json:
        print(json.dumps({"is_worth_it": advice.is_worth_it, **result["advice"]}, indent=2))
    else:
        print(describe(advice, script))
    if options.apply and advice.is_worth_it:
        with refusing(OSError):
            note(f"Written: {write_copy(script, advice)}")
    elif options.apply:
        note("Nothing was written, since nothing is advised.")
    return 0


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def describe(advice: Advice, script: Path) -> str:
    """Return one screen: what a step takes, what is advised, what it gains, and the change of the script."""
    from lightning_fasttrain.core.messages import align, format_bytes, output_width, wrap

    peak = f"peak memory {format_bytes(advice.before_bytes)}"
    before = f"{advice.before_ms:,.4g} ms/step, {peak}" if advice.before_ms else f"does not fit: predicted {peak}"
    rows = [("Without techniques" if advice.replaced else "Script as it is", before)]
    if advice.is_worth_it:
        value, low, high = advice.gain
        names = [*([advice.precision] if advice.precision else []), *advice.techniques]
        times = advice.before_bytes / advice.after_bytes
        gained = f", {value:.2f} times as fast ({low:.2f} to {high:.2f}, in turn)" if advice.before_ms else ""
        rows += [
            ("Advised", ", ".join(names)),
            ("Time", f"{advice.after_ms:,.4g} ms/step{gained}"),
            ("Peak memory", f"{format_bytes(advice.after_bytes)}, {times:.1f} times less"),
            ("Same training", advice.verdict),
        ]
    else:
        rows.append(("Advised", f"nothing: {_explain_nothing(advice)}"))
    if advice.replaced:
        rows.append(("Instead of", ", ".join(advice.replaced)))
    shown: list[str] = []
    for line in align(f"fasttrain tune {script}", rows).splitlines():
        shown += wrap(line, output_width(), hanging=" " * 19)
    shown.append("")
    for sentence in [*(advice.reasons if advice.is_worth_it else []), *advice.notes]:
        shown += wrap(sentence, output_width(), hanging="  ")
    if advice.is_worth_it:
        shown += ["", *describe_change(script, advice)]
    return "\n".join(shown).rstrip()


def _explain_nothing(advice: Advice) -> str:
    if advice.techniques and not advice.is_same:
        return f"with {', '.join(advice.techniques)} it would be another training ({advice.verdict})"
    return "no technique that keeps the training makes a step faster or leaner by more than the variation of its time"


def describe_change(script: Path, advice: Advice) -> list[str]:
    """Return the lines to change, with the line of the script's Trainer where there is a single one."""
    source = script.read_text()
    if "LightningCLI" in source:
        return ["In the configuration:", "", *advice.yaml.splitlines()]
    call = find_trainer(source)
    where = "where the Trainer is made:" if call is None else f"in line {call.lineno} of {script}:"
    settings = [f"precision={advice.precision!r}"] if advice.precision else []
    others = ", ..." if call is not None and _keyword(call, "callbacks") is not None else ""
    if advice.techniques:
        settings.append(f"callbacks=[{', '.join(advice.techniques)}{others}]")
    imports = ["import lightning_fasttrain as ft", ""] if advice.techniques else []
    return [*imports, f"{where}  L.Trainer(..., {', '.join(settings)})"]


def find_trainer(source: str) -> ast.Call | None:
    """Return the call that makes the Trainer of a script; None if there is no single one."""
    calls: list[ast.Call] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Trainer":
            calls.append(node)
    return calls[0] if len(calls) == 1 else None


def _keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((keyword for keyword in call.keywords if keyword.arg == name), None)


def write_copy(script: Path, advice: Advice) -> Path:
    """Write the script with the advice applied to ``SCRIPT_tuned.py`` beside it.

    Raises:
        CommandError: the Trainer's arguments cannot be changed by a program.
    """
    from lightning_fasttrain.core.atomic_write import write_atomic

    if advice.replaced:
        names = ", ".join(advice.replaced)
        raise CommandError(
            f"{script} has {names}, which the advice replaces, so nothing was written. Change it by hand."
        )
    changed = apply_to_source(script.read_text(), advice.techniques, advice.precision)
    if changed is None:
        raise CommandError(
            f"{script} makes several Trainers, or gives its callbacks as something other than a list, so nothing was "
            "written. Change the line above by hand."
        )
    return write_atomic(script.with_name(f"{script.stem}_tuned.py"), changed)


def apply_to_source(source: str, techniques: Sequence[str], precision: str | None) -> str | None:
    """Return the source with the techniques in the callbacks of its Trainer; None if that cannot be done by a program.

    Example:
        >>> print(apply_to_source("import lightning as L\\nL.Trainer(max_epochs=1)", ["ft.MicroBatching(2)"], None))
        import lightning as L
        import lightning_fasttrain as ft
        L.Trainer(max_epochs=1, callbacks=[ft.MicroBatching(2)])
    """
    call = find_trainer(source)
    if call is None or any(keyword.arg is None for keyword in call.keywords):  # **settings may hold callbacks
        return None
    edits: list[_Edit | None] = []
    appended: list[str] = []
    for name, made in _list_settings(techniques, precision):
        given = _keyword(call, name)
        if given is None:
            appended.append(f"{name}=[{made}]" if name == "callbacks" else f"{name}={made}")
        else:
            edits.append(_add_to_list(given.value, made) if name == "callbacks" else _replace(given.value, made))
    if appended:
        edits.append(_append(call, ", ".join(appended)))
    if None in edits:
        return None
    lines = source.encode().splitlines(keepends=True)  # columns of the syntax tree count bytes
    for line, column, end, text in sorted(filter(None, edits), reverse=True):
        row = lines[line - 1]
        lines[line - 1] = row[:column] + text.encode() + row[end:]
    if techniques:
        lines.insert(_after_imports(source), b"import lightning_fasttrain as ft\n")
    changed = b"".join(lines).decode()
    ast.parse(changed)
    return changed


_Edit = tuple[int, int, int, str]  # line, first column, end column, text


def _list_settings(techniques: Sequence[str], precision: str | None) -> list[tuple[str, str]]:
    settings = [("callbacks", ", ".join(techniques))] if techniques else []
    return [*settings, ("precision", repr(precision))] if precision else settings


def _add_to_list(given: ast.expr, made: str) -> _Edit | None:
    if not isinstance(given, ast.List):
        return None
    text = f"{made}, " if given.elts else made
    return given.lineno, given.col_offset + 1, given.col_offset + 1, text


def _replace(given: ast.expr, made: str) -> _Edit | None:
    if given.lineno != given.end_lineno:
        return None
    return given.lineno, given.col_offset, int(given.end_col_offset or 0), made


def _append(call: ast.Call, argument: str) -> _Edit:
    """Insert an argument after the last one, or into the empty parentheses."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not arguments:
        end = int(call.end_col_offset or 0) - 1
        return int(call.end_lineno or 0), end, end, argument
    last = max(arguments, key=lambda node: (node.end_lineno, node.end_col_offset))
    end = int(last.end_col_offset or 0)
    return int(last.end_lineno or 0), end, end, f", {argument}"


def _after_imports(source: str) -> int:
    """Return the number of the line after the first imports of a module; after its docstring if it has no imports."""
    body, last = ast.parse(source).body, 0
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            last = int(statement.end_lineno or 0)
        elif last:
            break
    if last:
        return last
    has_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return int(body[0].end_lineno or 0) if has_docstring else body[0].lineno - 1
