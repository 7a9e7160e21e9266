"""A Space in small: an empty folder, the one requirements file, the repository's files, and a page that answers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = ("app.py", "app", "river_core", "assets", "README.md")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def install(python: Path, folder: Path) -> None:
    """Install the folder's requirements.txt. An index that cannot be reached is asked once for each library rather than six times."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PIP_RETRIES": "0", "PIP_NO_COMPILE": "1"}
    for left in (2, 1, 0):
        command = [python, "-m", "pip", "install", "-q", "--timeout", "30", "-r", "requirements.txt"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return
        assert left, done.stderr[-3000:]


@pytest.mark.slow
def test_an_environment_made_from_requirements_txt_alone_serves_the_page(tmp_path):
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    install(python, tmp_path)
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    port = free_port()
    # What a Space sets, so that the page starts as it does there.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"SPACE_ID": "someone/river-explorer", "SYSTEM": "spaces", "GRADIO_SSR_MODE": "False"}
    log = (tmp_path / "log").open("w+")
    server = subprocess.Popen([python, "app.py", "--port", str(port)], cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        page = None
        deadline = time.monotonic() + 120
        while page is None:
            assert server.poll() is None and time.monotonic() < deadline, (log.seek(0), log.read())[1][-3000:]
            try:
                page = httpx.get(f"http://127.0.0.1:{port}/", timeout=10, trust_env=False).raise_for_status()
            except httpx.HTTPError:
                time.sleep(0.2)
        assert "River Explorer" in page.text
    finally:
        server.terminate()
        server.wait(20)
        log.close()
