"""What the target's own template and tokenizer write between turns, to recognise conversations that are rendered."""

from itertools import takewhile

from eagle3.answers.chat import SENTINEL, Chat, RefusedConversation
from eagle3.prompts.reading.rendered import TargetMarkers

QUESTION, ANSWER = f"{SENTINEL}question", f"{SENTINEL}answer"


def target_markers(chat: Chat) -> TargetMarkers:
    tokens = chat.tokenizer.convert_ids_to_tokens(sorted(chat.control_ids))
    return TargetMarkers(_between(chat), frozenset(tokens))


def _between(chat: Chat) -> str:
    """Return what stands between a question and its answer, as far as generating one and rendering one agree."""
    asked = [{"role": "user", "content": QUESTION}]
    try:
        prompt = chat.render(asked, add_generation_prompt=True)
        answered = chat.render([*asked, {"role": "assistant", "content": ANSWER}], add_generation_prompt=False)
    except RefusedConversation:
        return ""
    written = answered.partition(QUESTION)[2].partition(ANSWER)[0]
    both = zip(prompt.partition(QUESTION)[2], written, strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both)).strip()
