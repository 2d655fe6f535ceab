//! The record of what tests needed.

use std::{
    env,
    fmt::{self, Display},
    fs::OpenOptions,
    io::Write,
    path::Path,
    thread,
};

/// What a test needs of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// At least this number of GPUs.
    Gpus(usize),
    /// Two GPUs that reach each other's memory.
    Link,
    /// What real GPUs have and the emulator has not: the text says what.
    Hardware(&'static str),
    /// What only the emulator has: the text says what.
    Emulator(&'static str),
    /// The compiler of kernels.
    Nvrtc,
    /// The disassembler of kernels.
    Nvdisasm,
    /// The library NCCL.
    Nccl,
    /// The linker of kernels.
    NvJitLink,
    /// The library NVSHMEM.
    Nvshmem,
    /// The library UCX.
    Ucx,
    /// The right to make network and mount namespaces, which stand for machines.
    Machines,
    /// The right to make PID namespaces.
    Namespaces,
    /// To be the user root.
    Root,
    /// SIGINT, which what a shell starts with `&` ignores.
    Interrupts,
    /// A program of this name.
    Program(&'static str),
}

/// The first word is its name in `ANTIPHON_REQUIRE`.
impl Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpus(count) => write!(f, "gpus {count}"),
            Self::Link => write!(f, "link"),
            Self::Hardware(what) => write!(f, "hardware: {what}"),
            Self::Emulator(what) => write!(f, "emulator: {what}"),
            Self::Nvrtc => write!(f, "nvrtc"),
            Self::Nvdisasm => write!(f, "nvdisasm"),
            Self::Nccl => write!(f, "nccl"),
            Self::NvJitLink => write!(f, "nvjitlink"),
            Self::Nvshmem => write!(f, "nvshmem"),
            Self::Ucx => write!(f, "ucx"),
            Self::Machines => write!(f, "machines"),
            Self::Namespaces => write!(f, "namespaces"),
            Self::Root => write!(f, "root"),
            Self::Interrupts => write!(f, "interrupts"),
            Self::Program(name) => write!(f, "program {name}"),
        }
    }
}

/// What was found of what a test needs. Without it the test is to return, and is recorded as skipped.
///
/// To be called on the test's own thread, whose name is the test's.
///
/// # Panics
/// Where `ANTIPHON_REQUIRE` names the need and it was not found, and where the record cannot be written.
pub fn need<T, E: Display>(need: Need, found: Result<T, E>) -> Option<T> {
    let (outcome, reason) = match &found {
        Ok(_) => ("ran", String::new()),
        Err(reason) => ("skipped", reason.to_string()),
    };
    let test = test();
    if outcome == "skipped" {
        eprintln!("skipped: {test} needs {need}: {reason}");
    }
    if let Some(file) = env::var_os("ANTIPHON_SKIPPED") {
        append(Path::new(&file), [outcome, &need.to_string(), &test, &reason]);
    }
    let required = env::var("ANTIPHON_REQUIRE").unwrap_or_default();
    assert!(
        found.is_ok() || !is_required(&need.to_string(), &required),
        "ANTIPHON_REQUIRE={required} and no {need}: {reason}"
    );
    found.ok()
}

fn is_required(need: &str, required: &str) -> bool {
    let name = need.split([' ', ':']).next();
    required.split(',').map(str::trim).any(|required| Some(required) == name || required == "all")
}

/// A line, which is written at once, so that processes do not mix theirs.
fn append(file: &Path, fields: [&str; 4]) {
    let line = fields.map(|field| field.replace(['\t', '\n', '\r'], " ")).join("\t") + "\n";
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(file)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    written.unwrap_or_else(|error| panic!("ANTIPHON_SKIPPED={}: {error}", file.display()));
}

/// `CRATE-TARGET::TEST`, alike under Cargo and in the bundle for GPU machines, whose files are named `CRATE-TARGET`.
fn test() -> String {
    let thread = thread::current();
    let name =
        thread.name().filter(|&name| name != "main").expect("a need is asked for on the thread of a test");
    let path = env::current_exe().expect("a running program has a file");
    let target = target(
        &path.file_stem().unwrap_or_default().to_string_lossy(),
        env::var("CARGO_PKG_NAME").ok().as_deref(),
    );
    format!("{target}::{name}")
}

fn target(stem: &str, package: Option<&str>) -> String {
    let Some(package) = package else { return stem.to_owned() };
    let short = package.strip_prefix("antiphon-").unwrap_or(package);
    // Cargo adds a hash of 16 digits.
    let target =
        stem.rsplit_once('-').filter(|(_, hash)| hash.len() == 16).map_or(stem, |(target, _)| target);
    let target = if target == package.replace('-', "_") { "lib" } else { target };
    format!("{short}-{target}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_named_alike_under_cargo_and_in_the_bundle() {
        assert_eq!(target("cuda-0123456789abcdef", Some("antiphon-device")), "device-cuda");
        assert_eq!(target("device-cuda", None), "device-cuda");
        assert_eq!(target("antiphon_moe-0123456789abcdef", Some("antiphon-moe")), "moe-lib");
        assert_eq!(target("examples-0123456789abcdef", Some("antiphon")), "antiphon-examples");
    }

    #[test]
    fn a_need_is_required_by_its_name_whatever_the_number() {
        assert!(is_required("gpus 4", "root, gpus"));
        assert!(is_required("hardware: a clock", "hardware"));
        assert!(is_required("root", "all"));
        assert!(!is_required("root", ""));
        assert!(!is_required("nvrtc", "gpus,nvdisasm"));
    }
}
