"""How many FLOPs the models of a family need, from their configs: one function each, registered under a name."""

from profiler_wrapper.live.model_families import decoders, diffusion, encoders

__all__ = ["decoders", "diffusion", "encoders"]
