"""Executable memory: arenas that are never writable and executable at once.

Code is written through the file descriptor of a memfd whose only mapping is read-execute, so
there is no writable view to forget; it also works under PR_SET_MDWE, which forbids turning
written pages executable. Where memfds are refused, anonymous memory is written, then protected.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

from looptune.errors import ExecutableMemoryError

ARENA_BYTES = 1 << 20
ALIGNMENT = 64


class Arena:
    """One mapping that many kernels share; unmapped with the last of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.descriptor = -1
        try:
            self.descriptor = os.memfd_create("looptune", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
            flags, access = mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_EXEC
            self.memory = mmap.mmap(self.descriptor, size, flags, access)
        except OSError as reason:
            raise ExecutableMemoryError(
                f"the system refuses to map {size} bytes of a memfd as executable ({reason}); "
                "a policy such as SELinux's execmem or a noexec memfd (vm.memfd_noexec) does this"
            ) from reason
        finally:
            if self.descriptor >= 0 and not hasattr(self, "memory"):
                os.close(self.descriptor)
        # mmap exports no address of a read-only mapping to ctypes; a buffer view of it does.
        view = ctypes.py_object(self.memory)
        buffer = Buffer()
        ctypes.pythonapi.PyObject_GetBuffer(view, ctypes.byref(buffer), 0)
        self.address = int(buffer.buf or 0)
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
        # Not at exit: exit handlers and daemon threads may still run kernels then.
        weakref.finalize(self, close, self.memory, self.descriptor).atexit = False

    def add(self, code: bytes) -> int:
        """Write `code` behind what is there; its address."""
        offset = self.used
        if os.pwrite(self.descriptor, code, offset) != len(code):
            raise ExecutableMemoryError(f"could not write {len(code)} bytes of code to the memfd")
        self.used = -(-(offset + len(code)) // ALIGNMENT) * ALIGNMENT
        return self.address + offset


class Buffer(ctypes.Structure):
    """Python's `Py_buffer`, to learn where a mapping lies."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def close(memory: mmap.mmap, descriptor: int) -> None:
    """Unmap an arena that no code lives in any more."""
    memory.close()
    os.close(descriptor)


class Code:
    """Installed machine code; the memory lives as long as this object."""

    __slots__ = ("address", "arena", "size")

    def __init__(self, address: int, size: int, arena: Arena) -> None:
        self.address = address
        self.size = size
        self.arena = arena


_lock = threading.Lock()
_current: Arena | None = None


def install(code: bytes) -> Code:
    """Copy machine code to executable memory, 64-byte aligned.

    Raises `ExecutableMemoryError` where the system allows none.
    """
    global _current
    with _lock:
        if _current is None or _current.used + len(code) > _current.size:
            pages = -(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE
            _current = Arena(max(ARENA_BYTES, pages))
        arena = _current
        return Code(arena.add(code), len(code), arena)


def forget_arena() -> None:
    """Start afresh in a forked child: it must not write into pages its parent executes, and a
    lock that another thread held at the fork would never be released."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=forget_arena)
