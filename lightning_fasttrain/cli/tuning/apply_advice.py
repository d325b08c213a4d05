"""Find the call that makes the Trainer of a script, and change its source."""

import ast
from collections.abc import Sequence


def find_trainer(source: str) -> ast.Call | None:
    """Return the call that makes the Trainer of a script; None if there is no single one."""
    calls: list[ast.Call] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Trainer":
            calls.append(node)
    return calls[0] if len(calls) == 1 else None


def find_keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((keyword for keyword in call.keywords if keyword.arg == name), None)


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
        given = find_keyword(call, name)
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
