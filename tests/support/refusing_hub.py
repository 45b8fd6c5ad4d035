"""A hub that refuses every connection, and the record of them."""

import socket


def refuse_connections(monkeypatch, cache):
    """Return the list of the addresses that are connected to from now on; each refuses. `cache` is the hub's
    cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _detect_agent

    tried = []

    def refuse(address, *arguments, **settings):
        tried.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    # Once in each process huggingface_hub asks for a list of programs, for its user agent.
    monkeypatch.setattr(_detect_agent, "_registry", _detect_agent._EMPTY_REGISTRY)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tried
