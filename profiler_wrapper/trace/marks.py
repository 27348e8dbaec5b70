"""Layer marks: the names that are written into a trace while it is recorded, and back; and kinds of layers.

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
from functools import lru_cache
from typing import Literal
from urllib.parse import quote, unquote

PREFIX = "layer: "
REQUEST = "request: "  # begins the name of an annotation around a call of `generate` or of a pipeline
EVALUATION = f"{REQUEST}evaluation"  # around evaluation within training
MEMORY_POINT = "memory point: "  # begins the name of an annotation at a moment whose memory somebody asks for
GARBAGE = "garbage collection"  # around a collection of Python's: a name, which takes no time from what it lies in
ROOT_PATH = "."
ALL_GRAPHS = "*"  # stands for the key of any compiled graph that is not listed in run.json
# One mark nobody can break: printable ASCII without space, quote, backslash, percent and brackets.
_SAFE = "!#$&'()*+,-./:;<=>?@^_`{|}~"
_MARK = re.compile(r"layer: (?P<path>\S+) \[(?P<class_name>\S+) (?P<kind>\S+) @(?P<root>\S+)(?P<flags>(?: \S+)*)\]")

FLAGS = ("prefill", "decode", "verify", "compiled", "shared")
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
    path, class_name, root = map(_encode, (mark.path, mark.class_name, mark.root))
    return f"{PREFIX}{path} [{class_name} {mark.kind} @{root}{flags}]"


def parse_mark(name: str) -> Mark | None:
    """The mark whose event name this is, or None for any other event."""
    match = _MARK.fullmatch(name)
    return match and Mark(
        path=_decode(match["path"]),
        class_name=_decode(match["class_name"]),
        kind=match["kind"],
        root=_decode(match["root"]),
        flags=tuple(match["flags"].split()),
    )


# --- kinds: pure text, so that a trace from somebody else's model gets the same as a live one ---

KINDS = (
    "block", "attention", "mlp", "norm", "embedding", "head", "router", "expert", "adapter",
    "modulation", "conv", "other",
)  # fmt: skip

# The first rule that matches decides. Acronyms are written as models write them.
_CLASS_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("other", r"^Conv1D$|(Down|Up|Mid)(Encoder|Decoder)?Block|(Model|Transformer\dDModel)$|For[A-Z]\w+$|Dropout"),
        ("adapter", r"^(Lo[Rr][Aa]|Do[Rr][Aa]|IA3|Lo(Ha|Kr))|Adapter"),
        ("modulation", r"^Ada(?!ptive)|Ada(Layer|Group|RMS)?Norm|NormZero|NormContinuous|Modulat|AdaLN"),
        ("router", r"Router|Gate$|Gating"),
        ("expert", r"Experts?$|ExpertM(LP|lp)$"),
        ("embedding", r"Embed|Timesteps$|TextProjection$"),
        ("norm", r"Norm(alization)?(?![a-z])"),
        ("attention", r"Att(entio)?n(?!\w*Pool)|MHA|SelfOutput$"),
        ("head", r"(?<!Multi)Heads?$|FinalLayer|Classifier|LMHead"),
        ("mlp", r"M(LP|lp)(?![a-z])|FeedForward|FFN?(?![a-z])|Dense\w*Dense$|[Gg]LU$|Mo[Ee](?![a-z])"
                r"|\wIntermediate$|^(?!\w*Model)[A-Z]\w+Output$"),
        ("conv", r"Conv(?![a-z])"),
    )
)  # fmt: skip

# Classes so general that only a telling name says more about them.
_GENERAL = re.compile(r"Linear|Conv1D|Sequential|ModuleList|ModuleDict")
_INERT = re.compile(r"Identity$|Dropout|ReLU$|GELU$|SiLU$|Tanh$|Softmax$|Activation$")

_ADAPTER_PATH = re.compile(r"(^|\.)(lora_\w+|adapters?)(\.|$)")
_EXPERT_PATH = re.compile(r"(^|\.)(experts(\.(expert_)?(?P<number>\d+))?|shared_experts?)$")
_NAME_RULES: tuple[tuple[str, bool, re.Pattern[str]], ...] = tuple(
    (kind, also_general, re.compile(pattern))
    for kind, also_general, pattern in (
        ("modulation", True, r"\w*modulation|adaln\w*|(img|txt|t)_mod|t_block|scale_shift_table"),
        ("router", True, r"router|gate|\w*expert_gate|wg"),
        ("expert", True, r"shared_experts?"),
        ("head", True, r"lm_head|score|classifier|proj_out|heads?|qa_outputs|embed_out|final_layer|\w+_head"),
        ("embedding", False, r"embed\w*|\w+_embed(der|ding|dings)?|\w+_emb|wte|wpe|tok_embeddings"),
        ("norm", False, r"\w*norm\d?|ln_?\w|norm_\w+|\w*layer_?norm\w*"),
        ("attention", False, r"(self_|cross_)?att(entio)?n\d?"),
        ("mlp", True, r"mlp|ffn?|feed_forward|ff_context|ffwd"),
    )
)


@lru_cache(maxsize=4096)
def kind_of(class_name: str, path: str = "") -> str:
    """The kind of a module: one of `KINDS`, never "block".

    The class name decides; a general class (`Linear`, `Sequential`) or an unknown one goes by the
    last part of its path.
    """
    name = path.rpartition(".")[2]
    if _INERT.search(class_name):
        return "other"
    if _ADAPTER_PATH.search(path):
        return "adapter"
    if _EXPERT_PATH.search(path):
        return "expert"
    general = _GENERAL.fullmatch(class_name) is not None
    if not general:
        for kind, pattern in _CLASS_RULES:
            if pattern.search(class_name):
                return kind
    for kind, also_general, pattern in _NAME_RULES:
        if (also_general or not general) and pattern.fullmatch(name):
            return kind
    return "head" if general and path == "output" else "other"


def expert_number(path: str) -> int | None:
    """Which of the experts a module is, by its path: 3 for `mlp.experts.3`. None where it is all of them, or none."""
    match = _EXPERT_PATH.search(path)
    return int(match["number"]) if match is not None and match["number"] else None


def looks_like_stage(class_name: str) -> bool:
    """Whether a class calls itself a stage: like ones beside each other may hold the blocks instead of being them."""
    return re.search(r"Stage(V?\d+)?$", class_name) is not None


def looks_like_block(class_name: str) -> bool:
    """Whether a class calls itself a layer or a block: for modules that stand alone, without a list around them."""
    return re.search(r"(Layer|Block)$", class_name) is not None and kind_of(class_name) in ("other", "attention")


# --- Steps of inference servers ---

ServerPhase = Literal["prefill", "decode"]
# What servers write around a step: vLLM `execute_context_1(888)_generation_0(0)` and `execute_new_1_cached_3`, SGLang
# `step[DECODE bs=32]`, both at once where they are built upon one another.
_SERVER_STEP = re.compile(r"(gpu_)?execute_\w*\d|step\[(?P<mode>\w+)")
_REQUESTS = re.compile(r"context_(?P<context>\d+).*?_generation_(?P<generation>\d+)")
_MODES: dict[str, ServerPhase] = {
    "EXTEND": "prefill", "PREFILL": "prefill", "SPLIT_PREFILL": "prefill",
    "DECODE": "decode", "TARGET_VERIFY": "decode",
}  # fmt: skip


def is_server_step(name: str) -> bool:
    """Whether an annotation of this name is a step of an inference server."""
    return _SERVER_STEP.match(name) is not None


def phase_of_server_step(name: str) -> ServerPhase | None:
    """What a server does in a step; None where it does both at once, or does not tell."""
    if (requests := _REQUESTS.search(name)) is not None:
        prefills, decodes = int(requests["context"]) > 0, int(requests["generation"]) > 0
        return None if prefills == decodes else "prefill" if prefills else "decode"
    step = _SERVER_STEP.match(name)
    return _MODES.get(step["mode"] or "") if step is not None else None
