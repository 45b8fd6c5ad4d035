"""Everything that asks or feeds a cluster: clients of both Flytes, executions and their results, what is sent
to a run.

control_plane, flyte2_sdk      clients of Flyte 1 and of Flyte 2
executions, runs_of_flyte2     an execution, and what it has made
failed_runs                    the report of one that has failed
folders                        addresses of a recipe that pods can read and write
uploads, signed_uploads        a recipe's files of this machine, sent with it
code_files                     the code that is sent
"""
