"""Folders of the project that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
