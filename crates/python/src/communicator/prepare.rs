//! What each collective needs of its arrays, on this rank.

use antiphon::{
    collectives::all_reduce::Algorithm,
    prelude::{DType, ReduceOp},
    tensor::dlpack::ElementType,
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::PyString,
};

use super::Communicator;
use crate::{
    arguments::{Count, Given, Prepared, prepare, prepare_input, prepare_output},
    call::Kind,
    cuda::REDUCED,
    error::Result,
    operand::{Operand, Usage},
};

/// An operator as its name or its enum, whose values are the names.
fn reduce_op(op: Option<&Bound<'_, PyAny>>) -> PyResult<ReduceOp> {
    let Some(op) = op else { return Ok(ReduceOp::Sum) };
    let name = op.cast::<PyString>().map_err(|_| {
        PyTypeError::new_err(format!("op is {op:?}: pass a name such as \"sum\", or an antiphon.ReduceOp"))
    })?;
    name.to_cow()?
        .parse()
        .map_err(|e: antiphon::device::UnknownReduceOp| PyValueError::new_err(e.to_string()))
}

pub(super) fn algorithm(name: &str) -> PyResult<Algorithm> {
    Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
        let known = Algorithm::ALL.map(Algorithm::name).join(", ");
        PyValueError::new_err(format!("unknown algorithm {name:?}: known are {known}"))
    })
}

/// The kernels of these dtypes by these operators: of all dtypes, and sums, unless given.
pub(super) fn kernels(
    dtypes: Option<Vec<String>>,
    ops: Option<Vec<Bound<'_, PyAny>>>,
) -> Result<Vec<(DType, ReduceOp)>> {
    let find = |name: String| {
        let found = REDUCED.into_iter().find(|dtype| ElementType::from(*dtype).to_string() == name);
        found.ok_or_else(|| {
            PyValueError::new_err(format!(
                "{name:?} is not reduced on CUDA, only float32, float16 and bfloat16"
            ))
        })
    };
    let dtypes = match dtypes {
        None => REDUCED.to_vec(),
        Some(names) => names.into_iter().map(find).collect::<PyResult<_>>()?,
    };
    let ops = match ops {
        None => vec![ReduceOp::Sum],
        Some(ops) => ops.iter().map(|op| reduce_op(Some(op))).collect::<PyResult<_>>()?,
    };
    Ok(dtypes.iter().flat_map(|&dtype| ops.iter().map(move |&op| (dtype, op))).collect())
}

impl Communicator {
    pub(super) fn check_root(&self, root: usize) -> Result<bool> {
        if root < self.world_size {
            return Ok(root == self.rank);
        }
        let text = format!("root rank {root} is not below the world size {}", self.world_size);
        Err(PyValueError::new_err(text).into())
    }

    /// An operation on this rank, whose output has the shape that its row says, if the caller gave none.
    fn prepare<'py>(
        &self,
        kind: Kind,
        input: &Bound<'py, PyAny>,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let operation = kind.operation();
        prepare(kind, input, out, (self.rank, self.world_size), usage, |shape| {
            let output = operation.output_shape(shape, self.world_size);
            Ok(output.map_err(|e| PyValueError::new_err(e.to_string()))?)
        })
    }

    pub(super) fn prepare_all_reduce<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Given<'_, 'py>,
        chosen: Option<&str>,
        registered: bool,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let (op, chosen) = (reduce_op(op)?, chosen.map(algorithm).transpose()?);
        let kind =
            if registered { Kind::AllReduceRegistered(op, chosen) } else { Kind::AllReduce(op, chosen) };
        self.prepare(kind, input, out, usage)
    }

    pub(super) fn prepare_all_gather<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        self.prepare(Kind::AllGather, input, out, usage)
    }

    pub(super) fn prepare_reduce_scatter<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        self.prepare(Kind::ReduceScatter(reduce_op(op)?), input, out, usage)
    }

    pub(super) fn prepare_all_to_all<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        self.prepare(Kind::AllToAll, input, out, usage)
    }

    pub(super) fn prepare_all_to_all_v<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        sends: &[Count],
        receives: &[Count],
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        // Rows become elements, of which a type without a name has several to the byte count.
        let read = Operand::import(input, "the input", Usage::Call(None))?;
        let whole: usize = read.shape().iter().skip(1).product();
        let scale = whole * read.units();
        let scaled = |rows: &[Count]| rows.iter().map(|rows| rows.0.saturating_mul(scale)).collect();
        let kind = Kind::AllToAllV(scaled(sends), scaled(receives));
        let total = receives.iter().fold(0usize, |sum, rows| sum.saturating_add(rows.0));
        prepare(kind, input, out, (self.rank, self.world_size), usage, |shape| {
            Ok([&[total], shape.get(1..).unwrap_or_default()].concat())
        })
    }

    pub(super) fn prepare_broadcast<'py>(
        &self,
        array: Given<'_, 'py>,
        Count(root): Count,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let kind = Kind::Broadcast(root);
        match (self.check_root(root)?, array, out) {
            (true, Some(array), out) => self.prepare(kind, array, out.or(Some(array)), usage),
            (false, _, Some(out)) | (false, Some(out), None) => prepare_output(kind, out, usage),
            (_, None, _) => Err(PyTypeError::new_err("broadcast: pass the array").into()),
        }
    }

    pub(super) fn prepare_reduce<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        Count(root): Count,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let kind = Kind::Reduce(reduce_op(op)?, root);
        match self.check_root(root)? {
            true => self.prepare(kind, input, out, usage),
            false => prepare_input(kind, input, usage),
        }
    }

    pub(super) fn prepare_gather<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        Count(root): Count,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let kind = Kind::Gather(root);
        match self.check_root(root)? {
            true => self.prepare(kind, input, out, usage),
            false => prepare_input(kind, input, usage),
        }
    }

    pub(super) fn prepare_scatter<'py>(
        &self,
        input: Given<'_, 'py>,
        Count(root): Count,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let kind = Kind::Scatter(root);
        match (self.check_root(root)?, input, out) {
            (true, Some(input), out) => self.prepare(kind, input, out, usage),
            (false, _, Some(out)) => prepare_output(kind, out, usage),
            (true, None, _) => Err(PyTypeError::new_err("scatter: the root must pass the array").into()),
            (false, _, None) => Err(PyTypeError::new_err("scatter: all but the root must pass out=").into()),
        }
    }
}
