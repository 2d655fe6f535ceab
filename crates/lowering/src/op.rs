//! What an operation of a graph does.

use antiphon_operation::ReduceOp;
use serde::{Deserialize, Serialize};

use crate::{
    ids::TokenId,
    sym::SymExpr,
    types::{Element, Type},
    verify::F32,
};

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
        #[serde(default)]
        scalar: Option<f64>,
        /// Whether the number comes first.
        #[serde(default)]
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
        #[serde(default)]
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
        #[serde(default)]
        attributes: String,
        /// For each result: the operand whose memory it is, if it is one's.
        #[serde(default)]
        aliases: Vec<Option<Alias>>,
        /// Whether it does more than to compute its results: it is neither removed nor made one with another.
        #[serde(default)]
        effect: bool,
        /// Whether it talks to other ranks: it keeps its place among the calls of all groups.
        #[serde(default)]
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
    #[serde(default)]
    pub red: Option<ReduceOp>,
    /// Whether its results lie where its operands are.
    #[serde(default)]
    pub in_place: bool,
    /// Whose tensor it is, in a broadcast.
    #[serde(default)]
    pub root: Option<u32>,
    /// Rows to each rank, in an uneven exchange.
    #[serde(default)]
    pub sends: Option<Vec<SymExpr>>,
    /// Rows from each rank, in an uneven exchange.
    #[serde(default)]
    pub receives: Option<Vec<SymExpr>>,
    /// The dimensions that are gathered and sharded, in [`Prim::ShardDimAllToAll`].
    #[serde(default)]
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

/// A fused all-reduce: `crates/collectives`' `fusion` says what is computed.
///
/// Its operands are the tensor, then those of [`args`](Self::args), in their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fused {
    /// The name of the group.
    pub group: String,
    /// The operands behind the first.
    pub args: Vec<FusedArg>,
    /// The results, in the order of the operation's.
    pub outputs: Vec<FusedOutput>,
    /// What is added to the mean of the squares, if there is a norm.
    #[serde(default)]
    pub eps: Option<f64>,
    /// What is added to the norm's weight.
    #[serde(default)]
    pub weight_bias: f64,
    /// Whether the norm is rounded before its weight is multiplied, and once more after.
    #[serde(default)]
    pub round_before_weight: bool,
    /// How codes are scaled, if there are any.
    #[serde(default)]
    pub quantize: Quantize,
    /// The dequantisation scale of [`Quantize::Fp8`], where it is a number and no operand.
    #[serde(default)]
    pub scale: Option<f64>,
}

/// How E4M3 codes of a norm `n` are scaled: codes are of `n / scale`, saturated to ±448.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantize {
    /// With one scale, which is given.
    #[default]
    Fp8,
    /// With one for each row: `max(amax / 448, 1 / (512 · 448))` of its magnitudes.
    Fp8Tokens,
    /// With a power of two for each so many neighbours of a row: `max(amax / 448, 1e-10)` of theirs, rounded up.
    Fp8Groups(u32),
}

impl Quantize {
    /// The least scale of a row that codes are divided by.
    pub(crate) const LEAST_OF_ROW: f64 = 1.0 / (512.0 * 448.0);
    /// The same of a group.
    pub(crate) const LEAST_OF_GROUP: f64 = 1e-10;
    /// The largest magnitude of a code.
    pub(crate) const MOST: f64 = 448.0;

    /// How many scales a row of so many elements has, if they are results.
    pub fn scales_of(self, hidden: i64) -> Option<i64> {
        match self {
            Self::Fp8 => None,
            Self::Fp8Tokens => Some(1),
            Self::Fp8Groups(group) => {
                (group > 0 && hidden % i64::from(group) == 0).then(|| hidden / i64::from(group))
            }
        }
    }
}

/// An operand of a fused all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FusedArg {
    /// `T [.., hidden]`, added to the sum.
    Residual,
    /// `T [hidden]`, the norm's.
    Weight,
    /// `f32` of one element: the dequantisation scale of FP8 codes.
    Scale,
}

/// A result of a fused all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FusedOutput {
    /// `T [.., hidden]`: the sum over the ranks.
    Sum,
    /// `T [.., hidden]`: the sum with the residual.
    Residual,
    /// `T [.., hidden]`: its norm.
    Norm,
    /// `f32 [.., 1]`: one over the root of the mean of the squares, for a backward pass.
    InverseRms,
    /// `e4m3 [.., hidden]`: the norm quantised.
    Codes,
    /// `f32`, `[.., 1]` or `[.., hidden / group]`: what codes are multiplied with, unless that is given.
    Scales,
}

impl FusedOutput {
    /// Its name in text and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Residual => "residual",
            Self::Norm => "norm",
            Self::InverseRms => "inverse_rms",
            Self::Codes => "codes",
            Self::Scales => "scales",
        }
    }

    /// Whether it is made of the norm.
    pub fn needs_norm(self) -> bool {
        !matches!(self, Self::Sum | Self::Residual)
    }
}

impl Fused {
    /// The elements, and the extent of a row, of a result for an input of this type; none if it has no such result.
    pub fn row(&self, output: FusedOutput, input: &Type) -> Option<(Element, SymExpr)> {
        Some(match output {
            FusedOutput::InverseRms => (F32, 1.into()),
            FusedOutput::Codes => (Element::E4m3, input.last()),
            FusedOutput::Scales => (F32, self.quantize.scales_of(input.last().as_constant()?)?.into()),
            _ => (input.dtype, input.last()),
        })
    }
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
            Self::Opaque { effect, aliases, .. } => *effect || (0..aliases.len()).any(writes),
            Self::Wait { .. } | Self::Assign => true,
            _ => self.communicates(),
        }
    }
}
