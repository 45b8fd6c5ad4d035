"""What is claimed, measured side by side with a peer in one run; `make bench`."""
