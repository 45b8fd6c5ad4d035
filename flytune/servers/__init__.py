"""Servers that are asked by HTTP: limits of time and size, no redirects, and keys from the environment."""

from flytune.servers import client
from flytune.servers.client import Client, Form, Refusal
from flytune.servers.exchange import answer_to

__all__ = ["Client", "Form", "Refusal", "answer_to", "client"]
