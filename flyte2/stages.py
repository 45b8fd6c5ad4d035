"""The stages declared as Flyte 2's tasks: one task for each row of the table, three for the kinds of input data."""

from typing import Any

from flyte2.runtime.face import declare
from flytune.stages import input_data, selftest, table, train

_FURTHER: dict[str, dict[str, Any]] = {
    table.TRAIN.name: {"fetch": train.fetch_inputs},
    table.SELFTEST.name: {"on_several": selftest.selftest_nodes},
}
"""Further functions of rows, by their names."""

for _row in table.ROWS:
    if _row.function:
        declare(_row, globals(), **_FURTHER.get(_row.name, {}))
name_file = declare(table.INPUT_DATA, globals(), input_data.name_file)
name_folder = declare(table.INPUT_DATA, globals(), input_data.name_folder)
name_dataset = declare(table.INPUT_DATA, globals(), input_data.name_dataset)
