"""Small loops of many kinds, each profiled in this process: `CASES["name"](directory)` gives the result.

What is to hold of any result is asked of them in `tests/test_wrapper_invariants.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import small_models
import variants
from profiler_wrapper import ProfileResult, ProfilerWrapper
from profiling import QUICK, result_of
from retained_cases import SwiGLU

STEPS = 6  # two of warm-up, three timed, one beyond
Loop = Callable[[ProfilerWrapper, int], None]  # one step; its end is the loop's to say
Case = Callable[[Path], ProfileResult]
CASES: dict[str, Case] = {}


def _case(name: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        CASES[name] = case
        return case

    return add


def profiled(model: Any, directory: Path, step: Loop, *, iterations: int = STEPS, **options: Any) -> ProfileResult:
    """The result of these steps, which end by themselves (an optimizer, a call) unless the loop says where."""
    quiet = {"files": QUICK, "enable_print_summary": False, "background": False, "output_dir": directory}
    with ProfilerWrapper(model, **{**quiet, **options}) as prof:
        for number in range(iterations):
            step(prof, number)
    return result_of(prof)


def trained(
    model: nn.Module, directory: Path, loss: Callable[[int], torch.Tensor], *, profile: Any = None, **options: Any
) -> ProfileResult:
    """Forward, backward and SGD, with `loss` of each step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(prof: ProfilerWrapper, number: int) -> None:
        loss(number).backward()
        optimizer.step()
        optimizer.zero_grad()

    return profiled(profile or model, directory, step, **options)


def of_case(case: models.Case, directory: Path, *, accumulate: int = 1, **options: Any) -> ProfileResult:
    """The training of a case of `models`, by AdamW."""
    optimizer = models.optimizer_of(case.model)

    def step(prof: ProfilerWrapper, number: int) -> None:
        models.train_step(case, case.model, optimizer, seed=number, accumulate=accumulate)

    return profiled(case.model, directory, step, **options)


def _inputs(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


# --- models from configs ----------------------------------------------------------------------------

for _name in models.BUILDERS:
    CASES[f"{_name} trains"] = lambda directory, name=_name: of_case(models.build(name), directory)  # type: ignore[misc]

_OPTIONS: dict[str, dict[str, Any]] = {
    "shapes in all steps": {"record_shapes": True},
    "shapes in no step": {"record_shapes": False},
    "memory is not recorded": {"profile_memory": False},
    "Python stacks": {"with_stack": True},
    "all steps": {"steps": "all"},
    "some steps": {"steps": "2-3"},
    "every layer": {"layers": "*"},
    "layers to a depth": {"layers": 1},
    "layers by pattern": {"layers": ["*.mlp"]},
    "no model is given": {},
}
for _name, _options in _OPTIONS.items():

    def _with_options(directory: Path, name: str = _name, options: dict[str, Any] = _options) -> ProfileResult:
        case = models.build("llama")
        optimizer = models.optimizer_of(case.model)

        def step(prof: ProfilerWrapper, number: int) -> None:
            models.train_step(case, case.model, optimizer, seed=number)

        return profiled(None if name == "no model is given" else case.model, directory, step, **options)

    CASES[_name] = _with_options


@_case("a schedule of torch")
def _schedule(directory: Path) -> ProfileResult:
    case = models.build("llama")
    optimizer = models.optimizer_of(case.model)

    def step(prof: ProfilerWrapper, number: int) -> None:
        models.train_step(case, case.model, optimizer, seed=number)
        prof.step()

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    return profiled(case.model, directory, step, schedule=schedule)


@_case("gradients of two micro-batches")
def _accumulation(directory: Path) -> ProfileResult:
    return of_case(models.build("qwen2"), directory, accumulate=2)


@_case("inference without gradients")
def _inference(directory: Path) -> ProfileResult:
    case = models.build("llama")
    case.model.eval()

    def step(prof: ProfilerWrapper, number: int) -> None:
        with torch.no_grad():
            case.model(**case.batch(number))

    return profiled(case.model, directory, step)


@_case("forward that keeps its graph")
def _forward_alone(directory: Path) -> ProfileResult:
    case = models.build("bert")
    return profiled(case.model, directory, lambda prof, number: case.model(**case.batch(number)) and None)


@_case("no optimizer")
def _no_optimizer(directory: Path) -> ProfileResult:
    case = models.build("vit")
    return profiled(case.model, directory, lambda prof, number: case.loss(case.model, case.batch(number)).backward())


@_case("generate")
def _generate(directory: Path) -> ProfileResult:
    case = models.build("gpt2")
    model: Any = case.model.eval()
    ids = torch.ones(2, 4, dtype=torch.long)

    def step(prof: ProfilerWrapper, number: int) -> None:
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0)

    return profiled(model, directory, step, iterations=5)


for _reentrant in (False, True):

    def _hf_checkpointing(directory: Path, reentrant: bool = _reentrant) -> ProfileResult:
        case = models.build("llama")
        variants.gradient_checkpointing(case, reentrant=reentrant)
        return of_case(case, directory)

    def _checkpoint_wrapped(directory: Path, reentrant: bool = _reentrant) -> ProfileResult:
        case = models.build("gpt2")
        variants.checkpoint_wrapped(case, reentrant=reentrant)
        return of_case(case, directory)

    _kind = "reentrant" if _reentrant else "not reentrant"
    CASES[f"checkpointing of Hugging Face, {_kind}"] = _hf_checkpointing
    CASES[f"CheckpointWrapper, {_kind}"] = _checkpoint_wrapped


@_case("LoRA")
def _lora(directory: Path) -> ProfileResult:
    case = models.build("llama")
    model = variants.lora(case)
    return trained(model, directory, lambda number: case.loss(model, case.batch(number)))


@_case("a frozen backbone")
def _frozen(directory: Path) -> ProfileResult:
    case = models.build("bert")
    case.model.get_submodule("bert").requires_grad_(False)
    return of_case(case, directory)


@_case("ALBERT: one block for all layers")
def _albert(directory: Path) -> ProfileResult:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=4, num_hidden_groups=2,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    model = AlbertForSequenceClassification(config)
    ids = torch.ones(2, 8, dtype=torch.long)
    return trained(model, directory, lambda number: model(ids, labels=torch.zeros(2, dtype=torch.long)).loss)


@_case("T5: encoder and decoder")
def _t5(directory: Path) -> ProfileResult:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    ids = torch.ones(2, 8, dtype=torch.long)
    return trained(model, directory, lambda number: model(input_ids=ids, labels=ids).loss)


@_case("Swin: shifted windows")
def _swin(directory: Path) -> ProfileResult:
    from transformers import Swinv2Config, Swinv2ForImageClassification

    config = Swinv2Config(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=3
    )
    model = Swinv2ForImageClassification(config)
    pixels = _inputs(2, 3, 16, 16)
    return trained(model, directory, lambda number: model(pixels, labels=torch.tensor([0, 1])).loss)


@_case("RWKV: slices that are written in place")
def _rwkv(directory: Path) -> ProfileResult:
    from transformers import RwkvConfig, RwkvForCausalLM

    model = RwkvForCausalLM(
        RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64)
    )
    ids = torch.ones(2, 8, dtype=torch.long)
    return trained(model, directory, lambda number: model(ids, labels=ids, use_cache=False).loss)


@_case("Mamba: a scan over tokens")
def _mamba(directory: Path) -> ProfileResult:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2))
    ids = torch.ones(2, 6, dtype=torch.long)
    return trained(model, directory, lambda number: model(ids, labels=ids, use_cache=False).loss)


@_case("a UNet of diffusers")
def _unet(directory: Path) -> ProfileResult:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    images = _inputs(2, 1, 8, 8)
    return trained(model, directory, lambda number: model(images, number).sample.square().mean())


@_case("a DiT of diffusers")
def _dit(directory: Path) -> ProfileResult:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=2, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    images, labels = _inputs(2, 2, 8, 8), torch.tensor([1, 2])

    def loss(number: int) -> torch.Tensor:
        return model(images, timestep=torch.tensor([number]), class_labels=labels).sample.square().mean()

    return trained(model, directory, loss)


@_case("an autoencoder of diffusers, two models")
def _two_models(directory: Path) -> ProfileResult:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        in_channels=1, out_channels=1, block_out_channels=(8,), latent_channels=2, norm_num_groups=4, sample_size=8,
    )  # fmt: skip
    head = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    images = _inputs(2, 1, 8, 8)
    together = nn.ModuleList([vae, head])
    models = {"vae": vae, "head": head}
    return trained(together, directory, lambda number: head(vae(images).sample).square().mean(), profile=models)


# --- written modules --------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


class _TwoParents(nn.Module):
    """One block that two parents have, beside one of their own."""

    def __init__(self) -> None:
        super().__init__()
        shared = _Block()
        self.first = nn.Sequential(shared, _Block())
        self.second = nn.Sequential(_Block(), shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class _SharedLeaf(nn.Module):
    """An activation that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), self.act, nn.Linear(16, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.act(x)  # type: ignore[no-any-return]


class _Slices(nn.Module):
    """Writes what it makes into slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        hidden = x[:, 0]
        for token in range(x.shape[1]):
            hidden = torch.tanh(self.cell(hidden + x[:, token]))
            out[:, token] = hidden
        return self.head(out)  # type: ignore[no-any-return]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16, sparse=True)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0][:, -1])  # type: ignore[no-any-return]


class _Encodes(nn.Module):
    """Layers whose methods are called, and `forward` itself, in the place of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _Block(), _Block()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder.forward(x)


class _Mixture(nn.Module):
    """Two experts, each given the rows that choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            out.index_add_(0, rows, expert(x[rows]))
        return out


class _Sparse(nn.Module):
    """A product with a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_inputs(64, 8))
        self.register_buffer("graph", (torch.rand(64, 64) < 0.05).float().to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.graph, self.weight) + x


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def _written(make: Callable[[], nn.Module], *sizes: int) -> Case:
    def case(directory: Path) -> ProfileResult:
        model, x = make(), _inputs(*sizes)
        return trained(model, directory, lambda number: model(x).square().mean())

    return case


CASES |= {
    "one block of two parents": _written(_TwoParents, 16, 32),
    "one activation of all blocks": _written(_SharedLeaf, 8, 16),
    "one layer under two names": _written(small_models.Shared, 8, 4),
    "one layer called twice": _written(small_models.CalledTwice, 8, 4),
    "a function of its own": _written(small_models.CustomFunction, 8, 4),
    "results that are changed in place": _written(small_models.InPlace, 8, 4),
    "slices that are written in place": _written(_Slices, 4, 8, 16),
    "functions between layers": _written(SwiGLU, 8, 32),
    "convolutions": _written(_conv_net, 2, 3, 8, 8),
    "experts by rows": _written(_Mixture, 16, 16),
    "a sparse product": _written(_Sparse, 64, 8),
    "attention and norm of torch": _written(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, 6, 16),
}


@_case("an LSTM with a sparse embedding")
def _lstm(directory: Path) -> ProfileResult:
    model, ids = _Recurrent(), torch.ones(2, 5, dtype=torch.long)
    return trained(model, directory, lambda number: model(ids).square().mean())


@_case("methods and forward called directly")
def _direct(directory: Path) -> ProfileResult:
    model, x = _Encodes(), _inputs(8, 32)
    return trained(model, directory, lambda number: model(model.encode(x)).square().mean())


@_case("a layer called outside of its model")
def _outside(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32)
    return trained(model, directory, lambda number: (model(x) + model[0](x)).square().mean())


@_case("checkpoint() of checkpoint()")
def _nested_checkpoints(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32).requires_grad_()

    def inner(x: torch.Tensor) -> Any:
        return checkpoint(model[1], model[0](x), use_reentrant=False)

    return trained(model, directory, lambda number: checkpoint(inner, x, use_reentrant=False).square().mean())


@_case("backward of a backward")
def _double_backward(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), nn.Tanh(), nn.Linear(32, 1)), _inputs(8, 32)

    def loss(number: int) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean()

    return trained(model, directory, loss)


@_case("one graph for two losses")
def _retained_graph(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32)

    def loss(number: int) -> torch.Tensor:
        result = model(x)
        result.square().mean().backward(retain_graph=True)
        return result.mean()  # type: ignore[no-any-return]

    return trained(model, directory, loss)


@_case("two optimizers")
def _two_optimizers(directory: Path) -> ProfileResult:
    model, x = nn.ModuleDict({"one": _Block(), "other": _Block()}), _inputs(8, 32)
    optimizers = [torch.optim.Adam(model["one"].parameters()), torch.optim.AdamW(model["other"].parameters())]

    def step(prof: ProfilerWrapper, number: int) -> None:
        for name, optimizer in zip(model, optimizers, strict=True):
            model[name](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        prof.step()

    return profiled(dict(model), directory, step)


@_case("an optimizer that skips steps, as a scaler's does")
def _skips(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(prof: ProfilerWrapper, number: int) -> None:
        model(x).square().mean().backward()
        if number % 3:
            optimizer.step()
        optimizer.zero_grad()

    return profiled(model, directory, step, iterations=9)


@_case("optimizers that step in backward")
def _in_backward(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32)
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return profiled(model, directory, lambda prof, number: model(x).square().mean().backward())


@_case("an evaluation after each step")
def _evaluation(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), nn.Dropout(0.1)), _inputs(8, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(prof: ProfilerWrapper, number: int) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    return profiled(model, directory, step)


@_case("a DataLoader and autocast")
def _data_loader(directory: Path) -> ProfileResult:
    model = nn.Sequential(_Block(), nn.LayerNorm(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = iter(torch.utils.data.DataLoader(_inputs(64, 32), batch_size=8))

    def step(prof: ProfilerWrapper, number: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()

    return profiled(model, directory, step)


@_case("a model called in another thread")
def _thread(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(prof: ProfilerWrapper, number: int) -> None:
        thread.submit(lambda: model(x).square().mean().backward()).result()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()

    with ThreadPoolExecutor(1) as thread:
        return profiled(model, directory, step)


@_case("an error in the third step, which the loop takes")
def _error(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32)

    def loss(number: int) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            model(x if number != 2 else x[:, :3])
        return model(x).square().mean()  # type: ignore[no-any-return]

    return trained(model, directory, loss)


@_case("named blocks")
def _named_blocks(directory: Path) -> ProfileResult:
    model, x = _Block(), _inputs(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(prof: ProfilerWrapper, number: int) -> None:
        with prof.record_function("loss"):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return profiled(model, directory, step, track=("aten::addmm",))


@_case("compiled blocks")
def _compiled_blocks(directory: Path) -> ProfileResult:
    case = models.build("llama")
    variants.compiled_blocks(case, backend="aot_eager")
    return of_case(case, directory)


@_case("a compiled model")
def _compiled_whole(directory: Path) -> ProfileResult:
    model, x = nn.Sequential(_Block(), _Block()), _inputs(8, 32)
    compiled: Any = torch.compile(model, backend="aot_eager")
    return trained(model, directory, lambda number: compiled(x).square().mean(), profile=compiled)


def live_result(name: str, directory: Path) -> ProfileResult:
    """The result of a case, the same model each time; compiled code goes with it."""
    torch.manual_seed(0)
    return CASES[name](directory)
