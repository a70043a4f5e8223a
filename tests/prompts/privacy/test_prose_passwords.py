"""Passwords that sentences tell, and sentences about passwords that tell none."""

import pytest

from eagle3.prompts.privacy.passwords import told_passwords

TOLD = [
    ("My login is ann and my password is hunter2, thanks", "hunter2"),
    ("remember my PIN is 4821", "4821"),
    ("The default password is `raspberry`.", "raspberry"),
    ("log in with the password \"open sesame\"", "open sesame"),
    ("I changed the password to 'newpassword' and rebooted", "newpassword"),
    ("The username is admin and the password is suadmin if you run it here", "suadmin"),
    ("Identifiant : admin\nMot de passe : chouette", "chouette"),
    ("Das Passwort lautet «Rubikon».", "Rubikon"),
    ("La contraseña por defecto es: 12345", "12345"),
    ("A senha padrão é **Sol2024**.", "Sol2024"),
    ("Mon mot de passe est SuperSecret2026! Ne le partage pas.", "SuperSecret2026"),
    ("Het wachtwoord is zomer77", "zomer77"),
    ("Twoje hasło to `mojehaslo`:", "mojehaslo"),
    ("Пароль по умолчанию: Sport123", "Sport123"),
    ("系统将设置默认密码为:123456", "123456"),
]  # fmt: skip

ABOUT = [
    "Your password is too short.", "The password must be 8 to 20 characters long.", "My password is 5 characters long.",
    "The password is now stored in the keyring.", "Das Passwort ist falsch.", "Le mot de passe est obligatoire.",
    "La contraseña es incorrecta", "A senha é obrigatória.", "Wachtwoord is te lang.", "密码是否正确",
    "パスワードは6文字以上", "PASS: test_login_2", "pwd: ~/src/app2", "PWD=/home/ubuntu1/app",
    "Passwords are hashed with `bcrypt`.", "The password is SHA-256 hashed.", "The password is `${DB_PASSWORD:-x}`.",
    "Your temporary password is: {token}", "My password is \"<your password>\"", "The password is ********.",
    "Make sure a user exists and the root password is known.", "The pin is connected to pin PB0.",
    "def login(username: str, password: str) -> bool: pass", "The password was changed 2 days ago.",
]  # fmt: skip


@pytest.mark.parametrize(("text", "password"), TOLD)
def test_a_password_that_a_sentence_tells_is_found_whole(text, password):
    assert [text[span.start : span.end] for span in told_passwords(text)] == [password]


@pytest.mark.parametrize("text", ABOUT)
def test_a_sentence_that_says_how_a_password_is_tells_none(text):
    assert list(told_passwords(text)) == []
