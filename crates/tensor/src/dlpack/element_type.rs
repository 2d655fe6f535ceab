//! The types of elements that other libraries have.

use std::fmt;

use super::sys::DLDataType;
use crate::DType;

/// The type of an element as DLPack denotes it: more types than a [`DType`] can name, to carry and to report.
///
/// ```
/// use antiphon_tensor::DType;
/// use antiphon_tensor::dlpack::ElementType;
///
/// assert_eq!(ElementType::from(DType::BF16).to_string(), "bfloat16");
/// let fp8 = ElementType::named("float8_e4m3fn").unwrap();
/// assert_eq!((fp8.dtype(), fp8.bytes()), (Some(DType::F8E4M3), Some(1)));
/// assert_eq!(ElementType::new(99, 8, 1).to_string(), "code 99, 8 bits, 1 lanes");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ElementType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// The types that have a name, which is PyTorch's and that of `ml_dtypes`, with the numbers of `DLDataType`.
const NAMED: &[(&str, ElementType)] = &[
    ("int8", ElementType::new(0, 8, 1)),
    ("int16", ElementType::new(0, 16, 1)),
    ("int32", ElementType::new(0, 32, 1)),
    ("int64", ElementType::new(0, 64, 1)),
    ("uint8", ElementType::new(1, 8, 1)),
    ("uint16", ElementType::new(1, 16, 1)),
    ("uint32", ElementType::new(1, 32, 1)),
    ("uint64", ElementType::new(1, 64, 1)),
    ("float16", ElementType::new(2, 16, 1)),
    ("float32", ElementType::new(2, 32, 1)),
    ("float64", ElementType::new(2, 64, 1)),
    ("bfloat16", ElementType::new(4, 16, 1)),
    ("complex32", ElementType::new(5, 32, 1)),
    ("complex64", ElementType::new(5, 64, 1)),
    ("complex128", ElementType::new(5, 128, 1)),
    ("bool", ElementType::new(6, 8, 1)),
    ("float8_e3m4", ElementType::new(7, 8, 1)),
    ("float8_e4m3", ElementType::new(8, 8, 1)),
    ("float8_e4m3b11fnuz", ElementType::new(9, 8, 1)),
    ("float8_e4m3fn", ElementType::new(10, 8, 1)),
    ("float8_e4m3fnuz", ElementType::new(11, 8, 1)),
    ("float8_e5m2", ElementType::new(12, 8, 1)),
    ("float8_e5m2fnuz", ElementType::new(13, 8, 1)),
    ("float8_e8m0fnu", ElementType::new(14, 8, 1)),
    ("float6_e2m3fn", ElementType::new(15, 6, 1)),
    ("float6_e3m2fn", ElementType::new(16, 6, 1)),
    ("float4_e2m1fn", ElementType::new(17, 4, 1)),
    ("float4_e2m1fn_x2", ElementType::new(17, 4, 2)),
];

impl ElementType {
    /// The type with these numbers of a [`DLDataType`]. Any are allowed.
    pub const fn new(code: u8, bits: u8, lanes: u16) -> Self {
        ElementType { code, bits, lanes }
    }

    /// The type that PyTorch or `ml_dtypes` calls by this name, such as `float8_e4m3fn`, or `None` if neither does.
    pub fn named(name: &str) -> Option<Self> {
        NAMED.iter().find(|(known, _)| *known == name).map(|&(_, element_type)| element_type)
    }

    /// The name that [`named`](ElementType::named) takes, or `None` if there is none.
    pub fn name(self) -> Option<&'static str> {
        NAMED.iter().find(|(_, known)| *known == self).map(|&(name, _)| name)
    }

    /// The type that this crate names, or `None` if it does not.
    pub fn dtype(self) -> Option<DType> {
        DType::ALL.iter().copied().find(|&dtype| ElementType::from(dtype) == self)
    }

    /// Whether elements are complex numbers.
    pub const fn is_complex(self) -> bool {
        self.code == DLDataType::COMPLEX
    }

    /// The size of one element, all its lanes together, in bytes; `None` if that is no whole number, or nothing.
    pub const fn bytes(self) -> Option<usize> {
        let bits = self.bits as usize * self.lanes as usize;
        if bits > 0 && bits.is_multiple_of(8) { Some(bits / 8) } else { None }
    }

    /// The most bytes that elements take each, for bounds: at least 1.
    pub(super) const fn bytes_at_most(self) -> usize {
        let bits = self.bits as usize * self.lanes as usize;
        if bits == 0 { 1 } else { bits.div_ceil(8) }
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        let integer = |code| ElementType::new(code, 8 * dtype.size() as u8, 1);
        match dtype {
            DType::I64 | DType::I32 | DType::I16 | DType::I8 => integer(DLDataType::INT),
            DType::U64 | DType::U32 | DType::U16 | DType::U8 => integer(DLDataType::UINT),
            DType::F64 | DType::F32 | DType::F16 => integer(DLDataType::FLOAT),
            DType::BF16 => integer(DLDataType::BFLOAT),
            // Their names are those of the table.
            other => ElementType::named(other.name()).expect("the table has it"),
        }
    }
}

impl From<DLDataType> for ElementType {
    fn from(DLDataType { code, bits, lanes }: DLDataType) -> Self {
        ElementType { code, bits, lanes }
    }
}

impl From<ElementType> for DLDataType {
    fn from(ElementType { code, bits, lanes }: ElementType) -> Self {
        DLDataType { code, bits, lanes }
    }
}

impl fmt::Display for ElementType {
    /// Writes the [`name`](ElementType::name), or the numbers if there is none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.pad(name),
            None => write!(f, "code {}, {} bits, {} lanes", self.code, self.bits, self.lanes),
        }
    }
}
