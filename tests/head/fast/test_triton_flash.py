"""The flash kernel in Triton against the plain one, and what its tiles become on Hopper."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import in_triton, needs_triton

from eagle3.head.segments import Segments

HEADS = [(4, 1, 16), (2, 2, 32), (6, 2, 16)]
# Queries and keys of each segment: none, one, whole blocks and ragged ones, with and without keys that all rows read.
LENGTHS = [(17, 47), (0, 5), (1, 1), (0, 0), (33, 33), (16, 64), (1, 40), (70, 87), (3, 3), (0, 9)]
NO_KEYS = (5, 0)  # of a turn without earlier ones, never in a causal call


def segments(*, causal: bool) -> Segments:
    all_lengths = LENGTHS if causal else [LENGTHS[0], NO_KEYS, *LENGTHS[1:], NO_KEYS]
    bounds = torch.tensor([(0, 0), *all_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).T.contiguous()
    most_queries, most_keys = (max(lengths) for lengths in zip(*all_lengths, strict=True))
    return Segments(
        query_bounds=bounds[0], key_bounds=bounds[1], most_queries=most_queries, most_keys=most_keys, causal=causal
    )


def kernels_equal_plain_attention(device: str) -> None:
    """Views of wider projections, as training hands over; output and log-sum-exp that other parts were merged into."""
    from kernel_cases import PlainKernel

    from eagle3.head.fast.triton_flash import TILES, Tile, Tiles, TritonFlash

    generator = torch.Generator().manual_seed(0)
    plain = PlainKernel()
    on_gpu = device == "cuda"
    tile = Tile(64, 32, 4, 2)
    every = list(TILES.values()) if on_gpu else [Tiles(forward=tile, key_value=tile, query=tile)]
    # The interpreter multiplies the bits of bfloat16; the tensor cores round float32.
    types = [(torch.float16, 2e-3), (torch.bfloat16, 2e-2) if on_gpu else (torch.float32, 1e-5)]
    for dtype, tolerance in types:
        for heads, groups, channels in HEADS if on_gpu else HEADS[::2] if dtype == torch.float32 else HEADS[:1]:
            # Without the causal mask nothing depends on a row's place: under the interpreter once is enough.
            for causal in (True, False) if on_gpu or (dtype, heads) == (torch.float32, 4) else (True,):
                where = segments(causal=causal)
                rows, tokens = int(where.query_bounds[-1]), int(where.key_bounds[-1])
                query = torch.randn(rows, heads + 2, channels, generator=generator).to(dtype)[:, 1:-1]
                wide = torch.randn(tokens, 2 * groups + 1, channels, generator=generator).to(dtype)
                key, value = wide[:, :groups], wide[:, groups : 2 * groups]
                exact = plain.forward(query.double(), key.double(), value.double(), where)
                merged = (exact[0] * 0.8 + 0.1).to(dtype), (exact[1] + torch.rand(exact[1].shape)).float()
                given = torch.randn(exact[0].shape, generator=generator).to(dtype), query, key, value, *merged
                expected = [*exact, *plain.backward(*(x.double() for x in given), where)]
                there = where.to(torch.device(device))
                for tiles in every:
                    kernel = TritonFlash(tiles)
                    on_device = [x.to(device) for x in given]
                    results = [*kernel.forward(*on_device[1:4], there), *kernel.backward(*on_device, there)]
                    for ours, truth in zip(results, expected, strict=True):
                        assert_close(ours, truth, tolerance)


def assert_close(ours: Tensor, truth: Tensor, tolerance: float) -> None:
    """Not nan, which compares as different from everything. -inf, of rows without keys, is -inf in both."""
    assert ours.is_contiguous()
    assert torch.equal(ours.cpu().isneginf(), truth.isneginf())
    ours, truth = (x[~truth.isneginf()] for x in (ours.cpu(), truth))
    assert (ours.cpu().double() - truth).norm() <= tolerance * truth.norm()
    assert (ours.cpu().double() - truth).abs().max() <= 8 * tolerance * truth.abs().max()


test_the_kernels_equal_plain_attention = in_triton(kernels_equal_plain_attention)


def compiled_for_hopper(name: str, channels: int, tile: Any) -> Any:
    """Compile a kernel without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from eagle3.head.fast import triton_flash

    kernel = getattr(triton_flash, name)
    queries = f"tensordesc<bf16[{tile.queries // 4},4,{channels}]>"
    keys = f"tensordesc<bf16[{tile.keys},{channels}]>"
    rows = queries if name == "flash_key_value_gradient" else "*bf16"
    types = {
        **dict.fromkeys(("query", "grad_output"), rows),
        **dict.fromkeys(("key", "value"), keys),
        **dict.fromkeys(("output", "grad_query", "grad_key", "grad_value"), "*bf16"),
        **dict.fromkeys(("query_bounds", "key_bounds"), "*i32"),
        **dict.fromkeys(("segments", "num_rows", "padded_rows", "query_stride", "grad_stride"), "i32"),
        "sums": f"tensordesc<fp32[{tile.queries}]>" if rows == queries else "*fp32",
        "logsumexp": "*fp32",
    }
    constants = {"HEADS": 32, "GROUPS": 8, "CHANNELS": channels, "PACK": 4, "CAUSAL": True}
    constants |= {"BLOCK_QUERIES": tile.queries, "BLOCK_KEYS": tile.keys}
    signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (each, kind) in enumerate(signature.items())
        if kind.startswith("*") or each.endswith("stride")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    # Versions differ in the default of enable_fp_fusion, and 3.9 warns of that.
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@needs_triton
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_tiles_fit_hopper_and_use_its_matrix_units(channels):
    from eagle3.head.fast.triton_flash import TILES

    tiles = next(tiles for most, tiles in TILES.items() if channels <= most)
    for name, tile in (
        ("flash_forward", tiles.forward),
        ("flash_query_gradient", tiles.query),
        ("flash_key_value_gradient", tiles.key_value),
    ):
        compiled = compiled_for_hopper(name, channels, tile)
        ptx = compiled.asm["ptx"]
        assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx
        assert "cp.async.bulk.tensor" in ptx
        assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.gpu
def test_other_lengths_compile_nothing():
    from eagle3.head.fast import triton_flash

    kernel = triton_flash.TritonFlash()
    compiled = []
    for lengths in ([1], [64, 5], [300, 1, 17], [16] * 32):
        bounds = torch.tensor([[0, *lengths]] * 2, dtype=torch.int32, device="cuda").cumsum(1, dtype=torch.int32)[1]
        query, key = (torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
        where = Segments(
            query_bounds=bounds, key_bounds=bounds, most_queries=max(lengths), most_keys=max(lengths), causal=True
        )
        kernel.backward(query, query, key, key, *kernel.forward(query, key, key, where), where)
        names = ("flash_forward", "flash_prepare", "flash_query_gradient", "flash_key_value_gradient")
        caches = [getattr(triton_flash, name).device_caches.values() for name in names]
        compiled.append([len(cache[0]) for caches_of_one in caches for cache in caches_of_one])
    assert all(each == compiled[0] for each in compiled)
