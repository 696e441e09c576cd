"""Shared or exclusive: by the mount, or as it is set; what an exclusive owner means for everybody else."""

import os
from pathlib import Path

import pytest

from cauce.errors import FencedError
from cauce.journal import Journal
from cauce.journal.locking import choose_locking, filesystem_of
from tests.journal.records import admit, make_ready

MOUNTS = """\
22 1 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:40 / /data rw,relatime shared:5 - nfs4 host:/export rw,vers=4.2
31 27 0:41 / /data/scratch rw,relatime - xfs /dev/vdb rw
32 27 0:42 / /data\\040two rw,relatime - fuse.sshfs me@host:/ rw
33 27 0:43 / /disk rw,relatime - fuseblk /dev/vdc rw
34 27 0:44 / /twice rw,relatime - ext4 /dev/vdd rw
35 27 0:45 / /twice rw,relatime - lustre host:/ rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "locking"),
    [
        ("/home/me/runs", "ext4", "shared"),
        ("/data", "nfs4", "exclusive"),
        ("/data/runs/a", "nfs4", "exclusive"),
        ("/data/scratch/runs", "xfs", "shared"),
        ("/database", "ext4", "shared"),
        ("/data two/runs", "fuse.sshfs", "exclusive"),
        ("/disk/runs", "fuseblk", "shared"),
        ("/twice/runs", "lustre", "exclusive"),
    ],
)
def test_auto_goes_by_the_innermost_mount(path: str, kind: str, locking: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind
    assert choose_locking("auto", Path(path), mountinfo=MOUNTS) == locking
    assert choose_locking("exclusive", Path(path), mountinfo=MOUNTS) == "exclusive"
    assert choose_locking("shared", Path(path), mountinfo=MOUNTS) == "shared"


def test_an_exclusive_owner_is_alone_until_it_closes(tmp_path: Path) -> None:
    with Journal.create(tmp_path, meta={"group_size": "2"}, locking="exclusive") as journal:
        make_ready(journal, admit(journal, 1)[0])
        assert not (tmp_path / "journal.db-shm").exists()
        with pytest.raises(FencedError, match=rf"is locked by host .*, pid {os.getpid()}\..*metrics\.jsonl"):
            Journal.read_only(tmp_path)
        said: list[str] = []
        with pytest.raises(FencedError, match="is locked by"):
            Journal.wait_for_exclusive_owner(tmp_path, say=said.append, limit_s=0.5)
        assert len(said) == 1
        with pytest.raises(FencedError, match="is locked by"):
            Journal.open(tmp_path, takeover=True, locking="exclusive")
        admit(journal, 1)  # the refused takeover has left its lock and its epoch alone
    Journal.wait_for_exclusive_owner(tmp_path, say=said.append, limit_s=0.5)
    assert len(said) == 1
    with Journal.open(tmp_path, locking="shared") as journal, Journal.read_only(tmp_path) as reader:
        assert reader.counts() == journal.counts() == {**dict.fromkeys(journal.counts(), 0), "ready": 1, "pending": 1}
        assert journal.owner.epoch == 2
