"""Training data that an upstream task hands on: stored by its content, and named in the recipe."""

from flytune.stages import input_data, table
from tasks.runtime.face import light

name_file = light(table.INPUT_DATA, globals(), input_data.name_file)
name_folder = light(table.INPUT_DATA, globals(), input_data.name_folder)
name_dataset = light(table.INPUT_DATA, globals(), input_data.name_dataset)
