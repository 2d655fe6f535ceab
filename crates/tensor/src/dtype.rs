//! The element types, named at run time.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::TensorError;

/// The type of a tensor's elements.
///
/// Those [with arithmetic](DType::NUMERIC) come first. The others are stored and moved, and named so that ranks which
/// exchange them know that they mean the same.
///
/// Text forms ([`Display`](fmt::Display), serde) use [`name`](DType::name); parsing also takes the names of NumPy
/// and PyTorch, in any case.
///
/// ```
/// use antiphon_tensor::DType;
///
/// assert_eq!("BFloat16".parse(), Ok(DType::BF16));
/// assert_eq!(DType::BF16.to_string(), "bf16");
/// assert_eq!(DType::BF16.size(), 2);
/// ```
// The discriminants are shared with kernels, other processes and Python: never renumber them. They start at 1 so
// that zeroed memory does not read as a type.
#[non_exhaustive]
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary32.
    F32 = 2,
    /// IEEE 754 binary16: 5 exponent bits, 10 fraction bits.
    F16 = 3,
    /// bfloat16: the upper half of a binary32, 8 exponent bits, 7 fraction bits.
    BF16 = 4,
    /// 64-bit two's complement.
    I64 = 5,
    /// 32-bit two's complement.
    I32 = 6,
    /// 8-bit two's complement.
    I8 = 7,
    /// 8-bit unsigned.
    U8 = 8,
    /// A truth value in a byte: 0 or 1. Stored only, as all that follow.
    Bool = 9,
    /// 16-bit two's complement.
    I16 = 10,
    /// 16-bit unsigned.
    U16 = 11,
    /// 32-bit unsigned.
    U32 = 12,
    /// 64-bit unsigned.
    U64 = 13,
    /// A pair of binary16: real and imaginary part.
    Complex32 = 14,
    /// A pair of binary32.
    Complex64 = 15,
    /// A pair of binary64.
    Complex128 = 16,
    /// OCP E4M3: 4 exponent bits, 3 fraction bits, no infinities.
    F8E4M3 = 17,
    /// E4M3 without negative zero.
    F8E4M3Fnuz = 18,
    /// OCP E5M2: 5 exponent bits, 2 fraction bits.
    F8E5M2 = 19,
    /// E5M2 without negative zero and infinities.
    F8E5M2Fnuz = 20,
    /// OCP E8M0: a power of two.
    F8E8M0 = 21,
    /// Two OCP E2M1 in a byte.
    F4E2M1x2 = 22,
}

impl DType {
    /// Every type, in the order of [`code`](DType::code).
    pub const ALL: &[DType] = &[
        DType::F64,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I64,
        DType::I32,
        DType::I8,
        DType::U8,
        DType::Bool,
        DType::I16,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::Complex32,
        DType::Complex64,
        DType::Complex128,
        DType::F8E4M3,
        DType::F8E4M3Fnuz,
        DType::F8E5M2,
        DType::F8E5M2Fnuz,
        DType::F8E8M0,
        DType::F4E2M1x2,
    ];

    /// The types that can be reduced, each of which is an [`Element`](crate::Element).
    pub const NUMERIC: &[DType] = DType::ALL.split_at(DType::U8 as usize).0;

    /// The size of one element in bytes.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            DType::Complex128 => 16,
            DType::F64 | DType::I64 | DType::U64 | DType::Complex64 => 8,
            DType::F32 | DType::I32 | DType::U32 | DType::Complex32 => 4,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F8E4M3 | DType::F8E4M3Fnuz | DType::F8E5M2 | DType::F8E5M2Fnuz | DType::F8E8M0 => 1,
            DType::F4E2M1x2 => 1,
        }
    }

    /// The canonical name, such as `bf16`.
    #[inline]
    pub const fn name(self) -> &'static str {
        self.names()[0]
    }

    /// Whether this is one of [`NUMERIC`](DType::NUMERIC).
    #[inline]
    pub const fn is_numeric(self) -> bool {
        self as u8 <= DType::U8 as u8
    }

    /// This type, if it [is numeric](DType::is_numeric).
    ///
    /// # Errors
    ///
    /// [`TensorError::NotNumeric`]
    #[inline]
    pub const fn numeric(self) -> Result<DType, TensorError> {
        if self.is_numeric() { Ok(self) } else { Err(TensorError::NotNumeric { dtype: self }) }
    }

    /// Whether this is a floating-point type with arithmetic.
    #[inline]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
    }

    /// The number that stands for this type outside Rust: in shared memory, kernels and Python. Stable for ever,
    /// never 0.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The type with this [`code`](DType::code), or `None` if there is none.
    #[inline]
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.iter().copied().find(|dtype| dtype.code() == code)
    }

    /// The canonical name, then the others that parsing accepts.
    const fn names(self) -> &'static [&'static str] {
        match self {
            DType::F64 => &["f64", "float64", "double"],
            DType::F32 => &["f32", "float32", "float"],
            DType::F16 => &["f16", "float16", "half"],
            DType::BF16 => &["bf16", "bfloat16"],
            DType::I64 => &["i64", "int64"],
            DType::I32 => &["i32", "int32"],
            DType::I8 => &["i8", "int8"],
            DType::U8 => &["u8", "uint8"],
            DType::Bool => &["bool"],
            DType::I16 => &["i16", "int16"],
            DType::U16 => &["u16", "uint16"],
            DType::U32 => &["u32", "uint32"],
            DType::U64 => &["u64", "uint64"],
            DType::Complex32 => &["complex32"],
            DType::Complex64 => &["complex64"],
            DType::Complex128 => &["complex128"],
            DType::F8E4M3 => &["float8_e4m3fn"],
            DType::F8E4M3Fnuz => &["float8_e4m3fnuz"],
            DType::F8E5M2 => &["float8_e5m2"],
            DType::F8E5M2Fnuz => &["float8_e5m2fnuz"],
            DType::F8E8M0 => &["float8_e8m0fnu"],
            DType::F4E2M1x2 => &["float4_e2m1fn_x2"],
        }
    }

    /// All names of all types, for the error that lists them.
    pub(crate) fn known() -> String {
        DType::ALL.iter().map(|dtype| dtype.names().join("/")).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = TensorError;

    /// Accepts the names of NumPy and PyTorch and the canonical ones, in any case; anything else is
    /// [`TensorError::UnknownDType`].
    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let named = |dtype: &DType| dtype.names().iter().any(|name| name.eq_ignore_ascii_case(input));
        DType::ALL
            .iter()
            .copied()
            .find(named)
            .ok_or_else(|| TensorError::UnknownDType { input: input.to_owned() })
    }
}

impl Serialize for DType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<str>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
