"""Credentials in addresses and texts: one check that refuses them, and one redaction for errors and logs."""

import ipaddress
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from flytune import json_core

HIDDEN = "[hidden]"
_MOST = 300
# Tokens by their format: Hugging Face, AWS, GitHub, GitLab, Slack, OpenAI and those that copied it, Google,
# Docker, npm, PyPI, JSON Web Tokens.
_TOKEN = (
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abeprs]-[\w-]{10,}|\bsk-[\w-]{20,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}|\bdckr_pat_[\w-]{16,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bpypi-[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
# Names of parameters that hold a credential.
_PARAMETER = (
    r"(?:[\w.%-]*(?:signature|token|secret|passw(?:or)?d|passphrase|pwd|credentials?|bearer|jwt"
    r"|(?:api|access|secret|account|shared|storage|private|encryption)[-_]?key(?:[-_]?id)?)|sas|sig|key|auth|authorization)"
)
_START = r"(?:[?&#;]|%3F|%26|%23|%3B)"
_IN_QUERY = re.compile(rf"{_START}({_PARAMETER})(?:=|%3D)(?!\[hidden\])[^&\s\"'#;]+", re.IGNORECASE)
_CONNECTION = re.compile(
    r"\b((?:AccountKey|SharedAccessKey|SharedAccessSignature)\s*=\s*)(?!\[hidden\])[^;\s\"']+", re.IGNORECASE
)
# What is before the last @ and after ://, also with slashes. Bounded: a text of megabytes must not take
# minutes.
_USER_INFO = re.compile(
    r"(?<![\w+.-])(?P<scheme>[\w+.-]*)://"
    r"(?P<user>[^\s@/:?#\"'<>]{0,4096}(?::|%3A)[^\s\"'<>]{0,4096}|[^\s@/?#\"'<>]{1,4096})@(?P<host>[^\s/?#\"'<>]*)",
    re.IGNORECASE,
)
_ENCODED = re.compile(r"(%3A%2F%2F)[^\s\"'<>]*%3A[^\s\"'<>]*?%40", re.IGNORECASE)
_PORT = re.compile(r"[^:]{1,255}:\d{1,5}[/?#]")
# In these, a name before the @ is not a secret: the container of Azure, and the user of a file server.
_NAMED = ("abfs", "abfss", "wasb", "wasbs", "az", "adl", "ssh", "sftp", "git+ssh", "smb", "hdfs", "webhdfs")
_HOOK = re.compile(
    r"(hooks\.slack\.com/|discord(?:app)?\.com/api/webhooks/)(?!\[hidden\])[\w/+-]+", re.IGNORECASE
)
_TEXTS = re.compile(
    r"(?<=Bearer )[\w.~+/=-]+|(?<=Basic )[\w+/=]{8,}"
    r"|(?<=secret_access_key['\"]: ['\"])[^'\"]+|(?<=session_token['\"]: ['\"])[^'\"]+|(?<=password['\"]: "
    r"['\"])[^'\"]+",
    re.IGNORECASE,
)
_TOKENS = re.compile(_TOKEN)
_NAME = re.compile(_PARAMETER, re.IGNORECASE)
_SECRET_NAMES = re.compile(
    r"token|secret|passw|credential|api_?key|access_?key|webhook|_fsec_", re.IGNORECASE
)


def problem(text: str, is_address: bool = False) -> str | None:
    """Return what kind of credential a text has, without the credential; None if it has none.

    Args:
        text: an address, or any other text of a recipe or record.
        is_address: whether parameters count in a text without `://` too.
    """
    # Encoded once or twice, as a copied link may be.
    for fromkey in dict.fromkeys((text, once := unquote(text), unquote(once))):
        if ("://" in fromkey or is_address) and _IN_QUERY.search(fromkey):
            return "a parameter with a signature, token or key"
        if _CONNECTION.search(fromkey):
            return "an account's key"
        if any(_is_secret(match) for match in _USER_INFO.finditer(fromkey)):
            return "a user's name and password, or a token, before the host"
        if _HOOK.search(fromkey):
            return "a webhook, which is a secret as a whole"
        if _TOKENS.search(fromkey):
            return "a token"
    return None


def is_here(host: str) -> bool:
    """Return whether a host is this machine, as it names itself: nothing that is sent there leaves it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_secret(name: str) -> bool:
    """Return whether a parameter or key of that name holds a credential."""
    return _NAME.fullmatch(name) is not None


def check(address: object, where: str, error: Callable[[str], Exception]) -> str:
    """Return an address without credentials.

    Raises:
        error: it has some, or a control character; the message begins with `where` and does not contain the
            address.
    """
    text = str(address)
    if reason := problem(text, is_address=True):
        raise error(f"{where}: {refusal(reason)}")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise error(f"{where}: an address with a control character; write it without")
    return text


def refusal(reason: str) -> str:
    """Return the message for a credential of the kind that `problem` returned."""
    return (
        f"an address with credentials ({reason}), which every artifact and report would show; put them into "
        "the environment, on a cluster with secrets in cluster.yaml"
    )


def found_in(value: Any, loc: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield the places of texts with credentials below a value of mappings and lists, and the kind of
    each."""
    if isinstance(value, str) and (reason := problem(value)):
        yield loc, reason
    for key, part in json_core.entries(value):
        if isinstance(key, str) and (reason := problem(key)):
            yield (*loc, redact(key)), reason
        yield from found_in(part, (*loc, key))


def reason(error: BaseException) -> str:
    """Return an error's type and text in one line, without secrets and without the query part of
    addresses."""
    text = re.sub(r"\?\S+", "?...", " ".join(redact(str(error)).split()))
    return f"{type(error).__name__}: {text[:_MOST]}"


def _is_secret(match: re.Match[str]) -> bool:
    user, scheme = match["user"], match["scheme"].lower()
    is_name = ":" not in user and "%3a" not in user.lower() and scheme in _NAMED
    # A server with a port, and a path with an @: http://minio:9000/bucket@v1.
    is_path = scheme in ("http", "https") and _PORT.match(user) is not None and "." not in match["host"]
    return not is_name and not is_path and user != HIDDEN


def _without_user(match: re.Match[str]) -> str:
    return f"{match['scheme']}://{HIDDEN}@{match['host']}" if _is_secret(match) else match[0]


def redact(text: str) -> str:
    """Return a text without any known credential, and without what looks like one; safe to repeat."""
    values = {value for name, value in os.environ.items() if _SECRET_NAMES.search(name) and len(value) >= 8}
    for value in sorted(values, key=len, reverse=True):
        # Paths to credentials are not secrets.
        if not value.startswith("/"):
            text = text.replace(value, HIDDEN)
    text = _USER_INFO.sub(_without_user, text)
    text = _ENCODED.sub(lambda match: f"{match[1]}{HIDDEN}%40", text)
    text = _IN_QUERY.sub(lambda match: f"{match[0][: match.end(1) - match.start()]}={HIDDEN}", text)
    text = _CONNECTION.sub(lambda match: match[1] + HIDDEN, text)
    text = _HOOK.sub(lambda match: match[1] + HIDDEN, text)
    return _TOKENS.sub(HIDDEN, _TEXTS.sub(HIDDEN, text))
