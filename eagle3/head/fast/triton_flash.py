"""A flash kernel in Triton for Hopper, whose matrix units FlashAttention-2 (flash_kernels.py) uses only by half.

Only the number of programs depends on the lengths of the segments: no pack compiles a new kernel, and the host never
synchronises. The backward adds in a fixed order, so that every run gives the same bits.

Shapes: fast/__init__.py; R rows that ask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle3.head.fast.triton_flash_backward import flash_key_value_gradient, flash_prepare, flash_query_gradient
from eagle3.head.fast.triton_flash_forward import flash_forward
from eagle3.head.fast.varlen_kernel import Gradients, LogSumExp, OfQueries, OfTokens
from eagle3.head.segments import Segments


@dataclass(frozen=True)
class Tile:
    """Block sizes of a program: queries (rows times heads) and keys; its warps, and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    forward: Tile
    key_value: Tile  # of the gradients of key and value
    query: Tile  # of the query's gradient


# By the most channels. All products are wgmma, and two programs fit on one multiprocessor up to 128 channels. Of the
# tiles tried on an H200 (benchmarks/results/attention.json up to commit ddc88e9), these were the fastest at 64 and 128
# channels, though 16 registers of the forward's loop spill.
TILES = {
    64: Tiles(forward=Tile(128, 64, 4, 3), key_value=Tile(64, 64, 4, 3), query=Tile(64, 64, 4, 3)),
    128: Tiles(forward=Tile(128, 64, 4, 2), key_value=Tile(64, 64, 4, 2), query=Tile(64, 64, 4, 2)),
    256: Tiles(forward=Tile(128, 32, 8, 3), key_value=Tile(32, 64, 8, 3), query=Tile(64, 32, 8, 3)),
}
PREPARE = Tile(64, 0, 4, 1)  # of the inputs of both backward kernels
MOST_HEADS = 16  # of a row in a block, in all kernels: the smallest block of queries is one row


class TritonFlash:
    """`VarlenKernel` for channels that are a power of two from 16 to 256."""

    def __init__(self, tiles: Tiles | None = None) -> None:
        self.tiles = tiles

    def forward(self, query: OfQueries, key: OfTokens, value: OfTokens, where: Segments) -> tuple[OfQueries, LogSumExp]:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        logsumexp = query.new_empty(query.shape[1::-1], dtype=torch.float32)
        if not len(query):
            return output, logsumexp
        tile = self._tiles(query).forward
        sizes = _sizes(query, key, tile, where)
        flash_forward[_query_grid(query, tile, where, sizes)](
            query, _key_blocks(key, tile), _key_blocks(value, tile), output, logsumexp, *_bounds(where), len(query),
            _row_stride(query), **sizes, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return output, logsumexp

    def backward(
        self,
        grad_output: OfQueries,
        query: OfQueries,
        key: OfTokens,
        value: OfTokens,
        output: OfQueries,
        logsumexp: LogSumExp,
        where: Segments,
    ) -> Gradients:
        assert logsumexp.is_contiguous()
        if not len(query):
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        heads, segments = query.shape[1], len(where.query_bounds) - 1
        tiles = self._tiles(query)
        grad_query, grad_key, grad_value = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        # Every segment begins at a multiple of 4 rows; a block that ends after the last row reads on.
        longest = max(tiles.key_value.queries, tiles.query.queries)
        padded_rows = (len(query) // 4 + segments + 1) * 4 + longest
        sums = query.new_zeros(2 * heads * padded_rows, dtype=torch.float32)
        sizes = _sizes(query, key, PREPARE, where)
        flash_prepare[_query_grid(query, PREPARE, where, sizes)](
            grad_output, output, logsumexp, sums, where.query_bounds, segments, len(query), padded_rows,
            _row_stride(grad_output), _row_stride(output), heads, query.shape[2], sizes["PACK"], PREPARE.queries,
            num_warps=PREPARE.warps,
        )  # fmt: skip

        tile = tiles.query
        sizes = _sizes(query, key, tile, where)
        flash_query_gradient[_query_grid(query, tile, where, sizes)](
            grad_output, query, _key_blocks(key, tile), _key_blocks(value, tile), sums, grad_query, *_bounds(where),
            padded_rows, _row_stride(grad_output), _row_stride(query), **sizes, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip

        tile = tiles.key_value
        sizes = _sizes(query, key, tile, where)
        blocks = [tile.queries // sizes["PACK"], sizes["PACK"], query.shape[2]]
        slots = len(key) // tile.keys + segments
        flash_key_value_gradient[(slots * key.shape[1],)](
            _query_blocks(grad_output, blocks), _query_blocks(query, blocks), _key_blocks(key, tile),
            _key_blocks(value, tile), TensorDescriptor(sums, [len(sums)], [1], [tile.queries]),
            grad_key, grad_value, *_bounds(where), padded_rows, **sizes, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return grad_query, grad_key, grad_value

    def _tiles(self, query: Tensor) -> Tiles:
        return self.tiles or next(tiles for most, tiles in TILES.items() if query.shape[2] <= most)


def _sizes(query: Tensor, key: Tensor, tile: Tile, where: Segments) -> dict[str, int | bool]:
    """Return a kernel's constants. A program takes as many heads of a group at once as the group is divisible by."""
    heads, groups = query.shape[1], key.shape[1]
    of_group = heads // groups
    return {
        "HEADS": heads,
        "GROUPS": groups,
        "CHANNELS": query.shape[2],
        "PACK": min(of_group & -of_group, MOST_HEADS),  # the largest power of two
        "BLOCK_QUERIES": tile.queries,
        "BLOCK_KEYS": tile.keys,
        "CAUSAL": where.causal,
    }


def _query_grid(query: Tensor, tile: Tile, where: Segments, sizes: dict[str, int | bool]) -> tuple[int]:
    slots = len(query) // (tile.queries // sizes["PACK"]) + len(where.query_bounds) - 1
    return (slots * (query.shape[1] // sizes["PACK"]),)


def _bounds(where: Segments) -> tuple[Tensor, Tensor, int]:
    return where.query_bounds, where.key_bounds, len(where.query_bounds) - 1


def _key_blocks(x: OfTokens, tile: Tile) -> TensorDescriptor:
    x = _readable(x)
    tokens, groups, channels = x.shape
    return TensorDescriptor(x, [tokens, groups * channels], [x.stride(0), 1], [tile.keys, channels])


def _query_blocks(x: OfQueries, blocks: list[int]) -> TensorDescriptor:
    x = _readable(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), blocks)


def _readable(x: Tensor) -> Tensor:
    """Return x as a descriptor needs it: rows begin at multiples of 16 bytes, as in all views of a training step."""
    aligned = x.data_ptr() % 16 == 0 and _row_stride(x) * x.element_size() % 16 == 0
    return x if aligned else x.contiguous()


def _row_stride(x: Tensor) -> int:
    assert x.stride()[1:] == (x.shape[2], 1)
    return x.stride(0)
