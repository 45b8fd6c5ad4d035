"""The chat format of the demo's models: ChatML with generation marks around the trained text."""

from flytune.selftest.tiny_model import CHATML


def chatml(system: str | None = None) -> str:
    """Return a Jinja chat template; `system` is the default system message."""
    if system is None:
        return CHATML
    default = f"<|im_start|>system\\n{system}<|im_end|>\\n"
    return "{% if messages[0]['role'] != 'system' %}{{ '" + default + "' }}{% endif %}" + CHATML
