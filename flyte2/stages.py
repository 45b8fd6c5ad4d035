"""The stages declared as Flyte 2's tasks: one task for each row of the table, three for the kinds of input
data."""

from flyte2.runtime.face import declare
from flytune.stages import input_data, selftest, table

for _row in table.ROWS:
    if _row.function:
        # On several nodes the self-test is another function.
        on_several = selftest.selftest_nodes if _row is table.SELFTEST else None
        declare(_row, globals(), on_several=on_several)
name_file = declare(table.INPUT_DATA, globals(), input_data.name_file)
name_folder = declare(table.INPUT_DATA, globals(), input_data.name_folder)
name_dataset = declare(table.INPUT_DATA, globals(), input_data.name_dataset)
