"""Fast training kernels. Each replaces a reference implementation (eagle3/head/README.md) and matches it numerically.

A module named …_kernel(s), or triton_flash_…, has the Triton kernels of the module that it is named after, which has
the reference in PyTorch with the same signature. eagle3/head/kernels.py chooses.

Notation in shapes and comments:

    T   tokens of the pack              K   steps of the unroll        H   hidden size, HH = 2 · H
    R   anchors, which are trained      S   steps of the chain so far  A   captured layers, AH = A · H
    N   rows of a matrix, of any kind   J   positions with a teacher   F   width of the MLP, FF = 2 · F: gate, then up
    Q   query heads, QC = Q · C         C   channels of a head         V   target vocabulary
    G   key/value heads                 E   C / 2, angles of RoPE      D   draft vocabulary
    P   Q / G, queries that share one   W   QC + 2 · G · C: queries, keys and values of a row, side by side
    L   trained (step, anchor) pairs, M of them in a chunk, which ask B teachers
    X   partial sums of a gradient, one for each program that adds

Tensors are row-major: the last dimension has stride 1, and the heads of a row are contiguous ([N, Q, C] is [N, Q · C]).
The stride between rows may exceed their length, as in views of a wider product. Sums, norms and softmaxes are
float32 for tensors of any dtype. Queries of one key/value head are adjacent: head q reads key/value head q // P.
"""
