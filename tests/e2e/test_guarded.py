"""`greenlane serve` for other machines: every interface, TLS and keys, used by the openai package and the terminal."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import openai
import pytest

from scripts.serving import GREENLANE
from tests.certificates import Authority, key_file
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import GUARD_S

pytestmark = pytest.mark.e2e


def test_serving_every_interface(make_server: MakeServer, tmp_path: Path) -> None:
    """Red if `--host 0.0.0.0` with TLS and keys doesn't serve who has a key, serves others, or needs a restart to
    take a key away."""
    issued, keys = Authority(tmp_path).issue("server"), key_file(tmp_path, "the-key", "other-key")
    server = make_server("--host=0.0.0.0", "--vllm-grpc-port=0", *issued.flags(), f"--api-key-file={keys}")
    assert server.vllm.startswith("127.0.0.1:"), "the listener without TLS and keys is beyond this machine"
    assert server.http.startswith("https://0.0.0.0:")
    url = server.http.replace("0.0.0.0", "127.0.0.1")
    context = ssl.create_default_context(cafile=issued.ca)
    with openai.DefaultHttpxClient(verify=context, trust_env=False, timeout=GUARD_S) as transport:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="the-key", http_client=transport, max_retries=0)
        usage = client.completions.create(model="tiny", prompt="It is", max_tokens=3).usage
        assert usage is not None
        assert usage.completion_tokens == 3
        stranger = client.with_options(api_key="a-key")
        with pytest.raises(openai.AuthenticationError, match="the key isn't one of the server's"):
            stranger.completions.create(model="tiny", prompt="It is", max_tokens=3)
        assert transport.get(f"{url}/health").json() == {"status": "serving"}
        asked = ("complete", "It is", "--max-tokens=3", f"--address={server.grpc.replace('0.0.0.0', '127.0.0.1')}")
        guards = (f"--ssl-ca-certs={issued.ca}", f"--api-key-file={keys}")
        assert subprocess.run([*GREENLANE, *asked, *guards], capture_output=True, timeout=GUARD_S).returncode == 0
        refused = subprocess.run([*GREENLANE, *asked, guards[0]], capture_output=True, text=True, timeout=GUARD_S)
        assert (refused.returncode, "UNAUTHENTICATED" in refused.stderr) == (1, True)
        scrape = transport.get(f"{url}/metrics", headers={"authorization": "Bearer the-key"}).text
        assert 'greenlane_frontend_unauthorized_total{frontend="1"} 2.0' in scrape
        key_file(tmp_path, "other-key")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    assert "-key" not in server.logged().replace("--api-key-file", "")
