//! The arrays that each collective needs on this rank.

use antiphon::{
    collectives::all_reduce::{Algorithm, AllReduceOptions},
    operation::{InPlace, Operation, Root},
    prelude::{DType, FabricError, ReduceOp},
    session::REDUCED,
    tensor::dlpack::ElementType,
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    intern,
    prelude::*,
    types::PyString,
};

use super::Communicator;
use crate::{
    arguments::{Count, DTypeName, Given, Prepared, prepare, prepare_input, prepare_output},
    call::What,
    error::Result,
    operand::{Usage, refuse_gradient},
};

/// An operator as its name, in any case; as the enum, whose values are the names; or as torch's.
pub(super) fn reduce_op(op: Option<&Bound<'_, PyAny>>) -> PyResult<ReduceOp> {
    let Some(op) = op else { return Ok(ReduceOp::Sum) };
    let unknown = |e: antiphon::device::UnknownReduceOp| PyValueError::new_err(e.to_string());
    match op.cast::<PyString>() {
        Ok(name) => name.to_cow()?.parse().map_err(unknown),
        Err(_) => match torch_name(op)?.as_deref() {
            Some("PRODUCT") => Ok(ReduceOp::Prod),
            Some(name) => name.parse().map_err(unknown),
            None => {
                let known = "a name such as \"sum\", an antiphon.ReduceOp or a torch.distributed.ReduceOp";
                Err(PyTypeError::new_err(format!("op is {op:?}: pass {known}")))
            }
        },
    }
}

/// The name of an operator of `torch.distributed`: a member of its enum, or an object that holds one.
fn torch_name(op: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    let py = op.py();
    let module = op.get_type().module()?;
    if !module.to_cow()?.starts_with("torch.") {
        return Ok(None);
    }
    let member = op.getattr_opt(intern!(py, "op"))?.unwrap_or_else(|| op.clone());
    member.getattr_opt(intern!(py, "name"))?.map(|name| name.extract()).transpose()
}

pub(super) fn algorithm(name: &str) -> PyResult<Algorithm> {
    Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
        let known = Algorithm::ALL.map(Algorithm::name).join(", ");
        PyValueError::new_err(format!("unknown algorithm {name:?}: known are {known}"))
    })
}

/// The kernels of these dtypes by these operators: of all dtypes, and sums, unless given.
pub(super) fn kernels(
    dtypes: Option<Vec<DTypeName>>,
    ops: Option<Vec<Bound<'_, PyAny>>>,
) -> Result<Vec<(DType, ReduceOp)>> {
    let find = |DTypeName(name): DTypeName| {
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

/// Counts of rows.
pub(super) fn rows(counts: &[Count]) -> Vec<usize> {
    counts.iter().map(|count| count.0).collect()
}

/// An operation with the usual arguments.
pub(super) fn call(operation: Operation) -> What {
    What::new(operation)
}

/// An operation that reduces.
pub(super) fn reducing(operation: Operation, op: Given<'_, '_>) -> PyResult<What> {
    Ok(call(operation).with_op(reduce_op(op)?))
}

impl Communicator {
    /// An operation on this rank, which reads and writes what its row says. The output has the shape that follows, if the caller
    /// gave none; where the root's array may be written over by what others get, it is the array itself.
    pub(super) fn prepare<'py>(
        &self,
        what: What,
        input: Given<'_, 'py>,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let (operation, row) = (what.operation, what.operation.row());
        [input, out].into_iter().flatten().try_for_each(|array| refuse_gradient(array, row.name))?;
        if row.root.is_some() && what.root >= self.world_size {
            return Err(FabricError::no_such_rank("root", what.root, self.world_size).into());
        }
        let out = match (row.in_place, row.root) {
            (InPlace::Same, Some(Root::Gives)) => out.or(input),
            _ => out,
        };
        match (what.needs_input(self.rank).then_some(input), what.needs_output(self.rank)) {
            (Some(Some(input)), true) => prepare(what, input, out, (self.rank, self.world_size), usage),
            (Some(Some(input)), false) => prepare_input(what, input, usage),
            (Some(None), _) => {
                Err(PyTypeError::new_err(format!("{operation}: the root must pass the array")).into())
            }
            (None, _) => match out {
                Some(out) => prepare_output(what, out, usage),
                None => {
                    Err(PyTypeError::new_err(format!("{operation}: all but the root must pass out=")).into())
                }
            },
        }
    }

    pub(super) fn prepare_all_reduce<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        op: Given<'_, 'py>,
        out: Given<'_, 'py>,
        chosen: Option<&str>,
        registered: bool,
        usage: Usage,
    ) -> Result<Prepared<'py>> {
        let what = reducing(Operation::AllReduce, op)?;
        let options = AllReduceOptions { algorithm: chosen.map(algorithm).transpose()?, registered };
        self.prepare(what.with_algorithm(options.number()), Some(input), out, usage)
    }
}
