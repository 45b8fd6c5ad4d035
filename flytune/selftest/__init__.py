"""The self-test: every pair of method and sharding computes what plain training of the method does. `flytune selftest`.

ranks         a function in several forked processes
tiny_model    what is trained
chats         what it is trained on
trials        one run, laid out over processes as asked
machine       what this machine has
comparing     how far one run is from another
matrix        all pairs
table         the matrix for people

What is compared, how tightly and why: docs/equality.md.
"""
