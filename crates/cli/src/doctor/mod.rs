//! `antiphon doctor`: the features that this machine supports, and those that it lacks.

mod cpu;
mod engine;
mod gpu;
mod job;
mod kernel;
mod memory;
mod render;

use std::borrow::Cow;
use std::io::{self, Write};

use anstream::{AutoStream, ColorChoice};
use antiphon::device::cuda::Survey;
use antiphon::fabric::engine::{self as between_machines, EngineError, Ucx};
use serde::Serialize;

use crate::machine::Files;
use crate::{ExitStatus, FAILURE, SUCCESS};

/// Say what this machine can do for Antiphon and what it lacks, or what a running job waits for.
///
/// Without `--job`, each line is ok, a warning (it works, but slower or less safely) or missing. Nothing is changed, and nothing
/// leaves the machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon doctor
  antiphon doctor --json | jq '.checks[] | select(.status != \"ok\")'
  antiphon doctor --job 4711            # which rank waits for which, in which call, since when

Exit status:
  0 when everything that Antiphon requires is there, or the job was found, else 1.")]
pub struct Args {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Show what the ranks of a running job wait for: the process of a rank, or of what started the ranks
    ///
    /// The job is not disturbed. The report has neither ranks of other users nor waits of kernels on GPUs.
    #[arg(long, value_name = "PID")]
    job: Option<u32>,
}

/// Runs the command.
pub fn execute(args: Args) -> ExitStatus {
    if let Some(process) = args.job {
        return job::execute(process, args.json);
    }
    let diagnosis = Diagnosis::new(&Files::system(), Survey::take(), Ucx::survey());
    let text = if args.json {
        diagnosis.json()
    } else {
        diagnosis.text(AutoStream::choice(&io::stdout()) != ColorChoice::Never)
    };
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) if diagnosis.healthy => SUCCESS,
        _ => FAILURE,
    }
}

/// How one check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be, or for information only.
    Ok,
    /// It works, but slower or less safely than it could.
    Warning,
    /// Not there.
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The group it belongs to.
    pub section: &'static str,
    /// The subject of the check.
    pub name: Cow<'static, str>,
    /// How it went.
    pub status: Status,
    /// Whether Antiphon cannot work without it.
    pub required: bool,
    /// The finding.
    pub value: String,
    /// The meaning of the finding, or the remedy.
    pub note: String,
}

impl Check {
    fn ok(name: impl Into<Cow<'static, str>>, value: impl Into<String>, note: impl Into<String>) -> Self {
        let (value, note) = (value.into(), note.into());
        Self { section: "", name: name.into(), status: Status::Ok, required: false, value, note }
    }

    fn warning(
        name: impl Into<Cow<'static, str>>,
        value: impl Into<String>,
        note: impl Into<String>,
    ) -> Self {
        Self { status: Status::Warning, ..Self::ok(name, value, note) }
    }

    fn missing(name: &'static str, value: impl Into<String>, note: impl Into<String>) -> Self {
        Self { status: Status::Missing, ..Self::ok(name, value, note) }
    }

    /// Something that Antiphon cannot work without, by the result of trying it.
    fn required(
        name: &'static str,
        tried: io::Result<()>,
        purpose: &'static str,
        remedy: &'static str,
    ) -> Self {
        let check = match tried {
            Ok(()) => Self::ok(name, "works", purpose),
            Err(error) => Self::missing(name, error.to_string(), remedy),
        };
        Self { required: true, ..check }
    }
}

/// Everything that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// The version of this layout of the JSON.
    pub schema: u32,
    /// The version of Antiphon that looked.
    pub version: &'static str,
    /// Whether all that is required is there.
    pub healthy: bool,
    /// The checks, section by section.
    pub checks: Vec<Check>,
    /// The survey of the GPUs; the checks show most of it.
    pub gpu: Survey,
}

impl Diagnosis {
    /// Looks at this machine; what is only read is read from `files`, and `gpu` and `ucx` were found out before.
    pub fn new(files: &Files, gpu: Survey, ucx: Result<between_machines::Survey, EngineError>) -> Self {
        let sections = [
            ("System", kernel::checks()),
            ("Processor", cpu::checks(files)),
            ("Memory", memory::checks(files)),
            ("GPU", gpu::checks(&gpu)),
            ("Other machines", engine::checks(ucx.as_ref())),
        ];
        let checks: Vec<Check> = sections
            .into_iter()
            .flat_map(|(section, checks)| checks.into_iter().map(move |check| Check { section, ..check }))
            .collect();
        let healthy = !checks.iter().any(|check| check.required && check.status == Status::Missing);
        Self { schema: 1, version: env!("CARGO_PKG_VERSION"), healthy, checks, gpu }
    }

    fn json(&self) -> String {
        let mut text =
            serde_json::to_string_pretty(self).expect("strings and numbers can be written as JSON");
        text.push('\n');
        text
    }

    fn text(&self, colored: bool) -> String {
        render::text(self, colored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_files_is_still_described() {
        let folder = tempfile::tempdir().unwrap();
        let diagnosis = Diagnosis::new(&Files::at(folder.path()), Survey::take(), Ucx::survey());
        assert!(diagnosis.checks.iter().all(|check| !check.value.is_empty() && !check.note.is_empty()));
    }

    #[test]
    fn what_fails_is_missing_with_its_reason_and_remedy() {
        let failed = Err(io::Error::from_raw_os_error(38));
        let check = Check::required("memfd_create", failed, "purpose", "remedy");
        assert_eq!((check.status, check.note.as_str()), (Status::Missing, "remedy"));
        assert!(check.value.contains("os error 38"), "{}", check.value);
    }
}
