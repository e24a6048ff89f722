"""The call contract: what a kernel accepts, checked before machine code sees a pointer.

Two paths lead to the code. The C extension checks and calls in a fraction of a microsecond and
hands everything unusual back; `checked_pointers` checks in Python, with the typed errors, and the
call goes through the extension or through ctypes.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from looptune.dtypes import ITEM_BYTES, numpy_dtype
from looptune.errors import ArgumentError, ArgumentTypeError
from looptune.ir import Plan, Tensor
from looptune.runtime.memory import Code, install

try:
    extension: Any = importlib.import_module("looptune.runtime._native")
except ImportError:  # built without a compiler
    extension = None

if TYPE_CHECKING:
    from looptune.runtime.kernel import Kernel

ALIGNMENT = 64
# No argument types: every argument is a ctypes object already, and converting costs as much as
# the call.
FUNCTION = ctypes.CFUNCTYPE(None)
NO_FLAGS = np.empty(0).flags
# Names of element types in the buffer protocol, which has none for bfloat16.
BUFFER_FORMAT = {
    "float32": "f", "float64": "d", "float16": "e", "int32": "i", "int8": "b", "bfloat16": "Z",
    "int16x2": "i",
}  # fmt: skip


def call_path() -> str:
    """How kernels are called: "native" through the C extension, or "ctypes"."""
    return "ctypes" if extension is None else "native"


@dataclass(frozen=True)
class InstalledStage:
    """One installed Program: its code, the plan's tensors it takes, its parallel trips, and the
    bytes of scratch that each thread wants for itself."""

    code: Code
    tensors: tuple[int, ...]
    trips: int
    private_bytes: int = 0


@dataclass(frozen=True)
class Arguments:
    """What a kernel's code takes, as a plan says it: `flops` and `spec` are only for the call."""

    output: Tensor
    inputs: tuple[Tensor, ...]
    temporaries: tuple[Tensor, ...]
    flops: int
    spec: str

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The order of a kernel's pointers."""
        return (self.output, *self.inputs, *self.temporaries)


@dataclass(frozen=True)
class Layout:
    """Where temporaries live in the leased scratch: an offset a tensor, -1 for arguments, and last
    that of the scratch itself."""

    offsets: tuple[int, ...]
    scratch_bytes: int


def layout_of(plan: Plan | Arguments, stage_scratch: int) -> Layout:
    """Scratch of the stages first, then each temporary, all 64-byte aligned."""
    end = round_up(stage_scratch)
    offsets = [-1] * (1 + len(plan.inputs))
    for tensor in plan.temporaries:
        offsets.append(end)
        end = round_up(end + max(tensor.bytes, 1))
    return Layout((*offsets, 0), end)


def round_up(size: int) -> int:
    """`size` in whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def as_array(operand: Any, position: int) -> np.ndarray:
    """An operand as a NumPy array on the same memory.

    Takes NumPy arrays and scalars, buffers, and CPU tensors by DLPack. Raises
    `ArgumentTypeError` for anything else, and for a tensor whose gradient would be lost.
    """
    if isinstance(operand, np.ndarray):
        if is_masked(operand):
            name = f"operand {position}" if position >= 0 else "out"
            raise ArgumentTypeError(
                f"{name} is a masked array, whose mask would be lost; its filled(0), or its data, "
                "would do"
            )
        return operand
    if is_tensor(operand) and wants_gradient(operand):
        raise ArgumentTypeError(
            f"{operand_name(position)} requires a gradient, and looptune computes none: "
            "operand.detach(), or a call under torch.no_grad(), would do"
        )
    if getattr(operand, "is_neg", bool)():  # torch's lazy minus sign, which DLPack drops
        if position < 0:
            raise ArgumentTypeError("out is a negated view; out.resolve_neg() would do")
        operand = operand.resolve_neg()
    try:
        if hasattr(operand, "__dlpack__") and not isinstance(operand, np.generic):
            if is_tensor(operand) and operand.dtype == sys.modules["torch"].bfloat16:
                bits = detached(operand).view(sys.modules["torch"].int16)
                return np.from_dlpack(bits).view(numpy_dtype("bfloat16"))
            return np.from_dlpack(detached(operand))
        if isinstance(operand, np.generic | memoryview | bytearray) or hasattr(
            operand, "__buffer__"
        ):
            return np.asarray(operand)
        return np.asarray(memoryview(operand))
    except (TypeError, BufferError, RuntimeError, ValueError) as reason:
        raise ArgumentTypeError(
            f"{operand_name(position)} is a {type(operand).__name__} that shares no CPU memory "
            f"({reason}); a NumPy array, a buffer or a CPU tensor would do"
        ) from reason


def operand_name(position: int) -> str:
    """An operand in words; out is at -1."""
    return f"operand {position}" if position >= 0 else "out"


def wants_gradient(tensor: Any) -> bool:
    """Whether torch would differentiate what is computed from a tensor."""
    enabled: bool = sys.modules["torch"].is_grad_enabled()
    return enabled and bool(tensor.requires_grad)


def detached(operand: Any) -> Any:
    """A tensor without its gradient, which DLPack refuses to export."""
    return operand.detach() if getattr(operand, "requires_grad", False) else operand


def is_tensor(operand: object) -> bool:
    """Whether an operand is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(operand, torch.Tensor)


def is_masked(operand: object) -> bool:
    """Whether an operand is an array with a mask."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(operand, masked.MaskedArray)


def like(first: object, result: np.ndarray) -> object:
    """`result` as the kind of array that `first` is: torch in, torch out."""
    if not is_tensor(first):
        return result
    torch = sys.modules["torch"]
    if result.dtype.name == "bfloat16":  # which DLPack has, but NumPy's export of it has not
        return torch.from_dlpack(result.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(result)


def check_argument(tensor: Tensor, array: np.ndarray, name: str) -> None:
    """Raise a typed error unless `array` has the tensor's dtype, shape, strides and alignment."""
    if array.dtype != numpy_dtype(tensor.dtype) or not array.dtype.isnative:
        raise ArgumentTypeError(f"{name} is {array.dtype!r}; the kernel needs {tensor.dtype}")
    if array.shape != tensor.shape:
        raise ArgumentError(f"{name} has shape {array.shape}; the kernel needs {tensor.shape}")
    item = ITEM_BYTES[tensor.dtype]
    if array.ctypes.data % item:
        raise ArgumentError(f"{name} is not aligned to its {item}-byte elements; a copy would be")
    if array.size == 0:
        return
    needed = tuple(stride * item for stride in tensor.strides)
    for size, found, wanted in zip(array.shape, array.strides, needed, strict=True):
        if size > 1 and found != wanted:
            raise ArgumentError(
                f"{name} has strides {array.strides} bytes; the kernel was made for {needed}: "
                "pass such an array or a copy, make a kernel for these strides (shapes=[arrays]), "
                "or use looptune.einsum, which does"
            )


def check_out(out: np.ndarray, inputs: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Raise `ArgumentError` unless `out` is writable and shares no element with an input."""
    if not out.flags.writeable:
        raise ArgumentError("out is read-only; a writable array would do")
    for array, name in zip(inputs, names, strict=True):
        if np.may_share_memory(out, array) and shares_memory(out, array):
            raise ArgumentError(
                f"out shares memory with {name}, which would be overwritten while it is read; "
                "pass another array, or use looptune.matmul or looptune.einsum, which allow it"
            )


def meets_itself(array: np.ndarray) -> bool:
    """Whether two indices may mean one element, as after a broadcast or torch's expand."""
    if array.size == 0:
        return False
    steps = sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    reach = array.itemsize - 1  # mixed radix: each stride must clear what the smaller ones reach
    for stride, size in steps:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def checked_pointers(
    arguments: Plan | Arguments, inputs: Sequence[np.ndarray], out: np.ndarray
) -> tuple[int, ...]:
    """Addresses of output and inputs; raises a typed error for what the code does not take."""
    names = [f"input {i} ({tensor.name})" for i, tensor in enumerate(arguments.inputs)]
    for tensor, array, name in zip(arguments.inputs, inputs, names, strict=True):
        check_argument(tensor, array, name)
    check_argument(arguments.output, out, "out")
    check_out(out, inputs, names)
    return (out.ctypes.data, *(array.ctypes.data for array in inputs))


def shares_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays share an element; taken for true where that is too costly to tell."""
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def empty_output(tensor: Tensor) -> np.ndarray:
    """A new array with the tensor's shape and strides."""
    item, dtype = ITEM_BYTES[tensor.dtype], numpy_dtype(tensor.dtype)
    reach = [(n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)]
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    if low == 0 and high + 1 == int(np.prod(tensor.shape)) and is_row_major(tensor):
        return np.empty(tensor.shape, dtype)
    flat = np.empty(high - low + 1, dtype)
    strides = tuple(stride * item for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(flat[-low:], tensor.shape, strides)


def is_row_major(tensor: Tensor) -> bool:
    """Whether a fresh NumPy array of the shape has these strides."""
    step = 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


# What the fast path asks of an argument: dtype, shape, byte strides, then the byte offsets of its
# first element and behind its last one, and its alignment. A plain tuple: this path is a race.
Expected = tuple[np.dtype[np.generic], tuple[int, ...], tuple[int, ...], int, int, int]


def expected(tensor: Tensor) -> Expected:
    """The fast path's view of a tensor."""
    item = ITEM_BYTES[tensor.dtype]
    strides = tuple(stride * item for stride in tensor.strides)
    reach = [(n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + item
    return numpy_dtype(tensor.dtype), tensor.shape, strides, low, high, item


def address_of(array: Any) -> int:
    """Address of an array's first element; the buffer route is twice as fast where it applies."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    except (TypeError, ValueError, BufferError):  # read-only, or not contiguous
        return int(array.__array_interface__["data"][0])


class Lease:
    """Scratch for one call at a time, and pointer tables that only miss the arguments."""

    def __init__(self, entry: CtypesEntry) -> None:
        self.scratch = np.empty(entry.layout.scratch_bytes + ALIGNMENT, np.uint8)
        base = round_up(self.scratch.ctypes.data)
        offsets = entry.layout.offsets
        self.whole = (ctypes.c_void_p * max(1, len(offsets)))()
        for number, offset in enumerate(offsets):
            if offset >= 0:
                self.whole[number] = base + offset
        self.base = ctypes.c_void_p(base)
        self.begin = ctypes.c_int64(0)
        self.runs = [
            (
                function,
                tensors,
                None
                if tensors == tuple(range(len(tensors)))
                else (ctypes.c_void_p * max(1, len(tensors)))(),
                ctypes.c_int64(trips),
            )
            for function, tensors, trips in entry.functions
        ]

    def run(self, pointers: Sequence[int]) -> None:
        """Run every stage over the addresses of output and inputs."""
        whole = self.whole
        for number, pointer in enumerate(pointers):
            whole[number] = pointer
        for function, tensors, table, trips in self.runs:
            if table is None:
                function(whole, self.base, self.begin, trips)
                continue
            for place, tensor in enumerate(tensors):
                table[place] = whole[tensor]
            function(table, self.base, self.begin, trips)


class Entry(Protocol):
    """What runs a kernel's installed code: the extension's object, or `CtypesEntry`.

    A call computes if all arguments are plain arrays as expected, else it is `NotImplemented`;
    `threads` are those of such a call.
    """

    threads: int

    def __call__(self, *inputs: object, out: object) -> object:
        """Compute, or `NotImplemented`."""

    def run_pointers(self, pointers: Sequence[int], threads: int = 1) -> None:
        """Run every stage over the addresses of output and inputs, unchecked."""

    def seconds(self, sets: Sequence[tuple[int, ...]], calls: int, threads: int = 1) -> float:
        """Seconds for `calls` calls in turn over the sets of pointers."""


class CtypesEntry:
    """The extension's `Entry` without the extension: the same calls, in the caller's thread."""

    def __init__(
        self, plan: Plan | Arguments | None, stages: Sequence[InstalledStage], layout: Layout
    ) -> None:
        self.functions = [
            (FUNCTION(each.code.address), each.tensors, each.trips) for each in stages
        ]
        self.layout = layout
        self.threads = 1
        self.free: list[Lease] = []
        tensors = () if plan is None else (plan.output, *plan.inputs)
        whole = plan is not None and all(0 not in tensor.shape for tensor in tensors)
        self.expected = tuple(expected(tensor) for tensor in tensors) if whole else ()

    def __call__(self, *inputs: object, out: object) -> object:
        """Compute if all arguments are plain arrays as expected, else `NotImplemented`."""
        arrays = (out, *inputs)
        if len(arrays) != len(self.expected) or not getattr(out, "flags", NO_FLAGS).writeable:
            return NotImplemented
        pointers: list[int] = []
        first = last = 0
        for array, (dtype, shape, strides, low, high, item) in zip(arrays, self.expected):  # noqa: B905
            if (
                type(array) is not np.ndarray
                or array.dtype is not dtype
                or array.shape != shape
                or array.strides != strides
            ):
                return NotImplemented
            pointer = address_of(array)
            if pointer % item or (pointer + high > first and last > pointer + low):
                return NotImplemented
            if not pointers:
                first, last = pointer + low, pointer + high
            pointers.append(pointer)
        self.run_pointers(pointers)
        return out

    def run_pointers(self, pointers: Sequence[int], threads: int = 1) -> None:
        """Run every stage over the addresses of output and inputs; `threads` is not used."""
        try:
            lease = self.free.pop()  # atomic: another thread may take the last one first
        except IndexError:
            lease = Lease(self)
        lease.run(pointers)
        self.free.append(lease)

    def seconds(self, sets: Sequence[tuple[int, ...]], calls: int, threads: int = 1) -> float:
        """Seconds for `calls` calls in turn over the sets of pointers, Python's share included."""
        start = time.perf_counter()
        for number in range(calls):
            self.run_pointers(sets[number % len(sets)])
        return time.perf_counter() - start


def make_entry(
    plan: Plan | Arguments, stages: Sequence[InstalledStage], layout: Layout, native: bool
) -> Entry:
    """The object that runs a kernel's code, the extension's if `native`, where there is one."""
    if extension is None or not native:
        return CtypesEntry(plan, stages, layout)
    installed = tuple(
        (each.code.address, each.tensors, each.trips, each.private_bytes) for each in stages
    )
    tensors = tuple(
        (
            BUFFER_FORMAT[tensor.dtype],
            tensor.shape,
            tuple(stride * ITEM_BYTES[tensor.dtype] for stride in tensor.strides),
            offset,
        )
        for tensor, offset in zip(plan.tensors, layout.offsets[:-1], strict=True)
    )
    tensors = (*tensors, ("f", (), (), 0)) if layout.scratch_bytes else tensors
    entry: Entry = extension.Entry(
        installed, tensors, layout.scratch_bytes, plan.flops > 50_000, plan.spec
    )
    return entry


def seconds_of(
    kernel: Kernel, inputs: Sequence[np.ndarray], out: np.ndarray, calls: int, threads: int = 1
) -> float:
    """Seconds for `calls` calls of the kernel alone, checked once."""
    pointers = kernel.pointers(inputs, out)
    return kernel.entry_or_raise().seconds([pointers], calls, threads)


def seconds_of_code(code: bytes, calls: int) -> float:
    """Seconds for `calls` calls of code that takes no operands."""
    stage = InstalledStage(install(code), (), 1)
    entry = CtypesEntry(None, [stage], Layout((), 0))
    return entry.seconds([()], calls)
