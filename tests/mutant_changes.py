"""The small changes of the package that `mutants.py` makes: which there are, which are drawn, which mean the same.

A mutant goes by its function and its line's code, wherever the file lies: a seed draws the same after a move, and a new
line takes the place of one other at most. A line whose change nobody can see says so:

    if now >= log.look_at:  # same: a nanosecond later is as good
    steps = max(1, count - 1)  # the first is no step; same (1 -> 0, - -> +): there are always two

Without brackets it says so of all changes of its line. Where there is no room for it, it is the line above.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_SWAPPED_OPS: dict[type[ast.AST], tuple[str, type[ast.AST], str]] = {
    ast.Gt: (">", ast.GtE, ">="), ast.GtE: (">=", ast.Gt, ">"), ast.Lt: ("<", ast.LtE, "<="),
    ast.LtE: ("<=", ast.Lt, "<"), ast.Eq: ("==", ast.NotEq, "!="), ast.NotEq: ("!=", ast.Eq, "=="),
    ast.Add: ("+", ast.Sub, "-"), ast.Sub: ("-", ast.Add, "+"),
    ast.And: ("and", ast.Or, "or"), ast.Or: ("or", ast.And, "and"),
}  # fmt: skip
_SWAPPED_NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
# Whole numbers up to here by one; larger ones and fractions are thresholds, which nothing sits on: doubled.
_SMALL = 100
MARK = re.compile(r"(?:# ?|; )same(?: \((?P<changes>[^)]*)\))?: \S")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """Where an expression is: what `ast` says of it."""

    lineno: int
    column: int
    end_lineno: int
    end_column: int

    @classmethod
    def of(cls, node: ast.expr) -> Place:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: of the file, below the package.
        function: its qualified name; "" for the module's own lines.
        line: its code, without a comment.
        change: as marks name it.
        after: what stands in place of the expression.
        same: a mark says that nobody can see it.
    """

    path: str
    function: str
    line: str
    change: str
    place: Place
    after: str
    same: bool

    def source(self, before: str) -> str:
        """The whole file with the change."""
        lines = before.encode().splitlines(keepends=True)  # columns are bytes
        first, last = self.place.lineno - 1, self.place.end_lineno - 1
        head, tail = lines[first][: self.place.column], lines[last][self.place.end_column :]
        return b"".join([*lines[:first], head, self.after.encode(), tail, *lines[last + 1 :]]).decode()

    def __str__(self) -> str:
        return f"{self.path}:{self.place.lineno} {self.function} [{self.change}]: {self.line}"


@dataclass(frozen=True)
class Found:
    """A node that can be changed; `runs_later`: when its function is called, not when its module is imported."""

    function: str
    node: ast.expr
    after: ast.expr
    change: str
    runs_later: bool


class _Finder(ast.NodeVisitor):
    """All changes of a module.

    Nothing in annotations, decorators, texts, what is raised, and what only a type checker or an assertion reads.
    """

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.depth = 0  # functions around, whose body this is
        self.found: list[Found] = []

    def _add(self, node: ast.expr, after: ast.expr, change: str) -> None:
        self.found.append(Found(".".join(self.functions), node, after, change, self.depth > 0))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.functions.pop()

    def _function(self, node: Function) -> None:
        self.functions.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1
        self.functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self.depth += 1
        self.visit(node.body)
        self.depth -= 1

    def _nothing(self, node: ast.AST) -> None:
        """Not looked into."""

    visit_JoinedStr = visit_Raise = visit_Assert = visit_Import = visit_ImportFrom = _nothing
    visit_MatchValue = visit_MatchMapping = _nothing

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("strict", "slots", "frozen", "kw_only"):
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if len(node.body) == 1 and not node.orelse and isinstance(node.body[0], ast.Return | ast.Continue):
            kind = type(node.body[0]).__name__.lower()
            self._add(node.test, ast.Constant(False), f"early {kind} dropped")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            if type(op) in _SWAPPED_OPS:
                before, swapped, after = _SWAPPED_OPS[type(op)]
                ops = [*node.ops[:i], swapped(), *node.ops[i + 1 :]]
                self._add(node, ast.Compare(node.left, ops, node.comparators), f"{before} -> {after}")  # type: ignore[arg-type]
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str | bytes))
            for part in ast.walk(node)
        )
        if type(node.op) in _SWAPPED_OPS and not is_text:
            before, swapped, after = _SWAPPED_OPS[type(node.op)]
            self._add(node, ast.BinOp(node.left, swapped(), node.right), f"{before} -> {after}")  # type: ignore[arg-type]
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, swapped, after = _SWAPPED_OPS[type(node.op)]
        self._add(node, ast.BoolOp(swapped(), node.values), f"{before} -> {after}")  # type: ignore[arg-type]
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.Invert):
            self._add(node, node.operand, "not dropped")
        if ast.unparse(node) == "-1":  # the last one, or what stands for none: -2 often says the same
            self._add(node, ast.Constant(0), "-1 -> 0")
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _SWAPPED_NAMES:
            after = _SWAPPED_NAMES[name]
            if isinstance(node.func, ast.Name):
                self._add(node.func, ast.Name(after), f"{name} -> {after}")
            elif isinstance(node.func, ast.Attribute):
                self._add(node.func, ast.Attribute(node.func.value, after), f"{name} -> {after}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, ast.Constant(not value), f"{value} -> {not value}")
        elif isinstance(value, int | float):
            others = (value + 1, value - 1) if isinstance(value, int) and value <= _SMALL else (value * 2 or 1.0,)
            for other in others:
                self._add(node, ast.Constant(other), f"{value} -> {other}")


def changes_of(tree: ast.Module) -> list[Found]:
    """Every change of a module, in an order that only its code decides."""
    finder = _Finder()
    finder.visit(tree)
    return finder.found


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    path: str
    text: str

    @cached_property
    def comments(self) -> dict[int, tuple[int, str]]:
        """The column and the text of a line's comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: (token.start[1], token.string) for token in tokens if token.type == tokenize.COMMENT}

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def code(self, lineno: int) -> str:
        """A line without its comment."""
        line = self.lines[lineno - 1]
        return line[: self.comments[lineno][0]].strip() if lineno in self.comments else line.strip()

    @cached_property
    def marks(self) -> dict[int, frozenset[str] | None]:
        """What the marks of equivalent changes say, by the line that they are of: which changes; None: all."""
        found: dict[int, frozenset[str] | None] = {}
        for lineno, (_, comment) in self.comments.items():
            if mark := MARK.search(comment):
                changes = mark["changes"]
                while not self.code(lineno):  # a line of its own is of the next one with code
                    lineno += 1
                found[lineno] = None if changes is None else frozenset(changes.split(", "))
        return found

    @cached_property
    def mutants(self) -> list[Mutant]:
        """Every mutant of the file."""
        found = []
        for one in changes_of(ast.parse(self.text)):
            place = Place.of(one.node)
            marked = self.marks.get(place.lineno, frozenset())
            same = marked is None or one.change in marked
            line, after = self.code(place.lineno), f"({ast.unparse(one.after)})"
            found.append(Mutant(self.path, one.function, line, one.change, place, after, same))
        return found

    def empty_marks(self) -> list[str]:
        """Marks of changes that their line does not have."""
        there: dict[int, set[str]] = {}
        for mutant in self.mutants:
            there.setdefault(mutant.place.lineno, set()).add(mutant.change)
        return [
            f"{self.path}:{lineno}: {', '.join(sorted(changes or ['no change']))}"
            for lineno, changes in self.marks.items()
            if not (there.get(lineno, set()) if changes is None else changes <= there.get(lineno, set()))
        ]


def draw(modules: Iterable[Module], *, seed: int, count: int) -> list[Mutant]:
    """`count` mutants, each of another line."""
    by_line: dict[tuple[str, str, int], list[Mutant]] = {}
    seen: dict[tuple[str, str], list[tuple[str, int]]] = {}  # lines of the same code in one function
    for module in sorted(modules, key=lambda module: module.path):
        for mutant in module.mutants:
            key, line = (mutant.function, mutant.line), (module.path, mutant.place.lineno)
            lines = seen.setdefault(key, [])
            if line not in lines:
                lines.append(line)
            by_line.setdefault((*key, lines.index(line)), []).append(mutant)
    first = sorted(by_line, key=lambda line: _number(seed, *line))[:count]
    return [min(by_line[line], key=lambda mutant: _number(seed, *line, mutant.change)) for line in first]


def _number(*parts: object) -> bytes:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
