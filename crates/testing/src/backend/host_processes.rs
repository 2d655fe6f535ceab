//! Ranks that are processes.

use std::{
    cell::{Cell, RefCell},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
};

use antiphon_fabric::Communicator;
use serde::{Serialize, de::DeserializeOwned};

use super::{Host, Ranks, TIMEOUT, world_size};
use crate::world::{World, role, say};

/// A rank that is a process, with tensors in host memory.
pub type HostProcesses = Host<Processes>;

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
        rank(Host::new(comm, Self));
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

/// Runs the test `name` (`world_<size>`) of `module`, a [`module_path`], in as many processes, each of which calls `behaviour` with the
/// world size and runs a rank of its worlds.
///
/// # Panics
/// If a rank does.
pub fn in_processes(module: &str, name: &str, behaviour: fn(usize)) {
    let world_size = world_size(name);
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
