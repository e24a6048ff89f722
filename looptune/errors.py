"""Every error looptune raises on purpose.

LooptuneError
├── SpecError          a workload that cannot be described (also a ValueError)
├── NestError          an ill-formed loop nest (also a ValueError)
├── ScheduleError      a primitive that would change the meaning, or names no loop
├── LoweringError      a schedule over a stated limit of the target
├── ArgumentError      a call argument the kernel cannot take (also a ValueError)
│   └── ArgumentTypeError   its kind or dtype (also a TypeError)
├── InterpretError     a Program that reads or writes what it must not
├── UnsupportedError   known, but not supported: dtype, operator, epilogue, strategy
├── UnsupportedHostError    this machine cannot run the kernel
├── ExecutableMemoryError   the operating system refused executable memory
├── SerialError        JSON that is no nest, target or list of actions (also a ValueError)
├── DatabaseError      the database's file, or a line to import, is no use
├── MeasurementError   a time that cannot be, or a worker that died
├── CheckpointError    a policy's file that is no use
├── ReferenceMemoryError    too large to be verified here (also a MemoryError)
└── VerificationError  a kernel's result differs from the reference
"""


class LooptuneError(Exception):
    """The root of the tree."""


class SpecError(LooptuneError, ValueError):
    """A workload description that has no meaning: says which part, and what would do."""


class NestError(LooptuneError, ValueError):
    """A loop nest that breaks an invariant of the IR."""


class ScheduleError(LooptuneError):
    """A schedule primitive that does not apply where it was asked for."""


class LoweringError(LooptuneError):
    """A schedule that would exceed a limit of the target: code size, registers, displacement."""


class InterpretError(LooptuneError):
    """A Program that touches memory outside its operands, or reads a register never set."""


class ArgumentError(LooptuneError, ValueError):
    """A call argument of the wrong shape, layout or aliasing."""


class ArgumentTypeError(ArgumentError, TypeError):
    """A call argument of the wrong kind or dtype."""


class UnsupportedError(LooptuneError):
    """A feature looptune knows of and does not have; names what is supported."""


class UnsupportedHostError(LooptuneError):
    """A kernel for an instruction set this machine lacks."""


class ExecutableMemoryError(LooptuneError):
    """Executable memory was refused; names the policy that refused it."""


class SerialError(LooptuneError, ValueError):
    """JSON that was to be a nest, a target or a schedule's actions, and is not."""


class DatabaseError(LooptuneError):
    """A database that cannot be opened, or a record that is not one."""


class MeasurementError(LooptuneError):
    """A measurement that failed: a time under the roofline's, a worker that died or hung."""


class ReferenceMemoryError(LooptuneError, MemoryError):
    """No memory for the operands and references of a verification; says how much it takes."""


class VerificationError(LooptuneError):
    """A kernel's result is outside the error bound of the reference."""


class CheckpointError(LooptuneError):
    """A policy's file that is none, is damaged, or is of another version."""
