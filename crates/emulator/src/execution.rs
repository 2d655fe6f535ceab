//! Kernels at work: each block on a thread of the operating system, while its GPU has room for it.

use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Condvar, Mutex, mpsc},
};

use crate::{
    circle::Watch,
    lock,
    races::{
        self, grids, order,
        threads::{Block, ClusterOrder, Knowledge},
    },
    room::{Needs, Ticket},
    wait,
};

const MAX_THREADS: usize = 1024;
/// Bytes of a fiber's stack, and a little so that the stacks do not share lines of the cache.
const STACK_BYTES: usize = (64 << 10) + 320;

/// As in device/fibers.hpp.
#[repr(C)]
struct Cluster {
    arrived: u32,
    generation: u32,
    anchors: [*mut c_void; 16],
}

// SAFETY: plain words, which the device's side accesses atomically.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

/// As in device/fibers.hpp.
#[repr(C)]
struct Launch {
    call: unsafe extern "C" fn(*mut *mut c_void),
    parameters: *mut *mut c_void,
    grid: [u32; 3],
    block: [u32; 3],
    index: [u32; 3],
    cluster_size: u32,
    cluster_rank: u32,
    of_cluster: *mut Cluster,
    stacks: *mut u8,
    stack_bytes: usize,
    shared_bytes: u32,
    running: *mut u32,
    watch: *const Watch,
}

/// A module's function that runs a block.
pub(crate) type Run = unsafe extern "C" fn(*const c_void);

/// A launch, ready to run.
pub(crate) struct Grid {
    pub run: Run,
    pub call: unsafe extern "C" fn(*mut *mut c_void),
    /// Each at an address that suits every type.
    pub parameters: Vec<Box<Parameter>>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster_size: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    pub needs: Needs,
    pub device: usize,
    /// The number of its stream, and the priority.
    pub stream: (u64, i32),
    pub name: String,
    /// Whether it may start before the grid ahead has ended.
    pub is_programmatic: bool,
}

/// What the checks of races know of a grid that runs.
struct Checked {
    grid: Arc<grids::Grid>,
    /// At its start, and behind `griddepcontrol.wait`.
    start: [Knowledge; 2],
    /// What its threads have learned.
    learned: Mutex<Knowledge>,
}

/// With the order of a cluster of several blocks.
type CheckedCluster = (Arc<Checked>, Option<Arc<Mutex<ClusterOrder>>>);

/// The bytes of a parameter.
#[repr(C, align(64))]
pub(crate) struct Parameter(pub [u8; 4096]);

impl Grid {
    /// Runs all blocks, and returns when they have ended.
    pub(crate) fn run(self: &Arc<Self>) {
        let [x, y, z] = self.grid;
        let in_flight = Arc::new((Mutex::new(0u32), Condvar::new()));
        let size = self.cluster_size;
        let checked = races::is_on().then(|| {
            let name = Some(self.name.clone());
            let grid = grids::Grid::new(name, self.device, size, [self.grid, self.block]);
            let start = order::start(self.is_programmatic);
            Arc::new(Checked { grid, start, learned: Mutex::default() })
        });
        let (stream, priority) = self.stream;
        let ticket = Arc::new(Ticket::new(&self.name, self.device, stream, priority, x * y * z, self.needs));
        for first in (0..x * y * z).step_by(size as usize) {
            let places = ticket.place();
            *lock(&in_flight.0) += size;
            let cluster = (size > 1)
                .then(|| Arc::new(Cluster { arrived: 0, generation: 0, anchors: [ptr::null_mut(); 16] }));
            let order = (size > 1).then(Arc::<Mutex<ClusterOrder>>::default);
            for (rank, (place, watch)) in (0..size).zip(places) {
                let (grid, cluster, in_flight) = (self.clone(), cluster.clone(), in_flight.clone());
                let ticket = ticket.clone();
                let checked = checked.clone().map(|checked| (checked, order.clone()));
                spawn(Box::new(move |stacks| {
                    grid.run_block(first + rank, rank, cluster.as_deref(), checked, (stacks, &watch));
                    ticket.leave(place, &watch);
                    *lock(&in_flight.0) -= 1;
                    in_flight.1.notify_all();
                }));
            }
        }
        let mut running = lock(&in_flight.0);
        while *running != 0 {
            running = wait(&in_flight.1, running);
        }
        if let Some(checked) = checked {
            order::end(&checked.grid, checked.start[0].clone(), &lock(&checked.learned));
        }
    }

    fn run_block(
        &self,
        number: u32,
        rank: u32,
        cluster: Option<&Cluster>,
        checked: Option<CheckedCluster>,
        (stacks, watch): (*mut u8, &Watch),
    ) {
        let [x, y, _] = self.grid;
        let mut parameters: Vec<*mut c_void> =
            self.parameters.iter().map(|parameter| ptr::from_ref(&parameter.0).cast_mut().cast()).collect();
        let checked = checked.map(|(checked, cluster)| {
            let [start, ahead] = &checked.start;
            let block = Block::new(&checked.grid, number, start, ahead, cluster);
            (checked, block)
        });
        let launch = Launch {
            call: self.call,
            parameters: parameters.as_mut_ptr(),
            grid: self.grid,
            block: self.block,
            index: [number % x, number / x % y, number / (x * y)],
            cluster_size: self.cluster_size,
            cluster_rank: rank,
            of_cluster: cluster.map_or(ptr::null_mut(), |cluster| ptr::from_ref(cluster).cast_mut()),
            stacks,
            stack_bytes: STACK_BYTES,
            shared_bytes: self.shared_bytes,
            running: checked.as_ref().map_or(ptr::null_mut(), |(_, block)| block.running()),
            watch,
        };
        // SAFETY: the layout is that of fibers.hpp; the kernel's parameters are as many and as large as it says.
        let run = || unsafe { (self.run)(ptr::from_ref(&launch).cast()) };
        match checked {
            Some((checked, block)) => {
                let known = block.run(run);
                lock(&checked.learned).join(&known);
            }
            None => run(),
        }
    }
}

type Task = Box<dyn FnOnce(*mut u8) + Send>;

/// Runs the task on a thread that has stacks for the fibers of a block.
fn spawn(task: Task) {
    static IDLE: Mutex<Vec<mpsc::Sender<Task>>> = Mutex::new(Vec::new());
    let idle = lock(&IDLE).pop();
    let sender = idle.unwrap_or_else(|| {
        let (sender, tasks) = mpsc::channel::<Task>();
        let own = sender.clone();
        let work = move || {
            let len = STACK_BYTES * MAX_THREADS + 4096;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: new memory, which this thread keeps.
            let stacks =
                unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
            assert_ne!(stacks, libc::MAP_FAILED, "no memory for the stacks of a block");
            for task in tasks {
                task(stacks.cast());
                lock(&IDLE).push(own.clone());
            }
        };
        let thread = std::thread::Builder::new().name("emulated block".into()).spawn(work);
        thread.expect("a thread for a block");
        sender
    });
    sender.send(task).expect("a thread of the pool");
}
