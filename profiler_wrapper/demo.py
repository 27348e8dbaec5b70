"""A small real Transformer, trained for a few seconds and profiled: what `python -m profiler_wrapper demo` runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.wrapper import ProfilerWrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Sizes of the model and its batches. `tokens` is the length of one sequence."""

    layers: int = 8
    hidden: int = 256
    heads: int = 8
    key_value_heads: int = 4
    intermediate: int = 704
    vocabulary: int = 2048
    batch: int = 4
    tokens: int = 128
    steps: int = 8

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# What keeps an accelerator busy for milliseconds a step, as the defaults do two CPU cores.
ACCELERATOR_CONFIG = DemoConfig(
    layers=16, hidden=2048, heads=16, key_value_heads=8, intermediate=5632, vocabulary=32000, batch=4, tokens=2048
)


def rotary_table(tokens: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """cos + i·sin of the rotary position embedding. Shape: (tokens, head_dim / 2, 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(tokens, device=device), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels of `x` by its position's angle. Shape of x: (batch, heads, tokens, head_dim)."""
    first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cosine, sine = table.to(x.dtype).unbind(-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.stack(turned, dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values and rotary positions."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        keys = config.key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden, keys, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, table), rotate(k, table)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate) * up)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden)
        self.mlp = FeedForward(config)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DemoLlama(nn.Module):
    """A decoder in the manner of Llama; returns the mean loss of predicting each next token."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape of tokens: (batch, tokens + 1); the last is only predicted."""
        x = self.embed_tokens(tokens[:, :-1])
        table = rotary_table(x.shape[1], self.config.head_dim, x.device)
        for layer in self.layers:
            x = layer(x, table)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def sequences(config: DemoConfig, seed: int, device: torch.device) -> torch.Tensor:
    """A batch that can be learned: each sequence counts up from a random token by a random stride."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(config.vocabulary, (config.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (config.batch, 1), generator=generator)
    return ((start + stride * torch.arange(config.tokens + 1)) % config.vocabulary).to(device)


def run_demo(*, output_dir: str | os.PathLike[str] = "outputs", config: DemoConfig | None = None) -> ProfileResult:
    """Train the demo model for `config.steps` steps on the best device here, profiled; return what was measured.

    Prints the layer table and where the files are; the last line says where the page is.

    Raises:
        EmptyRecording: nothing was recorded (profiling is off, or another profiler is on).
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    on_cpu = device.type == "cpu"
    config = config or (DemoConfig() if on_cpu else ACCELERATOR_CONFIG)
    torch.manual_seed(0)
    model = DemoLlama(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"Training a Transformer of {config.layers} layers and {millions:.1f} M parameters "
        f"for {config.steps} steps on {device} ...",
        flush=True,
    )
    with ProfilerWrapper(model, output_dir=output_dir, prefix="demo") as prof:
        for step in range(config.steps):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not on_cpu):
                loss = model(sequences(config, step, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    if prof.result is None:
        raise EmptyRecording("nothing was recorded: profiling is off in the environment, or another profiler is on")
    return prof.result
