"""FSDP2 on gloo, to be started by torchrun."""

import sys

import torch
import torch.distributed as dist
from own_block import own_block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
with own_block(model):
    for _ in range(6):
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stdout.write(f"{dist.get_rank()} {loss.item().hex()}\n")  # at once: two ranks write here
        sys.stdout.flush()
dist.destroy_process_group()
