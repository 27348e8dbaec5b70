"""The house: how large the package may be, what each room may import, which words it does without.

    python tests/house.py

prints how it stands: modules, lines and public names of each room, the largest files, circles of imports, and words of
our own that came back. `tests/repository/test_house.py` holds the limits.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "profiler_wrapper"
ROOT = Path(__file__).parents[1] / PACKAGE


def rooms() -> dict[str, str | None]:
    """Read what else each room may import, beside SHARED, from ARCHITECTURE.md; None: all. "" is the top's modules."""
    text = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:`(\w+)`|the top) \|[^|]*\|([^|]*)\|$", text.split("## Rooms")[1].split("\n## ")[0], re.M)
    return {room: None if "everything" in may else " ".join(re.findall(r"`(\w+)`", may)) for room, may in rows}


ROOMS = rooms()
SHARED = frozenset({"errors", "child", "terminal", "units"})  # import nothing of the package but one another

MOST_LINES = 52_352
MOST_LINES_OF_A_FILE = 700

# Modules that need one another, wherever they say so: also in functions and for type checkers alone. To be cut.
KNOWN_CIRCLES: set[frozenset[str]] = set()

# Words that had a meaning in this package alone; a reader of torch.profiler's documentation knows another one.
# Parts of identifiers, in small letters.
WORDS = {
    "told", "untold", "reckoned", "dearest", "levelled", "likes", "alike", "tape", "judged", "weighed", "culprits",
    "odd", "carved", "era", "intake", "meetings",
}  # fmt: skip
# Public names and keys of files that stay as they are, in all files or in one.
KEPT_NAMES = frozenset({"odd_block", "untold_bytes", "culprits", "judged", "ranks/report.py:told"})


@cache
def files() -> dict[str, str]:
    """The text of each module by its path below the package."""
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def room_of(path: str) -> str:
    """`"tables/work/bytes.py"` -> `"tables"`; a module at the top is in `""`."""
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


def too_long() -> list[str]:
    """Files that must hold more than one idea."""
    lines = {path: text.count("\n") for path, text in files().items()}
    return [f"{path}: {count} lines" for path, count in lines.items() if count > MOST_LINES_OF_A_FILE]


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
        imports = ROOMS[room_of(path)]
        allowed = None if imports is None else SHARED.union(imports.split(), {own})
    if allowed is None:
        return []
    wrong = {name for name in imported(source, package) if name.split(".")[0] not in allowed}
    return [f"{path}: imports {name or PACKAGE}" for name in sorted(wrong)]


def circles(needs: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which needs all others of its group; `needs`: see `needed_modules`."""
    reached = {module: _reached(module, needs) for module in needs}
    groups = {frozenset({module, *(one for one in reached[module] if module in reached[one])}) for module in needs}
    return {group for group in groups if len(group) > 1}


def _reached(module: str, needs: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [module]
    while left:
        new = needs[left.pop()] - found
        found |= new
        left += new
    return found


def needed_modules(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports anywhere in its file, as dotted names; `sources`: text by path."""
    paths = {_dotted(path): path for path in sources}
    return {module: set(_needed(path, sources[path], paths)) - {module} for module, path in paths.items()}


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


def _needed(path: str, source: str, modules: dict[str, str]) -> Iterator[str]:
    package = ".".join([PACKAGE, *Path(path).parent.parts])
    for node in ast.walk(ast.parse(source)):
        for name in _imported_by(node, package):
            inner = [f"{name}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            yield from [one for one in inner if one in modules] or [one for one in [name] if one in modules]


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
    print(f"{'room':<14}{'modules':>8}{'lines':>8}{'public names':>14}")
    for room, (modules, lines, names) in sorted(found.items(), key=lambda one: -one[1][1]):
        print(f"{room or '(top)':<14}{modules:>8}{lines:>8}{names:>14}")
    modules, lines, names = (sum(each[at] for each in found.values()) for at in range(3))
    print(f"{'all':<14}{modules:>8}{lines:>8}{names:>14}\n{'limit':<14}{MOST_LINES:>16}")
    by_size = sorted(files(), key=lambda path: -files()[path].count("\n"))
    words = own_words()
    for title, rows in (
        ("largest", [f"{path} {files()[path].count(chr(10))}" for path in by_size[:10]]),
        (f"over {MOST_LINES_OF_A_FILE} lines", too_long()),
        ("circles", [f"{len(circle)}: {' '.join(sorted(circle))}" for circle in circles(needed_modules(files()))]),
        ("words", [f"{path}: {', '.join(f'{w} {n}' for w, n in sorted(words[path].items()))}" for path in words]),
    ):
        print(f"\n{title}:", *(rows or ["none"]), sep="\n  ")


if __name__ == "__main__":
    main()
