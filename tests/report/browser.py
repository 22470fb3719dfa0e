"""A headless Chromium spoken to over a pipe (DevTools protocol): no driver and no package is needed."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "needs Chromium: no chromium and no google-chrome is on the PATH (Debian: apt install chromium)"

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root, where the sandbox does not start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from file descriptor 3 and answers on 4.
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab, and everything that it asked for or complained about."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers = commands, answers
        self._count = 0
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, place: Path | str, *, width: int = 1280, dark: bool = False, scripts: bool = True) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.requests.clear()
        self.complaints.clear()
        self._loaded = False
        self.call("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        self.loaded()
        self.wait("document.readyState === 'complete'")  # the event may have been that of the page before

    def loaded(self) -> None:
        """Wait for the end of a navigation that has begun since :meth:`open`, or since the last call."""
        while not self._loaded:
            self._read()
        self._loaded = False

    def run(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        box = self.run(
            f"(e => {{ e.scrollIntoView(); const r = e.getBoundingClientRect(); "
            f"return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({selector!r}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key: a letter, or a name as in KeyboardEvent.key."""
        code, text = {"Enter": (13, "\r"), "Tab": (9, "")}.get(key) or (ord(key.upper()), key)
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def wait(self, expression: str) -> None:
        self.call(
            "Runtime.evaluate",
            expression="new Promise((done, failed) => { const end = Date.now() + 30000; const look = () => "
            f"({expression}) ? done() : Date.now() > end ? failed() : setTimeout(look, 20); look(); }})",
            awaitPromise=True,
        )
        assert self.run(expression), expression

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def _read(self) -> dict[str, Any]:
        raw = bytearray()
        while not raw.endswith(b"\0"):
            byte = self._answers.read(1)
            assert byte, "Chromium is gone"
            raw += byte
        message: dict[str, Any] = json.loads(raw[:-1])
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    assert CHROMIUM is not None, NO_CHROMIUM
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Numbers above 4, so that one dup2 in the child does not close the other end.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
    command = [sys.executable, "-c", _START, *map(str, ends), CHROMIUM, *_FLAGS, f"--user-data-dir={folder}"]
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, pass_fds=ends, start_new_session=True, **silent)
    for end in (theirs_in, theirs_out, *ends):
        os.close(end)
    try:
        with open(ours_out, "wb") as commands, open(ours_in, "rb") as answers:
            yield Page(commands, answers)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_layout(page: Page, width: int) -> None:
    """Nothing reaches beyond the screen, and nothing is too small to be read or to be hit (WCAG 2.2, 2.5.8)."""
    every = "[...document.querySelectorAll('main *')]"
    assert page.run("document.documentElement.scrollWidth") == width
    beyond = f"{every}.filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert page.run(f"{beyond}.map(e => e.outerHTML)") == []
    texts = "[...document.querySelectorAll('main *:not(svg *)')]"
    assert min(page.run(f"{texts}.map(e => parseFloat(getComputedStyle(e).fontSize))")) >= 12
    controls = "[...document.querySelectorAll('button, select, input:not([type=hidden]), textarea')]"
    heights = page.run(f"{controls}.map(e => e.getBoundingClientRect().height)")
    assert min(heights, default=24) >= 24


_LAYERS = """
[...document.querySelectorAll(SELECTOR)].filter(e => !ONLY_TEXT || [...e.childNodes].some(
    n => n.nodeType === 3 && n.textContent.trim()
)).map(e => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.push(getComputedStyle(at).backgroundColor);
    return [e.tagName + '.' + e.className, getComputedStyle(e).STYLE, layers];
})
"""
"""Names, colours, and the backgrounds from the element down to the page."""
_READABLE = (
    ("main *", "color", 4.5),
    ("svg text", "fill", 4.5),
    ("button, select, textarea, input:not([type=hidden])", "borderTopColor", 3.0),
    ('svg path[fill="var(--high)"]', "fill", 3.0),
)


def check_colours(page: Page, *, dark: bool) -> int:
    """Text can be read, charts and borders can be seen (WCAG 2.1, 1.4.3 and 1.4.11); return the number of shades."""
    shades = set()
    for selector, style, least in _READABLE:
        script = _LAYERS.replace("SELECTOR", repr(selector)).replace("STYLE", style)
        found = page.run(script.replace("ONLY_TEXT", "true" if style == "color" else "false"))
        for name, ink, layers in {(name, ink, tuple(layers)) for name, ink, layers in found}:
            ratio = sorted((luminance([ink, *layers]) + 0.05, luminance(layers) + 0.05))
            assert ratio[1] / ratio[0] >= least, (name, ink, layers)
            shades.add(layers)
    grounds = [luminance(layers) for layers in shades]
    assert (max(grounds) < 0.1) if dark else (min(grounds) > 0.1)
    return len(shades)


def luminance(colours: Sequence[str]) -> float:
    """Return the relative luminance (WCAG 2.1) of colours that lie one upon the other, the uppermost first."""
    mixed = np.ones(3)
    for colour in reversed(colours):
        red, green, blue, *opacity = (float(number) for number in re.findall(r"[\d.]+", colour))
        share = opacity[0] if opacity else 1.0
        mixed = share * np.array([red, green, blue]) / 255 + (1 - share) * mixed
    linear = np.where(mixed <= 0.04045, mixed / 12.92, ((mixed + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
