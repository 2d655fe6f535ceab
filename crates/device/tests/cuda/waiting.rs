//! Kernels that wait: for what comes, for what never comes, until the host says stop.

use std::time::{Duration, Instant};

use antiphon_device::cuda::{
    Context, DeviceMemory, Function, GaveUp, LaunchConfig, Stream, WaitBoard, WaitReport, memory,
};

use antiphon_testing::sized;

use crate::{gpu, kernel};

pub const SOURCE: &str = include_str!("kernels/waiting.cu");
const BLOCKS: u32 = 8;

struct Waiting {
    context: Context,
    wait: Function,
    stream: Stream,
    memory: DeviceMemory,
    board: WaitBoard,
}

impl Waiting {
    fn new() -> Option<Self> {
        let context = gpu()?;
        let wait = kernel(&context, "waiting.cu", SOURCE, "wait_once")?;
        let (stream, memory) = (context.stream().unwrap(), DeviceMemory::allocate(&context, 4096).unwrap());
        // SAFETY: the memory has 4096 bytes.
        unsafe { memory::fill(stream.borrow(), memory.pointer(), 0, 4096) }.unwrap();
        stream.borrow().synchronize().unwrap();
        let board = WaitBoard::new(&context).unwrap();
        Some(Self { context, wait, stream, memory, board })
    }

    fn launch(&self, expected: u32, limit: Duration) {
        self.launch_blocks(BLOCKS, expected, limit);
    }

    fn launch_blocks(&self, blocks: u32, expected: u32, limit: Duration) {
        assert!(blocks <= 256, "there are as many words before the signal");
        let (outcome, signal) = (self.memory.pointer(), self.memory.pointer().offset(1024));
        let limit_ns = limit.as_nanos() as u64;
        let board = self.board.pointer();
        let given =
            [(&outcome).into(), (&signal).into(), (&expected).into(), (&limit_ns).into(), (&board).into()];
        // SAFETY: the arguments are the kernel's; it writes one word per block, and the board outlives the stream's work.
        unsafe { self.wait.launch(&self.stream, &LaunchConfig::new(blocks, 64), &given) }.unwrap();
    }

    /// How the wait ended, for every block.
    fn outcome(&self) -> [u8; BLOCKS as usize] {
        self.stream.borrow().synchronize_within(Duration::from_secs(20)).unwrap();
        let mut bytes = [0; 4 * BLOCKS as usize];
        self.memory.read(&self.stream, 0, &mut bytes).unwrap();
        std::array::from_fn(|block| bytes[4 * block])
    }
}

#[test]
fn a_signal_that_comes_is_seen() {
    let Some(waiting) = Waiting::new() else { return };
    // Made beforehand: loading a kernel may wait for those that run.
    let other = waiting.context.stream().unwrap();
    let send = kernel(&waiting.context, "waiting.cu", SOURCE, "send_signal").unwrap();
    waiting.launch(1, Duration::from_secs(10));
    assert!(!waiting.stream.borrow().is_done().unwrap());
    let (signal, value) = (waiting.memory.pointer().offset(1024), 2u32);
    // SAFETY: the kernel writes one word.
    unsafe { send.launch(&other, &LaunchConfig::new(1, 1), &[(&signal).into(), (&value).into()]) }.unwrap();
    assert_eq!(waiting.outcome(), [1; BLOCKS as usize]);
    assert_eq!(waiting.board.report(), None);
    // A number from before the counter wrapped has been passed.
    waiting.launch(u32::MAX - 5, Duration::from_secs(10));
    assert_eq!(waiting.outcome(), [1; BLOCKS as usize]);
}

#[test]
fn a_kernel_of_more_shared_memory_begins_beside_one_that_waits_everywhere() {
    let Some(waiting) = Waiting::new() else { return };
    let other = waiting.context.stream().unwrap();
    let send = kernel(&waiting.context, "waiting.cu", SOURCE, "send_signal").unwrap();
    let bytes = 64 << 10;
    send.allow_dynamic_shared(bytes).unwrap();
    for kernel in [&waiting.wait, &send] {
        kernel.prefer_shared().unwrap();
    }
    let everywhere = waiting.context.device().properties().unwrap().multiprocessors;
    waiting.launch_blocks(everywhere, 1, Duration::from_secs(10));
    let (signal, value) = (waiting.memory.pointer().offset(1024), 1u32);
    let config = LaunchConfig::new(1, 1).shared_bytes(bytes);
    // SAFETY: the kernel writes one word.
    unsafe { send.launch(&other, &config, &[(&signal).into(), (&value).into()]) }.unwrap();
    assert_eq!(waiting.outcome(), [1; BLOCKS as usize]);
    assert_eq!(waiting.board.report(), None);
}

#[test]
fn a_signal_that_never_comes_ends_in_a_report() {
    let Some(waiting) = Waiting::new() else { return };
    let start = Instant::now();
    let limit = Duration::from_millis(200);
    waiting.launch(9, limit);
    assert_eq!(waiting.outcome(), [2; BLOCKS as usize]);
    let took = start.elapsed();
    assert!(took >= limit - Duration::from_millis(5) && took < Duration::from_secs(5), "{took:?}");
    let report = waiting.board.report().unwrap();
    eprintln!("{report:?}");
    let expected = WaitReport {
        reason: GaveUp::Deadline,
        rank: 3,
        peer: 5,
        doing: [42, 43],
        expected: 9,
        seen: [0, 0],
        ..report
    };
    assert_eq!(report, expected);
    assert!(report.block < BLOCKS && report.thread < 64 && report.waited_ns >= limit.as_nanos() as u64);

    waiting.board.clear(&waiting.context).unwrap();
    assert_eq!(waiting.board.report(), None);
}

#[test]
fn the_host_can_end_a_wait() {
    let Some(waiting) = Waiting::new() else { return };
    waiting.launch(9, Duration::from_secs(60));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiting.stream.borrow().is_done().unwrap());
    let start = Instant::now();
    waiting.board.abort();
    assert_eq!(waiting.outcome(), [2; BLOCKS as usize]);
    assert!(start.elapsed() < Duration::from_secs(sized(2, 20)), "{:?}", start.elapsed());
    assert_eq!(waiting.board.report().unwrap().reason, GaveUp::Aborted);
}
