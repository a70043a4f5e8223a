"""The training-time test (TTT) of EAGLE-3 (arXiv:2503.01840, section 3.2): K steps of the head on its own output, with
the true next tokens.

This is the one place where a training step runs the head. Prompt positions cost only `fc`, the norms and the keys and
values of step 0; queries, MLP and later steps run only at the anchors.

Shapes: T tokens of the pack, R anchors, H hidden size, V target vocabulary, K steps.
"""

from jaxtyping import Float
from torch import Tensor

from eagle3.head.attention import KeysValues, MakeAttention, PaddedAttention
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import DraftHead
from eagle3.head.layer import MakeLayer, PlainLayer


def unroll(
    head: DraftHead,
    embedding: Float[Tensor, "V H"],
    batch: TttBatch,
    ttt_steps: int,
    attention: MakeAttention = PaddedAttention,
    make_layer: MakeLayer = PlainLayer,
) -> list[Float[Tensor, "R H"]]:
    """Return the head's un-normed output of each step at all anchors, including those that the step does not train."""
    pack, anchors = batch.pack, batch.anchors
    next_tokens = pack.input_ids.roll(-1)  # position t takes x_{t+1}; the last of a sample is never attended to
    layer = make_layer(head, embedding)
    fused = layer.fuse(pack.aux_hidden_states)  # (T, H)
    hidden, query, context = layer.project_context(fused, next_tokens, pack.positions, anchors)
    attend = attention(context, batch)
    outputs = [layer.output(hidden, attend(query, []))]
    chain: list[KeysValues] = []
    for step in range(1, ttt_steps):
        # Past the end of a turn the token belongs to another turn, or is the pack's last: these anchors carry no loss.
        tokens = pack.input_ids[(anchors + 1 + step).clamp(max=len(pack.input_ids) - 1)]
        positions = pack.positions[anchors] + step
        hidden, query, keys_values = layer.project_step(outputs[-1], tokens, positions, step)
        chain.append(keys_values)
        outputs.append(layer.output(hidden, attend(query, chain)))
    return outputs
