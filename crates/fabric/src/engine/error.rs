//! The errors of engines.

#[cfg(not(loom))]
use antiphon_device::library::LibraryError;

/// Why an engine cannot do what it was asked for.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The bytes are no address of this kind of engine.
    #[error("{len} bytes are no address of the engine {engine}")]
    Address {
        /// The engine.
        engine: &'static str,
        /// How many bytes were given.
        len: usize,
    },
    /// The peer is connected already.
    #[error("peer {peer} is connected already")]
    Connected {
        /// The peer.
        peer: usize,
    },
    /// The engine's inbox has no key yet, without which nothing can be sent.
    #[error("the engine cannot send: its inbox was not opened with the world's key")]
    Closed,
    /// The process has begun to exit.
    #[error("the engine cannot be used: the process exits")]
    Exiting,
    /// There is no connection to the peer.
    #[error("peer {peer} is not connected")]
    NotConnected {
        /// The peer.
        peer: usize,
    },
    /// This process is a forked child of the one that owns the connections.
    #[error(
        "the connections to other machines belong to process {owner}, of which this one is a forked child"
    )]
    Forked {
        /// The process that made the engine.
        owner: u32,
    },
    /// A library that the engine needs is missing.
    #[cfg(not(loom))]
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// UCX is too old.
    #[error(
        "UCX {}.{} in {library} is too old, the engine needs {}.{}: {install}",
        found.0, found.1, needed.0, needed.1
    )]
    TooOld {
        /// The file.
        library: String,
        /// Its version.
        found: (u32, u32),
        /// The oldest version that serves.
        needed: (u32, u32),
        /// The remedy.
        install: &'static str,
    },
    /// UCX has no way to the peer.
    #[error(
        "UCX {version} has no way to peer {peer}: its devices are {devices} (see UCX_TLS and UCX_NET_DEVICES, which must allow a \
         transport that both have)"
    )]
    NoRoute {
        /// The peer.
        peer: usize,
        /// UCX's version.
        version: String,
        /// The devices that UCX may use here, by transport.
        devices: String,
    },
    /// A function of UCX failed.
    #[error("{function} failed: {text} ({code})")]
    Call {
        /// The function.
        function: &'static str,
        /// Its code.
        code: i32,
        /// UCX's text for the code.
        text: String,
    },
    /// The machine refused a resource.
    #[error("no {what}: {reason}")]
    System {
        /// The resource.
        what: &'static str,
        /// The operating system's word.
        reason: String,
    },
}
