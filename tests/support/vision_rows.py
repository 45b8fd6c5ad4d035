"""Questions about drawn pictures, and a recipe that trains on them."""

import json

from PIL import Image, ImageDraw

from tests.support.tiny import tiny_recipe

COLORS = {"red": (220, 20, 20), "green": (20, 180, 20), "blue": (20, 20, 220)}


def write_rows(folder, count, text_rows=0):
    """Write `count` questions about drawn pictures, and some about none."""
    rows = []
    for number in range(count):
        name = list(COLORS)[number % 3]
        picture = Image.new("RGB", (40 + number, 56), "white")
        ImageDraw.Draw(picture).rectangle((8, 8, 30, 30), fill=COLORS[name])
        picture.save(folder / f"{number}.png")
        question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "Which color?"}]
        rows.append(
            [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {name}."}]
        )
    rows += [
        [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": str(number)}]
        for number in range(text_rows)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def content(base, rows, **changes):
    own = {"data.images": True, "data.max_length": 512, "data.too_long": "drop"}
    recipe = tiny_recipe(base, rows, own | changes)
    recipe["checkpoints"]["folder"] = str(rows.parent / "checkpoints")
    return recipe
