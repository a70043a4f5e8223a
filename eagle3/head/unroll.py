"""The training unroll ("training-time test"): K steps of the head on its own output, with the true next tokens.

This is the one place where a training step runs the head. Prompt rows pay for `fc`, the norms and the keys and values
of step 0, nothing else; queries, MLP and later steps run on trained rows alone.

Shapes: T tokens of the pack, R trained rows, H hidden size, K steps.
"""

from jaxtyping import Float
from torch import Tensor

from eagle3.data.pack import Pack
from eagle3.head.attention import KeysValues, MakeAttention, PaddedAttention
from eagle3.head.draft_head import DraftHead
from eagle3.head.layer import MakeLayer, PlainLayer


def unroll(
    head: DraftHead,
    embedding: Float[Tensor, "V H"],
    pack: Pack,
    ttt_steps: int,
    attention: MakeAttention = PaddedAttention,
    make_layer: MakeLayer = PlainLayer,
) -> list[Float[Tensor, "R H"]]:
    """The head's un-normed output of each step at the pack's trained rows (rows a step does not train included)."""
    last_token = len(pack.input_ids) - 1
    tokens = pack.input_ids.roll(-1)  # row t takes x_{t+1}; the last row of a sample is never attended to
    layer = make_layer(head, embedding)
    hidden, query, context = layer.first(layer.fuse(pack.aux), tokens, pack.positions, pack.rows)
    attend = attention(context, pack)
    outputs = [layer.output(hidden, attend(query, []))]
    positions = pack.positions[pack.rows]
    own: list[KeysValues] = []
    for step in range(1, ttt_steps):
        # Past the end of a turn the token is another one's, or the pack's last: such rows carry no loss.
        tokens = pack.input_ids[(pack.rows + 1 + step).clamp(max=last_token)]
        hidden, query, own_keys_values = layer.later(layer.feedback(outputs[-1]), tokens, positions + step, step)
        own.append(own_keys_values)
        outputs.append(layer.output(hidden, attend(query, own)))
    return outputs
