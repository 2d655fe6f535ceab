//! Everything this crate refuses.

use crate::dlpack::ElementType;
use crate::{DType, Device, MAX_RANK};

/// Why a type, a shape or a view was refused. Shapes are sizes in elements, strides steps in elements.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// A name that is no element type's.
    #[error("unknown dtype {input:?}: known are {}", DType::known())]
    UnknownDType {
        /// The name as given.
        input: String,
    },
    /// A dtype that is stored and moved, but not computed with.
    #[error("{dtype} has no arithmetic here: pass one of {}", DType::NUMERIC.iter().map(|d| d.name()).collect::<Vec<_>>().join(", "))]
    NotNumeric {
        /// The dtype.
        dtype: DType,
    },
    /// More dimensions than a shape holds.
    #[error("{rank} dimensions are more than the {MAX_RANK} supported")]
    RankTooHigh {
        /// The number of dimensions.
        rank: usize,
    },
    /// A shape whose size cannot be addressed.
    #[error(
        "a tensor of shape {shape:?} with elements of {element_size} bytes is larger than an address space"
    )]
    ShapeOverflow {
        /// The shape.
        shape: Vec<usize>,
        /// The size of one element in bytes.
        element_size: usize,
    },
    /// Strides that step further than can be addressed.
    #[error("strides {strides:?} over shape {shape:?} reach further than an address space")]
    StrideOverflow {
        /// The shape.
        shape: Vec<usize>,
        /// The strides.
        strides: Vec<isize>,
    },
    /// A slice that holds more or fewer elements than the shape.
    #[error("shape {shape:?} has {numel} elements but the slice has {len}")]
    LengthMismatch {
        /// The shape.
        shape: Vec<usize>,
        /// The number of elements of the shape.
        numel: usize,
        /// The number of elements of the slice.
        len: usize,
    },
    /// Memory that is smaller than the tensor.
    #[error("a tensor of shape {shape:?} needs {needed} bytes but the memory has {len}")]
    MemoryTooSmall {
        /// The shape.
        shape: Vec<usize>,
        /// The bytes of the tensor.
        needed: usize,
        /// The bytes of the memory.
        len: usize,
    },
    /// One stride for each dimension is needed.
    #[error("shape {shape:?} needs {} strides but got {}: {strides:?}", shape.len(), strides.len())]
    StrideCount {
        /// The shape.
        shape: Vec<usize>,
        /// The strides.
        strides: Vec<isize>,
    },
    /// Strides that leave the slice.
    #[error(
        "strides {strides:?} over shape {shape:?} reach elements {lowest} to {highest}, outside a slice of {len}"
    )]
    OutOfBounds {
        /// The shape.
        shape: Vec<usize>,
        /// The strides.
        strides: Vec<isize>,
        /// The lowest element reached, relative to the slice's first.
        lowest: isize,
        /// The highest element reached, relative to the slice's first.
        highest: isize,
        /// The number of elements of the slice.
        len: usize,
    },
    /// Strides of a mutable view by which two indices may reach the same element.
    #[error("a mutable tensor of shape {shape:?} may overlap itself with strides {strides:?}")]
    Overlap {
        /// The shape.
        shape: Vec<usize>,
        /// The strides.
        strides: Vec<isize>,
    },
    /// A null pointer to a tensor that has elements.
    #[error("null pointer for a tensor of shape {shape:?}")]
    NullPointer {
        /// The shape.
        shape: Vec<usize>,
    },
    /// Elements asked for as another type than theirs.
    #[error("the tensor's elements are {actual}, not {expected}")]
    DTypeMismatch {
        /// The type asked for.
        expected: DType,
        /// The tensor's type.
        actual: DType,
    },
    /// An access that needs row-major memory.
    #[error(
        "a tensor of shape {shape:?} with strides {strides:?} is not contiguous: \
         make it contiguous (row-major) first"
    )]
    NotContiguous {
        /// The shape.
        shape: Vec<usize>,
        /// The strides.
        strides: Vec<isize>,
    },
    /// An address that a Rust reference to the element type must not have.
    #[error("address {address:#x} is not aligned to the {align} bytes that {dtype} needs")]
    Misaligned {
        /// The tensor's type.
        dtype: DType,
        /// The address of its first element.
        address: usize,
        /// The alignment needed, in bytes.
        align: usize,
    },
    /// Memory that the CPU must not touch.
    #[error("the tensor is on {device}: copy it to the host to access its elements")]
    NotOnHost {
        /// Where the tensor is.
        device: Device,
    },
    /// A dimension that the tensor does not have.
    #[error("dimension {dim} of a tensor that has {rank}")]
    DimOutOfBounds {
        /// The dimension asked for, counted from 0.
        dim: usize,
        /// The number of dimensions.
        rank: usize,
    },
    /// A part that leaves its dimension.
    #[error("indices {start}..{start}+{len} leave dimension {dim}, whose size is {size}")]
    RangeOutOfBounds {
        /// The dimension.
        dim: usize,
        /// The first index asked for.
        start: usize,
        /// The number of indices asked for.
        len: usize,
        /// The size of the dimension.
        size: usize,
    },
    /// An index outside the shape, or with another number of coordinates.
    #[error("index {index:?} leaves a tensor of shape {shape:?}")]
    IndexOutOfBounds {
        /// The index.
        index: Vec<usize>,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A reshape to another number of elements.
    #[error("cannot reshape {shape:?} ({} elements) to {to:?} ({} elements)", count(shape), count(to))]
    ReshapeCount {
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The shape asked for.
        to: Vec<usize>,
    },
    /// A reshape that no strides can express.
    #[error(
        "cannot reshape {shape:?} with strides {strides:?} to {to:?} without a copy: \
         make it contiguous (row-major) first"
    )]
    ReshapeNeedsCopy {
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The tensor's strides.
        strides: Vec<isize>,
        /// The shape asked for.
        to: Vec<usize>,
    },
    /// Rows that blocks of a size do not fill.
    #[error("rows of {columns} elements do not divide into blocks of {block}")]
    BlockSize {
        /// The elements of a row.
        columns: usize,
        /// The elements of a block.
        block: usize,
    },
    /// A buffer of a quantiser that is longer or shorter than its shape.
    #[error("the buffer of {what} has {actual} entries instead of {expected}")]
    BufferLength {
        /// The number of elements in the buffer.
        what: &'static str,
        /// The number of entries that the shape needs.
        expected: usize,
        /// The number of entries it has.
        actual: usize,
    },
    /// An integer that is no scale layout's.
    #[error("unknown scale layout {code}: known are 0 (SWIZZLED_128x4), 1 (SWIZZLED_8x4) and 2 (LINEAR)")]
    UnknownScaleLayout {
        /// The integer as given.
        code: i64,
    },
    /// A DLPack tensor whose version lays it out in an unknown way.
    #[error("a tensor of DLPack {major}.{minor} cannot be read: only 1.x is known")]
    DlpackVersion {
        /// The major version.
        major: u32,
        /// The minor version.
        minor: u32,
    },
    /// A DLPack device that is neither the host nor a CUDA device.
    #[error(
        "DLPack device type {device_type} (ordinal {device_id}) is none of CPU (1), CUDA (2) and CUDA host (3)"
    )]
    UnknownDlpackDevice {
        /// DLPack's code of the kind of device.
        device_type: i32,
        /// The ordinal among the devices of the kind.
        device_id: i32,
    },
    /// An integer that DLPack cannot have as a CUDA device's ordinal.
    #[error("{ordinal} is no ordinal of a CUDA device: they are 0 to {}", i32::MAX)]
    DeviceOrdinal {
        /// The integer as given.
        ordinal: i64,
    },
    /// A number of dimensions below 0.
    #[error("a tensor cannot have {ndim} dimensions")]
    NegativeRank {
        /// The number of dimensions as given.
        ndim: i32,
    },
    /// Dimensions without sizes.
    #[error("null pointer for the sizes of {rank} dimensions")]
    NullShape {
        /// The number of dimensions.
        rank: usize,
    },
    /// A size below 0, or beyond an address space.
    #[error("dimension {dim} cannot have the size {size}")]
    SizeOutOfRange {
        /// The dimension, counted from 0.
        dim: usize,
        /// The size as given.
        size: i64,
    },
    /// An offset from a base address beyond an address space.
    #[error("{byte_offset} bytes behind address {address:#x} is outside the address space")]
    ByteOffset {
        /// The base address.
        address: usize,
        /// The offset in bytes.
        byte_offset: u64,
    },
    /// Elements of a type that has no [`DType`].
    #[error("elements of type {element_type} can be moved as bytes only: known are {}", DType::known())]
    NoDType {
        /// The type as DLPack denotes it.
        element_type: ElementType,
    },
    /// A write to memory that its owner lends to read.
    #[error("the tensor is read-only: copy it to write")]
    ReadOnly,
    /// An export that would lose the mark that a tensor is read-only.
    #[error("an unversioned DLPack tensor cannot be marked read-only: export a versioned one")]
    ReadOnlyUnversioned,
    /// A quantity of 0 or less where there must be some.
    #[error("the {what} is {value} but must be positive")]
    NotPositive {
        /// What the quantity is.
        what: &'static str,
        /// The quantity.
        value: i64,
    },
    /// Elements that do not fill bytes.
    #[error("elements of type {element_type} are no whole number of bytes")]
    PartialByte {
        /// The type as DLPack denotes it.
        element_type: ElementType,
    },
    /// A number of bytes that elements do not fill.
    #[error("the {what} of {bytes} bytes is no whole number of elements of {element_size} bytes")]
    PartialElement {
        /// What the bytes are.
        what: &'static str,
        /// The number of bytes.
        bytes: i64,
        /// The size of one element in bytes.
        element_size: usize,
    },
    /// Segments that begin before the former one ends.
    #[error("segments of {size} bytes overlap at a stride of {stride} bytes")]
    SegmentOverlap {
        /// The size of a segment in bytes.
        size: i64,
        /// The bytes from the start of one to the start of the next.
        stride: i64,
    },
    /// As [`Misaligned`](TensorError::Misaligned), of a type that may have no [`DType`].
    #[error("address {address:#x} is not aligned to the {align} bytes that {element_type} needs")]
    MisalignedElement {
        /// The type as DLPack denotes it.
        element_type: ElementType,
        /// The address of the first element.
        address: usize,
        /// The alignment needed, in bytes.
        align: usize,
    },
}

impl TensorError {
    /// Refuses a buffer that has another length than its shape.
    pub(crate) fn check_length(what: &'static str, expected: usize, actual: usize) -> Result<(), Self> {
        if expected == actual { Ok(()) } else { Err(TensorError::BufferLength { what, expected, actual }) }
    }
}

/// The number of elements of a shape that has been found addressable.
fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}
