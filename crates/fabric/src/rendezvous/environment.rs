//! The environment that torchrun and `antiphon run` give to ranks.

use std::{path::PathBuf, time::Duration};

use super::{Address, RendezvousError, Secret, Ticket, secret::fingerprint, user_secret};

/// The place of this rank, as the environment states it.
///
/// | variable | meaning | if unset |
/// | --- | --- | --- |
/// | `RANK`, `WORLD_SIZE` | this rank, and the number of ranks | an error |
/// | `LOCAL_WORLD_SIZE` | ranks on this machine: if there are more ranks, they are on several nodes | `WORLD_SIZE` |
/// | `ANTIPHON_NODE` | the name of this rank's node, equal for ranks that share memory; the ranks are on several nodes then | `GROUP_RANK` |
/// | `ANTIPHON_PORT` | the TCP port of `MASTER_ADDR` at which ranks on several nodes meet | `MASTER_PORT` + 1 |
/// | `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT` | name the meeting place; on one node no TCP port is opened | empty |
/// | `ANTIPHON_RENDEZVOUS` | a path to meet at instead | an abstract socket |
/// | `ANTIPHON_SECRET` | the secret that ranks prove to know | random, in the file `secret` of the user's cache folder; with `ANTIPHON_RENDEZVOUS`, any process of the same user that can open that path may join. Ranks on several nodes need one |
/// | `ANTIPHON_LINK_TIMEOUT` | seconds for which a rank on another node may give no sign of life | 10 |
/// | `ANTIPHON_TIMEOUT` | seconds before a wait fails | 300 |
/// | `ANTIPHON_ARENA_BYTES` | symmetric memory of each rank | 1 GiB |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// `RANK`.
    pub rank: usize,
    /// `WORLD_SIZE`.
    pub world_size: usize,
    /// Where and with which secret to meet.
    pub ticket: Ticket,
    /// The name of this rank's node, if ranks may be on several.
    pub node: Option<String>,
    /// `ANTIPHON_LINK_TIMEOUT`.
    pub link_timeout: Option<Duration>,
    /// `ANTIPHON_TIMEOUT`.
    pub timeout: Option<Duration>,
    /// `ANTIPHON_ARENA_BYTES`.
    pub arena_bytes: Option<usize>,
}

impl Environment {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// [`RendezvousError::Environment`] that names the variable.
    pub fn read() -> Result<Self, RendezvousError> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// The variables by which launchers describe a world.
    pub const LAUNCHERS: [&'static str; 8] = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "ANTIPHON_RENDEZVOUS",
    ];

    /// A world of this rank alone, for a process that no launcher has started, with the settings of its environment.
    ///
    /// # Errors
    /// [`RendezvousError::ForeignLauncher`] where MPI or Slurm has started several ranks, each of which would be alone;
    /// [`RendezvousError::Environment`] that names the variable.
    pub fn alone() -> Result<Self, RendezvousError> {
        Self::alone_in(|name| std::env::var(name).ok())
    }

    fn alone_in(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Self, RendezvousError> {
        if let Some((name, value)) = foreign_launcher(&lookup) {
            return Err(RendezvousError::ForeignLauncher { name, value });
        }
        Self::from_lookup(|name| match name {
            "RANK" => Some("0".to_owned()),
            "WORLD_SIZE" => Some("1".to_owned()),
            _ if Self::LAUNCHERS.contains(&name) => None,
            _ => lookup(name),
        })
    }

    /// Reads the environment that `lookup` describes.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn from_lookup(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Self, RendezvousError> {
        Self::with_secret(lookup, user_secret::of_user)
    }

    /// As [`from_lookup`](Self::from_lookup); `default` gives the secret of ranks whose environment has none.
    fn with_secret(
        lookup: impl Fn(&'static str) -> Option<String>,
        default: impl FnOnce() -> Result<Secret, RendezvousError>,
    ) -> Result<Self, RendezvousError> {
        let world_size = required(&lookup, "WORLD_SIZE")?;
        let rank = required(&lookup, "RANK")?;
        if rank >= world_size {
            return Err(RendezvousError::InvalidRank { rank, world_size });
        }
        let local = number(&lookup, "LOCAL_WORLD_SIZE")?.unwrap_or(world_size);
        if local > world_size {
            let problem = format!("{local} ranks on this machine are more than WORLD_SIZE, {world_size}");
            return Err(RendezvousError::Environment { name: "LOCAL_WORLD_SIZE", problem });
        }
        let node = given(&lookup, "ANTIPHON_NODE")
            .or_else(|| given(&lookup, "GROUP_RANK").filter(|_| local < world_size));
        let is_spread = world_size > 1 && (node.is_some() || local < world_size);
        let ticket = if is_spread { ticket_over_tcp(&lookup) } else { ticket(&lookup, world_size, default) };
        Ok(Self {
            rank,
            world_size,
            ticket: ticket?,
            node: node.filter(|_| is_spread),
            link_timeout: seconds(&lookup, "ANTIPHON_LINK_TIMEOUT")?,
            timeout: seconds(&lookup, "ANTIPHON_TIMEOUT")?,
            arena_bytes: number(&lookup, "ANTIPHON_ARENA_BYTES")?,
        })
    }
}

type Lookup<'a> = &'a dyn Fn(&'static str) -> Option<String>;

/// The variable by which a launcher of MPI or Slurm says that this process is one of several ranks, and its value.
fn foreign_launcher(lookup: Lookup<'_>) -> Option<(&'static str, String)> {
    // Open MPI, MPICH and Intel MPI, Slurm.
    let sizes = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];
    let given: Vec<_> = sizes.into_iter().filter_map(|name| Some((name, lookup(name)?))).collect();
    match given.is_empty() {
        // PMIx's launchers say the rank alone. One of a single rank says its size too.
        true => lookup("PMIX_RANK").map(|rank| ("PMIX_RANK", rank)),
        false => given.into_iter().find(|(_, size)| size.trim() != "1"),
    }
}

fn ticket(
    lookup: Lookup<'_>,
    world_size: usize,
    default: impl FnOnce() -> Result<Secret, RendezvousError>,
) -> Result<Ticket, RendezvousError> {
    let user = rustix::process::geteuid().as_raw().to_string();
    let text = |name| lookup(name).unwrap_or_default();
    let place = fingerprint(&[
        &user,
        &text("MASTER_ADDR"),
        &text("MASTER_PORT"),
        &text("TORCHELASTIC_RUN_ID"),
        &text("TORCHELASTIC_RESTART_COUNT"),
    ]);
    let given = lookup("ANTIPHON_SECRET").filter(|secret| !secret.is_empty()).map(Secret::new);
    if world_size == 1 {
        // The rank of a world of one meets no other rank; several such worlds may run at once under one name.
        return Ok(Ticket { secret: given.unwrap_or(Secret::random()), ..Ticket::random() });
    }
    Ok(match lookup("ANTIPHON_RENDEZVOUS").filter(|path| !path.is_empty()) {
        // Ranks in containers that share a folder need share nothing else: a process that may open the socket may join.
        Some(path) => Ticket {
            address: Address::Path(PathBuf::from(path)),
            secret: given.unwrap_or_else(|| Secret::new(place)),
        },
        // The name of an abstract socket is no secret: every process of the network namespace can read it.
        None => Ticket {
            address: Address::Abstract(format!("antiphon-{place}")),
            secret: given.map_or_else(default, Ok)?,
        },
    })
}

/// The ticket of ranks on several nodes.
fn ticket_over_tcp(lookup: Lookup<'_>) -> Result<Ticket, RendezvousError> {
    let problem = |name, problem: &str| RendezvousError::Environment { name, problem: problem.into() };
    if given(lookup, "ANTIPHON_RENDEZVOUS").is_some() {
        return Err(problem("ANTIPHON_RENDEZVOUS", "ranks on several nodes do not meet at a path: unset it"));
    }
    let host = given(lookup, "MASTER_ADDR").ok_or_else(|| {
        problem("MASTER_ADDR", "it is not set: on several nodes it names the machine of rank 0")
    })?;
    let name = "ANTIPHON_PORT";
    let port = match (number(lookup, name)?, number(lookup, "MASTER_PORT")?) {
        (Some(port), _) => port,
        (None, Some(of_launcher)) => of_launcher.saturating_add(1),
        (None, None) => return Err(problem(name, "neither it nor MASTER_PORT is set")),
    };
    let port = u16::try_from(port).ok().filter(|&port| port > 0);
    let port = port.ok_or_else(|| problem(name, "it, or MASTER_PORT + 1, is no port (1 to 65535)"))?;
    let secret = given(lookup, "ANTIPHON_SECRET").ok_or_else(|| {
        problem("ANTIPHON_SECRET", "it is not set: set it to the same random text for the ranks of all nodes")
    })?;
    Ok(Ticket { address: Address::Tcp { host, port }, secret: Secret::new(secret) })
}

/// `ANTIPHON_NODE`.
pub(crate) fn node_by_environment() -> Option<String> {
    given(&|name| std::env::var(name).ok(), "ANTIPHON_NODE")
}

/// What a variable says, unless it is empty.
fn given(lookup: Lookup<'_>, name: &'static str) -> Option<String> {
    lookup(name).filter(|text| !text.is_empty())
}

fn required(lookup: Lookup<'_>, name: &'static str) -> Result<usize, RendezvousError> {
    number(lookup, name)?
        .ok_or_else(|| RendezvousError::Environment { name, problem: "it is not set".into() })
}

fn number(lookup: Lookup<'_>, name: &'static str) -> Result<Option<usize>, RendezvousError> {
    let Some(text) = lookup(name) else { return Ok(None) };
    let problem = |_| RendezvousError::Environment { name, problem: format!("{text:?} is not a number") };
    text.trim().parse().map(Some).map_err(problem)
}

fn seconds(lookup: Lookup<'_>, name: &'static str) -> Result<Option<Duration>, RendezvousError> {
    let Some(text) = lookup(name) else { return Ok(None) };
    let parsed = text.trim().parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    match parsed {
        Some(duration) if !duration.is_zero() => Ok(Some(duration)),
        _ => {
            let problem = format!("{text:?} is not a positive number of seconds");
            Err(RendezvousError::Environment { name, problem })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&'static str, &str)]) -> Result<Environment, RendezvousError> {
        let lookup = |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
        Environment::with_secret(lookup, || Ok(Secret::new("the user's")))
    }

    #[test]
    fn torchrun_describes_a_rank() {
        let common = [("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
        let first = read(&[&common[..], &[("RANK", "0"), ("LOCAL_WORLD_SIZE", "4")]].concat()).unwrap();
        let last = read(&[&common[..], &[("RANK", "3"), ("ANTIPHON_TIMEOUT", "1.5")]].concat()).unwrap();
        assert_eq!((first.rank, first.world_size, last.rank), (0, 4, 3));
        assert_eq!(first.ticket, last.ticket);
        assert_eq!(last.timeout, Some(Duration::from_millis(1500)));
        let other = read(&[("WORLD_SIZE", "4"), ("RANK", "0"), ("MASTER_PORT", "29501")]).unwrap();
        assert_ne!(first.ticket.address, other.ticket.address);
    }

    #[test]
    fn the_name_of_a_socket_is_not_the_secret() {
        let world = [("WORLD_SIZE", "2"), ("RANK", "0")];
        assert_eq!(read(&world).unwrap().ticket.secret, Secret::new("the user's"));
        let told = [&world[..], &[("ANTIPHON_SECRET", "told")]].concat();
        assert_eq!(read(&told).unwrap().ticket.secret, Secret::new("told"));
        let no_file = || Err(RendezvousError::Exchange("no file".into()));
        for harmless in [("WORLD_SIZE", "1"), ("ANTIPHON_RENDEZVOUS", "/meet")] {
            let lookup = |name| {
                let all = [&[harmless][..], &world[..]].concat();
                all.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
            };
            Environment::with_secret(lookup, no_file).expect("no file is needed");
        }
    }

    #[test]
    fn ranks_on_several_nodes_meet_at_a_port_beside_the_launchers() {
        let two = [("WORLD_SIZE", "16"), ("RANK", "9"), ("LOCAL_WORLD_SIZE", "8"), ("GROUP_RANK", "1")];
        let message =
            |more: &[(&'static str, &str)]| read(&[&two[..], more].concat()).unwrap_err().to_string();
        let host = ("MASTER_ADDR", "::1");
        let (port, secret) = (("MASTER_PORT", "29500"), ("ANTIPHON_SECRET", "s"));
        assert!(message(&[]).contains("MASTER_ADDR"));
        assert!(message(&[host, secret]).contains("ANTIPHON_PORT"));
        assert!(message(&[host, port]).contains("ANTIPHON_SECRET: it is not set"));
        assert!(message(&[host, secret, ("ANTIPHON_PORT", "65536")]).contains("65535"));
        assert!(message(&[host, port, secret, ("ANTIPHON_RENDEZVOUS", "/meet")]).contains("unset it"));
        let met = read(&[&two[..], &[host, port, secret]].concat()).unwrap();
        assert_eq!(met.ticket.address, Address::Tcp { host: "::1".into(), port: 29501 });
        assert_eq!(met.ticket.address.to_string(), "[::1]:29501");
        assert_eq!((met.node.as_deref(), met.ticket.secret), (Some("1"), Secret::new("s")));
        let named = [
            ("WORLD_SIZE", "2"),
            ("RANK", "0"),
            ("ANTIPHON_NODE", "left"),
            ("ANTIPHON_PORT", "7"),
            host,
            secret,
        ];
        let named = read(&named).unwrap();
        assert_eq!(
            (named.node.as_deref(), named.ticket.address.to_string().as_str()),
            (Some("left"), "[::1]:7")
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let message = |variables: &[(&'static str, &str)]| read(variables).unwrap_err().to_string();
        assert!(message(&[("RANK", "0")]).contains("WORLD_SIZE"));
        assert!(message(&[("WORLD_SIZE", "2")]).contains("RANK: it is not set"));
        assert!(message(&[("WORLD_SIZE", "2"), ("RANK", "two")]).contains("\"two\" is not a number"));
        assert!(
            message(&[("WORLD_SIZE", "2"), ("RANK", "2")]).contains("rank 2 is not below the world size 2")
        );
        assert!(message(&[("WORLD_SIZE", "0"), ("RANK", "0")]).contains("world size 0"));
        assert!(
            message(&[("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_WORLD_SIZE", "3")]).contains("3 ranks")
        );
        let no_time = [("WORLD_SIZE", "2"), ("RANK", "0"), ("ANTIPHON_TIMEOUT", "-1")];
        assert!(message(&no_time).contains("ANTIPHON_TIMEOUT"));
    }

    #[test]
    fn ranks_of_mpi_and_slurm_are_not_alone() {
        let alone = |variables: &[(&'static str, &str)]| {
            let lookup =
                |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
            Environment::alone_in(lookup)
        };
        let several = [
            [("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "1")],
            [("PMI_SIZE", "2"), ("PMI_RANK", "0")],
            [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "3")],
            [("OMPI_COMM_WORLD_SIZE", "2"), ("SLURM_STEP_NUM_TASKS", "1")],
            [("PMIX_RANK", "0"), ("PMIX_NAMESPACE", "job")],
        ];
        for variables in several {
            let told = alone(&variables).unwrap_err().to_string();
            let (name, value) = variables[0];
            assert!(told.contains(&format!("{name}={value}")), "{told}");
            assert!(told.contains("exchange=MPI.COMM_WORLD.allgather"), "{told}");
        }
        let single = [
            [("OMPI_COMM_WORLD_SIZE", "1"), ("PMIX_RANK", "0")],
            [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_NTASKS", "8")],
        ];
        for variables in single {
            assert_eq!(alone(&variables).unwrap().world_size, 1);
        }
    }
}
