//! The mixed collectives of GPUs on several nodes, of a session. Ranks are processes, each a PE of NVSHMEM.

use antiphon_collectives::mixed::{MixedCall, MixedMode, MixedOp};
use antiphon_device::cuda::Driver;
use antiphon_fabric::{Communicator, gpu::Runtime};
use antiphon_topology::MixedLayout;

use super::*;
use antiphon_testing::{World, pes, role, say};

#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let comm = Communicator::from_env().unwrap();
    say("ready");
    match calls(comm, &role) {
        Ok(()) => say("right"),
        Err(error) => say(error),
    }
}

/// A call, a started one, what is missing, and the end.
fn calls(comm: Communicator, role: &str) -> Outcome {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let device = rank as u32 % Driver::load()?.device_count()?;
    let layout = MixedLayout::builder(world_size, rank).local_size(1).inter_tp(world_size).build()?;
    let session = Session::new(comm);
    let runtime = if role == "join" { Runtime::Join } else { Runtime::Initialize };
    let handler = session.mixed(device, layout, DType::F32, Some(2), runtime)?;
    let context = Context::primary(Driver::load()?.device(device)?)?;
    let stream = context.stream()?;
    let bytes: Vec<u8> = (0..COUNT).flat_map(|index| ((index + rank * 1000) as f32).to_ne_bytes()).collect();
    let (mut input, mut output) =
        (DeviceMemory::allocate(&context, 4 * COUNT)?, DeviceMemory::allocate(&context, 4 * COUNT)?);
    input.write(&stream, 0, &bytes)?;
    let sum = |at: usize| (0..world_size).map(|rank| (at + rank * 1000) as f32).sum::<f32>();
    let call = MixedCall::from(MixedOp::AllReduce).mode(MixedMode::Bytes2);
    for is_started in [false, true] {
        let from = input.view_mut(DType::F32, &[COUNT])?;
        let mut to = output.view_mut(DType::F32, &[COUNT])?;
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe {
            match is_started {
                false => handler.run(&stream, call, &from.as_view(), &mut to)?,
                true => {
                    let started = handler.start(&stream, call, &from.as_view(), &mut to, ())?;
                    started.finish(&stream)?;
                }
            }
        }
        let mut read = vec![0; 4 * COUNT];
        output.read(&stream, 0, &mut read)?;
        session.check()?;
        let numbers: Vec<f32> =
            read.chunks(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap())).collect();
        assert!(numbers.iter().enumerate().all(|(at, number)| *number == sum(at)), "{numbers:?}");
    }
    for refused in [handler.tune(8192..=8192), handler.release_memory(), handler.restore_memory(Ok(()))] {
        assert!(matches!(refused, Err(SessionError::Fabric(FabricError::NotImplemented(_)))), "{refused:?}");
    }
    handler.close()?;
    assert!(matches!(handler.select(MixedOp::AllReduce, 8), Err(SessionError::Closed)));
    session.close();
    Ok(())
}

fn all_say(role: &str, expected: &str) {
    if pes().is_none() {
        return;
    }
    let world = World::of_pes("nodes::rank_process", &[1, 1], role, Duration::from_secs(60), &[]);
    for rank in 0..world.size() {
        let (_, said) = world.hear(rank);
        assert!(said.contains(expected), "rank {rank}: {said}");
    }
    world.end(&[]);
}

#[test]
fn a_mixed_handler_sums_between_nodes_of_1_and_1() {
    all_say("sums", "right");
}

#[test]
fn a_library_that_does_not_run_is_not_joined() {
    all_say("join", "Failed to initialize nvshmem: the program has not initialised it");
}
