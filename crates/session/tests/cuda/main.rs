//! What a session promises: a GPU is opened once, never in a capture; one action after a failure, one end. Ranks are threads, one for
//! each GPU; without a GPU for every rank a test is recorded as skipped.

mod experts;
mod handed_out;
mod nodes;

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use antiphon_device::cuda::{Context, DeviceMemory, Graph, Stream};
use antiphon_executor::{
    ExecutorError,
    cuda::{CudaOptions, Form},
};
use antiphon_fabric::{FabricError, LocalWorld};
use antiphon_language::library::{Setting, find};
use antiphon_moe::{MoeConfig, slots::SlotLimits};
use antiphon_operation::{Call, Operation, ReduceOp};
use antiphon_plan::verify::{Memory, Options as Proof, VerifiedPlan};
use antiphon_session::{FailureAction, MoeStream, Order, Session, SessionError};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use antiphon_testing::{CountingAllocator, Taken, gpus, sized};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A session may move between threads, and threads may share it and what it hands out.
const _: fn() = || {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Session>();
    is_shared::<antiphon_session::Moe>();
    is_shared::<antiphon_session::MoeSlots>();
    is_shared::<antiphon_session::MixedHandler>();
    is_shared::<antiphon_session::LoadedPlan>();
    is_shared::<antiphon_session::PlanCollection>();
};

const SUM: Call<'static> = Call::new(Operation::AllReduce);
const COUNT: usize = 64;
const SMALL: MoeConfig = MoeConfig { region_bytes: 1 << 20, num_sms: 2, slots: None };

/// What a rank of a test has.
struct Rank {
    rank: usize,
    world_size: usize,
    session: Session,
    context: Context,
    stream: Stream,
}

/// Memory on a rank's GPU.
struct Numbers {
    memory: DeviceMemory,
    device: Device,
}

impl Rank {
    fn device(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// `COUNT` times the number of this rank plus one, on its GPU.
    fn numbers(&self) -> Outcome<Numbers> {
        let memory = DeviceMemory::allocate(&self.context, 4 * COUNT)?;
        memory.write(&self.stream, 0, &(self.rank as f32 + 1.0).to_ne_bytes().repeat(COUNT))?;
        Ok(Numbers { memory, device: Device::Cuda(self.device()) })
    }

    /// What each of the numbers is after `sums` sums.
    fn expect(&self, memory: &Numbers, sums: u32) -> Outcome {
        let mut bytes = vec![0; 4 * COUNT];
        memory.memory.read(&self.stream, 0, &mut bytes)?;
        let first = (self.world_size * (self.world_size + 1) / 2) as f32;
        let expected = first * (self.world_size as f32).powi(sums as i32 - 1);
        assert_eq!(bytes, expected.to_ne_bytes().repeat(COUNT), "each is {expected}");
        Ok(self.session.check()?)
    }

    fn sum(&self, memory: &Numbers) -> Result<(), SessionError> {
        // SAFETY: the tests use the memory in the order of the stream alone.
        unsafe { self.session.call(&self.stream, &SUM, view_mut(memory, DType::F32, &[COUNT])) }
    }

    /// Calls in a capture, which the first call of its kind must not be. The capture stays what it was.
    fn refused_in_a_capture<T>(
        &self,
        call: impl FnOnce() -> Result<T, SessionError>,
    ) -> Outcome<SessionError> {
        let mut refused = None;
        let graph = Graph::capture(&self.stream, |_| -> Result<(), SessionError> {
            refused = call().err();
            Ok(())
        })?;
        assert_eq!(graph.node_count()?, 0, "nothing was recorded");
        Ok(refused.expect("the call is refused"))
    }
}

fn view_mut<'a>(memory: &'a Numbers, dtype: DType, shape: &[usize]) -> TensorViewMut<'a> {
    let at = memory.memory.pointer().0 as usize as *mut u8;
    // SAFETY: the memory has room for these elements; the tests use it in the order of a stream alone.
    unsafe { TensorViewMut::from_raw_parts(at, dtype, shape, None, memory.device) }.unwrap()
}

fn view<'a>(memory: &'a Numbers, dtype: DType, shape: &[usize]) -> TensorView<'a> {
    view_mut(memory, dtype, shape).into_view()
}

/// What `body` returns on each of two GPUs; nothing where there are fewer.
fn on_gpus<T: Send>(timeout: Duration, body: impl Fn(Rank) -> Outcome<T> + Sync) -> Vec<T> {
    let Some(driver) = gpus(2) else { return Vec::new() };
    let outcomes = LocalWorld::run_with(2, timeout, |comm| -> Outcome<T> {
        let context = Context::primary(driver.device(comm.rank() as u32)?)?;
        let (stream, rank, world_size) = (context.stream()?, comm.rank(), comm.world_size());
        body(Rank { rank, world_size, session: Session::new(comm), context, stream })
    });
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// The emulator compiles a kernel in seconds, one after the other.
fn patience() -> Duration {
    sized(Duration::from_secs(20), Duration::from_secs(180))
}

/// Ranks that are threads end together: one that left while a kernel of another one waits would be lost to that.
fn end(rank: &Rank) -> Outcome {
    rank.stream.borrow().synchronize()?;
    Ok(rank.session.queue()?.run(|comm| comm.barrier())?)
}

/// A proved all-reduce.
fn plan(rank: &Rank) -> Outcome<VerifiedPlan> {
    let mut setting = Setting::new(rank.world_size as u32);
    setting.inplace = true;
    let plan = find("packet-all-reduce").ok_or("the library lacks it")?.plan(&setting)?;
    let proof = Proof { memory: Memory::Device, ..Proof::default() };
    Ok(VerifiedPlan::new(plan, &proof).map_err(|report| report.to_string())?)
}

fn load(rank: &Rank) -> Outcome<antiphon_session::LoadedPlan> {
    let options = CudaOptions { form: Form::Interpreted, ..CudaOptions::default() };
    Ok(rank.session.load_plan(rank.device(), Ok(plan(rank)?), options)?)
}

mod opened {
    use super::*;

    #[test]
    fn the_first_collective_in_a_capture_is_refused_and_says_what_to_do() {
        on_gpus(patience(), |rank| {
            let memory = rank.numbers()?;
            let error = rank.refused_in_a_capture(|| rank.sum(&memory))?;
            assert!(matches!(error, SessionError::Captured { calls: "CUDA call" }), "{error}");
            assert!(error.to_string().contains("call Session::prepare"), "{error}");

            // As it says.
            rank.session.prepare(rank.device(), &[(DType::F32, ReduceOp::Sum)], None)?;
            let graph = Graph::capture(&rank.stream, |_| rank.sum(&memory))?.instantiate()?;
            for _ in 0..2 {
                // SAFETY: the memory lives.
                unsafe { graph.launch(&rank.stream) }?;
            }
            rank.expect(&memory, 2)?;
            end(&rank)
        });
    }

    #[test]
    fn the_first_call_of_experts_in_a_capture_is_refused_too() {
        on_gpus(patience(), |rank| {
            rank.session.prepare(rank.device(), &[], None)?; // which opens the collectives alone
            let moe = rank.session.moe(SMALL);
            let (ids, outputs) = (rank.numbers()?, [rank.numbers()?, rank.numbers()?, rank.numbers()?]);
            let layout = || {
                let [mut per_rank, mut per_expert, mut in_rank] = [
                    view_mut(&outputs[0], DType::I32, &[2]),
                    view_mut(&outputs[1], DType::I32, &[4]),
                    view_mut(&outputs[2], DType::U8, &[3, 2]),
                ];
                let ids = view(&ids, DType::I64, &[3, 1]);
                // SAFETY: the memory is used in the order of the stream alone.
                unsafe { moe.layout(&rank.stream, &ids, [&mut per_rank, &mut per_expert, &mut in_rank]) }
            };
            let error = rank.refused_in_a_capture(layout)?;
            assert!(matches!(error, SessionError::Captured { calls: "MoE call" }), "{error}");

            let most = SlotLimits { max_tokens: 4, hidden: 128, num_experts: 4, top_k: 1 };
            let error = rank.refused_in_a_capture(|| rank.session.moe_slots(&rank.stream, most))?;
            assert!(matches!(error, SessionError::Captured { calls: "MoE slots" }), "{error}");
            end(&rank)
        });
    }

    /// The page of the crate says so.
    #[test]
    fn a_warm_collective_takes_one_lock() {
        on_gpus(patience(), |rank| {
            let memory = rank.numbers()?;
            let taken = Taken::by_each_of(sized(1000, 50), || rank.sum(&memory).expect("it is warm"));
            end(&rank)?;
            assert_eq!(taken, Taken::new(0, 1));
            Ok(rank.session.check()?)
        });
    }

    /// Rank 1 opens its GPU once. If the two threads of rank 0 each opened theirs, the second one would wait for rank 1 until the
    /// deadline.
    #[test]
    fn first_calls_of_two_threads_open_a_gpu_once() {
        on_gpus(patience(), |rank| {
            let threads = if rank.rank == 0 { 2 } else { 1 };
            let ready = std::sync::Barrier::new(threads);
            thread::scope(|scope| -> Outcome {
                let first_call = || -> Result<(), SessionError> {
                    ready.wait();
                    rank.session.prepare(rank.device(), &[(DType::F32, ReduceOp::Sum)], None)
                };
                let calls: Vec<_> = (0..threads).map(|_| scope.spawn(first_call)).collect();
                calls.into_iter().try_for_each(|call| Ok(call.join().expect("it does not panic")?))
            })?;
            let memory = rank.numbers()?;
            rank.sum(&memory)?;
            rank.expect(&memory, 1)?;
            end(&rank)
        });
    }
}

mod closed {
    use super::*;

    #[test]
    fn what_a_session_handed_out_obeys_its_end() {
        on_gpus(patience(), |rank| {
            let memory = rank.numbers()?;
            rank.sum(&memory)?;
            let most = SlotLimits { max_tokens: 4, hidden: 128, num_experts: 4, top_k: 1 };
            let (moe, slots) = (rank.session.moe(SMALL), rank.session.moe_slots(&rank.stream, most)?);
            let plan = load(&rank)?;
            end(&rank)?;
            rank.session.finish()?;
            assert!(rank.session.is_closed());
            rank.session.close();

            assert!(matches!(rank.sum(&memory), Err(SessionError::Closed)));
            assert!(matches!(rank.session.queue(), Err(SessionError::Closed)));
            let mut output = view_mut(&memory, DType::F32, &[COUNT]);
            // SAFETY: nothing is launched.
            let executed = unsafe { plan.execute(&rank.stream, None, &mut output, false) };
            assert!(matches!(executed, Err(SessionError::Closed)), "{executed:?}");

            let [words, sources] = [(); 2].map(|()| view(&memory, DType::I32, &[4]));
            // SAFETY: as above.
            let routes = unsafe { moe.routes_of(&rank.stream, (&words, &sources), [4, 1, 1]) };
            assert!(matches!(routes, Err(SessionError::Closed)), "{:?}", routes.err());
            slots.check()?; // there is nothing to report
            drop(rank.session); // which closes once more
            Ok(())
        });
    }

    #[test]
    fn a_closed_plan_is_refused_by_name() {
        on_gpus(patience(), |rank| {
            let (plan, memory) = (load(&rank)?, rank.numbers()?);
            let execute = || {
                let mut output = view_mut(&memory, DType::F32, &[COUNT]);
                // SAFETY: the memory is used in the order of the stream alone.
                unsafe { plan.execute(&rank.stream, None, &mut output, false) }
            };
            // The size is not prepared, which a capture cannot do.
            let error = rank.refused_in_a_capture(execute)?;
            let is_unprepared = |error: &ExecutorError| matches!(error, ExecutorError::Unprepared { .. });
            assert!(matches!(&error, SessionError::Plan(error) if is_unprepared(error)), "{error}");
            execute()?;
            rank.expect(&memory, 1)?;
            plan.close()?;
            assert!(matches!(execute(), Err(SessionError::PlanClosed)));
            end(&rank)
        });
    }
}

mod failures {
    use super::*;

    /// The action was set before the GPU was opened, and is about a kind of calls that is opened later.
    #[test]
    fn the_action_holds_for_what_is_opened_later() {
        let told = on_gpus(patience(), |rank| {
            let (tell, told) = mpsc::channel();
            let tell = std::sync::Mutex::new(tell);
            let action = move |error: &FabricError| {
                let _ = tell.lock().unwrap().send(error.to_string());
            };
            rank.session.on_failure(FailureAction::Call(Arc::new(action)));
            rank.session.prepare(rank.device(), &[(DType::F32, ReduceOp::Sum)], None)?;
            let memory = rank.numbers()?;
            rank.sum(&memory)?;
            rank.expect(&memory, 1)?;
            let queue = rank.session.queue()?;
            queue.run(|comm| comm.barrier())?;
            queue.monitor().set_timeout(Duration::from_secs(1));
            drop(queue);
            if rank.rank == 1 {
                thread::sleep(Duration::from_secs(3));
                return Ok(None);
            }
            rank.sum(&memory)?; // alone
            let told = told.recv_timeout(patience())?;
            rank.stream.borrow().synchronize()?;
            assert!(rank.session.check().is_err(), "the check says so too");
            Ok(Some(told))
        });
        let Some(Some(told)) = told.first() else { return };
        assert!(told.contains("all_reduce(64 × f32, sum") && told.contains("timed out"), "{told}");
    }
}
