//! The variables that tell a rank where it stands: torchrun's, and the secret that admits it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use super::{Launch, LaunchError, Node};

/// Authenticates a rank to its peers; inherited where it is set.
const SECRET: &str = "ANTIPHON_SECRET";
const SECRET_BYTES: usize = 32;
const THREADS: &str = "OMP_NUM_THREADS";
/// TORCHELASTIC_RUN_ID on several nodes, whose launchers share no random one: torchrun's own default.
const RUN_OF_NODES: &str = "none";

/// Left by an outer torchrun, this would send the ranks to its store instead of their own.
const OUTER_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// What a launch sets for its ranks.
pub(super) struct Environment<'a> {
    launch: &'a Launch,
    /// `None` in a world that another launcher has made, and has told its ranks.
    shared: Option<Shared>,
}

/// The values that all ranks of one launch share.
struct Shared {
    port: u16,
    run_id: String,
    secret: Option<String>,
    threads: bool,
}

impl<'a> Environment<'a> {
    pub(super) fn new(launch: &'a Launch) -> Result<Self, LaunchError> {
        let shared = if launch.world.is_some() { None } else { Some(Shared::new(launch)?) };
        Ok(Self { launch, shared })
    }

    /// Sets the variables of this node's rank `local` on `command`.
    pub(super) fn apply(&self, command: &mut Command, local: usize) {
        if let Some(shared) = &self.shared {
            shared.apply(self.launch, command, local);
        }
        command.envs(self.launch.env.iter().map(|(name, value): &(OsString, OsString)| (name, value)));
    }
}

impl Shared {
    fn new(launch: &Launch) -> Result<Self, LaunchError> {
        let port = match (launch.port, &launch.node) {
            (Some(port), _) => port,
            (None, None) => free_port()?,
            (None, Some(_)) => return Err(LaunchError::NodesNeed("a port that is equal on all")),
        };
        let secret = match &launch.node {
            Some(Node { secret: Some(secret), .. }) => Some(secret.clone()),
            _ if is_set(SECRET) => None,
            None => Some(random_hex(SECRET_BYTES)?),
            Some(_) => return Err(LaunchError::NodesNeed("ANTIPHON_SECRET, or a file with it")),
        };
        let run_id = launch.node.as_ref().map_or_else(|| random_hex(16), |_| Ok(RUN_OF_NODES.to_owned()))?;
        Ok(Self { port, run_id, secret, threads: !is_set(THREADS) })
    }

    fn apply(&self, launch: &Launch, command: &mut Command, local: usize) {
        let (nodes, node, address) = match &launch.node {
            None => (1, 0, "127.0.0.1"),
            Some(Node { count, rank, master_addr, .. }) => (*count, *rank, master_addr.as_str()),
        };
        let rank = (launch.first_rank() + local).to_string();
        let ranks = (nodes * launch.ranks).to_string();
        for name in ["RANK", "ROLE_RANK"] {
            command.env(name, &rank);
        }
        for name in ["WORLD_SIZE", "ROLE_WORLD_SIZE"] {
            command.env(name, &ranks);
        }
        command
            .env("LOCAL_RANK", local.to_string())
            .env("LOCAL_WORLD_SIZE", launch.ranks.to_string())
            .env("GROUP_RANK", node.to_string())
            .env("GROUP_WORLD_SIZE", nodes.to_string())
            .env("ROLE_NAME", "default")
            .env("MASTER_ADDR", address)
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
