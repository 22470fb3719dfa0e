"""How pages look, and what their search does: the one style and the one script that the pages' policy names."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

from trak_lite.report._html import Html
from trak_lite.report.content import LEVELS

__all__ = ["SCRIPT", "STYLE", "digest_source"]

_BASE: Final = """
.trak-lite { color-scheme: light dark; --ink: #1c2330; --soft: #5b6577; --ground: #ffffff; --card: #f6f7f9;
  --rule: #d9dde4; --high: #1f6fd1; --low: #d4620d; --high-rgb: 31, 111, 209; --low-rgb: 212, 98, 13;
  color: var(--ink); background: var(--ground); font: 15px/1.45 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .trak-lite { --ink: #e6e9ef; --soft: #9aa5b8; --ground: #14171c;
  --card: #1d2128; --rule: #343b47; --high: #6aa9f4; --low: #f09a52; --high-rgb: 88, 156, 240;
  --low-rgb: 226, 128, 50; } }
body.trak-lite { margin: 0; }
.trak-lite main, .trak-lite > header { max-width: 1180px; margin: 0 auto; padding: 0 16px; }
.trak-lite h1 { font-size: 24px; margin: 22px 0 2px; overflow-wrap: anywhere; }
.trak-lite h2 { font-size: 19px; margin: 30px 0 8px; }
.trak-lite h3 { font-size: 15px; margin: 0 0 6px; }
.trak-lite h4 { font-size: 13px; margin: 0 0 6px; font-weight: 600; }
.trak-lite h4.high { color: var(--high); }
.trak-lite h4.low { color: var(--low); }
.trak-lite p { margin: 4px 0; }
.trak-lite .note, .trak-lite figcaption { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.trak-lite nav a { color: var(--high); margin-right: 14px; }
.trak-lite table { border-collapse: collapse; font-size: 13px; color: inherit; }
.trak-lite th, .trak-lite td { text-align: left; vertical-align: top; padding: 3px 10px 3px 0; border: 0;
  border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; font-weight: 400; background: none; }
.trak-lite th { color: var(--soft); min-width: 7em; }
.trak-lite thead th { font-weight: 600; }
.trak-lite .lds { font-size: 28px; font-weight: 600; }
.trak-lite .figures { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 270px), 1fr)); }
.trak-lite figure, .trak-lite .card { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; min-width: 0; }
.trak-lite svg { width: 100%; max-width: 440px; height: auto; display: block; margin: 0 auto; }
.trak-lite svg text { fill: var(--soft); font-size: 11px; font-family: system-ui, sans-serif; }
.trak-lite svg .name { font-size: 12px; }
.trak-lite svg .on { fill: var(--ink); }
.trak-lite svg .high { fill: var(--high); }
.trak-lite svg .low { fill: var(--low); }
.trak-lite svg .dot { fill: var(--high); fill-opacity: .45; }
.trak-lite svg .line { fill: none; stroke: var(--high); stroke-width: 2; }
.trak-lite svg .band { fill: var(--high); fill-opacity: .18; }
.trak-lite svg .axis { stroke: var(--rule); }
.trak-lite svg .mark { stroke: var(--low); stroke-dasharray: 4 3; }
.trak-lite .search { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; margin: 8px 0; }
.trak-lite .search[hidden] { display: none; }
.trak-lite .search input { font: inherit; padding: 6px 10px; width: min(100%, 340px); box-sizing: border-box;
  color: var(--ink); background: var(--ground); border: 1px solid var(--soft); border-radius: 6px; }
.trak-lite .card { margin: 0 0 14px; content-visibility: auto; contain-intrinsic-size: auto 320px; }
.trak-lite .card[hidden] { display: none; }
.trak-lite .target { margin-bottom: 10px; }
.trak-lite .ends { display: grid; gap: 14px 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.trak-lite .ends > section { min-width: 0; }
.trak-lite ol { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 10px; }
.trak-lite li { flex: 0 1 auto; min-width: 0; max-width: 100%; font-size: 12px; margin: 0; }
.trak-lite li:has(.text, .fields:only-child) { flex: 1 0 100%; }
.trak-lite .number { color: var(--soft); }
.trak-lite .score { font-variant-numeric: tabular-nums; }
.trak-lite img { display: block; max-width: 100%; border: 1px solid var(--rule); border-radius: 3px; margin: 0; }
.trak-lite img.coarse { image-rendering: pixelated; }
.trak-lite .text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; max-height: 9.5em;
  overflow: auto; margin: 0 0 2px; padding: 6px 8px; background: var(--ground); border: 1px solid var(--rule);
  border-radius: 5px; font: 13px/1.5 ui-monospace, monospace; }
.trak-lite .fields { margin: 0 0 4px; }
.trak-lite .content img + .fields { font-size: 12px; }
.trak-lite .content img + .fields th { min-width: 0; }
.trak-lite .legend { display: none; }
.trak-lite:has(.tokens) .legend { display: block; }
.trak-lite .tokens span { unicode-bidi: isolate; border-radius: 2px; }
"""


def _shades() -> str:
    """Return the grounds of tokens, level by level."""
    lines = []
    for level in range(1, LEVELS + 1):
        for letter, colour in (("p", "high"), ("n", "low")):
            ground = f"rgba(var(--{colour}-rgb), {0.75 * level / LEVELS:.2f})"
            lines.append(f".trak-lite .{letter}{level} {{ background: {ground}; }}")
    return "\n".join(lines) + "\n"


STYLE: Final = Html(_BASE + _shades())
"""For pages and for notebooks, where it touches nothing outside."""

SCRIPT: Final = Html("""
"use strict";
const cards = [...document.querySelectorAll(".card")];
const texts = cards.map((card) => [...card.querySelectorAll(".content")].map((part) => part.textContent).join(" ")
  .toLowerCase());
const field = document.getElementById("query");
const found = document.getElementById("found");
const show = () => {
  const query = field.value.trim().toLowerCase();
  const number = query.replace(/^target +/, "");
  let count = 0;
  cards.forEach((card, place) => {
    const fits = card.dataset.target === number || texts[place].includes(query);
    card.hidden = !fits;
    count += fits ? 1 : 0;
  });
  found.textContent = count + " of " + cards.length + " targets";
};
field.addEventListener("input", show);
field.closest(".search").hidden = false;
show();
""")
"""Hides the targets that a query does not fit; without it all of them are shown."""


def digest_source(text: str) -> str:
    """Return what a content security policy calls an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
