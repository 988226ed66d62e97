"""Leaves: byte ranges of arrays and tensors, out and in."""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.checkpoint.leaves import DeviceLeaf, Leaf, Refused, as_leaf, boxes
from tests.checkpoint.samples import arrays, random_words, serialised, tensors

ARRAYS, TENSORS = arrays(), tensors()
SAMPLES: dict[str, Any] = {f"numpy-{name}": value for name, value in ARRAYS.items()} | {
    f"torch-{name}": value for name, value in TENSORS.items()
}


def leaf_of(value: Any) -> Leaf:
    leaf = as_leaf(value, "x")
    assert leaf is not None
    return leaf


def device_leaf_of(tensor: torch.Tensor) -> Leaf:
    """A CPU tensor through the path that other devices take."""
    leaf = leaf_of(tensor)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return DeviceLeaf("x", leaf.dtype, tensor.detach().view(word[tensor.element_size()]))


def all_bytes(leaf: Leaf) -> bytes:
    target = bytearray(leaf.nbytes)
    leaf.copy_out(0, leaf.nbytes, memoryview(target))
    return bytes(target)


def cuts_of(nbytes: int, seed: int) -> list[int]:
    inner = np.random.default_rng(seed).integers(0, nbytes + 1, 6).tolist()
    return sorted({0, nbytes, *inner})


def check_round_trip(make: Callable[[Any], Leaf], value: Any, blank: Any) -> None:
    expected, leaf = serialised(value), make(value)
    assert leaf.nbytes == len(expected)
    assert all_bytes(leaf) == expected
    for seed in range(8):
        cuts = cuts_of(leaf.nbytes, seed)
        fresh = make(blank)
        for start, end in pairwise(cuts):
            piece = bytearray(end - start)
            leaf.copy_out(start, end, memoryview(piece))
            assert piece == expected[start:end]
            fresh.copy_in(start, end, memoryview(piece))
        assert all_bytes(fresh) == expected


def blank_like(value: Any) -> Any:
    """Another array of the same strides, filled with something else."""
    if isinstance(value, torch.Tensor):
        blank = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        blank.untyped_storage().fill_(0xEE)
        return blank
    reach = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
    low, high = sum(min(0, span) for span in reach), sum(max(0, span) for span in reach)
    buffer = bytearray(b"\x01" * max(high - low + value.itemsize, 0))
    return np.ndarray(value.shape, value.dtype, buffer, -low, value.strides)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_byte_range_of_every_kind(name: str) -> None:
    """Any cut of any array or tensor reads and writes exactly the bytes of its serialisation."""
    value = SAMPLES[name]
    check_round_trip(leaf_of, value, blank_like(value))


@pytest.mark.parametrize("name", TENSORS)
def test_device_path(name: str) -> None:
    """The path for other devices (run here on the CPU) gives the same bytes."""
    value = TENSORS[name]
    check_round_trip(device_leaf_of, value, blank_like(value))


def test_loading_keeps_everything_around_a_view() -> None:
    """Writing into a strided view changes its elements and nothing between them."""
    base = np.zeros((10, 10), np.int32)
    view = base[1:9:2, 1:9:3]
    data = random_words(view.shape, 4).tobytes()
    leaf_of(view).copy_in(0, len(data), memoryview(data))
    assert view.tobytes() == data
    view[:] = 0
    assert not base.any()


def test_big_endian_arrays_keep_their_order() -> None:
    """Values are stored little-endian; loading into a big-endian array gives the same values."""
    source, target = np.arange(12, dtype=">i4").reshape(3, 4), np.zeros((4, 3), ">i4").T
    data = all_bytes(leaf_of(source))
    assert data == np.arange(12, dtype="<i4").tobytes()
    leaf_of(target).copy_in(0, 48, memoryview(data))
    np.testing.assert_array_equal(target, source)


def test_big_endian_complex_arrays_are_refused() -> None:
    """Swapping words of eight bytes would exchange real and imaginary parts: wrong numbers."""
    with pytest.raises(Refused, match="native byte order"):
        as_leaf(np.array([1 + 2j], ">c8"), "x")


def test_parts_of_one_element_from_two_threads() -> None:
    """Two writers of one element's halves do not undo each other: no read-modify-write."""
    target = np.zeros((64, 64), np.uint64).T
    leaf, data = leaf_of(target), random_words((64, 64), 8).tobytes()

    def write(parity: int) -> None:
        for start in range(4 * parity, leaf.nbytes, 8):
            leaf.copy_in(start, start + 4, memoryview(data)[start : start + 4])

    threads = [threading.Thread(target=write, args=(parity,)) for parity in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all_bytes(leaf) == data


def test_strided_copies_make_no_large_temporary() -> None:
    """Copying 16 MiB of a transposed array allocates next to nothing."""
    source = np.zeros((2048, 2048), np.float32).T
    leaf, target = leaf_of(source), memoryview(bytearray(source.nbytes))
    tracemalloc.start()
    leaf.copy_out(0, leaf.nbytes, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_other_threads_run_during_a_copy() -> None:
    """A large copy releases the GIL: a thread that waits for it runs before the copy is done."""
    source = np.zeros(64 << 20, np.uint8)
    leaf, target = leaf_of(source), memoryview(bytearray(64 << 20))
    # A loaded machine may not run the other thread in time; one that holds the GIL never does.
    assert any(_another_thread_ran(leaf, target) for _ in range(50))


def _another_thread_ran(leaf: Leaf, target: memoryview) -> bool:
    inside, seen = threading.Event(), threading.Event()

    def watch() -> None:
        inside.wait()
        seen.set()

    thread = threading.Thread(target=watch)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        inside.set()
        leaf.copy_out(0, leaf.nbytes, target)
        return seen.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_coo(), "sparse"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), "complex128"),
    "conjugate": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conjugate"),
    "negative": (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "negative"),
    "packed": (lambda: torch.empty(2, dtype=torch.float4_e2m1fn_x2), "float4"),
    "objects": (lambda: np.array([object()]), "object"),
    "structured": (lambda: np.zeros(2, [("a", "i4")]), "dtype"),
    "text": (lambda: np.array(["a"]), "<U1"),
    "time": (lambda: np.zeros(2, "M8[s]"), "datetime64"),
    "long double": (lambda: np.zeros(2, np.longdouble), "longdouble|float128"),
    "masked": (lambda: np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
    "void": (lambda: np.zeros(2, "V2"), "V2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arrays_say_why(name: str) -> None:
    """What safetensors cannot hold faithfully is refused with the reason."""
    make, reason = REFUSED[name]
    with pytest.raises(Refused, match=reason):
        as_leaf(make(), "x")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors_are_refused() -> None:
    """A quantized tensor's scale and zero point would be lost."""
    with pytest.raises(Refused, match="quantized"):
        as_leaf(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "x")


def test_what_cannot_be_loaded_into() -> None:
    """Read-only and broadcast arrays are saved as they are, but name their problem for loading."""
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    assert leaf_of(frozen).load_problem == "is read-only"
    repeated = np.lib.stride_tricks.as_strided(np.ones(3), (2, 3), (0, 8))
    for broadcast in (torch.zeros(3).expand(4, 3), repeated):
        leaf = leaf_of(broadcast)
        assert "broadcast" in str(leaf.load_problem)
        assert all_bytes(leaf) == serialised(broadcast)
    assert leaf_of(np.zeros(3)).load_problem is None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_cover_a_range_in_order(shape: list[int], data: st.DataObject) -> None:
    """The boxes of a range of elements, one after another, are exactly that range; few enough."""
    elements = int(np.prod(shape))
    first = data.draw(st.integers(0, elements))
    last = data.draw(st.integers(first, elements))
    numbers = np.arange(elements).reshape(shape)
    found = [numbers[index].ravel() for index in boxes(tuple(shape), first, last)]
    assert len(found) <= 2 * len(shape) - 1
    assert [n for part in found for n in part.tolist()] == list(range(first, last))


def test_torch_is_not_imported() -> None:
    """Without torch in the process, leaves of NumPy arrays work and torch stays out."""
    program = (
        "import sys, numpy\n"
        "from tectonic_client.checkpoint.leaves import as_leaf\n"
        "assert as_leaf(numpy.zeros(3), 'x').nbytes == 24 and as_leaf(object(), 'x') is None\n"
        "assert not {'torch', 'ml_dtypes'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
