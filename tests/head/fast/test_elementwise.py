"""The kernels of elementwise_kernels.py against plain PyTorch: results, and what they overwrite."""

from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from triton_interpreter import in_triton

from eagle3.head.fast.elementwise import Elementwise


def kernels_equal_pytorch(device: str) -> None:
    """Of random numbers in both types, against the references in float64."""
    from eagle3.head.fast.elementwise_kernels import TritonElementwise

    plain, fast = Elementwise(), TritonElementwise()
    generator, num_sums = torch.Generator().manual_seed(0), 4

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def compare(
        name: str, *inputs: Tensor | list[Tensor] | float | None, **settings: Tensor | bool | int | None
    ) -> None:
        """Results, and inputs: most are overwritten."""
        # One of a tensor that is given twice.
        copies = {id(x): x.cpu() for x in tree_leaves([inputs, settings]) if isinstance(x, Tensor)}
        copies = {key: x.double() if x.is_floating_point() else x.clone() for key, x in copies.items()}
        exact, exact_settings = tree_map(lambda x: copies.get(id(x), x), (inputs, settings))
        expected = getattr(plain, name)(*exact, **exact_settings)
        result = getattr(fast, name)(*inputs, **settings)
        pairs = zip(
            tree_leaves([result, inputs, settings]), tree_leaves([expected, exact, exact_settings]), strict=True
        )
        for ours, theirs in pairs:
            if isinstance(theirs, Tensor):
                tolerance = 1e-4 if ours.dtype == torch.float32 else 1e-2
                if theirs.shape == (num_sums, 24):  # of the weight's gradient: only their sum is promised
                    ours, theirs = ours.sum(0), theirs.sum(0)
                torch.testing.assert_close(ours.cpu().double(), theirs.double(), rtol=tolerance, atol=tolerance)

    for dtype in (torch.float32, torch.bfloat16):
        make = partial(random, dtype=dtype)
        index = torch.randperm(11, generator=generator)[:6].to(device)
        for x, chosen in ((make(6, 72)[:, 24:48], None), (make(11, 24), index)):
            weight, sums = random(24, dtype=torch.float32), torch.zeros(num_sums, 24, device=device)
            for given in (weight, None):
                compare("rms_norm", x, given, 1e-5, make(6, 48)[:, 24:], chosen)
            grad_x = make(len(x), 24) if chosen is None else x  # which it replaces
            for given, added in ((make(len(x), 24), None), (grad_x, make(6, 24))):
                for give_output in (True, False):
                    inputs = (x, weight, 1e-5, make(6, 48)[:, :24], sums, chosen)
                    compare("rms_norm_backward", *inputs, grad_x=given, added=added, give_output=give_output)
        for size in (24, 1500):
            compare("swiglu", make(3, 2 * size))
            compare("swiglu_backward", make(3, 2 * size), make(3, size))
        for heads, channels in ((3, 8), (1, 12), (40, 128)):
            angle = random(5, channels, dtype=torch.float32)
            cos, sin = angle.cos()[:, : channels // 2], angle.sin()[:, : channels // 2]
            compare("rotate", make(5, heads + 2, channels)[:, :heads], cos, sin)
            query, key, value = make(5, heads, channels), *make(5, 4, channels).chunk(2, dim=1)
            for parts, num_rotated in (([query], 1), ([key, value], 1), ([query, key, value], 2)):
                compare("join_heads", parts, cos, sin, num_rotated=num_rotated)
            join = partial(fast.join_heads, [query, key, value], cos, sin, num_rotated=2)
            joined = join()
            for step in (0, 1, 5, 9):
                total = torch.ones_like(joined, dtype=torch.float32)
                assert torch.equal(join(total=total, step=step), joined)
                expected = torch.ones_like(total)
                expected[step:] += joined[: max(5 - step, 0)]  # as rounded
                assert torch.equal(total, expected)
        for factor in (1, 0.25):
            x, scale = make(6, 24), torch.tensor(float(factor), device=device)
            compare("scale_rows", x, scale, None)
            x[2] = torch.inf
            compare("scale_rows", x, scale, torch.tensor([True, True, False] * 2, device=device))


test_the_kernels_equal_plain_pytorch = in_triton(kernels_equal_pytorch)
