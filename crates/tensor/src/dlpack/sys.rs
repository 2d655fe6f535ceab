//! The C structs, field by field as `dlpack.h` 1.3 declares them.

use std::ffi::{c_char, c_int, c_void};

/// The version of the header that this module is written after, and what exports carry.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 3 };

/// Bit of [`DLManagedTensorVersioned::flags`]: the consumer must not write.
pub const READ_ONLY: u64 = 1 << 0;
/// Bit of [`DLManagedTensorVersioned::flags`]: the memory is a copy made for this consumer.
pub const IS_COPIED: u64 = 1 << 1;
/// Bit of [`DLManagedTensorVersioned::flags`]: each element of fewer than 8 bits has a byte of its own.
pub const IS_SUBBYTE_TYPE_PADDED: u64 = 1 << 2;

/// A version of DLPack. Another `major` is another layout; another `minor` only adds codes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Counts layouts.
    pub major: u32,
    /// Counts additions.
    pub minor: u32,
}

/// The place of a tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// The kind of memory, such as [`CPU`](DLDevice::CPU).
    pub device_type: i32,
    /// The ordinal among the devices of the kind; 0 where there is but one memory.
    pub device_id: i32,
}

impl DLDevice {
    /// `kDLCPU`: memory of the host.
    pub const CPU: i32 = 1;
    /// `kDLCUDA`: memory of a CUDA device.
    pub const CUDA: i32 = 2;
    /// `kDLCUDAHost`: memory of the host, page-locked by CUDA.
    pub const CUDA_HOST: i32 = 3;
    /// `kDLCUDAManaged`: memory that CUDA moves between host and devices.
    pub const CUDA_MANAGED: i32 = 13;
}

/// The type of an element; [`ElementType`](super::ElementType) reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// The kind of number, such as [`FLOAT`](DLDataType::FLOAT).
    pub code: u8,
    /// The bits of one number.
    pub bits: u8,
    /// The numbers of one element, 1 unless elements are vectors.
    pub lanes: u16,
}

impl DLDataType {
    /// `kDLInt`: two's complement.
    pub const INT: u8 = 0;
    /// `kDLUInt`: unsigned.
    pub const UINT: u8 = 1;
    /// `kDLFloat`: IEEE 754 binary.
    pub const FLOAT: u8 = 2;
    /// `kDLBfloat`: bfloat16, which is not a [`FLOAT`](DLDataType::FLOAT).
    pub const BFLOAT: u8 = 4;
    /// `kDLComplex`: two floats of half the bits.
    pub const COMPLEX: u8 = 5;
}

/// A tensor without an owner.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// The base address, `byte_offset` before index zero; null if there are no elements.
    pub data: *mut c_void,
    /// Where the memory is.
    pub device: DLDevice,
    /// The number of dimensions.
    pub ndim: i32,
    /// The type of the elements.
    pub dtype: DLDataType,
    /// `ndim` sizes in elements; may be null if there are none.
    pub shape: *mut i64,
    /// `ndim` steps in elements. Before 1.2 null meant row-major.
    pub strides: *mut i64,
    /// The bytes from `data` to the element at index zero.
    pub byte_offset: u64,
}

/// A lent tensor of before 1.0, in capsules named `dltensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Ends the loan and frees this struct; null if there is nothing to do.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A lent tensor, in capsules named `dltensor_versioned`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLManagedTensorVersioned {
    /// The version of this struct. If its major is not known, only `deleter` may be used.
    pub version: DLPackVersion,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Ends the loan and frees this struct; null if there is nothing to do.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// Bits such as [`READ_ONLY`].
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// The part of [`DLPackExchangeAPI`] that is the same in every version.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLPackExchangeAPIHeader {
    /// The version of the table.
    pub version: DLPackVersion,
    /// A table of an older version, or null.
    pub prev_api: *mut DLPackExchangeAPIHeader,
}

/// The function table that a Python tensor *type* carries as `__dlpack_c_exchange_api__`, in a capsule named
/// `dlpack_exchange_api`, to exchange tensors without Python calls or stream synchronisation. It lives as long as the
/// process.
///
/// Functions return 0, or -1 with an error set. All but `dltensor_from_py_object_no_sync` must be there; they are
/// `Option`s because a null in a foreign table would otherwise be undefined behaviour.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLPackExchangeAPI {
    /// The version, to look at first.
    pub header: DLPackExchangeAPIHeader,
    /// Makes a new tensor of a prototype's type, shape and device.
    pub managed_tensor_allocator: Option<ManagedTensorAllocator>,
    /// Lends a Python tensor's memory.
    pub managed_tensor_from_py_object_no_sync: Option<ManagedTensorFromPyObject>,
    /// Makes a Python tensor of a lent tensor, which it takes.
    pub managed_tensor_to_py_object_no_sync: Option<ManagedTensorToPyObject>,
    /// Describes a Python tensor, for as long as the caller keeps control.
    pub dltensor_from_py_object_no_sync: Option<DLTensorFromPyObject>,
    /// The stream that the library works on at present.
    pub current_work_stream: Option<CurrentWorkStream>,
}

/// Takes a prototype, whose data and strides do not matter, the place for the new tensor, and a function that reports an error.
pub type ManagedTensorAllocator = unsafe extern "C" fn(
    prototype: *mut DLTensor,
    out: *mut *mut DLManagedTensorVersioned,
    error_ctx: *mut c_void,
    set_error: Option<SetError>,
) -> c_int;

/// Takes the context it was passed with, the name of a Python exception type and a message.
pub type SetError = unsafe extern "C" fn(error_ctx: *mut c_void, kind: *const c_char, message: *const c_char);

/// Takes a borrowed `PyObject *` and the place for the lent tensor.
pub type ManagedTensorFromPyObject =
    unsafe extern "C" fn(py_object: *mut c_void, out: *mut *mut DLManagedTensorVersioned) -> c_int;

/// Takes a lent tensor, which it keeps, and the place for the new `PyObject *`.
pub type ManagedTensorToPyObject =
    unsafe extern "C" fn(tensor: *mut DLManagedTensorVersioned, out_py_object: *mut *mut c_void) -> c_int;

/// Takes a borrowed `PyObject *` and the description to fill in.
pub type DLTensorFromPyObject = unsafe extern "C" fn(py_object: *mut c_void, out: *mut DLTensor) -> c_int;

/// Takes a device and the place for its stream, null on the CPU.
pub type CurrentWorkStream =
    unsafe extern "C" fn(device_type: i32, device_id: i32, out_current_stream: *mut *mut c_void) -> c_int;
