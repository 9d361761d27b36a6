"""All processes below one, as /proc has them: what a host loses when it is lost."""

from pathlib import Path


def descendants(root: int) -> dict[int, int]:
    """The parent of each process below `root`, by process id."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended since it was listed
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, int] = {}
    level = {root}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level and pid not in found}
        found |= {pid: parents[pid] for pid in level}
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty once it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
