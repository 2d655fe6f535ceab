//! Watching another process.

use std::os::fd::OwnedFd;

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags},
};

use crate::DeviceError;

/// A handle on a process that tells, without a race on recycled numbers, whether it still runs.
///
/// A killed process counts as ended at once, even while its parent has not collected it (a zombie).
#[derive(Debug)]
pub struct ProcessWatch(OwnedFd);

impl ProcessWatch {
    /// Watches process `pid` of this PID namespace.
    ///
    /// # Errors
    /// [`DeviceError::System`] when there is no such process or the kernel has no pidfd (Linux 5.3).
    pub fn open(pid: u32) -> Result<Self, DeviceError> {
        let raw = Pid::from_raw(pid as i32).ok_or_else(|| {
            DeviceError::system("pidfd_open of 0", rustix::io::Errno::INVAL, "not a process")
        })?;
        rustix::process::pidfd_open(raw, PidfdFlags::empty()).map(Self).map_err(|e| {
            DeviceError::system(
                format!("pidfd_open of {pid}"),
                e,
                "the process must run, on Linux 5.3 or newer",
            )
        })
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        // A pidfd becomes readable when its process ends. An interrupted poll is simply repeated by the caller's loop.
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }
}

/// A number that is equal for two processes exactly if they see the same process ids.
pub fn pid_namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/pid").map_or(0, |s| s.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{process::Command, time::Duration};

    #[test]
    fn a_killed_process_is_seen_before_it_is_collected() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let watch = ProcessWatch::open(child.id()).unwrap();
        assert!(!watch.has_ended());
        child.kill().unwrap();
        let seen = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            watch.has_ended()
        });
        child.wait().unwrap();
        assert!(seen, "the end of a killed process was not seen within a second");
    }
}
