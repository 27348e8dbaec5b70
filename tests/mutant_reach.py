"""Which tests evaluate which expression of the package: one run of all tests, kept until the package changes.

The run imports byte code that counts: each expression that a mutant can change, and each function, sets a byte of a
file when it is evaluated (`mutant_plugin.py` reads them). The text of the files stays as it is.
"""

from __future__ import annotations

import ast
import base64
import configparser
import hashlib
import importlib.util
import json
import marshal
import os
import shutil
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mutant_plugin as plugin
from mutant_changes import Function, Module, Mutant, Place, changes_of

PACKAGE = "profiler_wrapper"
MOST_S = 3.0  # CPU of the tests of one mutant
_COUNTING = f'''"""Counts what is evaluated, for the run of mutant_reach.py."""

import mmap
import os

if "{plugin.BITS}" in os.environ:
    with open(os.environ["{plugin.BITS}"], "r+b") as file:
        reached = mmap.mmap(file.fileno(), 0).__setitem__
else:
    reached = bytearray(%d).__setitem__
'''


def import_mode(root: Path) -> list[str]:
    """How pytest imports the tests of a checkout, of the options that it has there: else files of one name collide."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    options = config.get("tool:pytest", "addopts", fallback="")
    return [option for option in options.split() if option.startswith("--import-mode")]


def compile_to(path: Path, text: str | ast.Module) -> None:
    """Write byte code that is imported for a file whatever its text and its time are."""
    code = compile(text, str(path), "exec", dont_inherit=True)
    cached = Path(importlib.util.cache_from_source(str(path)))
    cached.parent.mkdir(exist_ok=True)
    unchecked, source_hash = (1).to_bytes(4, "little"), importlib.util.source_hash(path.read_bytes())
    cached.write_bytes(importlib.util.MAGIC_NUMBER + unchecked + source_hash + marshal.dumps(code))


def read_modules(root: Path) -> list[Module]:
    """The package of a checkout."""
    package = root / PACKAGE
    paths = sorted(package.rglob("*.py"))
    return [Module(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


@dataclass
class Numbers:
    """A number for each expression and function that the run counts.

    Attributes:
        expressions: by file and place; only those that run when a function is called.
        functions: by file and line.
        mentioned_in: functions by each name that they mention.
        made_of: names that are set, when modules are imported, from other names: by each of these.
        set_by: the names that a statement sets when its module is imported, by file and its first and last line.
    """

    expressions: dict[tuple[str, Place], int] = field(default_factory=dict)
    functions: dict[tuple[str, int], int] = field(default_factory=dict)
    mentioned_in: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    made_of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    set_by: dict[str, list[tuple[int, int, set[str]]]] = field(default_factory=lambda: defaultdict(list))
    count: int = 0

    def add(self, path: str, tree: ast.Module) -> None:
        """Number a file."""
        for found in changes_of(tree):
            if found.runs_later and (path, Place.of(found.node)) not in self.expressions:
                self.expressions[path, Place.of(found.node)] = self._next()
        for node in ast.walk(tree):
            if isinstance(node, Function):
                number = self.functions[path, node.lineno] = self._next()
                for name in {*_names(node.body), node.name}:
                    self.mentioned_in[name].add(number)
        self._statements(path, tree.body, "")

    def _next(self) -> int:
        self.count += 1
        return self.count - 1

    def _statements(self, path: str, body: list[ast.stmt], class_name: str) -> None:
        for node in body:
            sets = {class_name} if class_name else set()
            if isinstance(node, Function | ast.ClassDef):
                sets.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                sets.update(_names(node.targets if isinstance(node, ast.Assign) else [node.target]))
            if isinstance(node, Function):  # what its body needs is asked when it runs
                needs = _names([*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)])
            elif isinstance(node, ast.ClassDef):
                needs = _names([*node.decorator_list, *node.bases, *node.keywords])
            else:
                needs = _names([node])
            self.set_by[path].append((node.lineno, node.end_lineno or node.lineno, sets))
            for name in needs - sets:
                self.made_of[name] |= sets
            if isinstance(node, ast.ClassDef):
                self._statements(path, node.body, node.name)

    def of(self, mutant: Mutant) -> set[int]:
        """The expression that a mutant changes; if that runs at import, functions that use what it sets."""
        number = self.expressions.get((mutant.path, mutant.place))
        if number is not None:
            return {number}
        names: set[str] = set()
        around = [one for one in self.set_by[mutant.path] if one[0] <= mutant.place.lineno <= one[1]]
        more = max(around, key=lambda one: one[0])[2] if around else set()
        while more:
            names |= more
            more = set().union(*(self.made_of.get(name, set()) for name in more)) - names
        found = set().union(*(self.mentioned_in.get(name, set()) for name in names))
        return found or {number for (path, _), number in self.functions.items() if path == mutant.path}

    def counting(self, path: str, tree: ast.Module) -> ast.Module:
        """The file, changed so that it counts."""
        tree = _Counting(self, path, tree).visit(tree)
        at = next(
            (
                at
                for at, node in enumerate(tree.body)
                if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
                and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            ),
            len(tree.body),
        )
        imported = ast.ImportFrom(f"{PACKAGE}._reached_", [ast.alias("reached", "_reached_")], 0)
        tree.body.insert(at, ast.copy_location(imported, tree.body[0]) if tree.body else imported)
        return ast.fix_missing_locations(tree)


class _Counting(ast.NodeTransformer):
    def __init__(self, numbers: Numbers, path: str, tree: ast.Module) -> None:
        self._numbers, self._path = numbers, path
        places = {id(found.node): Place.of(found.node) for found in changes_of(tree) if found.runs_later}
        self._counted = {node: numbers.expressions[path, place] for node, place in places.items()}

    def visit(self, node: ast.AST) -> Any:
        number = self._counted.get(id(node))
        new = self.generic_visit(node)
        if number is not None:
            assert isinstance(new, ast.expr)
            return ast.copy_location(ast.BoolOp(ast.Or(), [_count(number), new]), new)
        if isinstance(new, Function):
            first = new.body[0]
            has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            counted = ast.Expr(_count(self._numbers.functions[self._path, new.lineno]))
            new.body.insert(int(has_docstring), ast.copy_location(counted, first))
        return new


def _count(number: int) -> ast.Call:
    """Returns None."""
    return ast.Call(ast.Name("_reached_", ast.Load()), [ast.Constant(number), ast.Constant(1)], [])


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for outer in nodes:
        for node in ast.walk(outer):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
    return found


@dataclass(frozen=True)
class Case:
    """A case that is not skipped. Some fail only because the package counts.

    Attributes:
        cpu_s: of the case, without fixtures of several cases; `fixtures` has theirs.
    """

    name: str
    cpu_s: float
    fixtures: dict[str, float]


class Reach:
    """The tests of a checkout, and what each evaluates."""

    def __init__(self, numbers: Numbers, lines: list[dict[str, Any]]) -> None:
        self._numbers = numbers
        lines = [line for line in lines if not line["skipped"]]
        self.tests = [Case(line["test"], line["cpu_s"], line["fixtures"]) for line in lines]
        self._bits = np.zeros((len(lines), -(-numbers.count // 8)), dtype=np.uint8)
        for row, line in zip(self._bits, lines, strict=True):
            row[:] = np.packbits(np.frombuffer(zlib.decompress(base64.b64decode(line["reached"])), dtype=np.uint8))
        self._alone_s = np.array([test.cpu_s + sum(test.fixtures.values()) for test in self.tests])

    def tests_of(self, mutant: Mutant, *, broken: set[str]) -> list[Case]:
        """Tests that can notice a mutant, those of its file and the cheapest first, `MOST_S` of them."""
        left_s = MOST_S
        rows = np.flatnonzero(self._reach(self._numbers.of(mutant)))
        near = self._reach({number for (path, _), number in self._numbers.functions.items() if path == mutant.path})
        chosen: list[Case] = []
        fixtures: set[str] = set()
        for row in rows[np.lexsort((self._alone_s[rows], ~near[rows]))]:
            test = self.tests[row]
            cost_s = test.cpu_s + sum(took_s for name, took_s in test.fixtures.items() if name not in fixtures)
            if test.name not in broken and cost_s <= left_s:
                left_s -= cost_s
                fixtures |= test.fixtures.keys()
                chosen.append(test)
        return chosen

    def _reach(self, numbers: set[int]) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(self.tests), dtype=bool)
        for number in numbers:
            found |= (self._bits[:, number >> 3] & (128 >> (number & 7))) > 0
        return found


def find_reach(root: Path, tree: Path, *, jobs: int, scratch: Path) -> Reach:
    """What the tests of a checkout evaluate: run those of which it is not known.

    `tree`: a copy of the checkout that may be changed.
    """
    modules = read_modules(root)
    numbers = Numbers()
    for module in modules:
        numbers.add(module.path, ast.parse(module.text))
    files = {path.relative_to(root).as_posix(): path for path in sorted((root / "tests").rglob("test_*.py"))}
    helpers = [
        path
        for path in sorted((root / "tests").rglob("*.py"))
        if path not in files.values() and path.name != "mutants.py"
    ]
    ours = [path for path in sorted(Path(__file__).parent.glob("mutant_*.py")) if path not in helpers]
    used = [*sorted((root / PACKAGE).rglob("*.py")), *helpers, *ours, root / "setup.cfg"]
    cache = root / ".pytest_cache" / "mutants" / f"{_hash(used)}.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    hashes = {name: _hash([path]) for name, path in files.items()}
    missing = [name for name in files if known.get(name, {}).get("hash") != hashes[name]]
    known = {name: of_file for name, of_file in known.items() if name in files and name not in missing}
    if missing:
        print(f"which tests reach what: a run of {len(missing)} files of tests ...", flush=True)
        known |= {name: {"hash": hashes[name], "tests": []} for name in missing}
        too_dear = _TooDear(root, hashes)
        for line in _run(modules, numbers, tree, missing, too_dear.tests, jobs=jobs, scratch=scratch):
            known[line["test"].split("::")[0]]["tests"].append(line)
            too_dear.see(line)
        shutil.rmtree(cache.parent, ignore_errors=True)
        cache.parent.mkdir(parents=True)
        cache.write_text(json.dumps(known))
        too_dear.write()
    return Reach(numbers, [line for of_file in known.values() for line in of_file["tests"]])


class _TooDear:
    """Tests that took more than any mutant may, when their file was what it is: they are not run again."""

    def __init__(self, root: Path, hashes: dict[str, str]) -> None:
        self._path = root / ".pytest_cache" / "mutants_too_dear.json"
        self._hashes = hashes
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.tests = [test for test, of_file in known.items() if hashes.get(test.split("::")[0]) == of_file]

    def see(self, line: dict[str, Any]) -> None:
        if line["cpu_s"] + sum(line["fixtures"].values()) > MOST_S:
            self.tests.append(line["test"])

    def write(self) -> None:
        self._path.write_text(json.dumps({test: self._hashes[test.split("::")[0]] for test in self.tests}))


def _hash(paths: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _run(
    modules: list[Module],
    numbers: Numbers,
    tree: Path,
    files: list[str],
    left_out: list[str],
    *,
    jobs: int,
    scratch: Path,
) -> Iterator[dict[str, Any]]:
    for module in modules:
        compile_to(tree / PACKAGE / module.path, numbers.counting(module.path, ast.parse(module.text)))
    (tree / PACKAGE / "_reached_.py").write_text(_COUNTING % numbers.count)
    out = scratch / "reach"
    out.mkdir()
    shutil.copy(plugin.__file__, out)
    (out / plugin.LEFT_OUT).write_text(json.dumps(left_out))
    environment = {
        **os.environ,
        plugin.FOLDER: str(out),
        plugin.SIZE: str(numbers.count),
        plugin.ROOT: str(tree),
        "PYTHONPATH": os.pathsep.join([str(tree), str(out)]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", plugin.__name__, "-p", "no:cacheprovider"]
    command += ["-n", str(jobs), "--dist", "worksteal", "-o", "addopts=", *import_mode(tree)]
    command += [f"--basetemp={scratch / 'pytest'}"]
    log = scratch / "reach.log"
    with log.open("w") as file:
        code = subprocess.run([*command, *files], cwd=tree, env=environment, stdout=file, stderr=file).returncode
    tail = "\n".join(log.read_text().splitlines()[-40:])
    if code not in (0, 1):
        raise SystemExit(f"the run of the tests ended with {code}:\n{tail}")
    print(tail, flush=True)
    for path in sorted(out.glob("tests-*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())
