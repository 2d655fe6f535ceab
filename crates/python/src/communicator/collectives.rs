//! The collectives: methods that wait, and `start_` methods that return a handle.

use antiphon::operation::Operation;
use pyo3::{prelude::*, types::PyList};

use super::{
    Communicator,
    prepare::{call, reducing, rows},
};
use crate::{
    arguments::{Argument, Count, Given},
    error::Result,
    handle::Handle,
    operand::Usage,
    stream::RawStream,
};

/// Defines the two methods of each operation, from its arguments, its input and its call. Both methods take the arguments and
/// `out`; the one that waits takes a `stream` too.
macro_rules! operations {
    ($(
        $name:ident, $start:ident($($argument:ident: $type:ty $(= $default:tt)?),+) { $input:expr, $call:expr }
    )+) => {
        #[pymethods]
        impl Communicator {
            $(
                #[doc = stub!(Communicator.$name)]
                #[pyo3(signature = ($($argument $(= $default)?,)+ *, out = None, stream = None))]
                fn $name<'py>(
                    &self,
                    py: Python<'py>,
                    $($argument: $type,)+
                    out: Given<'_, 'py>,
                    stream: Option<RawStream>,
                ) -> Result<Option<Bound<'py, PyAny>>> {
                    self.run(py, self.prepare($call, $input, out, Usage::Call(stream))?, stream)
                }

                #[doc = stub!(Communicator.$start)]
                #[pyo3(signature = ($($argument $(= $default)?,)+ *, out = None))]
                fn $start<'py>(
                    &self,
                    py: Python<'py>,
                    $($argument: $type,)+
                    out: Given<'_, 'py>,
                ) -> Result<Handle> {
                    self.start(py, self.prepare($call, $input, out, Usage::Started)?)
                }
            )+
        }
    };
}

operations! {
    all_gather, start_all_gather(x: Argument<'_, 'py>) {
        Some(x), call(Operation::AllGather)
    }
    reduce_scatter, start_reduce_scatter(x: Argument<'_, 'py>, op: Given<'_, 'py> = None) {
        Some(x), reducing(Operation::ReduceScatter, op)?
    }
    all_to_all, start_all_to_all(x: Argument<'_, 'py>) {
        Some(x), call(Operation::AllToAll)
    }
    all_to_all_v, start_all_to_all_v(x: Argument<'_, 'py>, sends: Vec<Count>, receives: Vec<Count>) {
        Some(x), call(Operation::AllToAllV).with_counts(rows(&sends)).with_receives(rows(&receives))
    }
    all_gather_v, start_all_gather_v(x: Argument<'_, 'py>, counts: Vec<Count>) {
        Some(x), call(Operation::AllGatherV).with_counts(rows(&counts))
    }
    reduce_scatter_v, start_reduce_scatter_v(
        x: Argument<'_, 'py>, counts: Vec<Count>, op: Given<'_, 'py> = None
    ) {
        Some(x), reducing(Operation::ReduceScatterV, op)?.with_counts(rows(&counts))
    }
    broadcast, start_broadcast(x: Given<'_, 'py>, root: i64 = 0) {
        x, call(Operation::Broadcast).with_root(Count::try_from(root)?.0)
    }
    reduce, start_reduce(x: Argument<'_, 'py>, op: Given<'_, 'py> = None, root: i64 = 0) {
        Some(x), reducing(Operation::Reduce, op)?.with_root(Count::try_from(root)?.0)
    }
    gather, start_gather(x: Argument<'_, 'py>, root: i64 = 0) {
        Some(x), call(Operation::Gather).with_root(Count::try_from(root)?.0)
    }
    scatter, start_scatter(x: Given<'_, 'py>, root: i64 = 0) {
        x, call(Operation::Scatter).with_root(Count::try_from(root)?.0)
    }
}

#[pymethods]
impl Communicator {
    #[doc = stub!("Communicator.all_reduce")]
    #[pyo3(signature = (x, op = None, *, out = None, algorithm = None, registered = false, stream = None))]
    #[allow(clippy::too_many_arguments)] // of which Python names the last four
    fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        algorithm: Option<&str>,
        registered: bool,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let usage = Usage::Call(stream);
        self.run(py, self.prepare_all_reduce(x, op, out, algorithm, registered, usage)?, stream)
    }

    #[doc = stub!("Communicator.start_all_reduce")]
    #[pyo3(signature = (x, op = None, *, out = None, algorithm = None))]
    fn start_all_reduce<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        algorithm: Option<&str>,
    ) -> Result<Handle> {
        self.start(py, self.prepare_all_reduce(x, op, out, algorithm, false, Usage::Started)?)
    }

    #[doc = stub!("Communicator.all_gather_list")]
    #[pyo3(signature = (xs, *, out = None, stream = None))]
    fn all_gather_list<'py>(
        &self,
        py: Python<'py>,
        xs: Vec<Bound<'py, PyAny>>,
        out: Option<Vec<Bound<'py, PyAny>>>,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyList>> {
        self.run_list(py, call(Operation::AllGather), &xs, out.as_deref(), stream)
    }

    #[doc = stub!("Communicator.reduce_scatter_list")]
    #[pyo3(signature = (xs, op = None, *, out = None, stream = None))]
    fn reduce_scatter_list<'py>(
        &self,
        py: Python<'py>,
        xs: Vec<Bound<'py, PyAny>>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<Vec<Bound<'py, PyAny>>>,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyList>> {
        self.run_list(py, reducing(Operation::ReduceScatter, op)?, &xs, out.as_deref(), stream)
    }
}
