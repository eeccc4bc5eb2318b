"""cuSPARSE's SpMM with blocks (Blocked-ELL, BSR) through ctypes: torch ships the library and has no
binding for these."""

import ctypes
import glob
import os
import sys

import torch

from measure import Absent

POINTER, INT, INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
# Values of cusparse.h and library_types.h.
DATA_TYPE = {torch.float16: 2, torch.bfloat16: 14, torch.float32: 0}
COMPUTE_F32 = 0
INDEX_32 = 2
BASE_ZERO = 0
ORDER = {"column": 1, "row": 2}
NO_TRANSPOSE = 0
SPMM_BLOCKED_ELL_ALG1 = 13
SPMM_BSR_ALG1 = 14

SPMM = [POINTER, INT, INT, POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT]
SIGNATURES = {
    "cusparseCreate": [ctypes.POINTER(POINTER)],
    "cusparseGetVersion": [POINTER, ctypes.POINTER(INT)],
    "cusparseSetStream": [POINTER, POINTER],
    "cusparseCreateBlockedEll": [
        ctypes.POINTER(POINTER),
        INT64,
        INT64,
        INT64,
        INT64,
        POINTER,
        POINTER,
        INT,
        INT,
        INT,
    ],
    "cusparseCreateBsr": [ctypes.POINTER(POINTER)] + [INT64] * 5 + [POINTER] * 3 + [INT] * 5,
    "cusparseCreateDnMat": [ctypes.POINTER(POINTER), INT64, INT64, INT64, POINTER, INT, INT],
    "cusparseDestroySpMat": [POINTER],
    "cusparseDestroyDnMat": [POINTER],
    "cusparseSpMM_bufferSize": SPMM + [ctypes.POINTER(ctypes.c_size_t)],
    "cusparseSpMM": SPMM + [POINTER],
}


def candidates():
    """The copy that torch has mapped already, then torch's packages, then the system's."""
    try:
        with open("/proc/self/maps") as maps:
            yield from {line.split()[-1] for line in maps if "/libcusparse.so" in line}
    except OSError:
        pass
    for place in sys.path:
        yield from sorted(
            glob.glob(os.path.join(place or ".", "nvidia", "*", "lib", "libcusparse.so.*"))
        )
    yield from ("libcusparse.so.12", "libcusparse.so")


class Library:
    """The loaded library and one handle."""

    instance = None

    @classmethod
    def get(cls):
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance

    def __init__(self):
        tried = []
        for path in candidates():
            try:
                self.library, self.path = ctypes.CDLL(path), path
                break
            except OSError as error:
                tried.append(str(error))
        else:
            raise Absent("no libcusparse: " + "; ".join(tried)[:200])
        for name, arguments in SIGNATURES.items():
            function = getattr(self.library, name, None)
            if function is not None:  # an old library lacks BSR: whoever calls it gets an error
                function.argtypes, function.restype = arguments, INT
        self.library.cusparseGetErrorString.argtypes = [INT]
        self.library.cusparseGetErrorString.restype = ctypes.c_char_p
        self.handle = POINTER()
        self.call("cusparseCreate", ctypes.byref(self.handle))
        version = INT()
        self.call("cusparseGetVersion", self.handle, ctypes.byref(version))
        self.version = version.value

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(
                f"{name}: {self.library.cusparseGetErrorString(code).decode()} (code {code})"
            )


class Spmm:
    """c = a·b, b [k, n] and c [m, n] row-major or transposed views of such, f32 accumulation."""

    algorithm = None

    def __init__(self, b, c):
        """Of a derived class, which creates `a_matrix` first."""
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.b_matrix, self.c_matrix = self.dense(b), self.dense(c)
        self.set_stream()
        size = ctypes.c_size_t()
        self.cusparse.call("cusparseSpMM_bufferSize", *self.arguments(), ctypes.byref(size))
        self.buffer = torch.empty(max(size.value, 16), dtype=torch.uint8, device=c.device)

    def dense(self, t):
        matrix = POINTER()
        order, stride = ("row", t.stride(0)) if t.stride(1) == 1 else ("column", t.stride(1))
        self.cusparse.call(
            "cusparseCreateDnMat",
            ctypes.byref(matrix),
            *t.shape,
            stride,
            t.data_ptr(),
            DATA_TYPE[t.dtype],
            ORDER[order],
        )
        return matrix

    def arguments(self):
        return (
            self.cusparse.handle, NO_TRANSPOSE, NO_TRANSPOSE, ctypes.byref(self.one),
            self.a_matrix, self.b_matrix,
            ctypes.byref(self.zero), self.c_matrix, COMPUTE_F32, self.algorithm,
        )  # fmt: skip

    def set_stream(self):
        """The handle launches into torch's current stream, which is another one while a graph is
        captured."""
        self.cusparse.call(
            "cusparseSetStream", self.cusparse.handle, torch.cuda.current_stream().cuda_stream
        )

    def run(self):
        self.set_stream()
        self.cusparse.call("cusparseSpMM", *self.arguments(), self.buffer.data_ptr())

    def __del__(self):
        for name, matrix in (("SpMat", "a_matrix"), ("DnMat", "b_matrix"), ("DnMat", "c_matrix")):
            if getattr(self, matrix, None):
                getattr(self.cusparse.library, "cusparseDestroy" + name)(getattr(self, matrix))


class BlockedEllSpmm(Spmm):
    """a in Blocked-ELL."""

    algorithm = SPMM_BLOCKED_ELL_ALG1

    def __init__(self, columns, values, block_size, b, c):
        """columns: int32 [block rows, slots], -1 where a row has fewer blocks; values: the blocks
        in the order of the slots."""
        self.cusparse, self.a_matrix = Library.get(), POINTER()
        self.keep = (columns, values, b, c)  # the descriptors hold bare pointers
        self.cusparse.call(
            "cusparseCreateBlockedEll", ctypes.byref(self.a_matrix), c.shape[0], b.shape[0],
            block_size,
            columns.shape[1] * block_size, columns.data_ptr(), values.data_ptr(), INDEX_32,
            BASE_ZERO,
            DATA_TYPE[values.dtype],
        )  # fmt: skip
        super().__init__(b, c)


class BsrSpmm(Spmm):
    """a in BSR."""

    algorithm = SPMM_BSR_ALG1

    def __init__(self, row_ptr, col_idx, values, order, b, c):
        """row_ptr, col_idx: int32; values: contiguous blocks [nnz, size, size], each in `order`."""
        self.cusparse, self.a_matrix = Library.get(), POINTER()
        self.keep = (row_ptr, col_idx, values, b, c)
        nnz, size, _ = values.shape
        self.cusparse.call(
            "cusparseCreateBsr", ctypes.byref(self.a_matrix), c.shape[0] // size,
            b.shape[0] // size, nnz, size, size,
            row_ptr.data_ptr(), col_idx.data_ptr(), values.data_ptr(), INDEX_32, INDEX_32,
            BASE_ZERO,
            DATA_TYPE[values.dtype], ORDER[order],
        )  # fmt: skip
        super().__init__(b, c)
