//! Where ranks run and where their memory lies, and tensors that notice a write beside them.

use std::{fmt::Display, sync::OnceLock, time::Duration};

use antiphon_collectives::Communicator;
use antiphon_fabric::LocalWorld;
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::values::Values;

/// Of every wait: far longer than anything here takes, so that nothing passes because of it.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// What is the same for all behaviours of one way to run ranks.
pub trait Backend: Sync + 'static {
    /// Some bytes, whose address is aligned for every dtype.
    type Memory;
    const DEVICE: Device;

    /// Runs every rank of a world.
    fn run_ranks(world_size: usize, rank: &(dyn Fn(Communicator) + Sync));

    /// Runs every rank of a world, and gives what they return.
    fn run<R: Send + Sync>(world_size: usize, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
        results_of::<Self, R>(world_size, &rank)
    }

    fn allocate(bytes: usize) -> Self::Memory;
    fn address(memory: &mut Self::Memory) -> *mut u8;
    fn write(memory: &mut Self::Memory, bytes: &[u8]);
    fn read(memory: &Self::Memory) -> Vec<u8>;
}

/// Not a part of [`Backend::run`], which is compiled anew for every test.
fn results_of<B: Backend + ?Sized, R: Send + Sync>(
    world_size: usize,
    rank: &(dyn Fn(Communicator) -> R + Sync),
) -> Vec<R> {
    let results: Vec<OnceLock<R>> = (0..world_size).map(|_| OnceLock::new()).collect();
    B::run_ranks(world_size, &|comm| {
        let result = &results[comm.rank()];
        assert!(result.set(rank(comm)).is_ok(), "a rank runs once");
    });
    results.into_iter().map(|result| result.into_inner().expect("every rank has returned")).collect()
}

/// Ranks are threads, memory is the process's own.
pub struct HostThreads;

impl Backend for HostThreads {
    type Memory = Vec<i64>;
    const DEVICE: Device = Device::Host;

    fn run_ranks(world_size: usize, rank: &(dyn Fn(Communicator) + Sync)) {
        LocalWorld::run_with(world_size, TIMEOUT, rank);
    }

    fn allocate(bytes: usize) -> Vec<i64> {
        vec![0; bytes.div_ceil(size_of::<i64>())]
    }

    fn address(memory: &mut Vec<i64>) -> *mut u8 {
        memory.as_mut_ptr().cast()
    }

    fn write(memory: &mut Vec<i64>, bytes: &[u8]) {
        TensorViewMut::from(memory).as_mut_bytes().unwrap()[..bytes.len()].copy_from_slice(bytes);
    }

    fn read(memory: &Vec<i64>) -> Vec<u8> {
        TensorView::from(memory).as_bytes().unwrap().to_vec()
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

/// Where a tensor begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At a multiple of its element's size.
    Aligned,
    /// One byte after that: a reference to an element would be undefined there.
    Odd,
}

/// Guard bytes on either side of a tensor.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xA5;
/// What an output holds before: neither zero nor anything that results are.
pub const UNWRITTEN: u8 = 0x5C;

/// A tensor between guards.
pub struct Tensor<B: Backend> {
    memory: B::Memory,
    start: usize,
    dtype: DType,
    count: usize,
}

impl<B: Backend> Tensor<B> {
    pub fn holding(values: &Values, place: Place) -> Self {
        let (dtype, count) = (values.dtype(), values.len());
        let start = if place == Place::Odd { GUARD + 1 } else { GUARD };
        let end = start + count * dtype.size();
        let mut content = vec![GUARD_BYTE; end + GUARD];
        content[start..end].copy_from_slice(values.bytes());
        let mut memory = B::allocate(content.len());
        B::write(&mut memory, &content);
        Self { memory, start, dtype, count }
    }

    /// An output that nobody has written.
    pub fn unwritten(dtype: DType, count: usize, place: Place) -> Self {
        Self::holding(&Values::from_bytes(dtype, vec![UNWRITTEN; count * dtype.size()]), place)
    }

    /// To read; it is exclusive because that is how [`Backend`] gives addresses.
    pub fn view(&mut self) -> TensorView<'_> {
        self.view_mut().into_view()
    }

    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let base = B::address(&mut self.memory);
        // SAFETY: `count` elements lie from `start` on, and the memory is borrowed for as long as the view.
        unsafe {
            TensorViewMut::from_raw_parts(base.add(self.start), self.dtype, &[self.count], None, B::DEVICE)
        }
        .unwrap()
    }

    /// What the tensor holds. Panics unless its guards are whole.
    pub fn values(&self, what: impl Display) -> Values {
        let mut content = B::read(&self.memory);
        let end = self.start + self.count * self.dtype.size();
        let guards = content[..self.start].iter().chain(&content[end..end + GUARD]);
        assert!(guards.copied().all(|byte| byte == GUARD_BYTE), "{what}: wrote beside a tensor");
        content.truncate(end);
        content.drain(..self.start);
        Values::from_bytes(self.dtype, content)
    }

    /// Panics unless the tensor holds these values and its guards are whole.
    pub fn assert_holds(&self, expected: &Values, what: impl Display) {
        assert_same_bits(&self.values(&what), expected, what);
    }
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
