//! Where ranks run and where their memory lies.

mod gpus;
mod host;
mod mixed;
mod nodes;
mod tensor;

use std::{fmt::Display, ops::Deref, sync::OnceLock, time::Duration};

use antiphon_collectives::{
    Call, Communicator, ReduceOp, Result,
    all_reduce::{Algorithm, AllReduceOptions},
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use serde::{Serialize, de::DeserializeOwned};

use crate::values::Values;

pub use gpus::{Gpus, on_gpus};
pub use host::{HostProcesses, HostThreads, in_processes};
pub use mixed::Mixed;
pub use nodes::{ByNodes, Halves, HostNodes, Interleaved, OneAndRest, Thirds};
pub use tensor::{Alignment, Like, Loose, Tensor, UNWRITTEN};

/// The deadline of every wait. It is far longer than anything here takes, so that no test passes because a wait ended.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// One rank of a world, and what is the same for all behaviours of one way to run ranks. Calls are over when they return.
pub trait Backend: Deref<Target = Communicator> + Sized + 'static {
    /// Some bytes, whose address is aligned for every dtype.
    type Memory;
    /// A handler of mixed collectives.
    type Mixed: Mixed<Self>;
    /// Sizes in bytes at which this backend may cut a tensor into pieces, ascending.
    const SEAMS: &'static [usize];

    /// Runs the ranks of a world that this process has: all of them, or its own.
    fn run_ranks(world_size: usize, rank: &(dyn Fn(Self) + Sync));

    /// What all ranks returned, of which this process has what its own ranks did.
    fn exchanged<R: Serialize + DeserializeOwned>(own: Vec<Option<R>>) -> Vec<R> {
        own.into_iter().map(|result| result.expect("every rank has returned")).collect()
    }

    /// Runs every rank of a world, and gives what they return.
    fn run<R: Send + Sync + Serialize + DeserializeOwned>(
        world_size: usize,
        rank: impl Fn(Self) -> R + Sync,
    ) -> Vec<R> {
        let results: Vec<OnceLock<R>> = (0..world_size).map(|_| OnceLock::new()).collect();
        Self::run_ranks(world_size, &|comm| {
            let result = &results[comm.rank()];
            assert!(result.set(rank(comm)).is_ok(), "a rank runs once");
        });
        Self::exchanged(results.into_iter().map(OnceLock::into_inner).collect())
    }

    /// Waits for all ranks of the world, beside the communicator.
    fn meet(&self);

    /// The rank in a [group](Communicator::split) of its world, if it has a colour.
    fn group(&self, color: Option<u64>, key: i64) -> Option<Self>;

    /// Where tensors lie.
    fn device(&self) -> Device;
    fn allocate(&self, bytes: usize) -> Self::Memory;
    fn address(memory: &mut Self::Memory) -> *mut u8;
    fn write(memory: &mut Self::Memory, bytes: &[u8]);
    fn read(memory: &Self::Memory) -> Vec<u8>;

    /// The node of each rank of a world.
    fn nodes(world_size: usize) -> Vec<u32> {
        vec![0; world_size]
    }

    /// What a reduction of these contributions gives, of ranks on these nodes.
    fn reduced(op: ReduceOp, contributions: &[Values], nodes: &[u32]) -> Values {
        Values::reduced(op, contributions, nodes)
    }

    /// The operators that behaviours try with a dtype. Each may be a program to compile.
    fn operators(_dtype: DType) -> &'static [ReduceOp] {
        &ReduceOp::ARITHMETIC
    }

    /// What a refusal to reduce such tensors says, where this backend cannot.
    fn refusal(_dtype: DType, _op: ReduceOp, _alignment: Alignment) -> Option<&'static str> {
        None
    }

    /// Before a call of all ranks whose tensors have been made.
    fn before(&self, _dtype: DType, _reduces: Option<ReduceOp>) {}
    /// Behind a call of all ranks, before its tensors go.
    fn behind(&self) {}

    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()>;

    fn call_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()>;

    /// [`call`](Self::call) by the method that is named after the operation.
    fn by_name(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()>;

    /// [`call_in_place`](Self::call_in_place) by the method that is named after the operation.
    fn by_name_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()>;

    fn all_reduce_with(
        &self,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
        op: ReduceOp,
        options: AllReduceOptions,
    ) -> Result<()>;

    /// The algorithm that is chosen for `bytes` bytes.
    fn algorithm_for(&self, bytes: usize) -> Algorithm;

    fn send_recv(
        &self,
        input: TensorView<'_>,
        to: usize,
        output: TensorViewMut<'_>,
        from: usize,
    ) -> Result<()>;

    /// The error that this rank gets from its peers, if a call that disagreed with theirs has succeeded here.
    fn told(&self) -> Result<()> {
        Ok(())
    }
}

/// The dtype in a test's name.
pub fn dtype(name: &str) -> DType {
    name.parse().unwrap()
}

/// The number in a test's name.
pub fn world_size(name: &str) -> usize {
    name.strip_prefix("world_").and_then(|n| n.parse().ok()).expect("tests are named world_<size>")
}

/// The same bits: −0 is not 0, and one NaN is not another.
pub fn assert_same_bits<'a, 'e>(
    actual: impl Into<TensorView<'a>>,
    expected: impl Into<TensorView<'e>>,
    what: impl Display,
) {
    let (actual, expected) = (actual.into(), expected.into());
    assert_eq!((actual.dtype(), actual.numel()), (expected.dtype(), expected.numel()), "{what}");
    if actual.as_bytes() == expected.as_bytes() {
        return;
    }
    let size = actual.dtype().size();
    let (got, wanted) = (actual.as_bytes().unwrap(), expected.as_bytes().unwrap());
    let i = got.iter().zip(wanted).position(|(a, b)| a != b).expect("the bytes differ somewhere") / size;
    panic!(
        "{what}: element {i} is {:e} ({:02x?}), not {:e} ({:02x?})",
        actual.get_f64(&[i]).unwrap(),
        &got[i * size..][..size],
        expected.get_f64(&[i]).unwrap(),
        &wanted[i * size..][..size],
    );
}
