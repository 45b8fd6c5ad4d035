"""Stand-ins for the container images, without a container runtime: a lock's packages, code in /app, an
unprivileged user.

As root, a pod runs in its own mount namespace, with a read-only root except for the pod's volumes, without
HOME, capabilities and new privileges. Other users run it as themselves, with the same packages and code, and
volumes below the pod's folder.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path

from flytekit.tools.ignore import DockerIgnore, IgnoreGroup

from tests.support.paths import ROOT
from tests.support.sources import copy, tracked

PACKAGES = Path(sysconfig.get_path("purelib"))
USER = int(re.search(r"--uid (\d+) ", (ROOT / "Dockerfile").read_text())[1])
SYSTEM = [
    path
    for path in map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys"))
    if path.exists()
]
# $1: the folder of the new root; $2: a line "FROM TO MODE" for each mount; then the command.
MOUNT = """
root=$1; mounts=$2; shift 2
mount -t tmpfs -o mode=755 tmpfs "$root"
while IFS=$'\\t' read -r from to mode; do
  if [ "$mode" = link ]; then ln -s "$from" "$root$to"; continue; fi
  mkdir -p "$root$to"
  case "$mode" in
    memory) mount -t tmpfs -o mode=1777 tmpfs "$root$to" ;;
    write) mount --bind "$from" "$root$to" ;;
    device) mount --rbind "$from" "$root$to" ;;
    read) mount --rbind "$from" "$root$to"; mount -o remount,bind,ro "$root$to" ;;
  esac
done <<< "$mounts"
mount -o remount,ro "$root"
exec "$@"
"""


@cache
def may_mount():
    """Return True if this machine allows mount namespaces."""
    if os.geteuid() != 0:
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
    )
    return tried.returncode == 0 and shutil.which("setpriv") is not None


class Image:
    """Image with `venv`, the packages of its lock, and `app`, the files that COPY takes."""

    def __init__(self, folder, lock):
        self.app, self.venv, self.site, self.bin = (folder / name for name in ("app", "venv", "site", "bin"))
        self.takes_code = True
        """True if pods unpack code of fast registration; False as after `pyflyte register --copy none`."""
        _copy_code(self.app)
        _link_packages(self.venv, lock)
        self.site.mkdir()
        shutil.copy(self.app / "images" / "sitecustomize.py", self.site)
        self.bin.mkdir()
        shutil.copy(self.app / "images" / "fast_execute.py", self.bin / "pyflyte-fast-execute")
        (self.bin / "pyflyte-fast-execute").chmod(0o755)
        folder.chmod(0o755)

    def command(self, command, folder, environment, volumes, where):
        """Return the command that starts a container of this image, with its working directory and variables.

        Args:
            folder: the pod's folder on this machine.
            volumes: the paths that the pod mounts.
            where: the container's working directory.
        """
        own = {
            "PATH": f"{self.bin}:{self.venv}/bin:/usr/bin:/bin",
            "PYTHONUNBUFFERED": "1",
            "HOME": "/home/flytune",
        }
        places = {path: folder / "volumes" / path.strip("/").replace("/", "-") for path in volumes}
        for place in places.values():
            place.mkdir(parents=True)
            place.chmod(0o777)
        if not may_mount():
            images = {"/app": self.app, "/opt/site": self.site}
            variables = {
                name: _on_this_machine(value, places | images) for name, value in environment.items()
            }
            return command, places[where], own | {"HOME": str(folder / "no" / "home")} | variables
        (folder / "root").mkdir()
        mounts = [(path, path, "link" if path.is_symlink() else "read") for path in SYSTEM]
        mounts = [(path.readlink() if mode == "link" else path, to, mode) for path, to, mode in mounts]
        mounts.append(("/dev", "/dev", "device"))
        # Mounted first: /tmp has the tests' own folders, which are mounted below it.
        mounts += [
            (place, path, "memory" if path == "/dev/shm" else "write") for path, place in places.items()
        ]
        mounts += [(path, path, "read") for path in (Path(sys.base_prefix), PACKAGES, self.venv, self.bin)]
        mounts += [(self.app, "/app", "read"), (self.site, "/opt/site", "read")]
        lines = "\n".join("\t".join(map(str, mount)) for mount in mounts)
        start = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-euc",
            MOUNT,
            "pod",
            str(folder / "root"),
            lines,
        ]
        user = [
            "setpriv",
            f"--reuid={USER}",
            f"--regid={USER}",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
        ]
        within = [shutil.which("chroot"), str(folder / "root"), *user, "env", f"--chdir={where}"]
        return [*start, *within, *command], folder, own | environment


def _on_this_machine(value, places):
    """Return a variable's value, a list of paths or another text, with the volumes' folders on this
    machine."""
    paths = "|".join(map(re.escape, places))
    return re.sub(rf"(?<![^:])({paths})(?=[/:]|$)", lambda found: str(places[found[1]]), value)


def _copy_code(app):
    """Copy the checkout without the files of .dockerignore, as `COPY . .` does."""
    ignored = IgnoreGroup(str(ROOT), [DockerIgnore]).is_ignored
    copy([name for name in tracked("-co", "--exclude-standard") if not ignored(name)], app)


def _link_packages(venv, lock):
    """Make a virtual environment with only the lock's packages, without the project."""
    packages = venv / PACKAGES.relative_to(sys.prefix)
    packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(
        Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    )
    (venv / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\ninclude-system-site-packages = false\n")
    locked = {_plain(line.split("==")[0]) for line in (ROOT / lock).read_text().split()}
    for name, tops in _installed():
        # torch's own requirements, which are in no lock.
        is_of_torch = name.startswith(("nvidia-", "cuda-", "triton"))
        if name not in locked and not (is_of_torch and "torch" in locked):
            continue
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(PACKAGES / top)
    assert not [path.name for path in packages.iterdir() if "flytune" in path.name]
    for script in ("pyflyte-execute", "pyflyte-fast-execute", "pyflyte-map-execute"):
        text = (Path(sys.prefix) / "bin" / script).read_text()
        (venv / "bin" / script).write_text(re.sub(r"\A#!.*", f"#!{venv}/bin/python", text))
        (venv / "bin" / script).chmod(0o755)


@cache
def _installed():
    """Return the name of each installed package, and what it has at the root of PACKAGES."""
    found = metadata.distributions(path=[str(PACKAGES)])
    return [
        (_plain(one.name), {file.parts[0] for file in one.files or []} - {"..", "__pycache__"})
        for one in found
    ]


def _plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()
