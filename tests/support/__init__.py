"""Shared parts of the tests: sample data, small models, mocks and stand-ins."""
