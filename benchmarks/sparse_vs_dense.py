"""Are sparse matrix products slower than dense ones at this sparsity? The SAMO paper's figure 1, measured here.

A square weight times the activations of some tokens, as in the forward pass of a linear layer:

dense      the pruned weight with its zeros, by the library of dense products (cuBLAS)
csr        the same weight, compressed rows (cuSPARSE)
2:4        half of the weight, two of every four: what NVIDIA's tensor cores skip; no other sparsity
bsr 32     as many weights in whole blocks of 32 x 32
bsr 64     the same with blocks of 64 x 64

    python -m benchmarks.sparse_vs_dense --out FOLDER
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from samo.bench.rows import Results, Row, Save, Table, between, markdown, reason
from samo.bench.timing import flusher, free, in_turns, ratio, spread
from samo.utils.formatting import count, percent, three_digits

NOTES: Final = (
    "A square weight of so many rows times so many tokens, in turns, with the cache flushed before each. "
    "Activations lie as each library likes best; laying them out is not timed.",
    "2:4 is 50 % sparse, whatever the others are: that is what the hardware skips.",
    "Each is checked against the dense product of its own weight before it is timed. Types: bfloat16 where "
    "the library can, else float16 or float32.",
)

SIZES: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
TOKENS: Final = (576, 4096)
"""576 is the batch of the SAMO paper's figure 1."""

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_ERROR: Final = 0.02
"""Of a right product in 16 bits, against the norm; a wrong one is off by 1."""

Product = Callable[[], Tensor]
Maker = Callable[[Tensor, Tensor], Product]


def measure(
    sizes: Sequence[int],
    tokens: Sequence[int],
    sparsity: float,
    device: torch.device,
    repeats: int,
    save: Save,
) -> list[Row]:
    """Time every library at every size; sizes and tokens are multiples of 64, for the blocks."""
    rows: list[Row] = []
    for number in tokens:
        for size in sizes:
            print(f"{count(size)} x {count(size)} weights, {count(number)} tokens")
            rows += _measure_one(size, number, sparsity, device, repeats)
            save(rows)
            free(device)
    return rows


def _measure_one(
    size: int, tokens: int, sparsity: float, device: torch.device, repeats: int
) -> list[Row]:
    torch.manual_seed(0)
    x_TD = torch.randn(tokens, size, device=device)
    rows: list[Row] = []
    calls: dict[str, Product] = {}
    dtypes: dict[str, torch.dtype] = {}
    weights = patterns(size, sparsity, device)
    for name, weight_DD in weights.items():
        try:
            calls[name], dtypes[name] = _prepare(MAKERS[name], weight_DD, x_TD)
        except Exception as error:  # each library fails in its own way
            settings = _parameters(weight_DD, tokens, None)
            rows.append(Row(name=name, parameters=settings, failure=reason(error)))
    times = in_turns(calls, rounds=repeats, device=device, prepare=flusher(device))
    flops = 2.0 * size * size * tokens
    for name, found in times.items():
        median = spread(found)["median"]
        rows.append(
            Row.timed(
                found,
                name=name,
                parameters=_parameters(weights[name], tokens, dtypes[name]),
                figures={
                    "against_dense": ratio(found, times["dense"]),
                    "dense_tflop_per_s": float(f"{flops / median / 1e9:.5g}"),
                },
            )
        )
    return sorted(rows, key=lambda row: list(MAKERS).index(row.name))


def patterns(size: int, sparsity: float, device: torch.device) -> dict[str, Tensor]:
    """Return the float32 weight that each library multiplies with.

    Example:
        >>> import torch
        >>> from benchmarks.sparse_vs_dense import patterns
        >>> found = patterns(256, 0.9, torch.device("cpu"))
        >>> [round(float((weight == 0).float().mean()), 1) for weight in found.values()]
        [0.9, 0.9, 0.5, 0.9, 0.9]
    """
    weight = torch.randn(size, size, device=device)
    unstructured = weight * (torch.rand_like(weight) >= sparsity)
    two_of_four = torch.tensor([1.0, 1.0, 0.0, 0.0], device=device).tile(size // 4)
    return {
        "dense": unstructured,
        "csr": unstructured,
        "2:4": weight * two_of_four,
        "bsr 32": weight * _blocks(size, 32, sparsity, device),
        "bsr 64": weight * _blocks(size, 64, sparsity, device),
    }


def _blocks(size: int, block: int, sparsity: float, device: torch.device) -> Tensor:
    """Return ones in as many blocks as stay, at random places."""
    number = (size // block) ** 2
    kept = torch.zeros(number, device=device)
    kept[torch.randperm(number, device=device)[: max(1, round(number * (1 - sparsity)))]] = 1
    grid = kept.view(size // block, size // block)
    return grid.repeat_interleave(block, 0).repeat_interleave(block, 1)


def _dense(weight: Tensor, x_TD: Tensor) -> Product:
    return lambda: x_TD @ weight.t()


def _csr(weight: Tensor, x_TD: Tensor) -> Product:
    found, x_DT = weight.to_sparse_csr(), x_TD.t().contiguous()
    # torch counts in 64 bits by default; half of that is less to read.
    crow, col = found.crow_indices().int(), found.col_indices().int()
    matrix = torch.sparse_csr_tensor(crow, col, found.values(), size=weight.shape)
    return lambda: (matrix @ x_DT).t()


def _semi_structured(weight: Tensor, x_TD: Tensor) -> Product:
    matrix = torch.sparse.to_sparse_semi_structured(weight)
    return lambda: torch.mm(matrix, x_TD.t()).t()


def _bsr(block: int) -> Maker:
    def make(weight: Tensor, x_TD: Tensor) -> Product:
        matrix, x_DT = weight.to_sparse_bsr((block, block)), x_TD.t().contiguous()
        return lambda: (matrix @ x_DT).t()

    return make


MAKERS: Final[dict[str, Maker]] = {
    "dense": _dense,
    "csr": _csr,
    "2:4": _semi_structured,
    "bsr 32": _bsr(32),
    "bsr 64": _bsr(64),
}


def _prepare(make: Maker, weight: Tensor, x_TD: Tensor) -> tuple[Product, torch.dtype]:
    """Return a product that works and is right, in the first type for which there is one.

    Raises:
        RuntimeError: There is none; the reason is that of the first type.
    """
    first: Exception | None = None
    for dtype in DTYPES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sparse tensors say that they are in beta state
                call = make(weight.to(dtype), x_TD.to(dtype))
                result = call().float()
        except Exception as error:  # as above
            first = first or error
            continue
        expected = (x_TD.to(dtype) @ weight.to(dtype).t()).float()
        error_norm = float((result - expected).norm() / expected.norm())
        if not error_norm <= _LARGEST_ERROR:
            raise RuntimeError(f"wrong result in {dtype}: it is off by {error_norm:.2g}")
        return call, dtype
    assert first is not None
    raise first


def _parameters(weight: Tensor, tokens: int, dtype: torch.dtype | None) -> dict[str, object]:
    return {
        "size": weight.shape[0],
        "tokens": tokens,
        "sparsity": round(float((weight == 0).float().mean()), 3),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }


def tabulate(rows: Sequence[Row]) -> Table:
    """Return the table of some rows."""
    head = ("product", "size", "tokens", "sparsity", "type", "ms", "p20-p80", "against dense")
    return Table(
        head,
        [
            (
                row.name,
                count(row.parameters["size"]),
                count(row.parameters["tokens"]),
                percent(row.parameters["sparsity"]),
                str(row.parameters["dtype"]),
                three_digits(row.median),
                between(row),
                three_digits(row.figures["against_dense"]),
            )
            for row in rows
            if row.median is not None
        ],
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and table")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--sparsity", type=float, default=0.9)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = Results(
        options.out,
        name="sparse-vs-dense",
        command="python -m benchmarks.sparse_vs_dense",
        device=device,
        tabulate=tabulate,
        notes=NOTES,
    )
    sizes, tokens = ((64, 128), (64,)) if options.toy else (SIZES, TOKENS)
    rows = measure(sizes, tokens, options.sparsity, device, options.repeats, results.save)
    print(markdown(tabulate(rows)))


if __name__ == "__main__":
    main()
