"""`make bench`: runs all benchmarks and shows their tables."""

from benchmarks import loading, prepare, startup

startup.main()
prepare.main()
loading.main()
