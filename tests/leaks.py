"""Everything that must hold of a volume at rest: what is there is whole, and nothing is left over.

`assert_no_leaks(volume)` reads all metadata and lists all stores. `clean(volume)` does what the
next client would do in time: it cleans up after the dead and deletes dead blocks. At rest means
that no client writes and no file that was removed is still open.
"""

from __future__ import annotations

import stat
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey
from tectonic_client.encoding.chunk import padded
from tectonic_client.limits import CHUNK_HEADER_BYTES
from tectonic_client.metadata import keys
from tectonic_client.metadata.sessions import process_started_ticks, this_host
from tectonic_client.records import (
    BlockRecord,
    CounterRecord,
    DirentRecord,
    ExtentRecord,
    InodeFlag,
    InodeRecord,
    OwnerRecord,
    ParentTimesRecord,
    QuotaRecord,
    QuotaUsageRecord,
    SessionRecord,
    SubdirectoriesRecord,
    SymlinkRecord,
    XattrRecord,
)
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import Volume

_GROUP_BYTES = len(keys.group(keys.FILE, 0))


async def clean(volume: Volume) -> None:
    """Remove what crashes, faults and deletions left, at once."""
    await volume.cleaner.clean_dead_sessions()
    await volume.tasks.reclaim_orphans()
    await volume.cleaner.reclaim_abandoned_orphans(wait_for_others=False)
    await volume.cleaner.reclaim_tails()
    await volume.cleaner.delete_dead_blocks(wait_for_readers=False)


async def assert_no_leaks(volume: Volume) -> None:
    """Raise AssertionError with everything that is wrong with the volume."""
    problems = await find_leaks(volume)
    assert not problems, "\n".join(problems)


async def find_leaks(volume: Volume) -> list[str]:
    """Describe everything that is wrong with the volume."""
    rows = await volume.kv.read(lambda tx: tx.scan(b"", b"\xff"))
    chunks = {
        store_id: await volume.stores.run(store_id, lambda store: list(store.list(0, 2**63)))
        for store_id in volume.stores.ids()
    }
    audit = _Audit()
    for key, value in rows:
        audit.read(key, value)
    audit.check_names()
    audit.check_files()
    audit.check_blocks()
    audit.check_chunks(chunks)
    audit.check_sessions()
    audit.check_quotas()
    return audit.problems


@dataclass(slots=True)
class _Audit:
    """All records by kind, then what is wrong with them."""

    problems: list[str] = field(default_factory=list)
    inodes: dict[int, InodeRecord] = field(default_factory=dict)
    entries: dict[tuple[int, bytes], DirentRecord] = field(default_factory=dict)
    extents: dict[int, list[tuple[int, ExtentRecord]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    links: dict[int, bytes] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    subdirectories: Counter[int] = field(default_factory=Counter)
    blocks: dict[int, BlockRecord] = field(default_factory=dict)
    owners: dict[tuple[int, int], int] = field(default_factory=dict)
    sessions: dict[int, SessionRecord] = field(default_factory=dict)
    leases: dict[int, int] = field(default_factory=dict)
    followers: set[int] = field(default_factory=set)
    attributed: set[int] = field(default_factory=set)
    quotas: dict[int, QuotaRecord] = field(default_factory=dict)
    used: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    members: dict[int, int] = field(default_factory=dict)

    def read(self, key: bytes, value: bytes) -> None:
        """Sort a record in; those that may not be there at rest are problems."""
        layer, rest = key[:1], key[_GROUP_BYTES:]
        if layer in (keys.GLOBAL, keys.CHECKPOINT, keys.CHANGE):  # old events are trimmed by age
            return
        number = keys.parse_group(key)
        if layer == keys.NAME:
            self.entries[number, keys.parse_entry(key)[1]] = DirentRecord.decode(value)
        elif layer == keys.FILE:
            self._read_file(number, key, value)
        elif layer == keys.BLOCK and rest == keys.BLOCK_RECORD:
            self.blocks[number] = BlockRecord.decode(value)
        elif layer == keys.BLOCK:
            self.owners[number, int.from_bytes(rest[1:])] = OwnerRecord.decode(value).live_bytes
        elif layer == keys.SESSION:
            self.sessions[number] = SessionRecord.decode(value)
        elif layer == keys.LEASE:
            self.leases[number] = CounterRecord.decode(value).value
        elif layer == keys.FOLLOWER:
            self.followers.add(number)
        elif layer == keys.QUOTA and rest == keys.QUOTA_LIMITS:
            self.quotas[number] = QuotaRecord.decode(value)
        elif layer == keys.QUOTA:
            usage = QuotaUsageRecord.decode(value)
            self.used[number][0] += usage.used_bytes
            self.used[number][1] += usage.used_inodes
        elif layer == keys.DEAD_BLOCK:
            self.problems.append(f"block {number:016x} is dead and was not deleted")
        elif layer == keys.TAIL:
            self.problems.append(f"inode {number} has a tail that was not reclaimed")
        elif layer == keys.ORPHAN:
            self.problems.append(f"inode {number} is an orphan")
        else:
            self.problems.append(f"unknown key {key!r}")

    def _read_file(self, inode: int, key: bytes, value: bytes) -> None:
        part = key[_GROUP_BYTES : _GROUP_BYTES + 1]
        if part == keys.ATTRIBUTES:
            self.inodes[inode] = InodeRecord.decode(value)
        elif part == keys.PARENT_TIMES:
            ParentTimesRecord.decode(value)
            self.changed.add(inode)
        elif part == keys.SUBDIRECTORIES:
            self.subdirectories[inode] += SubdirectoriesRecord.decode(value).count
        elif part == keys.SYMLINK:
            self.links[inode] = SymlinkRecord.decode(value).target
        elif part == keys.EXTENT:
            record = ExtentRecord.decode(value)
            self.extents[inode].append((keys.parse_extent(key), record))
        elif part == keys.XATTR:
            XattrRecord.decode(value)
            self.attributed.add(inode)
        elif part == keys.QUOTA_MEMBER:
            self.members[inode] = CounterRecord.decode(value).value
        else:
            self.problems.append(f"unknown key {key!r}")

    # --- names --------------------------------------------------------------------------------

    def check_names(self) -> None:
        """The directories are a tree, link counts are right, and no record lacks its inode."""
        names: Counter[int] = Counter()
        children: Counter[int] = Counter()
        for (directory, name), entry in self.entries.items():
            self._check_entry(directory, name, entry)
            names[entry.inode] += 1
            record = self.inodes.get(entry.inode)
            children[directory] += record is not None and record.is_directory
        for inode, record in self.inodes.items():
            expected = 2 if record.is_directory else names[inode]
            if record.nlink != expected or not record.nlink:
                self.problems.append(f"inode {inode}: nlink {record.nlink}, {expected} expected")
            if record.is_directory and names[inode] != (inode != ROOT_INODE):
                self.problems.append(f"directory {inode} has {names[inode]} names")
            if record.is_directory and not self._reaches_root(inode):
                self.problems.append(f"directory {inode} is not below the root")
            if self.subdirectories[inode] != children[inode]:
                self.problems.append(
                    f"directory {inode} counts {self.subdirectories[inode]} subdirectories"
                    f" and has {children[inode]}"
                )
        for inode, record in self.inodes.items():
            if bool(record.flags & InodeFlag.XATTRS) != (inode in self.attributed):
                self.problems.append(f"inode {inode}: its flag about extended attributes is wrong")
            if record.flags & InodeFlag.TAIL:
                self.problems.append(f"inode {inode} says that it has a tail")
        records = self.changed | self.attributed | set(self.links) | set(self.extents)
        for inode in records | set(self.subdirectories):
            if inode not in self.inodes:
                self.problems.append(f"inode {inode} is gone and has records")

    def _check_entry(self, directory: int, name: bytes, entry: DirentRecord) -> None:
        where = f"entry {name!r} of directory {directory}"
        parent, record = self.inodes.get(directory), self.inodes.get(entry.inode)
        if parent is None or not parent.is_directory:
            self.problems.append(f"{where}: there is no such directory")
        if record is None:
            self.problems.append(f"{where}: inode {entry.inode} does not exist")
            return
        if record.file_type is not entry.file_type:
            self.problems.append(f"{where} says {entry.file_type!r}, it is {record.file_type!r}")
        if record.is_directory and record.parent != directory:
            self.problems.append(f"{where}: the directory's parent is {record.parent}")

    def _reaches_root(self, inode: int) -> bool:
        seen = set()
        while inode in self.inodes and inode not in seen:
            if inode == ROOT_INODE:
                return True
            seen.add(inode)
            inode = self.inodes[inode].parent
        return False

    # --- files and blocks ---------------------------------------------------------------------

    def check_files(self) -> None:
        """Extents lie in regular files, below their size, one after the other."""
        for inode, extents in self.extents.items():
            record = self.inodes.get(inode)
            if record is None:
                continue
            end = 0
            for offset, extent in extents:
                if offset < end or not extent.length:
                    self.problems.append(f"inode {inode}: extents overlap at {offset}")
                end = offset + extent.length
            if not stat.S_ISREG(record.mode) or end > record.size:
                self.problems.append(f"inode {inode}: extents to {end}, size is {record.size}")
        for inode, record in self.inodes.items():
            target = self.links.get(inode)
            if stat.S_ISLNK(record.mode) != (target is not None):
                self.problems.append(f"inode {inode}: symbolic link with target {target!r}")
            elif target is not None and len(target) != record.size:
                self.problems.append(f"inode {inode}: size {record.size} of target {target!r}")

    def check_blocks(self) -> None:
        """Owner records add up exactly to the extents; every extent lies in its block."""
        used: Counter[tuple[int, int]] = Counter()
        for inode, extents in self.extents.items():
            for offset, extent in extents:
                block = self.blocks.get(extent.block_id)
                if block is None or extent.block_offset + extent.length > block.length:
                    self.problems.append(
                        f"inode {inode}: the extent at {offset} is not in block"
                        f" {extent.block_id:016x}"
                    )
                used[extent.block_id, inode] += extent.length
        for (block_id, inode), live in (used - Counter(self.owners)).items():
            self.problems.append(f"block {block_id:016x}: inode {inode} owns {live} too few")
        for (block_id, inode), live in (Counter(self.owners) - used).items():
            self.problems.append(f"block {block_id:016x}: inode {inode} owns {live} too many")
        for (block_id, inode), live in self.owners.items():
            if block_id not in self.blocks or not live:
                self.problems.append(f"block {block_id:016x}: inode {inode} owns {live} of nothing")
        for block_id in self.blocks.keys() - {block_id for block_id, _ in self.owners}:
            self.problems.append(f"block {block_id:016x} has no owner")

    def check_chunks(self, stores: dict[int, list[ChunkInfo]]) -> None:
        """Every block has its chunks, whole, and every chunk its block."""
        expected: dict[tuple[int, ChunkKey], int] = {}
        for block_id, record in self.blocks.items():
            for index, place in enumerate(record.places):
                size = CHUNK_HEADER_BYTES + padded(place.stored_bytes)
                expected[place.store_id, ChunkKey(block_id, index)] = size
        found = {
            (store_id, info.key): info.size_bytes
            for store_id, infos in stores.items()
            for info in infos
        }
        for where in expected.keys() | found.keys():
            if expected.get(where) != found.get(where):
                store_id, key = where
                self.problems.append(
                    f"store {store_id}, chunk {key}: {found.get(where)} bytes are there,"
                    f" {expected.get(where)} are named"
                )

    # --- quotas -------------------------------------------------------------------------------

    def check_quotas(self) -> None:
        """What is used of each quota is what its members count, and they are what lies below."""
        counted: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for inode, quota in self.members.items():
            record = self.inodes.get(inode)
            if record is None or not record.flags & InodeFlag.QUOTA:
                self.problems.append(
                    f"inode {inode} is a member of quota {quota} without saying so"
                )
            elif quota in self.quotas:
                counted[quota][0] += record.size if stat.S_ISREG(record.mode) else 0
                counted[quota][1] += 1
        for quota in self.quotas.keys() | self.used.keys():
            if quota not in self.quotas or self.used[quota] != counted[quota]:
                self.problems.append(
                    f"quota {quota} says {self.used[quota]} are used, {counted[quota]} are"
                )
        for (directory, name), entry in self.entries.items():
            above, own = self.members.get(directory), self.members.get(entry.inode)
            if above in self.quotas and own != above:
                self.problems.append(f"{name!r} in directory {directory} is in quota {own}")

    # --- sessions -----------------------------------------------------------------------------

    def check_sessions(self) -> None:
        """Sessions of this host belong to a process, leases to a session."""
        for number, record in self.sessions.items():
            gone = process_started_ticks(record.pid) != record.pid_started_ticks
            if record.host == this_host().identity and gone:
                self.problems.append(f"session {number} belongs to no process")
        for number in self.followers - self.sessions.keys():
            self.problems.append(f"session {number} ended and follows changes")
        for lease, holder in self.leases.items():
            if holder not in self.sessions:
                self.problems.append(f"lease {lease} belongs to session {holder}, which ended")
