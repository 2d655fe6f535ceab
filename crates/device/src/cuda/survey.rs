//! All that this machine has for GPUs, as plain data.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{
    Capabilities, CudaError, Device, DeviceProperties, Driver, Nccl, Nvml, Nvrtc, PeerLink, libraries,
};
use crate::library::LibraryError;

/// How each device (row) reaches each (column).
type Links = Vec<Vec<PeerLink>>;

/// The outcome of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Finding {
    /// It is there.
    Found {
        /// Its version, as it numbers itself.
        version: String,
        /// The file, or the name that the dynamic loader found it by.
        place: String,
    },
    /// It is not there, or cannot be used.
    Missing {
        /// The problem.
        what: String,
        /// The remedy.
        remedy: String,
    },
}

/// One device, with its properties and what a survey measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceSurvey {
    /// The properties that the driver reports.
    pub properties: DeviceProperties,
    /// The ways in which its memory can be shared with peers.
    pub capabilities: Capabilities,
    /// How many of its NVLinks are active; none if NVML is not there to tell.
    pub active_links: Option<u32>,
    /// Whether it is divided into instances (MIG); none if NVML is not there to tell.
    pub divided: Option<bool>,
}

/// Everything about GPUs and what is needed to use them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Survey {
    /// The driver; its version is that of CUDA.
    pub driver: Finding,
    /// The compiler.
    pub nvrtc: Finding,
    /// NCCL, a yardstick and a fallback.
    pub nccl: Finding,
    /// The driver's management library, which knows of links and instances.
    pub nvml: Finding,
    /// The devices that this process sees.
    pub devices: Vec<DeviceSurvey>,
    /// How each device (row) reaches each (column).
    pub links: Vec<Vec<PeerLink>>,
}

impl Survey {
    /// Looks at everything, and tries what [`Capabilities::probe`] tries: up to a second for every device. What is
    /// missing is a [`Finding`] and never an error.
    pub fn take() -> Self {
        let (driver, nvrtc, nvml) = (Driver::load(), Nvrtc::load(), Nvml::load());
        let surveyed =
            driver.and_then(|driver| Ok((driver.version(), devices(driver, nvml.as_ref().ok().copied())?)));
        let (version, (devices, links)) = match surveyed {
            Ok((version, devices)) => (Ok(version), devices),
            Err(error) => (Err(error), Default::default()),
        };
        Self {
            driver: finding(version.map(|version| (version.to_string(), libraries::DRIVER.names[0].into()))),
            nvrtc: finding(nvrtc.map(|nvrtc| (nvrtc.version().to_string(), place(nvrtc.path())))),
            nccl: finding(Nccl::load().map(|nccl| (nccl.version().to_string(), place(nccl.path())))),
            nvml: finding(
                nvml.and_then(|nvml| Ok((nvml.driver_version()?, libraries::NVML.names[0].into()))),
            ),
            devices,
            links,
        }
    }
}

fn devices(driver: &'static Driver, nvml: Option<&Nvml>) -> Result<(Vec<DeviceSurvey>, Links), CudaError> {
    let devices = driver.devices()?;
    let surveys = devices.iter().map(|device| DeviceSurvey::take(*device, nvml)).collect::<Result<_, _>>()?;
    Ok((surveys, Device::links(&devices)?))
}

impl DeviceSurvey {
    fn take(device: Device, nvml: Option<&Nvml>) -> Result<Self, CudaError> {
        let properties = device.properties()?;
        let place = &properties.pci_bus_id;
        Ok(Self {
            active_links: nvml.and_then(|nvml| nvml.active_links(place).ok()),
            divided: nvml.and_then(|nvml| nvml.is_divided(place).ok()),
            capabilities: Capabilities::probe(device)?,
            properties,
        })
    }
}

fn place(path: &Path) -> String {
    path.display().to_string()
}

fn finding(found: Result<(String, String), CudaError>) -> Finding {
    match found {
        Ok((version, place)) => Finding::Found { version, place },
        Err(CudaError::Library(LibraryError::Missing { install, .. })) => {
            Finding::Missing { what: "not found".into(), remedy: install.into() }
        }
        // These say themselves what to do.
        Err(error @ (CudaError::DriverTooOld { .. } | CudaError::Library(_))) => {
            Finding::Missing { what: "cannot be used".into(), remedy: error.to_string() }
        }
        Err(error) => {
            let remedy = "See what `nvidia-smi` says of the driver and its devices.";
            Finding::Missing { what: error.to_string(), remedy: remedy.into() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_what_to_install_and_not_where_it_was_sought() {
        let error = LibraryError::Missing { library: "x", install: "install x", searched: "a lot".into() };
        let expected = Finding::Missing { what: "not found".into(), remedy: "install x".into() };
        assert_eq!(finding(Err(error.into())), expected);
    }

    #[test]
    fn a_survey_survives_its_json() {
        let survey = Survey::take();
        let json = serde_json::to_string(&survey).unwrap();
        assert_eq!(serde_json::from_str::<Survey>(&json).unwrap(), survey);
    }
}
