//! The kinds of calls, each with the results of two ranks.

use antiphon_collectives::{
    all_reduce::AllReduceOptions,
    mixed::{MixedCall, MixedOp},
};
use antiphon_fabric::{RegisteredMemory, gpu::Runtime};
use antiphon_topology::MixedLayout;

use super::*;

impl Rank {
    /// With the sums loaded, and after the other rank has done so: ranks that are threads wait for each other's kernels while they load.
    fn prepared(self) -> Outcome<Self> {
        self.session.prepare(self.device(), &[(DType::F32, ReduceOp::Sum)], None)?;
        self.session.queue()?.run(|comm| comm.barrier())?;
        Ok(self)
    }

    /// The first and the last of the numbers.
    fn ends(&self, memory: &Numbers) -> Outcome<[f32; 2]> {
        let mut bytes = vec![0; 4 * COUNT];
        memory.memory.read(&self.stream, 0, &mut bytes)?;
        self.session.check()?;
        let number = |at: usize| f32::from_ne_bytes([0, 1, 2, 3].map(|byte| bytes[4 * at + byte]));
        Ok([number(0), number(COUNT - 1)])
    }
}

#[test]
fn started_calls_return_what_they_kept() {
    on_gpus(patience(), |rank| {
        let rank = rank.prepared()?;
        let (sum, sent, received) = (rank.numbers()?, rank.numbers()?, rank.numbers()?);
        let peer = 1 - rank.rank;
        let [input, mut output] = [&sent, &received].map(|memory| view_mut(memory, DType::F32, &[COUNT]));
        let buffer = view_mut(&sum, DType::F32, &[COUNT]);
        let (session, stream) = (&rank.session, &rank.stream);
        // SAFETY: the memory lives until the stream has finished.
        let (reducing, sending, receiving) = unsafe {
            let reducing = session.start(stream, &SUM, buffer, "sum")?;
            let receiving = session.start_recv(stream, &mut output, peer, "received")?;
            (reducing, session.start_send(stream, &input.as_view(), peer, "sent")?, receiving)
        };
        assert_eq!(reducing.device(), rank.device());
        assert_eq!([reducing.finish(stream)?, sending.finish(stream)?], ["sum", "sent"]);
        drop(receiving); // which waits on this thread
        assert_eq!(rank.ends(&sum)?, [3.0; 2]);
        assert_eq!(rank.ends(&received)?, [peer as f32 + 1.0; 2]);
        end(&rank)
    });
}

#[test]
fn messages_go_both_ways() {
    on_gpus(patience(), |rank| {
        let rank = rank.prepared()?;
        let (sent, received) = (rank.numbers()?, rank.numbers()?);
        let peer = 1 - rank.rank;
        let input = view(&sent, DType::F32, &[COUNT]);
        let mut output = view_mut(&received, DType::F32, &[COUNT]);
        // SAFETY: the memory lives until the stream has finished.
        unsafe { rank.session.send_recv(&rank.stream, (&input, peer), (&mut output, peer)) }?;
        assert_eq!(rank.ends(&received)?, [peer as f32 + 1.0; 2]);
        // SAFETY: as above.
        unsafe {
            match rank.rank {
                0 => rank.session.send(&rank.stream, &input, peer)?,
                _ => rank.session.recv(&rank.stream, &mut view_mut(&received, DType::F32, &[COUNT]), peer)?,
            }
        }
        assert_eq!(rank.ends(&received)?, [peer as f32 + 1.0; 2]);
        end(&rank)
    });
}

#[test]
fn each_entry_of_a_list_has_its_call() {
    on_gpus(patience(), |rank| {
        let rank = rank.prepared()?;
        let (own, first, second) = (rank.numbers()?, rank.numbers()?, rank.numbers()?);
        let halves = || view(&own, DType::F32, &[COUNT / 2]);
        let list = [&first, &second].map(|memory| (halves(), view_mut(memory, DType::F32, &[COUNT])).into());
        let gather = Call::new(Operation::AllGather);
        // SAFETY: the memory lives until the stream has finished.
        unsafe { rank.session.call_list(&rank.stream, &gather, Vec::from(list)) }?;
        assert_eq!([rank.ends(&first)?, rank.ends(&second)?], [[1.0, 2.0]; 2]);

        // There is no launch of several sums.
        let list = [&first, &second].map(|memory| view_mut(memory, DType::F32, &[COUNT]).into());
        // SAFETY: as above.
        unsafe {
            rank.session.call_list(&rank.stream, &SUM, Vec::from(list))?;
            rank.session.call_list(&rank.stream, &SUM, Vec::new())?;
        }
        rank.session.barrier(&rank.stream)?;
        assert_eq!([rank.ends(&first)?, rank.ends(&second)?], [[2.0, 4.0]; 2]);
        end(&rank)
    });
}

#[test]
fn a_mixed_handler_gathers() {
    on_gpus(patience(), |rank| {
        let layout = MixedLayout::builder(rank.world_size, rank.rank).local_tp(1).build()?;
        let handler = rank.session.mixed(rank.device(), layout, DType::F32, None, Runtime::Initialize)?;
        let (own, all) = (rank.numbers()?, rank.numbers()?);
        let input = view(&own, DType::F32, &[COUNT / 2]);
        let mut output = view_mut(&all, DType::F32, &[COUNT]);
        let mode = handler.select(MixedOp::AllGather, 4 * COUNT / 2)?;
        let call = MixedCall::from(MixedOp::AllGather).mode(mode);
        // SAFETY: the memory lives until the stream has finished.
        unsafe { handler.run(&rank.stream, call, &input, &mut output) }?;
        assert_eq!(rank.ends(&all)?, [1.0, 2.0]);
        // SAFETY: as above.
        let started = unsafe { handler.start(&rank.stream, call, &input, &mut output, ()) }?;
        started.finish(&rank.stream)?;
        assert_eq!(rank.ends(&all)?, [1.0, 2.0]);
        handler.release_memory()?;
        let problem = match rank.rank {
            1 => Err(FabricError::invalid("no room")),
            _ => Ok(()),
        };
        let error = handler.restore_memory(problem).expect_err("rank 1 has no room");
        assert!(error.to_string().ends_with("no room"), "{error}");
        handler.restore_memory(Ok(()))?;
        end(&rank)
    });
}

#[test]
fn a_collection_takes_a_plan_or_the_built_in_call() {
    on_gpus(patience(), |rank| {
        let collection = rank.session.plan_collection(rank.device(), false)?;
        let execute = |memory: &Numbers| {
            let (buffer, call) =
                (view_mut(memory, DType::F32, &[COUNT]), ("allreduce", Operation::AllReduce));
            // SAFETY: the memory lives until the stream has finished.
            unsafe { collection.execute(&rank.stream, call, buffer) }
        };
        let memory = rank.numbers()?;
        assert!(execute(&memory).is_err(), "it has no plan");
        let options = CudaOptions { form: Form::Interpreted, ..CudaOptions::default() };
        collection.add(Ok(plan(&rank)?), &[], options)?;
        collection.add_built_in(ReduceOp::Sum)?;
        let said = collection.explain("allreduce", DType::F32, 4 * COUNT)?;
        assert_eq!(said.iter().map(|each| each.why_not.is_none()).collect::<Vec<_>>(), [true, false]);
        assert_eq!(execute(&memory)?, [Order::Plans]);
        assert_eq!(rank.ends(&memory)?, [3.0; 2]);

        let built_in = rank.session.plan_collection(rank.device(), false)?;
        built_in.add_built_in(ReduceOp::Sum)?;
        let (buffer, call) = (view_mut(&memory, DType::F32, &[COUNT]), ("allreduce", Operation::AllReduce));
        // SAFETY: as above.
        assert_eq!(unsafe { built_in.execute(&rank.stream, call, buffer) }?, [Order::Collectives]);
        assert_eq!(rank.ends(&memory)?, [6.0; 2]);
        collection.close()?;
        assert!(matches!(execute(&memory), Err(SessionError::CollectionClosed)));
        end(&rank)
    });
}

#[test]
fn registered_memory_is_found_until_it_is_taken_back() {
    on_gpus(patience(), |rank| {
        let memory = rank.numbers()?;
        let (device, address) = (rank.device(), memory.memory.pointer());
        rank.session.register(device, |comm, context| {
            RegisteredMemory::new(comm, context, address, 4 * COUNT as u64)
        })?;
        let rank = rank.prepared()?;
        let options = AllReduceOptions { registered: true, ..AllReduceOptions::default() };
        let call = SUM.with_algorithm(options.number());
        let sum = || {
            let buffer = view_mut(&memory, DType::F32, &[COUNT]);
            // SAFETY: the memory lives until the stream has finished.
            unsafe { rank.session.call(&rank.stream, &call, buffer) }
        };
        sum()?;
        assert_eq!(rank.ends(&memory)?, [3.0; 2]);
        rank.session.unregister(device, |_| Ok(address))?;
        assert!(sum().is_err(), "it is not registered any more");
        end(&rank)
    });
}
