"""Progress bars, tables and lines in a terminal."""

# Names are imported from the modules: every process that imports flytune loads this package, for `output`.
