//! Runs of a seed, and their repetition. The schedule is the process's, so each run is a process: this one again, with the test `child`.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use crate::{
    driver,
    event::Event,
    kernel,
    memory::{self, Kind},
    races::litmus::{PRELUDE, submit},
    schedule,
    stream::Stream,
};

/// `early` says that its data are there before they are: whoever reads between the two stores sees it. `vain` waits for a word that nobody
/// writes, for an hour at most. `busy` counts, and waits for its peers.
const KERNELS: &str = r#"
extern "C" __global__ void early(u32* data, u32* flag, u32 who) {
    if (threadIdx.x != 0) return;
    for (u32 round = 1; round <= 16; ++round) {
        if (who == 0) {
            ST("relaxed.sys", flag, round);
            ST("relaxed.sys", data, round);
            UNTIL("relaxed.sys", flag + 1, round)
        } else {
            UNTIL("relaxed.sys", flag, round)
            if (LD("relaxed.sys", data) != round) ST("relaxed.sys", data + 16, 1);
            ST("relaxed.sys", flag + 1, round);
        }
    }
}
extern "C" __global__ void vain(u32* data, u32* flag, u32 who) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start) :: "memory");
    while (LD("acquire.sys", flag) != 1) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
        if (now - start > 3600ull * 1000 * 1000 * 1000) { if (threadIdx.x == 0) ST("relaxed.sys", data, 1); return; }
    }
}
extern "C" __global__ void busy(u32* data, u32* flag, u32 who) {
    __shared__ u32 sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) ADD("relaxed.sys", data + who, sum);
}
"#;

const CASE: &str = "ANTIPHON_EMULATOR_CASE";

/// A folder for the compiled kernels and the records of children, which this process has compiled; none without g++.
fn folder(of: &str) -> Option<PathBuf> {
    if Command::new("g++").arg("--version").output().is_err() {
        eprintln!("skipped: no g++");
        return None;
    }
    let folder = std::env::temp_dir().join(format!("antiphon-schedules-{of}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let library = kernel::compile(&format!("{PRELUDE}{KERNELS}"), &["--gpu-architecture=sm_90a".to_owned()]);
    std::fs::write(folder.join("kernels"), library.unwrap()).unwrap();
    Some(folder)
}

/// Runs a case in a process of its own.
fn run(folder: &Path, case: &str, variable: &str, value: impl AsRef<OsStr>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "schedule::tests::child", "--ignored", "--nocapture", "--test-threads", "1"]);
    for other in ["ANTIPHON_EMULATOR_SCHEDULE", "ANTIPHON_EMULATOR_REPLAY"] {
        command.env_remove(other);
    }
    command.env(CASE, case).env("TMPDIR", folder).env(variable, value);
    command.env("ANTIPHON_EMULATOR_KEEP", "1").output().unwrap()
}

/// The last line that tells how to repeat the run: its schedule with the number of steps and the hash, and the record.
fn told(output: &Output) -> (String, String) {
    let text = String::from_utf8_lossy(&output.stderr);
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("emulator: schedule "));
    let line = lines.next_back().unwrap_or_else(|| panic!("no line tells of the schedule:\n{text}"));
    let (schedule, rest) = line.split_once("; ANTIPHON_EMULATOR_REPLAY=").unwrap();
    assert!(!text.contains("no longer"), "{text}");
    (schedule.to_owned(), rest.strip_suffix(" repeats it").unwrap().to_owned())
}

fn word(at: u64, index: usize) -> u32 {
    // SAFETY: memory of `memory::allocate`, which no kernel uses any more.
    unsafe { (at as *const u32).add(index).read_volatile() }
}

#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let case = std::env::var(CASE).expect("a case");
    let library = std::fs::read(std::env::temp_dir().join("kernels")).unwrap();
    // SAFETY: a library that another process has compiled; modules stay loaded.
    let module = unsafe { driver::load(library.as_ptr()) }.unwrap();
    let data = memory::allocate(0, 4096, Kind::Plain).unwrap();
    // SAFETY: just allocated.
    unsafe { std::ptr::write_bytes(data as *mut u8, 0, 4096) };
    let flag = data + 2048;
    match &*case {
        "early" => {
            let streams = [0, 1].map(|device| Stream::new(device, 0));
            for (who, stream) in streams.iter().enumerate() {
                submit(module, "early", [data, flag, who as u64], 1, stream);
            }
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            assert_eq!(word(data, 16), 0, "data were announced before they were there");
        }
        "vain" => {
            let stream = Stream::new(0, 0);
            submit(module, "vain", [data, flag, 0], 2, &stream);
            stream.synchronize().unwrap();
            assert_eq!(word(data, 0), 1);
        }
        // Threads of the host submit when they come to it, and ask whether work is done.
        "host" => {
            let module = module as usize;
            thread::scope(|scope| {
                for who in 0..3 {
                    let stream = Stream::new(who, 0);
                    scope.spawn(move || {
                        for round in 0..10 {
                            submit(module as *const _, "busy", [data, flag, who as u64], 2, &stream);
                            let event = Event::new(false);
                            stream.record(&event, false);
                            thread::sleep(Duration::from_micros(100 * (round * (who as u64 + 1) % 4)));
                            while round % 3 == 0 && event.query().is_err() {}
                        }
                        stream.synchronize().unwrap();
                    });
                }
            });
            (0..3).for_each(|who| assert_eq!(word(data, who), 10 * 2 * (63 * 64 / 2)));
        }
        other => panic!("no case {other}"),
    }
    schedule::failed();
}

#[test]
fn a_wrong_order_is_found_and_repeated() {
    let Some(folder) = folder("early") else { return };
    let mut schedules = Vec::new();
    let found = (1..=40).find_map(|seed: u32| {
        let output = run(&folder, "early", "ANTIPHON_EMULATOR_SCHEDULE", seed.to_string());
        let (schedule, record) = told(&output);
        schedules.push(schedule.clone());
        (!output.status.success()).then_some((output, schedule, record))
    });
    let (output, schedule, record) = found.expect("a seed that shows the order");
    assert!(String::from_utf8_lossy(&output.stdout).contains("FAILED"));
    for _ in 0..2 {
        let again = run(&folder, "early", "ANTIPHON_EMULATOR_REPLAY", &record);
        assert!(!again.status.success(), "the repetition has the same outcome");
        assert_eq!(told(&again).0, schedule, "each switch is that of the record");
    }
    if schedules.len() == 1 {
        let other = run(&folder, "early", "ANTIPHON_EMULATOR_SCHEDULE", "1000");
        schedules.push(told(&other).0);
    }
    schedules.sort();
    schedules.dedup();
    assert!(schedules.len() > 1, "seeds have schedules of their own: {schedules:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_the_host_did_is_repeated() {
    let Some(folder) = folder("host") else { return };
    let output = run(&folder, "host", "ANTIPHON_EMULATOR_SCHEDULE", "3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (schedule, record) = told(&output);
    for _ in 0..3 {
        let again = run(&folder, "host", "ANTIPHON_EMULATOR_REPLAY", &record);
        assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
        assert_eq!(told(&again).0, schedule);
    }
    // A thread that waits asks more often or less often than it did.
    let text = std::fs::read_to_string(&record).unwrap();
    assert!(text.contains("\nbusy event-"), "{text}");
    for count in [1, 50] {
        let other = |line: &str| match line.rsplit_once(' ') {
            Some((asks, _)) if asks.starts_with("busy ") => format!("{asks} {count}\n"),
            _ => format!("{line}\n"),
        };
        let file = folder.join("other.trace");
        std::fs::write(&file, text.lines().map(other).collect::<String>()).unwrap();
        let again = run(&folder, "host", "ANTIPHON_EMULATOR_REPLAY", &file);
        assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
        assert_eq!(told(&again).0, schedule, "with {count}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// Without virtual time it would take an hour.
#[test]
fn a_deadline_costs_nothing() {
    let Some(folder) = folder("vain") else { return };
    let output = run(&folder, "vain", "ANTIPHON_EMULATOR_SCHEDULE", "5");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::remove_dir_all(folder).unwrap();
}
