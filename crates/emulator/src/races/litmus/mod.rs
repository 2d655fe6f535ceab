//! Litmus tests: small kernels of which it is known whether they race, and which values they may leave. A right one gives no report, and
//! a wrong one a report that says what is missing.

mod copies;
mod late;
mod messages;
mod outcomes;

use std::{collections::BTreeSet, ffi::CString, ptr, sync::Arc};

use crate::{
    driver,
    event::Event,
    execution::{Grid, Parameter},
    kernel, memory,
    room::Needs,
    stream::Stream,
};

/// What the kernels of tests use.
pub(crate) const PRELUDE: &str = r#"
typedef unsigned u32;
#define LD(what, p) ({ u32 got; asm volatile("ld." what ".u32 %0, [%1];" : "=r"(got) : "l"(p) : "memory"); got; })
#define ST(what, p, value) asm volatile("st." what ".u32 [%0], %1;" :: "l"(p), "r"(value) : "memory")
#define ADD(what, p, value) asm volatile("red." what ".add.u32 [%0], %1;" :: "l"(p), "r"(value) : "memory")
#define FENCE(what) asm volatile("fence." what ";" ::: "memory")
#define UNTIL(what, p, value) while (LD(what, p) != value) {}
#define ADDRESS(p) ((u32)__cvta_generic_to_shared(p))
"#;

/// A grid of a test; each has a stream of its own, unless it is behind another.
#[derive(Clone, Copy)]
struct Launch {
    device: usize,
    blocks: u32,
    threads: u32,
    cluster: u32,
    /// The launch whose stream it shares.
    behind: Option<usize>,
    /// The launch whose event its stream waits for.
    after: Option<usize>,
    is_programmatic: bool,
}

/// One block of 64 threads on a GPU.
const fn on(device: usize) -> Launch {
    Launch { device, blocks: 1, threads: 64, cluster: 1, behind: None, after: None, is_programmatic: false }
}

/// Two blocks on one GPU: `who` is 0, and they tell themselves apart.
const BLOCKS: &[Launch] = &[Launch { blocks: 2, ..on(0) }];
/// A block on each of two GPUs, or of three.
const GPUS: &[Launch] = &[on(0), on(1)];
const THREE_GPUS: &[Launch] = &[on(0), on(1), on(2)];
const BLOCK: &[Launch] = &[on(0)];

/// The grid of a launch, whose kernel has three parameters.
fn grid(
    function: &driver::Function,
    name: &str,
    parameters: [u64; 3],
    launch: &Launch,
    stream: &Stream,
) -> Arc<Grid> {
    let parameter = |value: u64| {
        let mut parameter = Box::new(Parameter([0; 4096]));
        parameter.0[..8].copy_from_slice(&value.to_le_bytes());
        parameter
    };
    let (threads, cluster_size) = (launch.threads, launch.cluster);
    Arc::new(Grid {
        run: function.run,
        scheduled: function.scheduled,
        call: function.call,
        parameters: parameters.map(parameter).into(),
        grid: [launch.blocks, 1, 1],
        block: [threads, 1, 1],
        cluster_size,
        shared_bytes: 0,
        needs: Needs { threads, registers: 32, shared_bytes: 0, cluster_size },
        device: launch.device,
        stream: (stream.id, 0),
        name: name.to_owned(),
        is_programmatic: launch.is_programmatic,
    })
}

/// Submits a grid of some blocks of 64 threads to a stream.
pub(crate) fn submit(
    module: *const driver::Module,
    name: &str,
    parameters: [u64; 3],
    blocks: u32,
    stream: &Arc<Stream>,
) {
    let symbol = CString::new(name).unwrap();
    // SAFETY: a module that is loaded, and a name; functions stay.
    let function = unsafe { &*driver::function(module, symbol.as_ptr()).unwrap() };
    let grid = grid(function, name, parameters, &Launch { blocks, ..on(stream.device) }, stream);
    stream.submit(Arc::new(move || grid.run()));
}

struct Case {
    name: String,
    body: String,
    launches: Vec<Launch>,
    expected: Expected,
}

enum Expected {
    Right,
    /// A report says this.
    Missing(String),
    /// It is right, and after many runs `data` has had each of these, from [`RESULTS`] on, and no others.
    Outcomes(BTreeSet<Vec<u32>>),
}

/// Where kernels leave what they have read.
const RESULTS: usize = 16;
/// How often a kernel runs whose outcomes are told: until all have been, and so often at least and at most.
const RUNS: [usize; 2] = [200, 20_000];

/// Kernels with a body that sees `data`, `flag`, `who` (the launch) and `t` (the thread). They are one program: g++ needs a second for each.
#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    fn is_right(&mut self, name: &str, body: &str, launches: &[Launch]) {
        self.0.push(Case {
            name: name.to_owned(),
            body: body.to_owned(),
            launches: launches.to_vec(),
            expected: Expected::Right,
        });
    }

    fn is_wrong(&mut self, name: &str, body: &str, launches: &[Launch], missing: &str) {
        self.0.push(Case {
            name: name.to_owned(),
            body: body.to_owned(),
            launches: launches.to_vec(),
            expected: Expected::Missing(missing.to_owned()),
        });
    }

    fn leaves<const N: usize>(&mut self, name: &str, body: &str, launches: &[Launch], outcomes: &[[u32; N]]) {
        self.0.push(Case {
            name: name.to_owned(),
            body: body.to_owned(),
            launches: launches.to_vec(),
            expected: Expected::Outcomes(outcomes.iter().map(|outcome| outcome.to_vec()).collect()),
        });
    }

    fn check(self) {
        if std::process::Command::new("g++").arg("--version").output().is_err() {
            return eprintln!("skipped: no g++");
        }
        let kernels = self.0.iter().map(|Case { name, body, .. }| {
            let parameters = "u32* data, u32* flag, u32 who";
            format!("#line 1 \"{name}.cu\"\nextern \"C\" __global__ void {name}({parameters}) {{ u32 t = threadIdx.x; {body} }}\n")
        });
        let source = format!("{PRELUDE}\n{}", kernels.collect::<String>());
        let library = kernel::compile(&source, &["--gpu-architecture=sm_90a".to_owned()]).unwrap();
        // SAFETY: a library that was just compiled; modules stay loaded.
        let module = unsafe { driver::load(library.as_ptr()) }.unwrap();
        let mut failed = String::new();
        for case in &self.0 {
            let name = &case.name;
            let failure = match &case.expected {
                Expected::Right => {
                    let (reports, _) = case.run(module, 0);
                    (!reports.is_empty()).then(|| format!("{name} is right:\n{}", reports.concat()))
                }
                Expected::Missing(missing) => {
                    let (reports, _) = case.run(module, 0);
                    let is_told = reports.iter().any(|report| report.contains(missing));
                    (!is_told).then(|| format!("{name} lacks {missing}:\n{}", reports.concat()))
                }
                Expected::Outcomes(outcomes) => {
                    let count = outcomes.first().map_or(0, Vec::len);
                    let (mut reports, mut seen) = (BTreeSet::new(), BTreeSet::new());
                    for run in 0..RUNS[1] {
                        if run >= RUNS[0] && seen.is_superset(outcomes) {
                            break;
                        }
                        let (new, outcome) = case.run(module, count);
                        reports.extend(new);
                        seen.insert(outcome);
                    }
                    let is_as_said = reports.is_empty() && seen == *outcomes;
                    (!is_as_said).then(|| {
                        let reports: String = reports.into_iter().collect();
                        format!("{name} leaves {outcomes:?}, and has left {seen:?}:\n{reports}")
                    })
                }
            };
            failed.extend(failure.map(|failure| failure + "\n"));
        }
        assert!(failed.is_empty(), "{failed}");
    }
}

impl Case {
    /// Runs the kernel, and returns its reports and so many of its results.
    fn run(&self, module: *const driver::Module, results: usize) -> (Vec<String>, Vec<u32>) {
        let launches = &self.launches;
        let memory = memory::allocate(0, 4096, memory::Kind::Plain).unwrap();
        // SAFETY: just allocated.
        unsafe { ptr::write_bytes(memory as *mut u8, 0, 4096) };
        let name = CString::new(&*self.name).unwrap();
        // SAFETY: a module that is loaded, and a name; functions stay.
        let function = unsafe { &*driver::function(module, name.as_ptr()).unwrap() };
        let (mut streams, mut events): (Vec<Arc<Stream>>, Vec<Arc<Event>>) = (Vec::new(), Vec::new());
        for (who, launch) in launches.iter().enumerate() {
            let stream =
                launch.behind.map_or_else(|| Stream::new(launch.device, 0), |other| streams[other].clone());
            if let Some(after) = launch.after {
                stream.wait_for(&events[after], false).unwrap();
            }
            let grid = grid(function, &self.name, [memory, memory + 2048, who as u64], launch, &stream);
            stream.submit(Arc::new(move || grid.run()));
            let event = Event::new(false);
            if launches.iter().any(|other| other.after == Some(who)) {
                stream.record(&event, false);
            }
            streams.push(stream);
            events.push(event);
        }
        for stream in &streams {
            stream.synchronize().unwrap();
            stream.close();
        }
        // SAFETY: within the allocation, which no kernel uses any more.
        let results =
            unsafe { std::slice::from_raw_parts((memory as *const u32).add(RESULTS), results) }.to_vec();
        memory::free(memory).unwrap();
        let file = format!(" {}.cu:", self.name);
        (super::report::all().into_iter().filter(|report| report.contains(&file)).collect(), results)
    }
}
