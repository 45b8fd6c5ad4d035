"""Measurements of Flytune's claims, each beside a peer in the same run: README.md lists them, `make bench`
runs them."""
