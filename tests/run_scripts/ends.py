"""A training without a framework; its arguments say how it ends, and who else profiles it."""

import importlib
import os
import re
import sys
from pathlib import Path

print("before", [name for name in ("torch", "numpy") if name in sys.modules])
os.environ["OMP_NUM_THREADS"] = "1"

import pickle  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402


class Data(torch.utils.data.Dataset):
    kind = "of __main__"

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def own_profile(how, model):
    from contextlib import nullcontext

    if how.startswith("late"):
        model(torch.ones(1, 8))
    if how.endswith("wrapper"):
        from profiler_wrapper import ProfilerWrapper

        return ProfilerWrapper(model, output_dir="own", files="result", enable_print_summary=False)
    return torch.profiler.profile(with_stack=True) if how.endswith("torch") else nullcontext()


def end(how):
    if how == "raise":
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("boom") from error
    if how.startswith("exit"):
        sys.exit(how.removeprefix("exit") if how[4:] == " text" else int(how[4:]))
    if how.startswith("signal"):
        os.kill(os.getpid(), int(how.split()[1]))


if __name__ == "__main__":
    how, workers, profiled = (*sys.argv[1:], "", "", "")[:3]
    print(sys.argv, __file__, sys.path[0], __spec__ and __spec__.name, __package__, torch.get_num_threads())
    print(pickle.loads(pickle.dumps(Data())).kind, sys.modules["__main__"].Data is Data)
    if how.endswith("Dynamo"):
        importlib.import_module("torch._dynamo")  # its handler runs at exit
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    options = {"num_workers": 1, "multiprocessing_context": workers} if workers else {}
    loader = torch.utils.data.DataLoader(Data(), batch_size=2, **options)
    with own_profile(profiled, model) as prof:
        for step, batch in enumerate(loader):
            loss = model(batch).square().mean()
            loss.backward()
            with torch.no_grad():  # an optimizer of torch's imports its compiler, which takes a second
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
            print(step, loss.item().hex(), flush=True)
            if step == 5:
                end(how)
    if profiled.endswith("torch"):
        prof.export_chrome_trace("trace.json")  # events() fails now and then: torch gives a name that is no text
        print(sorted(set(re.findall(r"nn\.Module: \w+", Path("trace.json").read_text(errors="replace")))))
    if profiled.endswith("wrapper"):
        print([step.step for step in prof.result.steps], len(prof.result.layers))
    print(torch.rand(1).item().hex())
