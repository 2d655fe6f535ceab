//! What an operation of a graph does.

use antiphon_operation::ReduceOp;
use serde::{Deserialize, Serialize};

use crate::{ids::TokenId, sym::SymExpr};

mod fused;
mod number;

pub use fused::{Fused, FusedArg, FusedOutput, Quantize};
use std::ops::Not;

/// What an operation does with its operands. In text its name is the variant's, and its fields are attributes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// An argument of the program.
    Input,
    /// A tensor that belongs to the program.
    Constant,
    /// A tensor of one number.
    Full {
        /// The number.
        #[serde(with = "number")]
        value: f64,
    },
    /// A function of each element. Halves are widened to f32 before and rounded after.
    Unary {
        /// Which one.
        op: Unary,
    },
    /// A function of two elements, with the usual broadcasting; of an element and a number where there is one operand.
    Binary {
        /// Which one.
        op: Binary,
        /// The number that stands for the second operand, or for the first if [`swapped`](Self::Binary::swapped).
        #[serde(default, with = "number::option", skip_serializing_if = "Option::is_none")]
        scalar: Option<f64>,
        /// Whether the number comes first.
        #[serde(default, skip_serializing_if = "Not::not")]
        swapped: bool,
    },
    /// Elements of another type, each rounded to nearest.
    Cast,
    /// A reduction over dimensions.
    Reduce {
        /// Which one.
        op: Reduction,
        /// Over which dimensions, ascending.
        dims: Vec<usize>,
        /// Whether they stay, with extent 1.
        #[serde(default, skip_serializing_if = "Not::not")]
        keepdim: bool,
    },
    /// The same memory, seen otherwise; the result's strides and offset say how.
    View {
        /// What the view does to the index.
        view: View,
    },
    /// The same elements in row-major order in memory of their own, perhaps of another shape.
    Copy,
    /// A product of two matrices, accumulated in f32 and rounded once.
    #[serde(rename = "matmul")]
    MatMul,
    /// The second operand's elements go into the first's memory, which is the result.
    Assign,
    /// An operation that this crate does not know.
    Opaque {
        /// Its name.
        target: String,
        /// What else it is given, as text: two operations with equal text and operands do the same.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        attributes: String,
        /// For each result: the operand whose memory it is, if it is one's.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        aliases: Vec<Option<Alias>>,
        /// Whether it does more than to compute its results: it is neither removed nor made one with another.
        #[serde(default, skip_serializing_if = "Not::not")]
        effect: bool,
        /// Whether it talks to other ranks: it keeps its place among the calls of all groups.
        #[serde(default, skip_serializing_if = "Not::not")]
        communicates: bool,
    },
    /// A collective begins. Its results are in flight until a [`Wait`](Self::Wait) for its token.
    Start {
        /// The collective.
        #[serde(flatten)]
        coll: Coll,
        /// What the wait names.
        token: TokenId,
    },
    /// Its operands, which are results of starts, are ready.
    Wait {
        /// The tokens of these starts, ascending, each once.
        tokens: Vec<TokenId>,
    },
    /// A collective that is complete, in the order of the stream, when the next operation begins.
    Sync {
        /// The collective.
        #[serde(flatten)]
        coll: Coll,
    },
    /// A fused all-reduce, complete as by [`Sync`](Self::Sync).
    Fused {
        /// What it does.
        #[serde(flatten)]
        fused: Fused,
    },
}

/// A result that lies in an operand's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alias {
    /// Which operand's.
    pub arg: usize,
    /// Whether the operation writes there, so that earlier values of the memory are no more.
    pub writes: bool,
}

/// A function of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are those of mathematics
pub enum Unary {
    Neg,
    Abs,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Exp,
    Exp2,
    Log2,
    Ceil,
    Sigmoid,
    Silu,
    Relu,
    Tanh,
}

/// A function of two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are those of mathematics
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Maximum,
    Minimum,
}

/// A reduction over dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are those of mathematics
pub enum Reduction {
    Sum,
    Mean,
    Amax,
}

/// What a view does to the index of an element.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum View {
    /// Other extents, the same row-major order.
    Reshape,
    /// Dimensions in another order.
    Permute(Vec<usize>),
    /// Extents of 1 that are repeated.
    Expand,
    /// Anything else that strides and an offset can say.
    Strided,
}

/// A collective. Its operands are its segments, of which it does the same with each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Coll {
    /// What it does.
    pub prim: Prim,
    /// The name of the group that does it.
    pub group: String,
    /// How it reduces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub red: Option<ReduceOp>,
    /// Whether its results lie where its operands are.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub in_place: bool,
    /// The rank that sends its tensor, in a broadcast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<u32>,
    /// Rows to each rank, in an uneven exchange.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sends: Option<Vec<SymExpr>>,
    /// Rows from each rank, in an uneven exchange.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receives: Option<Vec<SymExpr>>,
    /// The dimensions that are gathered and sharded, in [`Prim::ShardDimAllToAll`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dims: Option<[usize; 2]>,
}

impl Coll {
    /// A collective over a group that needs no more to be said.
    pub fn new(prim: Prim, group: impl Into<String>) -> Self {
        let group = group.into();
        Self { prim, group, red: None, in_place: false, root: None, sends: None, receives: None, dims: None }
    }

    /// A sum over a group.
    pub fn all_reduce(group: impl Into<String>, red: ReduceOp) -> Self {
        Self { red: Some(red), ..Self::new(Prim::AllReduce, group) }
    }

    /// Whether it is the out-of-place sum of one tensor.
    pub(crate) fn is_sum(&self) -> bool {
        self.prim == Prim::AllReduce && self.red == Some(ReduceOp::Sum) && !self.in_place
    }
}

/// What a collective does, of each of its segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Prim {
    /// The reduction of all ranks' tensors.
    AllReduce,
    /// All ranks' tensors, along dimension 0 in the order of the ranks.
    AllGather,
    /// This rank's rows of the reduction.
    ReduceScatter,
    /// Rows to and from each rank.
    AllToAll,
    /// The root's tensor.
    Broadcast,
    /// Gathered along one dimension, sharded along another.
    ShardDimAllToAll,
}

/// Where a result lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultMemory {
    /// In memory of its own.
    Fresh,
    /// In an operand's memory, which is as it was.
    Alias(usize),
    /// In an operand's memory, which is written.
    Write(usize),
}

impl Kind {
    /// Where result `index` lies.
    pub fn result_memory(&self, index: usize) -> ResultMemory {
        match self {
            Self::View { .. } => ResultMemory::Alias(0),
            Self::Assign => ResultMemory::Write(0),
            Self::Wait { .. } => ResultMemory::Write(index),
            Self::Start { coll, .. } | Self::Sync { coll } if coll.in_place => ResultMemory::Write(index),
            Self::Opaque { aliases, .. } => match aliases.get(index).copied().flatten() {
                None => ResultMemory::Fresh,
                Some(Alias { arg, writes: false }) => ResultMemory::Alias(arg),
                Some(Alias { arg, writes: true }) => ResultMemory::Write(arg),
            },
            _ => ResultMemory::Fresh,
        }
    }

    /// The collective, if it is one that is not fused.
    pub fn coll(&self) -> Option<&Coll> {
        match self {
            Self::Start { coll, .. } | Self::Sync { coll } => Some(coll),
            _ => None,
        }
    }

    /// The name of the group whose call it is.
    pub fn group(&self) -> Option<&str> {
        match self {
            Self::Fused { fused } => Some(&fused.group),
            _ => self.coll().map(|coll| coll.group.as_str()),
        }
    }

    /// Whether other ranks take part.
    pub fn communicates(&self) -> bool {
        self.group().is_some() || matches!(self, Self::Opaque { communicates: true, .. })
    }

    /// Whether it is kept though nobody uses its results.
    pub fn has_effect(&self) -> bool {
        let writes = |index: usize| matches!(self.result_memory(index), ResultMemory::Write(_));
        match self {
            Self::Input => true,
            Self::Opaque { effect, communicates, aliases, .. } => {
                *effect || *communicates || (0..aliases.len()).any(writes)
            }
            Self::Wait { .. } | Self::Assign => true,
            _ => self.communicates(),
        }
    }
}
