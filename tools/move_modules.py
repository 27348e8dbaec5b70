"""Moves and merges the modules of a checkout as `rooms.py` says, and rewrites every import: run once, in place.

    python tools/move_modules.py CHECKOUT

Prints modules without a room, names that clash, circles of imports. Afterwards: ruff check --fix, ruff format.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import sys
import textwrap
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import rooms

ROOT = Path(sys.argv[1])
PKG = ROOT / "profiler_wrapper"
P = "profiler_wrapper"

plan = {source: dest for dest, sources in rooms.ROOMS.items() for source in sources}


def dotted(rel: str) -> str:
    parts = Path(rel).with_suffix("").parts
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join([P, *parts])


for rel, changes in rooms.PATCHES.items():
    f = PKG / rel
    if f.exists():
        t = f.read_text()
        for a, b in changes:
            if a not in t:
                print("PATCH not found", rel, a)
            t = t.replace(a, b)
        f.write_text(t)
have = sorted(str(f.relative_to(PKG)) for f in PKG.rglob("*.py"))
dest_of: dict[str, str] = {}  # rel source -> rel dest
for rel in have:
    if rel in plan:
        dest_of[rel] = plan[rel]
    elif rel.endswith("__init__.py"):
        dest_of[rel] = None  # goes, if empty
    else:
        print("UNMAPPED", rel)
        dest_of[rel] = rel
new_module = {dotted(r): dotted(d) for r, d in dest_of.items() if d}


@dataclass
class Src:
    rel: str
    dest: str
    text: str = ""
    tree: ast.Module = None
    defs: dict = field(default_factory=dict)  # name -> source text
    renames: dict = field(default_factory=dict)  # old top-level name -> new


srcs: dict[str, Src] = {}
for rel, dest in dest_of.items():
    text = (PKG / rel).read_text(encoding="utf-8")
    tree = ast.parse(text)
    if dest is None:
        if not all(isinstance(n, ast.Expr) for n in tree.body):
            print("INIT WITH CODE", rel)
        continue
    s = Src(rel, dest, text, tree)
    for n in tree.body:
        names = []
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [n.name]
        elif isinstance(n, ast.Assign):
            for t in n.targets:
                for x in ast.walk(t):
                    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                        names.append(x.id)
        elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name):
            names = [n.target.id]
        elif isinstance(n, (ast.Try, ast.If, ast.With, ast.For)):
            for x in ast.walk(n):
                if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                    names.append(x.id)
                if isinstance(x, (ast.FunctionDef, ast.ClassDef)):
                    names.append(x.name)
        for name in names:
            s.defs[name] = ast.unparse(n)
    srcs[dotted(rel)] = s
groups = defaultdict(list)
for mod, s in srcs.items():
    groups[s.dest].append(mod)


def package_of(rel):
    return ".".join([P, *Path(rel).parent.parts]) if Path(rel).parent.parts else P


def resolve(rel, node):
    """absolute module of an ImportFrom"""
    if not node.level:
        return node.module or ""
    base = package_of(rel).split(".")[: len(package_of(rel).split(".")) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def runtime_top_imports(s):
    for n in s.tree.body:
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            yield n
        elif isinstance(n, (ast.If, ast.Try)) and not is_tc(n):
            for x in ast.walk(n):
                if isinstance(x, (ast.Import, ast.ImportFrom)):
                    yield x


def is_tc(n):
    return isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"


def targets(rel, n):
    """modules of ours that an import names: (module, attr or None, bound name)"""
    out = []
    if isinstance(n, ast.Import):
        for a in n.names:
            if a.name in srcs:
                out.append((a.name, None, a.asname or a.name))
    else:
        base = resolve(rel, n)
        for a in n.names:
            if f"{base}.{a.name}" in srcs and not (base in srcs and a.name in srcs[base].defs):
                out.append((f"{base}.{a.name}", None, a.asname or a.name))
            elif base in srcs:
                out.append((base, a.name, a.asname or a.name))
    return out


def order(mods):
    deps = {
        m: {t for n in runtime_top_imports(srcs[m]) for t, _, _ in targets(srcs[m].rel, n) if t in mods and t != m}
        for m in mods
    }
    done, out = set(), []

    def visit(m, stack=()):
        if m in done:
            return
        if m in stack:
            print("INNER CIRCLE", stack, m)
            return
        for d in sorted(deps[m]):
            visit(d, (*stack, m))
        if m not in done:
            done.add(m)
            out.append(m)

    for m in mods:
        visit(m)
    return out


# --- names that clash
clashes = []
imported_names = {}
for dest, mods in groups.items():
    mods[:] = order(mods)
    taken: dict[str, str] = {}
    binds: dict[str, tuple] = {}
    # names bound by imports of anything, in any source of the group
    for m in mods:
        s = srcs[m]
        for name, text in s.defs.items():
            key = (m.removeprefix(P + "."), name)
            if name not in taken and key in rooms.NAMES:
                s.renames[name] = rooms.NAMES[key]
                taken[rooms.NAMES[key]] = m
            elif name in taken:
                if srcs[taken[name]].defs[name] == text:
                    s.renames[name] = name
                    s.__dict__.setdefault("same", set()).add(name)
                    continue
                stem = Path(s.rel).stem.strip("_")
                if stem == "init":
                    stem = Path(s.rel).parent.name
                key = (m.removeprefix(P + "."), name)
                new = rooms.NAMES.get(key) or (
                    f"_{stem}{name}"
                    if name.startswith("_")
                    else f"{stem}_{name}"
                    if name.islower()
                    else f"{name}Of{stem.title().replace('_', '')}"
                    if not name.isupper()
                    else f"{stem.upper()}_{name}"
                )
                clashes.append((dest, m, taken[name], name, new))
                s.renames[name] = new
                taken[new] = m
            else:
                taken[name] = m


def new_name(mod, attr):
    return srcs[mod].renames.get(attr, attr)


def all_names(text):
    return {t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.NAME}


class Edit:
    def __init__(self, text):
        self.lines = text.splitlines(keepends=True)
        self.text = text
        self.edits = []

    def off(self, line, col):
        # ast cols are utf8 bytes
        text_line = self.lines[line - 1]
        c = len(text_line.encode()[:col].decode())
        return sum(map(len, self.lines[: line - 1])) + c

    def replace(self, node, new):
        self.edits.append((self.off(node.lineno, node.col_offset), self.off(node.end_lineno, node.end_col_offset), new))

    def cut(self, a, b, new):
        self.edits.append((a, b, new))

    def done(self):
        t = self.text
        for a, b, new in sorted(set(self.edits), reverse=True):
            t = t[:a] + new + t[b:]
        return t


def origin(mod, attr, depth=0):
    """Where a re-exported name is defined."""
    s = srcs[mod]
    if attr in s.defs or depth > 5:
        return mod, attr
    for n in ast.walk(s.tree):
        if isinstance(n, ast.ImportFrom) and n in s.tree.body:
            for a in n.names:
                if (a.asname or a.name) == attr:
                    base = resolve(s.rel, n)
                    if base in srcs:
                        return origin(base, a.name, depth + 1)
    return mod, attr


def ours(n):
    return (
        any(a.name.startswith(P) for a in n.names)
        if isinstance(n, ast.Import)
        else (n.level or (n.module or "").split(".")[0] == P)
    )


def import_text(n, s_rel, own_dest, sink, file_names, renames_mod, renames_name, lines=None):
    """New lines for an import node; same-dest ones vanish. Fills renames for usages."""
    out = []
    if not ours(n):
        return ["".join(lines[n.lineno - 1 : n.end_lineno]).rstrip("\n").strip() if lines else ast.unparse(n)]
    if isinstance(n, ast.Import):
        for a in n.names:
            if a.name in new_module:
                nm = new_module[a.name]
                if a.asname:
                    out.append(f"import {nm} as {a.asname}")
                    renames_mod[a.asname] = (a.name, a.asname)
                else:
                    out.append(f"import {nm}")
            else:
                out.append(f"import {a.name}" + (f" as {a.asname}" if a.asname else ""))
        return out
    base = resolve(s_rel, n) if s_rel is not None else n.module or ""
    for a in n.names:
        bound = a.asname or a.name
        sub = f"{base}.{a.name}"
        if sub in new_module and not (base in srcs and a.name in srcs[base].defs):
            nm = new_module[sub]
            parent, _, stem = nm.rpartition(".")
            if own_dest is not None and nm == own_dest:
                renames_mod[bound] = (sub, None)  # bound.attr -> attr
                continue
            if bound != a.name or stem == a.name:
                target = bound
            elif stem in file_names:
                target = a.name
            else:
                target = stem
            out.append(f"from {parent} import {stem}" + (f" as {target}" if target != stem else ""))
            renames_mod[bound] = (sub, target)
        elif base in new_module:
            if base in srcs:
                base_, name_ = origin(base, a.name)
            else:
                base_, name_ = base, a.name
            nm = new_module[base_]
            attr = new_name(base_, name_)
            if own_dest is not None and nm == own_dest:
                if bound != attr:
                    renames_name[bound] = attr
                continue
            if base not in srcs or (a.name not in srcs[base].defs):
                # re-exported: find where it comes from
                pass
            if a.asname and a.asname != attr:
                out.append(f"from {nm} import {attr} as {a.asname}")
            elif attr != a.name:
                out.append(f"from {nm} import {attr}")
                renames_name[a.name] = attr
            else:
                out.append(f"from {nm} import {attr}")
        else:
            lvl = base
            out.append(f"from {lvl} import {a.name}" + (f" as {a.asname}" if a.asname else ""))
    return out


STR = re.compile(r"\bprofiler_wrapper((?:\.[A-Za-z_]\w*)+)")


def strings(text):
    def sub(m):
        parts = m[1][1:].split(".")
        for k in range(len(parts), 0, -1):
            mod = ".".join([P, *parts[:k]])
            if mod in new_module:
                rest = parts[k:]
                if rest and mod in srcs:
                    rest[0] = new_name(mod, rest[0])
                return ".".join([new_module[mod], *rest])
        return m[0]

    return STR.sub(sub, text)


def unshadowed(tree, names):
    """Nodes of the tree, but Names and Attributes of Names that are local there."""

    def local(f):
        found = {
            a.arg
            for a in [
                *f.args.posonlyargs,
                *f.args.args,
                *f.args.kwonlyargs,
                *filter(None, [f.args.vararg, f.args.kwarg]),
            ]
        }
        for x in ast.walk(f):
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                found.add(x.id)
        return found & names

    def go(node, hidden):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            hidden = hidden | local(node)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
            hidden = hidden | {x.id for g in node.generators for x in ast.walk(g.target) if isinstance(x, ast.Name)}
        if isinstance(node, ast.Name) and node.id in hidden:
            return
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in hidden:
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from go(child, hidden)

    yield from go(tree, set())


def rewrite(text, rel, own_dest, own_mod=None):
    """(imports at top, tc imports, docstring, body text) for package sources; for others the whole text."""
    tree = ast.parse(text)
    e = Edit(text)
    file_names = all_names(text)
    rmod, rname = {}, {}
    top, tc = [], []

    def drop(n):
        a = e.off(n.lineno, 0)
        b = e.off(n.end_lineno, 0) + len(e.lines[n.end_lineno - 1])
        return a, b

    tops = set()
    attribute_values = {p.value for p in ast.walk(tree) if isinstance(p, ast.Attribute)}
    for n in tree.body:
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            tops.add(n)
            if isinstance(n, ast.ImportFrom) and n.module == "__future__":
                if own_dest:
                    e.cut(*drop(n), "")
                continue
            new = import_text(n, rel, own_dest, top, file_names, rmod, rname, e.lines)
            if not own_dest and not ours(n):
                continue
            keep = re.search(r"#\s*noqa.*", e.lines[n.end_lineno - 1])
            if own_dest and ours(n) and keep:
                new = [f"{x}  {keep[0]}" for x in new]
            if own_dest:
                top += new
                e.cut(*drop(n), "")
            else:
                said = [
                    t.string
                    for t in tokenize.generate_tokens(
                        io.StringIO("".join(e.lines[n.lineno - 1 : n.end_lineno])).readline
                    )
                    if t.type == tokenize.COMMENT
                ]
                if (
                    said
                    and all(x.startswith("from ") and " as " not in x for x in new)
                    and len({x.split()[1] for x in new}) == 1
                ):
                    new = [
                        f"from {new[0].split()[1]} import (  {said[0]}\n"
                        + "".join(f"    {x.split()[3]},\n" for x in new)
                        + ")"
                    ]
                    said = []
                e.cut(*drop(n), "".join(f"{x}{'  ' + said[0] if said else ''}\n" for x in new))
        elif (
            is_tc(n) and own_dest and all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in n.body) and not n.orelse
        ):
            for x in n.body:
                tops.add(x)
                tc += import_text(x, rel, own_dest, tc, file_names, rmod, rname, e.lines)
            e.cut(*drop(n), "")
    for n in ast.walk(tree):
        if isinstance(n, (ast.Import, ast.ImportFrom)) and n not in tops and ours(n):
            new = import_text(n, rel, own_dest, None, file_names, rmod, rname)
            ind = " " * n.col_offset
            a, b = drop(n)
            e.cut(a, b, "".join(f"{ind}{x}\n" for x in new) if new else "")
            if not new:
                print("  local import vanishes", rel, n.lineno)
    # usages of modules, but where a local variable has that name
    for n in unshadowed(tree, set(rmod)):
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in rmod:
            mod, target = rmod[n.value.id]
            attr = new_name(mod, n.attr)
            a = e.off(n.value.lineno, n.value.col_offset)
            b = e.off(n.end_lineno, n.end_col_offset)
            e.cut(a, b, attr if target is None else f"{target}.{attr}")
        elif isinstance(n, ast.Name) and n.id in rmod:
            mod, target = rmod[n.id]
            inside = n in attribute_values
            if not inside and isinstance(n.ctx, ast.Load):
                if target is None:
                    print("  module used as a value", rel, n.lineno, n.id)
                elif target != n.id:
                    e.replace(n, target)
    own = dict(srcs[own_mod].renames) if own_mod else {}
    own = {k: v for k, v in {**own, **rname}.items() if k != v}
    stored = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)} | {
        x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)
    }
    for k, v in rname.items():
        if v in stored and k != v:
            print("  SHADOWED", rel, k, "->", v)
    if own:
        for t in tokenize.generate_tokens(io.StringIO(text).readline):
            if t.type == tokenize.NAME and t.string in own:
                line = text.splitlines()[t.start[0] - 1]
                before = line[: t.start[1]].rstrip()
                after = line[t.end[1] :].lstrip()
                if before.endswith("."):
                    continue
                if after.startswith("=") and not after.startswith("==") and (before.endswith(("(", ","))):
                    continue
                if any(x.lineno <= t.start[0] <= x.end_lineno for x in tops):
                    continue
                a = sum(len(each) for each in text.splitlines(keepends=True)[: t.start[0] - 1]) + t.start[1]
                if any(A <= a < B for A, B, _ in e.edits):
                    continue
                e.cut(a, a + len(t.string), own[t.string])
    # identical definitions of an earlier source go
    if own_mod:
        same = getattr(srcs[own_mod], "same", set())
        for n in tree.body:
            nm = (
                getattr(n, "name", None)
                or (n.targets[0].id if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) else None)
                or (n.target.id if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) else None)
            )
            if nm in same:
                first = min([n.lineno, *[d.lineno for d in getattr(n, "decorator_list", [])]])
                a = e.off(first, 0)
                b = e.off(n.end_lineno, 0) + len(e.lines[n.end_lineno - 1])
                e.edits = [x for x in e.edits if not a <= x[0] < b]
                e.cut(a, b, "")
    offsets = [0]
    for each in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(each))
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        if t.type in (tokenize.STRING, tokenize.COMMENT) and P in t.string:
            new = strings(t.string)
            if new != t.string:
                e.cut(offsets[t.start[0] - 1] + t.start[1], offsets[t.end[0] - 1] + t.end[1], new)
    doc = ""
    if (
        own_dest
        and tree.body
        and isinstance(tree.body[0], ast.Expr)
        and isinstance(tree.body[0].value, ast.Constant)
        and isinstance(tree.body[0].value.value, str)
    ):
        doc = e.text[e.off(tree.body[0].lineno, 0) : e.off(tree.body[0].end_lineno, tree.body[0].end_col_offset)]
        e.cut(e.off(tree.body[0].lineno, 0), e.off(tree.body[0].end_lineno, tree.body[0].end_col_offset), "")
    body = e.done()
    return top, tc, doc, body


def circles(out):
    graph = {}
    mods = {dotted(d): d for d in out}
    for d, text in out.items():
        me = dotted(d)
        deps = set()
        for n in ast.parse(text).body:
            nodes = [n] if isinstance(n, (ast.Import, ast.ImportFrom)) else []
            for x in nodes:
                if isinstance(x, ast.Import):
                    cand = [a.name for a in x.names]
                else:
                    cand = [x.module or ""] + [f"{x.module}.{a.name}" for a in x.names]
                deps |= {c for c in cand if c in mods and c != me}
        graph[me] = deps
    index, low, stack, on, res, n = {}, {}, [], set(), [], [0]

    def visit(v):
        index[v] = low[v] = n[0]
        n[0] += 1
        stack.append(v)
        on.add(v)
        for w in graph[v]:
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in on:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            c = []
            while True:
                w = stack.pop()
                on.discard(w)
                c.append(w)
                if w == v:
                    break
            if len(c) > 1:
                res.append(c)

    sys.setrecursionlimit(10000)
    for v in graph:
        if v not in index:
            visit(v)
    for c in res:
        print("CIRCLE", len(c))
        for v in c:
            for n2 in ast.parse(out[mods[v]]).body:
                if isinstance(n2, ast.ImportFrom):
                    for a in n2.names:
                        for cand in (n2.module, f"{n2.module}.{a.name}"):
                            if cand in c and cand != v:
                                print("    ", v.removeprefix(P + "."), "->", cand.removeprefix(P + "."), ":", a.name)


out: dict[str, str] = {}
for dest, mods in groups.items():
    own_dest = dotted(dest)
    tops, tcs, bodies, docs = [], [], [], []
    for m in mods:
        s = srcs[m]
        top, tc, doc, body = rewrite(s.text, s.rel, own_dest, m)
        tops += top
        tcs += tc
        bodies.append(body.strip("\n"))
        docs.append(doc)
    # who gives the docstring
    stem = Path(dest).stem
    main = next((i for i, m in enumerate(mods) if Path(srcs[m].rel).stem == stem), None)
    if main is None:
        main = max(range(len(mods)), key=lambda i: len(bodies[i]))

    def comment(doc):
        t = ast.literal_eval(doc.strip()) if doc.strip() else ""
        lines = [each.rstrip() for each in t.strip().splitlines()]
        return "\n".join(x for each in lines for x in (["# " + y for y in textwrap.wrap(each, 118)] or ["#"]))

    text = docs[main].strip() + "\n\nfrom __future__ import annotations\n\n"
    seen = list(dict.fromkeys(tops))
    tcs = [t for t in dict.fromkeys(tcs) if t not in seen]
    text += "\n".join(seen) + "\n"
    if tcs:
        if "from typing import TYPE_CHECKING" not in seen:
            text += "from typing import TYPE_CHECKING\n"
        text += "\nif TYPE_CHECKING:\n" + "".join(f"    {t}\n" for t in tcs)
    elif len(mods) == 1:
        pass
    for i, body in enumerate(bodies):
        if not body.strip():
            continue
        head = ""
        if len(mods) > 1 and i != main and docs[i].strip():
            head = "# " + "-" * 98 + "\n" + comment(docs[i]) + "\n\n"
        text += "\n\n" + head + body + "\n"
    out[dest] = text

circles(out)
for dest, mods in groups.items():
    own = {srcs[m].renames.get(n, n): m for m in mods for n in srcs[m].defs}
    for n in ast.parse(out[dest]).body:
        for x in [n] if isinstance(n, (ast.Import, ast.ImportFrom)) else n.body if is_tc(n) else []:
            for a in getattr(x, "names", []):
                b = a.asname or a.name
                if b in own:
                    print("IMPORT CLASH", dest, b, "of", own[b], "and", ast.unparse(x))
# --- outside of the package
outside = [f for d in ("tests", "benchmarks", "examples") for f in (ROOT / d).rglob("*.py")]
rewritten = {}
for f in outside:
    t = f.read_text(encoding="utf-8")
    if P not in t:
        continue
    _, _, _, new = rewrite(t, None, None)
    if new != t:
        rewritten[f] = new
for f in [ROOT / "setup.cfg", ROOT / "pyproject.toml", ROOT / "ruff.toml", ROOT / "README.md", ROOT / ".ci/run"]:
    t = f.read_text()
    new = strings(t)
    if new != t:
        rewritten[f] = new
        print("text", f)

for rel in have:
    (PKG / rel).unlink()
folders = set()
for dest, text in out.items():
    f = PKG / dest
    f.parent.mkdir(parents=True, exist_ok=True)
    f.write_text(text, encoding="utf-8")
    folders.add(f.parent)
for r in sorted(folders):
    i = r / "__init__.py"
    if not i.exists():
        i.write_text("")
for f, new in rewritten.items():
    f.write_text(new, encoding="utf-8")
for d in sorted(PKG.rglob("*"), reverse=True):
    if d.is_dir() and d.name != "__pycache__" and not [x for x in d.iterdir() if x.name != "__pycache__"]:
        shutil.rmtree(d)
print("CLASHES", len(clashes))
for c in sorted(clashes):
    print("  ", c[0], c[1].removeprefix(P + "."), c[3], "->", c[4])
