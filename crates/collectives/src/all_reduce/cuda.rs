//! All-reduce on GPUs; `kernels.cuh` has the algorithms.

use std::{cell::RefCell, rc::Rc, time::Duration};

use antiphon_device::{
    DeviceError, ReduceOp,
    cuda::{
        Architecture, Context, CudaError, DevicePointer, Function, KernelArgument, KernelCache, LaunchConfig,
        Module, Nvrtc, Program, StreamRef, WaitBoard,
    },
};
use antiphon_fabric::{Communicator, CudaArena, FabricError, Operation, Signature};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use super::Algorithm;
use crate::error::{CollectiveError, Result};

/// The most ranks whose arenas fit a kernel's arguments; all of one NVLink domain.
pub const MAX_WORLD: usize = 8;
/// The largest message, in bytes, that one launch of each algorithm takes; more go in pieces.
const ONE_SHOT_BYTES: usize = 1 << 20;
const TWO_SHOT_BYTES: usize = 32 << 20;
/// From how many bytes on two-shot is the faster one with more than two ranks: where one-shot's (W − 1)·n bytes weigh more
/// than a second hop. Not yet measured with this code. With two ranks both send as much.
const TWO_SHOT_FROM: usize = 320 << 10;
const THREADS: u32 = 128;
const MAX_BLOCKS: u32 = 132 * 4;
/// Calls in flight use three slots in turn.
const SLOTS: usize = 3;
/// Where the slots begin in an arena, behind the control words.
const SLOTS_AT: usize = (MAX_BLOCKS as usize * 16).next_multiple_of(4096);

const OPERATION: Operation = Operation::AllReduce;

/// All-reduce between the GPUs of a communicator's ranks, over their own loads and stores.
///
/// Nothing but kernels runs after [`prepare`](Self::prepare): calls go to the caller's stream, allocate nothing, wait for
/// nothing, and may be captured in a graph. All ranks make the same calls in the same order, on one stream at a time.
/// The result has the same bits on every rank, from both algorithms, and as on the host.
pub struct CudaAllReduce<'c> {
    comm: &'c Communicator,
    arena: CudaArena,
    board: WaitBoard,
    lane_stride: usize,
    kernels: RefCell<Vec<Rc<Kernels>>>,
}

impl std::fmt::Debug for CudaAllReduce<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaAllReduce {{ {:?}, arena: {} bytes }}", self.comm, self.arena.len())
    }
}

/// The kernels for one dtype and operator.
struct Kernels {
    dtype: DType,
    op: ReduceOp,
    one_shot: Function,
    two_shot: Function,
}

/// `arguments` of kernels.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments<const W: usize> {
    input: u64,
    output: u64,
    count: u64,
    lane_stride: u64,
    slots: u64,
    limit_ns: u64,
    abort: DevicePointer,
    report: DevicePointer,
    ranks: [DevicePointer; W],
    rank: u32,
    operation: u32,
}

// SAFETY: the layout of the kernel's struct: 64-bit words, then two of 32.
unsafe impl<const W: usize> KernelArgument for Arguments<W> {}

impl<'c> CudaAllReduce<'c> {
    /// Shares memory between the ranks' devices: about 200 MB on each of four.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for more than [`MAX_WORLD`] ranks; as [`CudaArena::new`].
    pub fn new(comm: &'c Communicator, context: &Context) -> Result<Self> {
        let world_size = comm.world_size();
        if !(2..=MAX_WORLD).contains(&world_size) {
            let text = format!("all_reduce on CUDA works between 2 to {MAX_WORLD} ranks, not {world_size}");
            return Err(FabricError::InvalidArgument(text).into());
        }
        // A lane takes all of a one-shot message, or this rank's part of a two-shot one.
        let lane_stride = ONE_SHOT_BYTES.max(TWO_SHOT_BYTES.div_ceil(world_size)).next_multiple_of(4096);
        let len = SLOTS_AT + SLOTS * 2 * world_size * lane_stride;
        let arena = CudaArena::new(comm, context, len, 0xFF)?; // EMPTY, everywhere
        let board = WaitBoard::new(context).map_err(device)?;
        clear_control(&arena, comm.rank()).map_err(device)?;
        comm.barrier()?;
        Ok(Self { comm, arena, board, lane_stride, kernels: RefCell::default() })
    }

    /// Compiles and loads the kernels for a dtype and operator, so that no call has to: from the cache on disk in some
    /// milliseconds, else in about a second. Not while a stream is being captured.
    ///
    /// # Errors
    /// [`CollectiveError::NotNumeric`] for dtypes other than f32, f16 and bf16; [`FabricError::Device`].
    pub fn prepare(&self, dtype: DType, op: ReduceOp) -> Result<()> {
        self.kernels_for(dtype, op).map(drop)
    }

    /// `output[i] = op over all ranks of input[i]`, on every rank, in the order of the stream. `output` may be `input`. The
    /// algorithm is chosen by size unless given; all ranks must give the same.
    ///
    /// A rank that does not come ends the kernel after the communicator's timeout, and the next call with an error.
    ///
    /// # Errors
    /// [`CollectiveError`] for arguments that make no sense; [`FabricError::Timeout`] when an earlier call gave up
    /// waiting, after which this object is unusable.
    ///
    /// # Safety
    /// Both tensors stay valid, and are not used in another way, until the stream has passed this call.
    pub unsafe fn all_reduce(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        op: ReduceOp,
        algorithm: Option<Algorithm>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.check(input, "input")?;
        self.check(&output.as_view(), "output")?;
        let operation = OPERATION.name();
        let (dtype, count) = (input.dtype(), input.numel());
        if output.dtype() != dtype {
            return Err(CollectiveError::DTypes { operation, input: dtype, output: output.dtype() });
        }
        if output.numel() != count {
            let (actual, rule) = (output.numel(), "as many as the input".to_owned());
            return Err(CollectiveError::Count { operation, which: "output", actual, expected: count, rule });
        }
        self.check_waits(dtype, op, count)?;
        let kernels = self.kernels_for(dtype, op)?;
        let bytes = count * dtype.size();
        let algorithm = algorithm.unwrap_or(
            match bytes < TWO_SHOT_FROM || self.comm.world_size() == 2 && bytes <= ONE_SHOT_BYTES {
                true => Algorithm::OneShot,
                false => Algorithm::TwoShot,
            },
        );
        let (function, piece) = match algorithm {
            Algorithm::OneShot => (&kernels.one_shot, ONE_SHOT_BYTES),
            Algorithm::TwoShot => (&kernels.two_shot, TWO_SHOT_BYTES),
        };
        for start in (0..bytes).step_by(piece) {
            let count = (bytes - start).min(piece) / dtype.size();
            let (from, to) = (input.as_ptr().addr() + start, output.as_mut_ptr().addr() + start);
            // SAFETY: passed on.
            unsafe { self.launch(function, algorithm, from, to, count, dtype, stream) }.map_err(device)?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), for `count` elements at these addresses.
    #[allow(clippy::too_many_arguments)]
    unsafe fn launch(
        &self,
        function: &Function,
        algorithm: Algorithm,
        input: usize,
        output: usize,
        count: usize,
        dtype: DType,
        stream: StreamRef<'_>,
    ) -> std::result::Result<(), CudaError> {
        let vectors = (count * dtype.size()).div_ceil(16);
        let items = match algorithm {
            Algorithm::OneShot => vectors,
            Algorithm::TwoShot => vectors.div_ceil(self.comm.world_size()),
        };
        let blocks = (items as u64).div_ceil(u64::from(THREADS)).clamp(1, u64::from(MAX_BLOCKS)) as u32;
        let config = LaunchConfig::new(blocks, THREADS).programmatic();
        macro_rules! launch {
            ($($world:literal)*) => {
                match self.comm.world_size() {
                    $($world => {
                        let arguments = Arguments::<$world> {
                            input: input as u64,
                            output: output as u64,
                            count: count as u64,
                            lane_stride: self.lane_stride as u64,
                            slots: SLOTS_AT as u64,
                            limit_ns: self.comm.timeout().as_nanos().min(u128::from(u64::MAX)) as u64,
                            abort: self.board.abort_pointer(),
                            report: self.board.report_pointer(),
                            ranks: std::array::from_fn(|rank| self.arena.pointer(rank)),
                            rank: self.comm.rank() as u32,
                            operation: OPERATION as u32,
                        };
                        // SAFETY: the kernel's own arguments; the arenas live as long as `self`, whose drop waits.
                        unsafe { function.launch(stream, &config, &[(&arguments).into()]) }
                    })*
                    world => unreachable!("a world of {world} was refused"),
                }
            };
        }
        launch!(2 3 4 5 6 7 8)
    }

    fn check(&self, tensor: &TensorView<'_>, which: &'static str) -> Result<()> {
        let operation = OPERATION.name();
        let mine = Device::Cuda(self.arena.context().device().ordinal());
        if tensor.device() != mine {
            return Err(CollectiveError::Device { operation, which, device: tensor.device() });
        }
        tensor.contiguous().map_err(|source| CollectiveError::Tensor { operation, which, source })
    }

    /// Fails if a kernel has given up.
    fn check_waits(&self, dtype: DType, op: ReduceOp, count: usize) -> Result<()> {
        let Some(report) = self.board.report() else { return Ok(()) };
        let operation = Signature {
            dtype: Some(dtype),
            reduce: Some(op),
            count: count as u64,
            ..Signature::new(OPERATION)
        };
        let (missing, world_size) = (vec![report.peer as usize], self.comm.world_size());
        let waited = Duration::from_nanos(report.waited_ns);
        Err(FabricError::Timeout { operation, waited, missing, world_size }.into())
    }

    fn kernels_for(&self, dtype: DType, op: ReduceOp) -> Result<Rc<Kernels>> {
        let known = self.kernels.borrow().iter().find(|k| k.dtype == dtype && k.op == op).cloned();
        if let Some(kernels) = known {
            return Ok(kernels);
        }
        let architecture = self.arena.context().device().architecture().map_err(device)?;
        let program = program(architecture, dtype, op, self.comm.world_size())?;
        let load = || {
            let cubin = KernelCache::open().compile(Nvrtc::load()?, &program)?;
            let module = Module::load(self.arena.context(), &cubin.bytes)?;
            Ok((module.function("one_shot")?, module.function("two_shot")?))
        };
        let (one_shot, two_shot) = load().map_err(device)?;
        let kernels = Rc::new(Kernels { dtype, op, one_shot, two_shot });
        self.kernels.borrow_mut().push(kernels.clone());
        Ok(kernels)
    }
}

impl Drop for CudaAllReduce<'_> {
    fn drop(&mut self) {
        // Kernels under way use the arena. They end by their deadline at the latest; an error has nobody to go to.
        let _ = self.arena.context().synchronize();
    }
}

/// The control words of this rank begin as zeros.
fn clear_control(arena: &CudaArena, rank: usize) -> std::result::Result<(), CudaError> {
    let stream = arena.context().stream()?;
    // SAFETY: the arena is larger, and nobody uses it yet.
    unsafe { antiphon_device::cuda::memory::fill(stream.borrow(), arena.pointer(rank), 0, SLOTS_AT) }?;
    stream.borrow().synchronize()
}

/// `kernels.cuh`, specialised.
fn program(architecture: Architecture, dtype: DType, op: ReduceOp, world_size: usize) -> Result<Program> {
    let (name, nan_pair) = match dtype {
        DType::F32 => ("float", "0"),
        DType::F16 => ("f16", "0x7E007E00u"),
        DType::BF16 => ("bf16", "0x7FC07FC0u"),
        _ => return Err(CollectiveError::NotNumeric { operation: OPERATION.name(), dtype }),
    };
    let operator = match op {
        ReduceOp::Sum | ReduceOp::Avg => "sum_of",
        ReduceOp::Prod => "prod_of",
        ReduceOp::Min => "min_of",
        ReduceOp::Max => "max_of",
    };
    Ok(Program::new("all_reduce/kernels.cuh", include_str!("kernels.cuh"), architecture)
        .define("ELEMENT", name)
        .define("NAN_PAIR", nan_pair)
        .define("OPERATOR", operator)
        .define("AVERAGE", u8::from(op == ReduceOp::Avg))
        .define("WORLD", world_size)
        .define("THREADS", THREADS)
        .define("MAX_BLOCKS", MAX_BLOCKS))
}

fn device(error: CudaError) -> CollectiveError {
    FabricError::from(DeviceError::from(error)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every variant for every architecture, on any machine that has NVRTC.
    #[test]
    fn every_kernel_compiles() {
        let nvrtc = match Nvrtc::load() {
            Ok(nvrtc) => nvrtc,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        for architecture in [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let compile = |op, world_size| {
                    let program = program(architecture, dtype, op, world_size).unwrap();
                    let compiled = nvrtc.compile(&program).unwrap_or_else(|error| {
                        panic!("{architecture} {dtype} {op} for {world_size} ranks: {error}")
                    });
                    assert_eq!(compiled.log, "");
                };
                ReduceOp::ALL.into_iter().for_each(|op| compile(op, 2));
                [4, MAX_WORLD].into_iter().for_each(|world_size| compile(ReduceOp::Sum, world_size));
            }
        }
    }

    #[test]
    fn other_types_are_refused() {
        let error = program(Architecture::SM_90A, DType::I32, ReduceOp::Sum, 2).unwrap_err();
        assert!(error.to_string().contains("i32 cannot be reduced"));
    }
}
