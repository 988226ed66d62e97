"""Leaves: arrays and tensors as ranges of bytes.

A leaf is addressed by byte offsets of its C-order, little-endian serialisation, which is what a
safetensors file holds. Copies go straight between the array and the caller's memory: a contiguous
one is a memcpy, a strided one is cut into axis-aligned boxes, so that none needs a full-size
temporary. NumPy and torch release the GIL in them. Calls for disjoint ranges of one leaf are safe
in parallel, even where a range begins inside an element.

Torch is never imported: a torch tensor can only be met when it is in sys.modules already.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from math import prod
from typing import Any, Final

import numpy as np

from tectonic_client.checkpoint.dtypes import ELEMENT_TYPES, code_of_numpy, code_of_torch
from tectonic_client.limits import STRIDED_COPY_BYTES

_TORCH_WORD: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Index = tuple[slice, ...]


class Refused(Exception):
    """A value that cannot be stored; the message says why."""


class Leaf(ABC):
    """One array of a state. `dtype` is its safetensors name.

    `identity` is equal for two leaves that are the same view of the same memory.
    `load_problem` says why the leaf cannot be loaded into, or is None.
    """

    def __init__(
        self, name: str, dtype: str, shape: tuple[int, ...], identity: Hashable, problem: str | None
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.nbytes = prod(shape) * ELEMENT_TYPES[dtype].bits // 8
        self.identity = identity
        self.load_problem = problem if self.nbytes else None

    @abstractmethod
    def copy_out(self, start: int, end: int, target: memoryview) -> None:
        """Copy bytes [start, end) of the serialisation into `target`, of end - start bytes."""

    @abstractmethod
    def copy_in(self, start: int, end: int, source: memoryview) -> None:
        """Set bytes [start, end) of the serialisation from `source`, of end - start bytes."""


def as_leaf(value: object, name: str) -> Leaf | None:
    """The leaf of an array or tensor; None for anything else. Raises Refused."""
    if isinstance(value, np.ndarray):
        return _numpy_leaf(value, name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _torch_leaf(torch, value, name)
    return None


def wait_for_devices(leaves: Iterable[Leaf]) -> None:
    """Wait until work queued on the leaves' CUDA devices is done: copies run on other streams."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, DeviceLeaf)}
    for device in devices:
        if device.type == "cuda":
            sys.modules["torch"].cuda.synchronize(device)


# --- NumPy, and torch on the CPU --------------------------------------------------------------


def _numpy_leaf(array: np.ndarray[Any, Any], name: str) -> Leaf:
    if type(array) not in (np.ndarray, np.memmap):
        raise Refused(f"is a {type(array).__module__}.{type(array).__qualname__}")
    dtype = code_of_numpy(array.dtype)
    if dtype is None:
        raise Refused(f"has dtype {array.dtype}, which safetensors cannot hold")
    if array.dtype.kind == "c" and not array.dtype.isnative:
        # Its words would be swapped whole, which exchanges real and imaginary parts.
        raise Refused(f"has dtype {array.dtype.str}: convert it to native byte order")
    problem = None if array.flags.writeable else "is read-only"
    word = np.dtype(f"u{array.dtype.itemsize}").newbyteorder(array.dtype.byteorder)
    return ArrayLeaf(name, dtype, array.view(word), problem)


class ArrayLeaf(Leaf):
    """An array in this process's memory, seen as unsigned words of its element size."""

    def __init__(
        self, name: str, dtype: str, words: np.ndarray[Any, Any], problem: str | None
    ) -> None:
        address = words.__array_interface__["data"][0]
        identity = ("cpu", address, dtype, words.dtype.str, words.shape, words.strides)
        problem = problem or _overlap(words.shape, words.strides)
        super().__init__(name, dtype, words.shape, identity, problem)
        self._words = words.reshape(1) if words.ndim == 0 else words
        self._swapped = words.dtype.newbyteorder("<") != words.dtype
        self._flat: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        if words.flags.c_contiguous and not self._swapped:
            self._flat = words.reshape(-1).view(np.uint8)

    def copy_out(self, start: int, end: int, target: memoryview) -> None:
        buffer = np.frombuffer(target, np.uint8)
        if self._flat is not None:
            np.copyto(buffer, self._flat[start:end])
            return
        for mine, theirs in self._pieces(start, end, buffer):
            np.copyto(theirs, mine)

    def copy_in(self, start: int, end: int, source: memoryview) -> None:
        buffer = np.frombuffer(source, np.uint8)
        if self._flat is not None:
            np.copyto(self._flat[start:end], buffer)
            return
        for mine, theirs in self._pieces(start, end, buffer):
            np.copyto(mine, theirs)

    def _pieces(
        self, start: int, end: int, buffer: np.ndarray[Any, Any]
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Pairs of equal shape: a view of the array, and its place in `buffer`."""
        size = self._words.itemsize
        little = self._words.dtype.newbyteorder("<")
        head, tail = _whole_elements(start, end, size)
        if start < head:
            yield (
                self._element_bytes(start // size)[start % size :][: head - start],
                buffer[: head - start],
            )
        position = head - start
        for index in boxes(self._words.shape, head // size, tail // size):
            mine = self._words[index]
            theirs = buffer[position : position + mine.size * size].view(little)
            yield mine, theirs.reshape(mine.shape)
            position += mine.size * size
        if tail < end:
            yield self._element_bytes(tail // size)[: end - tail], buffer[position:]

    def _element_bytes(self, element: int) -> np.ndarray[Any, Any]:
        """A view of the bytes of one element: writing a part leaves its other bytes alone."""
        (index,) = boxes(self._words.shape, element, element + 1)
        view = self._words[index].reshape(1).view(np.uint8)
        return view[::-1] if self._swapped else view


def _overlap(shape: Iterable[int], strides: Iterable[int]) -> str | None:
    if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        return "is broadcast (several elements share memory)"
    return None


def _whole_elements(start: int, end: int, size: int) -> tuple[int, int]:
    """The part of [start, end) that consists of whole elements; empty at `end` if there is none."""
    head = min(end, -(-start // size) * size)
    return head, max(head, end // size * size)


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Index]:
    """Cut elements [first, last) of C order into axis-aligned boxes, in C order.

    At most 2 * len(shape) - 1 of them: a ragged start, whole rows, a ragged end.
    """
    if first >= last:
        return
    if len(shape) == 1:
        yield (slice(first, last),)
        return
    row_elements = prod(shape[1:])
    first_row, end_row = -(-first // row_elements), last // row_elements
    if first_row > end_row:
        start = end_row * row_elements
        yield from _in_row(shape, end_row, first - start, last - start)
        return
    if first % row_elements:
        yield from _in_row(shape, first_row - 1, first % row_elements, row_elements)
    if first_row < end_row:
        yield (slice(first_row, end_row), *(slice(0, size) for size in shape[1:]))
    yield from _in_row(shape, end_row, 0, last % row_elements)


def _in_row(shape: tuple[int, ...], row: int, first: int, last: int) -> Iterator[Index]:
    for index in boxes(shape[1:], first, last):
        yield (slice(row, row + 1), *index)


# --- torch ------------------------------------------------------------------------------------


def _torch_leaf(torch: Any, tensor: Any, name: str) -> Leaf:
    reason = _torch_refusal(torch, tensor)
    if reason is not None:
        raise Refused(reason)
    dtype = code_of_torch(tensor.dtype)
    if dtype is None:
        raise Refused(f"has dtype {tensor.dtype}, which safetensors cannot hold")
    words = tensor.detach().view(getattr(torch, _TORCH_WORD[tensor.element_size()]))
    if tensor.device.type != "cpu":
        return DeviceLeaf(name, dtype, words)
    array = words.numpy()
    return ArrayLeaf(name, dtype, array.view(f"u{array.itemsize}"), None)


def _torch_refusal(torch: Any, tensor: Any) -> str | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(tensor)
        return f"is a {kind.__module__}.{kind.__qualname__}: pass its plain local tensor"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"is sparse or nested ({tensor.layout})"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype})"
    if tensor.device.type == "meta":
        return "is on the meta device: it has no data"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative: call .resolve_conj() or .resolve_neg()"
    return None


class DeviceLeaf(Leaf):
    """A torch tensor on any device, seen as signed words of its element size."""

    def __init__(self, name: str, dtype: str, words: Any) -> None:
        shape, strides = tuple(words.shape), words.stride()
        self.device = words.device
        identity = (str(self.device), words.data_ptr(), dtype, shape, strides)
        super().__init__(name, dtype, shape, identity, _overlap(shape, strides))
        self._torch: Any = sys.modules["torch"]
        self._words = words.reshape(1) if words.dim() == 0 else words
        self._flat = words.reshape(-1).view(self._torch.uint8) if words.is_contiguous() else None

    def copy_out(self, start: int, end: int, target: memoryview) -> None:
        for mine, theirs in self._pieces(start, end, target):
            theirs.copy_(mine)

    def copy_in(self, start: int, end: int, source: memoryview) -> None:
        # torch warns of read-only memory, whatever is done with it.
        writable = source if not source.readonly else memoryview(bytearray(source))
        for mine, theirs in self._pieces(start, end, writable):
            mine.copy_(theirs)

    def _pieces(self, start: int, end: int, buffer: memoryview) -> Iterator[tuple[Any, Any]]:
        """Pairs of equal shape: a view of the tensor, and its place in `buffer`."""
        if start == end:
            return
        host = self._torch.frombuffer(buffer, dtype=self._torch.uint8)
        if self._flat is not None:
            yield self._flat[start:end], host
            return
        size = self._words.element_size()
        head, tail = _whole_elements(start, end, size)
        if start < head:
            mine = self._element_bytes(start // size)[start % size :][: head - start]
            yield mine, host[: head - start]
        for step in range(head, tail, STRIDED_COPY_BYTES):
            stop = min(step + STRIDED_COPY_BYTES, tail)
            position = step - start
            for index in boxes(self._shape, step // size, stop // size):
                mine = self._words[index]
                # By offset, not by slicing: a view of a slice would have to be aligned.
                theirs = self._torch.frombuffer(
                    buffer, dtype=mine.dtype, count=mine.numel(), offset=position
                )
                yield mine, theirs.reshape(mine.shape)
                position += mine.numel() * size
        if tail < end:
            yield self._element_bytes(tail // size)[: end - tail], host[tail - start :]

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self._words.shape)

    def _element_bytes(self, element: int) -> Any:
        (index,) = boxes(self._shape, element, element + 1)
        return self._words[index].as_strided((1,), (1,)).view(self._torch.uint8)
