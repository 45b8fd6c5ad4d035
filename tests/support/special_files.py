"""Paths that block a reader, never end, or fill the memory."""

import os
import socket

KINDS = ("a named pipe", "an endless device", "a file of the kernel", "a sparse file", "a socket", "a folder")


def made(kind, path):
    """Return `path` after something of a kind was made there."""
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "an endless device":
        path.symlink_to("/dev/zero")
    elif kind == "a file of the kernel":
        path.symlink_to("/proc/kmsg")
    elif kind == "a sparse file":
        with path.open("wb") as file:
            file.truncate(3 * 10**9)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as opened:
            here = os.getcwd()
            os.chdir(path.parent)  # its address has 107 bytes at most
            opened.bind(path.name)
            os.chdir(here)
    else:
        path.mkdir()
    return path
