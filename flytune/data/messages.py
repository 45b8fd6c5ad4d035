"""Chats of data sets (messages, ShareGPT's conversations, tool calls) in the form that chat templates
take."""

import json
import re
from typing import Any

from flytune import json_core
from flytune.errors import DataError

Message = dict[str, Any]
"""role and content, both strings. tool_calls and any other keys of the row are passed to the chat template
(left_out.py counts those that it does not write), except `train`, which is False on messages that are not to
be trained on, and missing on all others. The thoughts of an answer are in its content, or in one of
THOUGHT_KEYS (thoughts.py)."""

_SURROGATES = re.compile("[\ud800-\udfff]")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Roles of chat templates by the `from` of a ShareGPT turn."""
_CALLING = ("function_call", "tool_call")
"""Speakers, in ms-swift also roles, whose text is the JSON of a call."""
_RESPONDING = ("function_response", "tool_response")
ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
    "environment",
    "observation",
)
"""Roles that chat templates know. Any other one would be written into the text, or left out, and never
trained."""
_RESULTS = ("tool", "function", "ipython", "environment", "observation")
"""Roles whose messages are results of calls, which may be any value of JSON."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
IN_TEMPLATES = ("role", "content", "tool_calls", "tool_call_id", "train")
"""Keys of messages whose content is in the rendered text, or is not for the model."""
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of messages that hold the thoughts of an answer: Qwen's and TRL's, gpt-oss's, and that of later
servers."""
_THOUGHT_PARTS = ("thinking", "reasoning")
"""Types of content parts that are thoughts."""
_OPEN, _CLOSE = "<think>", "</think>"
FLAGS = ("train", "weight", "training", "loss", "loss_scale", "loss_weight")
"""Keys of messages that say whether one is trained: those of axolotl, OpenAI, axolotl, ms-swift (two) and
LLaMA-Factory."""
_OTHER_FLAGS = re.compile(
    r"(?:loss|mask|train)_.*|.*_mask|loss|mask|masked|training|trainable", re.IGNORECASE
)
"""Keys of messages that other tools read, and that change what is trained."""
_TEXT_OF_PARTS = ("text", "value", "content")
"""Names of a text part's text: OpenAI's, ShareGPT's, and that of messages."""
_OF_PARTS = ("type", "cache_control", "annotations", "id", "index")
"""Keys of a text part that change nothing beside its text."""


def messages_of(value: Any, where: str) -> list[Message]:
    """Return the messages of a `messages` column.

    Raises:
        DataError: it is not a list of messages with role and content; the message says which one is wrong.
    """
    value = _unpacked(value, "messages", where)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: messages must be a list of {{role, content}}, found {type(value).__name__} "
            f"{value!r:.60}"
        )
    return _with_tool_roles(
        value,
        [
            message if _is_plain(message) else _message(message, f"messages[{index}]", where)
            for index, message in enumerate(value)
        ],
    )


def conversation_of(value: Any, where: str) -> list[Message]:
    """Return the messages of ShareGPT's `conversations` column; two turns of one speaker in a row stay two
    messages.

    Raises:
        DataError: it is not a list of turns with from and value (or role and content), or a speaker is
            unknown.
    """
    value = _unpacked(value, "conversations", where)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: conversations must be a list of {{from, value}}, found {type(value).__name__} "
            f"{value!r:.60}"
        )
    return _with_tool_roles(
        value, [_turn(turn, f"conversations[{index}]", where) for index, turn in enumerate(value)]
    )


def _with_tool_roles(value: list[Any], messages: list[Message]) -> list[Message]:
    """Return messages with the role tool in place of OpenAI's older role function, where a function_call came
    before it."""
    if not any(turn.get("function_call") for turn in value):
        return messages
    return [message | {"role": "tool"} if message["role"] == "function" else message for message in messages]


def _unpacked(value: Any, name: str, where: str) -> Any:
    """Return the list of which a column has the JSON text, as in CSV; other values as they are."""
    return _parsed(value, name, where) if isinstance(value, str) and value.lstrip().startswith("[") else value


def tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a `tools` column: a list of JSON schemas, or the JSON text of such a list.

    Raises:
        DataError: it is neither.
    """
    if isinstance(value, str) and value.strip():
        value = _parsed(value, "tools", where)
    if value is None or value in ("", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"{where}: tools must be a list of JSON schemas (or its JSON text), found {value!r:.60}"
        )
    _check_characters(value, "tools", where)
    return value


def text_of(value: Any, name: str, where: str) -> str:
    """Return a string that can be encoded as UTF-8.

    Raises:
        DataError: it is not a string, or it has half of a surrogate pair.
    """
    if not isinstance(value, str):
        hint = (
            "; for lists of messages name the column in data.columns.messages"
            if isinstance(value, list)
            else ""
        )
        raise DataError(f"{where}: {name} must be a string, found {type(value).__name__} {value!r:.60}{hint}")
    _check_characters(value, name, where)
    return value


def is_answer(message: Message) -> bool:
    """Return whether it is a message of the assistant with text, thoughts or tool calls."""
    return message["role"] == "assistant" and bool(
        message.get("tool_calls")
        or message["content"].strip()
        or any(message.get(key) for key in THOUGHT_KEYS)
    )


def thoughts_in(content: str) -> tuple[int, int, int] | None:
    """Return the start and the end of the thoughts that a content begins with, and the start of the answer
    after their tags.

    The opening tag may be missing, as in answers of models whose generation prompt has it. None without
    thoughts.
    """
    end = content.find(_CLOSE)
    before, _, thoughts = content[:end].rpartition(_OPEN)
    if end < 0 or before.strip():
        return None
    answer = content[end + len(_CLOSE) :].lstrip()
    return end - len(thoughts), end, len(content) - len(answer)


def with_suffix(message: Message, suffix: str) -> Message:
    """Return the message with `suffix` after each of its texts, and after the names of the functions that it
    calls."""
    texts = {
        key: text for key, text in message.items() if key != "role" and isinstance(text, str) and text.strip()
    }
    calls = [dict(call) for call in message.get("tool_calls", ())]
    for call in calls:
        function = call.get("function", call)
        named = {**function, "name": function["name"] + suffix}
        call.update({"function": named} if "function" in call else named)
    return {**message, **{key: text + suffix for key, text in texts.items()}} | (
        {"tool_calls": calls} if calls else {}
    )


def with_text_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON text."""
    calls = [dict(call) for call in message.get("tool_calls", ())]
    for call in calls:
        function = call.get("function", call)
        text = {**function, "arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)}
        call.update({"function": text} if "function" in call else text)
    return {**message, "tool_calls": calls} if calls else message


def _is_plain(message: Any) -> bool:
    """Return whether it has only a role and a content, both text: most do, and need no further checks."""
    if type(message) is not dict or len(message) != 2:
        return False
    role, content = message.get("role"), message.get("content")
    return (
        type(role) is str
        and role in ROLES
        and type(content) is str
        and (content.isascii() or not _SURROGATES.search(content))
    )


def _message(message: Any, name: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where}: {name} must have role and content, found {message!r:.60}")
    message = _in_newer_form(message, name, where)
    calls = message.get("tool_calls")
    # With tool calls or thoughts the content may be null or missing.
    has_more = bool(calls) or any(message.get(key) for key in THOUGHT_KEYS)
    required = {"role"} if has_more else {"role", "content"}
    if not required <= message.keys():
        remedy = ""
        if {"from", "value"} <= message.keys():
            remedy = "; write data.format: sharegpt and data.columns: {conversations: messages}"
        raise DataError(
            f"{where}: {name} must have role and content, found an object with "
            f"{', '.join(message) or 'none'}{remedy}"
        )
    role = text_of(message["role"], f"{name}.role", where)
    if role not in ROLES:
        meant = SHAREGPT_ROLES.get(role.strip().lower())
        raise DataError(
            f"{where}: {name}.role is {role!r:.40}, which is not a known role: {', '.join(ROLES)}"
            + (f"; write {meant}" if meant else "")
        )
    _refuse_keys(message, name, where)
    content = ""
    if not has_more or message.get("content") is not None:
        content = _content(_result(message.get("content"), role), f"{name}.content", where)
    if role == "assistant":
        message = _with_thoughts_once(message, content, name, where)
    # As apply_chat_template does: templates treat a key with null as present.
    kept = {key: item for key, item in message.items() if item is not None and key not in FLAGS}
    kept["content"] = content
    if calls:
        kept["tool_calls"] = _calls(calls, f"{name}.tool_calls", where)
    else:
        kept.pop("tool_calls", None)
    if kept.keys() - {"role", "content"}:
        _check_characters(kept, name, where)
    return kept | _flag(message, role, name, where)


def _in_newer_form(message: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return a message with tool_calls in place of function_call, or of a call's JSON as content; and with
    the thoughts that are parts of its content in a key."""
    role, content = message.get("role"), message.get("content")
    if call := message.get("function_call"):
        if message.get("tool_calls"):
            raise DataError(f"{where}: {name} has both function_call and tool_calls; remove one of them")
        message = {key: item for key, item in message.items() if key != "function_call"}
        message["tool_calls"] = [{"type": "function", "function": call}]
    if role in _CALLING:
        return {
            **message,
            "role": "assistant",
            "content": "",
            "tool_calls": _called(content, f"{name}.content", where),
        }
    if role in _RESPONDING:
        return {**message, "role": "tool"}
    if not isinstance(content, list) or role != "assistant" or not any(map(_is_thought, content)):
        return message
    thoughts = [part for part in content if _is_thought(part)]
    texts = [
        next((thought[key] for key in (*_THOUGHT_PARTS, *_TEXT_OF_PARTS) if thought.get(key)), "")
        for thought in thoughts
    ]
    text = "".join(_content(text, f"{name}.content", where) for text in texts)
    if message.get(THOUGHT_KEYS[0]) not in (None, "", text):
        raise DataError(
            f"{where}: {name} has thoughts both in {THOUGHT_KEYS[0]} and in its content, which differ; keep "
            "one"
        )
    return {**message, "content": [part for part in content if not _is_thought(part)], THOUGHT_KEYS[0]: text}


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _THOUGHT_PARTS


def _with_thoughts_once(message: dict[str, Any], content: str, name: str, where: str) -> dict[str, Any]:
    """Return an answer whose thoughts are in one place.

    Raises:
        DataError: they are not text, or several places differ.
    """
    texts_by_key = {
        key: text_of(message[key], f"{name}.{key}", where)
        for key in THOUGHT_KEYS
        if message.get(key) is not None
    }
    texts_by_key = {key: text for key, text in texts_by_key.items() if text.strip()}
    inside = thoughts_in(content) if not texts_by_key or content.lstrip().startswith(_OPEN) else None
    texts = {text.strip() for text in texts_by_key.values()} | (
        {content[inside[0] : inside[1]].strip()} if inside and texts_by_key else set()
    )
    if len(texts) > 1:
        places = " and ".join([*texts_by_key, *(["content"] if inside else [])])
        raise DataError(f"{where}: {name} has thoughts in {places}, which differ; keep one of them")
    kept = set() if inside else set(list(texts_by_key)[:1])
    return {key: item for key, item in message.items() if key not in THOUGHT_KEYS or key in kept}


def _refuse_keys(message: dict[str, Any], name: str, where: str) -> None:
    """Refuse keys of a message whose content would be left out, or would change what is trained."""
    for key, value in message.items():
        if value in (None, "", [], {}):
            continue
        if key in MEDIA:
            raise DataError(
                f"{where}: {name}.{key} has content, which is not read; write images as parts of the "
                "content, and data.images: true; video and audio cannot be trained on"
            )
        if key == "refusal":
            raise DataError(
                f"{where}: {name}.refusal is not read; write the refusal as content, or remove it"
            )
        if key not in FLAGS and _OTHER_FLAGS.fullmatch(key):
            raise DataError(
                f"{where}: {name}.{key} is not read, and would change what is trained on; write train: false "
                "into the messages that are context, or remove it"
            )


def _flag(turn: dict[str, Any], role: str, name: str, where: str) -> Message:
    """Return {"train": False} if one of the turn's own FLAGS excludes it from training, else {}."""
    flags = {key: turn[key] for key in FLAGS if turn.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"{where}: {name}.{key} is {value!r:.40}; a turn is either trained (train: true or weight: "
                "1) or context (train: false or weight: 0)"
            )
        if value and role != "assistant":
            raise DataError(
                f"{where}: {name}.{key} is {value!r}, but its role is {role!r:.40}: only messages of the "
                "assistant are trained; remove it, or set it to false or 0"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        both = " and ".join(f"{key}: {value}" for key, value in flags.items())
        raise DataError(f"{where}: {name} has both {both}; remove one of them")
    return {"train": False} if flags and not any(flags.values()) else {}


def _result(value: Any, role: str) -> Any:
    """Return the JSON text of a call's result that is neither text nor a list of content parts; other content
    as it is."""
    is_parts = isinstance(value, list) and (
        not value or any(isinstance(part, dict) and "type" in part for part in value)
    )
    if role not in _RESULTS or value is None or isinstance(value, str) or is_parts:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _content(value: Any, name: str, where: str) -> str:
    if not isinstance(value, list):
        return text_of(value, name, where)
    texts = []
    for index, part in enumerate(value):
        key = next((key for key in _TEXT_OF_PARTS if isinstance(part, dict) and key in part), "text")
        if (
            not isinstance(part, dict)
            or part.get("type", "text") != "text"
            or not isinstance(part.get(key), str)
        ):
            raise DataError(
                f"{where}: {name}[{index}] must be a text part, {{type: text, text: ...}}, found "
                f"{part!r:.60}; images need data.images: true, and video and audio cannot be trained on"
            )
        texts.append(part[key])
        known = (key, *_OF_PARTS)
        if left_out := [
            key
            for key, item in part.items()
            if key not in known and item not in (None, "", [], {}, texts[-1])
        ]:
            raise DataError(
                f"{where}: {name}[{index}] has {', '.join(left_out):.60} beside its text, which would be "
                "left out; images need data.images: true, and video and audio cannot be trained on: remove "
                "the part, or the row"
            )
    return text_of("".join(texts), name, where)


def _turn(turn: Any, name: str, where: str) -> Message:
    if isinstance(turn, dict) and "role" in turn:
        return _message(turn, name, where)
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        instead = f"an object with {', '.join(turn) or 'none'}" if isinstance(turn, dict) else f"{turn!r:.60}"
        raise DataError(f"{where}: {name} must have from and value, found {instead}")
    speaker = text_of(turn["from"], f"{name}.from", where)
    if speaker not in SHAREGPT_ROLES:
        raise DataError(
            f"{where}: {name}.from is {speaker!r:.40}, which is not a known speaker: "
            f"{', '.join(SHAREGPT_ROLES)}"
        )
    value = _content(_result(turn["value"], SHAREGPT_ROLES[speaker]), f"{name}.value", where)
    if turn.get("content") not in (None, "", value):
        raise DataError(f"{where}: {name} has both value and content, which differ; remove one of them")
    rest = {key: item for key, item in turn.items() if key not in ("from", "value", "content")}
    if speaker in _CALLING:
        value, rest["tool_calls"] = "", _called(value, f"{name}.value", where)
    return _message({**rest, "role": SHAREGPT_ROLES[speaker], "content": value}, name, where)


def _called(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return the calls of which a text is the JSON: one, or a list of them."""
    calls = _parsed(_content(value, name, where), name, where)
    calls = [
        {"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])
    ]
    return _calls(calls, name, where)


def _calls(calls: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects: chat templates would quote arguments that are text
    twice."""
    calls = _unpacked(calls, name, where)
    if not isinstance(calls, list):
        raise DataError(
            f"{where}: {name} must be a list of calls, found {type(calls).__name__} {calls!r:.60}"
        )
    converted = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: {name}[{index}] must name a function, {{function: {{name, arguments}}}}, found "
                f"{call!r:.60}"
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{name}[{index}] arguments", where) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise DataError(
                f"{where}: {name}[{index}] arguments must be an object (or its JSON text), found "
                f"{function['arguments']!r:.60}"
            )
        function = {**function, "arguments": arguments}
        converted.append({**call, "function": function} if "function" in call else function)
    return converted


def _parsed(text: str, name: str, where: str) -> Any:
    try:
        value = json_core.load(text)
    except json_core.JSONError as error:
        raise DataError(f"{where}: {name} must be JSON, found {text!r:.60}: {error}") from None
    _check_characters(value, name, where)
    return value


def _check_characters(value: Any, name: str, where: str) -> None:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {name} has half of a surrogate pair ({text[error.start]!r}), which is not a character"
        ) from None
