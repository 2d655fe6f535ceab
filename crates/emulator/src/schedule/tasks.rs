//! Tasks: code of this library that waits, as the work of a stream does. Each has a stack of its own, on the scheduler's thread.

use std::{arch::global_asm, cell::Cell, ffi::c_void, ptr};

use super::run;
use crate::races::order::{self, Order};

const STACK_BYTES: usize = 512 << 10;

global_asm!(
    ".globl antiphon_emulator_switch",
    ".hidden antiphon_emulator_switch",
    "antiphon_emulator_switch:",
    "push rbp",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [rdi], rsp",
    "mov rsp, rsi",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "ret",
);

unsafe extern "C" {
    /// Goes on at another stack, and remembers where this one is.
    fn antiphon_emulator_switch(from: *mut *mut c_void, to: *mut c_void);
}

/// What a task waits for. It lies on the task's stack, which stays while the task waits.
type Condition = *mut (dyn FnMut() -> bool + 'static);

pub(super) struct Task {
    stack: *mut u8,
    stack_pointer: *mut c_void,
    work: Option<Box<dyn FnOnce()>>,
    waits_for: Option<Condition>,
    is_over: bool,
    order: Option<Order>,
}

thread_local! {
    /// The task that runs, and the stack of the thread that has resumed it.
    static CURRENT: Cell<*mut Task> = const { Cell::new(ptr::null_mut()) };
    static SCHEDULER: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
    static STACKS: Cell<Vec<*mut u8>> = const { Cell::new(Vec::new()) };
}

/// Runs the work as a task of its own: it may wait by [`wait_until`](super::wait_until).
pub(crate) fn spawn(work: impl FnOnce() + 'static) {
    run::add_task(Task::new(Box::new(work)));
}

impl Task {
    pub(super) fn new(work: Box<dyn FnOnce()>) -> Box<Self> {
        let mut stacks = STACKS.take();
        let stack = stacks.pop().unwrap_or_else(|| {
            let (access, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            );
            // SAFETY: new memory, which stays.
            let stack = unsafe { libc::mmap(ptr::null_mut(), STACK_BYTES, access, flags, -1, 0) };
            assert_ne!(stack, libc::MAP_FAILED, "no memory for the stack of a task");
            stack.cast()
        });
        STACKS.set(stacks);
        // SAFETY: within the stack. Behind `ret` it is 8 off a multiple of 16, as behind a call.
        let stack_pointer = unsafe {
            let top = stack.add(STACK_BYTES - 64).cast::<usize>();
            ptr::write_bytes(top, 0, 8);
            top.add(6).write(enter as *const () as usize);
            top.cast()
        };
        Box::new(Self {
            stack,
            stack_pointer,
            work: Some(work),
            waits_for: None,
            is_over: false,
            order: None,
        })
    }

    /// Runs the task until it waits or is over. Returns whether it is over.
    pub(super) fn resume(&mut self) -> bool {
        self.waits_for = None;
        order::swap(&mut self.order);
        CURRENT.set(self);
        let mut own = ptr::null_mut();
        SCHEDULER.set(&raw mut own as *mut c_void);
        // SAFETY: the task has left there, or has not begun.
        unsafe { antiphon_emulator_switch(&raw mut own, self.stack_pointer) };
        CURRENT.set(ptr::null_mut());
        order::swap(&mut self.order);
        if self.is_over {
            let mut stacks = STACKS.take();
            stacks.push(self.stack);
            STACKS.set(stacks);
        }
        self.is_over
    }

    /// Whether it can go on.
    pub(super) fn is_ready(&mut self) -> bool {
        // SAFETY: of `wait`, on the stack of a task that waits.
        self.waits_for.is_none_or(|condition| unsafe { (*condition)() })
    }
}

/// Whether a task runs on this thread.
pub(super) fn is_task() -> bool {
    !CURRENT.get().is_null()
}

/// The running task waits until the condition is met, which the scheduler asks.
pub(super) fn wait(condition: &mut dyn FnMut() -> bool) {
    let task = CURRENT.get();
    let condition: *mut (dyn FnMut() -> bool + '_) = condition;
    // SAFETY: the task is there while it runs, and the condition while it waits.
    unsafe {
        (*task).waits_for =
            Some(std::mem::transmute::<*mut (dyn FnMut() -> bool + '_), Condition>(condition));
    }
    leave(task);
}

fn leave(task: *mut Task) {
    // SAFETY: where `resume` has left its stack, which it does before the task runs.
    unsafe {
        antiphon_emulator_switch(&raw mut (*task).stack_pointer, *SCHEDULER.get().cast::<*mut c_void>())
    };
}

extern "C" fn enter() -> ! {
    let task = CURRENT.get();
    // SAFETY: the running task.
    let work = unsafe { (*task).work.take() };
    work.into_iter().for_each(|work| work());
    // SAFETY: as above.
    unsafe { (*task).is_over = true };
    leave(task);
    std::process::abort()
}
