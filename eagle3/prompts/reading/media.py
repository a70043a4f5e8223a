"""Files of image, sound or video that a row names in a column of any name: without them its question is another one."""

import re
from typing import Any

WORDS = frozenset((
    "image", "images", "img", "imgs", "photo", "photos", "picture", "pictures", "pixel", "pixels", "screenshot",
    "screenshots", "video", "videos", "audio", "audios", "wav", "waveform", "spectrogram",
))  # fmt: skip
# Next to one of these words, a column says something about a file and is none.
ABOUT = frozenset((
    "has", "is", "with", "num", "number", "count", "size", "width", "height", "type", "kind", "format", "caption",
    "captions", "description", "prompt", "category", "label", "labels", "text", "title", "language", "license",
    "source", "credit", "author",
))  # fmt: skip
# Of a page or a person.
SHOWN = frozenset(
    ("url", "urls", "link", "links", "href", "homepage", "website", "avatar", "thumbnail", "icon", "logo")
)
FILE_PARTS = ("bytes", "path", "url")  # of an object that holds or names a file
DEEPEST = 20  # lists and objects in each other that are searched
IDS = frozenset(("id", "ids", "index", "idx"))  # a number next to one of these words names a file
FLAGS = frozenset(("true", "false", "yes", "no", "none", "0", "1"))
ENDINGS = "png|jpe?g|webp|gif|bmp|tiff?|heic|avif|wav|mp3|flac|ogg|oga|opus|m4a|aac|wma|mp4|m4v|mov|avi|mkv|webm|mpe?g"
FILE = re.compile(rf"data:(?:image|audio|video)/|\S{{1,1000}}\.(?:{ENDINGS})(?:[?#]\S*)?", re.IGNORECASE)
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# A placeholder on a line of its own at the start or the end of a text, as LLaVA's and its successors' data have it.
PLACEHOLDER = r"<\|?(image|img|audio|video|speech|image_pad|video_pad|image_\d+|audio_\d+|video_\d+)\|?>"
# Qwen-VL's and Qwen-Audio's, with the file inside.
WITH_FILE = re.compile(rf"<(img|image|audio|video)>[^\s<>]+\.(?:{ENDINGS})(?:[?#][^\s<>]*)?</\1>", re.IGNORECASE)
PLACED = re.compile(rf"\A\s*{PLACEHOLDER}[ \t]*\n|\n[ \t]*{PLACEHOLDER}\s*\Z", re.IGNORECASE)


def is_file(name: str, value: Any) -> bool:
    """Tell whether the value of a column, which may be a list, is or names a file of image, sound or video."""
    words = _words(name)
    if names_media(name):
        return _is_reference(value) or not words.isdisjoint(IDS)
    return not words & SHOWN and _names_file(value)


def names_media(name: str) -> bool:
    """Tell whether a column may hold files or their names and ids, by its own name."""
    words = _words(name)
    return not words.isdisjoint(WORDS) and words.isdisjoint(ABOUT)


def _words(name: str) -> set[str]:
    return {word.lower() for word in WORD.findall(name)}


def has_placeholder(text: str) -> bool:
    """Tell whether an image, a sound or a video belongs into the text. HTML has such a tag with its closing one."""
    if WITH_FILE.search(text):
        return True
    found = PLACED.search(text)
    return found is not None and f"</{found[1] or found[2]}>" not in text


def _is_reference(value: Any) -> bool:
    if isinstance(value, str):
        return not any(map(str.isspace, value)) and value.lower() not in FLAGS
    return not isinstance(value, int | float)


def _names_file(value: Any, deepest: int = DEEPEST) -> bool:
    if isinstance(value, str):
        return FILE.match(value) is not None and (value.startswith("data:") or FILE.fullmatch(value) is not None)
    if isinstance(value, dict):
        value = [value.get(key) for key in FILE_PARTS]
    if isinstance(value, list):
        return deepest > 0 and any(_names_file(each, deepest - 1) for each in value)
    return isinstance(value, bytes)
