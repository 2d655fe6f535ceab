//! What a rewrite may change of numbers, and how numbers are rounded.

use antiphon_tensor::{DType, Element as _, bf16, f16};
use serde::{Deserialize, Serialize};

/// How much a rewrite may change what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// Every rounding stays where it was. Only the order in which a row is summed is free.
    Same,
    /// Roundings may be dropped, or come in another order; the report says by how much a result may differ.
    #[default]
    Close,
}

/// A number rounded to a type.
pub(crate) fn rounded(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F64 => value,
        DType::F32 => f64::from(value as f32),
        DType::F16 => <f16 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::BF16 => <bf16 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::I64 => <i64 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::I32 => <i32 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::I8 => <i8 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::U8 => <u8 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        _ => value,
    }
}

/// An integer in as many bits as its type has.
pub(crate) fn wrapped(dtype: DType, value: i64) -> i64 {
    match dtype {
        DType::I32 => (value as i32).into(),
        DType::I8 => (value as i8).into(),
        DType::U8 => (value as u8).into(),
        _ => value,
    }
}
