"""Triton's kernels of chain keys against plain PyTorch, which test_attention.py holds against dense attention."""

import torch
from triton_interpreter import in_triton

from eagle3.head.fast.chain_keys import ChainKeys


def kernels_equal_pytorch(device: str) -> None:
    """Views of wider projections, as training hands over; head counts and channels that are no powers of two."""
    from eagle3.head.fast.chain_keys_kernel import TritonChainKeys

    plain, fast = ChainKeys(), TritonChainKeys()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for anchors, steps, groups, of_group, channels in ((5, 1, 2, 4, 8), (3, 6, 1, 3, 24), (4, 3, 3, 1, 128)):
            heads = groups * of_group
            wide = [random(anchors, heads + 2 * groups, channels, dtype=dtype) for _ in range(steps)]
            query = wide[0][:, :heads]
            keys = [each[:, heads : heads + groups] for each in wide]
            values = [each[:, heads + groups :] for each in wide]
            output, grad_output, grad_query = (random(anchors, heads, channels, dtype=dtype) for _ in range(3))
            logsumexp = random(heads, anchors, dtype=torch.float32)

            exact_keys, exact_values = ([each.double() for each in parts] for parts in (keys, values))
            exact = plain.merge(output.double(), logsumexp.double(), query.double(), exact_keys, exact_values)
            merged = fast.merge(output, logsumexp, query, keys, values)
            given = grad_output, *(part.to(ours.dtype) for part, ours in zip(exact, merged, strict=True)), query
            expected_query = grad_query.double()
            expected = plain.backward(*(each.double() for each in given), exact_keys, exact_values, expected_query)
            gradients = fast.backward(*given, keys, values, grad_query)
            pairs = [*zip(merged, exact, strict=True), (grad_query, expected_query)]
            pairs += [
                pair for ours, true in zip(gradients, expected, strict=True) for pair in zip(ours, true, strict=True)
            ]
            for ours, true in pairs:
                torch.testing.assert_close(ours.double(), true, rtol=tolerance, atol=tolerance)


test_the_kernels_equal_plain_pytorch = in_triton(kernels_equal_pytorch)
