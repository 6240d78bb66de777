"""A service with the scripted engine over real HTTP, started once for all tests that ask it something.

Nothing here may reach a network: Hugging Face is offline, proxies are ignored.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from app.server import running
from app.services import Services
from app.settings import Settings
from serving.scripted_engine import ScriptedEngine
from tests.documents import Report, as_pdf, report

os.environ["HF_HUB_OFFLINE"] = "1"
# Read when torch is loaded: threads that have nothing to do sleep. Where cores are shared, waiting threads that spin
# keep the working one from its core, and a kernel of milliseconds takes half a minute.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["KMP_BLOCKTIME"] = "0"
for _name in [name for name in os.environ if name.startswith("FOREWORD_")]:
    del os.environ[_name]


structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


@dataclass(frozen=True)
class Service:
    """A running service, seen from outside and inside."""

    http: httpx.AsyncClient
    url: str
    services: Services

    @contextmanager
    def scripted(self, **changes: Any) -> Iterator[None]:
        """The engine behaves differently for a while."""
        script = self.engine.script
        self.engine.script = replace(script, **changes)
        try:
            yield
        finally:
            self.engine.script = script

    @property
    def engine(self) -> ScriptedEngine:
        engine = self.services.engine
        assert isinstance(engine, ScriptedEngine)
        return engine

    async def upload(self, name: str, data: bytes, **fields: str) -> str:
        """Upload a file, wait until its ingest has ended, and return its id."""
        response = await self.http.post("/v1/documents", files={"files": (name, data)}, data=fields)
        assert response.status_code == 202, response.text
        id: str = response.json()["documents"][0]["id"]
        async with self.http.stream("GET", f"/v1/documents/{id}/events") as events:
            async for _ in events.aiter_lines():
                pass
        return id

    async def ask(self, question: str, **fields: Any) -> httpx.Response:
        """Ask without streaming."""
        return await self.http.post("/v1/ask", json={"question": question, "stream": False, **fields})


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[None]:
    """A disk of this size at a folder, which others see as well; skipped where nobody may mount one."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs the right to mount a small disk")
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield
    finally:
        # It may be in use for another moment.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte of a disk free; returns the file that does."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


@pytest.fixture(scope="session")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """The service with the scripted engine and an empty data folder."""
    data = tmp_path_factory.mktemp("data")
    # Documents stay cold unless a test says otherwise, so that each prompt is read as the test expects it.
    settings = Settings(port=0, engine="scripted", data_dir=data, max_upload_mb=2, warm=False)
    async with (
        running(settings) as (url, services),
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http,
    ):
        yield Service(http, url, services)


@pytest.fixture(scope="session")
def long_report() -> Report:
    """Forty pages with known facts and planted personal data."""
    return report(40)


@pytest.fixture(scope="session")
async def report_id(service: Service, long_report: Report) -> str:
    """The long report, ingested as PDF into a collection of its own."""
    return await service.upload("report.pdf", as_pdf(long_report.pages), collection="reports")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return Path(__file__).parent.parent
