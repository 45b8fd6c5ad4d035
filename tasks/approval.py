"""Question to a person about a stored artifact, and what becomes of the answer."""

from flytune.stages import table
from tasks.runtime.face import light

ask_person = light(table.ASK, globals())
take_answer = light(table.ANSWER, globals())
