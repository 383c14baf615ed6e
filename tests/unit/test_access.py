"""Who may reach a listener: the rule for addresses, key files that are read afresh, what a comparison tells."""

from __future__ import annotations

import hmac
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from access import tls
from access.keys import KeyFile
from access.policy import Access, AccessError, split_address
from tests.certificates import Authority, key_file, replace

GUARD_S = 10.0


@pytest.mark.parametrize(
    ("access", "host", "allowed"),
    [
        (Access(), "127.0.0.1", True),
        (Access(), "127.8.9.1", True),
        (Access(), "::1", True),
        (Access(), "[::1]", True),
        (Access(), "localhost", True),
        (Access(), "0.0.0.0", False),
        (Access(), "::", False),
        (Access(), "", False),
        (Access(), "192.168.1.5", False),
        (Access(), "localhost.example.org", False),
        (Access(api_key_file="t"), "0.0.0.0", False),
        (Access("k", "c"), "0.0.0.0", False),
        (Access("k", "c", api_key_file="t"), "0.0.0.0", True),
        (Access("k", "c", ca_certs="a"), "0.0.0.0", True),
        (Access(insecure=True), "0.0.0.0", True),
        (Access(keyfile="k"), "127.0.0.1", False),
        (Access(certfile="c"), "127.0.0.1", False),
        (Access(ca_certs="a"), "127.0.0.1", False),
        (Access(ca_certs="a", api_key_file="t", insecure=True), "0.0.0.0", False),
    ],
)
def test_what_may_listen_where(access: Access, host: str, allowed: bool) -> None:
    """Red if anything beyond loopback is served without TLS and a way to tell clients apart, unless it is asked for."""
    if allowed:
        access.check("--host", host)
    else:
        with pytest.raises(AccessError, match="--"):
            access.check("--host", host)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("a:1", ("a", 1)),
        ("[::1]:0", ("[::1]", 0)),
        ("::1:80", None),
        (":80", None),
        ("a", None),
        ("a:", None),
        ("a:65536", None),
        ("a:-1", None),
        ("a:¹", None),
    ],
)
def test_addresses(address: str, place: tuple[str, int] | None) -> None:
    """Red if an address is read as another one."""
    assert split_address(address) == place


# ------------------------------ keys


def test_bearer_tokens(tmp_path: Path) -> None:
    """Red if another key, another scheme or half a key is accepted, or one of several keys is not."""
    path = key_file(tmp_path, "# of the night shift", "", "first-key", "  second-key ")
    keys = KeyFile("--api-key-file", str(path))
    for header in (b"Bearer first-key", b"bearer second-key", b"BEARER  first-key "):
        assert keys.accepts(header), header
    for wrong in (b"Bearer first-ke", b"Bearer first-keyy", b"Basic first-key", b"first-key", b"Bearer ", b"", None):
        assert not keys.accepts(wrong), wrong
    for wrong in (
        b"Bearer # of the night shift",
        b"Bearer first-key x",
        b"Bearer first-key\n",
        b"Bearer \xff",
    ):
        assert not keys.accepts(wrong), wrong
    assert keys.bearer() == "Bearer first-key"


def test_every_key_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if the comparison stops at a key that fits, or isn't compare_digest's: its time would tell about keys."""
    compared: list[bytes] = []
    really = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return really(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = KeyFile("--api-key-file", str(key_file(tmp_path, "a", "b", "c")))
    for header, accepted in ((b"Bearer a", True), (b"Bearer x", False), (None, False)):
        compared.clear()
        assert keys.accepts(header) is accepted
        assert len(compared) == len({*compared}) == 3


def test_keys_rotate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red if a key added to the file isn't taken, one removed still is, or the log quotes one."""
    caplog.set_level(logging.DEBUG)
    keys = KeyFile("--api-key-file", str(key_file(tmp_path, "old-key")))
    key_file(tmp_path, "old-key", "new-key")
    assert keys.accepts(b"Bearer old-key")
    assert keys.accepts(b"Bearer new-key")
    key_file(tmp_path, "new-key")
    assert not keys.accepts(b"Bearer old-key")
    assert keys.accepts(b"Bearer new-key")
    assert "-key" not in caplog.text.replace("--api-key-file", "")


def test_a_named_pipe_is_no_key_file(tmp_path: Path) -> None:
    """Red if a pipe in the key file's place is waited for, which holds up every call, or accepted."""
    path = key_file(tmp_path, "a-key")
    keys = KeyFile("--api-key-file", str(path))
    path.unlink()
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(keys.accepts, b"Bearer a-key")
        try:
            assert not answer.result(GUARD_S)
        finally:
            os.close(os.open(path, os.O_RDWR))  # lets go of whoever waits for a writer
    with pytest.raises(AccessError, match="no regular file"):
        KeyFile("--api-key-file", str(path))


def test_a_broken_key_file_accepts_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red if keys that were taken away by emptying, deleting or garbling the file go on being accepted."""
    path = key_file(tmp_path, "a-key")
    keys = KeyFile("--api-key-file", str(path))
    for content in (b"", b"# none\n", b"a-key\nnot a key\n", b"\xff\xfe\n"):
        replace(path, content)
        assert not keys.accepts(b"Bearer a-key")
        assert not keys.accepts(b"Bearer ")
        with pytest.raises(AccessError):
            keys.bearer()
    path.unlink()
    assert not keys.accepts(b"Bearer a-key")
    assert "no key is accepted" in caplog.text
    key_file(tmp_path, "a-key")
    assert keys.accepts(b"Bearer a-key")


@pytest.mark.parametrize("content", [None, b"", b"two words\n", b"k\xc3\xa9y\n", b"x" * 513, b"k\n" * 1025])
def test_key_files_that_are_refused(tmp_path: Path, content: bytes | None) -> None:
    """Red if a file without a usable key starts a server that lets nobody in, or everybody."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AccessError, match="--api-key-file"):
        KeyFile("--api-key-file", str(path))


# ------------------------------ certificates


def test_certificates_that_are_refused(tmp_path: Path) -> None:
    """Red if a listener starts with files with which every handshake would fail."""
    one, other = Authority(tmp_path).issue("one"), Authority(tmp_path).issue("other")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no PEM")
    good = Access(str(one.key), str(one.cert), str(one.ca))
    tls.http_context(good)
    tls.server_credentials(good)
    for key, cert, ca, named in (
        (other.key, one.cert, one.ca, "no pair"),
        (garbage, one.cert, one.ca, "no pair"),
        (one.key, garbage, one.ca, "no pair"),
        (one.key, one.cert, garbage, "--ssl-ca-certs"),
        (tmp_path / "none", one.cert, one.ca, "--ssl-keyfile .* can't be read"),
    ):
        for make in (tls.http_context, tls.server_credentials):
            with pytest.raises(AccessError, match=named):
                make(Access(str(key), str(cert), str(ca)))


def test_what_a_client_shows_and_trusts_is_checked_as_well(tmp_path: Path) -> None:
    """Red if a connection is tried for ever with files with which every handshake would fail."""
    one, other = Authority(tmp_path).issue("one"), Authority(tmp_path).issue("other")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no PEM")
    tls.channel_credentials("--engine-tls", str(one.ca), str(one.cert), str(one.key))
    with pytest.raises(AccessError, match=r"--engine-tls-certfile .* are no pair"):
        tls.channel_credentials("--engine-tls", str(one.ca), str(one.cert), str(other.key))
    with pytest.raises(AccessError, match=r"--engine-tls-ca-certs .* holds no PEM"):
        tls.channel_credentials("--engine-tls", str(garbage), None, None)
