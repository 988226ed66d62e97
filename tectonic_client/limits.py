"""Every limit of the client, with its unit in the name and its reason beside the number."""

from __future__ import annotations

from typing import Final

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB

# --- devices and chunks -----------------------------------------------------------------------

ALIGNMENT_BYTES: Final = 4 * KiB
"""O_DIRECT address, offset and length granularity: the page size, a multiple of every sector."""

CHECKSUM_UNIT_BYTES: Final = 64 * KiB
"""One CRC32C covers this much: small enough for random reads, large enough for 17 GB/s."""

CHUNK_HEADER_BYTES: Final = 4 * KiB
"""A chunk's header: one aligned page, so that the payload stays aligned."""

MAX_CHUNK_BYTES: Final = 32 * MiB
"""Largest payload of a chunk: its 512 CRCs fit in the header with room to spare."""

MIN_CHUNK_BYTES: Final = 64 * KiB
"""Smallest configurable chunk: one checksum unit."""

DEFAULT_CHUNK_BYTES: Final = 8 * MiB
"""Tectonic's chunk size; device speed is reached from 4 MiB on."""

DEFAULT_BLOCK_BYTES: Final = 64 * MiB
"""Eight chunks. Tectonic uses about 72 MiB."""

MAX_CHUNKS_PER_BLOCK: Final = 1024
"""Bounds a block record; far above any sensible block size / chunk size."""

LIST_WINDOW_CHUNKS: Final = 131_072
"""Chunks of a flash store sorted at once by a listing: about 16 MiB of memory."""

DELETE_BATCH_CHUNKS: Final = 256
"""Chunks deleted by one call of a store, which has STORE_DEADLINE_S for it: at 10 ms each on a
slow network it takes 3 s."""

# --- memory -----------------------------------------------------------------------------------

DEFAULT_MEMORY_LIMIT_BYTES: Final = 256 * MiB
"""Memory of one client (mount, rank) beyond the interpreter and its libraries."""

MIN_MEMORY_LIMIT_BYTES: Final = 64 * MiB
"""Enough for two chunks being written and two being read at the default chunk size."""

MIN_POOL_CHUNKS: Final = 4
"""Chunks that a buffer pool must hold: one filling and one on its way for a writer, and what a
reader needs to decompress one."""

POOL_SHARE: Final = 0.5
"""Part of the memory limit that the buffer pool may use; the rest covers request buffers,
metadata caches, thread stacks and the allocator's slack."""

MIN_BUFFER_BYTES: Final = 64 * KiB
"""Smallest piece of the buffer pool: one checksum unit."""

LARGE_WRITE_BYTES: Final = 128 * KiB
"""A first write of at least this much announces a large file: it gets a whole chunk buffer."""

SEQUENTIAL_BYTES: Final = 256 * KiB
"""A reader that went straight on for this long is served by whole chunks and read-ahead."""

SEQUENTIAL_SLACK_BYTES: Final = 2 * MiB
"""The kernel's read-ahead sends requests out of order within about this distance."""

READ_AHEAD_CHUNKS: Final = 4
"""Chunks read ahead of a sequential reader: as many as a store reads at once."""

READER_IDLE_S: Final = 1.0
"""Who has not read in order for so long gets no share of the read-ahead."""

CHUNK_CACHE_SHARE: Final = 0.75
"""Part of the buffer pool that read chunks may occupy; writers can always take it back."""

MAX_CACHED_BLOCK_RECORDS: Final = 8192
"""Block records kept per client, about 1 KiB each: half a TiB of file data at default size."""

MAX_CACHED_CHUNK_HEADERS: Final = 8192
"""Chunk headers kept per client, about 0.8 KiB each: checksums of 64 GiB at the default size."""

# --- concurrency ------------------------------------------------------------------------------

STORE_WRITE_THREADS: Final = 4
"""Concurrent chunk puts of a client to one store: fdatasync needs four in flight to reach the
device limit."""

STORE_READ_THREADS: Final = 4
"""Concurrent chunk gets of a client from one store."""

CHECKPOINT_TRANSFERS: Final = STORE_WRITE_THREADS + 1
"""Chunks of a checkpoint under way at once: one waits while the threads are busy."""

INLINE_TURN_S: Final = 0.002
"""How long calls of an embedded engine may keep the event loop in a row: some twenty of them."""

METADATA_READ_THREADS: Final = 8
"""Concurrent read transactions of a client on engines whose reads may wait (PostgreSQL)."""

METADATA_WRITE_THREADS: Final = 8
"""Concurrent write transactions of a client on engines without a queue of their own."""

MAX_TRANSACTIONS_WAITING: Final = 4096
"""Queue of transactions waiting for the embedded engine's writer."""

MAX_TRANSACTIONS_PER_COMMIT: Final = 256
"""Transactions that share one commit of the embedded engine: bounds how long it holds the lock
that other processes wait for."""

# --- metadata ---------------------------------------------------------------------------------

SQLITE_READ_CONNECTIONS: Final = 8
"""Concurrent reads of the embedded engine in one process; each has a page cache of its own."""

SQLITE_READ_CACHE_BYTES: Final = 2 * MiB
"""Page cache of a read connection; the kernel's page cache lies behind it."""

SQLITE_WRITE_CACHE_BYTES: Final = 8 * MiB
"""Page cache of the writer: holds the pages that one commit changes."""

SQLITE_WAL_PAGES: Final = 8000
"""Pages of 4 KiB in the write-ahead log at which the writer moves them into the database. The more,
the more often a page was changed in between that is written once. Recovery after a crash reads the
log once (32 MiB: some 20 ms)."""

SQLITE_WAL_FILE_BYTES: Final = 64 * MiB
"""A write-ahead log that grew beyond this is cut back once its pages are in the database."""

COMPACT_MIN_EXTENTS: Final = 16
"""A stretch of one chunk's length at most that consists of so many extents is copied into one."""

COMPACT_QUIET_S: Final = 5.0
"""How long a file is left alone before it is compacted: it may be written on."""

COMPACT_STEP_BYTES: Final = 1 * MiB
"""Bytes that compaction reads at once, outside of the buffer pool."""

MAX_COMPACTION_CANDIDATES: Final = 1024
"""Files that wait for being compacted; more are left as they are until they are written again."""

MAX_RUN_BYTES: Final = 1 * MiB
"""Most that is fetched at once for parts of a chunk that lie near each other: their memory."""

MAX_XATTR_NAME_BYTES: Final = 255
"""Name of an extended attribute, as Linux limits it (XATTR_NAME_MAX)."""

MAX_XATTR_BYTES: Final = 64 * KiB
"""Value of an extended attribute, as Linux limits it (XATTR_SIZE_MAX)."""

MAX_XATTR_LIST_BYTES: Final = 64 * KiB
"""All names of an inode's extended attributes, as listxattr(2) returns them (XATTR_LIST_MAX)."""

MAX_NAME_BYTES: Final = 255
"""NAME_MAX of Linux."""

MAX_SYMLINK_BYTES: Final = 4095
"""PATH_MAX of Linux without the terminating NUL."""

MAX_SYMLINKS_FOLLOWED: Final = 40
"""As Linux does (path_resolution(7))."""

MAX_PATH_DEPTH: Final = 4096
"""Bounds walks to the root."""

MAX_FILE_BYTES: Final = 2**63 - 1
"""Largest off_t."""

MAX_LINKS: Final = 65_000
"""As ext4."""

MAX_VALUE_BYTES: Final = 1 * MiB
"""Largest value of a KV pair; engines may be remote."""

MAX_KEY_BYTES: Final = 1024
"""Largest key: longer than any key that the layers build."""

IDS_PER_LEASE: Final = 4096
"""Inode and block ids handed to a session at once: one metadata transaction per this many."""

MAX_SCHEMA_NAME_BYTES: Final = 63
"""NAMEDATALEN of PostgreSQL without the NUL; it would cut longer names silently."""

SCAN_PAGE_ROWS: Final = 1000
"""Rows per page of a long scan, so that no transaction or reply grows without bound."""

EXTENTS_PAGE_ROWS: Final = 1000
"""Extents of an opened file that are read at once: about 3 ms of the event loop's time."""

LOAD_ATTEMPTS: Final = 3
"""Tries to read a file of many extents page by page while others change it."""

DECODED_INODES: Final = 1024
"""Inode records that are kept decoded, by their bytes: half a megabyte."""

SPARSE_FACTOR: Final = 32
"""A file with so many times more extents than are written between the first and the last of those
is looked at only where they lie: a look costs about as much as reading thirty rows."""

RECLAIM_BATCH_ROWS: Final = 256
"""Extents of a deleted file, or entries of a deleted tree, removed per transaction."""

BRIEF_BATCH_ROWS: Final = 16
"""The same for the first transaction, which the event loop may run itself: about 0.2 ms of work.
Most files that are deleted need no second one."""

QUOTA_LANES: Final = 16
"""Rows over which what is used of a quota is spread, so that clients do not conflict."""

QUOTA_REFRESH_S: Final = 1.0
"""How long a client trusts what it knows of a quota's use while that is far from the limit."""

QUOTA_NEAR_BYTES: Final = 64 * MiB
"""With less room than this left in a quota a client looks before each write."""

QUOTA_BATCH_ENTRIES: Final = 256
"""Entries of a directory that join or leave a quota per transaction."""

CLONE_BATCH_ENTRIES: Final = 64
"""Entries of a directory that are cloned per transaction, with their extents."""

CLONE_ATTEMPTS: Final = 5
"""Tries to clone a file of many extents that somebody changes meanwhile."""

PARENT_TIME_LANES: Final = 16
"""Rows over which the times of one directory are spread, so that creators do not conflict."""

CHANGE_STRIPES: Final = 16
"""Stripes of the change feed: as many writers of different directories rarely meet, and a follower
looks at all of them in one round trip. Part of the format."""

CHANGES_KEPT_S: Final = 600
"""How long events of the change feed are kept: far above any pause of a client that comes back."""

# --- checkpoints ------------------------------------------------------------------------------

MAX_CHECKPOINT_HEADER_BYTES: Final = 100_000_000
"""Largest safetensors header that the safetensors library accepts: it must read all we write."""

MAX_CHECKPOINT_INDEX_BYTES: Final = 64 * MiB
"""Largest index of a step: MAX_WORLD_SIZE ranks with room for user metadata."""

MAX_STATE_DEPTH: Final = 64
"""Nesting of a state: far above any real one, far below Python's recursion limit."""

MAX_TENSOR_DIMENSIONS: Final = 64
"""As NumPy; torch's limit is the same."""

STRIDED_COPY_BYTES: Final = 1 * MiB
"""Piece in which a non-contiguous device tensor is copied: bounds the temporary that it takes."""

MAX_WORLD_SIZE: Final = 65_536
"""Ranks of a save: Llama 3's 24,576 with room; a list of all of them fits in a record."""

MAX_RUN_ID_BYTES: Final = 200
"""A run's id is part of a key."""

MAX_VERDICT_BYTES: Final = 4 * KiB
"""Message of a failed save: a few names of hosts, or a rank's own error."""

CHECKPOINT_POLL_MIN_S: Final = 0.002
"""First pause of a rank that waits for others; it doubles up to a bound that grows with ranks."""

CHECKPOINT_POLL_MAX_S: Final = 0.005
"""Longest pause of a waiting rank, plus CHECKPOINT_POLL_PER_RANK_S for each rank."""

CHECKPOINT_POLL_PER_RANK_S: Final = 50e-6
"""Keeps the polls of all ranks together below 20,000 a second, however many there are."""

DEFAULT_CHECKPOINT_TIMEOUT_S: Final = 600.0
"""How long a collective save waits for slow ranks unless told otherwise."""

CHECKPOINT_GIVE_UP_S: Final = 10.0
"""A rank that fails tries for this long to tell the others and to remove its chunks."""

CHECKPOINT_READ_GAP_BYTES: Final = 256 * KiB
"""Unwanted bytes between two wanted ranges that are read along rather than skipped."""

CHECKPOINT_OUTCOME_GRACE_S: Final = 10.0
"""How long after its deadline a save still asks what became of a transaction without an answer."""

LIVENESS_INTERVAL_S: Final = 0.5
"""How often a waiting coordinator looks whether the missing ranks are alive."""

ELSEWHERE_AFTER_S: Final = 1.0
"""A rank that found no attempt for this long looks whether the others save another step."""

ATTEMPT_KEPT_S: Final = 600.0
"""How long the outcome of an attempt stays readable: ranks poll many times a second."""

ATTEMPTS_SWEPT: Final = 16
"""Old attempts removed by each new one: more than one, so that they never pile up."""

# --- time -------------------------------------------------------------------------------------

THREAD_SWITCH_S: Final = 0.001
"""How long a thread of a mount may hold the GIL while others want it."""

STORE_DEADLINE_S: Final = 45.0
"""A store operation without an answer by then is given up: longer than Linux waits for a disk's
command (30 s) before it resets the disk, shorter than SHUTDOWN_DEADLINE_S."""

STORE_PROBE_INTERVAL_S: Final = 5.0
"""How often a call is let through to a store that does not answer: how late its recovery shows."""

METADATA_DEADLINE_S: Final = 30.0
"""A metadata transaction that got no answer by then fails."""

METADATA_LAST_TRY_SHARE: Final = 0.25
"""An attempt that begins near the deadline still gets this part of it: one that is cut short while
it commits has an unknown outcome."""

IDLE_CONNECTION_S: Final = 60.0
"""A database connection that nobody needed for this long is closed."""

METADATA_RETRY_MIN_S: Final = 0.002
"""First pause, at most, before a transaction that lost is tried again: a few round trips."""

METADATA_RETRY_MAX_S: Final = 0.5
"""Longest pause: how late a client notices that the database is back."""

DEAF_PAUSE_S: Final = 0.02
"""How often the metadata is looked at where the engine can wake nobody."""

HEARTBEAT_INTERVAL_S: Final = 5.0
"""How often a session shows that it lives."""

SESSION_EXPIRY_S: Final = 60.0
"""A session without heartbeat for this long is dead: above any plausible pause of a trainer."""

COHERENCE_DEADLINE_S: Final = 5.0
"""A change below a push directory waits this long for a client that does not answer. Longer than
PUSH_TIMEOUT_S: what such a client's kernel trusts has run out by then."""

PUSH_TIMEOUT_S: Final = 4.0
"""How long a kernel may trust attributes and names below push directories, at most: it is told of
changes, so this only matters where its mount cannot tell it."""

FOLLOW_INTERVAL_S: Final = 0.5
"""How often a follower looks for changes that nobody called about; far below the deadline above."""

FOLLOW_RETRY_S: Final = 1.0
"""Pause before a client tries again to follow; how long an open waits for it at most."""

ACKNOWLEDGEMENT_LOOK_S: Final = 0.1
"""How often a writer that waits looks by itself: calls may get lost, and processes die silently."""

DIRTY_EXPIRY_S: Final = 5.0
"""Written data is flushed after about this long, asked for or not."""

MEMORY_RETRY_S: Final = 0.02
"""How often idle buffers are looked for while somebody waits for memory: a few chunk writes."""

SHUTDOWN_DEADLINE_S: Final = 120.0
"""Closing a client flushes what is dirty; whatever hangs longer than this is given up."""

SLOW_STEP_S: Final = 1.0
"""A step of closing a client that takes longer is told of in the log."""

CLEANUP_INTERVAL_S: Final = 60.0
"""How often some client looks for dead sessions and what they left."""

CLEANUP_AT_START_S: Final = 1.0
"""A new client does so unless another began within this: ranks that start together need not."""

ORPHAN_GRACE_S: Final = 30.0
"""While other sessions live, a removed file is kept for this long, for those that have it open to
take it over: they look every OPEN_FILES_LOOK_S."""

OPEN_FILES_LOOK_S: Final = 10.0
"""How often a client looks which of its open files others have removed: no open needs to tell."""

OPEN_FILES_PAGE: Final = 256
"""Open files looked at in one read."""

RELATIME_NS: Final = 24 * 3600 * 10**9
"""An access time that is older than this is renewed by a read, as Linux does it (relatime)."""

ACCESS_TIMES_INTERVAL_S: Final = 5.0
"""How often access times are written, at least; twice that at most. A crash loses them."""

ACCESS_TIMES_PAGE: Final = 256
"""Access times written in one transaction."""

MAX_NOTED_ACCESS_TIMES: Final = 10_000
"""Access times that wait in memory (about 100 bytes each); reads of more files change none."""

DEAD_BLOCK_GRACE_S: Final = 30.0
"""While other sessions live, chunks of a deleted block stay readable for this long."""

GARBAGE_LINGER_S: Final = 0.1
"""Between a removal and the deletion of what it left: `rm -r` costs ten rounds per second, not one
per file, and nobody notices that the space comes back so much later."""

# --- the FUSE door ----------------------------------------------------------------------------

FUSE_REQUEST_BYTES: Final = 1 * MiB
"""Largest read or write that the kernel sends in one request (256 pages)."""

FUSE_TASK_BYTES: Final = 2 * FUSE_REQUEST_BYTES
"""Memory of one worker task: libfuse's receive buffer and the bytes object made from it."""

FUSE_TASK_SHARE: Final = 0.125
"""Part of the memory limit that worker tasks may use: 16 tasks at the default limit."""

MIN_FUSE_TASKS: Final = 8
"""Fewer, and a few writers that wait for memory would hold up every look-up."""

MAX_FUSE_TASKS: Final = 64
"""More requests than this in flight gain nothing from one event loop."""

FUSE_READ_AHEAD_BYTES: Final = 1 * MiB
"""What the kernel reads ahead through its page cache: requests of full size."""

READDIR_FIRST_PAGE: Final = 32
"""Entries fetched first per listing request: those of a 4 KiB reply; each further page doubles."""

FORGETTING_DEADLINE_S: Final = 2.0
"""How long a mount that ends waits for the kernel to drop what it was told to."""

MAX_REMEMBERED_OPENS: Final = 16_384
"""Files of which a mount remembers the last opened version, about 250 bytes each."""

MOUNT_READY_S: Final = 60.0
"""A new mount that has not answered a stat by then is given up."""

DAEMON_EXIT_S: Final = 3.0
"""How long umount waits for a daemon that has said how it ended and is not gone yet."""

UMOUNT_WAIT_S: Final = 240.0
"""How long umount waits for the daemon: longer than SHUTDOWN_DEADLINE_S for the
flush and as much again for the requests in flight."""

# --- looking into a client --------------------------------------------------------------------

RECORDED_OPERATIONS: Final = 4096
"""Ended operations that the flight recorder keeps, about 500 bytes each: seconds of a busy mount,
minutes of a quiet one."""

OLDEST_SHOWN: Final = 8
"""Operations under way that `stats` shows: those that hold others up are the oldest."""

RECORDER_DUMP_INTERVAL_S: Final = 60.0
"""After an error the flight recorder is written out at most this often."""

MAX_RECORDER_DUMPS: Final = 8
"""Files that the flight recorder of one daemon writes, about 1.5 MB each; then it reuses them."""

MAX_CONTROL_REQUEST_BYTES: Final = 4 * KiB
"""Longest line that a daemon reads from its control socket: commands are a few words."""

MAX_CONTROL_REPLY_BYTES: Final = 4 * MiB
"""Longest line that is read from a daemon: the stats of a thousand stores."""

MAX_CONTROL_CONNECTIONS: Final = 8
"""Connections to the control socket served at once; others wait in the kernel's queue."""

CONTROL_TIMEOUT_S: Final = 5.0
"""A connection to the control socket that is not served by then is closed."""

MAX_SCRAPES: Final = 4
"""Requests for metrics answered at once."""

MAX_SCRAPE_REQUEST_BYTES: Final = 8 * KiB
"""Longest head of such a request."""

SCRAPE_TIMEOUT_S: Final = 10.0
"""Prometheus's own limit, unless told otherwise."""
