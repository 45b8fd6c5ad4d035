"""The chat format of the demo's models: ChatML, with the marks that tell trained tokens from given ones."""

from flytune.selftest.tiny_model import CHATML


def chatml(system: str | None = None) -> str:
    """A Jinja chat template; `system` is said where a conversation has no system message of its own."""
    if system is None:
        return CHATML
    default = f"<|im_start|>system\\n{system}<|im_end|>\\n"
    return "{% if messages[0]['role'] != 'system' %}{{ '" + default + "' }}{% endif %}" + CHATML
