//! Memory between nodes that kernels write. Ranks are processes, each a PE of NVSHMEM, with `ANTIPHON_NODE`s of their own; on one GPU if
//! there is only one.

use std::time::Duration;

use antiphon_device::cuda::{Context, DeviceMemory, Driver, Program};
use antiphon_fabric::{
    Communicator, FabricError, LocalWorld, Operation, Signature,
    gpu::{Family, Grid, Launch, Pieces, Rails, Runtime, Source, Tenant, Work, kernel_call, kernels},
};

use antiphon_testing::{World, pes, role, say};

const TIMEOUT: Duration = Duration::from_secs(20);
const HEAP: usize = 1 << 20;
const MOST_RANKS: usize = 8;

kernels! {
    enum PutsKernel {
        ToAll = "puts_to_all",
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ToAll;

impl Family for ToAll {
    type Kernel = PutsKernel;
    type Arguments = Mail;
    const NAME: &'static str = "puts.cuh";
    const SOURCES: &'static [Source] = &[Mail::SOURCE, Source::new("puts.cuh", include_str!("puts.cuh"))];
    const PUTS: bool = true;

    fn define(&self, program: Program, _world_size: usize) -> Program {
        program.define("MOST_RANKS", MOST_RANKS)
    }
}

kernel_call! {
    /// A call of a rank.
    struct Mail = "mail" {
        /// Symmetric memory: the call's number, the signals, rows that came, and rows to be sent.
        own: *mut u8,
        /// That of each rank, where stores reach it.
        near: [*mut u8; MOST_RANKS],
        rank: u32,
        ranks: u32,
    }
}

/// A world of processes on nodes that have this many ranks.
fn world(of_each: &[usize], role: &str, variables: &[(&str, &str)]) -> World {
    World::of_pes("rails::rank_process", of_each, role, TIMEOUT, variables)
}

#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let comm = Communicator::from_env().unwrap();
    let driver = Driver::load().unwrap();
    let ordinal = comm.rank() as u32 % driver.device_count().unwrap();
    let context = Context::primary(driver.device(ordinal).unwrap()).unwrap();
    say("ready");
    let ended = match role.as_str() {
        "puts" => puts(&comm, &context),
        "again" => Rails::new(&comm, &context, HEAP, Runtime::Initialize)
            .and_then(|rails| rails.free(&comm))
            .and_then(|()| Rails::new(&comm, &context, HEAP, Runtime::Join))
            .and_then(|rails| rails.free(&comm))
            .map(|()| "freed twice".to_owned()),
        "join" => Rails::new(&comm, &context, HEAP, Runtime::Join).map(|_| "joined".to_owned()),
        "too much" => {
            Rails::new(&comm, &context, 1 << 40, Runtime::Initialize).map(|_| "allocated".to_owned())
        }
        "a group" => Rails::new(&comm, &context, HEAP, Runtime::Initialize).and_then(|_| {
            let group = comm.split(Some(comm.rank() as u64 % 2), 0)?.expect("every rank has a colour");
            Rails::new(&group, &context, HEAP, Runtime::Initialize).map(|_| "made".to_owned())
        }),
        other => panic!("{other} is no role"),
    };
    match ended {
        Ok(text) => say(text),
        Err(error) => say(error),
    }
    let _ = comm.barrier();
}

/// Calls in which every rank tells all others something. The last word is the number of words that came wrong.
fn puts(comm: &Communicator, context: &Context) -> Result<String, FabricError> {
    let node = comm.node_group()?;
    let tenant = Tenant::between_nodes(comm, &node, context, 0)?;
    let rails = Rails::new(comm, context, HEAP, Runtime::Initialize)?;
    tenant.load_together(comm, ToAll)?;
    let near = |rank| (rank != comm.rank()).then(|| rails.peer(rank)).flatten().map_or(0, |at| at.0);
    let all: Vec<u64> = (0..comm.world_size()).map(near).collect();
    let mut arguments = Mail {
        own: rails.pointer().0,
        near: [0; MOST_RANKS],
        rank: comm.rank() as u32,
        ranks: comm.world_size() as u32,
    };
    arguments.near[..all.len()].copy_from_slice(&all);
    let (stream, wrong) = (context.stream()?, DeviceMemory::allocate(context, 4)?);
    wrong.write(&stream, 0, &[0; 4])?;
    comm.barrier()?;
    for call in 0..40 {
        if (call * 7 + comm.rank() * 5).is_multiple_of(11) {
            std::thread::sleep(Duration::from_millis(3));
        }
        let loaded = tenant.ready(ToAll, stream.borrow())?;
        let launch = |_, _, _| Launch {
            kernel: PutsKernel::ToAll,
            grid: Grid::Exact { config: ToAll.blocks(1, 2), is_small: false },
            work: Work {
                output: wrong.pointer().0 as usize,
                ..Work::new(Signature::new(Operation::AllGather))
            },
            arguments,
        };
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe { tenant.run(&loaded, Pieces { total: 1, most: 1, unit: 1 }, stream.borrow(), launch)? };
    }
    stream.borrow().synchronize()?;
    tenant.check()?;
    let mut words = [0; 4];
    wrong.read(&stream, 0, &mut words)?;
    comm.barrier()?;
    drop(tenant);
    rails.free(comm)?;
    Ok(format!("{} wrong, stores reach some: {}", u32::from_ne_bytes(words), all.iter().any(|at| *at != 0)))
}

fn all_say(world: World, expected: &str) {
    for rank in 0..world.size() {
        let (_, said) = world.hear(rank);
        assert!(said.contains(expected), "rank {rank}: {said}");
    }
    world.end(&[]);
}

/// By the network, of which the emulator has one, or by stores where NVSHMEM finds a way.
#[test]
fn what_a_kernel_tells_other_nodes_arrives_whole_and_in_order() {
    if pes().is_none() {
        return;
    }
    for of_each in [&[1, 1][..], &[1, 1, 1], &[2, 2], &[1, 3]] {
        all_say(world(of_each, "puts", &[]), "0 wrong");
        all_say(
            world(of_each, "puts", &[("ANTIPHON_EMULATOR_REACH", "all")]),
            "0 wrong, stores reach some: true",
        );
    }
}

#[test]
fn a_library_that_runs_serves_again_and_is_joined() {
    if pes().is_some() {
        all_say(world(&[1, 1], "again", &[]), "freed twice");
        all_say(world(&[1, 1], "join", &[]), "Failed to initialize nvshmem: ");
    }
}

#[test]
fn what_cannot_be_is_an_error_on_all_ranks() {
    if pes().is_none() {
        return;
    }
    all_say(world(&[1, 1], "too much", &[]), "Failed to initialize nvshmem: ");
    let other_ranks = "Failed to initialize nvshmem: ";
    all_say(world(&[1, 1, 1, 1], "a group", &[]), other_ranks);
    let nowhere = [("ANTIPHON_NVSHMEM", "/nowhere")];
    all_say(world(&[1, 1], "join", &nowhere), "pip install nvidia-nvshmem-cu13");
}

#[test]
fn threads_of_a_process_are_refused() {
    let Some(driver) = pes() else { return };
    let errors = LocalWorld::run(3, |comm| {
        let context = Context::primary(driver.device(0).unwrap()).unwrap();
        Rails::new(&comm, &context, HEAP, Runtime::Initialize).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.ends_with("it serves one rank of a process, and ranks 0 and 1 are in one"), "{error}");
    }
}
