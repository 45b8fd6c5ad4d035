"""The chat format of the demo's models: ChatML, with the marks that tell trained tokens from given ones."""

# The end token stands inside the generation block: a model that is not taught to stop goes on for ever.
_TURNS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml(system: str | None = None) -> str:
    """A Jinja chat template; `system` is said where a conversation has no system message of its own."""
    if system is None:
        return _TURNS
    default = f"<|im_start|>system\\n{system}<|im_end|>\\n"
    return "{% if messages[0]['role'] != 'system' %}{{ '" + default + "' }}{% endif %}" + _TURNS
