"""Products of tensors that are not dense: a trace has their shapes and no layout, so their FLOPs are not known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from profiler_wrapper.result import load

N, WIDTH = 16, 4
X, B, V = torch.ones(N, WIDTH), torch.ones(N, WIDTH), torch.ones(N)
DENSE = torch.eye(N)
WEIGHT = torch.ones(8, WIDTH)
pytestmark = pytest.mark.filterwarnings("ignore")


def sparse(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on its sparse tensors
        return DENSE.to_sparse(layout=layout, blocksize=(4, 4) if layout == torch.sparse_bsr else None)


COO, CSR, CSC, BSR = map(sparse, (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr))


def recorded(run: Callable[[], object], path: Path) -> tuple[int, list[str]]:
    """FLOPs that are known, and the ops whose FLOPs are not."""
    with profile(record_shapes=True, activities=[ProfilerActivity.CPU]) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    found = load(path)
    return sum(row.flops_per_step for row in found.flops), [row.op for row in found.uncounted]


def backward(product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    product(X.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.sparse.mm(COO, X),
        lambda: COO @ X,
        lambda: X.t() @ COO,
        lambda: COO @ V,
        lambda: torch.addmm(B, COO, X),
        lambda: torch.sparse.addmm(B, COO, X),
        lambda: torch.sparse.mm(COO, COO),
        lambda: torch.bmm(torch.stack([DENSE, DENSE]).to_sparse(), torch.stack([X, X])),
        lambda: CSR @ X,
        lambda: X.t() @ CSR,
        lambda: CSR @ V,
        lambda: CSR @ CSR,
        lambda: torch.addmm(B, CSR, X),
        lambda: torch.sparse.sampled_addmm(CSR, X, X.t()),
        lambda: CSC @ X,
        lambda: BSR @ X,
        lambda: torch.nn.functional.linear(X.t(), BSR),
        lambda: backward(lambda x: torch.sparse.mm(COO, x)),
        lambda: backward(lambda x: CSR @ x),
    ],
)
def test_a_product_of_a_sparse_tensor_is_not_known(run: Callable[[], object], tmp_path: Path) -> None:
    flops, uncounted = recorded(run, tmp_path / "trace.json")
    assert flops == 0
    assert uncounted


def test_dense_products_beside_sparse_ones_count(tmp_path: Path) -> None:
    flops, uncounted = recorded(lambda: torch.sparse.mm(COO, X @ WEIGHT.t()), tmp_path / "trace.json")
    assert (flops, bool(uncounted)) == (2 * N * WIDTH * 8, True)


def linear_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.addmm(torch.ones(8), X, WEIGHT.t())
        torch.nn.functional.linear(X, WEIGHT)


def of_jagged() -> None:
    ragged = [torch.ones(5, WIDTH), torch.ones(11, WIDTH)]
    for layout in (torch.jagged, torch.strided):
        torch.nn.functional.linear(torch.nested.nested_tensor(ragged, layout=layout), WEIGHT)


@pytest.mark.parametrize(
    ("run", "products"),
    [
        (linear_under_autocast, 2),
        (of_jagged, 2),
        (lambda: torch.mm(X, WEIGHT.t(), out=torch.empty(N, 8)), 1),
        (lambda: torch.addmm(torch.ones(8), X, WEIGHT.t(), out=torch.empty(N, 8)), 1),
        (lambda: torch.func.vmap(lambda x: WEIGHT @ x)(X), 1),
        (lambda: WEIGHT.new_ones(8, N) @ torch.ones(N, WIDTH), 1),
        (lambda: torch.nn.functional.embedding(torch.arange(4), WEIGHT.clone().requires_grad_(), sparse=True), 0),
    ],
)
def test_dense_products_count(run: Callable[[], object], products: int, tmp_path: Path) -> None:
    assert recorded(run, tmp_path / "trace.json") == (products * 2 * N * WIDTH * 8, [])


def test_dense_products_of_vectors_count(tmp_path: Path) -> None:
    assert recorded(lambda: DENSE @ V, tmp_path / "trace.json") == (2 * N * N, [])
