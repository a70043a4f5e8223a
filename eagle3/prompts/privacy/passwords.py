"""Passwords.

recogniser                  finds
url_passwords               https://ann:Tr0ub4dor@host, up to the host
password_hashes             $6$salt$…, as systems store them
assigned_passwords          password = "Tr0ub4dor", api_key: 9f8e7d…, curl -u ann:Tr0ub4dor
told_passwords              "my password is Tr0ub4dor", "password for the wifi: Tr0ub4dor"
passwords_in_other_order    "I use Tr0ub4dor as my password"
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

from eagle3.prompts.privacy.recogniser import Pattern, Span, mentions, text_before

# Stand-ins for secrets in documentation.
PLACEHOLDER = re.compile(
    r"example|your|0123456789abcdef|placeholder|dummy|redacted|insert|change_?me|replace|x{4}|\*{3}|\.{3}|…|[<{]|\$\(|\A\$\w+\Z|%s|%\(|\A%\w+%\Z"
    r"|\A(?:pass|passwd|password|pwd|pw|secret|token|key|user(?:name)?|test|foo|bar|none|null|true|false|string|str)\d{0,4}\Z",
    re.IGNORECASE,
)
KEY_ENTROPY = 3.3  # bits, of the value of a key; identifiers have less
MANY_KINDS = 8  # of characters in a random key of 16 and more; aaaa… and 1234-1234 have fewer


def is_random(value: str) -> bool:
    return len(set(value)) >= MANY_KINDS and not PLACEHOLDER.search(value)


def has_letters_and_digits(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def entropy(text: str) -> float:
    """Return Shannon's entropy of the characters, in bits."""
    counts, length = Counter(text).values(), len(text)
    return -sum(count / length * math.log2(count / length) for count in counts)


URL_ACCOUNT = re.compile(r"://([^\s:/@\"'<>]{0,128}):([^\s/@\"'<>]{1,256})@(?:\[[0-9A-Fa-f:.]{2,45}\]|[\w.-]{0,252}\w)")
SCHEME = re.compile(r"[a-z0-9.]{1,10}(?:\+[a-z0-9]{1,20})?\Z", re.IGNORECASE)


def url_passwords(text: str) -> Iterator[Span]:
    """Find URLs with user and password, up to the host; skips placeholders of documentation."""
    for match in URL_ACCOUNT.finditer(text) if "://" in text and "@" in text else ():
        user, password = match.groups()
        if password != user and not PLACEHOLDER.search(password):
            scheme = SCHEME.search(text_before(text, match.start(), 31))
            yield Span(match.start() - len(scheme.group() if scheme else ""), match.end())


password_hashes = Pattern(  # with salt, as systems store them: weak passwords can be guessed from them
    re.compile(
        r"\$(?:1|5|6|y|apr1|2[abxy]?|argon2(?:id|i|d)|scrypt|pbkdf2(?:-sha\d{1,3})?)\$[\w./=,$+-]{20,200}"
        r"|\$krb5\w{2,8}\$\d{1,2}\$[^\s\"']{32,4000}"
    )
)

# --- assigned to a name such as password; or 16 characters and more, to a secret, key or token ------------------------

ASSIGNED_GATES = (
    "pass", "pwd", "secret", "key", "token", "credential", "auth", "webhook", "kennwort", "contrase", "senha",
    "wachtwoord", "пароль", "密码", "密碼", "identified", "curl", "mysql", "net use", "docker", "redis-cli", "mongo",
    "smbclient", "sudo",
)  # fmt: skip
CALLED = (
    r"(?:(?P<password>(?<!reise)(?<!by)(?<!com)(?<!tres)(?<!sur)(?<!over)(?<!under)pass(?:word|wd|phrase|wort|code)?"
    r"|pwd|kennwort|mot[ _]de[ _]passe|contrase[nñ]a|senha|wachtwoord|пароль|密码|密碼)"
    r"|(?:(?:secret|api|access|account|auth|private|app|master|service|encryption|signing)[ _-]?(?:access[ _-]?)?key"
    r"|secret|token|credentials?|auth[ _-]?code|webhook[ _-]?url))"
)
ASSIGNED = (
    r"(?P<more>[_-]\w{0,12})?\d?[\"'`]?(?:"
    r"(?: (?:of|for|to|von|für|de|du|del|di|do|van) [^\n:=]{1,40}?)?"
    r"(?:[ \t]{0,16}(?::=|=>|[:=>]|,[ \t]?(?=[\"']))[ \t]{0,16}| (?:is|ist|lautet|est|es|é)(?: now)?:? )"
    r"|(?P<nothing>[ \t]))"
)
VALUE = (
    r"(?:\"(?P<double>[^\"\s]{4,200})\"|'(?P<single>[^'\s]{4,200})'"
    r"|(?P<bare>[^\s\"'`,;<>()\[\]{}|&]{5,200})(?![(\[{]))"
)
ASSIGNMENT = re.compile(CALLED + ASSIGNED + VALUE, re.IGNORECASE)
# Arguments of commands: SQL's CREATE USER, curl -u user:…, mysql -p…, sshpass -p …, net use … /user:… …
GIVEN_TO_COMMAND = re.compile(
    r"\bidentified (?:with \w{1,40} )?by ['\"](?P<sql>[^'\"\s]{4,200})['\"]"
    r"|\bcurl\b[^\n|;]{0,200}?\s(?:-u|--user)[ =]{0,2}['\"]?[^\s'\":]{1,64}:(?P<curl>[^\s'\"]{4,200})"
    r"|\bmysql\w{0,10}\b[^\n|;]{0,200}?\s-p(?P<mysql>[^\s'\"]{4,200})"
    r"|\b(?:sshpass|docker login|redis-cli|mongo\w{0,8})\b[^\n|;]{0,200}?\s(?:-p|-a|--pass(?:word)?)[ =]?['\"]?"
    r"(?P<option>[^\s'\"]{4,200})"
    r"|\bsmbclient\b[^\n|;]{0,200}?\s(?:-U|--user)[ =]?['\"]?[^\s%]{1,64}%(?P<smb>[^\s'\"]{4,200})"
    r"|\becho ['\"]?(?P<sudo>[^\s'\"|]{4,200})['\"]? ?\| ?sudo -S\b"
    r"|\bnet use\b[^\n|;]{0,200}?\s/user:[^\s]{1,64} ['\"]?(?P<share>[^\s'\"/*]{4,200})",
    re.IGNORECASE,
)
TEST_LOG = re.compile(r"(?<!\w)PASS:")
IDENTIFIER = re.compile(r"[\w./:-]+")
PATH = re.compile(r"(?:~|\.{1,2})?(?:/[\w.@-]+)+/?")
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def assigned_passwords(text: str) -> Iterator[Span]:
    """Find values that look like a password or key: letters with digits or signs, not placeholders or code."""
    if not mentions(text, ASSIGNED_GATES):
        return
    for match in GIVEN_TO_COMMAND.finditer(text):
        group = _last_group(match)
        if _is_password(match[group], quoted=True, assigned=True):
            yield Span(*match.span(group))
    for match in ASSIGNMENT.finditer(text):
        group = _last_group(match)
        value = match[group].rstrip(".!?:") if group == "bare" else match[group]
        if TEST_LOG.match(text, match.start()) and IDENTIFIER.fullmatch(value):
            continue
        if match["nothing"] and ("=" in value or (match["more"] or "").startswith("-")):
            continue  # "pass tol=0.05", "password-protected PKCS#8"
        is_secret = _is_password if match["password"] else _is_key
        if is_secret(value, quoted=group != "bare", assigned=not match["nothing"]):
            yield Span(match.start(group), match.start(group) + len(value))


def _last_group(match: re.Match[str]) -> str:
    """Return the name of the group with the value, the last in each of these patterns."""
    assert match.lastgroup
    return match.lastgroup


def _is_password(value: str, *, quoted: bool, assigned: bool) -> bool:
    letters, digits = any(map(str.isalpha, value)), any(map(str.isdigit, value))
    if len(value) < 6 or PLACEHOLDER.search(value) or not letters:
        return False
    if not quoted and (DOTTED_NAME.fullmatch(value) or PATH.fullmatch(value)):
        return False
    signs = not value.replace("_", "").isalnum() or ("_" in value and value != value.lower())
    return digits and signs if not assigned else digits or (quoted and signs)


def _is_key(value: str, *, quoted: bool, assigned: bool) -> bool:
    return (
        assigned and has_letters_and_digits(value) and len(value) >= 16 and is_random(value)
        and entropy(value) >= KEY_ENTROPY and (quoted or not DOTTED_NAME.fullmatch(value))
    )  # fmt: skip


# --- given in a sentence: "the password is hunter2", "Das Passwort lautet `veiland`", "密码是 123456" ---
# Sentences about a password look similar ("is too weak", "muss 8 Zeichen haben"). A value counts if it is in quotes or
# code marks, has a digit, or comes with a user name.

PASSWORD_NAME = (
    r"(?:(?<![^\W_])(?:pass?(?:word|wrod|phrase|code|wort)(?:ul)?|pw|pin(?:[ -]code)?|kennwort|mot de passe"
    r"|contrase[nñ]a|clave|(?:wi-?fi|wlan|wpa2?|network)[ -](?:key|code|schlüssel)|senha|wachtwoord|has[lł]o|parol[ae]"
    r"|lösenord|adgangskode|пароль)(?![^\W_])|密码|密碼|口令|パスワード|비밀번호)"
)
# Words that may come between: "par défaut pour tous les comptes", "for the account", "meu", "от почты".
MORE = (
    r"(?: (?:of|for|to|von|für|fürs|de|du|del|di|do|par|por|pour|padr[aã]o|voor|от|для|по|meu|tău|predefinita|default)"
    r"(?: [^\s.,:;=`'\"]{1,20}){0,5}?| I (?:chose|choose|use|have|set|picked))?"
)
TELLS = (
    r"(?: ?:[ \t]{0,4}| (?:(?:is|was)(?: now)?|(?:used to|should|will|would) be|ist|war|lautet|est|es|é|è|e|este"
    r"|to|är|er)(?: ?:)? "
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

# Templates, and code that computes the value.
TEMPLATE = re.compile(r"[{}<>$]|%[sd(]|\A[-+.\\/~ ]|\*{3}|•|x{4}|\.{3}|…|\w\(|\A\W+\Z|[ .]\Z", re.IGNORECASE)
# "is 8 characters long": a unit after the number.
COUNTED = re.compile(
    r"[\s-]{0,2}(?:to |bis |à |a |or |\d+ )?(?:min|max|char|zeichen|cara|digit|letter|symbol|number|word|tekens|znak"
    r"|bit|day|hour|week|month|year|time|attempt|round|step|more|or (?:more|less|\d)"
    r"|and \d|cijfer|chiffre|d[ií]gito|lett|stell|символ"
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
# Types and field names, as in code, and properties: "is required".
NO_VALUE = re.compile(
    r"(?:pass\w*|pwd|string|str|text|required|true|false|null|none|type|user\w*|field|value|input|int|any|varchar|char"
    r"|optional|wrong|in\w*correct|in?valid|empty|blank|the|a|an|not|set|is|to)\Z",
    re.IGNORECASE,
)
PROSE_GATES = (
    "pass", "pasw", "pw", "pin", "clave", "wifi", "wi-fi", "wlan", "wpa", "network", "kennwort",
    "contrase", "senha", "wachtwoord", "hasł", "haslo", "parol", "lösenord",
    "adgangskode", "пароль", "密码", "密碼", "口令", "パスワード", "비밀번호",
)  # fmt: skip
TOLD = re.compile(rf"(?:{PASSWORD_NAME}{MORE}{TELLS}|{GIVEN})(?:{MARKED}|{BARE})", re.IGNORECASE)


# Sentences of another order, where only a value with letters and digits counts: "I use … as my password", "is … a
# strong password?", "the password's …", "password (…)", "changed my password from …", "пароль …", "log in as bob / …".
BARE_VALUE = r"(?P<NAME>[^\s\"'`“”„«»<>{}()\[\]|*,。、]{6,64})"
QUOTES = r"[\"'`“”„«»]?"
OWN = r"(?:my|the|a|our|their|his|her|your)"
IN_OTHER_ORDER = re.compile(
    "|".join(
        each.replace("VALUE", QUOTES + BARE_VALUE.replace("NAME", name) + QUOTES)
        for name, each in {
            "used": rf"\b(?:us|typ|enter|pick|choos|chose|tak|tried|try|put)\w{{0,3}} VALUE (?:as|for) {OWN} "
            r"(?:[a-z]{1,12} )?pass(?:word|code|phrase)s?\b(?! ?manager)",
            "judged": r"\b(?:is|was) VALUE an? (?:[a-z]{1,12} ){0,2}pass(?:word|code|phrase)\b(?! ?(?:hash|manager))",
            "owned": r"\b(?:my|his|her|our|your|their)(?: [a-z-]{1,12})? (?:password|passwort|pw),? VALUE",
            "short": rf"{PASSWORD_NAME}['\u2019]s VALUE",
            "in_brackets": rf"{PASSWORD_NAME} \(VALUE\)",
            "changed": rf"(?:chang|reset|updat)\w{{0,4}}(?: {OWN})? (?:password|passwort|pin) (?:from|von) VALUE",
            "russian": r"(?<![^\W_])пароль (?=[!-~])VALUE",
            "pair": r"\b(?:log ?(?:in|on)|sign in|cred(?:ential)?s?)(?: (?:as|with|are|is)|:)? [\w.@-]{2,40}"
            r"(?::| / )VALUE",
        }.items()
    ),
    re.IGNORECASE,
)
ENCLOSED = ("used", "judged", "in_brackets")  # between words or brackets: signs at the end are the value's
OTHER_GATES = (*PROSE_GATES, "log in", "login", "logon", "log on", "sign in", "cred")


def passwords_in_other_order(text: str) -> Iterator[Span]:
    for match in IN_OTHER_ORDER.finditer(text) if mentions(text, OTHER_GATES) else ():
        group = _last_group(match)
        start, value = match.start(group), match[group]
        if group not in ENCLOSED:
            value = value.rstrip(".,;:!?")
        no_value = TEMPLATE.search(value) or METHOD.match(value) or COUNTED.match(value.lstrip("0123456789-"))
        if not no_value and _is_password(value, quoted=False, assigned=True):
            yield Span(start, start + len(value))


def told_passwords(text: str) -> Iterator[Span]:
    for match in TOLD.finditer(text) if mentions(text, PROSE_GATES) else ():
        group = _last_group(match)
        value = match[group].rstrip(".,;:!?") if group == "bare" else match[group].strip("*")
        end = match.start(group) + len(value)
        told = _is_told(text, match, value, end) if group == "bare" else not NO_VALUE.match(value)
        if value and not TEMPLATE.search(value) and told:
            yield Span(match.start(group), end)


def _is_told(text: str, match: re.Match[str], value: str, end: int) -> bool:
    """Tell whether a value without quotes is a password: it has a digit, not of a count, or follows a user name."""
    if any(map(str.isdigit, value)):
        return not (COUNTED.match(text, end) or METHOD.match(value) or COUNTED.match(value.lstrip("0123456789-")))
    user = USER.search(text_before(text, match.start(), 80))
    return user is not None and ENDS.match(text, end) is not None and not NO_VALUE.match(value)
