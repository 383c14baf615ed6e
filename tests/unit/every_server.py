"""A process with every gRPC server of ours, over scripts: what it logs is its own, and no other test's.

`python -P -m tests.unit.every_server FOLDER` prints their addresses as one JSON line, then serves until its standard
input ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine_core.health import Health
from engine_core.server import bind, build_server
from engine_core.service import ENGINE_SERVICE, EngineService
from tests.unit.scripted_answers import Site
from tests.unit.served_engine import INFO, ScriptedCore
from tests.unit.text_front import text_front
from tests.unit.vllm_front import fronting


@asynccontextmanager
async def engine_server(folder: Path) -> AsyncIterator[str]:
    """The engine core's service over a script; its address."""
    health = Health(ENGINE_SERVICE)
    server = build_server(EngineService(ScriptedCore(), health, INFO, draw_seed=lambda: 1), health)
    address = bind(server, f"unix:{folder}/grpc.sock")
    await server.start()
    yield address
    await server.stop(0)


async def serve(folder: Path) -> None:
    async with text_front(Site()) as text, fronting(Site().served) as vllm, engine_server(folder) as engine:
        print(json.dumps({"text": text.address, "vllm": vllm.address, "engine": engine}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve(Path(sys.argv[1])))
