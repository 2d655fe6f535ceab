//! The class `Program`.

use std::sync::{MutexGuard, PoisonError};

use antiphon::device::sync::Mutex;
use antiphon_language::{
    self as language, BufferChunks, BufferType, Collective, Options, SemaphoreId, SwitchEnds,
};
use antiphon_plan::{Op, Plan, verify};
use pyo3::{exceptions::PyIndexError, intern, prelude::*, types::PyDict};

use super::{
    channel::{Channel, Switch},
    chunk::{Chunk, ThreadBlockGroup},
    convert::{self, Missing},
};
use crate::error::Result;

#[doc = stub!("Program")]
#[pyclass(frozen, module = "antiphon.language")]
pub(crate) struct Program(Mutex<language::Program>);

impl Program {
    pub(super) fn lock(&self) -> MutexGuard<'_, language::Program> {
        // A panic leaves the program as it was before, or without the last operation.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program, to which the line is known that the frame is at.
    pub(super) fn at(&self, frame: &Bound<'_, PyAny>) -> Result<MutexGuard<'_, language::Program>> {
        let py = frame.py();
        let line: u32 = frame.getattr(intern!(py, "f_lineno"))?.extract().unwrap_or(0);
        let file = frame.getattr(intern!(py, "f_code"))?.getattr(intern!(py, "co_filename"))?;
        let program = self.lock();
        program.set_origin(file.extract()?, line);
        Ok(program)
    }
}

#[pymethods]
impl Program {
    /// Chunks of the input and the output of each rank.
    #[new]
    fn new(buffers: Vec<(u64, u64)>) -> Self {
        let buffers = buffers.into_iter().map(|(input, output)| BufferChunks { input, output }).collect();
        // The rest is said when the plan is made, since a script may change it until then.
        let collective = Collective { name: String::new(), inplace: false, buffers };
        Program(Mutex::new(language::Program::new("", &collective, Options::default())))
    }

    #[doc = stub!("Program.num_ranks")]
    #[getter]
    fn num_ranks(&self) -> u32 {
        self.lock().num_ranks()
    }

    #[doc = stub!("Program.num_chunks")]
    // Input, output and scratch chunks of a rank.
    fn num_chunks(&self, rank: i64) -> Result<(u64, u64, u64)> {
        let program = self.lock();
        let rank = convert::rank(rank, program.num_ranks())?;
        let of = |buffer| program.num_chunks(rank, buffer);
        Ok((of(BufferType::Input)?, of(BufferType::Output)?, of(BufferType::Scratch)?))
    }

    #[doc = stub!("Program.rank")]
    // A rank by its number, which may count from the end.
    fn rank(&self, rank: i64) -> Result<u32> {
        let program = self.lock();
        Ok(program.rank(convert::rank(rank, program.num_ranks())?)?.id())
    }

    #[doc = stub!("Program.scratch")]
    // Sets scratch aside, and returns its offset. A negative size sets none aside.
    fn scratch(&self, rank: u32, size: i64) -> Result<u64> {
        let program = self.lock();
        Ok(program.rank(rank)?.scratch(u64::try_from(size).unwrap_or(0))?.offset)
    }

    #[doc = stub!("Program.memory_channel")]
    fn memory_channel(&self, dst: i64, src: i64) -> Result<Channel> {
        let program = self.lock();
        let (dst, src) = (convert::rank(dst, program.num_ranks())?, convert::rank(src, program.num_ranks())?);
        Ok(Channel { port: false, dst, src, id: program.memory_channel(dst, src)?.id() })
    }

    #[doc = stub!("Program.port_channel")]
    fn port_channel(&self, dst: i64, src: i64) -> Result<Channel> {
        let program = self.lock();
        let (dst, src) = (convert::rank(dst, program.num_ranks())?, convert::rank(src, program.num_ranks())?);
        Ok(Channel { port: true, dst, src, id: program.port_channel(dst, src)?.id() })
    }

    #[doc = stub!("Program.switch_channel")]
    fn switch_channel(&self, ranks: Vec<i64>, buffer: &Bound<'_, PyAny>) -> Result<Switch> {
        let program = self.lock();
        let ranks = ranks.into_iter().map(|rank| convert::rank(rank, program.num_ranks()));
        let ranks = ranks.collect::<Result<Vec<_>>>()?;
        let ends: SwitchEnds = program.switch_channel(&ranks, convert::buffer_type(buffer)?)?.ends().clone();
        Ok(Switch { ranks, ends })
    }

    #[doc = stub!("Program.semaphore")]
    fn semaphore(&self, rank: i64, initial_value: i64) -> Result<(u32, u32)> {
        let program = self.lock();
        let rank = convert::rank(rank, program.num_ranks())?;
        Ok((rank, program.semaphore(rank, initial_value)?.id().0))
    }

    #[doc = stub!("Program.semaphore_op")]
    fn semaphore_op(
        &self,
        acquire: bool,
        semaphore: (u32, u32),
        tb: i64,
        data_sync: &Bound<'_, PyAny>,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = self.at(frame)?;
        let (rank, id) = semaphore;
        let semaphore = language::Semaphore::existing(&program, rank, SemaphoreId(id))?;
        let tb = convert::thread_block(tb, program.num_thread_blocks(rank)?)?;
        let data_sync = convert::data_sync(data_sync)?;
        Ok(if acquire { semaphore.acquire(tb, data_sync) } else { semaphore.release(tb, data_sync) }?)
    }

    #[doc = stub!("Program.copy")]
    #[allow(clippy::too_many_arguments)] // the method's
    fn copy(
        &self,
        kind: &str,
        rank: u32,
        dst: &Chunk,
        src: &Chunk,
        tb: Option<i64>,
        tb_group: Option<&Bound<'_, ThreadBlockGroup>>,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = self.at(frame)?;
        let on = convert::blocks(tb, tb_group, program.num_thread_blocks(rank)?, Missing::Runtime)?;
        let rank = program.rank(rank)?;
        let (dst, src) = (dst.chunk, src.chunk);
        Ok(match kind {
            "unpack_packets" => rank.unpack_packets(dst, src, on),
            "copy_packets" => rank.copy_packets(dst, src, on),
            _ => rank.copy(dst, src, on),
        }?)
    }

    #[doc = stub!("Program.reduce")]
    #[allow(clippy::too_many_arguments)] // the method's
    fn reduce(
        &self,
        rank: u32,
        src: &Chunk,
        others: Vec<PyRef<'_, Chunk>>,
        tb: Option<i64>,
        tb_group: Option<&Bound<'_, ThreadBlockGroup>>,
        dst: Option<&Chunk>,
        reduce_op: &Bound<'_, PyAny>,
        packet: bool,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = self.at(frame)?;
        let on = convert::blocks(tb, tb_group, program.num_thread_blocks(rank)?, Missing::Runtime)?;
        let others: Vec<_> = others.iter().map(|other| other.chunk).collect();
        let (rank, op) = (program.rank(rank)?, convert::reduce_op(reduce_op)?);
        let dst = dst.unwrap_or(src).chunk;
        Ok(match packet {
            false => rank.reduce(src.chunk, &others, on, dst, op),
            true => rank.reduce_packets(src.chunk, &others, on, dst, op),
        }?)
    }

    #[doc = stub!("Program.barrier")]
    fn barrier(&self, rank: u32, tb_list: Vec<i64>, frame: &Bound<'_, PyAny>) -> Result<()> {
        let program = self.at(frame)?;
        let count = program.num_thread_blocks(rank)?;
        let blocks = tb_list.into_iter().map(|tb| convert::thread_block(tb, count));
        Ok(program.rank(rank)?.barrier(&blocks.collect::<Result<Vec<_>>>()?)?)
    }

    #[doc = stub!("Program.begin_pipeline")]
    fn begin_pipeline(&self, unit: u64, num_chunks: u64, frame: &Bound<'_, PyAny>) -> Result<()> {
        Ok(self.at(frame)?.begin_pipeline(unit, num_chunks)?)
    }

    #[doc = stub!("Program.end_pipeline")]
    fn end_pipeline(&self) -> Result<()> {
        Ok(self.lock().end_pipeline()?)
    }

    #[doc = stub!("Program.check_pairing")]
    fn check_pairing(&self) -> Result<()> {
        Ok(self.lock().check_pairing()?)
    }

    #[doc = stub!("Program.finish")]
    // The finished plan. All but the operations comes as keywords. The pairing is not checked.
    #[pyo3(signature = (**header))]
    fn finish(&self, py: Python<'_>, header: Option<&Bound<'_, PyDict>>) -> Result<FinishedPlan> {
        let mut program = self.lock();
        if let Some(header) = header {
            configure(&mut program, header)?;
        }
        let (draft, options) = (program.draft(), program.options.clone());
        drop(program);
        // The passes need nothing of Python, and may take a while.
        Ok(FinishedPlan(py.detach(|| options.finish(draft))?))
    }
}

#[doc = stub!("FinishedPlan")]
#[pyclass(frozen, module = "antiphon.language")]
pub(crate) struct FinishedPlan(Plan);

impl FinishedPlan {
    pub(crate) fn plan(&self) -> &Plan {
        &self.0
    }
}

#[pymethods]
impl FinishedPlan {
    /// Its text.
    fn to_json(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_json())
    }

    #[doc = stub!("FinishedPlan.verify")]
    fn verify(&self, py: Python<'_>) -> (String, String) {
        let report = py.detach(|| verify::verify(&self.0, &verify::Options::default()));
        (report.to_string(), report.to_json().to_string())
    }

    #[doc = stub!("FinishedPlan.lines")]
    fn lines(&self, rank: usize, threadblock: usize) -> Result<Vec<Option<(String, u32)>>> {
        let block = self.0.gpus.get(rank).and_then(|gpu| gpu.threadblocks.get(threadblock));
        let missing = || PyIndexError::new_err(format!("rank {rank} has no thread block {threadblock}"));
        let line = |op: &Op| self.0.origin(op.origin).map(|origin| (origin.file.clone(), origin.line));
        Ok(block.ok_or_else(missing)?.ops.iter().map(line).collect())
    }
}

fn configure(program: &mut language::Program, header: &Bound<'_, PyDict>) -> Result<()> {
    let get = |key: &str| header.as_any().get_item(key);
    program.name = get("name")?.extract()?;
    program.set_collective(get("collective")?.extract()?, get("inplace")?.is_truthy()?);
    program.options = Options {
        instances: get("instances")?.extract()?,
        replication_policy: convert::replication_policy(&get("replication_policy")?)?,
        protocol: convert::protocol(get("protocol")?.extract()?)?,
        instr_fusion: get("instr_fusion")?.is_truthy()?,
        auto_sync: get("auto_sync")?.is_truthy()?,
        reuse_resources: get("reuse_resources")?.is_truthy()?,
        num_threads_per_block: get("num_threads_per_block")?.extract()?,
        use_double_scratch_buffer: get("use_double_scratch_buffer")?.is_truthy()?,
        buffer_alignment: get("buffer_alignment")?.extract()?,
        min_message_size: get("min_message_size")?.extract()?,
        max_message_size: get("max_message_size")?.extract()?,
    };
    Ok(())
}
