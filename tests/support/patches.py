"""Records of flytune/patches/, by library and name."""

from flytune.patches import table

RECORDS = dict(table.records())
