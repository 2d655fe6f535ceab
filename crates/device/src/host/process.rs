//! Watching another process.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::PidfdFlags,
};

use crate::DeviceError;

/// A handle on a process (a pidfd) that tells, without a race on recycled numbers, whether it still runs.
///
/// A killed process counts as ended at once, even while its parent has not collected it (a zombie). The handle can be
/// handed to processes of other PID namespaces, where the process has no number.
#[derive(Debug)]
pub struct ProcessWatch(OwnedFd);

impl ProcessWatch {
    /// Watches this process: to be handed to others.
    ///
    /// # Errors
    /// [`DeviceError::System`] when no descriptor is free or the kernel has no pidfd (Linux 5.3).
    pub fn of_this_process() -> Result<Self, DeviceError> {
        rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).map(Self).map_err(|e| {
            DeviceError::system(
                "pidfd_open of this process",
                e,
                "Linux 5.3 or newer and a free descriptor are needed",
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

/// A handle that another process handed over.
impl From<OwnedFd> for ProcessWatch {
    fn from(handle: OwnedFd) -> Self {
        Self(handle)
    }
}

impl AsFd for ProcessWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The present state of a process, by the letter in its `/proc/PID/stat` (see proc(5)); nothing, if that cannot be read.
pub fn activity(pid: u32) -> Option<&'static str> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may hold anything.
    Some(match stat.rsplit(')').next()?.trim_start().chars().next()? {
        'R' => "runs",
        'S' | 'I' => "sleeps",
        'D' => "is in the kernel, which cannot be interrupted",
        'T' => "is stopped",
        't' => "is stopped by a debugger",
        'Z' | 'X' => "has ended",
        _ => return None,
    })
}

/// A number that is equal for two processes exactly if they see the same process ids, or 0 if that cannot be known.
pub fn pid_namespace() -> u64 {
    namespace("pid")
}

/// A number that is equal for two processes exactly if they see the same names of sockets, or 0 if that cannot be known.
pub fn network_namespace() -> u64 {
    namespace("net")
}

fn namespace(kind: &str) -> u64 {
    rustix::fs::stat(format!("/proc/self/ns/{kind}")).map_or(0, |s| s.st_ino)
}

/// The process that opened the other end of a connected Unix socket, and its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// The process, as this process's PID namespace numbers it; 0 if it cannot see it.
    pub process: i32,
    /// Its user, as this process's user namespace numbers it.
    pub user: u32,
}

/// The process that opened the other end of a connected Unix socket, and its user.
///
/// # Errors
/// The system's, for a socket of another kind.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<PeerCredentials> {
    // Three plain numbers.
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is what `credentials` has, and any bytes are valid there.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    match result {
        0 if length as usize == size_of::<libc::ucred>() => {
            Ok(PeerCredentials { process: credentials.pid, user: credentials.uid })
        }
        0 => Err(io::ErrorKind::InvalidData.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        os::unix::net::UnixStream,
        process::{Child, Command},
        time::Duration,
    };

    use rustix::process::Pid;

    fn watch(child: &Child) -> ProcessWatch {
        rustix::process::pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap().into()
    }

    #[test]
    fn a_killed_process_is_seen_before_it_is_collected() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let watch = watch(&child);
        assert!(!watch.has_ended());
        child.kill().unwrap();
        let seen = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            watch.has_ended()
        });
        child.wait().unwrap();
        assert!(seen, "the end of a killed process was not seen within a second");
    }

    #[test]
    fn this_process_runs_and_is_at_both_ends_of_its_sockets() {
        assert!(!ProcessWatch::of_this_process().unwrap().has_ended());
        let (one, _other) = UnixStream::pair().unwrap();
        let me = PeerCredentials {
            process: rustix::process::getpid().as_raw_pid(),
            user: rustix::process::geteuid().as_raw(),
        };
        assert_eq!(peer_credentials(one.as_fd()).unwrap(), me);
        assert!(peer_credentials(std::fs::File::open("/proc/self/stat").unwrap().as_fd()).is_err());
    }
}
