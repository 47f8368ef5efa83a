"""The shelf of a worker: memory for KV on its way, in rows of a block each, that its engine's
process and the workers of the same host can open, if they run as the same user. It is a memfd, so
it goes with the last process that has it open, however that ends, and needs no room in /dev/shm.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence

import msgspec

NAME = "slackline-kv"
SHELF_BYTES = 64 << 20
FEWEST_ROWS, MOST_ROWS = 16, 4096
HEAD_BYTES = mmap.PAGESIZE  # before the rows; it begins with the nonce
NONCE_BYTES = 16


class ShelfAt(msgspec.Struct, frozen=True, tag=True):
    """The place of a shelf on a host, and what it begins with."""

    pid: int
    fd: int
    nonce: bytes


class Shelf:
    """Rows of `block_bytes`, reserved at once. Raises OSError without the memory for them."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes, self.rows = block_bytes, rows_of(block_bytes)
        nonce = secrets.token_bytes(NONCE_BYTES)
        size = HEAD_BYTES + self.rows * block_bytes
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.pwrite(self._fd, nonce, 0)
            self._memory = memoryview(mmap.mmap(self._fd, size))
        except BaseException:
            os.close(self._fd)
            raise
        self.at = ShelfAt(os.getpid(), self._fd, nonce)

    def row(self, number: int) -> memoryview:
        return row_of(self._memory, number, self.block_bytes)

    def close(self) -> None:
        """Nobody opens it any more; who has it open keeps it."""
        os.close(self._fd)


class OpenShelf:
    """The shelf of the worker of this engine's process."""

    def __init__(self, at: ShelfAt, block_bytes: int) -> None:
        """Raises OSError if it cannot be opened."""
        fd = open_shelf(at, os.O_RDWR)
        self._block_bytes = block_bytes
        try:
            self._memory = memoryview(
                mmap.mmap(fd, HEAD_BYTES + rows_of(block_bytes) * block_bytes)
            )
        finally:
            os.close(fd)

    def views(self, rows: Sequence[int]) -> list[memoryview]:
        return [row_of(self._memory, number, self._block_bytes) for number in rows]


def rows_of(block_bytes: int) -> int:
    """The rows of a shelf."""
    return min(MOST_ROWS, max(FEWEST_ROWS, SHELF_BYTES // max(block_bytes, 1)))


def row_of(memory: memoryview, number: int, block_bytes: int) -> memoryview:
    first = HEAD_BYTES + number * block_bytes
    return memory[first : first + block_bytes]


def open_shelf(at: ShelfAt, flags: int = os.O_RDONLY) -> int:
    """A descriptor of this shelf, whose nonce says that it is this one: a process of another host,
    or a later one, may have the same ids. Nothing but a shelf is opened. Raises OSError.
    """
    path = f"/proc/{at.pid}/fd/{at.fd}"
    if not os.readlink(path).startswith(f"/memfd:{NAME} "):
        raise FileNotFoundError(path)
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    if os.pread(fd, NONCE_BYTES, 0) != at.nonce:
        os.close(fd)
        raise FileNotFoundError(path)
    return fd
