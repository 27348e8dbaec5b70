"""A diffusers pipeline: given as the model, each of its parts has its layers under its own name.

    python examples/05_diffusers_pipeline.py [--steps 4] [--output-dir outputs]

Look at the rows `transformer` and `vae`: where an image's time goes, denoising or decoding, and which block.
Needs diffusers (`pip install diffusers`); the pipeline is made from configs, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from profiler_wrapper import ProfilerWrapper


def main(steps: int, output_dir: Path) -> None:
    try:
        from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
    except ImportError as error:
        sys.exit(f"This example needs diffusers: pip install diffusers ({error})")

    transformer = DiTTransformer2DModel(
        sample_size=16,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
    )
    vae = AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    )
    pipeline = DiTPipeline(transformer=transformer, vae=vae, scheduler=DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    # A step is a request, here an image: two of warm-up, three whose times are shown.
    with ProfilerWrapper(pipeline, output_dir=output_dir, prefix="dit") as prof:
        for _ in range(5):
            pipeline([1], num_inference_steps=steps, output_type="np")

    result = prof.result
    assert result is not None
    time_ns = Counter[str]()
    for row in result.layers:
        time_ns[row.layer.partition(".")[0] or "outside of both"] += row.self_time_ns
    print("\ntime of an image, by part:")
    for part, spent_ns in time_ns.most_common():
        print(f"  {part:16s} {spent_ns / 3e6:8.2f} ms  {spent_ns / result.time.total_ns:6.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="denoising steps of an image")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.steps, options.output_dir)
