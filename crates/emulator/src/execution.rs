//! Kernels at work: each block on a thread of the operating system, or all on the scheduler's, while their GPUs have room for them.

use std::{
    cell::RefCell,
    ffi::c_void,
    ptr,
    sync::{Arc, Condvar, Mutex, mpsc},
};

use crate::{
    circle::Watch,
    counts, lock,
    races::{
        self, grids, order,
        threads::{Block, ClusterOrder, Knowledge},
    },
    room::{Needs, Ticket},
    schedule, wait,
};

const MAX_THREADS: usize = 1024;
/// Bytes of a fiber's stack, and a little so that the stacks do not share lines of the cache.
const STACK_BYTES: usize = (64 << 10) + 320;

/// As in device/types.hpp.
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

/// The bytes of a block's shared memory, as in device/blocks.hpp.
const BLOCK_BYTES: usize = 1 << 20;

/// As in device/types.hpp.
#[repr(C)]
pub(crate) struct Launch {
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
    memory: *mut u8,
    shared_bytes: u32,
    running: *mut u32,
    watch: *const Watch,
    pace: *mut schedule::Pace,
    turn: *mut schedule::Turn,
}

/// A module's function that runs a block, of which it has the thread.
pub(crate) type Run = unsafe extern "C" fn(*const c_void);

/// A launch, ready to run.
pub(crate) struct Grid {
    pub run: Run,
    /// The same, for a scheduler of all blocks.
    pub scheduled: schedule::Device,
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

/// A block's launch, with what it points to.
pub(crate) struct Prepared {
    launch: Box<Launch>,
    _parameters: Vec<*mut c_void>,
    grid: Arc<Grid>,
    _cluster: Option<Arc<Cluster>>,
    checked: Option<(Arc<Checked>, Box<Block>)>,
}

impl Prepared {
    pub(crate) fn launch(&self) -> *const Launch {
        &raw const *self.launch
    }

    /// What the checks of races know of the block.
    pub(crate) fn checked(&mut self) -> Option<&mut Block> {
        self.checked.as_mut().map(|(_, block)| &mut **block)
    }

    /// One scheduler has all blocks, and this is what it shares with them and with this one. Returns the number of threads.
    pub(crate) fn schedule(&mut self, pace: *mut schedule::Pace, turn: *mut schedule::Turn) -> u32 {
        (self.launch.pace, self.launch.turn) = (pace, turn);
        self.launch.block.iter().product()
    }

    /// Runs the block on this thread.
    fn run(mut self) {
        if let Some(block) = self.checked() {
            block.runs();
        }
        // SAFETY: the layout is that of types.hpp; the kernel's parameters are as many and as large as it says.
        unsafe { (self.grid.run)(self.launch().cast()) };
        Block::none_runs();
        self.end();
    }

    /// The block has ended: the grid learns what its threads knew.
    fn end(self) {
        if let Some((checked, block)) = self.checked {
            lock(&checked.learned).join(&block.known_to_all());
        }
    }
}

impl Grid {
    /// Runs all blocks, and returns when they have ended.
    pub(crate) fn run(self: &Arc<Self>) {
        counts::grid();
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
            let places = if schedule::is_on() {
                let mut places = None;
                schedule::wait_until(|| {
                    places = ticket.try_now();
                    places.is_some()
                });
                places.unwrap_or_default()
            } else {
                ticket.place()
            };
            *lock(&in_flight.0) += size;
            let cluster = (size > 1)
                .then(|| Arc::new(Cluster { arrived: 0, generation: 0, anchors: [ptr::null_mut(); 16] }));
            let order = (size > 1).then(Arc::<Mutex<ClusterOrder>>::default);
            for (rank, (place, watch)) in (0..size).zip(places) {
                let (grid, cluster, in_flight) = (self.clone(), cluster.clone(), in_flight.clone());
                let ticket = ticket.clone();
                let checked = checked.clone().map(|checked| (checked, order.clone()));
                let prepare = {
                    let watch = watch.clone();
                    move |memory| grid.prepare([first + rank, rank], cluster, checked, memory, &watch)
                };
                let ended = {
                    let watch = watch.clone();
                    move || {
                        ticket.leave(place, &watch);
                        *lock(&in_flight.0) -= 1;
                        in_flight.1.notify_all();
                    }
                };
                if schedule::is_on() {
                    let memory = take_memory();
                    let ended = Box::new(move |prepared: Prepared| {
                        prepared.end();
                        give_memory(memory);
                        ended();
                    });
                    let (device, prepared) = (self.scheduled, prepare(memory));
                    schedule::start(schedule::Start { device, prepared, watch, ended });
                } else {
                    spawn(Box::new(move |memory| {
                        prepare(memory).run();
                        ended();
                    }));
                }
            }
        }
        if schedule::is_on() {
            schedule::wait_until(|| *lock(&in_flight.0) == 0);
        }
        let mut running = lock(&in_flight.0);
        while *running != 0 {
            running = wait(&in_flight.1, running);
        }
        if let Some(checked) = checked {
            order::end(&checked.grid, checked.start[0].clone(), &lock(&checked.learned));
        }
    }

    /// The launch of a block, whose number and rank in its cluster these are.
    fn prepare(
        self: &Arc<Self>,
        [number, rank]: [u32; 2],
        cluster: Option<Arc<Cluster>>,
        checked: Option<CheckedCluster>,
        memory: *mut u8,
        watch: &Watch,
    ) -> Prepared {
        let [x, y, _] = self.grid;
        let mut parameters: Vec<*mut c_void> =
            self.parameters.iter().map(|parameter| ptr::from_ref(&parameter.0).cast_mut().cast()).collect();
        let checked = checked.map(|(checked, cluster)| {
            let [start, ahead] = &checked.start;
            let block = Box::new(Block::new(&checked.grid, number, start, ahead, cluster));
            (checked, block)
        });
        let launch = Box::new(Launch {
            call: self.call,
            parameters: parameters.as_mut_ptr(),
            grid: self.grid,
            block: self.block,
            index: [number % x, number / x % y, number / (x * y)],
            cluster_size: self.cluster_size,
            cluster_rank: rank,
            of_cluster: cluster.as_ref().map_or(ptr::null_mut(), |cluster| Arc::as_ptr(cluster).cast_mut()),
            // SAFETY: the stacks lie behind, in the same mapping.
            stacks: unsafe { memory.add(BLOCK_BYTES) },
            stack_bytes: STACK_BYTES,
            memory,
            shared_bytes: self.shared_bytes,
            running: checked.as_ref().map_or(ptr::null_mut(), |(_, block)| block.running()),
            watch,
            pace: ptr::null_mut(),
            turn: ptr::null_mut(),
        });
        Prepared { launch, _parameters: parameters, grid: self.clone(), _cluster: cluster, checked }
    }
}

thread_local! {
    /// Memory of blocks that have ended, of the scheduler's thread.
    static MEMORY: RefCell<Vec<*mut u8>> = const { RefCell::new(Vec::new()) };
}

fn take_memory() -> *mut u8 {
    MEMORY.with_borrow_mut(Vec::pop).unwrap_or_else(memory_of_block)
}

fn give_memory(memory: *mut u8) {
    MEMORY.with_borrow_mut(|all| all.push(memory));
}

type Task = Box<dyn FnOnce(*mut u8) + Send>;

/// New memory for blocks, one after the other: their shared memory, and the stacks of their fibers.
fn memory_of_block() -> *mut u8 {
    let len = BLOCK_BYTES + STACK_BYTES * MAX_THREADS + 4096;
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: new memory, which stays.
    let memory = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED, "no memory for a block");
    if races::is_on() {
        races::shadow::add_shared(memory as usize, BLOCK_BYTES);
    }
    memory.cast()
}

/// Runs the task on a thread that has the memory of a block.
fn spawn(task: Task) {
    static IDLE: Mutex<Vec<mpsc::Sender<Task>>> = Mutex::new(Vec::new());
    let idle = lock(&IDLE).pop();
    let sender = idle.unwrap_or_else(|| {
        let (sender, tasks) = mpsc::channel::<Task>();
        let own = sender.clone();
        let work = move || {
            let memory = memory_of_block();
            for task in tasks {
                task(memory);
                lock(&IDLE).push(own.clone());
            }
        };
        let thread = std::thread::Builder::new().name("emulated block".into()).spawn(work);
        thread.expect("a thread for a block");
        sender
    });
    sender.send(task).expect("a thread of the pool");
}
