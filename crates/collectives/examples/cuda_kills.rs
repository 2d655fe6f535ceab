//! Kills a rank at a random point of random calls between two GPUs, again and again: the other rank must say which, in time.
//!
//!     cuda_kills [JOBS]
//!
//! A job is two processes of this program. One of them is killed (SIGKILL) some milliseconds after both have begun to call.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use antiphon_collectives::{CollectiveError, ReduceOp, StreamCollectives, cuda::CudaCollectives};
use antiphon_device::cuda::{Context, DeviceMemory, Driver};
use antiphon_fabric::{Communicator, FabricError};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// How long the survivor may take to say what happened.
const IN_TIME: Duration = Duration::from_secs(2);
const COUNTS: [usize; 4] = [64, 7168, 500_000, 4_000_000];

fn main() -> Result<(), Error> {
    if std::env::var_os("RANK").is_some() {
        return rank();
    }
    let jobs: u64 = std::env::args().nth(1).map_or(Ok(20), |jobs| jobs.parse())?;
    let count = Driver::load().and_then(|driver| driver.device_count());
    if !count.as_ref().is_ok_and(|&count| count >= 2) {
        println!("skipped: two GPUs are needed: {count:?}");
        return Ok(());
    }
    let mut random = 1;
    let mut slowest = Duration::ZERO;
    for number in 0..jobs {
        let (victim, after) =
            (next(&mut random) as usize % 2, Duration::from_micros(next(&mut random) % 40_000));
        let took = job(number, victim, after)
            .map_err(|error| format!("job {number}, rank {victim} killed after {after:?}: {error}"))?;
        slowest = slowest.max(took);
    }
    println!("{jobs} ranks killed; the other one named it each time, after {slowest:?} at most");
    Ok(())
}

fn next(random: &mut u64) -> u64 {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *random >> 33
}

/// One job; how long the survivor took.
fn job(number: u64, victim: usize, after: Duration) -> Result<Duration, Error> {
    let place = std::env::temp_dir().join(format!("antiphon-kills-{}-{number}", std::process::id()));
    let (said, heard) = mpsc::channel();
    let mut children = Vec::new();
    for rank in 0..2 {
        let mut child = Command::new(std::env::current_exe()?)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("ANTIPHON_RENDEZVOUS", &place)
            .env("ANTIPHON_TIMEOUT", "60")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (lines, said) = (BufReader::new(child.stdout.take().expect("it is piped")).lines(), said.clone());
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| drop(said.send((rank, line))))
        });
        children.push(child);
    }
    let outcome = watch(&mut children, &heard, victim, after);
    for child in &mut children {
        let _ = child.kill();
        child.wait()?;
    }
    outcome
}

fn watch(
    children: &mut [Child],
    heard: &mpsc::Receiver<(usize, String)>,
    victim: usize,
    after: Duration,
) -> Result<Duration, Error> {
    for _ in 0..2 {
        let (rank, line) = heard.recv_timeout(Duration::from_secs(60))?;
        if line != "calling" {
            return Err(format!("rank {rank} did not begin: {line}").into());
        }
    }
    std::thread::sleep(after);
    let killed = Instant::now();
    children[victim].kill()?;
    let (rank, line) = heard.recv_timeout(IN_TIME)?;
    match rank != victim && line == format!("lost {victim}") {
        true => Ok(killed.elapsed()),
        false => Err(format!("rank {rank} says: {line}").into()),
    }
}

/// Calls at random until something fails, and says what.
fn rank() -> Result<(), Error> {
    let said = |text: &str| -> std::io::Result<()> {
        println!("{text}");
        std::io::stdout().flush()
    };
    let comm = Communicator::from_env()?;
    let context = Context::primary(Driver::load()?.device(comm.rank() as u32)?)?;
    let collectives = CudaCollectives::builder(&comm, &context).staging_bytes(16 << 20).build()?;
    collectives.prepare(DType::F32, ReduceOp::Sum)?;
    let stream = context.stream()?;
    let memory = DeviceMemory::allocate(&context, 8 * COUNTS[COUNTS.len() - 1])?;
    comm.barrier()?;
    said("calling")?;
    let device = Device::Cuda(comm.rank() as u32);
    let mut random = 7; // the same on both ranks
    loop {
        let (which, count) = (next(&mut random) % 3, COUNTS[next(&mut random) as usize % COUNTS.len()]);
        let at = memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory has room for twice the largest count, and the stream is waited for.
        let called = unsafe {
            let input = TensorView::from_raw_parts(at, DType::F32, &[count], None, device)?;
            let whole = if which == 1 { 2 * count } else { count };
            let mut output = TensorViewMut::from_raw_parts(at, DType::F32, &[whole], None, device)?;
            match which {
                0 => collectives.all_reduce(input, &mut output, ReduceOp::Sum, stream.borrow()),
                1 if comm.rank() == 0 => collectives.all_gather(input, &mut output, stream.borrow()),
                1 => {
                    let half = at.wrapping_add(4 * count);
                    let input = TensorView::from_raw_parts(half, DType::F32, &[count], None, device)?;
                    collectives.all_gather(input, &mut output, stream.borrow())
                }
                _ => collectives.broadcast(&mut output, 1, stream.borrow()),
            }
        };
        stream.borrow().synchronize()?;
        match called.and_then(|()| collectives.check()) {
            Ok(()) => {}
            Err(CollectiveError::Fabric(FabricError::PeerLost { rank, .. })) => {
                return Ok(said(&format!("lost {rank}"))?);
            }
            Err(other) => return Ok(said(&other.to_string())?),
        }
    }
}
