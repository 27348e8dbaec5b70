"""The parts of a Transformer's block, and the products that each of them has."""

from __future__ import annotations

from dataclasses import dataclass

from profiler_wrapper.live.model_families.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAttention:
    """Attention whose keys and values may serve several heads of queries each (GQA).

    Attributes:
        width: of a head; heads x width need not be the width of the model.
        key_heads: heads of keys and of values.
        gate: the output is multiplied by a projection of the input as wide as all queries.
    """

    heads: int
    key_heads: int
    width: int
    gate: bool = False

    def add(self, work: Work, hidden: int, *, causal: bool, window: int | None = None, times: int = 1) -> None:
        queries, keys = self.heads * self.width, self.key_heads * self.width
        into = queries + 2 * keys + (queries if self.gate else 0)
        work.linear("attention_projections", hidden, into + queries, times=times)  # in, and back out
        work.attention(self.heads, self.width, causal=causal, window=window, times=times)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from one narrow projection.

    Attributes:
        query_rank: width of the narrow projection of queries; None: they have none.
        key_rank: of keys and values.
        plain_width, rotary_width: of a head's query and key, without and with positions; the rotary key is
            shared by all heads.
        value_width: of a head's value.
    """

    heads: int
    query_rank: int | None
    key_rank: int
    plain_width: int
    rotary_width: int
    value_width: int

    def add(self, work: Work, hidden: int, *, causal: bool, window: int | None = None, times: int = 1) -> None:
        width = self.plain_width + self.rotary_width
        part = "attention_projections"
        if self.query_rank is None:
            work.linear(part, hidden, self.heads * width, times=times)
        else:
            work.linear(part, hidden, self.query_rank, times=times)
            work.linear(part, self.query_rank, self.heads * width, times=times)
        work.linear(part, hidden, self.key_rank + self.rotary_width, times=times)
        work.linear(part, self.key_rank, self.heads * (self.plain_width + self.value_width), times=times)
        work.linear(part, self.heads * self.value_width, hidden, times=times)
        work.attention(self.heads, width, self.value_width, causal=causal, window=window, times=times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Two matrices, or three where one gates another (SwiGLU, GeGLU)."""

    width: int
    gated: bool

    def add(self, work: Work, hidden: int, *, part: str = "mlp", copies: int = 1, times: int = 1) -> None:
        """`copies`: of it that each token goes through."""
        work.linear(part, hidden, self.width, times=(3 if self.gated else 2) * copies * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts that drops no token: a router, the chosen experts, and those that all tokens share.

    Attributes:
        routed: how many the router chooses among.
        chosen: how many each token goes through.
        shared_width: of the shared experts together; 0: none.
        shared_gate: a product of the input with one vector weighs their output.
    """

    routed: int
    chosen: int
    width: int
    gated: bool
    shared_width: int = 0
    shared_gate: bool = False

    def add(self, work: Work, hidden: int, *, times: int = 1) -> None:
        work.linear("router", hidden, self.routed, times=times)
        Mlp(width=self.width, gated=self.gated).add(work, hidden, part="experts", copies=self.chosen, times=times)
        if self.shared_width:
            shared = Mlp(width=self.shared_width, gated=self.gated)
            shared.add(work, hidden, part="shared_experts", times=times)
            if self.shared_gate:
                work.linear("shared_experts", hidden, 1, times=times)
