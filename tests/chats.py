"""Chats of several templates and tokenizers, and conversations for them."""

from stores import ASSETS
from transformers import AutoTokenizer

from eagle3.answers.chat import Chat
from eagle3.settings.precomputing import ChatSettings

CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# name: (special tokens, BOS, end of turn)
TEMPLATES = {
    "cohere": (
        ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"],
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "deepseekv3": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],  # noqa: RUF001
        "<｜begin▁of▁sentence｜>",  # noqa: RUF001
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
    ),
    "gemma3": (["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>"),
    "glm4moe": (["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"], None, "<|user|>"),
    "gptoss": (["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"], None, "<|return|>"),
    "lfm2": (["<|startoftext|>", *CHATML], "<|startoftext|>", "<|im_end|>"),
    "llama3": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_1": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_2": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "nemotron_3_nano": ([*CHATML, "<think>", "</think>"], None, "<|im_end|>"),
    "phi3": (["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], None, "<|end|>"),
    "qwen2_5": (CHATML, None, "<|im_end|>"),
    "qwen3": ([*CHATML, "<think>", "</think>"], None, "<|im_end|>"),
    "qwen3_instruct_2507": (CHATML, None, "<|im_end|>"),
}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Answer in French."}
CONVERSATIONS = {
    "plain": [user("Two and two?"), assistant("Four, of course.")],
    "multi-turn": [user("Two and two?"), assistant("Four."), user("Sure?"), assistant("Yes!"), user("Why?")],
    "system": [SYSTEM, user("Two and two?"), assistant("Quatre.")],
    "empty answer": [user("Say nothing."), assistant("")],
    "leading whitespace": [user("  indented\n"), assistant("\n    return 4")],
}
SETTINGS = {
    "template": None,
    "template_kwargs": {},
    "stop_tokens": "auto",
    "date": "2026-01-01",
    "reasoning_parser": "auto",
}


def make_tokenizer(name=None):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    if name:
        special, bos, end = TEMPLATES[name]
        tokenizer.add_tokens(special, special_tokens=True)
        tokenizer.bos_token = bos
        tokenizer.eos_token = end
    return tokenizer


def make_chat(name, **changes):
    tokenizer = make_tokenizer(name)
    stop_ids = changes.pop("stop_ids", {tokenizer.eos_token_id})
    settings = {**SETTINGS, "template": str(ASSETS / f"templates/{name}.jinja"), **changes}
    return Chat(tokenizer, ChatSettings(**settings), stop_ids=stop_ids)


def decode(chat, ids):
    return chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def content(chat, answer, prompt=""):
    prompt_ids, ids = (chat.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    return chat.answer_text(prompt_ids, ids)


def loop(tmp_path, turn):
    path = tmp_path / "losing.jinja"
    end = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    path.write_text("{% for m in messages %}" + turn + "{% endfor %}" + end)
    return str(path)
