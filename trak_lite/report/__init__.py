"""Reports on scores: galleries, figures and one HTML page that works offline.

Needs ``pip install trak-lite[report]``. Jinja2 fills the page and escapes all text. matplotlib draws the figures as
inline SVG, in the light or dark colours of the page. Pillow encodes images as PNG. Each is imported when it is needed.
"""

from trak_lite.report.content import Render as Render
from trak_lite.report.page import Gallery as Gallery
from trak_lite.report.page import write_report as write_report

__all__ = ["Gallery", "Render", "write_report"]
