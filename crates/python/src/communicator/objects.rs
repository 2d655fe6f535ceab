//! Bytes and pickled objects, exchanged among all ranks.

use antiphon::prelude::FabricError;
use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    pybacked::PyBackedBytes,
    types::{PyBytes, PyList},
};

use super::Communicator;
use crate::{arguments::Count, error::Result, interrupt};

#[pymethods]
impl Communicator {
    #[doc = stub!("Communicator.exchange_bytes")]
    fn exchange_bytes<'py>(&self, py: Python<'py>, mine: PyBackedBytes) -> Result<Bound<'py, PyList>> {
        let queue = self.queue()?;
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(&mine)))?;
        Ok(PyList::new(py, all.iter().map(|bytes| PyBytes::new(py, bytes)))?)
    }

    #[doc = stub!("Communicator.exchange_objects")]
    fn exchange_objects<'py>(
        &self,
        py: Python<'py>,
        object: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyList>> {
        let pickle = py.import("pickle")?;
        // Bytes go round even if pickling failed: the others must not be left waiting.
        let pickled = pickle.call_method1("dumps", (object,)).and_then(|p| Ok(p.extract::<PyBackedBytes>()?));
        let queue = self.queue()?;
        let mine: &[u8] = pickled.as_deref().unwrap_or(&[]);
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(mine)))?;
        pickled?;
        let objects = PyList::empty(py);
        for (rank, bytes) in all.iter().enumerate() {
            if bytes.is_empty() {
                let text = format!("the object of rank {rank} could not be pickled there");
                return Err(PyRuntimeError::new_err(text).into());
            }
            objects.append(pickle.call_method1("loads", (PyBytes::new(py, bytes),))?)?;
        }
        Ok(objects)
    }

    #[doc = stub!("Communicator.broadcast_object")]
    #[pyo3(signature = (object, root = 0))]
    fn broadcast_object<'py>(
        &self,
        py: Python<'py>,
        object: &Bound<'py, PyAny>,
        root: i64,
    ) -> Result<Bound<'py, PyAny>> {
        let (pickle, root) = (py.import("pickle")?, Count::try_from(root)?.0);
        // Bytes go round even if pickling failed: the others must not be left waiting. No pickle is one byte long.
        if root >= self.world_size {
            return Err(FabricError::no_such_rank("root", root, self.world_size).into());
        }
        let pickled = match root == self.rank {
            true => {
                pickle.call_method1("dumps", (object,)).and_then(|p| Ok(Some(p.extract::<PyBackedBytes>()?)))
            }
            false => Ok(None),
        };
        let mine: &[u8] = match &pickled {
            Ok(Some(bytes)) => bytes,
            Ok(None) => &[],
            Err(_) => &[0],
        };
        let queue = self.queue()?;
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(mine)))?;
        if pickled?.is_some() {
            return Ok(object.clone());
        }
        let problem = match all[root].as_slice() {
            [] => "is not the root there",
            [0] => "could not pickle its object",
            bytes => return Ok(pickle.call_method1("loads", (PyBytes::new(py, bytes),))?),
        };
        Err(PyRuntimeError::new_err(format!("broadcast_object: rank {} {problem}", root)).into())
    }
}
