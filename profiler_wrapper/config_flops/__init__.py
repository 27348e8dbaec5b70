"""FLOPs of a model from its config: one function a family, registered under a name when this is imported."""

from profiler_wrapper.config_flops import families

__all__ = ["families"]
