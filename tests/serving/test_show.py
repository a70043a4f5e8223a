"""action=show: the page says what the decoder did, round by round, whatever the tokens hold, and needs nothing else."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest
import torch
from fitted_head import TREE
from scripts import call_script

from eagle3.decoding.drafter import Tree
from eagle3.decoding.speculate import Decoded, Measurement, Round, Speculator
from eagle3.head_files.format import load_head
from eagle3.serving.show.page import page
from eagle3.serving.show.trace import Trace, visible
from eagle3.storage.files import write_jsonl


def shown(element: Element, depth: int | None = None) -> dict[str, Any]:
    """A token as the page shows it."""
    _, kind, *cut = element.attrib["class"].split()
    assert kind in ("accepted", "rejected", "target") and cut in ([], ["cut"])
    own = {"id": int(element.attrib["data-id"]), "kind": kind, "cut": bool(cut), "depth": depth}
    return own | {"text": element.text, "title": element.attrib["title"]}


class Page:
    """What a browser would show: the tokens of each answer, and those of each round."""

    def __init__(self, text: str) -> None:
        self.root = fromstring(text)
        answers = self.root.findall(".//section[@class='answer']")
        self.prompts = [answer.findtext("p[@class='prompt']") for answer in answers]
        self.answers = [[*map(shown, answer.findall("p[@class='text']/*"))] for answer in answers]
        self.rounds = [[*map(self.round, answer.findall(".//li[@class='round']"))] for answer in answers]
        self.facts = {
            row.findtext("th"): row.findtext("td") for row in self.root.findall(".//table[@class='facts']/tr")
        }
        self.rows = [[cell.text for cell in row] for row in self.root.findall(".//tr[@class='row']")]

    def round(self, item: Element) -> list[dict[str, Any]]:
        drafts = [(draft[0], int(draft.attrib["style"].removeprefix("--depth:"))) for draft in item.findall("ul/li")]
        return [*(shown(*draft) for draft in drafts), *map(shown, item.findall("span"))]


def needs_nothing_else(found: Page) -> bool:
    loading = {"script", "link", "img", "iframe", "object", "embed", "video", "audio", "base"}
    tags = {element.tag for element in found.root.iter()}
    names = {name for element in found.root.iter() for name in element.attrib}
    return not tags & loading and not names & {"src", "href", "srcset"} and not any(n.startswith("on") for n in names)


def probability(token: dict[str, Any]) -> float | None:
    said = re.search(r"probability ([\d.]+)", token["title"])
    return float(said[1]) if said else None


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "rows.jsonl"
    rows = [("a", "Hi"), ("b", "What is a </script><b>list</b>?"), ("a", "\u05e9\u05dc\u05d5\u05dd\ttab\n\u202eodd")]
    write_jsonl(path, [{"source": source, "messages": [{"role": "user", "content": text}]} for source, text in rows])
    return path


def test_the_page_of_the_command_says_what_the_decoder_did(head_folder, tiny_path, target, prompts_file, tmp_path):
    call_script(
        "serve", "action=show", f"target.path={tiny_path}", "target.dtype=float32",
        f"head={head_folder}", f"prompts.path={prompts_file}", "limit=3", "max_new_tokens=16",
        f"out={tmp_path}/new/page.html", *(f"{key}={value}" for key, value in TREE.items()), output_dir=tmp_path,
    )  # fmt: skip
    found = Page((tmp_path / "new/page.html").read_text(encoding="utf-8"))
    assert needs_nothing_else(found)

    loaded = load_head(head_folder, dtype=torch.float32, num_layers=8)
    speculator = Speculator(target, loaded.head, loaded.capture_layers)
    chat_prompts = [each["messages"] for each in map(json.loads, prompts_file.read_text().splitlines())]
    decoded = []
    for number, messages in enumerate(chat_prompts):
        ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        rounds: list[Round] = []
        decoded.append(speculator.decode(ids, max_new_tokens=16, watch=rounds.append, **TREE))
        assert found.prompts[number] == visible(target.tokenizer.decode(ids))
        in_text = [token for token in found.answers[number] if token["kind"] != "rejected"]
        assert [token["id"] for token in in_text] == decoded[-1].token_ids
        assert "".join(token["text"] for token in in_text) == visible(target.tokenizer.decode(decoded[-1].token_ids))
        kinds = ["target"]  # prefill
        assert len(found.rounds[number]) == len(rounds) == decoded[-1].verifications
        known = len(ids) + 1
        for (*drafts, own), each in zip(found.rounds[number], rounds, strict=True):
            tree = each.drafts
            kind = ["accepted" if node in each.accepted else "rejected" for node in range(len(tree.tokens))]
            expected = sorted(zip(tree.tokens, map(len, tree.paths()), kind, strict=True))
            assert sorted((one["id"], one["depth"], one["kind"]) for one in drafts) == expected
            assert (own["id"], own["kind"]) == (each.chosen[-1], "target")
            known += len(each.chosen)
            assert own["cut"] == (known > len(ids) + len(decoded[-1].token_ids))
            kinds += ["accepted"] * (len(each.chosen) - 1) + ["target"]
        assert [token["kind"] for token in in_text] == kinds[: len(in_text)]
    whole = Measurement(decoded, None, 0.0)
    assert sum(whole.per_depth) > 0
    assert found.facts["accept length"].startswith(f"{whole.accept_length:.3f} ± ")
    assert found.facts["accept length"].endswith(" tokens per verification, tree 3/3/9")
    assert found.facts["head"] == str(head_folder) and found.facts["target"] == str(tiny_path)
    assert found.facts["drafts"].startswith("tree 3/3/9: steps=3 topk=3 draft_tokens=9")
    by_source = {"a": [decoded[0], decoded[2]], "b": [decoded[1]], "all": decoded}
    assert [row[0] for row in found.rows] == [*by_source]
    for row, group in zip(found.rows, by_source.values(), strict=True):
        measured = Measurement(group, None, 0.0)
        rates = [f"{rate:.3f}" for rate in (measured.accept_length, *measured.per_depth)]
        assert row[1:] == [str(len(group)), str(measured.tokens), str(measured.verifications), *rates]


class Words:
    """A tokenizer of odd tokens: id 0 to 255 is that byte, then whole texts."""

    TEXTS = ("</script><script>alert(1)</script>", "\n", "\t", "\u202e\u05d0", "\x00\x1b", "&amp;<!--", "")

    def decode(self, ids: list[int]) -> str:
        parts = [bytes([each]) if each < 256 else self.text(each).encode() for each in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def text(self, token_id: int) -> str:
        return self.TEXTS[token_id - 256] if token_id - 256 < len(self.TEXTS) else ""

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return f"<0x{token_id:02X}>" if token_id < 256 else None


def test_odd_tokens_break_nothing_and_are_shown():
    odd = [0xE2, 0x82, 0xAC, *range(256, 256 + len(Words.TEXTS)), 999, 0xFF]
    chosen = [*odd, 65]
    tree = Tree(odd, [*range(-1, len(odd) - 1)], [0.5**depth for depth in range(1, len(odd) + 1)])
    decoded = Decoded([66, *chosen], 1, [1] * len(odd), 0, "stop")
    trace = Trace("</td>\u202e", [*b"hi\n"], decoded, [Round(tree, chosen)])
    found = Page(page(Words(), [trace], {"head": "</title><script>"}))
    assert needs_nothing_else(found)
    [answer], [[in_round]] = found.answers, found.rounds
    assert [token["id"] for token in answer] == [66, *chosen]
    texts = [token["text"] for token in answer]
    assert texts[:6] == ["B", "<0xE2>", "<0x82>", "€", "</script><script>alert(1)</script>", "↵\n"]
    assert texts[6:9] == ["⇥", "\\u202eא", "\\x00\\x1b"]
    assert texts[9:] == ["&amp;<!--", "<262>", "<999>", "<0xFF>", "A"]
    assert [token["text"] for token in in_round] == texts[1:]
    assert found.rows[0][0] == "</td>\\u202e" and found.prompts == ["hi↵\n"]
    assert all(probability(token) == 0.5 for token in in_round[:-1])


def test_trees_are_listed_from_the_top_and_tokens_after_the_end_are_marked():
    first = Tree([0xE2, 70, 0x82, 71, 0x82], [-1, -1, 0, 0, 1], [0.5, 0.25, 0.4, 0.1, 0.125])
    second = Tree([73, 0xE2, 72], [-1, -1, 1], [0.25, 0.5, 0.125])
    third = Tree([65, 66, 67], [-1, 0, 1], [0.5, 0.25, 0.125])
    rounds = [Round(first, [0xE2, 0x82, 0xAC]), Round(second, [72]), Round(third, [65, 66, 67, 68])]
    decoded = Decoded([66, 0xE2, 0x82, 0xAC, 72, 65], 3, [2, 2, 1], 0, "length")
    found = Page(page(Words(), [Trace("s", [65], decoded, rounds)], {"head": "h"}))
    [listed] = found.rounds
    assert [[(one["depth"], one["text"], one["kind"], one["cut"]) for one in each] for each in listed] == [
        [
            (1, "<0xE2>", "accepted", False), (2, "<0x82>", "accepted", False), (2, "G", "rejected", False),
            (1, "F", "rejected", False), (2, "<0x82>", "rejected", False), (None, "€", "target", False),
        ],
        [
            (1, "<0xE2>", "rejected", False), (2, "H", "rejected", False), (1, "I", "rejected", False),
            (None, "H", "target", False),
        ],
        [
            (1, "A", "accepted", False), (2, "B", "accepted", True), (3, "C", "accepted", True),
            (None, "D", "target", True),
        ],
    ]  # fmt: skip
    assert [probability(one) for one in listed[0]] == [0.5, 0.8, 0.2, 0.25, 0.5, None]
    [answer] = found.answers
    assert [(one["text"], one["kind"]) for one in answer] == [
        ("B", "target"), ("<0xE2>", "accepted"), ("<0x82>", "accepted"), ("€", "target"), ("<0xE2>", "rejected"),
        ("H", "target"), ("A", "accepted"),
    ]  # fmt: skip


def test_a_source_without_a_round_has_no_rates():
    short = Trace("short", [65], Decoded([66], 0, [0], 0, "stop"), [])
    long = Trace("long", [65], Decoded([66, 67], 1, [0], 0, "stop"), [Round(Tree([70], [-1], [0.25]), [67])])
    found = Page(page(Words(), [short, long], {"head": "h"}))
    assert found.rows[0] == ["short", "1", "1", "0", "nothing drafted"]
    assert found.rows[1] == ["long", "1", "2", "1", "1.000", "0.000"]
    assert [(token["kind"], token["text"]) for token in found.answers[1]] == [
        ("target", "B"), ("rejected", "F"), ("target", "C"),
    ]  # fmt: skip
