"""Beside the training loop, for weeks; never synchronises the device."""
