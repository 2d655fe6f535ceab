//! Where ranks meet: the name of a Unix socket, or a TCP port.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{SocketAddr, UnixListener},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, chmod, fchmod, fstat},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};

use super::RendezvousError;

/// How many connections may wait to be accepted: as many as the kernel allows.
const QUEUE: i32 = i32::MAX;

/// The name of the socket on which rank 0 awaits the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A name without a file (Linux's abstract sockets): nothing to clean up after a kill. Reachable from the
    /// same network namespace.
    Abstract(String),
    /// A path in a file system, which ranks in different containers can share. The file is removed when all ranks
    /// have met, and reclaimed if an earlier run was killed before it could.
    Path(PathBuf),
    /// A port of rank 0's machine, for ranks on several machines. Only what ranks tell each other of themselves goes through it; the
    /// ranks of each node then meet by themselves, to share memory.
    Tcp {
        /// The name of the machine, or its address (IPv4 or IPv6).
        host: String,
        /// The port.
        port: u16,
    },
}

/// How long an attempt to connect to another machine may take.
const CONNECT_TIME: Duration = Duration::from_millis(500);

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{name}"),
            Self::Path(path) => path.display().fmt(f),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// The listening socket; its file, if it has one, is removed on drop.
pub(super) struct Listener {
    socket: Socket,
    file: Option<PathBuf>,
}

enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// The next connection, without waiting for one.
    pub(super) fn accept(&self) -> std::io::Result<OwnedFd> {
        match &self.socket {
            Socket::Unix(socket) => socket.accept().and_then(|(socket, _)| {
                socket.set_nonblocking(true)?;
                Ok(socket.into())
            }),
            Socket::Tcp(socket) => socket.accept().and_then(|(socket, _)| prepare(socket)),
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Unix(socket) => socket.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        }
    }
}

/// A connection over TCP that does not block, and sends small frames at once.
fn prepare(socket: TcpStream) -> std::io::Result<OwnedFd> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    Ok(socket.into())
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

    /// Fails if no socket of this user can be here, on every rank alike: ranks other than 0 would wait for it.
    pub(super) fn check(&self) -> Result<(), RendezvousError> {
        let Self::Path(path) = self else { return Ok(()) };
        SocketAddrUnix::new(path).map_err(|e| self.failed(e.into()))?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if std::fs::metadata(folder).is_ok_and(|metadata| !metadata.is_dir()) {
            return Err(self.failed(Errno::NOTDIR.into()));
        }
        let rights = Access::WRITE_OK | Access::EXEC_OK;
        rustix::fs::accessat(CWD, folder, rights, AtFlags::EACCESS).map_err(|e| self.failed(e.into()))?;
        let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
        if !metadata.file_type().is_socket() {
            return Err(RendezvousError::NotASocket { path: path.clone() });
        }
        match metadata.uid() == rustix::process::geteuid().as_raw() {
            true => Ok(()),
            false => Err(self.taken(format!("user {}", metadata.uid()))),
        }
    }

    /// The error when another process holds the name.
    pub(super) fn taken(&self, holder: String) -> RendezvousError {
        RendezvousError::NameTaken { address: self.clone(), holder }
    }

    /// Opens the socket for the others; `None` while another process still listens there.
    pub(super) fn listen(&self) -> Result<Option<Listener>, RendezvousError> {
        let failed = |source| self.failed(source);
        let unix = |socket: UnixListener| {
            socket.set_nonblocking(true)?;
            Ok(Socket::Unix(socket))
        };
        let (bound, file) = match self {
            Self::Abstract(name) => {
                let address = SocketAddr::from_abstract_name(name).map_err(failed)?;
                (UnixListener::bind_addr(&address).and_then(unix), None)
            }
            Self::Path(path) => {
                self.reclaim(path);
                (bind_for_this_user(path).map_err(Into::into).and_then(unix), Some(path.clone()))
            }
            Self::Tcp { port, .. } => (listen_everywhere(*port).map(Socket::Tcp), None),
        };
        match bound {
            Ok(socket) => Ok(Some(Listener { socket, file })),
            Err(e) if e.kind() == ErrorKind::AddrInUse => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// Removes a socket file on which no process listens any more.
    fn reclaim(&self, path: &Path) {
        if matches!(self.try_connect(), Err(Errno::CONNREFUSED)) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Connects without blocking: `None` while no process listens or the queue is full.
    pub(super) fn connect(&self) -> Result<Option<OwnedFd>, RendezvousError> {
        if let Self::Tcp { host, port } = self {
            return connect_tcp(host, *port).map_err(|e| self.failed(e));
        }
        match self.try_connect() {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::CONNREFUSED | Errno::NOENT | Errno::AGAIN) => Ok(None),
            Err(Errno::PROTOTYPE) => Err(self.taken("a socket of another kind".into())),
            Err(e) => Err(self.failed(e.into())),
        }
    }

    fn try_connect(&self) -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let address = match self {
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
            Self::Path(path) => SocketAddrUnix::new(path),
            Self::Tcp { .. } => Err(Errno::AFNOSUPPORT),
        }?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket)
    }
}

/// Listens at a port of all addresses of this machine, of IPv6 and IPv4 where it has both.
fn listen_everywhere(port: u16) -> std::io::Result<TcpListener> {
    let listener = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(e) if e.kind() != ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to another machine; nothing while no process listens there, or while the name has no address yet.
fn connect_tcp(host: &str, port: u16) -> std::io::Result<Option<OwnedFd>> {
    let Ok(addresses) = (host, port).to_socket_addrs() else { return Ok(None) };
    for address in addresses {
        let Ok(socket) = TcpStream::connect_timeout(&address, CONNECT_TIME) else { continue };
        // While no process listens, the kernel may connect a socket of this machine to itself.
        if socket.local_addr()? != socket.peer_addr()? {
            return prepare(socket).map(Some);
        }
    }
    Ok(None)
}

/// Listens at a path with mode 0600, whatever the umask.
fn bind_for_this_user(path: &Path) -> Result<UnixListener, Errno> {
    const MODE: Mode = Mode::RUSR.union(Mode::WUSR);
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file gets the socket's own mode, less the umask: at no time can another user open it.
    fchmod(&socket, MODE)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    give_back_bits(path, MODE)?;
    rustix::net::listen(&socket, QUEUE)?;
    Ok(socket.into())
}

/// Gives a socket's file the bits of `mode` that the umask took from its owner. What has taken its place is left alone.
fn give_back_bits(path: &Path, mode: Mode) -> Result<(), Errno> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&file)?;
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::Socket
        && stat.st_uid == rustix::process::geteuid().as_raw();
    if !is_ours || Mode::from_raw_mode(stat.st_mode) == mode {
        return Ok(());
    }
    // Linux has no fchmod for such a descriptor.
    chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)
}
