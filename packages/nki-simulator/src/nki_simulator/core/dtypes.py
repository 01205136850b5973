"""NKI's data types: strings as in NKI, each with the NumPy type that stores it, and their rounding.

Every engine computes in float32, and a store rounds to the destination's dtype. Floats become
integers by rounding to nearest even and saturating, as in AWS's simulator since NKI 0.6. tfloat32
is stored as float32 with its mantissa rounded to 10 bits.
"""

import ml_dtypes
import numpy as np


class DType(str):
    """An NKI dtype. It equals its name and carries what NumPy needs."""

    numpy: np.dtype
    itemsize: int
    integer: bool
    limits: tuple[int, int] | None
    packed: bool  # four values in one element, which only nc_matmul_mx (gen4) takes apart

    def __new__(cls, name: str, numpy: object) -> "DType":
        self = super().__new__(cls, name)
        self.numpy = np.dtype(numpy)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self.itemsize = self.numpy.itemsize
        self.integer = self.numpy.kind in "iu"
        self.packed = name.endswith("_x4")
        self.limits = (
            (int(np.iinfo(self.numpy).min), int(np.iinfo(self.numpy).max)) if self.integer else None
        )
        return self

    __hash__ = str.__hash__

    @property
    def poison(self) -> float:
        """What memory holds before anything is written: NaN, or 4 for integers."""
        return 4 if self.integer else float("nan")


uint8 = DType("uint8", np.uint8)
int8 = DType("int8", np.int8)
uint16 = DType("uint16", np.uint16)
int16 = DType("int16", np.int16)
uint32 = DType("uint32", np.uint32)
int32 = DType("int32", np.int32)
float16 = DType("float16", np.float16)
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16)
float32 = DType("float32", np.float32)
tfloat32 = DType("tfloat32", np.float32)
float8_e4m3 = DType("float8_e4m3", ml_dtypes.float8_e4m3)
float8_e4m3fn = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn)
float8_e5m2 = DType("float8_e5m2", ml_dtypes.float8_e5m2)
float8_e8m0fnu = DType("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu)
bool_ = DType("bool_", np.uint8)
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", np.uint32)
float8_e5m2_x4 = DType("float8_e5m2_x4", np.uint32)
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", np.uint16)

ALL = tuple(value for value in vars().values() if isinstance(value, DType))
BY_NAME = {str(t): t for t in ALL} | {"bool": bool_}
BY_NUMPY = {t.numpy: t for t in ALL if t not in (tfloat32, bool_) and not t.packed}
FLOAT8 = (float8_e4m3, float8_e4m3fn, float8_e5m2)
MATMUL = (*FLOAT8, bfloat16, float16, tfloat32, float32)


def dtype_of(dtype: object) -> DType:
    """Return the DType of an NKI dtype, a name, or a NumPy type."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtype in BY_NAME:
        return BY_NAME[dtype]
    try:
        numpy = np.dtype(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except TypeError:
        numpy = None
    if numpy == np.bool_:
        return bool_
    if numpy is None or numpy not in BY_NUMPY:
        raise TypeError(f"dtype {dtype!r} is not an NKI dtype; they are {', '.join(ALL)}")
    return BY_NUMPY[numpy]


def to_float32(values: np.ndarray) -> np.ndarray:
    """Return an operand's values as an engine sees them."""
    return values if values.dtype == np.float32 else values.astype(np.float32)


def store(out: np.ndarray, dtype: DType, values: np.ndarray) -> None:
    """Write values into `out`, rounded as the hardware's write path rounds."""
    if dtype.limits is not None:
        if values.dtype.kind not in "iub":
            low, high = dtype.limits
            values = np.clip(np.rint(values.astype(np.float64)), low, high)
        out[...] = values.astype(out.dtype)
    elif dtype is tfloat32:
        out[...] = round_tfloat32(values)
    else:
        out[...] = values


def round_to(values: np.ndarray, name: str) -> np.ndarray:
    """Round float32 values to another float dtype and return them in float32."""
    dtype = dtype_of(name)
    return (
        round_tfloat32(values)
        if dtype is tfloat32
        else values.astype(dtype.numpy).astype(np.float32)
    )


def round_tfloat32(values: np.ndarray) -> np.ndarray:
    """Round float32 to 10 mantissa bits, to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(
        0xFFFFE000
    )
    return np.where(np.isnan(values), values, rounded.view(np.float32))
