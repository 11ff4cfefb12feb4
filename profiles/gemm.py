"""FP8 GEMMs of the presets: torch's algorithm beside the others that cuBLASLt proposes, and fast accumulation beside accurate.

For each linear of a block its forward (x w^T), its input gradient (dgrad, dy w) and its weight gradient (wgrad, dy^T x), with
the dtypes, the output and the accumulation that a step uses. Measured like profiles/kernels.py, whose functions it uses:
graphs of many launches that rotate among operands larger than the L2 cache together.

  torch       torch._scaled_mm
  first       the first algorithm of cuBLASLt's list, called directly; it should be torch's
  chosen      the one that a Trainer's first step would choose, by a timing of its own; "#3" is its place in the list
  best        the fastest here; where it differs from the chosen one, the choice was made by noise or by another state of the caches
  gain        torch's time over the chosen one's
  of peak     of 1979 TFLOP/s, dense FP8 on an H100 or H200

Gradients accumulate accurately; the second line of one is the same product accumulated fast, as with
DelayedScaling(backward_fast_accum=True). SQNR is the output's, against a product in fp64 of the same FP8 operands, Gaussian
before they were quantized; what quantizing costs is not in it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from kernels import measure_us, num_buffers, weight_shapes
from torch import Tensor

from graphrt.kernels import cublaslt, gemm
from graphrt.kernels.cublaslt_gemm import Algorithm, Gemm, GemmKey
from graphrt.kernels.gemm_choice import NUM_CANDIDATES, Operands, choose, time_algorithms
from graphrt.presets import PRESETS

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
PEAK_TFLOP_S = 1979
LINEARS = ("qkv", "out", "w13", "w2")
NUM_LAUNCHES = 12
NUM_CALLS = 200


@dataclass(frozen=True)
class Product:
    """One GEMM of a step."""

    name: str
    key: GemmKey

    @property
    def flops(self) -> int:
        return 2 * self.key.m * self.key.n * self.key.k


def products(preset: str) -> Iterator[Product]:
    """The GEMMs of one block; those of the gradients also accumulated fast."""
    tokens = PRESETS[preset].tokens_per_step
    for linear, (num_out, num_in) in zip(LINEARS, weight_shapes(preset), strict=False):
        forward = GemmKey(0, tokens, num_out, num_in, E4M3, E4M3, BF16, fast_accum=True, has_bias=False)
        dgrad = GemmKey(0, tokens, num_in, num_out, E5M2, E4M3, BF16, fast_accum=False, has_bias=False)
        wgrad = GemmKey(0, num_out, num_in, tokens, E5M2, E4M3, FP32, fast_accum=False, has_bias=False)
        for name, key in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad)):
            yield Product(f"{linear} {name}", key)
            if key is not forward:
                yield Product("", key._replace(fast_accum=True))


@dataclass(frozen=True)
class Row:
    """Times in microseconds."""

    product: Product
    torch_us: float
    first_us: float
    chosen_us: float
    best_us: float
    chosen: int
    best: int
    sqnr_db: float


def measure(product: Product, num_replays: int) -> Row:
    """One product."""
    key = product.key
    unit = torch.ones(1, device="cuda")
    sets = [_make_operands(key, unit) for _ in range(num_buffers(key.k * (key.m + key.n)))]
    outs = [torch.empty(key.m, key.n, dtype=key.out, device="cuda") for _ in sets]
    planned = Gemm(cublaslt.load(), key)
    candidates = planned.candidates(NUM_CANDIDATES)
    choice = choose(candidates, lambda algorithms: time_algorithms(planned, key, sets[0], algorithms))

    def median_us(launch: Callable[[Operands, Tensor], object]) -> float:
        return measure_us([partial(launch, *pair) for pair in zip(sets, outs, strict=True)], NUM_LAUNCHES, num_replays)

    by_torch = median_us(lambda operands, out: gemm._multiply_by_torch(operands, key.out, key.fast_accum, out))
    times = [median_us(lambda operands, out, algorithm=algorithm: planned.multiply(algorithm, *operands, out)) for algorithm in candidates]
    chosen = 0 if choice.algorithm is None else candidates.index(choice.algorithm)
    best = min(range(len(times)), key=times.__getitem__)
    planned.multiply(candidates[chosen], *sets[0], outs[0])
    return Row(product, by_torch, times[0], times[chosen], times[best], chosen, best, _sqnr_db(outs[0], sets[0]))


def _make_operands(key: GemmKey, unit: Tensor) -> Operands:
    return Operands(
        torch.randn(key.m, key.k, device="cuda").to(key.a), unit, torch.randn(key.n, key.k, device="cuda").to(key.b_t), unit, None
    )


def _sqnr_db(out: Tensor, operands: Operands) -> float:
    rows = 1024  # of the output: fp64 takes eight times the room
    expected = operands.a[:rows].double() @ operands.b_t.double().t()
    noise = (out[:rows].double() - expected).square().mean()
    return float(10 * torch.log10(expected.square().mean() / noise))


def measure_host_us(key: GemmKey) -> tuple[float, float]:
    """Host time of one call, torch's and the direct one; the device keeps up."""
    operands, planned = _make_operands(key, torch.ones(1, device="cuda")), Gemm(cublaslt.load(), key)
    algorithm: Algorithm = planned.candidates(1)[0]

    def call_directly() -> None:
        planned.multiply(algorithm, *operands, torch.empty(key.m, key.n, dtype=key.out, device="cuda"))

    def host_us(call: Callable[[], object]) -> float:
        times = []
        for _ in range(NUM_CALLS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return sorted(times)[NUM_CALLS // 2] * 1e6

    return host_us(lambda: gemm._multiply_by_torch(operands, key.out, key.fast_accum, None)), host_us(call_directly)


def print_table(rows: list[Row], preset: str) -> None:
    """One line a product, and what a block of them takes."""
    print(f"\n{preset}, {PRESETS[preset].tokens_per_step} tokens")
    head = ("torch us", "first us", "chosen us", "best us", "gain", "TFLOP/s", "of peak", "SQNR dB")
    print(f"{'product':12} {'M x N x K, dtypes':42}" + "".join(f"{name:>14}" for name in head))
    for row in rows:
        rate = row.product.flops / row.chosen_us / 1e6
        cells = (
            f"{row.torch_us:.1f}", f"{row.first_us:.1f}", f"{row.chosen_us:.1f} #{row.chosen + 1}", f"{row.best_us:.1f} #{row.best + 1}",
            f"{row.torch_us / row.chosen_us:.3f}", f"{rate:.0f}", f"{rate / PEAK_TFLOP_S:.1%}", f"{row.sqnr_db:.1f}",
        )  # fmt: skip
        print(f"{row.product.name:12} {row.product.key!s:42}" + "".join(f"{cell:>14}" for cell in cells))
    used = [row for row in rows if row.product.name]
    print(f"a block's {len(used)} products: torch {sum(row.torch_us for row in used):.0f} us, ", end="")
    print(f"chosen {sum(row.chosen_us for row in used):.0f} us, best {sum(row.best_us for row in used):.0f} us")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="example: python profiles/gemm.py 1b --replays 30"
    )
    parser.add_argument("presets", nargs="*", default=["micro", "1b"], help=f"of {', '.join(PRESETS)} (default: micro 1b)")
    parser.add_argument("--replays", type=int, default=15, metavar="N", help="graph replays a case (default: 15)")
    parsed = parser.parse_args(arguments)
    unknown = [preset for preset in parsed.presets if preset not in PRESETS]
    if unknown:
        parser.error(f"no preset is called {unknown[0]}; there are {', '.join(PRESETS)}")
    if not torch.cuda.is_available():
        print("profiles/gemm.py needs an NVIDIA GPU with FP8, and torch sees none.", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {cublaslt.load().version}")
    for preset in parsed.presets:
        print_table([measure(product, parsed.replays) for product in products(preset)], preset)
    by_torch, directly = measure_host_us(next(iter(products(parsed.presets[0]))).key)
    print(f"\nhost time of one call: torch {by_torch:.1f} us, directly {directly:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
