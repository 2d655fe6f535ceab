//! Litmus tests: small kernels of which it is known whether they race. A right one gives no report, and a wrong one a report that
//! says what is missing.

mod copies;
mod messages;
mod outcomes;

use std::{ffi::CString, ptr, sync::Arc};

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
    /// What its report says, if it is wrong.
    missing: Option<String>,
}

/// Kernels with a body that sees `data`, `flag`, `who` (the launch) and `t` (the thread). They are one program: g++ needs a second for each.
#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    fn is_right(&mut self, name: &str, body: &str, launches: &[Launch]) {
        self.0.push(Case {
            name: name.to_owned(),
            body: body.to_owned(),
            launches: launches.to_vec(),
            missing: None,
        });
    }

    fn is_wrong(&mut self, name: &str, body: &str, launches: &[Launch], missing: &str) {
        self.0.push(Case {
            name: name.to_owned(),
            body: body.to_owned(),
            launches: launches.to_vec(),
            missing: Some(missing.to_owned()),
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
            let reports = case.run(module);
            let is_as_said = case
                .missing
                .as_ref()
                .map_or(reports.is_empty(), |missing| reports.iter().any(|report| report.contains(missing)));
            if !is_as_said {
                let said =
                    case.missing.as_ref().map_or("is right".to_owned(), |missing| format!("lacks {missing}"));
                failed.push_str(&format!("{} {said}:\n{}\n", case.name, reports.concat()));
            }
        }
        assert!(failed.is_empty(), "{failed}");
    }
}

impl Case {
    /// Runs the kernel, and returns its reports.
    fn run(&self, module: *const driver::Module) -> Vec<String> {
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
        memory::free(memory).unwrap();
        let file = format!(" {}.cu:", self.name);
        super::report::all().into_iter().filter(|report| report.contains(&file)).collect()
    }
}
