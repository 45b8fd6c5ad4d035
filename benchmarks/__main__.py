"""`make bench`: runs all benchmarks and shows their tables."""

from benchmarks import prepare, startup

startup.main()
prepare.main()
