"""Layer marks: the names that are written into a trace while it is recorded, and back.

A trace stores nothing of a mark but its name, so the name carries all that the analysis needs:

    layer: model.layers.3.self_attn [LlamaAttention attention @LlamaForCausalLM#0]
    layer: . [LlamaForCausalLM other @LlamaForCausalLM#0 decode]
    layer: vae.encoder [Encoder other @vae]

Path (`.` is the root itself), class, kind, root and flags. A root with `#<number>` is named by its
class and numbered among the roots of that class; one without has a name its user chose, which
starts the path of all its layers. Anything that the exporter could mangle is percent-encoded.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

PREFIX = "layer: "
MEMORY_POINT = "memory point: "  # begins the name of an annotation at a moment whose memory somebody asks for
GARBAGE = "garbage collection"  # around a collection of Python's: a name, which takes no time from what it lies in
ROOT_PATH = "."
# One mark nobody can break: printable ASCII without space, quote, backslash, percent and brackets.
_SAFE = "!#$&'()*+,-./:;<=>?@^_`{|}~"
_MARK = re.compile(r"layer: (?P<path>\S+) \[(?P<class_name>\S+) (?P<kind>\S+) @(?P<root>\S+)(?P<flags>(?: \S+)*)\]")

FLAGS = ("prefill", "decode", "compiled", "shared")
_LONGEST_PART = 400  # a name of a megabyte is cut; the hash keeps it unique


@dataclass(frozen=True, slots=True)
class Mark:
    """One layer as a trace tells it."""

    path: str  # the layer's name below its root, "." for the root itself
    class_name: str
    kind: str
    root: str  # "LlamaForCausalLM#0", or a name its user chose
    flags: tuple[str, ...] = ()  # of FLAGS


def _encode(text: str) -> str:
    if len(text) > _LONGEST_PART:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        text = f"{text[: _LONGEST_PART - 16]}...{digest}"
    return quote(text, safe=_SAFE, errors="surrogatepass") or "%00"


def _decode(text: str) -> str:
    return "" if text == "%00" else unquote(text, errors="surrogatepass")


def format_mark(mark: Mark) -> str:
    """The event name of `mark`: printable ASCII, safe in the exported JSON whatever the names hold."""
    flags = "".join(f" {flag}" for flag in mark.flags)
    path, class_name, root = (
        _encode(mark.path),
        _encode(mark.class_name),
        _encode(mark.root),
    )
    return f"{PREFIX}{path} [{class_name} {mark.kind} @{root}{flags}]"


def parse_mark(name: str) -> Mark | None:
    """The mark whose event name this is, or None for any other event."""
    if not name.startswith(PREFIX):
        return None
    match = _MARK.fullmatch(name)
    if match is None:
        return None
    return Mark(
        path=_decode(match["path"]),
        class_name=_decode(match["class_name"]),
        kind=match["kind"],
        root=_decode(match["root"]),
        flags=tuple(match["flags"].split()),
    )
