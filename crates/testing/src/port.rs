//! Ports at which ranks of a test meet.

use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the range from which a kernel takes the ports of connections: such a port may be lost to any connection of another test
/// before the rank that listens at it has begun.
const FIRST: u16 = 10_000;
const PORTS: u16 = 20_000;

/// A port at which nothing listens, and that no later call in this process returns soon.
pub fn free_port() -> u16 {
    static CALLS: AtomicU16 = AtomicU16::new(0);
    let candidate = || {
        let call = u32::from(CALLS.fetch_add(1, Ordering::Relaxed));
        // Processes that run at the same time begin far from each other.
        let offset = std::process::id().wrapping_mul(7_919).wrapping_add(call);
        FIRST + (offset % u32::from(PORTS)) as u16
    };
    let is_free = |port: &u16| {
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok()
            && !matches!(TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port)), Err(e) if e.kind() == std::io::ErrorKind::AddrInUse)
    };
    std::iter::repeat_with(candidate)
        .take(usize::from(PORTS))
        .find(is_free)
        .expect("a port at which nothing listens")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_free_and_not_returned_again() {
        let (one, other) = (free_port(), free_port());
        assert_ne!(one, other);
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, one)).unwrap();
    }
}
