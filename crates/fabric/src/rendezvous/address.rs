//! Where ranks meet: the name of a Unix socket.

use std::{
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::PathBuf,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};

use super::RendezvousError;

/// The name of the socket on which rank 0 awaits the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A name without a file (Linux's abstract sockets): nothing to clean up, whoever is killed. Reachable from the
    /// same network namespace.
    Abstract(String),
    /// A path in a file system, which ranks in different containers can share. The file is removed when all ranks
    /// have met, and reclaimed if an earlier run was killed before it could.
    Path(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{name}"),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// The listening socket; its file, if it has one, is removed on drop.
pub(super) struct Listener {
    pub(super) socket: UnixListener,
    file: Option<PathBuf>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.file {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Address {
    /// The error when the socket cannot be used.
    pub(super) fn failed(&self, source: std::io::Error) -> RendezvousError {
        RendezvousError::Socket { address: self.clone(), source: std::sync::Arc::new(source) }
    }

    /// Opens the socket for the others; `None` while another process still has it open.
    pub(super) fn listen(&self) -> Result<Option<Listener>, RendezvousError> {
        let failed = |source| self.failed(source);
        let (bound, file) = match self {
            Self::Abstract(name) => {
                let address = SocketAddr::from_abstract_name(name).map_err(failed)?;
                (UnixListener::bind_addr(&address), None)
            }
            Self::Path(path) => {
                self.reclaim(path)?;
                (UnixListener::bind(path), Some(path.clone()))
            }
        };
        match bound {
            Ok(socket) => {
                socket.set_nonblocking(true).map_err(failed)?;
                Ok(Some(Listener { socket, file }))
            }
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// Removes a socket file on which nobody listens any more.
    fn reclaim(&self, path: &PathBuf) -> Result<(), RendezvousError> {
        use std::os::unix::fs::FileTypeExt;
        let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
        if !metadata.file_type().is_socket() {
            return Err(RendezvousError::NotASocket { path: path.clone() });
        }
        if matches!(self.try_connect(), Err(Errno::CONNREFUSED)) {
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    /// Connects without blocking: `None` while nobody listens or the queue is full.
    pub(super) fn connect(&self) -> Result<Option<OwnedFd>, RendezvousError> {
        match self.try_connect() {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::CONNREFUSED | Errno::NOENT | Errno::AGAIN) => Ok(None),
            Err(e) => Err(self.failed(e.into())),
        }
    }

    fn try_connect(&self) -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let address = match self {
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
            Self::Path(path) => SocketAddrUnix::new(path),
        }?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket)
    }
}
