"""Content of rows that no sample has: refused by name, or counted and said."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flytune import data
from flytune.data import left_out
from flytune.data.columns import NamedRow
from flytune.data.formats import convert
from flytune.errors import DataError
from tests.support.chats import checks_of, request
from tests.support.preferences import prepare_rows, rows_of, write_labelled, write_preferences
from tests.support.tiny import write_rows

ASK, ANSWER = {"role": "user", "content": "Which fox?"}, {"role": "assistant", "content": "The quick one."}
TURNS = [{"from": "human", "value": "Which fox?"}, {"from": "gpt", "value": "The quick one."}]


def part(**more: Any) -> dict[str, Any]:
    return {"messages": [ASK | {"content": [{"type": "text", "text": "Which fox?"} | more]}, ANSWER]}


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        (part(image="fox.png"), "messages", r"messages\[0\].content\[0\] has image beside its text"),
        (part(image_url={"url": "x"}), "messages", r"has image_url beside its text, which would be left out"),
        (part(input_audio={"data": "x"}, video="x"), "messages", r"has input_audio, video beside its text"),
        (
            {"messages": [ASK, ANSWER | {"refusal": "No."}]},
            "messages",
            r"messages\[1\].refusal is not read; write the refus",
        ),
        (
            {"messages": [ASK, ANSWER | {"loss_mask": 0}]},
            "messages",
            r"messages\[1\].loss_mask is not read, and would change",
        ),
        (
            {"messages": [ASK, ANSWER | {"train_detail": [{"begin": 0}]}]},
            "messages",
            r"train_detail is not read, and would ch",
        ),
        (
            {"messages": [ASK, ANSWER | {"loss_scale": 0.5}]},
            "messages",
            r"messages\[1\].loss_scale is 0.5; a turn is either",
        ),
        (
            {"conversations": [TURNS[0] | {"image": "x.png"}, TURNS[1]]},
            "sharegpt",
            r"conversations\[0\].image has content",
        ),
        (
            {"conversations": [TURNS[0], TURNS[1] | {"mask": True}]},
            "sharegpt",
            r"conversations\[1\].mask is not read",
        ),
        (
            {"conversations": [TURNS[0] | {"content": "Another."}, TURNS[1]]},
            "sharegpt",
            r"has both value and content, which d",
        ),
    ],
)
def test_content_that_would_change_a_sample_is_refused(row: dict[str, Any], form: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        convert(NamedRow(row, {}, "here"), form)


def test_parts_and_turns_without_such_content_are_taken() -> None:
    assert convert(
        NamedRow(part(image=None, cache_control={"type": "ephemeral"}), {}, "here"), "messages"
    ).messages == [ASK, ANSWER]
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    chat = convert(
        NamedRow({"conversations": [TURNS[0], TURNS[1] | {"tool_calls": calls}]}, {}, "here"), "sharegpt"
    )
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}, (
        "calls of a turn are not dropped"
    )


CHAT = {"messages": [ASK, ANSWER]}
TEXT = {"prompt": "Which fox?", "completion": " The quick one."}
META = {"id": 7, "source": "web", "language": "en", "created_at": "2024"}


@pytest.mark.parametrize(
    ("row", "form", "meant"),
    [
        (CHAT, "messages", []),
        (CHAT | {"text": "Another text."}, "messages", ["text"]),
        (CHAT | {"prompt": "Which fox?"}, "messages", []),  # part of the messages
        (
            CHAT | {"weight": 0.5, "score": 3, "documents": ["a"]},
            "messages",
            ["weight", "score", "documents"],
        ),
        ({"messages": [ASK | {"name": "Ann"}, ANSWER]}, "messages", ["name of messages"]),
        (
            {"messages": [ASK, {"role": "assistant", "content": "", "rationale": "Hm"}, ASK, ANSWER]},
            "messages",
            ["messages without content", "rationale of messages"],
        ),
        (
            {"messages": [{"role": "system", "content": "Be kind."}, ASK, ANSWER], "system": "Be short."},
            "messages",
            ["system"],
        ),
        ({"messages": [ASK, ANSWER], "system": "Be short."}, "messages", []),
        ({"conversations": [TURNS[0] | {"name": "Ann"}, TURNS[1]]}, "sharegpt", ["name of messages"]),
        ({"instruction": "Which?", "output": "That.", "history": [["a", "b"]]}, "instruction", []),
        ({"instruction": "Which?", "output": "That.", "context": "Foxes."}, "instruction", ["context"]),
        (TEXT | {"label": "good", "reasoning": "Hm"}, "prompt_completion", ["label", "reasoning"]),
        ({"text": "The fox.", "input_ids": [1, 2], "loss_weight": 2}, "text", ["input_ids", "loss_weight"]),
        ({"text": "The fox.", "text_label": 1, "rating": 0}, "text", ["text_label", "rating"]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "text": "The fox."}, "tokens", []),
    ],
)
def test_columns_that_mean_something_are_named_and_others_are_listed(
    row, form, meant, tokenizer, tmp_path, caplog
):
    caplog.set_level("INFO")
    rows = [{**row, **META, "empty": None} for _ in range(20)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    manifest = data.prepare(
        request(tokenizer, path=str(path), format=form, heldout_path=str(path), contract="warn"),
        tmp_path / "a",
    )
    assert [name for name in manifest.left_out if name not in META] == sorted(meant)
    assert {name: rows for name, rows in manifest.left_out.items() if name in META} == dict.fromkeys(META, 40)
    check = checks_of(tmp_path / "a")["left out"]
    assert check.verdict == ("warning" if meant else "ok")
    assert check.found.startswith("columns not used: ")
    assert caplog.text.count("columns not used: ") == 1, "said once, as a warning or not"
    assert all(name in check.found for name in (*META, *meant))
    assert all(name in check.advice for name in meant)


def test_some_rows_are_counted_and_names_are_bounded(tokenizer, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [TEXT | ({"score": 1} if n % 2 else {}) for n in range(20)])
    data.prepare(request(tokenizer, path=str(path), contract="warn", heldout_path=str(path)), tmp_path / "a")
    assert "columns not used: score (20 rows)" in checks_of(tmp_path / "a")["left out"].found
    counts: Counter[str] = Counter()
    for number in range(200):
        left_out.count(iter([f"column {number}"]), counts)
    assert len(counts) == left_out.MOST_NAMES + 1
    assert counts[left_out.OTHERS] == 150


@pytest.mark.parametrize("objective", ["dpo", "reward", "kto"])
def test_columns_beside_a_pair_are_said(objective, base, tmp_path, caplog):
    rows = rows_of(write_preferences(tmp_path / "pairs.jsonl", 60))
    more = {"margin": 0.5, "score_chosen": 4.0, "score_rejected": 2.0}
    label = {} if objective == "kto" else {"label": True}
    _, folder, _ = prepare_rows(
        base, [row | more | label for row in rows], tmp_path / "a", {"objective": objective}
    )
    check = checks_of(folder)["left out"]
    assert check.verdict == "warning"
    assert all(name in check.found for name in (*more, *label))
    assert "margin: TRL's RewardTrainer would subtract it" in check.advice
    assert "score_chosen, score_rejected: no loss uses it" in check.advice
    assert ("label: objective: kto reads a label" in check.advice) == bool(label)
    assert check.found in caplog.text, "on the terminal too"
    prepare_rows(base, rows, tmp_path / "b", {"objective": objective})
    assert checks_of(tmp_path / "b" / "dataset")["left out"].verdict == "ok"


def test_scores_that_prefer_the_rejected_answer_are_counted(base, tmp_path):
    rows = rows_of(write_preferences(tmp_path / "pairs.jsonl", 60))
    rows[:4] = [row | {"chosen_score": 1, "rejected_score": 2} for row in rows[:4]]
    rows[4] |= {"margin": -1.5}
    rows[5] |= {"margin": 1.5}
    manifest, folder, _ = prepare_rows(base, rows, tmp_path / "a", {"objective": "dpo"})
    assert manifest.contradicted == 5
    assert checks_of(folder)["scores of pairs"].found.startswith(
        "5 of 60 pairs have a score or margin for the rejected answer"
    )


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_file_that_mixes_text_and_messages_is_refused(objective, base, tmp_path):
    rows = rows_of((write_labelled if objective == "kto" else write_preferences)(tmp_path / "rows.jsonl", 40))
    chat = {
        name: [{"role": "user" if name == "prompt" else "assistant", "content": text}]
        for name, text in rows[7].items()
        if isinstance(text, str)
    }
    mixed = [*rows[:7], rows[7] | chat, *rows[8:]]
    changes = {"objective": objective, "data.chat_template": str(write_template(tmp_path))}
    with pytest.raises(
        DataError,
        match=r"rows.jsonl:8: the row is of messages, and the rows before it are of text: .*data.sour",
    ):
        prepare_rows(base, mixed, tmp_path / "a", changes)
    manifest, _, _ = prepare_rows(base, mixed, tmp_path / "b", changes | {"data.max_bad_fraction": 0.1})
    assert manifest.bad == 1


def write_template(folder: Path) -> Path:
    file = folder / "chat.jinja"
    file.write_text(
        "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}", encoding="utf-8"
    )
    return file


def test_equal_answers_with_both_labels_are_kept_and_counted(base, tmp_path):
    rows = [row | {"label": True} for row in rows_of(write_labelled(tmp_path / "rows.jsonl", 30))]
    both = [*rows, *(row | {"label": False} for row in rows), rows[0]]
    manifest, folder, _ = prepare_rows(
        base, both, tmp_path / "a", {"objective": "kto", "data.deduplicate": True}
    )
    assert manifest.train.samples + manifest.heldout.samples == 60
    assert manifest.duplicates == 1
    check = checks_of(folder)["contradictions"]
    assert (check.verdict, check.count, check.of) == ("warning", 60, 60)
    assert "60 of 60 answers equal one with the other label" in check.found
    _, folder, _ = prepare_rows(
        base, rows_of(write_labelled(tmp_path / "rows.jsonl", 30)), tmp_path / "b", {"objective": "kto"}
    )
    assert checks_of(folder)["contradictions"].verdict == "ok"


@pytest.mark.parametrize("deduplicate", [False, True])
def test_pairs_in_both_orders_are_counted(deduplicate, base, tmp_path):
    rows = rows_of(write_preferences(tmp_path / "pairs.jsonl", 60))
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:5]]
    changes = {"objective": "dpo", "data.deduplicate": deduplicate}
    manifest, folder, _ = prepare_rows(base, [*rows, *turned], tmp_path / "a", changes)
    assert manifest.rows == 65
    check = checks_of(folder)["contradictions"]
    assert (check.verdict, check.count, check.of) == ("warning", 10, 65)
    assert "10 of 65 pairs equal one in the other order (a > b and b > a)" in check.found
