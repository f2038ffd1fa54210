"""What PyTorch and ExecuTorch say beside the work, and what of it nobody needs to read. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = ["quiet", "told_by_the_error"]

# By category and the beginning of the text, as ``warnings.filterwarnings`` takes them.
WARNINGS = (
    # torch.utils._pytree, each time a program is copied.
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
    # Here a buffer starts as it is in the model: InitializedMutableBufferPass.
    (UserWarning, r"Mutation on a buffer in the model is detected"),
)
# By logger and a part of the text: optional libraries of torchao's that other builds have; an enum of its own; operators
# that ExecuTorch cannot keep whole, or whose schema it only guesses at.
LOGS = (
    ("torchao", "Failed to load "),
    ("torch.utils._pytree", "is an Enum subclass and is now natively supported"),
    (None, "was requested for preservation by partitioner"),
    (None, "Torchgen is not able to parse the schema of"),
    # It is refused, by name and line.
    ("torch._inductor.ir", "is missing a c-shim implementation"),
)
# What fails in a trace is logged here first, and then raised.
TRACE = (
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the lines above, and with all others."""
    filters = [(logging.getLogger(name), _Without(text)) for name, text in LOGS]
    for logger, each in filters:
        logger.addFilter(each)
    try:
        with warnings.catch_warnings():
            for category, text in WARNINGS:
                warnings.filterwarnings("ignore", text, category)
            yield
    finally:
        for logger, each in filters:
            logger.removeFilter(each)


@contextlib.contextmanager
def told_by_the_error() -> Iterator[None]:
    """Without the errors that PyTorch logs on its way to an exception, and the graph that it prints; where none comes, they
    are logged after all."""
    held: list[tuple[logging.Logger, logging.LogRecord]] = []
    loggers = [logging.getLogger(name) for name in TRACE]
    filters = [_Held(logger, held) for logger in loggers]
    for logger, each in zip(loggers, filters, strict=True):
        logger.addFilter(each)
    try:
        with contextlib.redirect_stderr(cast(TextIO, _WithoutGraphs(sys.stderr))):
            yield
    except Exception:
        held.clear()
        raise
    finally:
        for logger, each in zip(loggers, filters, strict=True):
            logger.removeFilter(each)
        for logger, record in held:
            logger.handle(record)


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


class _WithoutGraphs:
    """A stream without the graph, as far as it was traced, that torch.export prints before it raises: of the thread that
    made it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.thread = threading.get_ident()
        self.skipped = False

    def write(self, text: str) -> int:
        if threading.get_ident() != self.thread:
            self.stream.write(text)
        elif text.lstrip().startswith(("class GraphModule(", "def forward(self, arg0_1")):
            self.skipped = True
        elif not self.skipped or text != "\n":
            self.skipped = False
            self.stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Held(logging.Filter):
    def __init__(self, logger: logging.Logger, held: list[tuple[logging.Logger, logging.LogRecord]]) -> None:
        super().__init__()
        self.logger = logger
        self.held = held

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        self.held.append((self.logger, record))
        return False
