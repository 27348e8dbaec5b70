"""The rooms of the package: what each may import and how large it may be.

    python tests/house.py

prints how they stand: modules, lines, public names, the largest and the smallest files, full folders, circles of
imports, and words of our own that came back. `tests/unit/test_house.py` holds the limits. A room that has grown for a
good reason gets a new limit here; one that has shrunk, too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "profiler_wrapper"
ROOT = Path(__file__).parents[1] / PACKAGE


@dataclass(frozen=True)
class Room:
    """A package, or the modules at the top (``""``).

    Attributes:
        modules, lines: at most so many; comment lines are not counted.
        imports: what else of the package it may import, beside `SHARED`; None: everything.
    """

    modules: int
    lines: int
    imports: frozenset[str] | None


def _room(modules: int, lines: int, imports: str | None) -> Room:
    return Room(modules, lines, None if imports is None else frozenset(imports.split()))


ROOMS = {
    "": _room(11, 1775, None),
    "trace": _room(12, 3125, ""),
    "capture": _room(16, 5575, "trace"),
    "run": _room(9, 2225, "__version__ analysis capture reports result trace"),
    "analysis": _room(43, 12850, "trace"),
    "reports": _room(16, 4850, "analysis trace"),
    "comparison": _room(8, 2800, "analysis reports result trace"),
    "ranks": _room(16, 7525, "analysis reports trace"),
    "snapshot": _room(4, 1225, "reports trace"),
    "timer": _room(8, 3100, "capture trace"),
    "config_flops": _room(3, 1050, ""),
    "monitor": _room(12, 4175, "analysis capture config_flops reports timer trace"),
    "commands": _room(13, 1225, None),
    "integrations": _room(6, 1050, None),
}
SHARED = frozenset({"errors", "child", "units"})  # import nothing of the package but one another

MOST_IN_A_FOLDER = 16
FEWEST_LINES, MOST_LINES = 40, 700  # of a file
# One idea that is longer, or a file that has to stand alone.
OTHER_SIZES: frozenset[str] = frozenset()

# Words that had a meaning in this package alone; a reader of torch.profiler's documentation knows another one.
# Parts of identifiers, in small letters.
WORDS = {
    "told", "untold", "reckoned", "dearest", "levelled", "likes", "alike", "tape", "judged", "weighed", "culprits",
    "odd", "carved", "era", "intake", "meetings",
}  # fmt: skip
# Public names and keys of files that stay as they are, in all files or in one.
KEPT_NAMES = frozenset({"odd_block", "untold_bytes", "culprits", "judged", "ranks/model.py:told"})


@cache
def files() -> dict[str, str]:
    """The text of each module by its path below the package."""
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def room_of(path: str) -> str:
    """`"analysis/work/bytes.py"` -> `"analysis"`; a module at the top is in `""`."""
    return path.split("/")[0] if "/" in path else ""


def line_count(text: str) -> int:
    """Lines that are no comment."""
    return sum(not line.lstrip().startswith("#") for line in text.splitlines())


def sizes() -> dict[str, tuple[int, int, int]]:
    """Modules, lines and public names of each room."""
    found = {room: [0, 0, 0] for room in ROOMS}
    for path, text in files().items():
        counts = found.setdefault(room_of(path), [0, 0, 0])
        for at, count in enumerate((1, line_count(text), len(public_names(text)))):
            counts[at] += count
    return {room: (counts[0], counts[1], counts[2]) for room, counts in found.items()}


def public_names(text: str) -> list[str]:
    """Names that a module defines for others."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def odd_sizes() -> list[str]:
    """Files that are too short or too long, and folders that are too full."""
    found = []
    for path, text in files().items():
        lines, name = text.count("\n"), path.rsplit("/", 1)[-1]
        small = lines < FEWEST_LINES and name not in ("__init__.py", "__main__.py") and room_of(path) != "commands"
        if (small or lines > MOST_LINES) and path not in OTHER_SIZES:
            found.append(f"{path}: {lines} lines")
    folders = Counter(path.rpartition("/")[0] for path in files())
    return found + [f"{folder}/: {count} modules" for folder, count in folders.items() if count > MOST_IN_A_FOLDER]


def imported(source: str, package: str) -> Iterator[str]:
    """The modules of ours that a file imports, as dotted names below the package; `package` is the file's."""
    for node in ast.walk(ast.parse(source)):
        yield from _imported_by(node, package)


def _imported_by(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        names = [f"{base}.{alias.name}" for alias in node.names] if base == PACKAGE else [base]
    else:
        return
    for name in names:
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            yield name.removeprefix(PACKAGE).removeprefix(".")


def wrong_imports(path: str, source: str) -> list[str]:
    """The imports of one file that its room may not have."""
    package = ".".join([PACKAGE, *Path(path).parent.parts])
    own = path.removesuffix(".py").split("/")[0]
    if own in SHARED:
        allowed: frozenset[str] | None = SHARED
    else:
        imports = ROOMS[room_of(path)].imports
        allowed = None if imports is None else imports | SHARED | {own}
    if allowed is None:
        return []
    wrong = {name for name in imported(source, package) if name.split(".")[0] not in allowed}
    return [f"{path}: imports {name or PACKAGE}" for name in sorted(wrong)]


def circles() -> list[list[str]]:
    """Modules that import one another when they are imported."""
    modules = {_dotted(path): path for path in files()}
    needs = {module: {name for name in _needed(path, modules) if name != module} for module, path in modules.items()}
    left = set(needs)
    while ready := {module for module in left if not needs[module] & left}:
        left -= ready
    while ready := {module for module in left if not any(module in needs[other] for other in left)}:
        left -= ready
    return [sorted(left)] if left else []  # one or several of them


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


def _needed(path: str, modules: dict[str, str]) -> Iterator[str]:
    package = ".".join([PACKAGE, *Path(path).parent.parts])
    for node in _at_import(ast.parse(files()[path]).body):
        for name in _imported_by(node, package):
            inner = [f"{name}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            yield from [one for one in inner if one in modules] or [name]


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _at_import(node.body)
            yield from _at_import(node.orelse)
        elif isinstance(node, (ast.Try, ast.With)):
            yield from _at_import(node.body)
        else:
            yield node


def own_words() -> dict[str, Counter[str]]:
    """How often each file has an identifier with one of `WORDS` in it."""
    found = {path: Counter(own_words_in(text, path)) for path, text in files().items()}
    return {path: counts for path, counts in found.items() if counts}


def own_words_in(source: str, path: str = "") -> Iterator[str]:
    """Each of `WORDS` in each identifier."""
    for name in _identifiers(ast.parse(source)):
        if KEPT_NAMES.isdisjoint({name, f"{path}:{name}"}):
            yield from {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)} & WORDS


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def main() -> None:
    """Print how the house stands."""
    found = sizes()
    print(f"{'room':<14}{'modules':>8}{'limit':>7}{'lines':>8}{'limit':>7}{'public names':>14}")
    for room, (modules, lines, names) in sorted(found.items(), key=lambda one: -one[1][1]):
        limit = ROOMS[room]
        print(f"{room or '(top)':<14}{modules:>8}{limit.modules:>7}{lines:>8}{limit.lines:>7}{names:>14}")
    modules, lines, names = (sum(each[at] for each in found.values()) for at in range(3))
    print(f"{'all':<14}{modules:>8}{lines:>15}{names:>21}")
    by_size = sorted(files(), key=lambda path: files()[path].count("\n"))
    for title, paths in (("largest", by_size[:-11:-1]), ("smallest", [p for p in by_size if "__" not in p][:10])):
        print(f"\n{title}:", *(f"{path} {files()[path].count(chr(10))}" for path in paths), sep="\n  ")
    words = own_words()
    for title, lines in (
        ("too short, too long, too full", odd_sizes()),
        ("circles", [" ".join(circle) for circle in circles()]),
        ("words", [f"{path}: {', '.join(f'{w} {n}' for w, n in sorted(words[path].items()))}" for path in words]),
    ):
        print(f"\n{title}:", *(lines or ["none"]), sep="\n  ")


if __name__ == "__main__":
    main()
