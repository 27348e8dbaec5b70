"""Real models from small configs, without a download, and one way to train them.

`build("llama")` gives a `Case`: the model, its batches and its loss, the same for the same seed.
`train(case, steps=2)` runs forward, backward and AdamW. `variants.py` wraps a case's model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How big a model and its batch are. `tokens` is the sequence length of the models of text."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    vocabulary: int = 128
    batch: int = 2
    tokens: int = 16
    attention: str = "sdpa"  # Hugging Face's attn_implementation


@dataclass(frozen=True)
class Case:
    """A model with what it takes to train it."""

    name: str
    model: nn.Module
    batch: Callable[[int], Batch]  # seed -> keyword arguments of the model
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    blocks: str  # the name of the ModuleList that holds the blocks


# --- builders -----------------------------------------------------------------------------------


def _loss_of_output(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def _text_batch(size: Size, *, labels: bool = True) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, size.vocabulary, (size.batch, size.tokens), generator=generator)
        return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}

    return batch


def _llama_like(config_class: str, model_class: str, **more: Any) -> Callable[[Size], Case]:
    def builder(size: Size) -> Case:
        import transformers

        config = getattr(transformers, config_class)(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=2 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            max_position_embeddings=max(64, size.tokens),
            use_cache=False,
            attn_implementation=size.attention,
            **more,
        )
        model = getattr(transformers, model_class)(config)
        return Case(model_class, model, _text_batch(size), _loss_of_output, "model.layers")

    return builder


def _gpt2(size: Size) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=max(64, size.tokens),
        use_cache=False,
        attn_implementation=size.attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Case("GPT2LMHeadModel", GPT2LMHeadModel(config), _text_batch(size), _loss_of_output, "transformer.h")


def _bert(size: Size) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=2 * size.hidden,
        max_position_embeddings=max(64, size.tokens),
        attn_implementation=size.attention,
        num_labels=3,
    )
    text = _text_batch(size, labels=False)

    def batch(seed: int) -> Batch:
        return {**text(seed), "labels": torch.arange(seed, seed + size.batch) % 3}

    model = BertForSequenceClassification(config)
    return Case("BertForSequenceClassification", model, batch, _loss_of_output, "bert.encoder.layer")


def _vit(size: Size) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=2 * size.hidden,
        image_size=16,
        patch_size=4,
        attn_implementation=size.attention,
        num_labels=3,
    )

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(size.batch, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(seed, seed + size.batch) % 3}

    model = ViTForImageClassification(config)
    blocks = next(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == size.layers and type(module[0]).__name__ == "ViTLayer"
    )
    return Case("ViTForImageClassification", model, batch, _loss_of_output, blocks)


def _cogvideox(size: Size) -> Case:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=size.heads,
        attention_head_dim=size.hidden // size.heads,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=8,
        num_layers=size.layers,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        max_text_seq_length=8,
    )

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return {
            "hidden_states": torch.randn(size.batch, 2, 4, 8, 8, generator=generator),
            "encoder_hidden_states": torch.randn(size.batch, 8, 8, generator=generator),
            "timestep": torch.arange(seed, seed + size.batch) % 1000,
        }

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(**batch).sample - batch["hidden_states"]).square().mean()

    return Case("CogVideoXTransformer3DModel", model, batch, loss, "transformer_blocks")


BUILDERS: dict[str, Callable[[Size], Case]] = {
    "llama": _llama_like("LlamaConfig", "LlamaForCausalLM"),
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "mixtral": _llama_like("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _llama_like("Qwen2Config", "Qwen2ForCausalLM"),
    "cogvideox": _cogvideox,
}


def build(name: str, size: Size | None = None, *, seed: int = 0, **changes: Any) -> Case:
    """The case of that name: `build("llama", layers=4, hidden=128)`; the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        case = BUILDERS[name](replace(size or Size(), **changes))
    case.model.train()
    return case


# --- training -----------------------------------------------------------------------------------


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train_step(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    seed: int = 0,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
) -> float:
    """Forward and backward of `accumulate` micro-batches, then the optimizer; returns the summed loss."""
    total = 0.0
    device = next(model.parameters()).device.type
    for micro in range(accumulate):
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = case.loss(model, case.batch(seed * accumulate + micro))
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(case: Case, *, steps: int = 2, model: nn.Module | None = None, **step_options: Any) -> list[float]:
    """`steps` training steps of the case's model, or of `model`, which wraps it; returns the losses."""
    model = case.model if model is None else model
    optimizer = optimizer_of(model)
    return [train_step(case, model, optimizer, seed=step, **step_options) for step in range(steps)]
