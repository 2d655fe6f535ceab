//! The variables that tell a rank where it stands: torchrun's, and the secret that admits it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use super::{Launch, LaunchError};

/// Authenticates a rank to its peers; inherited where it is set.
const SECRET: &str = "ANTIPHON_SECRET";
const SECRET_BYTES: usize = 32;
const THREADS: &str = "OMP_NUM_THREADS";

/// Left by an outer torchrun, this would send the ranks to its store instead of their own.
const OUTER_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// The values that all ranks of one launch share.
pub(super) struct Environment<'a> {
    launch: &'a Launch,
    port: u16,
    run_id: String,
    secret: Option<String>,
    threads: bool,
}

impl<'a> Environment<'a> {
    pub(super) fn new(launch: &'a Launch) -> Result<Self, LaunchError> {
        let port = match launch.port {
            Some(port) => port,
            None => free_port()?,
        };
        let secret = if is_set(SECRET) { None } else { Some(random_hex(SECRET_BYTES)?) };
        Ok(Self { launch, port, run_id: random_hex(16)?, secret, threads: !is_set(THREADS) })
    }

    /// Sets the variables of `rank` on `command`.
    pub(super) fn apply(&self, command: &mut Command, rank: usize) {
        let rank = rank.to_string();
        let ranks = self.launch.ranks.to_string();
        for name in ["RANK", "LOCAL_RANK", "ROLE_RANK"] {
            command.env(name, &rank);
        }
        for name in ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"] {
            command.env(name, &ranks);
        }
        command
            .env("GROUP_RANK", "0")
            .env("GROUP_WORLD_SIZE", "1")
            .env("ROLE_NAME", "default")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", self.port.to_string())
            .env("TORCHELASTIC_RUN_ID", &self.run_id)
            .env("TORCHELASTIC_RESTART_COUNT", "0")
            .env("TORCHELASTIC_MAX_RESTARTS", "0")
            .env_remove(OUTER_STORE);
        if self.threads {
            command.env(THREADS, "1");
        }
        if let Some(secret) = &self.secret {
            command.env(SECRET, secret);
        }
        command.envs(self.launch.env.iter().map(|(name, value): &(OsString, OsString)| (name, value)));
    }
}

/// Whether the launcher's own environment holds `name`. Empty counts as unset: an empty secret admits anyone.
fn is_set(name: impl AsRef<OsStr>) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty())
}

/// A port that was free a moment ago; nothing can hold it for the ranks.
fn free_port() -> Result<u16, LaunchError> {
    let port = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr().map(|address| address.port());
    port().map_err(LaunchError::Port)
}

fn random_hex(bytes: usize) -> Result<String, LaunchError> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).map_err(LaunchError::Random)?;
    Ok(random.iter().fold(String::with_capacity(2 * bytes), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}"); // a String takes all
        hex
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_are_hex_and_differ() {
        let (one, other) = (random_hex(32).unwrap(), random_hex(32).unwrap());
        assert_eq!(one.len(), 64);
        assert!(one.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_ne!(one, other);
    }

    #[test]
    fn the_port_can_be_bound() {
        let port = free_port().unwrap();
        assert_ne!(port, 0);
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
