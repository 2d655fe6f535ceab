//! Ranks whose tensors lie in host memory: threads of this process, or processes.

use std::{
    cell::{Cell, RefCell},
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    sync::{Arc, Barrier},
};

use antiphon_collectives::{
    Call, Collectives, Communicator, ReduceOp, Result,
    all_reduce::{self, Algorithm, AllReduceOptions},
    mixed::MixedHandler,
};
use antiphon_fabric::LocalWorld;
use antiphon_operation::Operation;
use antiphon_tensor::{Device, TensorView, TensorViewMut};
use serde::{Serialize, de::DeserializeOwned};

use super::{Backend, TIMEOUT};
use antiphon_testing::{World, role, say};

/// How ranks run.
pub trait Ranks: Sized + 'static {
    fn run(world_size: usize, rank: &(dyn Fn(Host<Self>) + Sync));
    /// The node of each rank.
    fn nodes(world_size: usize) -> Vec<u32> {
        vec![0; world_size]
    }
    fn meet(&self);
    /// The same for a group of the world.
    fn of_group(&self) -> Self;
    fn exchanged<R: Serialize + DeserializeOwned>(own: Vec<Option<R>>) -> Vec<R> {
        own.into_iter().map(|result| result.expect("every rank has returned")).collect()
    }
}

/// A rank with tensors in host memory.
pub struct Host<R> {
    pub(super) comm: Communicator,
    pub(super) ranks: R,
}

/// Ranks are threads, memory is the process's own.
pub type HostThreads = Host<Threads>;
/// Ranks are processes.
pub type HostProcesses = Host<Processes>;

impl<R> Deref for Host<R> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

impl<R: Ranks> Backend for Host<R> {
    type Memory = Vec<i64>;
    type Mixed = MixedHandler;
    const SEAMS: &'static [usize] = &[128 << 10, 256 << 10, 512 << 10, 1 << 20, 3 << 20];

    fn run_ranks(world_size: usize, rank: &(dyn Fn(Self) + Sync)) {
        R::run(world_size, rank);
    }

    fn nodes(world_size: usize) -> Vec<u32> {
        R::nodes(world_size)
    }

    fn exchanged<T: Serialize + DeserializeOwned>(own: Vec<Option<T>>) -> Vec<T> {
        R::exchanged(own)
    }

    fn meet(&self) {
        self.ranks.meet();
    }

    fn group(&self, color: Option<u64>, key: i64) -> Option<Self> {
        let comm = self.comm.split(color, key).unwrap()?;
        Some(Self { comm, ranks: self.ranks.of_group() })
    }

    fn device(&self) -> Device {
        Device::Host
    }

    fn allocate(&self, bytes: usize) -> Vec<i64> {
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

    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        Collectives::call(&self.comm, call, input, output)
    }

    fn call_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()> {
        Collectives::call_in_place(&self.comm, call, buffer)
    }

    fn by_name(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        by_name!(&self.comm, call, input, output)
    }

    fn by_name_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()> {
        by_name_in_place!(&self.comm, call, buffer)
    }

    fn all_reduce_with(
        &self,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
        op: ReduceOp,
        options: AllReduceOptions,
    ) -> Result<()> {
        Collectives::all_reduce_with(&self.comm, input, output, op, options)
    }

    fn algorithm_for(&self, bytes: usize) -> Algorithm {
        all_reduce::algorithm_for(&self.comm, bytes).unwrap()
    }

    fn send_recv(
        &self,
        input: TensorView<'_>,
        to: usize,
        output: TensorViewMut<'_>,
        from: usize,
    ) -> Result<()> {
        Ok(self.comm.send_recv(input, to, output, from)?)
    }
}

/// Threads of this process.
pub struct Threads(Arc<Barrier>);

impl Ranks for Threads {
    fn run(world_size: usize, rank: &(dyn Fn(HostThreads) + Sync)) {
        let all = Arc::new(Barrier::new(world_size));
        LocalWorld::run_with(world_size, TIMEOUT, |comm| rank(Host { comm, ranks: Self(all.clone()) }));
    }

    fn meet(&self) {
        self.0.wait();
    }

    fn of_group(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Processes, of which this is one: see [`in_processes`].
pub struct Processes;

thread_local! {
    /// The ranks' own way to meet, which outlives all worlds of a test.
    static OUTSIDE: RefCell<Option<Communicator>> = const { RefCell::new(None) };
    /// How many worlds there have been.
    static WORLDS: Cell<usize> = const { Cell::new(0) };
}

fn outside<R>(work: impl FnOnce(&Communicator) -> R) -> R {
    OUTSIDE.with_borrow(|outside| work(outside.as_ref().expect("this process is a rank")))
}

impl Ranks for Processes {
    fn run(world_size: usize, rank: &(dyn Fn(HostProcesses) + Sync)) {
        let number = WORLDS.replace(WORLDS.get() + 1);
        let path = PathBuf::from(std::env::var_os("TMPDIR").unwrap()).join(format!("world-{number}"));
        let (own, processes) = outside(|all| (all.rank(), all.world_size()));
        assert_eq!(processes, world_size, "a test has worlds of one size");
        let comm = Communicator::builder().timeout(TIMEOUT).at_path(own, world_size, path, "a test").unwrap();
        rank(Host { comm, ranks: Self });
    }

    fn meet(&self) {
        outside(|all| all.barrier()).unwrap();
    }

    fn of_group(&self) -> Self {
        Self
    }

    fn exchanged<R: Serialize + DeserializeOwned>(own: Vec<Option<R>>) -> Vec<R> {
        let own = own.into_iter().flatten().next().expect("this rank has returned");
        outside(|all| all.exchange_objects(&own)).unwrap()
    }
}

/// Runs the test `name` of `module` in as many processes, each of which calls `behaviour` as a rank.
pub fn in_processes(module: &str, name: &str, behaviour: fn(usize)) {
    let world_size = super::world_size(name);
    if role().is_some() {
        return as_rank(world_size, behaviour);
    }
    let (_crate_name, module) = module.split_once("::").expect("a module of this crate");
    let world = World::of_test(&format!("{module}::{name}"), world_size, TIMEOUT);
    for rank in 0..world_size {
        assert_eq!(world.hear(rank).1, "passed", "rank {rank}");
    }
    world.end(&[]);
}

fn as_rank(world_size: usize, behaviour: fn(usize)) {
    OUTSIDE.set(Some(Communicator::from_env().unwrap()));
    say("ready");
    let outcome = catch_unwind(AssertUnwindSafe(|| behaviour(world_size)));
    drop(OUTSIDE.take());
    match outcome {
        Ok(()) => say("passed"),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            say(text.replace('\n', " "));
            resume_unwind(panic);
        }
    }
}
