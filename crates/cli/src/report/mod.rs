//! Shows measured rows: as a table while they arrive ([`Table`]), as a JSON file ([`write_json`]) and as a plot
//! ([`plot`](fn@plot)).

mod json;
mod plot;
mod table;

use antiphon::device::cuda::{CudaError, Driver, Nccl, Nvml, Nvrtc};
use serde::{Deserialize, Serialize};

use crate::machine::{Cores, Files, cpu, kernel};

pub use antiphon_bench::{OnGpu, Row, algbw_gbs};
pub use json::{JsonError, Recorded, SCHEMA, read_json, write_json};
pub use plot::plot;
pub use table::{Summary, Table};

/// Where and when rows were measured. The host's name is left out: results are made to be shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's model.
    pub cpu: String,
    /// How many cores the ranks could keep busy.
    pub cores: usize,
    /// The kernel's release.
    pub kernel: String,
    /// When, in UTC, such as `2026-11-21T08:00:00Z`.
    pub date: String,
    /// The version of Antiphon.
    pub version: String,
    /// The GPUs, if the rows were measured on them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<Gpus>,
}

/// The GPUs of the ranks, and what drove them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpus {
    /// The products' names, by rank.
    pub names: Vec<String>,
    /// The driver's own version, such as `580.95.05`, where NVML tells it.
    pub driver: Option<String>,
    /// The newest CUDA that the driver supports.
    pub cuda: String,
    /// The version of the compiler, if there is one.
    pub nvrtc: Option<String>,
    /// The version of NCCL, if it is there.
    pub nccl: Option<String>,
}

impl Gpus {
    /// The devices that a number of ranks will use, one each; all of them without a number.
    pub(crate) fn of_ranks(ranks: Option<usize>) -> Result<Self, Box<dyn std::error::Error>> {
        let driver = Driver::load()?;
        let devices = driver.devices()?;
        let ranks = ranks.unwrap_or(devices.len());
        if ranks < 2 || ranks > devices.len() {
            let text =
                format!("{ranks} ranks: from 2 to {}, a GPU for each that this process sees", devices.len());
            return Err(text.into());
        }
        let names = devices[..ranks].iter().map(|device| Ok(device.properties()?.name));
        Ok(Self {
            names: names.collect::<Result<_, CudaError>>()?,
            driver: Nvml::load().and_then(Nvml::driver_version).ok(),
            cuda: driver.version().to_string(),
            nvrtc: Nvrtc::load().map(|nvrtc| nvrtc.version().to_string()).ok(),
            nccl: Nccl::load().map(|nccl| nccl.version().to_string()).ok(),
        })
    }

    /// In one line: how many of what, and the versions.
    fn in_words(&self) -> String {
        let mut kinds: Vec<(&str, usize)> = Vec::new();
        for name in &self.names {
            match kinds.iter_mut().find(|(known, _)| known == name) {
                Some((_, count)) => *count += 1,
                None => kinds.push((name, 1)),
            }
        }
        let kinds: Vec<String> = kinds.iter().map(|(name, count)| format!("{count} × {name}")).collect();
        let version = |what, version: &Option<String>| match version {
            Some(version) => format!("{what} {version}"),
            None => format!("no {what}"),
        };
        let driver = self.driver.as_deref().map_or(String::new(), |driver| format!("driver {driver}, "));
        let [nvrtc, nccl] = [version("NVRTC", &self.nvrtc), version("NCCL", &self.nccl)];
        format!("{}, {driver}CUDA {}, {nvrtc}, {nccl}", kinds.join(" + "), self.cuda)
    }
}

impl Machine {
    /// This machine, now.
    pub fn this() -> Self {
        let files = Files::system();
        Self {
            cpu: cpu(&files),
            cores: Cores::count(&files).usable(),
            kernel: kernel(),
            date: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            gpus: None,
        }
    }

    fn cores_in_words(&self) -> String {
        format!("{} core{}", self.cores, if self.cores == 1 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows as a benchmark would measure them, for the tests of all three shapes.
    pub(super) fn rows() -> Vec<Row> {
        let row = |algorithm: &str, bytes: u64, latency_us: f64| Row {
            collective: "all_reduce".into(),
            bytes,
            count: bytes / 4,
            dtype: "float32".into(),
            op: Some("sum".into()),
            algorithm: algorithm.into(),
            ranks: 4,
            latency_us,
            min_us: latency_us * 0.9,
            max_us: latency_us * 1.5,
            algbw_gbs: algbw_gbs(bytes, latency_us),
            busbw_gbs: algbw_gbs(bytes, latency_us) * 1.5,
            errors: 0,
            max_error: 0.0,
            gpu: None,
        };
        let sizes = (2..=26).step_by(2).map(|power| 1u64 << power);
        sizes
            .flat_map(|bytes| {
                let size = bytes as f64;
                [row("one_shot", bytes, 2.0 + size / 4e3), row("two_shot", bytes, 5.0 + size / 9e3)]
            })
            .collect()
    }

    pub(super) fn machine() -> Machine {
        Machine {
            cpu: "Example <CPU> & Co".into(),
            cores: 8,
            kernel: "6.8.0".into(),
            date: "2026-11-21T08:00:00Z".into(),
            version: "0.1.0".into(),
            gpus: None,
        }
    }

    pub(super) fn gpus() -> Gpus {
        Gpus {
            names: vec!["NVIDIA H200".into(); 4],
            driver: Some("580.95.05".into()),
            cuda: "13.0".into(),
            nvrtc: Some("13.0".into()),
            nccl: None,
        }
    }

    #[test]
    fn gpus_are_counted_by_name_and_what_is_missing_is_said() {
        let expected = "4 × NVIDIA H200, driver 580.95.05, CUDA 13.0, NVRTC 13.0, no NCCL";
        assert_eq!(gpus().in_words(), expected);
    }

    #[test]
    fn this_machine_is_described_without_its_name() {
        let machine = Machine::this();
        assert!(!machine.cpu.is_empty() && machine.cores > 0 && !machine.kernel.is_empty());
        assert!(machine.date.ends_with('Z') && machine.date.len() == 20, "{}", machine.date);
    }
}
