//! The engine between machines: UCX, its transports and devices.

use antiphon::device::library::LibraryError;
use antiphon::fabric::engine::{EngineError, Survey};

use super::Check;

/// The additional line for a machine without UCX.
const NO_UCX: &str = "Ranks use one machine. For several:";

pub(super) fn checks(found: Result<&Survey, &EngineError>) -> Vec<Check> {
    match found {
        Ok(survey) => {
            vec![Check::ok("UCX", survey.version.as_str(), survey.library.as_str()), transports(survey)]
        }
        Err(EngineError::Library(LibraryError::Missing { install, .. })) => {
            vec![Check::missing("UCX", "not found", format!("{NO_UCX} {install}."))]
        }
        // The others say themselves what to do.
        Err(error) => vec![Check::missing("UCX", "cannot be used", error.to_string())],
    }
}

/// The transports between machines, each with its devices: `tcp (eth0, lo)`.
fn transports(survey: &Survey) -> Check {
    const NAME: &str = "transports";
    let mut transports: Vec<(&str, Vec<&str>)> = Vec::new();
    for (transport, device) in survey.between_machines() {
        match transports.iter_mut().find(|(name, _)| name == transport) {
            Some((_, devices)) => devices.push(device),
            None => transports.push((transport, vec![device])),
        }
    }
    if transports.is_empty() {
        return Check::missing(
            NAME,
            "none between machines",
            "UCX_TLS and UCX_NET_DEVICES limit what UCX may use.",
        );
    }
    let lines: Vec<String> =
        transports.iter().map(|(name, devices)| format!("{name} ({})", devices.join(", "))).collect();
    Check::ok(
        NAME,
        lines.join(", "),
        "between machines, with their devices; UCX_TLS and UCX_NET_DEVICES choose",
    )
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    fn survey(devices: &[(&str, &str)]) -> Survey {
        let devices = devices.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        Survey { version: "1.22.0".into(), library: "libucp.so.0".into(), devices }
    }

    #[test]
    fn transports_between_machines_are_listed_with_their_devices() {
        let found = survey(&[("self", "memory"), ("tcp", "eth0"), ("tcp", "lo"), ("rc_mlx5", "mlx5_0:1")]);
        let checks = checks(Ok(&found));
        assert_eq!((checks[0].value.as_str(), checks[0].status), ("1.22.0", Status::Ok));
        assert_eq!(checks[1].value, "tcp (eth0, lo), rc_mlx5 (mlx5_0:1)");
    }

    #[test]
    fn what_is_missing_says_what_to_install() {
        let missing =
            LibraryError::Missing { library: "x", install: "install x", searched: "a lot".into() }.into();
        let checks = checks(Err(&missing));
        assert_eq!((checks[0].status, checks[0].required), (Status::Missing, false));
        assert_eq!(checks[0].note, format!("{NO_UCX} install x."));
        let none = super::checks(Ok(&survey(&[("self", "memory")])));
        assert_eq!(none[1].status, Status::Missing);
    }
}
