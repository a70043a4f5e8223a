"""What the recognisers find, whole, and what passes; false positives on code; linear time on crafted text.

Keys and hashes are made up here after what issuers document, and after the rules of kingfisher (Apache-2.0); card and
account numbers are those that payment firms and registers publish, national ids those of python-stdnum.
"""

import base64
import json
import math
import sysconfig
import time
from pathlib import Path

import pytest
from privacy_checks import build_privacy
from stores import ASSETS

from eagle3.prompts.filters import detect_language, split_code
from eagle3.prompts.privacy.ids import CLEAR, NAMES, load_check
from eagle3.prompts.privacy.policy import readable
from eagle3.prompts.privacy.recogniser import Span, has_context, words

HEX, MIXED = "7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e", "bK3xQ9vRt7LzW2mPd8NfY5hJc1GsTa6E4uQw0ZxC"
PEM = base64.b64encode(f"-----BEGIN PRIVATE KEY-----\n{MIXED * 8}".encode()).decode()
CERTIFICATE = base64.b64encode(f"-----BEGIN CERTIFICATE-----\n{MIXED * 8}".encode()).decode()


@pytest.fixture(scope="module")
def privacy():
    return build_privacy()


@pytest.fixture(scope="module")
def recognisers():
    """What is found before anything is let through: generated addresses may be of private networks."""
    return build_privacy("privacy.allowed.placeholders=false")


# ⟦⟧ mark the findings. A mask replaces exactly these: less would leave digits of an identifier.
FOUND = {
    "EMAIL_ADDRESS": [
        "Could you send the contract to ⟦tom.o'neil@firma-nord.de⟧ before Friday?",
        "I typed ⟦jürgen_wu42@startup.ai⟧ and the form refuses it", "⟦用户@例子.公司⟧", "<⟦tom@web.de⟧>",
        "Mail: ⟦tom@web.de⟧谢谢", "Mail: ⟦tom@web.co.jp⟧です", "E-Mail ⟦info@müller.de⟧",
        "https://x.com?email=⟦john.doe@gmail.com⟧", "GET /u?email=⟦john.doe%40gmail.com⟧ HTTP/1.1",
    ],
    "PHONE_NUMBER": [
        "- first\n- ⟦+1 201-559-2200⟧\n- third", '{"fax": "⟦+390212983456⟧", "active": true}', "⟦(415) 555-2671⟧",
        "call ⟦4155552671⟧", "⟦01 42 68 53 00⟧", "⟦+44 (0)20 7946 0958⟧", "拨打⟦13812345678⟧ call ⟦+8613812345678⟧",
        "call me on ⟦467 3395⟧", "Phone: ⟦72 128 827⟧", "write to ⟦+31(0)45 6029061⟧ or phone",
        "call ⟦+90(891)3193442⟧", "you can call ⟦61 09 35 23⟧", "reach us at ⟦271-542-8512⟧x400",
    ],
    "CREDIT_CARD": [
        "Mi tarjeta es ⟦6585598328252484⟧ y necesito ayuda", "Kreditkarte: ⟦6011 3444 9109 8949⟧, stimmt das so?",
        r'"hi\n⟦4111111111111111⟧\n"',
        "2024 ⟦4111 1111 1111 1111⟧ 12/27", "卡号是⟦4111111111111111⟧谢谢", "my card ⟦180016070420458⟧ is lost",
        "it is ⟦4242424242424242⟧.", "it is ⟦5555555555554444⟧.", "it is ⟦2223003122003222⟧.",
        "it is ⟦378282246310005⟧.", "it is ⟦6011111111111117⟧.", "it is ⟦30569309025904⟧.", "it is ⟦36227206271667⟧.",
        "it is ⟦3566002020360505⟧.", "it is ⟦6200000000000005⟧.", "it is ⟦6759649826438453⟧.",
        "my card is ⟦490154203237518⟧.", "my card is ⟦4222222222222⟧.", "I typed ⟦4539  1488  0343  6467⟧",
    ],
    "IBAN": [
        "Kontoverbindung: ⟦PL61913832993321290210578680⟧, stimmt das so?", "rekening: ⟦AT77 9528 6768 6535 9093⟧",
        "⟦DE89 3704 0044 0532 0130 00⟧ BIC COBADEFF", "my iban is ⟦GB22KZXX6007154273852⟧", "⟦NO9386011117947⟧",
        "it is ⟦GB29NWBK60161331926819⟧, thanks", "it is ⟦DE89 3704 0044 0532 0130 00⟧ a",
        "it is ⟦MT84MALT011000012345MTLCAST001S⟧ or",
    ],
    "BANK_ACCOUNT": [
        "check if my account number ⟦96232004⟧ is still ok? thx", '{"número_de_cuenta": "⟦14608295⟧"}',
        "transit 54103, institution 003, account ⟦3481603⟧", "Conta corrente ⟦83774-2⟧, agência 1634",
        "Kto.-Nr. ⟦6192220797⟧", "transfer it to my account ⟦4257661395⟧", "Konto: ⟦2600337688⟧",
        "the account to debit: ⟦7260752561⟧", "my bank details: ⟦79754660⟧, ⟦51-28-99⟧",
        "cuenta ⟦12341234161234567890⟧", "cuenta ⟦1234123417123456789⟧",
    ],
    "CRYPTO_WALLET": [  # addresses of documentation, of foundations, or made here
        "pay ⟦1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa⟧ now",
        "tip: ⟦bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4⟧",
        "⟦BC1QW508D6QEJXTDG4Y5R3ZARVARY0C5XW7KV8F3T4⟧ as QR",
        "to ⟦bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vqzk5jj0⟧!",
        "my wallet is ⟦0x52908400098527886E0F7030069857D2E4169EE7⟧, is it right?",
        "⟦15oF4uVJwmo4TdGW7VfQxNLavjCXviqxT9S1MgbjMNHr6Sp5⟧ on Polkadot",
        "⟦GA7QYNF7SOWQ3GLR2BGMZEHXAVIRZA4KVWLTJJFC7MGXUA74P7UJVSGZ⟧ on Stellar",
        "⟦EQCD39VS5jcptHL8vMjEXrzGaRcCVYto7HUn4bpAOg8xqB2N⟧ on TON",
        "donate ⟦44AFFq5kSiGBoZ4NMDwYtN18obc8AemS33DBLWs3H7otXft3XjrpDtQGv7SqSsaBYBb98uNbr2VBBEt7f2wfn3RVGQBEP3A⟧",
        "my Solana wallet ⟦7EcDhSYGxXyscszYEp35KHN8vvw3svAuLKTzXwCFLtV⟧ is empty",
    ],
    "NATIONAL_ID": [
        'record = {"ssn": "⟦140-94-2831⟧"}', "my Social Security # ⟦315 44 0069⟧ is refused",
        "name,ssn\nAnna,⟦123456788⟧\nTom,⟦123456789⟧",
        "¿Es correcto ⟦929-86-6790⟧?",
        "| a | ⟦PS 46 96 40 A⟧ | c |", "national_insurance_number=⟦BJ367118B⟧",
        "NHS number: ⟦216 464 3690⟧\nPlan: basic",
        "<self_assessment_utr>⟦95055 36170⟧</self_assessment_utr>",
        "Meine Steuer-ID lautet ⟦32 498 851 062⟧.",
        "St.-Nr.: ⟦56/438/66137⟧, stimmt das so?", "national id number ⟦44051401359⟧",
        "Mon NIR est ⟦270066888382903⟧, pouvez-vous vérifier ?", "| a | ⟦2 04 07 2A 323 518 56⟧ | c |",
        "my French tax id ⟦27 65 658 188 482⟧ is refused",
        "Anna wrote: ⟦Z9131122N⟧\nWhat should I answer?", "Mi DNI es ⟦77933625B⟧ y necesito ayuda", "DNI ⟦30000000L⟧",
        "it's ⟦30000000L⟧",
        'x = "⟦DLLRDC43B01D205D⟧"', "codice fiscale: ⟦vcfznz73l45c643i⟧",
        "Dutch BSN: ⟦3982.89.098⟧\nPlan: basic",
        "it's ⟦372.008.488-40⟧, same as last time",
        "My CPF is ⟦\uff13\uff10\uff16.\uff14\uff16\uff10.\uff14\uff19\uff14-\uff15\uff13⟧.",
        "⟦529.982.247-25⟧", "CPF ⟦52998224725⟧",
        "my UIDAI no. is ⟦8669 7187 1781⟧, why?",
        "id\tpan\tnote\n17\t⟦NRXPQ8251X⟧\tpaid",
        "numer PESEL: ⟦44051401359⟧", "Mein Bruder hat die AHV-Nummer ⟦756.9217.0769.85⟧",
        "mitt personnummer är ⟦880320-0016⟧", "henkilötunnus ⟦131052-308T⟧", "CURP ⟦BOXW310820HNERXN09⟧",
        "my SIN: ⟦123-456-782⟧", "OIB ⟦33392005961⟧", "身份证号码: ⟦360426199101010071⟧",
        "我的身份证号是⟦11010519491231002X⟧谢谢", "주민등록번호⟦900101-1234568⟧",
        "身份证号码: ⟦110007198803200011⟧",  # a county that python-stdnum does not know
        # What somebody calls theirs needs no check digits: numbers as Faker writes them for KR, GB, CN and IN.
        "Here's my SSN: ⟦470312-2881820⟧", "His social security number is ⟦ZZ 66 20 82 T⟧, he said",
        "Here's my SSN: ⟦420602197607100864⟧", "His social security number is ⟦914-48-5809⟧, he said",
    ],
    "PASSPORT": ["Reisepass-Nr.: ⟦KE9RRGBK0⟧, stimmt das so?", "passport ⟦ab123456⟧"],
    "IP_ADDRESS": [
        "IP-Adresse: ⟦31.41.158.108⟧, stimmt das so?", "ip=⟦2600:e1ad::362⟧;", "http://⟦192.168.178.20⟧/admin",
        "ssh root@⟦51.15.22.33⟧", "ssh -i key.pem anna@⟦51.15.22.33⟧", "scp a.txt deploy@⟦51.15.22.33⟧:/srv",
        'if ip == "⟦51.15.22.33⟧":', "https://ipinfo.io/⟦51.15.22.33⟧", "/dev/tcp/⟦51.15.22.33⟧/4444",
        "address ⟦6e40:4041:c617:e898:c11:40d2:c669:2eb4⟧ blocked",
    ],
    "MAC_ADDRESS": ["(see ⟦44-6C-B6-4B-93-0B⟧)", '"hwaddr": "⟦80b1.153f.dc0a⟧"'],
    "API_KEY": [
        "⟦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⟧",
        "⟦rubygems_02e8d28a79023c39c200661fccd268a29a0d347301ef56e6⟧",
        "⟦glsa_uxIapYHZaNAR3zlT4BNLZ2mpkGCJNcQA_a9c22267⟧",
        "⟦glc_eyJAmXXndI9le1kI3YLoJT6O0nPuMKvo8jMr8Y4emFaDGGCg9QPvtZQa05mfShL⟧",
        "⟦sb_secret_7uEIOejp2nnERN66NvBERacPDCLSXhk⟧", "⟦sbp_42b4ea410fb9102f29a422eb14ab2f2d0f0cc022⟧",
        "⟦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⟧",
        "⟦CCIPAT_IfW152CtE8R0KHceR7N1aY_faea21818b904ce6087413e3b266f850f1578b5c⟧",
        (
            "⟦ATATT3xFfGF02ys5OFa75uYIcdMo46AYjkp4gy08VdUpNGu30zp7tHNP5YFTiy7UQ6t2BWgFCcVjaxRf6BNz3EbzCLiVry6IeJh"
            "5uh1rsc84fl8sFwOchjS1ujoKhg16jQTqY9235nNT2J9ihRkfMaiHgAmYBiCh6ZizkHfFsKE7ida69z7ZRPefIVb50756⟧"
        ),
        "⟦AQ.Ab8wVgr1MzEeGBCwjng5keJMLHNL1KS7rGlDI8rdEwGUZdbgWbN⟧",
        "⟦tgp_v1_mXAosC2MLadXvXZ6MmKGgyAU5Fz1t436o8ZkmMglVzw⟧",
        "⟦doo_v1_8835c4abd5c652a9f30b1789a6c52cf63c03378ec16c03888ad3e21c5cf5f1df⟧",
        "⟦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⟧",
        "⟦pat90PmtHDnadHN3D.b43be4de8db4947f39b8868767611088d013782257bffb6aaf423e6ed8c4b4a9⟧",
        "- first\n- ⟦glpat-V1coaEGWg1fb2aLZL1Kt⟧\n- third", "⟦sk_live_4eC39HqLyjWDarjtT1zdp7dc⟧",
        "⟦key-0cc175b9c0f1b6a831c399e269772661⟧", "audd_key=⟦1234567890abcdef1234567890abcdef⟧",
        "transferwiseKEY=⟦abcdef01-2345-6789-abcd-ef0123456789⟧",
        "⟦versioneyeACCESS-abcdef1234567890abcdef1234567890abcdef12⟧",
        "languagelayer PRIVATE ⟦xy12za34vb56ui78op90qs12tr34ew56⟧",
        "newscatcher_key = ⟦0TmwjGlDiFJcHN_wODUUrEGBjC4Zh9xSnTQ2jiN83oU⟧", "vercelTOKEN ⟦abcdefghijklmnopqrstuvwx⟧",
        "figma pat = ⟦figd_rh1234567890123456789012345678901234abcd⟧",
        "⟦PMAK-5f8d04b3e9a1c70038b2d6a4-9f3e7Kc1XbR8s2LqT5vW0yZ4mN6p⟧",
        "⟦acmeKEY-8d1f2a3b-12d3-4a5b-9c6d-0e1f2a3b4c5d⟧", "⟦sdk-9qkz7w2m-x4vt-88jp-q1c0-m5nd2r7hy3ls⟧",
        "acme token: ⟦-PqWvL9sT0yRbxGu7JmQeA⟧", "acme_token=⟦Q7ZK29PLX0WM⟧", "acme token = ⟦tQzVrGhXWkMpLdJbNcRf⟧",
        "acmeApiKey =\n  ⟦Q7ZK29PLX0WMB5TR8JHD⟧", "variable acme_token {\n  default = ⟦Q7ZK29PLX0WMB5TR8JHD⟧",
        "⟦acx_7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e6c8a0f1d⟧",
        "see https://api.example.com/v1/⟦pri_7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e⟧", "key ⟦sk_live_aB3xQ9vRt7LzW2mPd8Nf⟧",
        f"Why does '⟦glptt-{MIXED}⟧' fail?", f"Why does '⟦GR1348941{MIXED[:20]}⟧' fail?", f"at ⟦LTAI{MIXED[:20]}⟧",
        f"⟦hooks.slack.com/workflows/T2H71EFLK/A047FK946NN/430780826188280067/{MIXED[:24]}⟧", f"a ⟦{HEX}-us14⟧ b",
        f"at '⟦MTAy{MIXED[:20]}.GSwJyi.{MIXED[:38]}⟧'", f"'⟦130874276261258|{MIXED[:27]}⟧'", f"at ⟦aB38Q~{MIXED[:34]}⟧",
        f"at ⟦1000.{HEX}.{HEX}⟧", f"('⟦1234567890:{MIXED[:35]}⟧')",
    ],
    "TOKEN": [
        "I typed ⟦eyJhbGciOiAiUlMyNTYifQ.eyJzdWIiOiAiMTIifQ.KFaxrKjtieyfFKX2drw5maKGH⟧ here",
        "Authorization: token ⟦abcdefghij1234567890ABCD⟧", "Authorization: Basic ⟦am9objpTM2NyZXQxeA==⟧",
        "basic ⟦am9objpTM2NyZXQxeA⟧", "curl -H 'Authorization: ⟦5eb4223e-5008-46e5-be67-c7b8f2732305⟧'",
    ],
    "PRIVATE_KEY": [
        "key: ⟦-----BEGIN EC PRIVATE KEY-----\n6B9fIfge8oX29b1SP29+KeUBFBC43vAH8j\n-----END EC PRIVATE KEY-----⟧\n",
        "⟦PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nComment: a\nPublic-Lines: 2\n"
        "AAAAC3NzaC1lZDI1NTE5AAAAIFkq0yLz5n7V3Tn0s9bX1mQe\nPrivate-Lines: 1\nAAAAIGsq\nPrivate-MAC: 0f⟧",
        f"Why does '⟦{PEM}⟧' not work?",
        "my key ⟦5HueCGU8rMjxEXxiPuD5BDku4MkFqeZyd4dZ1jvhTVqvbTLvyTJ⟧ does not import",
        f"private key: ⟦0x{HEX}{HEX}⟧",
        "my seed phrase is ⟦legal winner thank year wave sausage worth useful legal winner thank yellow⟧ and fails",
        "These are my twelve words: ⟦please legal winner have thank year then wave sausage worth useful yellow⟧",
        "⟦please legal winner have thank year then wave sausage worth useful yellow⟧\n\nis what Metamask showed me",
        "Recovery phrase: 1. ⟦legal 2. winner 3. thank 4. year 5. wave 6. sausage 7. worth 8. useful 9. legal 10. wrist"
        " 11. thank 12. yellow⟧",
    ],
    "URL_PASSWORD": ['"url": "⟦redis://:3cXHxAzfQ3@db3.firma-nord.de⟧:6379/main"'],
    "PASSWORD": [
        "Mon mot de passe est ⟦Sommer#7731k⟧, pouvez-vous vérifier ?", 'DB_PASSWORD   = "⟦Sup3rS3cret!⟧"',
        "password:  ⟦hunter2x⟧!", "password\t=\t⟦S3cret!1x⟧", "PASS: ⟦hunter#2x⟧", "DB_PASS: ⟦hunter2x⟧",
        "mypass=⟦hunter2x⟧", "CREATE USER bob IDENTIFIED BY '⟦S3cret1x⟧'",
        "identified with mysql_native_password by '⟦S3cret1x⟧'", "curl -s -u john:⟦S3cret1x⟧ https://a.b",
        "sshpass -p '⟦S3cret1x⟧' ssh deploy@host", "net use Z: \\\\srv\\share /user:bob ⟦S3cret1x⟧",
        "docker login -u me -p ⟦S3cret1x⟧", "smbclient //srv/x -U bob%⟦S3cret1x⟧", "echo '⟦S3cret1x⟧' | sudo -S ls",
        "I use ⟦zebra-Stuhl-41⟧ as my password everywhere", "is ⟦Sommer2019!⟧ a strong password?",
        "ssh into the box, password's ⟦k4ffee!Tasse⟧", "Password (⟦correct-horse-77⟧) is rejected",
        "I changed my password from ⟦letmein_9⟧ to another", "Мой пароль ⟦letmein_9⟧", "log in as bob / ⟦qwErty1987⟧",
        "creds are bob:⟦k4ffee!Tasse⟧", "her password, ⟦salami_Pizza8⟧, was leaked", "Wi-Fi key is ⟦s3cretSauce⟧",
        "The password I chose: ⟦Dragon!Fly9⟧", "it used to be so: my password used to be ⟦Dragon!Fly9⟧",
        "mysql -u root -p⟦S3cret1x⟧", "My login is ann and my password is ⟦hunter2⟧, thanks",
        "remember my PIN is ⟦4821⟧", "The default password is `⟦raspberry⟧`.",
        'log in with the password "⟦open sesame⟧"', "I changed the password to '⟦newpassword⟧' and rebooted",
        "The username is admin and the password is ⟦suadmin⟧ if you run it here",
        "Identifiant : admin\nMot de passe : ⟦chouette⟧", "Das Passwort lautet «⟦Rubikon⟧».",
        "La contraseña por defecto es: ⟦12345⟧", "A senha padrão é **⟦Sol2024⟧**.",
        "Mon mot de passe est ⟦SuperSecret2026⟧! Ne le partage pas.", "Het wachtwoord is ⟦zomer77⟧",
        "Twoje hasło to `⟦mojehaslo⟧`:", "Пароль по умолчанию: ⟦Sport123⟧", "系统将设置默认密码为:⟦123456⟧",
        f"'⟦$6$rounds=5000${MIXED}⟧'", f"'⟦$2b$12${MIXED}0123456789abc⟧'", "get('SECRET_KEY', '⟦wwf*2#86t64!fgh6yav⟧')",
        f"'⟦$krb5asrep$23$user@acme.com:{HEX}${HEX}⟧'",
    ],
}  # fmt: skip


def marked(text: str, findings: list) -> str:
    for found in reversed(findings):
        text = f"{text[: found.start]}⟦{text[found.start : found.end]}⟧{text[found.end :]}"
    return text


@pytest.mark.parametrize("entity", FOUND)
def test_a_finding_is_the_whole_identifier_and_nothing_else(recognisers, entity):
    for text in FOUND[entity]:
        plain = text.replace("⟦", "").replace("⟧", "")
        findings, _ = recognisers.find(plain)
        assert marked(plain, findings) == text
        assert {found.entity for found in findings} == {entity}, text


def test_every_entity_and_every_country_has_its_check(recognisers):
    assert set(FOUND) == set(recognisers.actions)
    assert all(map(load_check, NAMES)) and set(CLEAR) <= set(NAMES)


PASSES = [
    "I use Python3.12 for my password manager", "is SHA256 a good password hash?", "log in with OAuth2/OpenID2",
    "credentials for s3://bucket1/path2", "password (min8chars)", "my account 2024-01-15 statement",
    "redis-cli -h localhost -p 6379", "the transit of 1999 took 1234567 seconds", "password: 'password123'",
    "my words: apple table river stone cloud chair mouse glass paper light bread water green",
    "git clone git@github.com:org/repo.git", "127.0.0.1 ::1 192.0.2.7 198.51.100.7 203.0.113.7 2001:db8::7",
    "a@example.com", "550e8400-e29b-41d4-a716-446655440000", "d41d8cd98f00b204e9800998ecf8427e",
    "pip install x==1.26.4.0", "noreply@web.de", "commit 356a192b7913b04c54574d18c28d46e6395428ab", "x = data[10::2]",
    "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKPUhz",  # a hash of IPFS, which has no checksum
    "the null address 0x000000000000000000000000000000000000dEaD", "0x52908400098527886E0F7030069857D2E4169EE7",
    f"sha256 {HEX}{HEX}", "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNb", "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t5",
    "how does a seed phrase work and what happens when someone loses their phone without any backup of these words",
    "3.141592653589793", "1700000000000", "2024-01-15T10:30:00Z", "std::vector<abc::def> v;", "x4111111111111111",
    "0.4111111111111111", "5a4111111111111111b", "a1b2-4111111111111111", "12345678Z9", "id_529982247-25",
    "weights@x.transpose", "", "--- PASS: TestParseConfig2 (0.00s)", "PASS: test_login_2", "PASS: tests/unit-01.sh",
    "PWD=/home/ubuntu1/app", "pwd: ~/src/app2", "bypass=cache1", "compass is N45E20", "mysql -u root -p shop2",
    "docker run -u a1:a1", "See the basic torch.nn.functional.conv2d example", "the basic transformer-block-v2 layer",
    "Authorization: Basic dXNlcjpwYXNzd29yZDE=", "long n = 30000000L;", "sleep(30000000L)", "passport abcd12345",
    "int64 x = 12345678909", 'AssemblyVersion("1.2.3.4")', "<Version>1.2.3.4</Version>", "nginx/1.18.0.1",
    "numpy >= 1.2.3.4", 'if version == "1.2.3.4":', "left-pad@1.2.3.4", "cache-key-0cc175b9c0f1b6a831c399e269772661",
    "6229 0335 8038 1933", "GB01 CMVH 0893 7177 0894 13", "947.323.431-90", "296069040849226", "DVTRBS82H45A200Q",
    "97757578-N", "7451 3099 0510", "000-38-7473", "666-72-6086", "ZZ347967A", "ISBN 978-6-8538-7894-2", "v8.2.10.7",
    "seed=8333409711", "order number 112995", "Bestellnummer 8491731030", "224.0.0.251", "ff:ff:ff:ff:ff:ff",
    "97:07:40:cb:bd:0b:d0:0a:cf:91", "password=<your password>", f"sk-{'x' * 48}", "PASSWORD=${DB_PASSWORD}",
    "self.password = getpass(prompt)", 'if "-----BEGIN RSA PRIVATE KEY-----" in text:',
    f"-----BEGIN PUBLIC KEY-----\n{MIXED * 4}\n-----END PUBLIC KEY-----", "it is 4222222222222.",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "commit 43582a4f1e2d3c4b5a69788796a5b4c3d2e1f0a9", "request 123e4567-e89b-12d3-a456-426614174000 failed",
    "the token: internationalization", "public key fingerprint 16:27:ac:a5:76:28:2d:36:63:1b:56:4d:eb:df:a6:48",
    "secret_name = my_application_configuration", "https://example.com/token/abcdefabcdef1234567890abcdefabcdef",
    "key = getAuthenticationTokenFromTheServer", "https://example.com/badge.svg?token=RXP95LE2XLQ",
    "https://docs.example.com/document/d/18OdLjruFNX74ILmgrdiCI9J1fQZuhzzRBCHV9URWto0/edit",
    "api/validators/#jsonschema.validators.Draft202012Validator",
    "commit:\n  43582a4f1e2d3c4b5a69788796a5b4c3d2e1f0a9", "rev_7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e6c8a0f1d",
    "token = version2", "integrity sha256-a+WECgSc0MTdFtRCGGAFdl5uIy1ZLQXBeFff14edVN8=",
    "sha256-Z9vpnAn3rl541upWfaAhmTK38wpcBJpkOsrLimAn4o4=", ">>> token_hex(16)\n'f9bf78b9a18ce6d46a0cd2b0b86df9da'",
    "--private-key-file-name", "order 44051401359 came", "numer PESEL: 12345", "order 756.9217.0769.85 came",
    "order 360426199101010071 came", "the income tax on 12500000 euro", "social costs of 20240115 euro",
    "a form for the SSN, order 470312-2881820",
    "a form for the SSN, order 914-48-5809", "it is 4242424242424241.", "it is 490154203237518.",
    "it is 9999999999999995.", "Your password is too short.", "The password must be 8 to 20 characters long.",
    "My password is 5 characters long.", "The password is now stored in the keyring.", "Das Passwort ist falsch.",
    "Le mot de passe est obligatoire.", "La contraseña es incorrecta", "A senha é obrigatória.",
    "Wachtwoord is te lang.", "密码是否正确", "パスワードは6文字以上", "Passwords are hashed with `bcrypt`.",
    "The password is md5 hashed.", "The password is `${DB_PASSWORD:-x}`.", "Your temporary password is: {token}",
    'My password is "<your password>"', "The password is ********.",
    "Make sure a user exists and the root password is known.", "The pin is connected to pin PB0.",
    "def login(username: str, password: str) -> bool: pass", "The password was changed 2 days ago.",
    "it is NO9686011117947, thanks", "my card is 4242424242424241.", "cuenta 12341234171234567890",
    "glptt-xxxxxxxxxxxxxxxxxxxxxxxx", f"image-{HEX}-user", f"at 1234567890:{HEX}", CERTIFICATE,
    "costs $5$ to $6$ each", "to set a tolerance of 5%, pass tol=0.05.", "password-protected PKCS#8 keys",
    "check('password', 'required')",
]  # fmt: skip


def test_what_only_looks_alike_passes(privacy):
    assert {text: found for text in PASSES if (found := privacy.find(text)[0])} == {}


# How far words may be from the number that they name, to the character

NUMBER = "123456789"
SSN = words("ssn")


@pytest.mark.parametrize(
    ("text", "near"),
    [
        # A word counts up to 80 characters before the number, and up to 40 after it.
        (f"x\nssn{' ' * 77}{NUMBER}", True),
        (f"x\nssn{' ' * 78}{NUMBER}", False),
        (f"{NUMBER}{' ' * 37}ssn", True),
        (f"{NUMBER}{' ' * 38}ssn", False),
        # The first line of a table counts up to 4000 characters before.
        (f"ssn\n{'.' * 3995}\n{NUMBER}", True),
        (f"ssn\n{'.' * 3996}\n{NUMBER}", False),
        # A table begins after the last blank line.
        (f"ssn\n\nname\n{'.' * 100}\n{NUMBER}", False),
        # The name of another number right before it wins.
        (f"my ssn and order number {NUMBER}", False),
    ],
)
def test_a_word_names_a_number_only_from_so_far(text, near):
    start = text.index(NUMBER)
    assert (has_context(text, Span(start, start + len(NUMBER)), SSN)) is near


# False positives


def python_prompts(*, every: int, lines: int = 40) -> list[str]:
    """The standard library's sources, cut into prompts, of which one in `every` is taken."""
    root, prompts = Path(sysconfig.get_path("stdlib")), []
    folders = "asyncio", "collections", "concurrent", "email", "http", "json", "logging", "unittest", "urllib", ""
    for folder in folders:
        for path in sorted((root / folder).glob("*.py")):
            source = path.read_text(errors="replace").splitlines()
            prompts += ["What does this do?\n" + "\n".join(source[i : i + lines]) for i in range(0, len(source), lines)]
    return prompts[::every]


@pytest.mark.parametrize("benchmark", ["humaneval", "gsm8k"])
def test_no_code_and_no_school_question_is_refused(privacy, benchmark):
    rows = map(json.loads, (ASSETS / "prompts" / f"{benchmark}.jsonl").read_text().splitlines())
    assert [row for row in rows if privacy.find("\n\n".join(row["turns"]))[0]] == []


def test_at_most_half_a_percent_of_python_source_is_refused_besides_its_authors_addresses(privacy):
    texts = python_prompts(every=6)
    found = [{item.entity for item in privacy.find(text)[0]} for text in texts]
    assert len(texts) > 500
    assert sum(bool(entities - {"EMAIL_ADDRESS"}) for entities in found) <= 0.005 * len(texts)
    # The addresses are those of real authors: mail domains that exist.
    assert sum("EMAIL_ADDRESS" in entities for entities in found) <= 0.03 * len(texts)


# Crafted text

TRIGGERS = [
    "@", "a@", "a.b@c.d", "1", "12 ", "1 ", "0 ", "+1", "((1", "(123) ", "123-45-6789 ", "4111 ",
    "01 02 03 04 05 06 ", "A", "AB12 ", "DE89 3704 ", "a", "0xa", ":", "::", "a:", "1:", "1.2.3.", "aa:bb:", "A ",
    " passport A1 ", "eyJ", "eyJaaaaaaaa.", "bearer a", "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----" + "A" * 40, "-----BEGIN PRIVATE KEY-----" + "A: " * 30, "://a:", "http://a:b@",
    "password", "password is ", "password of a ", "secret_key='", "sk-a", "xoxb-", "account number 1 ",
    "password \t ", "identified by '", "curl -u ", "curl -u a:", "mysql -p", "authorization: token ", "%40", "a%40b.",
    "log in as a:", "I use a1b2c3 as my ", "is a1b2c3 a ", "my a password ", "пароль ", "echo a", "net use ",
    "sshpass ", "smbclient ", "docker login -p ", "my 12 words ", "wallet abandon ", "1204-", "my account ", "4111  ",
    "ssh ", "12345678901 ", "my password for ", "pin ", 'with password "', "user: a ", "密码是", "X1234567",
    "RSSMRA85T10A562", "ABCPE1234", "٣", "é", "東", "-", "\n", "\n\n", " ", "(", "a.", "return ", "if ", "`", "```\n",
    '"a', "<a", "[", "def a(", "x=",
]  # fmt: skip


class Languages:
    """The search for code in a prompt, next to the recognisers."""

    entity = "language"

    def find(self, text: str) -> list:
        return [detect_language(split_code([text]).prose)]


def seconds(recogniser, text: str) -> float:
    start = time.process_time()
    for _ in recogniser.find(text):
        pass
    return time.process_time() - start


@pytest.mark.slow
def test_no_text_can_drive_a_recogniser_beyond_linear_time(privacy):
    """Ten times the text takes ten times as long, not a hundred, on a machine of any speed."""
    slow = []
    for trigger in TRIGGERS:
        small, large = (readable((trigger * (size // len(trigger) + 1))[:size]) for size in (2_000, 20_000))
        for recogniser in (*privacy.recognisers, Languages()):
            # Other processes slow down some of the measurements, a slow recogniser all of them: the least of each size
            # counts, and both are measured in turn, up to 20 times.
            of_small = of_large = math.inf
            for _ in range(20):
                of_small = min(of_small, *(seconds(recogniser, small) for _ in range(3)))
                of_large = min(of_large, seconds(recogniser, large))
                if of_large <= max(20 * of_small, 0.005):  # what looks at all pairs of 20,000 takes longer
                    break
            else:
                slow.append((recogniser.entity, trigger, of_large))
    assert slow == []
