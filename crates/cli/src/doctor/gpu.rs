//! The GPUs: drivers, devices, the links between them, and the features of their memory.

use std::collections::BTreeMap;

use antiphon::device::cuda::{Answer, Capabilities, DeviceSurvey, Finding, PeerLink, Survey};

use super::{Check, Status};
use crate::sizes::Bytes;

/// The additional line for a machine without a driver.
const NO_DRIVER: &str = "Ranks use the processor. For GPUs:";

pub(super) fn checks(survey: &Survey) -> Vec<Check> {
    let mut checks = vec![
        driver(&survey.driver, &survey.nvml),
        library("NVRTC", &survey.nvrtc, "compiles kernels at their first use"),
        library("NCCL", &survey.nccl, "serves as yardstick and fallback"),
    ];
    let devices = &survey.devices;
    checks.extend(devices.iter().enumerate().map(|(ordinal, found)| device(ordinal, found)));
    if devices.is_empty() {
        return checks;
    }
    let links = survey.links.iter().enumerate().filter(|_| devices.len() > 1);
    checks.extend(links.map(|(ordinal, row)| peers(ordinal, row)));
    checks.push(nvlink(devices));
    let found: Vec<_> = devices.iter().map(|device| abilities(&device.capabilities)).collect();
    checks.extend((0..found[0].len()).map(|index| {
        let (name, _, needed) = found[0][index];
        let answers: Vec<&Answer> = found.iter().map(|abilities| abilities[index].1).collect();
        ability(name, &answers, needed)
    }));
    checks
}

/// Each ability's name, its answer, and whether something here works worse without it.
fn abilities(of: &Capabilities) -> [(&'static str, &Answer, bool); 5] {
    [
        ("VMM", &of.virtual_memory, true),
        ("POSIX-fd handles", &of.posix_fd, true),
        ("CUDA IPC", &of.ipc, true),
        ("fabric handles", &of.fabric, false),
        ("multicast", &of.multicast, false),
    ]
}

fn driver(driver: &Finding, nvml: &Finding) -> Check {
    const NAME: &str = "driver";
    match (driver, nvml) {
        (Finding::Found { version, place }, Finding::Found { version: own, .. }) => {
            Check::ok(NAME, format!("{own}, for CUDA {version}"), place.as_str())
        }
        (Finding::Found { version, place }, Finding::Missing { .. }) => {
            Check::ok(NAME, format!("for CUDA {version}"), place.as_str())
        }
        (Finding::Missing { what, remedy }, _) => {
            Check::missing(NAME, what.as_str(), format!("{NO_DRIVER} {remedy}."))
        }
    }
}

fn library(name: &'static str, found: &Finding, purpose: &str) -> Check {
    match found {
        Finding::Found { version, place } => Check::ok(name, version.as_str(), format!("{purpose}; {place}")),
        Finding::Missing { what, remedy } => {
            Check::missing(name, what.as_str(), format!("It {purpose}: {remedy}."))
        }
    }
}

fn device(ordinal: usize, found: &DeviceSurvey) -> Check {
    let of = &found.properties;
    let (major, minor) = of.compute_capability;
    let value = format!("{}, {}", of.name, Bytes(of.memory_bytes));
    let divided = match found.divided {
        Some(true) => "divided into instances (MIG)",
        Some(false) => "MIG off",
        None => "MIG unknown",
    };
    let (units, place) = (of.multiprocessors, &of.pci_bus_id);
    let note = format!("compute capability {major}.{minor}, {units} multiprocessors, at {place}, {divided}");
    Check::ok(format!("cuda:{ordinal}"), value, note)
}

/// How a device reaches the others, those that it reaches in the same way together.
fn peers(from: usize, row: &[PeerLink]) -> Check {
    let mut ways: BTreeMap<(bool, bool, i32), Vec<usize>> = BTreeMap::new();
    for (to, link) in row.iter().enumerate().filter(|(to, _)| *to != from) {
        // The best first.
        let way = (!link.access, !link.native_atomics, link.performance_rank);
        ways.entry(way).or_default().push(to);
    }
    let all_reach = ways.keys().all(|(no_access, ..)| !no_access);
    let described = ways.into_iter().map(|((no_access, no_atomics, rank), peers)| {
        let way = match (no_access, no_atomics) {
            (true, _) => "no".to_owned(),
            (false, true) => format!("yes, without atomics, rank {rank}"),
            (false, false) => format!("yes, with atomics, rank {rank}"),
        };
        format!("{}: {way}", ordinals(&peers))
    });
    let (name, value) = (format!("P2P from cuda:{from}"), described.collect::<Vec<_>>().join("; "));
    match all_reach {
        true => Check::ok(name, value, "loads and stores; rank is the driver's, 0 the fastest"),
        false => {
            Check::warning(name, value, "Ranks on devices that do not reach each other cannot be peers.")
        }
    }
}

fn nvlink(devices: &[DeviceSurvey]) -> Check {
    const NAME: &str = "NVLink";
    let links: Option<Vec<u32>> = devices.iter().map(|device| device.active_links).collect();
    let Some(links) = links else {
        return Check::ok(NAME, "untested", "libnvidia-ml is not there to tell, or cannot");
    };
    let value = match links.iter().all(|count| *count == links[0]) {
        true => links[0].to_string(),
        false => links.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
    };
    Check::ok(NAME, value, "active links of each device")
}

/// One ability of all devices: in one word where they agree, else device by device.
fn ability(name: &'static str, answers: &[&Answer], needed: bool) -> Check {
    let mut by_answer: Vec<(&Answer, Vec<usize>)> = Vec::new();
    for (ordinal, answer) in answers.iter().enumerate() {
        match by_answer.iter_mut().find(|(known, _)| known == answer) {
            Some((_, ordinals)) => ordinals.push(ordinal),
            None => by_answer.push((answer, vec![ordinal])),
        }
    }
    let (value, note) = match &by_answer[..] {
        [(answer, _)] => (word(answer).to_owned(), how(answer).to_owned()),
        several => {
            let each = |show: fn(&Answer) -> &str| -> String {
                let each =
                    several.iter().map(|(answer, which)| format!("{}: {}", ordinals(which), show(answer)));
                each.collect::<Vec<_>>().join("; ")
            };
            (each(word), each(how))
        }
    };
    let lacking = needed && answers.iter().any(|answer| matches!(answer, Answer::No(_)));
    Check { status: if lacking { Status::Warning } else { Status::Ok }, ..Check::ok(name, value, note) }
}

fn word(answer: &Answer) -> &str {
    match answer {
        Answer::Yes(_) => "yes",
        Answer::No(_) => "no",
        Answer::Untested(_) => "untested",
    }
}

fn how(answer: &Answer) -> &str {
    match answer {
        Answer::Yes(how) | Answer::No(how) | Answer::Untested(how) => how,
    }
}

/// `0, 1, 3`, with `0-3` for three or more in a row.
fn ordinals(of: &[usize]) -> String {
    let runs = of.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        [one, two] => format!("{one}, {two}"),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[path = "gpu_tests.rs"]
mod tests;
