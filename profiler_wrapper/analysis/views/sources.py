"""Which line of Python an op comes from, where the recording has Python's stacks.

The profiler tells of a function the file and the line where it begins, as Python finds the file: a script
and its own modules relative to where it was started, installed packages by their name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution
from profiler_wrapper.trace.nesting import nearest, nest
from profiler_wrapper.trace.recording import Bool, Int32, Int64, PythonCalls, Recording

_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): ")
_INSTALLED = re.compile(r"(?:.*/)?(?:site|dist)-packages/")
_PYTHONS_OWN = re.compile(r"/lib/python3\.\d+/")
_GENERATED = re.compile(r"^<|/torchinductor_")  # `<string>` of a dataclass, what Inductor wrote
_CELL = re.compile(r"^<ipython-input|/ipykernel_\d+/")
_PLUMBING = ("torch", "torchgen", "functorch", "triton", "torch_xla", "profiler_wrapper")
_LIBRARIES = frozenset(
    (
        "accelerate", "apex", "bitsandbytes", "colossalai", "datasets", "deepspeed", "diffusers", "einops",
        "fairscale", "fbgemm_gpu", "flash_attn", "flashinfer", "fla", "fsspec", "huggingface_hub", "ignite",
        "IPython", "ipykernel", "jax", "kornia", "lightning", "lightning_fabric", "lightning_utilities",
        "liger_kernel", "megablocks", "monai", "numpy", "open_clip", "optimum", "packaging", "pandas", "peft", "PIL",
        "pydantic", "pytorch_lightning", "ray", "safetensors", "scipy", "sentence_transformers",
        "sglang", "sklearn", "timm", "tokenizers", "torchao", "torchaudio", "torchmetrics", "torchtune",
        "torchvision", "tqdm", "transformer_engine", "transformers", "trl", "typing_extensions", "unsloth", "vllm",
        "wandb", "xformers",
    )
)  # fmt: skip


_MOST = 5  # lines of a row
_OF_LIBRARIES = 2


class Origin(IntEnum):
    """Whose a line is."""

    NOBODY = 0  # torch's, Python's, our own, or generated
    LIBRARY = 1
    USER = 2


def origin_of(file: str) -> Origin:
    """Whose a file is, by its path as the profiler tells it."""
    file = file.replace("\\", "/")
    if _CELL.search(file):
        return Origin.USER
    if _GENERATED.search(file):
        return Origin.NOBODY
    installed = _INSTALLED.match(file)
    package = file[installed.end() if installed else 0 :].partition("/")[0].removesuffix(".py")  # "" of a full path
    if package in _PLUMBING or package in sys.stdlib_module_names or (not installed and _PYTHONS_OWN.search(file)):
        return Origin.NOBODY
    return Origin.LIBRARY if installed or package in _LIBRARIES else Origin.USER


class Lines(NamedTuple):
    """Per span numbers for `PythonSources.text`, -1 for none."""

    user: Int32  # the innermost line of the user's
    library: Int32  # the innermost line of a library other than torch, inside of that


class PythonSources:
    """Finds `file:line` of ops: those of the user's, and within them those of libraries."""

    def __init__(self, recording: Recording, attribution: Attribution) -> None:
        self._recording, self._attribution = recording, attribution
        self._texts: dict[int, str] = {}  # `file:line` by name index
        origin = np.zeros(len(recording.names) if len(recording.python) else 0, dtype=np.int8)
        for name in np.unique(recording.python.name).tolist():
            match = _FRAME.match(recording.names[name])
            if match is not None:
                self._texts[name] = f"{match['file']}:{match['line']}"
                origin[name] = origin_of(match["file"])
        self._origin = origin[recording.python.name]

    def __bool__(self) -> bool:
        return bool((self._origin > Origin.NOBODY).any())

    def text(self, source: int) -> str:
        """`file:line` of what `of` found."""
        return self._texts[source]

    def of(self, span: Int64, around: Int64 | None = None) -> Lines:
        """Per CPU span its lines.

        What an autograd node runs comes from the lines whose forward made the node, unless Python runs within the
        node. `around`: per span the CPU event around it, or itself, for spans that are not nested; -1 for none.
        """
        nested = span if around is None else around
        node = np.where(nested >= 0, self._attribution.node_of[nested], -1)
        made_by = self._forward_op_of_node[node]
        found, began_ns = self._innermost(span)
        in_the_node = (node >= 0) & (began_ns >= self._recording.spans.start_ns[node])
        from_forward = np.flatnonzero((made_by >= 0) & ~in_the_node)
        forward, began_ns = self._innermost(made_by[from_forward])
        known = began_ns >= 0
        found.user[from_forward[known]] = forward.user[known]
        found.library[from_forward[known]] = forward.library[known]
        return found

    def most_expensive(self, user: Iterable[int], library: Iterable[int]) -> tuple[str, ...]:
        """As texts, at most five, each once: of the user's the first, and at least two of libraries if there are."""
        users, libraries = (list(dict.fromkeys(map(self.text, lines))) for lines in (user, library))
        users = users[: _MOST - min(len(libraries), _OF_LIBRARIES)]
        return (*users, *libraries[: _MOST - len(users)])

    @cached_property
    def _forward_op_of_node(self) -> Int64:
        """Per span that is an autograd node the op whose forward made it; the last entry is for no node."""
        made_by = np.full(len(self._recording.spans) + 1, -1, dtype=np.int64)
        for link in self._attribution.links:
            made_by[link.node] = link.forward_op
        return made_by

    def _innermost(self, span: Int64) -> tuple[Lines, Int64]:
        """The lines around each span, and when the outer one of the two began; -1 for none."""
        spans, calls = self._recording.spans, self._recording.python
        lane, start, end = spans.lane[span], spans.start_ns[span], spans.end_ns[span]
        frames = [np.flatnonzero(self._origin == origin) for origin in (Origin.USER, Origin.LIBRARY)]
        user, library = (frame_around(calls, each, lane, start, end) for each in frames)
        begin = np.append(calls.start_ns, -1)  # the last one is for none
        library = np.where(begin[library] >= begin[user], library, -1)
        name = np.append(calls.name, np.int32(-1))
        return Lines(name[user], name[library]), np.where(user >= 0, begin[user], begin[library])


def frame_around(calls: PythonCalls, frames: Int64, lane: Int32, start_ns: Int64, end_ns: Int64) -> Int64:
    """Per interval the innermost of the frames that encloses it; -1 for none."""
    is_frame: Bool = np.arange(len(frames) + len(lane)) < len(frames)
    began = calls.start_ns[frames]
    nesting = nest(
        np.concatenate([calls.lane[frames], lane]),
        np.concatenate([began, start_ns]),
        np.concatenate([began + calls.duration_ns[frames], end_ns]),
    )
    frame = nearest(nesting.parent, is_frame)[len(frames) :]
    return np.where(frame >= 0, frames[frame] if len(frames) else -1, -1)
