# Made by `make stubs` with nanobind 3.1 from the bindings and _core.nbpat: change those.
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any

from numpy.typing import ArrayLike, DTypeLike, NDArray
from typing_extensions import CapsuleType


def initialize() -> None: ...

def delegates() -> list[str]: ...

def kernels() -> list[str]: ...

def num_threads() -> int: ...

def set_num_threads(arg: int, /) -> None: ...

class CurrentContext:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object | None, error: object | None, trace: object | None) -> None: ...

class Device:
    """A device: memory, streams, partitions. Get it from headrace.device()."""

    @property
    def name(self) -> str:
        """Such as 'cpu', 'sim:0' or 'cuda:1'."""

    @property
    def ordinal(self) -> int: ...

    @property
    def _id(self) -> int: ...

    @property
    def sm_limits(self) -> dict[str, int]:
        """
        Of partitions, in multiprocessors: how many there are, the smallest partition, what sizes are multiples of; the last two are 0 where there are no partitions.
        """

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors in all; 0 on the cpu."""

    def stream(self, priority: int = 0, *, blocking: bool = False) -> Stream:
        """
        A new stream. Lower priorities are more urgent. A blocking stream and the legacy stream order each other. It ends when its last reference does; work on it goes on.
        """

    def legacy_stream(self) -> Stream:
        """The legacy default stream (handle 1)."""

    def per_thread_stream(self) -> Stream:
        """The calling thread's default stream (handle 2)."""

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = 'float32', *, stream: object | None = None) -> Buffer:
        """
        A Buffer whose content is undefined, for work on `stream` (default: the per-thread stream). Does not wait.

        Raises InputError (shape, dtype) and OutOfDeviceMemory.
        """

    def to_device(self, array: object, stream: object | None = None, out: Buffer | None = None) -> Buffer:
        """
        Copy an array to the device: to a new Buffer, or to `out` of the same dtype and shape, on `stream` (default: the per-thread stream). Waits for the copy if the array is host memory.

        Raises InputError, OutOfDeviceMemory.
        """

    def event(self, *, timing: bool = False) -> Event:
        """An event that was not recorded yet, which is no wait."""

    def partition(self, *, sms: int, workqueue_concurrency_limit: int | None = None) -> Partition:
        """
        A partition of at least `sms` multiprocessors, rounded up to what the device grants: see sm_count.

        `workqueue_concurrency_limit`: how many of its streams are expected to have work at once, 1 or more. The partition then has workqueues, which hand kernels to the multiprocessors, that are balanced with those of other such partitions: where possible not shared with them, so that no stream waits for another lane's. It is an expectation and not a cap. None: the device's workqueues are shared. What was granted is Partition.workqueue_concurrency_limit. Source: cuda.h of CUDA 13.5, "Green Contexts: Workqueues" (CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED), which does not say whether a driver changes a limit; it was not run on such a driver yet.

        Raises DeviceError when there are not so many multiprocessors left, and for a limit where the driver is older than CUDA 13.1 (driver 590); InputError for a size or a limit below 1. Waits only for work of partitions that were dropped, where their multiprocessors are needed.
        """

    def split(self, sms: Sequence[int], *, workqueue_concurrency_limit: int | None = None) -> list[Partition]:
        """
        Disjoint partitions of the given sizes, in one split. Each has the workqueues that are asked for, and what is raised is as in partition(); where one fails, none is made.
        """

    def synchronize(self) -> None:
        """Wait for all work of the device. Raises what failed in it."""

    def _context(self) -> CurrentContext: ...

    def memory(self) -> dict[str, int]:
        """
        Bytes in use and at most so far, and how often memory was asked for and given back.
        """

    def trim(self) -> None:
        """Give back memory of dropped Buffers, on a GPU to the system."""

    def fail(self, operation: str = '', at: int = 0, *, memory: bool = False) -> None:
        """
        For tests: the `at`-th call of `operation` from now on (any, if empty) fails once, before it does anything.
        """

    def delay(self, operation: str, at: int = 0) -> None:
        """
        Simulated devices: the `at`-th operation from now on is held back until a wait demands it.
        """

    def drop_pending(self) -> None:
        """
        Simulated devices: skip all work that has not run. A function given to Stream.call that never ran keeps its Buffers, and these the device: where work may be left behind for good, this ends it.
        """

    @property
    def _running_sms(self) -> int: ...

    def clear_faults(self) -> None: ...

    def calls(self, operation: str = '') -> int:
        """
        For tests: how often an operation was called so far; on cpu and cuda, since this was first asked or a fault was first put there.
        """

    @property
    def pending(self) -> int:
        """Simulated devices: operations that were enqueued and have not run."""

    @property
    def submissions(self) -> list[tuple[int, str]]:
        """
        Simulated devices: (thread number, operation) in the order of submission.
        """

    def __repr__(self) -> str: ...

def cpu() -> Device: ...

def cuda(arg: int, /) -> Device: ...

def cuda_info() -> tuple[int, str, str, list[tuple[Any, ...]]]: ...

def sim(schedule: str, seed: int, ordinal: int, sms: int, memory: int) -> Device: ...

def device_by_id(arg: int, /) -> Device | None: ...

class Stream:
    """
    A stream of a device. Get it from Device.stream() or Partition.stream().
    """

    @property
    def handle(self) -> int:
        """The handle, as CUDA counts: 1 legacy, 2 per-thread."""

    @property
    def device(self) -> Device: ...

    def __cuda_stream__(self) -> tuple[int, int]:
        """The stream protocol of cuda.core: (version, handle)."""

    def synchronize(self) -> None:
        """Wait for the work that is on the stream now. Raises what failed in it."""

    def query(self) -> bool:
        """Whether the stream's work is done. Does not wait."""

    def record(self, event: Event | None = None) -> Event:
        """An event behind the work that is on the stream now. Does not wait."""

    def wait(self, event: Event) -> None:
        """
        Work enqueued from now on runs behind the event's latest record. Does not wait on the host.
        """

    def call(self, function: Callable[..., object], reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> None:
        """
        Run a Python function in stream order (cpu and simulated devices). `reads` and `writes` are the Buffers that it touches: they are kept, and whoever checks the order knows them. Inside it Buffer.numpy() is the memory itself. It must not call the device. What it raises is raised by the next wait for anything behind it.
        """

    def declare(self, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = (), name: str = '') -> None:
        """
        Say that work which another library has just enqueued on this stream reads and writes these Buffers. Whatever uses them through headrace from now on comes behind that work, Buffer.numpy() too, their memory is not given to others before it is done, and a record that is open has it as one operation on this stream, called `name`. Does not wait. Raises InputError for what is no Buffer.
        """

    def copy(self, source: Buffer, target: Buffer, nbytes: int | None = None) -> None:
        """
        Copy the bytes of a dense Buffer (`nbytes` of them) to the start of another, in stream order. Does not wait: memory of the host has to stay as it is until the copy is done. Buffers that a running call lent are taken too.

        Raises InputError where there is no room, or memory is strided; DeviceError for another device's.
        """

    @property
    def partition(self) -> Partition | None:
        """
        The `Partition` that the stream's work stays in; None where it is in none.
        """

    def _sms_seen(self, replayed: bool) -> list[int]: ...

    def _begin_capture(self, mode: int = 1) -> None: ...

    def _capture_status(self) -> int: ...

    def _end_capture(self) -> Callable[[Stream], None]: ...

    def close(self) -> None:
        """
        End the stream; work on it goes on. It can be neither used nor selected afterwards.
        """

    def __eq__(self, other: object | None) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Event:
    """A point in a stream's work. Get it from Stream.record()."""

    def __repr__(self) -> str: ...

    @property
    def device(self) -> Device: ...

    def query(self) -> bool:
        """Whether the work before it is done. Does not wait."""

    def synchronize(self) -> None:
        """Wait on the host for the work before it. Raises what failed in it."""

    def elapsed_ms(self, since: Event) -> float:
        """
        Milliseconds of device time since another event; both must be complete.
        """

class Partition:
    """
    A part of a device's multiprocessors. Get it from Device.partition() or split().
    """

    def __repr__(self) -> str: ...

    def __eq__(self, other: object | None) -> bool: ...

    def __hash__(self) -> int: ...

    @property
    def sm_count(self) -> int:
        """As granted, read back from the device."""

    @property
    def workqueue_concurrency_limit(self) -> int | None:
        """As granted, read back from the device; None where none was asked for."""

    @property
    def device(self) -> Device: ...

    def stream(self, priority: int = 0) -> Stream:
        """A stream whose work stays on the partition."""

    def close(self) -> None:
        """Refuse new streams; those that exist go on."""

def select(stream: object | None, device: object | None) -> tuple[int, int, int]: ...

def restore(arg0: int, arg1: int, arg2: int, /) -> None: ...

def selection() -> tuple[int, int, int]: ...

def stream_on(arg0: Device, arg1: int, /) -> Stream: ...

class Buffer:
    """
    Memory with a dtype, a shape and strides (in elements), on a device. It knows the event of its last writer: reading it on the host waits for that event alone.
    """

    @property
    def dtype(self) -> str:
        """Such as 'float32' or 'bfloat16'."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(self) -> tuple"""

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> Device: ...

    @property
    def address(self) -> int:
        """Where the memory starts, as the device counts."""

    def numpy(self) -> NDArray[Any]:
        """
        A NumPy array: a view of host memory, a copy of device memory. Waits for the last writer of device memory.

        Raises InputError for a dtype that NumPy lacks, and for memory lent by a running call outside stream.call.
        """

    def resize(self, shape: int | Sequence[int]) -> None:
        """
        Say the shape of a delegate's output, where it is smaller than the greatest one of the plan. Before run() returns.
        """

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """
        NumPy's protocol, as numpy(): a view of host memory, a copy of device memory.
        """

    def float32(self) -> NDArray[Any]:
        """
        A float32 copy as a NumPy array, exact for bfloat16. Waits as numpy() does.
        """

    @staticmethod
    def from_float32(array: ArrayLike) -> Buffer:
        """
        A bfloat16 Buffer on the host, rounded to nearest even from an array of float32.
        """

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> CapsuleType:
        """
        DLPack: makes the consumer's stream wait for the last writer; does not wait on the host.
        """

    def __dlpack_device__(self) -> tuple[int, int]: ...

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """
        Version 3, on a GPU alone (else AttributeError); does not wait on the host.
        """

    def __repr__(self) -> str: ...

def define_delegate(name: str, cls: type, payload_is_code: bool) -> None: ...

def record_start() -> int: ...

def record_stop(began: int) -> dict[str, Any]: ...

def library_facts(image: bytes) -> dict[str, Any]: ...

def set_library_folders(folders: Sequence[str]) -> None: ...

def read_aoti_payload(payload: bytes, method: str) -> dict[str, Any]: ...

class Graph:
    def replay(self, inputs: tuple[Any, ...], stream: object | None, out: Sequence[object] | None, borrow: bool) -> tuple[Any, ...]: ...

    def stats(self) -> dict[str, Any]: ...

    def work(self) -> tuple[list[tuple[str, bool]], int, int]: ...

    def close(self) -> None: ...

def capture(method: Method, inputs: tuple[Any, ...], stream: object | None, keep: int) -> tuple[Graph, tuple[Any, ...]]: ...

def capture_stage() -> str: ...

class Method:
    @property
    def name(self) -> str: ...

    def inputs(self) -> list[dict[str, Any]]: ...

    def outputs(self) -> list[dict[str, Any]]: ...

    def islands(self) -> list[tuple[int, str, int, int]]: ...

    @property
    def device(self) -> Device: ...

    def stats(self) -> tuple[int, dict[str, int], dict[str, int]]: ...

    def settled(self) -> Stream: ...

    def call(self, inputs: tuple[Any, ...], stream: object | None, out: Sequence[object] | None, strict: bool) -> tuple[Any, ...]: ...

class Program:
    @staticmethod
    def load(source: str | PathLike[str] | bytes | bytearray | memoryview, data: Sequence[str | PathLike[str] | bytes | bytearray | memoryview], instances: int, allow_native_code: bool, max_steps: int, options: dict[str, dict[str, bool | int | str]], device: Device | None, lane: Partition | None) -> Program: ...

    @staticmethod
    def verify(source: str | PathLike[str] | bytes | bytearray | memoryview, data: Sequence[str | PathLike[str] | bytes | bytearray | memoryview]) -> None: ...

    def method_names(self) -> list[str]: ...

    def method(self, arg: str, /) -> Method: ...

    def memory(self) -> list[tuple[str, str, int, str, int]]: ...

    def close(self) -> None: ...
