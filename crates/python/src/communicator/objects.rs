//! Bytes and pickled objects, exchanged among all ranks.

use antiphon::prelude::FabricError;
use pyo3::{
    exceptions::{PyException, PyMemoryError, PyRuntimeError, PyTypeError},
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
        let mine = pickled("exchange_objects", object);
        let queue = self.queue()?;
        let words = told(&mine);
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(&words)))?;
        mine?;
        let objects = PyList::empty(py);
        for (rank, bytes) in all.iter().enumerate() {
            objects.append(unpickled(py, "exchange_objects", rank, bytes)?)?;
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
        const CALL: &str = "broadcast_object";
        let root = Count::try_from(root)?.0;
        if root >= self.world_size {
            return Err(FabricError::no_such_rank("root", root, self.world_size).into());
        }
        let mine = (root == self.rank).then(|| pickled(CALL, object));
        let queue = self.queue()?;
        let words = mine.as_ref().map(told).unwrap_or_default();
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(&words)))?;
        if let Some(mine) = mine {
            mine?;
            return Ok(object.clone());
        }
        if all[root].is_empty() {
            return Err(PyRuntimeError::new_err(format!("{CALL}: rank {root} is not the root there")).into());
        }
        unpickled(py, CALL, root, &all[root])
    }
}

/// What goes in front of the reason why a rank could not pickle its object: no pickle begins so.
const REFUSED: u8 = 0;

/// The pickle of an object; the error says which object cannot be pickled. What does not tell of the object, as Ctrl-C and a want of
/// memory, stays as it is.
fn pickled(call: &str, object: &Bound<'_, PyAny>) -> PyResult<PyBackedBytes> {
    let py = object.py();
    let dumped = py.import("pickle")?.call_method1("dumps", (object,));
    dumped.and_then(|bytes| Ok(bytes.extract()?)).map_err(|cause| {
        if !cause.is_instance_of::<PyException>(py) || cause.is_instance_of::<PyMemoryError>(py) {
            return cause;
        }
        let shown =
            object.repr().map_or_else(|_| "an object".to_owned(), |text| shortened(&text.to_string()));
        let kind = object.get_type().name().map_or_else(|_| String::new(), |name| name.to_string());
        let error = PyTypeError::new_err(format!("{call}: {shown}, a {kind}, cannot be pickled: {cause}"));
        error.set_cause(py, Some(cause));
        error
    })
}

fn shortened(text: &str) -> String {
    const MOST: usize = 80;
    if text.chars().count() <= MOST {
        return text.to_owned();
    }
    text.chars().take(MOST).chain("...".chars()).collect()
}

/// The bytes that go round. They do so even if pickling failed: the others must not be left waiting.
fn told(mine: &PyResult<PyBackedBytes>) -> Vec<u8> {
    match mine {
        Ok(bytes) => bytes.to_vec(),
        Err(error) => [&[REFUSED], error.to_string().as_bytes()].concat(),
    }
}

/// The object of a rank.
fn unpickled<'py>(py: Python<'py>, call: &str, rank: usize, bytes: &[u8]) -> Result<Bound<'py, PyAny>> {
    if let [REFUSED, reason @ ..] = bytes {
        let reason = String::from_utf8_lossy(reason);
        let text = format!("{call}: rank {rank} could not pickle its object: {reason}");
        return Err(PyRuntimeError::new_err(text).into());
    }
    Ok(py.import("pickle")?.call_method1("loads", (PyBytes::new(py, bytes),))?)
}
