//! The classes `Chunk`, `BaseBuffer` and `ThreadBlockGroup`.

use std::hash::{DefaultHasher, Hash, Hasher};

use antiphon_language as language;
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    intern,
    prelude::*,
    types::{PyDict, PySlice},
};

use super::convert;
use crate::error::Result;

#[doc = stub!("Chunk")]
#[pyclass(frozen, eq, module = "antiphon.language")]
pub(crate) struct Chunk {
    pub chunk: language::Chunk,
    // The member of the enumeration that the script knows.
    #[doc = stub!("Chunk.buffer")]
    #[pyo3(get)]
    buffer: Py<PyAny>,
}

impl PartialEq for Chunk {
    fn eq(&self, other: &Self) -> bool {
        self.chunk == other.chunk
    }
}

#[pymethods]
impl Chunk {
    #[new]
    fn new(rank: u32, buffer: Bound<'_, PyAny>, index: u64, size: u64) -> PyResult<Self> {
        let kind = convert::buffer_type(&buffer)?;
        let chunk = language::Buffer { rank, buffer: kind, offset: index, size };
        let chunk = chunk.chunks(..).map_err(crate::error::Error::from)?;
        Ok(Chunk { chunk, buffer: buffer.unbind() })
    }

    #[doc = stub!("Chunk.rank")]
    #[getter]
    fn rank(&self) -> u32 {
        self.chunk.rank.0
    }

    #[doc = stub!("Chunk.index")]
    #[getter]
    fn index(&self) -> u64 {
        self.chunk.index
    }

    #[doc = stub!("Chunk.size")]
    #[getter]
    fn size(&self) -> u64 {
        self.chunk.size
    }

    #[doc = stub!("Chunk.to_dict")]
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("rank", self.rank())?;
        dict.set_item("type", self.buffer.getattr(py, intern!(py, "value"))?)?;
        dict.set_item("index", self.index())?;
        dict.set_item("size", self.size())?;
        Ok(dict)
    }

    /// For copies and pickles.
    fn __getnewargs__(&self, py: Python<'_>) -> (u32, Py<PyAny>, u64, u64) {
        (self.rank(), self.buffer.clone_ref(py), self.index(), self.size())
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.chunk.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let buffer = self.buffer.bind(py).repr()?;
        let (rank, index, size) = (self.rank(), self.index(), self.size());
        Ok(format!("Chunk(rank={rank}, buffer={buffer}, index={index}, size={size})"))
    }
}

#[doc = stub!("BaseBuffer")]
#[pyclass(frozen, subclass, module = "antiphon.language")]
pub(crate) struct BaseBuffer {
    #[doc = stub!("BaseBuffer.rank")]
    #[pyo3(get)]
    rank: u32,
    #[doc = stub!("BaseBuffer.buffer_type")]
    #[pyo3(get)]
    buffer_type: Py<PyAny>,
    kind: language::BufferType,
    #[doc = stub!("BaseBuffer.offset")]
    #[pyo3(get)]
    offset: i64,
    // Where it ends.
    #[doc = stub!("BaseBuffer.size")]
    #[pyo3(get)]
    size: i64,
}

#[pymethods]
impl BaseBuffer {
    #[new]
    fn new(rank: u32, buffer_type: Bound<'_, PyAny>, offset: i64, size: i64) -> PyResult<Self> {
        let kind = convert::buffer_type(&buffer_type)?;
        let end = offset.checked_add(size).ok_or_else(|| PyValueError::new_err("the buffer is too large"))?;
        Ok(BaseBuffer { rank, buffer_type: buffer_type.unbind(), kind, offset, size: end })
    }

    #[doc = stub!("BaseBuffer.__getitem__")]
    fn __getitem__(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> Result<Chunk> {
        let slice = key
            .cast::<PySlice>()
            .map_err(|_| PyTypeError::new_err("chunks of a buffer are a slice: buffer[first:behind_last]"))?;
        let part = |name: &Bound<'_, _>| slice.getattr(name)?.extract::<Option<i64>>();
        if !matches!(part(intern!(py, "step"))?, None | Some(1)) {
            return Err(PyValueError::new_err("chunks lie side by side: the step of a slice is 1").into());
        }
        let (start, stop) = (part(intern!(py, "start"))?, part(intern!(py, "stop"))?);
        let unsigned = |at: i64| {
            u64::try_from(at).map_err(|_| PyValueError::new_err("a slice of a buffer cannot be negative"))
        };
        let offset = unsigned(self.offset)?;
        let size = u64::try_from(self.size - self.offset).unwrap_or(0);
        let buffer = language::Buffer { rank: self.rank, buffer: self.kind, offset, size };
        let (start, stop) = (unsigned(start.unwrap_or(0))?, stop.map_or(Ok(size), unsigned)?);
        Ok(Chunk { chunk: buffer.chunks(start..stop)?, buffer: self.buffer_type.clone_ref(py) })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (kind, BaseBuffer { rank, offset, size, .. }) = (self.buffer_type.bind(py).repr()?, self);
        Ok(format!("BaseBuffer(rank={rank}, buffer_type={kind}, offset={offset}, end={size})"))
    }
}

#[doc = stub!("ThreadBlockGroup")]
#[pyclass(frozen, subclass, module = "antiphon.language")]
pub(crate) struct ThreadBlockGroup(pub language::ThreadBlockGroup);

#[pymethods]
impl ThreadBlockGroup {
    #[new]
    fn new(tb_list: Vec<i64>) -> Result<Self> {
        let blocks = tb_list.into_iter().map(convert::member_of_group);
        Ok(ThreadBlockGroup(language::ThreadBlockGroup::new(blocks.collect::<Result<Vec<_>>>()?)?))
    }

    #[doc = stub!("ThreadBlockGroup.tb_list")]
    #[getter]
    fn tb_list(&self) -> Vec<u32> {
        self.0.blocks().to_vec()
    }

    #[doc = stub!("ThreadBlockGroup.get_internal_id")]
    fn get_internal_id(&self, tb: i64) -> Result<u32> {
        Ok(self.0.share(convert::member_of_group(tb)?)?.tb_id)
    }

    #[doc = stub!("ThreadBlockGroup.numtb")]
    fn numtb(&self) -> usize {
        self.0.blocks().len()
    }
}
