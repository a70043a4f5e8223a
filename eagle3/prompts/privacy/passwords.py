"""What opens doors for persons: passwords in URLs, and values that are called a password or secret."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from eagle3.prompts.privacy.recogniser import Pattern, Recogniser, Span, mentions

# What documentation puts where a secret goes.
PLACEHOLDER = re.compile(
    r"example|your|placeholder|dummy|redacted|insert|change_?me|replace|x{4}|\*{3}|\.{3}|…|[<{]|\$\(|\A\$\w+\Z|%s|%\(|\A%\w+%\Z"
    r"|\A(?:pass|passwd|password|pwd|pw|secret|token|key|user(?:name)?|test|foo|bar|none|null|true|false|string|str)\d?\Z",
    re.IGNORECASE,
)
KEY_ENTROPY = 3.3  # bits of a value that is called a key; names in code have less
MANY_KINDS = 8  # of characters in a random key of 16 and more; aaaa… and 1234-1234 have fewer


def is_random(value: str) -> bool:
    return len(set(value)) >= MANY_KINDS and not PLACEHOLDER.search(value)


def entropy(text: str) -> float:
    """Return Shannon's entropy of the characters, in bits."""
    counts, length = Counter(text).values(), len(text)
    return -sum(count / length * math.log2(count / length) for count in counts)


class UrlPassword(Recogniser):
    """A URL with user and password up to its host, e.g. of a database; not the placeholders of documentation."""

    entity = "URL_PASSWORD"
    account = re.compile(r"://([^\s:/@\"'<>]{0,128}):([^\s/@\"'<>]{1,256})@(?:\[[0-9A-Fa-f:.]{2,45}\]|[\w.-]{0,252}\w)")
    scheme = re.compile(r"[a-z0-9.]{1,10}(?:\+[a-z0-9]{1,20})?\Z", re.IGNORECASE)

    def find(self, text: str) -> Iterator[Span]:
        for match in self.account.finditer(text) if "://" in text and "@" in text else ():
            user, password = match.groups()
            if password != user and not PLACEHOLDER.search(password):
                scheme = self.scheme.search(text[max(0, match.start() - 31) : match.start()])
                yield Span(match.start() - len(scheme.group() if scheme else ""), match.end())


class PasswordHash(Pattern):
    """Hashes of passwords as systems keep them, with salt: what people choose can be guessed from them."""

    entity = "PASSWORD"
    pattern = re.compile(
        r"\$(?:1|5|6|y|apr1|2[abxy]?|argon2(?:id|i|d)|scrypt|pbkdf2(?:-sha\d{1,3})?)\$[\w./=,$+-]{20,200}"
        r"|\$krb5\w{2,8}\$\d{1,2}\$[^\s\"']{32,4000}"
    )


class Password(Recogniser):
    """A value that is assigned to or called a password, or of 16 characters and more a secret, key or token.

    It must look like one: letters with digits or signs, no placeholder, no expression of code that would compute it.
    """

    entity = "PASSWORD"
    gates = (
        "pass", "pwd", "secret", "key", "token", "credential", "auth", "webhook",
        "kennwort", "contrase", "senha", "wachtwoord", "пароль", "密码",
        "密碼", "identified", "curl", "mysql",
    )  # fmt: skip
    called = (
        r"(?:(?P<password>(?<!reise)(?<!by)(?<!com)(?<!tres)(?<!sur)(?<!over)(?<!under)pass(?:word|wd|phrase|wort|code)?"
        r"|pwd|kennwort|mot[ _]de[ _]passe|contrase[nñ]a"
        r"|senha|wachtwoord|пароль|密码|密碼)"
        r"|(?:(?:secret|api|access|account|auth|private|app|master|service|encryption|signing)"
        r"[ _-]?(?:access[ _-]?)?key"
        r"|secret|token|credentials?|auth[ _-]?code|webhook[ _-]?url))"
    )
    assigned = (
        r"(?P<more>[_-]\w{0,12})?\d?[\"'`]?(?:"
        r"(?: (?:of|for|to|von|für|de|du|del|di|do|van) [^\n:=]{1,40}?)?"
        r"(?:[ \t]{0,16}(?::=|=>|[:=>]|,[ \t]?(?=[\"']))[ \t]{0,16}| (?:is|ist|lautet|est|es|é)(?: now)?:? )"
        r"|(?P<nothing>[ \t]))"
    )
    value = (
        r"(?:\"(?P<double>[^\"\s]{4,200})\"|'(?P<single>[^'\s]{4,200})'"
        r"|(?P<bare>[^\s\"'`,;<>()\[\]{}|&]{5,200})(?![(\[{]))"
    )
    assignment = re.compile(called + assigned + value, re.IGNORECASE)
    # Commands that take one: SQL's CREATE USER, curl -u user:…, mysql -p…
    given = re.compile(
        r"\bidentified (?:with \w{1,40} )?by ['\"](?P<sql>[^'\"\s]{4,200})['\"]"
        r"|\bcurl\b[^\n|;]{0,200}?\s(?:-u|--user)[ =]{0,2}['\"]?[^\s'\":]{1,64}:(?P<curl>[^\s'\"]{4,200})"
        r"|\bmysql\w{0,10}\b[^\n|;]{0,200}?\s-p(?P<mysql>[^\s'\"]{4,200})",
        re.IGNORECASE,
    )
    test_log = re.compile(r"(?<!\w)PASS:")
    identifier = re.compile(r"[\w./:-]+")
    path = re.compile(r"(?:~|\.{1,2})?(?:/[\w.@-]+)+/?")
    dotted_name = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")

    def find(self, text: str) -> Iterator[Span]:
        if not mentions(text, self.gates):
            return
        for match in self.given.finditer(text):
            assert match.lastgroup
            if self._is_password(match[match.lastgroup], quoted=True, assigned=True):
                yield Span(*match.span(match.lastgroup))
        for match in self.assignment.finditer(text):
            group = next(name for name in ("double", "single", "bare") if match[name])
            value = match[group].rstrip(".!?:") if group == "bare" else match[group]
            if self.test_log.match(text, match.start()) and self.identifier.fullmatch(value):
                continue
            if match["nothing"] and ("=" in value or (match["more"] or "").startswith("-")):
                continue  # "pass tol=0.05", "password-protected PKCS#8"
            is_secret = self._is_password if match["password"] else self._is_key
            if is_secret(value, quoted=group != "bare", assigned=not match["nothing"]):
                yield Span(match.start(group), match.start(group) + len(value))

    def _is_password(self, value: str, *, quoted: bool, assigned: bool) -> bool:
        letters, digits = any(map(str.isalpha, value)), any(map(str.isdigit, value))
        if (
            len(value) < 6
            or PLACEHOLDER.search(value)
            or not letters
            or (not quoted and (self.dotted_name.fullmatch(value) or self.path.fullmatch(value)))
        ):
            return False
        signs = not value.replace("_", "").isalnum() or ("_" in value and value != value.lower())
        return digits and signs if not assigned else digits or (quoted and signs)

    def _is_key(self, value: str, *, quoted: bool, assigned: bool) -> bool:
        digits = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
        return (
            assigned
            and digits
            and len(value) >= 16
            and is_random(value)
            and entropy(value) >= KEY_ENTROPY
            and (quoted or not self.dotted_name.fullmatch(value))
        )
