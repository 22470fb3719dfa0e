"""Pictures of scores: galleries, figures and one HTML page that works offline.

No package is needed beside the core's own: images are written as PNG with zlib, figures as inline SVG that follows the
reader's light or dark theme. All text that is not the report's own is escaped as it enters the page.
"""

from trak_lite.report.content import Render as Render
from trak_lite.report.gallery import Gallery as Gallery
from trak_lite.report.page import write_report as write_report

__all__ = ["Gallery", "Render", "write_report"]
