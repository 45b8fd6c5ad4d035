"""The files in which the kernel counts a pod's memory."""

from flytune.hardware import pod_memory


def test_both_versions_of_cgroups_are_looked_for_as_a_container_and_as_a_machine_sees_them(monkeypatch):
    monkeypatch.setattr(
        pod_memory.Path, "read_text", lambda *_, **__: "4:cpu,memory:/one\n3:pids:/x\n0::/two\n"
    )
    found = [f"{used.parent} {used.name} {limit.name}" for used, limit, _ in pod_memory._cgroups()]
    version_2, version_1 = "memory.current memory.max", "memory.usage_in_bytes memory.limit_in_bytes"
    places = [(f"/sys/fs/cgroup{own}", version_2) for own in ("/two", "")]
    places += [(f"/sys/fs/cgroup/memory{own}", version_1) for own in ("/one", "")]
    assert found == [" ".join(place) for place in places]
