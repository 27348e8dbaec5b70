"""Trains in another directory and, if asked to, on a thread that goes on when the main part has ended."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")


def train(*, waits: bool) -> None:
    if waits:
        threading.main_thread().join(1)  # until the main part has ended, or nearly so
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(7):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")


how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "thread":
    threading.Thread(target=train, kwargs={"waits": True}).start()
elif how == "pool":
    ThreadPoolExecutor(1).submit(train, waits=True)
    raise SystemExit(3)
else:
    train(waits=False)
