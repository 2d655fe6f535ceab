//! Mixed collectives of GPUs on several nodes. Ranks are processes, each a PE of NVSHMEM, on one GPU if there is only one; see
//! `World::of_pes`. On the emulator NVSHMEM carries what passes between nodes, late and in another order, and with
//! `ANTIPHON_EMULATOR_REACH=all` stores do.

use std::time::{Duration, Instant};

use antiphon_collectives::mixed::{CudaMixedNodes, MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp};
use antiphon_device::cuda::{Context, DeviceMemory, Driver, Graph, Stream};
use antiphon_fabric::{Communicator, gpu::Runtime};
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut, bf16, f16};
use antiphon_testing::{World, pes, role, say, sized};
use rustix::process::Signal;

use crate::{
    harness::{At, Outcome, Random, values},
    mixed::lengths,
};

const TIMEOUT: Duration = Duration::from_secs(60);
const NEAR: [(&str, &str); 1] = [("ANTIPHON_EMULATOR_REACH", "all")];

/// A rank, and the mixed collectives of one of its layouts on the host and on its GPU.
struct Mixed<'a> {
    comm: &'a Communicator,
    stream: &'a Stream,
    context: &'a Context,
    host: MixedHandler,
    gpus: CudaMixedNodes,
}

impl<'a> Mixed<'a> {
    fn new(
        (comm, context, stream): (&'a Communicator, &'a Context, &'a Stream),
        layout: MixedLayout,
        most_blocks: usize,
    ) -> Outcome<Self> {
        let host = MixedHandler::new(comm, layout)?;
        let gpus = CudaMixedNodes::new(comm, context, layout, Runtime::Initialize)?.most_blocks(most_blocks);
        Ok(Self { comm, stream, context, host, gpus })
    }

    fn upload<T: Element>(&self, values: &[T]) -> Outcome<DeviceMemory> {
        let memory = DeviceMemory::allocate(self.context, size_of_val(values).max(16))?;
        memory.write(self.stream, 0, TensorView::from(values).as_bytes()?)?;
        Ok(memory)
    }

    fn queue(&self, call: MixedCall<'_>, input: At, output: At) -> Outcome {
        let device = Device::Cuda(self.context.device().ordinal());
        let at = |address: u64| address as usize as *mut u8;
        // SAFETY: the tests keep the memory until they have synchronised with the stream.
        unsafe {
            let input = TensorView::from_raw_parts(at(input.0), input.1, &[input.2], None, device)?;
            let mut output =
                TensorViewMut::from_raw_parts(at(output.0), output.1, &[output.2], None, device)?;
            Ok(self.gpus.run(call, &input, &mut output, self.stream.borrow())?)
        }
    }

    /// Elements of input and output.
    fn lengths(&self, call: &MixedCall<'_>, count: usize) -> (usize, usize) {
        lengths(self.host.layout(), call, count)
    }

    fn inputs<T: Element>(&self, call: &MixedCall<'_>, count: usize, offset: usize) -> (Vec<T>, Vec<T>) {
        let (from, to) = self.lengths(call, count);
        (values(self.comm.rank(), offset + from), vec![T::from_f64(7.0); offset + to])
    }

    /// Does the same on GPUs and on the host, behind `offset` elements, and compares the bits.
    fn compare<T: Element>(&self, call: MixedCall<'_>, count: usize, offset: usize) -> Outcome {
        let (input, mut expected) = self.inputs::<T>(&call, count, offset);
        let (from, to) = (self.upload(&input)?, self.upload(&expected)?);
        // A mode of the host's that an operation has no use for is another of the same bits.
        let of_host = if self.gpus.layout().use_mixed() { call } else { call.mode(None) };
        self.host.run(self.comm, of_host, &input[offset..], &mut expected[offset..])?;
        self.gpus.prepare(self.comm, T::DTYPE)?;
        let behind = |memory: &DeviceMemory, all: &[T]| part(memory, &all[offset..], offset);
        self.queue(call, behind(&from, &input), behind(&to, &expected))?;
        self.same(&format!("{call:?} of {count} behind {offset}"), &to, &expected)
    }

    fn same<T: Element>(&self, what: &str, got: &DeviceMemory, expected: &[T]) -> Outcome {
        let expected = TensorView::from(expected).as_bytes()?.to_vec();
        let (size, mut bytes) = (size_of::<T>(), vec![0; expected.len()]);
        got.read(self.stream, 0, &mut bytes)?;
        self.gpus.check()?; // the kernel's own error explains more than wrong results
        match bytes.chunks(size).zip(expected.chunks(size)).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => {
                let of = |bytes: &[u8]| bytes[at * size..][..size].to_vec();
                let (got, expected) = (of(&bytes), of(&expected));
                let (rank, layout) = (self.comm.rank(), self.host.layout());
                let text = format!(
                    "rank {rank}, {layout:?}, {what}: element {at} is {got:x?}, on the host {expected:x?}"
                );
                Err(text.into())
            }
        }
    }

    fn modes(&self) -> Vec<Option<MixedMode>> {
        self.gpus.valid_modes().iter().copied().map(Some).chain([None]).collect()
    }
}

/// Elements of this kind in memory, from the `first` on.
fn part<T: Element>(memory: &DeviceMemory, elements: &[T], first: usize) -> At {
    At(memory.pointer().0 + (first * size_of::<T>()) as u64, T::DTYPE, elements.len())
}

/// All layouts of the ranks on their nodes.
fn layouts(comm: &Communicator) -> Vec<MixedLayout> {
    let (nodes, world_size) = (comm.nodes().count(), comm.world_size());
    let local_size = world_size / nodes;
    let divisors = |of: usize| (1..=of).filter(move |divisor| of.is_multiple_of(*divisor));
    let layout = |local_tp: usize, inter_tp: usize| {
        MixedLayout::builder(world_size, comm.rank())
            .local_size(local_size)
            .local_tp(local_tp)
            .inter_tp(inter_tp)
            .build()
            .unwrap()
    };
    let pairs = divisors(local_size).flat_map(|local| divisors(nodes).map(move |inter| (local, inter)));
    pairs.map(|(local_tp, inter_tp)| layout(local_tp, inter_tp)).collect()
}

#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let comm = Communicator::from_env().unwrap();
    let driver = Driver::load().unwrap();
    let ordinal = comm.rank() as u32 % driver.device_count().unwrap();
    let context = Context::primary(driver.device(ordinal).unwrap()).unwrap();
    let stream = context.stream().unwrap();
    say("ready");
    let rank = (&comm, &context, &stream);
    let ended = match role.as_str() {
        "bits" => bits(rank),
        "rounds" => rounds(rank),
        "bursts" => bursts(rank),
        "graphs" => graphs(rank),
        "for ever" => for_ever(rank),
        "disagree" => disagree(rank),
        "refused" => refused(rank),
        other => panic!("{other} is no role"),
    };
    match ended {
        Ok(()) => say("right"),
        Err(error) => say(error),
    }
    let _ = comm.barrier();
}

/// What a rank says that takes long, as compilers do.
const WORKING: &str = "working";

type Of<'a> = (&'a Communicator, &'a Context, &'a Stream);

fn every_call<T: Element>(mixed: &Mixed<'_>, counts: &[usize], offset: usize) -> Outcome {
    mixed.gpus.prepare(mixed.comm, T::DTYPE)?;
    say(WORKING);
    let groups = mixed.host.layout().dp_size();
    for &op in mixed.gpus.valid_ops() {
        for mode in mixed.modes() {
            for &count in counts {
                mixed.compare::<T>(MixedCall::from(op).mode(mode), count, offset)?;
            }
            // An empty block, and one that is longer than the others.
            let uneven: Vec<usize> = (0..groups).map(|group| [0, 700, 65, 1][group % 4]).collect();
            if groups > 1 {
                mixed.compare::<T>(MixedCall::from(op).mode(mode).counts(&uneven[..]), 0, offset)?;
            }
        }
    }
    Ok(())
}

/// Every operation, mode and dtype of every layout.
fn bits(rank: Of<'_>) -> Outcome {
    for layout in layouts(rank.0) {
        let mixed = Mixed::new(rank, layout, 16)?;
        every_call::<bf16>(&mixed, sized(&[1, 9, 1000, 70_001], &[9, 1000]), 0)?;
        every_call::<f16>(&mixed, &[257], 3)?;
        every_call::<f32>(&mixed, &[1, 514], 0)?;
        if !layout.use_tp() {
            let call = MixedCall::from(MixedOp::AllGather);
            mixed.compare::<u8>(call, 1001, 1)?;
            mixed.compare::<f64>(call, 333, 0)?;
        }
        mixed.gpus.close(rank.0)?;
    }
    Ok(())
}

/// Calls that take several rounds, in place, with ranks that are late.
fn rounds(rank: Of<'_>) -> Outcome {
    let mut random = Random(7);
    for layout in layouts(rank.0) {
        let mixed = Mixed::new(rank, layout, 2)?;
        mixed.gpus.prepare(rank.0, DType::BF16)?;
        say(WORKING);
        for (&op, mode) in
            mixed.gpus.valid_ops().iter().flat_map(|op| mixed.modes().into_iter().map(move |mode| (op, mode)))
        {
            let call = MixedCall::from(op).mode(mode);
            for count in [sized(200_003, 20_003), 8, 3000] {
                random.delay_once_in(2, rank.0);
                let (input, mut expected) = mixed.inputs::<bf16>(&call, count, 0);
                let of_host = if layout.use_mixed() { call } else { call.mode(None) };
                mixed.host.run(rank.0, of_host, &input, &mut expected)?;
                // The smaller tensor is the rank's own block of the larger one, in which the input stands and the output comes.
                let own = if op == MixedOp::AllReduce { 0 } else { layout.dp_rank() * count };
                let mut row = input.clone();
                row.resize(input.len().max(expected.len()), input[0]);
                let [from, to] =
                    [&input, &expected].map(|part| if part.len() == row.len() { 0 } else { own });
                row[from..from + input.len()].copy_from_slice(&input);
                let memory = mixed.upload(&row)?;
                mixed.queue(call, part(&memory, &input, from), part(&memory, &expected, to))?;
                row[to..to + expected.len()].copy_from_slice(&expected);
                mixed.same(&format!("{call:?} of {count} in place"), &memory, &row)?;
            }
        }
        mixed.gpus.close(rank.0)?;
    }
    Ok(())
}

/// Many calls behind each other, which no host waits for, in all modes and with ranks that are late.
fn bursts(rank: Of<'_>) -> Outcome {
    let mut random = Random(11);
    for layout in layouts(rank.0) {
        let mixed = Mixed::new(rank, layout, 2)?;
        mixed.gpus.prepare(rank.0, DType::F32)?;
        say(WORKING);
        let (ops, modes) = (mixed.gpus.valid_ops(), mixed.modes());
        let mut calls = Vec::new();
        for number in 0..40 {
            let call = MixedCall::from(ops[number % ops.len()]).mode(modes[random.below(modes.len())]);
            let (from, to) = mixed.lengths(&call, 1 + random.below(3000));
            let input = values::<f32>(rank.0.rank() + 100 * number, from);
            let mut expected = vec![7f32; to];
            let of_host = if layout.use_mixed() { call } else { call.mode(None) };
            mixed.host.run(rank.0, of_host, &input, &mut expected)?;
            calls.push((call, mixed.upload(&input)?, input, mixed.upload(&vec![7f32; to])?, expected));
        }
        for (call, from, input, to, expected) in &calls {
            random.delay_once_in(6, rank.0);
            mixed.queue(*call, part(from, input, 0), part(to, expected, 0))?;
        }
        for (number, (call, _, _, to, expected)) in calls.iter().enumerate() {
            mixed.same(&format!("{call:?}, call {number} of a burst"), to, expected)?;
        }
        mixed.gpus.close(rank.0)?;
    }
    Ok(())
}

/// Graphs of one to three calls, replayed between eager ones.
fn graphs(rank: Of<'_>) -> Outcome {
    for layout in layouts(rank.0) {
        let mixed = Mixed::new(rank, layout, 4)?;
        mixed.gpus.prepare(rank.0, DType::F32)?;
        for &op in mixed.gpus.valid_ops() {
            let modes = mixed.modes();
            let calls: Vec<_> = modes.iter().map(|mode| MixedCall::from(op).mode(*mode)).collect();
            let tensors = |call: &MixedCall<'_>| -> Outcome<_> {
                let (input, mut expected) = mixed.inputs::<f32>(call, 1500, 0);
                let (from, to) = (mixed.upload(&input)?, mixed.upload(&expected)?);
                mixed.host.run(rank.0, call.mode(None), &input, &mut expected)?;
                Ok((from, input, to, expected))
            };
            for length in 1..=3 {
                let captured: Vec<_> = calls.iter().cycle().take(length).collect();
                let memory = captured.iter().map(|call| tensors(call)).collect::<Outcome<Vec<_>>>()?;
                let graph = Graph::capture(rank.2, |_| {
                    captured.iter().zip(&memory).try_for_each(|(call, (from, input, to, expected))| {
                        mixed.queue(**call, part(from, input, 0), part(to, expected, 0))
                    })
                })?
                .instantiate()?;
                for call in &calls {
                    // SAFETY: the memory lives until it has been read.
                    unsafe { graph.launch(rank.2) }?;
                    mixed.compare::<f32>(*call, 77, 0)?;
                }
                // SAFETY: as above.
                unsafe { graph.launch(rank.2) }?;
                for (call, (_, _, to, expected)) in captured.iter().zip(&memory) {
                    mixed.same(&format!("{call:?} in a graph of {length}"), to, expected)?;
                }
            }
        }
        mixed.gpus.close(rank.0)?;
    }
    Ok(())
}

/// Calls until one fails.
fn for_ever(rank: Of<'_>) -> Outcome {
    let layout = *layouts(rank.0).last().expect("there is one");
    let mixed = Mixed::new(rank, layout, 4)?;
    mixed.gpus.prepare(rank.0, DType::F32)?;
    say("calling");
    for call in 0.. {
        let mode = mixed.gpus.valid_modes()[call % mixed.gpus.valid_modes().len()];
        let call = MixedCall::from(mixed.gpus.valid_ops()[0]).mode(mode);
        let (input, output) = mixed.inputs::<f32>(&call, 5000, 0);
        let (from, to) = (mixed.upload(&input)?, mixed.upload(&output)?);
        mixed.queue(call, part(&from, &input, 0), part(&to, &output, 0))?;
        rank.2.borrow().synchronize()?;
        mixed.gpus.check()?;
    }
    Ok(())
}

/// Ranks whose calls differ.
fn disagree(rank: Of<'_>) -> Outcome {
    let layout = *layouts(rank.0).last().expect("there is one");
    let mixed = Mixed::new(rank, layout, 4)?;
    mixed.gpus.prepare(rank.0, DType::F32)?;
    let call = MixedCall::from(MixedOp::AllReduce);
    let count = 1000 + rank.0.rank();
    let (input, output) = mixed.inputs::<f32>(&call, count, 0);
    let (from, to) = (mixed.upload(&input)?, mixed.upload(&output)?);
    mixed.queue(call, part(&from, &input, 0), part(&to, &output, 0))?;
    rank.2.borrow().synchronize()?;
    mixed.gpus.check()?;
    Ok(())
}

/// Layouts and calls that are refused, after which the ranks go on.
fn refused(rank: Of<'_>) -> Outcome {
    let (comm, context, _) = rank;
    let refusal = |layout: MixedLayout| {
        CudaMixedNodes::new(comm, context, layout, Runtime::Initialize).unwrap_err().to_string()
    };
    let world_size = comm.world_size();
    let text = refusal(MixedLayout::builder(world_size, comm.rank()).build()?);
    assert!(text.contains("the nodes of the communicator have the ranks"), "{text}");
    let mixed = Mixed::new(rank, layouts(comm)[0], 4)?;
    let call = MixedCall::from(mixed.gpus.valid_ops()[0]).mode(MixedMode::Composed);
    let (input, output) = mixed.inputs::<f32>(&call, 10, 0);
    let (from, to) = (mixed.upload(&input)?, mixed.upload(&output)?);
    let (whole, out) = (part(&from, &input, 0), part(&to, &output, 0));
    let text = mixed.queue(call, whole, out).unwrap_err().to_string();
    assert!(text.contains("not composed"), "{text}");
    let call = MixedCall::from(mixed.gpus.valid_ops()[0]);
    assert!(mixed.queue(call, part(&from, &input[1..], 0), out).is_err());
    every_call::<f32>(&mixed, &[10], 0)?;
    Ok(mixed.gpus.close(comm)?)
}

fn all_say(of_each: &[usize], role: &str, variables: &[(&str, &str)], expected: &str) {
    let world = World::of_pes("nodes::rank_process", of_each, role, TIMEOUT, variables);
    for rank in 0..world.size() {
        let said = std::iter::repeat_with(|| world.hear(rank).1).find(|said| said != WORKING).unwrap();
        assert!(said.contains(expected), "rank {rank}: {said}");
    }
    world.end(&[]);
}

/// Ranks that reach each other by NVSHMEM, and ranks that do so by stores, give the right results.
fn all_are_right(of_each: &[usize], role: &str) {
    if pes().is_some() {
        all_say(of_each, role, &[], "right");
        all_say(of_each, role, &NEAR, "right");
    }
}

#[test]
fn calls_have_the_hosts_bits_on_nodes_of_1_and_1() {
    all_are_right(&[1, 1], "bits");
}

#[test]
fn calls_have_the_hosts_bits_on_nodes_of_2_and_2() {
    all_are_right(&[2, 2], "bits");
}

#[test]
fn calls_have_the_hosts_bits_on_three_nodes() {
    all_are_right(&[1, 1, 1], "bits");
}

#[test]
fn calls_have_the_hosts_bits_on_four_nodes_of_2() {
    all_are_right(&[2, 2, 2, 2], "bits");
}

#[test]
fn calls_of_several_rounds_in_place_have_the_hosts_bits() {
    all_are_right(&[1, 1], "rounds");
    all_are_right(&[2, 2], "rounds");
}

#[test]
fn calls_that_no_host_waits_for_have_the_hosts_bits() {
    all_are_right(&[1, 1], "bursts");
    all_are_right(&[1, 1, 1], "bursts");
    all_are_right(&[2, 2], "bursts");
}

#[test]
fn graphs_are_replayed_between_eager_calls() {
    all_are_right(&[1, 1], "graphs");
    all_are_right(&[2, 2], "graphs");
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    if pes().is_none() {
        return;
    }
    for (of_each, victim) in [(&[1, 1][..], 1), (&[2, 2], 0), (&[2, 2], 3)] {
        let world = World::of_pes("nodes::rank_process", of_each, "for ever", TIMEOUT, &[]);
        for rank in 0..world.size() {
            assert_eq!(world.hear(rank).1, "calling");
        }
        std::thread::sleep(Duration::from_millis(150));
        let killed: Instant = world.signal(victim, Signal::KILL);
        for rank in world.others(victim) {
            let (heard, said) = world.hear(rank);
            assert!(said.contains(&format!("rank {victim}")) && said.contains("lost"), "rank {rank}: {said}");
            assert!(heard - killed < Duration::from_secs(10), "rank {rank} knew after {:?}", heard - killed);
        }
        world.end(&[victim]);
    }
}

#[test]
fn ranks_that_disagree_are_told_so() {
    if pes().is_some() {
        all_say(&[1, 1], "disagree", &[], "ranks disagree");
        all_say(&[2, 2], "disagree", &[], "");
    }
}

#[test]
fn what_is_refused_leaves_the_ranks_able_to_go_on() {
    if pes().is_some() {
        all_say(&[2, 2], "refused", &[], "right");
    }
}
