"""Which line of a stack says where memory was asked for: the user's, the layer's, and what of torch lies below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from profiler_wrapper.recording.snapshot_records import Frame

Origin = Literal["forward", "backward", "optimizer", "other", "no stack"]

NO_LINE = "(no Python stack)"  # autograd's own threads and C++ have none
BEFORE_HISTORY = "(allocated before the history begins)"
_TORCH = re.compile(r"(?:^|(?:site|dist)-packages/|/pytorch/)(torch/.*)")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/(.*)")
_STANDARD_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)")
_OWN = re.compile(r"(?:^|/)profiler_wrapper/(?:capture/|\w+\.py)")
_COMPILED = re.compile(r"/torchinductor_[^/]*/")
_PLUMBING = ("torch/nn/modules/module.py", "torch/nn/modules/container.py", "torch/utils/_", "torch/_", "torch/fx/")
_KEPT_DIRECTORIES = 1  # of the path of a file that is not installed


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory was asked for. Texts are `"file.py:12 function"`, "" where the stack has none."""

    line: str  # the innermost line outside of torch and Python itself; NO_LINE, BEFORE_HISTORY
    inside: str  # what of torch that line was in: the nn module, the optimizer, compiled code
    layer: str  # the innermost `forward`, the user's before torch's
    caller: str  # the innermost line that is not of an installed package, where that is another one than `line`
    origin: Origin


NOWHERE = Place(NO_LINE, "", "", "", "no stack")
LONG_AGO = Place(BEFORE_HISTORY, "", "", "", "no stack")


def place(stack: Sequence[Frame]) -> Place:
    """The lines that matter of a stack, innermost frame first."""
    python = [frame for frame in stack if _is_python(frame)]
    if not python:
        return NOWHERE
    files = [frame.file.replace("\\", "/") for frame in python]
    torch = [match[1] if (match := _TORCH.search(file)) else "" for file in files]
    outside = [i for i, file in enumerate(files) if not torch[i] and not _is_plumbing(file)]
    own = next((i for i in outside if not _INSTALLED.match(files[i])), None)
    if source := next((frame.source for frame in python if frame.source), ""):  # of generated code
        line = _short_source(source)
        below = len(python)
    elif outside:
        line, below = _text(python[outside[0]]), outside[0]
    else:
        line, below = _text(python[0]), 0
    caller = _text(python[own]) if own is not None else ""
    return Place(
        line=line,
        inside=_inside(python[:below], files, torch),
        layer=_layer(python, torch, outside),
        caller=caller if caller != line else "",
        origin=_origin(python, torch),
    )


def _is_python(frame: Frame) -> bool:
    """A file of C++ that `stacks="all"` adds is none; cells of a notebook are named `<ipython-input-...>`."""
    if frame.file.startswith("<"):
        return not frame.file.startswith(("<frozen", "<__array")) and (
            not frame.file.startswith("<eval_with_key") or bool(frame.source)
        )
    return frame.file.endswith((".py", ".ipynb", ".pyx"))


def _is_plumbing(file: str) -> bool:
    return bool(_STANDARD_LIBRARY.search(file) or _OWN.search(file) or _COMPILED.search(file)) or file.startswith(
        "<eval_with_key"
    )


def _inside(below: Sequence[Frame], files: Sequence[str], torch: Sequence[str]) -> str:
    """Of the frames below the user's line, the one that says most: a module or an optimizer before any other."""
    telling = [i for i in range(len(below)) if torch[i] and not torch[i].startswith(_PLUMBING)]
    compiled = [i for i in range(len(below)) if _COMPILED.search(files[i])]
    best = [i for i in telling if torch[i].startswith(("torch/nn/modules/", "torch/optim/"))]
    for chosen in (compiled, best, telling):
        if chosen:
            text = _text(below[chosen[0]])
            return f"compiled code, {text}" if chosen is compiled else text
    return ""


def _layer(python: Sequence[Frame], torch: Sequence[str], outside: Sequence[int]) -> str:
    forwards = [i for i in outside if python[i].name == "forward"] or [
        i
        for i, file in enumerate(torch)
        if python[i].name == "forward" and file.startswith("torch/nn/") and not file.startswith(_PLUMBING)
    ]
    return _text(python[forwards[0]]) if forwards else ""


def _origin(python: Sequence[Frame], torch: Sequence[str]) -> Origin:
    """The innermost frame that tells decides: a checkpointed forward within backward counts as forward."""
    for frame, file in zip(python, torch, strict=True):
        if file.startswith("torch/optim/"):
            return "optimizer"
        if frame.name == "forward":
            return "forward"
        if file.startswith(("torch/autograd/", "torch/_tensor.py")) and "backward" in frame.name:
            return "backward"
    return "other"


def _text(frame: Frame) -> str:
    return f"{short_file(frame.file)}:{frame.line} {frame.name}".rstrip()


def _short_source(source: str) -> str:
    file, colon, rest = source.rpartition(":")
    return f"{short_file(file)}{colon}{rest}"


def short_file(file: str) -> str:
    """`"/usr/lib/python3/site-packages/torch/x.py"` -> `"torch/x.py"`, `"/home/me/run/a.py"` -> `"run/a.py"`."""
    file = file.replace("\\", "/")
    if match := _TORCH.search(file) or _INSTALLED.match(file):
        return match[1]
    return "/".join(file.split("/")[-1 - _KEPT_DIRECTORIES :])
