"""The privacy check of a prompt: reads all its messages at once; a finding drops the prompt, is masked, or is kept."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Unpack, get_args

from eagle3.errors import InputError
from eagle3.prompts.privacy import contact, ids, network, passwords, payment, secrets, wallets
from eagle3.prompts.privacy.contact import Phones
from eagle3.prompts.privacy.names import IN_PROSE, ONLY_BY_MODEL, REQUIRED, NameModel
from eagle3.prompts.privacy.placeholders import Allowed
from eagle3.prompts.privacy.recogniser import Recogniser
from eagle3.prompts.reading.prompt import Prompt, Verdict
from eagle3.settings.prompts import Action, AllowedSettings, PrivacySettings
from eagle3.storage.files import sha256_json

log = logging.getLogger(__name__)
ACTIONS = get_args(Action)

# Of equal findings the first recogniser's counts; phone numbers come between FIRST and LAST.
FIRST = [
    Recogniser("EMAIL_ADDRESS", contact.emails),
    Recogniser("CREDIT_CARD", payment.credit_cards),
    Recogniser("IBAN", payment.ibans),
    Recogniser("BANK_ACCOUNT", payment.bank_accounts),
    Recogniser("NATIONAL_ID", ids.national_ids),
    Recogniser("PASSPORT", ids.passports),
    Recogniser("IP_ADDRESS", network.ip_addresses),
    Recogniser("MAC_ADDRESS", network.mac_addresses),
]
LAST = [
    Recogniser("PRIVATE_KEY", wallets.secret_keys),
    Recogniser("PRIVATE_KEY", wallets.seed_phrases),
    Recogniser("CRYPTO_WALLET", wallets.addresses),
    Recogniser("CRYPTO_WALLET", wallets.ethereum),
    Recogniser("CRYPTO_WALLET", wallets.solana),
    Recogniser("API_KEY", secrets.api_keys),
    Recogniser("TOKEN", secrets.tokens),
    Recogniser("PRIVATE_KEY", secrets.private_keys),
    Recogniser("API_KEY", secrets.random_values),
    Recogniser("URL_PASSWORD", passwords.url_passwords),
    Recogniser("PASSWORD", passwords.assigned_passwords),
    Recogniser("PASSWORD", passwords.password_hashes),
    Recogniser("PASSWORD", passwords.told_passwords),
    Recogniser("PASSWORD", passwords.passwords_in_other_order),
]
BY_NOTHING = ("COORDINATES",)  # nothing tells those of a home from those of a public place
BY_A_WORD = (  # found only next to words such as account, wallet or seed phrase
    "BANK_ACCOUNT and seed phrases (PRIVATE_KEY) unless named nearby", "CRYPTO_WALLET without a checksum",
)  # fmt: skip
BETWEEN_MESSAGES = "\n\n"  # no number continues across it, but words of one message are context for the next

# One character for one, so that spans stay valid: digits of every script, full-width forms, dashes and blanks.
ASCII_FORMS: dict[int, str] = {
    **{ord(char): str(unicodedata.decimal(char)) for char in map(chr, range(128, 0x20000)) if char.isdecimal()},
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys((*range(0x2010, 0x2016), 0x2212, 0xAD), "-"),
    **dict.fromkeys((0xA0, *range(0x2000, 0x200E), 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF), " "),
}


class Found(NamedTuple):
    start: int
    end: int
    entity: str
    action: Action


class Privacy:
    """Refuses or masks prompts with personal data or secrets; counts findings by entity and never writes their text.

    actions: by entity; None: it is not looked for. phone: the countries of phone numbers; recognisers: your own, any
    objects with `entity` and `find`. Findings that `allowed` lets through are counted as `ENTITY let through`.
    """

    name = "privacy"

    def __init__(self, **settings: Unpack[PrivacySettings]) -> None:
        actions = settings.get("actions") or {}
        phone: Any = settings.get("phone")  # Hydra passes both as mappings
        allowed: Any = settings.get("allowed")
        model: Any = settings.get("model")  # and has built this
        self.policy = settings["policy"]
        self.model: NameModel | None = model
        self.actions = {entity: action for entity, action in actions.items() if action is not None}
        self.phones = [Phones(**phone)] if phone else []
        self.own: list[Any] = list(settings.get("recognisers", {}).values())
        self.allowed = Allowed(AllowedSettings(**allowed)) if allowed else None
        known = sorted({each.entity for each in self._all()})
        if unknown := sorted(set(actions) - set(known)):
            raise InputError(
                f"prompts.privacy.actions.{unknown[0]}: no recogniser finds it; take {', '.join(known)}, or add one "
                f"to prompts.privacy.recognisers"
            )
        if unused := sorted({each.entity for each in self.own} - set(actions)):
            raise InputError(
                f"prompts.privacy.actions.{unused[0]} is not set, but one of prompts.privacy.recognisers finds it; "
                f"add +prompts.privacy.actions.{unused[0]}=drop, mask or keep"
            )
        self._check_policy()

    def _all(self) -> list[Any]:
        return [*FIRST, *self.phones, *LAST, *self.own]

    @property
    def recognisers(self) -> list[Any]:
        """The recognisers whose entity has an action; not an attribute, because some in FIRST hold lambdas, which
        pickle refuses."""
        return [each for each in self._all() if each.entity in self.actions]

    def __call__(self, prompt: Prompt) -> Verdict:
        found, passed = self.find(BETWEEN_MESSAGES.join(prompt.texts()))
        counts = Counter([item.entity for item in found] + [f"{item.entity} let through" for item in passed])
        if dropped := sorted({item.entity for item in found if item.action == "drop"}):
            return Verdict(reason=f"personal data: {', '.join(dropped)}", counts=counts)
        masks = [item for item in found if item.action == "mask"]
        if not masks:
            return Verdict(counts=counts)
        changed = prompt.with_texts(list(_masked(prompt.texts(), masks)))  # None: the JSON of tools would break
        entities = ", ".join(sorted({item.entity for item in masks}))
        return Verdict(reason=None if changed else f"personal data in tools: {entities}", prompt=changed, counts=counts)

    def files(self) -> list[Path]:
        """List the files of the model; if one changes, the prompts are made again."""
        return self.model.files() if self.model else []

    def safe_id(self, id: str) -> str:
        """Hash an id that is personal data itself, such as an email address: the id of every row is written."""
        return _hashed(id) if self.find(id)[0] else id

    @lru_cache(1024)  # noqa: B019 many rows share one, and there is one Privacy
    def safe_source(self, name: str) -> str:
        """Hash like safe_id, by patterns alone: a model mistakes names of datasets, which must be credited."""
        return _hashed(name) if self._matched(readable(name)) else name

    def blind_spots(self) -> dict[str, list[str]]:
        """Return the entities that are not looked for, and those that patterns find only in part."""
        if self.policy == "off":
            return {"unseen": ["all"], "partly_seen": []}
        by_model = set(self.model.actions if self.model else ())
        partly_seen = [*BY_A_WORD, *([] if IN_PROSE in by_model else [f"{IN_PROSE} in prose"])]
        return {"unseen": sorted({*BY_NOTHING, *ONLY_BY_MODEL} - by_model), "partly_seen": partly_seen}

    def _check_policy(self) -> None:
        spots = self.blind_spots()
        missing = ", ".join(entity for entity in spots["unseen"] if entity in REQUIRED)
        if self.policy == "strict" and missing:
            raise InputError(
                f"prompts.privacy.model={'null' if self.model is None else 'incomplete'}: the strict policy needs a "
                f"model that sees {missing}; give prompts/privacy/model=onnx prompts.privacy.model.path=FOLDER "
                f"(conf/prompts/privacy/model/onnx.yaml names one of 15 MB), or choose prompts/privacy=patterns, which "
                f"lets them pass"
            )
        if self.policy == "off":
            log.warning("prompts/privacy=off: personal data and secrets are NOT looked for")
        elif any(spots.values()):
            advice = "" if self.model else "; to detect names and places add prompts/privacy/model=onnx"
            log.warning("prompts/privacy=%s: %s%s", self.policy, in_words(**spots), advice)

    def find(self, text: str) -> tuple[list[Found], list[Found]]:
        """Return the findings, and those that are let through, each in order and without overlaps."""
        text = readable(text)
        found = self._matched(text)
        if self.model is not None:
            found += [Found(*span, entity, self.model.actions[entity]) for entity, span in self.model.find(text)]
        passed = [item for item in found if self.allowed and self.allowed(item.entity, text[item.start : item.end])]
        return _without_overlaps([item for item in found if item not in passed]), _without_overlaps(passed)

    def _matched(self, text: str) -> list[Found]:
        """Return the findings of the recognisers in readable text, including overlaps."""
        return [
            Found(span.start, span.end, recogniser.entity, self.actions[recogniser.entity])
            for recogniser in self.recognisers
            for span in recogniser.find(text)
        ]


def in_words(*, unseen: list[str], partly_seen: list[str]) -> str:
    """Return the blind spots in words, for the warning and the report."""
    spots = {"NOT detected": unseen, "detected only in part": partly_seen}
    return "; ".join(f"{how}: {', '.join(entities)}" for how, entities in spots.items() if entities)


def readable(text: str) -> str:
    """Return the text with digits, dashes and blanks in ASCII, of the same length."""
    return text if text.isascii() else text.translate(ASCII_FORMS)


def _hashed(name: str) -> str:
    return sha256_json(name)[:16]


def _without_overlaps(found: list[Found]) -> list[Found]:
    """Keep one of overlapping findings: drop before mask before keep, then the longest."""
    masks = [item for item in found if item.action == "mask"]
    found = [item for item in found if item.action != "mask"] + _merged(masks)
    preferred = sorted(found, key=lambda item: (ACTIONS.index(item.action), item.start - item.end, item.start))
    taken = bytearray(max((item.end for item in found), default=0))
    chosen = []
    for item in preferred:
        if not any(taken[item.start : item.end]):
            taken[item.start : item.end] = b"\1" * (item.end - item.start)
            chosen.append(item)
    return sorted(chosen)


def _merged(masks: list[Found]) -> list[Found]:
    """Join overlapping masks into one, named after the longest, so that no part of any stays readable."""
    groups: list[list[Found]] = []
    end = 0
    for mask in sorted(masks, key=lambda item: item.start):
        if mask.start >= end:
            groups.append([])
        groups[-1].append(mask)
        end = max(end, mask.end)
    longest = [max(group, key=lambda item: item.end - item.start) for group in groups]
    return [
        item._replace(start=group[0].start, end=max(mask.end for mask in group))
        for item, group in zip(longest, groups, strict=True)
    ]


def _masked(contents: Iterable[str], masks: list[Found]) -> Iterator[str]:
    """Yield each message with <ENTITY> for its masks; a mask across several messages appears in each."""
    offset = 0
    for content in contents:
        parts, position = [], 0
        for mask in masks:
            start, end = max(mask.start - offset, 0), min(mask.end - offset, len(content))
            if start < end:
                parts += [content[position:start], f"<{mask.entity}>"]
                position = end
        yield "".join([*parts, content[position:]])
        offset += len(content) + len(BETWEEN_MESSAGES)
