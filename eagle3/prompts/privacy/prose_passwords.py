"""Passwords that a sentence tells: "the password is hunter2", "Das Passwort lautet `veiland`", "密码是 123456".

A sentence that says of a password how it is ("is too weak", "muss 8 Zeichen haben") reads alike. What counts is in
quotes or code marks, has a digit, or stands beside a user name that is told with it.
"""

import re
from collections.abc import Iterator

from eagle3.prompts.privacy.recogniser import Recogniser, Span, mentions

CALLED = (
    r"(?:(?<![^\W_])(?:pass(?:word|phrase|code|wort)(?:ul)?|pw|pin(?:[ -]code)?|kennwort|mot de passe|contrase[nñ]a"
    r"|senha|wachtwoord|has[lł]o|parol[ae]|lösenord|adgangskode|пароль)(?![^\W_])|密码|密碼|口令|パスワード|비밀번호)"
)
# What may stand between: "par défaut pour tous les comptes", "for the account", "meu", "от почты".
MORE = (
    r"(?: (?:of|for|to|von|für|fürs|de|du|del|di|do|par|por|pour|padr[aã]o|voor|от|для|по|meu|tău|predefinita|default)"
    r"(?: [^\s.,:;=`'\"]{1,20}){0,5}?)?"
)
TELLS = (
    r"(?: ?:[ \t]{0,4}| (?:(?:is|was)(?: now)?|ist|war|lautet|est|es|é|è|e|este|to|är|er)(?: ?:)? "
    r"| ?(?:是|为|為|は|은|는):? ?)"
)
# "with password …", "using the password …", "changed the password to …"
GIVEN = (
    r"(?<![^\W_])(?:(?:with|using|and|und|mit|y|et|avec|con)(?: the| dem| la| le)?"
    r" (?:password|passwort|contraseña|mot de passe) "
    r"|(?:set|changed?|reset)(?: the| my| your| its)? (?:password|pin) to )"
)
MARKED = (
    r"(?:\*\*)?(?:`(?P<code>[^`\n]{2,64})`|\"(?P<double>[^\"\n]{2,64})\"|'(?P<single>[^'\n]{2,64})'"
    r"|[“„](?P<curly>[^“”\n]{2,64})[“”]|«(?P<guillemets>[^»\n]{2,64})»)"
)
BARE = r"\*{0,2}(?P<bare>[^\s\"'`“„«»<>{}()\[\]|*,。、]{3,64})"

# What stands for a value that is put in later, or code that computes it.
TEMPLATE = re.compile(r"[{}<>$]|%[sd(]|\A[-+.\\/~ ]|\*{3}|•|x{4}|\.{3}|…|\w\(|\A\W+\Z|[ .]\Z", re.IGNORECASE)
# "is 8 characters long": what is counted behind a number.
COUNTED = re.compile(
    r"[\s-]{0,2}(?:to |bis |à |a |or |\d+ )?(?:min|max|char|zeichen|cara|digit|letter|symbol|number|word|tekens|znak"
    r"|bit|day|hour|week|month|year|time|attempt|round|step|more|or |and \d|cijfer|chiffre|d[ií]gito|lett|stell|символ"
    r"|%|文字|桁|位|个|個|字)",
    re.IGNORECASE,
)
METHOD = re.compile(
    r"(?:sha|md|bcrypt|argon|pbkdf|utf|aes|base|rsa|des|v|oauth|http)[-_]?\d|\d{1,2}\)?\Z", re.IGNORECASE
)
# A user name right before: "username is admin and the ", "Login: ann, ".
USER = re.compile(
    r"(?:user(?:[ -]?name)?|login|account|id|e-?mail|identifiant|usu[aá]rio|benutzer(?:name)?|gebruiker|логин"
    r"|用户名|账号)(?: (?:is|ist|est|es|é|as)| ?:)[ \t]{0,2}[\"'`*]{0,3}[\w.@+-]{2,40}[\"'`*]{0,3}[\s,;-]{1,4}"
    r"(?:and |und |et |y |e )?(?:the |das |le |la |a )?\Z",
    re.IGNORECASE,
)
ENDS = re.compile(r"[.!?*)\"']{0,3}(?:\s|\Z|[,;。、])")
# Types and field names, as in code, and what a password is: "is required".
NO_VALUE = re.compile(
    r"(?:pass\w*|pwd|string|str|text|required|true|false|null|none|type|user\w*|field|value|input|int|any|varchar|char"
    r"|optional|wrong|in\w*correct|in?valid|empty|blank|the|a|an|not|set|is|to)\Z",
    re.IGNORECASE,
)


class ProsePassword(Recogniser):
    """A password that a sentence tells; see the head of the file for what it must look like."""

    entity = "PASSWORD"
    gates = (
        "pass", "pw", "pin", "kennwort", "contrase", "senha", "wachtwoord", "hasł", "haslo", "parol", "lösenord",
        "adgangskode", "пароль", "密码", "密碼", "口令", "パスワード", "비밀번호",
    )  # fmt: skip
    told = re.compile(rf"(?:{CALLED}{MORE}{TELLS}|{GIVEN})(?:{MARKED}|{BARE})", re.IGNORECASE)

    def find(self, text: str) -> Iterator[Span]:
        for match in self.told.finditer(text) if mentions(text, self.gates) else ():
            group = next(name for name in ("code", "double", "single", "curly", "guillemets", "bare") if match[name])
            value = match[group].rstrip(".,;:!?") if group == "bare" else match[group].strip("*")
            end = match.start(group) + len(value)
            if value and not TEMPLATE.search(value) and (group != "bare" or self._is_told(text, match, value, end)):
                yield Span(match.start(group), end)

    def _is_told(self, text: str, match: re.Match[str], value: str, end: int) -> bool:
        """Tell whether a value without marks is one: with a digit that counts nothing, or beside a user name."""
        if any(map(str.isdigit, value)):
            return not (COUNTED.match(text, end) or METHOD.match(value) or COUNTED.match(value.lstrip("0123456789-")))
        beside = USER.search(text[max(0, match.start() - 80) : match.start()])
        return beside is not None and ENDS.match(text, end) is not None and not NO_VALUE.match(value)
