"""Writes the report when a run ends. Among observers it goes before the view, which shows the path."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cauce.metrics.observer import NullObserver, RunInfo
from cauce.report.html import write_report

logger = logging.getLogger(__name__)


class ReportObserver(NullObserver):
    """Writes RUN/report.html at the end; summary.json has to be on disk by then."""

    def __init__(self) -> None:
        self._run_dir: Path | None = None

    def on_start(self, info: RunInfo) -> None:
        self._run_dir = info.run_dir

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._run_dir is None or summary.get("status") == "fenced":  # the page is the new owner's
            return
        try:
            write_report(self._run_dir)
        except Exception:
            # The run is over and safe; a page that could not be drawn must not make it look failed.
            logger.exception("no report.html; `cauce report %s` tries again", self._run_dir)
