"""What kind of layer a module is, from its class name and its path alone.

Pure text, so that a trace from somebody else's model gets the same kinds as a live one. Whether a
module is a block is a question of structure and is answered where the structure is known.
"""

from __future__ import annotations

import re
from functools import lru_cache

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
_EXPERT_PATH = re.compile(r"(^|\.)experts(\.\d+)?$")
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


def looks_like_stage(class_name: str) -> bool:
    """Whether a class calls itself a stage: like ones beside each other may hold the blocks instead of being them."""
    return re.search(r"Stage(V?\d+)?$", class_name) is not None


def looks_like_block(class_name: str) -> bool:
    """Whether a class calls itself a layer or a block: for modules that stand alone, without a list around them."""
    return re.search(r"(Layer|Block)$", class_name) is not None and kind_of(class_name) in ("other", "attention")
