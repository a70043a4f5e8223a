"""What the target's own template and tokenizer write between turns, to recognise conversations that are rendered."""

from eagle3.answers.chat import QUESTION, Chat, RefusedConversation, common_start
from eagle3.prompts.reading.rendered import TargetMarkers


def target_markers(chat: Chat) -> TargetMarkers:
    tokens = chat.tokenizer.convert_ids_to_tokens(sorted(chat.control_ids))
    return TargetMarkers(_between(chat), frozenset(tokens))


def _between(chat: Chat) -> str:
    """Return what stands between a question and its answer, as far as generating one and rendering one agree."""
    try:
        prompt = chat.render([QUESTION], add_generation_prompt=True)
        head, _ = chat.around_answer([QUESTION])
    except RefusedConversation:
        return ""
    return common_start(*(text.partition(QUESTION["content"])[2] for text in (prompt, head))).strip()
