"""A launch's programs in Triton's interpreter: replayed, recorded or interpreted."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from verify.cell.triton_interpreter_arguments import converter
from verify.cell.triton_interpreter_plans import Array, Overlap
from verify.cell.triton_interpreter_recording import Now, record_reductions, recording_builder
from verify.cell.triton_interpreter_replay import Recording, Tape

_MOST_TAPES = 192  # of kernels and arguments; a campaign takes its configs in turn
_WORTH = 4  # programs: to record one takes as long as to interpret two or three


def replay_programs(interpreter: Any) -> None:
    """Replace the loop over a launch's programs."""
    record_reductions(interpreter)
    recorder = _Recorder(interpreter)
    tapes: OrderedDict[Any, Tape] = OrderedDict()
    # By function: the names of its arguments, and what makes of them what it computes with.
    signatures: dict[Any, tuple[list[str], Callable[[str, Any], Any]]] = {}

    def launch(self: Any, *args_dev: Any, **kwargs: Any) -> None:
        if self.fn not in signatures:
            names = inspect.getfullargspec(self.fn).args
            signatures[self.fn] = names, converter(interpreter, self.fn)
        names, convert = signatures[self.fn]
        kwargs = {name: value for name, value in kwargs.items() if name in names}
        args_host, kwargs_host = self._init_args_hst(args_dev, kwargs)
        for hook in self.pre_run_hooks:
            hook(*args_host, **kwargs_host)
        scope = interpreter._patch_lang(self.fn)
        try:
            given = inspect.getcallargs(self.fn, *args_host, **kwargs_host)
            given = {
                name: value if name in self.constexprs else convert(name, value)
                for name, value in given.items()
            }
            grid = self.grid(given) if callable(self.grid) else self.grid
            if len(grid) > 3:
                raise ValueError("grid must have at most 3 dimensions")
            grid = (*grid, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            tape, handles = _tape_of(interpreter, tapes, self.fn, given)
            try:
                left = math.prod(grid)
                if tape is not None:
                    tape.launches += 1
                    tape.base = []  # of an earlier launch
                    left += left if tape.launches == 1 else 0  # oracles often launch twice
                for place in np.ndindex(*grid):
                    interpreter.interpreter_builder.set_grid_idx(*place)
                    recorder.run(tape, handles, self.fn, given, left)
                    left -= 1
            except Exception as error:
                if interpreter.triton.knobs.compilation.front_end_debugging:
                    raise
                raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()
        self._restore_args_dev(args_dev, args_host, kwargs, kwargs_host)

    interpreter.GridExecutor.__call__ = launch


class _Recorder:
    """Runs programs: replayed, recorded or interpreted."""

    def __init__(self, interpreter: Any) -> None:
        self.builder = interpreter.interpreter_builder
        self.handle_class = interpreter.TensorHandle
        self.plain_class = type(self.builder)
        self.recording_class = recording_builder(interpreter)
        self.watched = property(_watched_read, _watched_write)

    def run(
        self,
        tape: Tape | None,
        handles: list[Any],
        fn: Callable[..., None],
        given: dict[str, Any],
        left: int,
    ) -> None:
        """One program.  left: how many there are from this one on, perhaps with the same path."""
        if tape is None or tape.closed:
            fn(**given)
            return
        if tape.recorded:
            arguments = [each.data for each in handles]
            if not tape.has(arguments):
                tape.launch([np.array([n], np.int32) for n in self.builder.grid_dim], arguments)
            program = [np.array([n], np.int32) for n in self.builder.grid_idx]
            try:
                effects = tape.replay(program)
            except Exception as error:  # too long, or wrong: the interpreter tells what
                tape.closed = isinstance(error, Overlap)
                fn(**given)
                return
            if effects is not None:
                for effect in effects:
                    effect.made(*effect.arrays)
                return
        if left < _WORTH:
            fn(**given)
            return
        self._record(tape, handles, fn, given)

    def _record(
        self, tape: Tape, handles: list[Any], fn: Callable[..., None], given: dict[str, Any]
    ) -> None:
        recording = Recording(tape)
        for n, each in enumerate(handles, 6):
            recording.known(each, n)
        Now.recording = recording
        self.builder.__class__ = self.recording_class
        self.handle_class.data = self.watched
        try:
            fn(**given)
        except BaseException:
            recording.lose("it raised")
            raise
        finally:
            del self.handle_class.data
            self.builder.__class__ = self.plain_class
            Now.recording = None
            recording.end()


def _watched_read(handle: Any) -> Array:
    recording = Now.recording
    if recording is not None and not recording.inside and not recording.constant(handle):
        recording.lose("an array that is read outside of an operation")
    data: Array = handle.__dict__["data"]
    return data


def _watched_write(handle: Any, data: Array) -> None:
    before = handle.__dict__.get("data")
    recording = Now.recording
    if before is not None and recording is not None:
        recording.replaced(alike=before.dtype == data.dtype)
    handle.__dict__["data"] = data


def _tape_of(
    interpreter: Any, tapes: OrderedDict[Any, Tape], fn: Any, given: dict[str, Any]
) -> tuple[Tape | None, list[Any]]:
    """The tape for these arguments, and the handles of their tensors; None if they hold anything
    whose kind is not known."""
    handles: list[Any] = []
    try:
        key = (fn, tuple(_kind(interpreter, value, handles) for value in given.values()))
    except TypeError:
        return None, []
    if key in tapes:
        tapes.move_to_end(key)
    else:
        if len(tapes) >= _MOST_TAPES:
            tapes.popitem(last=False)
        first = 6 + len(handles)
        tapes[key] = Tape(first, [None] * first)
    return tapes[key], handles


def _kind(interpreter: Any, value: Any, handles: list[Any]) -> Any:
    """What a tape depends on of an argument; adds its handles.  Raises TypeError."""
    core = interpreter.tl.core
    if isinstance(value, interpreter.TensorHandle):
        handles.append(value)
        return value.dtype.name, value.data.shape, value.data.dtype.str
    if isinstance(value, core.tensor):
        return value.type.name, _kind(interpreter, value.handle, handles)
    if isinstance(value, (tuple, list, core.tuple)):
        values = value.values if isinstance(value, core.tuple) else value
        return type(value).__name__, tuple(_kind(interpreter, each, handles) for each in values)
    if isinstance(value, core.constexpr):
        return "constexpr", _kind(interpreter, value.value, handles)
    if isinstance(value, float):
        return "float", value.hex()
    if value is None or isinstance(value, (bool, int, str)):
        return type(value).__name__, value
    if isinstance(value, core.dtype):
        return "dtype", value.name
    if isinstance(value, (interpreter.TensorDescHandle, core.tensor_descriptor_base)):
        return type(value).__name__, _kind(interpreter, tuple(vars(value).values()), handles)
    if isinstance(value, core.block_type):
        return "block", value.name
    if isinstance(value, core.tensor_descriptor_base_type):  # sizes and strides are beside it
        return type(value).__name__, value.block_type.name
    if type(value).__module__.startswith("triton._C"):  # one of its enums
        return type(value).__name__, int(value)
    if callable(value):
        return value
    raise TypeError(type(value))
