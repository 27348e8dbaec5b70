"""How a run is set up, as run.json says it: true, without effect, and without what cannot be told."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiler_wrapper.capture.runinfo import run_settings


def model() -> nn.Module:
    """44 numbers in float32 and 16 in bfloat16; the first layer is frozen (20 numbers)."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False).bfloat16())
    layers[1] = nn.Linear(4, 4)
    layers[0].requires_grad_(False)
    return layers


def test_parameters_are_counted_by_type_and_shared_ones_once() -> None:
    told = run_settings([model(), model()], [])["parameters"]
    assert told == {
        "tensors": 10,
        "elements": 2 * (20 + 20 + 16),
        "trainable_elements": 2 * (20 + 16),
        "bytes_by_dtype": {"float32": 2 * 40 * 4, "bfloat16": 2 * 16 * 2},
    }
    one = model()
    assert run_settings([one, one], [])["parameters"]["tensors"] == 5


def test_an_optimizer_is_told_as_it_was_made() -> None:
    layers = nn.Linear(4, 4)
    adam = torch.optim.AdamW(layers.parameters(), fused=True)
    sgd = torch.optim.SGD([{"params": [layers.weight], "foreach": True}, {"params": [layers.bias], "foreach": False}])
    lbfgs = torch.optim.LBFGS(layers.parameters())
    told = {one["class_name"]: one for one in run_settings([], [adam, sgd, lbfgs])["optimizers"]}
    assert told["AdamW"] == {
        "class_name": "AdamW",
        "module": "torch.optim.adamw",
        "fused": True,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "can_fuse": True,
        "can_foreach": True,
        "parameters": 2,
        "elements": 20,
        "devices": ["cpu"],
        "dtypes": ["float32"],
    }
    assert told["SGD"]["foreach"] is None  # one group says this, one that
    assert (told["LBFGS"]["can_fuse"], told["LBFGS"]["can_foreach"]) == (False, False)


def test_an_optimizer_that_is_fused_here_really_can_be() -> None:
    """What `can_fuse` promises, torch keeps."""
    for optimizer_class in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        parameter = nn.Parameter(torch.ones(4))
        (told,) = run_settings([], [optimizer_class([parameter], lr=0.1)])["optimizers"]
        assert told["can_fuse"]
        parameter.grad = torch.ones(4)
        optimizer_class([parameter], lr=0.1, fused=True).step()


def test_wrappers_and_the_attention_of_a_config_are_told() -> None:
    inner = nn.Linear(4, 4)
    inner.config = SimpleNamespace(_attn_implementation="eager")  # type: ignore[assignment]
    told = run_settings([nn.DataParallel(inner)], [])
    assert told["wrappers"] == ["DataParallel"]
    assert told["attention_implementation"] == "eager"
    plain = run_settings([nn.Linear(4, 4)], [])
    assert plain["wrappers"] == []
    assert "attention_implementation" not in plain


def test_switches_of_attention_are_told() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        told = run_settings([], [])["attention_backends"]
    assert told == {"flash": False, "mem_efficient": False, "math": True, "cudnn": False}
    assert run_settings([], [])["attention_backends"]["flash"]


def test_what_memory_is_free_is_told() -> None:
    at_most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < run_settings([], [])["free_memory_bytes"] < at_most


def test_nothing_is_told_of_devices_and_groups_that_are_not_there() -> None:
    told = run_settings([model()], [])
    if not torch.cuda.is_available():
        assert not {"device_count", "device_memory_bytes", "tf32", "cudnn", "allocator_settings"} & set(told)
        assert not torch.cuda.is_initialized()
    assert "process_group_backend" not in told


def test_what_cannot_be_told_is_left_out_and_nothing_raises() -> None:
    class Broken(nn.Module):
        @property
        def config(self) -> Any:
            raise RuntimeError("no")

    told = run_settings([Broken()], [object()])
    assert "optimizers" not in told
    assert "attention_implementation" not in told
    assert told["parameters"]["tensors"] == 0


def test_it_is_plain_data() -> None:
    layers = model()
    told = run_settings([layers], [torch.optim.AdamW(layers.parameters())])
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("group", ["gloo"])
def test_a_process_groups_backend_is_told(group: str, tmp_path: Any) -> None:
    torch.distributed.init_process_group(group, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert run_settings([], [])["process_group_backend"] == group
    finally:
        torch.distributed.destroy_process_group()


def test_variables_that_change_times_are_told_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_SECRET", "hidden")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    told = run_settings([], [])["environment"]
    assert (told["OMP_NUM_THREADS"], told["NCCL_ALGO"]) == ("3", "")
    assert "hidden" not in told.values()
