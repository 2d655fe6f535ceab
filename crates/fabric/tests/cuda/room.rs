//! More communicators and streams than a GPU has room for grids that wait.

use std::time::Duration;

use antiphon_device::cuda::{DeviceMemory, Event, Graph, Stream};
use antiphon_fabric::{Communicator, FabricError, gpu::Tenant};
use antiphon_testing::rotation::{Rotation, rotate};

use crate::{Outcome, Rank, on_gpus, values};

/// A communicator with a tenant and a stream, and a call of its own.
struct Caller {
    tenant: Tenant,
    stream: Stream,
    from: DeviceMemory,
    to: DeviceMemory,
    expected: Vec<f32>,
    _comm: Communicator,
}

const COUNT: usize = 4 << 10;

impl Caller {
    fn new(rank: &Rank, number: usize) -> Outcome<Self> {
        let (me, world) = (rank.comm.rank(), rank.comm.world_size());
        let comm = rank.comm.split(Some(0), 0)?.expect("all ranks have a color");
        let tenant = Tenant::new(&comm, rank.sums.context(), Tenant::LEAST_STAGING_BYTES)?;
        tenant.load_together(&comm, Rotation)?;
        Ok(Self {
            tenant,
            stream: rank.sums.context().stream()?,
            from: rank.upload(&values(me, number, COUNT))?,
            to: rank.upload(&vec![-1.0; COUNT])?,
            expected: values((me + world - 1) % world, number, COUNT),
            _comm: comm,
        })
    }

    fn call(&self, stream: &Stream) -> Result<(), FabricError> {
        let [from, to] = [self.from.pointer(), self.to.pointer()];
        // SAFETY: the tests keep the memory until they have synchronised with the streams.
        unsafe { rotate(&self.tenant, [from, to], 4 * COUNT, stream.borrow()) }
    }

    fn check(&self, rank: &Rank) -> Outcome {
        self.stream.borrow().synchronize_within(Duration::from_secs(60))?;
        let got = rank.download(&self.to, &self.stream)?;
        self.tenant.check()?;
        assert!(got == self.expected, "rank {} has other values", rank.comm.rank());
        Ok(())
    }
}

/// While calls on two streams wait for a late rank, a call on a third stream, of another communicator, stays behind the first.
#[test]
fn a_call_on_a_third_stream_comes_behind_the_first_on_2_gpus() {
    on_gpus(2, Duration::from_secs(60), |rank| {
        let callers = (0..3).map(|number| Caller::new(&rank, number)).collect::<Outcome<Vec<_>>>()?;
        let [second, third] = [Event::new(rank.sums.context())?, Event::new(rank.sums.context())?];
        rank.comm.barrier()?;
        if rank.comm.rank() == 0 {
            callers[0].call(&callers[0].stream)?;
            callers[1].tenant.enter(callers[1].stream.borrow())?;
            second.record(&callers[1].stream)?;
            second.synchronize()?; // there is room for two
            callers[1].call(&callers[1].stream)?;
            callers[2].tenant.enter(callers[2].stream.borrow())?;
            third.record(&callers[2].stream)?;
            std::thread::sleep(Duration::from_millis(20));
            assert!(!third.is_passed()?, "there is no room for three");
            rank.comm.barrier()?;
        } else {
            rank.comm.barrier()?;
            callers.iter().take(2).try_for_each(|caller| caller.call(&caller.stream))?;
        }
        callers.iter().take(2).try_for_each(|caller| caller.check(&rank))?;
        callers[2].call(&callers[2].stream)?;
        callers[2].check(&rank)
    });
}

/// All ranks call in one order, which looks random; every communicator uses streams of others, too. Ranks are late in turn.
fn many_communicators(world: usize, communicators: usize) {
    on_gpus(world, Duration::from_secs(60), |rank| {
        let callers =
            (0..communicators).map(|number| Caller::new(&rank, number)).collect::<Outcome<Vec<_>>>()?;
        let mut random = 1u64;
        let mut below = |range: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % range
        };
        for round in 0..40 {
            let (caller, stream) = (below(communicators), below(communicators));
            if below(world) == rank.comm.rank() && round % 4 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            callers[caller].call(&callers[stream].stream)?;
        }
        for caller in &callers {
            caller.stream.borrow().synchronize_within(Duration::from_secs(60))?;
        }
        callers.iter().try_for_each(|caller| caller.check(&rank))
    });
}

#[test]
fn three_communicators_have_room_on_2_gpus() {
    many_communicators(2, 3);
}

#[test]
fn three_communicators_have_room_on_3_gpus() {
    many_communicators(3, 3);
}

#[test]
fn four_communicators_have_room_on_4_gpus() {
    many_communicators(4, 4);
}

#[test]
fn three_communicators_have_room_on_8_gpus() {
    many_communicators(8, 3);
}

/// Forks of a capture are in one graph, which may have as many branches as there are communicators.
#[test]
fn branches_of_a_graph_have_room_on_2_gpus() {
    on_gpus(2, Duration::from_secs(60), |rank| {
        let callers = (0..4).map(|number| Caller::new(&rank, number)).collect::<Outcome<Vec<_>>>()?;
        let context = rank.sums.context();
        let main = context.stream()?;
        let (forked, joined) = (Event::new(context)?, Event::new(context)?);
        callers.iter().try_for_each(|caller| caller.call(&main))?; // loads the kernels
        let graph = Graph::capture(&main, |_| -> Outcome {
            forked.record(&main)?;
            for caller in &callers {
                caller.stream.borrow().wait(&forked)?;
                caller.call(&caller.stream)?;
            }
            for caller in &callers {
                joined.record(&caller.stream)?;
                main.borrow().wait(&joined)?;
            }
            Ok(())
        })?
        .instantiate()?;
        for replay in 0..6 {
            if replay % 2 == rank.comm.rank() {
                std::thread::sleep(Duration::from_millis(3));
            }
            // SAFETY: what the graph uses lives until the stream has been waited for.
            unsafe { graph.launch(&main) }?;
        }
        main.borrow().synchronize_within(Duration::from_secs(60))?;
        callers.iter().try_for_each(|caller| caller.check(&rank))
    });
}
