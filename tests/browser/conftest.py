"""A real JupyterLab in a real Chromium, driven by Playwright."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
# Kaggle's, on top of this environment; see labkit's pyproject for what else its image holds.
KAGGLE_PINS = ["ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==8.1.5", "jupyter_client==7.4.9", "traitlets==5.7.1"]
KAGGLE = Path("build/kaggle").absolute()
PICTURES = Path(os.environ.get("LABKIT_PICTURES", "build/pictures"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with chromium() as browser:
        yield browser


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    with jupyterlab(tmp_path_factory.mktemp("jupyter")) as server:
        yield server


@contextmanager
def jupyterlab(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """(url, token, root folder) of a JupyterLab of our own, with nothing of the user's configuration."""
    root = folder / "lab"
    root.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(8)
    # Nothing may ask the network for news.
    config = folder / "CONFIG" / "labconfig"
    config.mkdir(parents=True)
    (config / "page_config.json").write_text(
        json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}})
    )
    places = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("DATA", "RUNTIME")}
    places["JUPYTER_CONFIG_DIR"] = str(config.parent)
    spec = Path(places["JUPYTER_DATA_DIR"], "kernels", "kaggle")
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    described = {"argv": command, "display_name": "Kaggle", "language": "python", "env": {"PYTHONPATH": str(KAGGLE)}}
    (spec / "kernel.json").write_text(json.dumps(described))
    env = {k: v for k, v in os.environ.items() if k != "LABKIT_UI"} | places | {"HOME": str(root)}
    options = ["--no-browser", "--allow-root", f"--port={port}", f"--IdentityProvider.token={token}"]
    options += [f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True"]
    with (root / "server.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    try:
        while not _answers(f"{url}/api"):
            assert process.poll() is None, (root / "server.log").read_text()
            assert time.monotonic() < deadline, "JupyterLab did not start within 60 s"
            time.sleep(0.2)
        yield url, token, root
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def need(folder: Path, *packages: str) -> Path:
    """A folder for PYTHONPATH that holds these packages, installed by pip when it is not there."""
    if not (folder / "ipykernel").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{packages[0]} cannot be installed: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="session")
def kaggle_kernel() -> str:
    """The name of a kernel that has Kaggle's versions of what a widget passes through."""
    need(KAGGLE, *KAGGLE_PINS)
    return "kaggle"


@pytest.fixture
def notebook(browser: Any, server: tuple[str, str, Path]) -> Iterator[Notebook]:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    yield Notebook(page, *server)
    page.evaluate("() => { window.jupyterapp?.serviceManager.sessions.shutdownAll(); return 1 }")
    context.close()


class Notebook:
    """One notebook open in JupyterLab. Cells are counted from 0."""

    def __init__(self, page: Any, url: str, token: str, root: Path):
        self.page, self.url, self.token, self.root = page, url, token, root
        self.errors: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, cells: list[str], name: str = "test", kernel: str = "python3") -> Notebook:
        """Write a notebook of these cells and open it; returns when its kernel is idle."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        book.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
        self.name = f"{name}-{secrets.token_hex(3)}.ipynb"
        nbformat.write(book, self.root / self.name)
        self._goto()
        return self

    def _goto(self) -> None:
        self.page.goto(f"{self.url}/lab/tree/{self.name}?reset&token={self.token}")
        self.idle(90)

    def idle(self, seconds: float = 60) -> None:
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=seconds * 1000,
        )

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        # The promise must not be returned: it would make this call wait for the cells to end.
        call = f"window.jupyterapp.commands.execute({json.dumps(name)}, {json.dumps(arguments or {})})"
        self.page.evaluate(f"() => {{ {call}; return 1 }}")

    def run(self, cell: int) -> None:
        """Run one cell and return at once."""
        self.page.evaluate(
            f"() => {{ window.jupyterapp.shell.currentWidget.content.activeCellIndex = {cell}; return 1 }}"
        )
        self.command("notebook:run-cell")

    def reload(self) -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/lab/tree/{self.name}?token={self.token}")
        self.idle(90)

    def reopen(self, book: Any) -> None:
        """Open a copy of what was saved, changed meanwhile."""
        self.name = f"copy-of-{self.name}"
        nbformat.write(book, self.root / self.name)
        self._goto()

    def restart_kernel(self) -> None:
        self.page.evaluate(
            "() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); return 1 }"
        )
        time.sleep(1)
        self.idle(60)

    def interrupt(self) -> None:
        self.command("notebook:interrupt-kernel")

    def save(self) -> Any:
        """Save and return the file as it is on disk."""
        before = (self.root / self.name).stat().st_mtime_ns
        self.command("docmanager:save")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if (self.root / self.name).stat().st_mtime_ns != before:
                with suppress(ValueError):  # JupyterLab is still writing
                    return nbformat.read(self.root / self.name, 4)
        return nbformat.read(self.root / self.name, 4)

    def output(self, cell: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-Cell-outputArea")

    def wait_for_text(self, cell: int, text: str, seconds: float = 60) -> None:
        self.output(cell).get_by_text(text).first.wait_for(timeout=seconds * 1000)

    def picture(self, name: str) -> Path:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(PICTURES / f"{name}.png"))
        return PICTURES / f"{name}.png"
