"""The magic `%%profile_layers` of notebooks: a cell under `ProfilerWrapper`, and then its result."""

from __future__ import annotations

import ast
import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import display

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.wrapper import ProfilerWrapper

_MAGIC = "profile_layers"
_RESULT = "_profile"
_TICK_S = 1.0
# Their values are Python, as the cell would have them; of all others a text or a literal.
_OBJECTS = frozenset({"activities", "coordinates", "device_mesh", "optimizer", "peaks", "schedule"})


def register(shell: Any) -> None:
    """Make the magic known to an IPython shell."""
    shell.register_magic_function(partial(profile_layers, shell), "cell", _MAGIC)


def profile_layers(shell: Any, line: str, cell: str) -> ProfileResult | None:
    """Run `cell` in the user's namespace, and give its result, which is also bound to a name.

    Raises:
        UsageError: the line is none.
        What the cell raises.
    """
    __tracebackhide__ = True  # of IPython: what the user sees begins with the cell
    given = _parser().parse_argstring(line)  # type: ignore[no-untyped-call]
    options = {name: value for name, value in vars(given).items() if value is not None}
    name, model = options.pop("result"), options.pop("model", None)
    try:
        values = {option: _value(shell, option, text) for option, text in options.items()}
        root = None if model is None else eval(model, shell.user_global_ns, shell.user_ns)
        prof = ProfilerWrapper(root, **{"enable_print_summary": False, **values})
    except (WrongUse, NameError, SyntaxError) as error:
        raise UsageError(f"%%{_MAGIC}: {error}") from error
    with ExitStack() as finishing:
        with prof:
            _run(shell, cell)
            finishing.enter_context(_waiting(shell))
        result = prof.result
    shell.user_ns[name] = result
    return result


def _parser() -> MagicArgumentParser:
    """What may stand on the line: a model, and the options of `ProfilerWrapper` by their names."""
    parser: MagicArgumentParser = MagicArgumentParser(  # type: ignore[no-untyped-call]
        prog=f"%%{_MAGIC}", description="Profile this cell by layer."
    )
    parser.add_argument("model", nargs="?", help="whose layers become rows; without it the outermost modules called")
    parser.add_argument("--result", default=_RESULT, metavar="NAME", help=f"of the result (default: {_RESULT})")
    for option in inspect.signature(ProfilerWrapper).parameters.values():
        if option.name != "model" and option.kind is not inspect.Parameter.VAR_KEYWORD:
            parser.add_argument(f"--{option.name.replace('_', '-')}", nargs="?", const="True", metavar="VALUE")
    return parser


def _value(shell: Any, option: str, text: str) -> Any:
    if option in _OBJECTS:
        return eval(text, shell.user_global_ns, shell.user_ns)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _run(shell: Any, cell: str) -> None:
    """Run a cell as IPython does, but let what it raises pass: the last expression is shown."""
    __tracebackhide__ = True
    code = shell.transform_cell(cell)
    name = shell.compile.cache(code, shell.execution_count, raw_code=cell)
    tree = shell.transform_ast(shell.compile.ast_parse(code, filename=name))
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    for part, mode in ((tree, "exec"), (ast.Interactive(last), "single")):
        exec(shell.compile(part, name, mode), shell.user_global_ns, shell.user_ns)


@contextmanager
def _waiting(shell: Any) -> Iterator[None]:
    """One line that says for how long the result is being made: in a notebook one output, whose text changes."""
    begun, over = time.monotonic(), threading.Event()

    def line() -> dict[str, str]:
        return {"text/plain": f"making the result: {time.monotonic() - begun:.0f} s (an interrupt keeps the trace)"}

    shown = display(line(), raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def tick() -> None:
        while not over.wait(_TICK_S):
            shown.update(line(), raw=True)

    ticking = threading.Thread(target=tick, daemon=True)
    if hasattr(shell, "kernel"):  # a terminal prints each anew
        ticking.start()
    try:
        yield
    finally:
        over.set()
        if ticking.ident is not None:
            ticking.join()
