"""The CPUs that this process may use. Of the standard library alone: setup.py runs it, too."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

_ALLOWED = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
CPUS = tuple(sorted(_ALLOWED))


def cgroup_quota(root: str = "/") -> int | None:
    """Number of CPUs that the process's cgroups (v1 or v2) allow it, rounded up; None without a quota."""
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mount, names = "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # The quotas of all ancestors count. In a container, the path may be the host's; then only the mount
        # itself exists.
        levels = path.strip("/").split("/")
        quotas += [_read_quota(Path(root, mount, *levels[:n]), names) for n in range(len(levels) + 1)]
    return min((ceil(quota) for quota in quotas if quota), default=None)


def _read_quota(folder: Path, names: list[str]) -> float | None:
    """Number of CPUs that one cgroup allows; its files `names` hold a quota of time and the period for it."""
    try:
        quota, period = (int(word) for name in names for word in (folder / name).read_text().split())
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return None
    return quota / period if quota > 0 and period > 0 else None
