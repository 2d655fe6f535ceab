//! What a value is: elements, sizes, strides, and what memory it lies in.

use std::{fmt, str::FromStr};

use antiphon_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::{
    places::{Places, row_major},
    sym::SymExpr,
};

/// The type of a value's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// A type that collectives reduce and the interpreter computes with.
    Number(DType),
    /// Truth values, a byte each.
    Bool,
    /// FP8 codes of `antiphon_tensor::E4M3`, a byte each.
    E4m3,
    /// Elements of this number of bytes, which nothing here computes with.
    Opaque(u8),
}

impl Element {
    /// The size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::Number(dtype) => dtype.size(),
            Self::Bool | Self::E4m3 => 1,
            Self::Opaque(size) => size.into(),
        }
    }

    /// The dtype, if collectives reduce such elements.
    pub fn number(self) -> Option<DType> {
        match self {
            Self::Number(dtype) => Some(dtype),
            _ => None,
        }
    }

    /// Whether these are floating-point numbers that [`Numerics::Close`](crate::Numerics::Close) may round less often.
    pub fn is_float(self) -> bool {
        self.number().is_some_and(DType::is_float)
    }
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        Self::Number(dtype)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(dtype) => dtype.fmt(f),
            Self::Bool => f.write_str("bool"),
            Self::E4m3 => f.write_str("e4m3"),
            Self::Opaque(size) => write!(f, "opaque{size}"),
        }
    }
}

impl FromStr for Element {
    type Err = String;

    /// Takes the names of this crate and of torch.
    fn from_str(text: &str) -> Result<Self, String> {
        let opaque = |size: u8| Ok(Self::Opaque(size));
        match text {
            "bool" => Ok(Self::Bool),
            "e4m3" | "float8_e4m3fn" => Ok(Self::E4m3),
            "float8_e5m2" | "float8_e4m3fnuz" | "float8_e5m2fnuz" | "float8_e8m0fnu" | "opaque1" => opaque(1),
            "int16" | "uint16" | "opaque2" => opaque(2),
            "uint32" | "complex32" | "opaque4" => opaque(4),
            "uint64" | "complex64" | "opaque8" => opaque(8),
            "complex128" | "opaque16" => opaque(16),
            _ => text.parse().map(Self::Number).map_err(|_| format!("{text:?} is no element type")),
        }
    }
}

impl Serialize for Element {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl serde::de::Visitor<'_> for Name {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an element type")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Element, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Name)
    }
}

/// The type of a value: elements, and where they stand in their storage.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Type {
    /// The type of its elements.
    pub dtype: Element,
    /// The extents.
    pub shape: Vec<SymExpr>,
    /// How many elements apart neighbours of each dimension are; row-major if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<SymExpr>>,
    /// How many elements the first one is from the storage's beginning.
    #[serde(default = "zero", skip_serializing_if = "is_zero")]
    pub offset: SymExpr,
}

fn zero() -> SymExpr {
    SymExpr::constant(0)
}

fn is_zero(offset: &SymExpr) -> bool {
    *offset == zero()
}

impl Type {
    /// A row-major value that begins where its storage does.
    pub fn new(dtype: impl Into<Element>, shape: impl IntoIterator<Item = impl Into<SymExpr>>) -> Self {
        let shape = shape.into_iter().map(Into::into).collect();
        Self { dtype: dtype.into(), shape, strides: None, offset: zero() }
    }

    /// The same elements and extents, row-major.
    pub fn dense(&self) -> Self {
        Self { strides: None, offset: zero(), ..self.clone() }
    }

    /// Whether it is row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        Some(strides) == self.row_major().as_ref()
    }

    /// The strides of a row-major tensor of this shape, unless they overflow.
    pub fn row_major(&self) -> Option<Vec<SymExpr>> {
        row_major(&self.shape)
    }

    /// How many elements there are, unless that overflows.
    pub fn numel(&self) -> Option<SymExpr> {
        SymExpr::product(&self.shape)
    }

    /// How many bytes the elements take, without gaps.
    pub fn bytes(&self) -> Option<SymExpr> {
        self.numel()?.times(&(self.dtype.size() as i64).into())
    }

    /// How many elements the memory has at least in which this lies: up to the last element, with the offset and all gaps. None if
    /// that overflows.
    pub fn reach(&self) -> Option<SymExpr> {
        match &self.strides {
            None => self.offset.plus(&self.numel()?),
            Some(_) => Places::of(self)?.reach(),
        }
    }

    /// The last extent; 1 for a scalar.
    pub fn last(&self) -> SymExpr {
        self.shape.last().cloned().unwrap_or(SymExpr::constant(1))
    }

    /// The product of all extents but the last, unless that overflows.
    pub fn rows(&self) -> Option<SymExpr> {
        SymExpr::product(&self.shape[..self.shape.len().saturating_sub(1)])
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |list: &[SymExpr]| list.iter().map(SymExpr::to_string).collect::<Vec<_>>().join(",");
        write!(f, "{}[{}]", self.dtype, list(&self.shape))?;
        if let Some(strides) = self.strides.as_ref().filter(|_| !self.is_contiguous()) {
            write!(f, " strides [{}]", list(strides))?;
        }
        if !is_zero(&self.offset) {
            write!(f, " offset {}", self.offset)?;
        }
        Ok(())
    }
}

/// The class of memory in which a value lies that has its own storage.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Class {
    /// The caller's: an input.
    External,
    /// The graph's own.
    #[default]
    Owned,
    /// A constant of the program.
    Const,
    /// Memory that peers can reach, at one offset on all ranks.
    Comm(CommReq),
}

/// What communication needs of a storage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommReq {
    /// The heap, which all groups share that use the storage.
    pub domain: String,
    /// The groups whose calls use it, in order.
    pub groups: Vec<String>,
    /// Whether calls read it, write it, or both.
    pub roles: Roles,
}

/// What calls do with a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Roles {
    /// They read it.
    In,
    /// They write it.
    Out,
    /// They do both.
    InOut,
}
