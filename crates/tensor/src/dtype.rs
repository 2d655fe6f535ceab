//! The element types, named at run time.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::TensorError;

/// The type of a tensor's elements.
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
}

impl DType {
    /// Every type, in the order of [`code`](DType::code).
    pub const ALL: &[DType] =
        &[DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I8, DType::U8];

    /// The size of one element in bytes.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::U8 => 1,
        }
    }

    /// The canonical name, such as `bf16`.
    #[inline]
    pub const fn name(self) -> &'static str {
        self.names()[0]
    }

    /// Whether this is a floating-point type.
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

    /// Accepts `f64`, `float64`, `double`, `f32`, `float32`, `float`, `f16`, `float16`, `half`, `bf16`, `bfloat16`,
    /// `i64`, `int64`, `i32`, `int32`, `i8`, `int8`, `u8` and `uint8`, in any case; anything else is
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
