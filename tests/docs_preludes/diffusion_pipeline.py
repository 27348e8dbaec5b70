"""A Stable Diffusion pipeline from small configs: nothing is downloaded."""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

torch.manual_seed(0)
_unet = UNet2DConditionModel(
    block_out_channels=(8, 16), layers_per_block=1, sample_size=8, norm_num_groups=2, cross_attention_dim=32,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
)  # fmt: skip
_vae = AutoencoderKL(
    block_out_channels=(8, 16), norm_num_groups=2, latent_channels=4,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
)  # fmt: skip
_text = CLIPTextModel(
    CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )
)  # fmt: skip
_letters = "abcdefghijklmnopqrstuvwxyz"
_words = ["<|startoftext|>", "<|endoftext|>", *(f"{letter}</w>" for letter in _letters), *_letters]
pipe = StableDiffusionPipeline(
    vae=_vae, text_encoder=_text, unet=_unet, scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
    tokenizer=CLIPTokenizer(vocab={word: n for n, word in enumerate(_words)}, merges=[], model_max_length=77),
    safety_checker=None, feature_extractor=None, requires_safety_checker=False,
)  # fmt: skip
pipe.set_progress_bar_config(disable=True)
