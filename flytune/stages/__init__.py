"""The stages of workflows: plain functions over records and stored files, and the table of where each one
runs.

orchestrator   what a stage needs of the system that runs it
stored         stored folders as local ones
table          the rows, and the stages of a run
planned        a planned run, and the state of a sweep's runs
points         the pods of a sweep's stages, and their results
attempts       texts and records of failed attempts
ranks          the processes of a node that train
job_end        the order in which a job's pods end
calls, worker  stages called in a pod, or in a process of this machine
declared       the workflows, as each orchestrator offers them
value_types    types and values of stages in those of an orchestrator
All other modules have the functions of one task of `tasks/` each.
"""
