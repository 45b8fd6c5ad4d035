"""Tasks of flytune/stages/approval.py."""

from flytune.stages import table
from tasks.runtime.face import light

ask_person = light(table.ASK, globals())
take_answer = light(table.ANSWER, globals())
