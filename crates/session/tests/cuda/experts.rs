//! Calls of experts: on a stream beside the current one, and the form with slots in one step and in two.

use antiphon_moe::{CombineFormat, Movement, ReceivedSlots, SlotCombine, SlotDispatch, SlotFormat};

use super::*;

const EXPERTS: usize = 4;
const HIDDEN: usize = 128;
const MOST: SlotLimits = SlotLimits { max_tokens: 4, hidden: HIDDEN, num_experts: EXPERTS, top_k: 1 };
/// One in bf16.
const ONE: [u8; 2] = [0x80, 0x3f];

impl Rank {
    fn bytes(&self, content: &[u8]) -> Outcome<Numbers> {
        let memory = DeviceMemory::allocate(&self.context, content.len())?;
        memory.write(&self.stream, 0, content)?;
        Ok(Numbers { memory, device: Device::Cuda(self.device()) })
    }

    fn words(&self, memory: &Numbers, count: usize) -> Outcome<Vec<i32>> {
        let mut bytes = vec![0; 4 * count];
        memory.memory.read(&self.stream, 0, &mut bytes)?;
        self.session.check()?;
        Ok(bytes.chunks_exact(4).map(|word| i32::from_ne_bytes([0, 1, 2, 3].map(|at| word[at]))).collect())
    }
}

#[test]
fn ranks_choose_the_same_measured_numbers_of_multiprocessors() {
    on_gpus(patience(), |rank| {
        let moe = rank.session.moe(MoeConfig { num_sms: 0, ..SMALL });
        let refused = moe.tune(rank.device(), 0, 1..=1).unwrap_err().to_string();
        assert!(refused.contains("tokens of 0 elements"), "{refused}");
        let chosen = moe.tune(rank.device(), HIDDEN, 1..=1)?;
        for movement in [Movement::Dispatch, Movement::Combine] {
            let number = chosen.of(movement, HIDDEN * 2);
            assert!((4..=96).contains(&number), "{number}");
            assert_eq!(chosen.of(movement, usize::MAX), number, "one size was measured");
        }
        let numbers = [Movement::Dispatch, Movement::Combine].map(|movement| chosen.of(movement, 0));
        let queue = rank.session.queue()?;
        let all = queue.run(|comm| comm.exchange_objects(&numbers))?;
        assert!(all.iter().all(|theirs| *theirs == numbers), "{all:?}");
        // A later instance finds them.
        let later = rank.session.moe(MoeConfig { num_sms: 0, ..SMALL });
        later.open(rank.device())?;
        moe.check()?;
        end(&rank)
    });
}

#[test]
fn a_call_beside_the_stream_is_joined_by_it() {
    on_gpus(patience(), |rank| {
        let moe = rank.session.moe(SMALL);
        let side = rank.context.stream()?;
        let ids = rank.bytes(&[0i32, 1, 2, 3].map(i32::to_ne_bytes).concat())?;
        let [per_rank, per_expert, in_rank] = [rank.numbers()?, rank.numbers()?, rank.numbers()?];
        for joins in [true, false] {
            let mut outputs = [
                view_mut(&per_rank, DType::I32, &[2]),
                view_mut(&per_expert, DType::I32, &[EXPERTS]),
                view_mut(&in_rank, DType::U8, &[EXPERTS, 2]),
            ];
            let [first, second, third] = &mut outputs;
            let stream = MoeStream::from(&rank.stream).beside(&side, joins);
            let ids = view(&ids, DType::I32, &[EXPERTS, 1]);
            // SAFETY: the memory lives until the streams have finished.
            unsafe { moe.layout(stream, &ids, [first, second, third]) }?;
            if !joins {
                side.borrow().synchronize()?;
            }
            assert_eq!(
                [rank.words(&per_rank, 2)?, rank.words(&per_expert, EXPERTS)?],
                [vec![2; 2], vec![1; 4]]
            );
        }
        moe.set_num_sms(u32::MAX);
        let ids = view(&ids, DType::I32, &[EXPERTS, 1]);
        let mut outputs = [(); 3].map(|()| view_mut(&in_rank, DType::U8, &[EXPERTS, 2]));
        let [first, second, third] = &mut outputs;
        // SAFETY: nothing is launched.
        let refused = unsafe { moe.layout(&rank.stream, &ids, [first, second, third]) };
        assert!(refused.is_err_and(|error| error.to_string().contains("num_sms")));
        moe.check()?;
        end(&rank)
    });
}

#[test]
fn slot_calls_go_out_and_come_back() {
    on_gpus(patience(), |rank| {
        let moe = rank.session.moe_slots(&rank.stream, MOST)?;
        let slots = 2 * MOST.max_tokens;
        // The token goes to the other rank: from rank 0 to expert 2, from rank 1 to expert 1.
        let (x, ids) = (rank.bytes(&ONE.repeat(HIDDEN))?, rank.bytes(&(2 - rank.rank as i32).to_ne_bytes())?);
        let expected = if rank.rank == 0 { [0, 1] } else { [1, 0] };
        let rows = rank.bytes(&ONE.repeat(2 * slots * HIDDEN))?;
        let (counts, sources) = (rank.numbers()?, rank.bytes(&vec![0; 8 * slots])?);
        let (ranges, weights, output) = (rank.numbers()?, rank.numbers()?, rank.bytes(&vec![0; 2 * HIDDEN])?);
        let dispatch = || SlotDispatch {
            max_tokens: MOST.max_tokens,
            num_experts: EXPERTS,
            format: SlotFormat::Bf16,
            x: view(&x, DType::BF16, &[1, HIDDEN]),
            ids: view(&ids, DType::I32, &[1, 1]),
            received: ReceivedSlots {
                x: view_mut(&rows, DType::BF16, &[2, slots, HIDDEN]),
                scales: None,
                counts: view_mut(&counts, DType::I32, &[2]),
                source_tokens: view_mut(&sources, DType::I32, &[2, slots]),
                layout_range: view_mut(&ranges, DType::I64, &[2, 2]),
                statistics: None,
                waits: None,
            },
        };
        let combine = || SlotCombine {
            format: CombineFormat::Bf16,
            rows: view(&rows, DType::BF16, &[2, slots, HIDDEN]),
            ids: view(&ids, DType::I32, &[1, 1]),
            weights: view(&weights, DType::F32, &[1, 1]),
            output: view_mut(&output, DType::BF16, &[1, HIDDEN]),
            waits: None,
        };
        let stream = &rank.stream;
        for halves in [false, true] {
            // SAFETY: the memory lives until the stream has finished.
            let routes = unsafe {
                if halves {
                    let (routes, half) = moe.send_dispatch(stream, &dispatch())?;
                    moe.receive(stream, &half)?;
                    routes
                } else {
                    moe.dispatch(stream, &dispatch())?
                }
            };
            assert_eq!((routes.num_tokens(), rank.words(&counts, 2)?), (1, expected.to_vec()));
            // SAFETY: as above.
            unsafe {
                if halves {
                    let half = moe.send_combine(stream, &routes, &combine())?;
                    moe.receive(stream, &half)?;
                } else {
                    moe.combine(stream, &routes, &combine())?;
                }
            }
            let mut sums = vec![0; 2 * HIDDEN];
            output.memory.read(stream, 0, &mut sums)?;
            // The weight is the number of the rank plus one.
            let sum: [u8; 2] = if rank.rank == 0 { ONE } else { [0x00, 0x40] };
            assert_eq!(sums, sum.repeat(HIDDEN));
        }
        moe.check()?;
        end(&rank)?;
        moe.close();
        // SAFETY: nothing is launched.
        let refused = unsafe { moe.dispatch(stream, &dispatch()) };
        assert!(matches!(refused, Err(SessionError::SlotsClosed)), "{refused:?}");
        end(&rank)
    });
}
