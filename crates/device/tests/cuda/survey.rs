//! What `antiphon doctor` reports of GPUs.

use antiphon_device::cuda::{Answer, Finding, Survey};

use crate::gpu;

#[test]
fn a_survey_finds_something_or_says_what_to_do() {
    let survey = Survey::take();
    for finding in [&survey.driver, &survey.nvrtc, &survey.nccl, &survey.nvml] {
        match finding {
            Finding::Found { version, place } => assert!(version.contains('.') && !place.is_empty()),
            Finding::Missing { what, remedy } => assert!(!what.is_empty() && !remedy.is_empty()),
        }
    }
    let found = matches!(survey.driver, Finding::Found { .. });
    assert!(found || survey.devices.is_empty(), "{survey:#?}");
}

#[test]
fn a_survey_of_devices_is_plausible() {
    let Some(context) = gpu() else { return };
    let survey = Survey::take();
    eprintln!("{survey:#?}");
    let count = context.device().driver().device_count().unwrap() as usize;
    assert_eq!((survey.devices.len(), survey.links.len()), (count, count));
    for (index, device) in survey.devices.iter().enumerate() {
        let (properties, capabilities) = (&device.properties, &device.capabilities);
        let is_yes = |answer: &Answer| matches!(answer, Answer::Yes(_));
        assert_eq!(is_yes(&capabilities.virtual_memory), properties.virtual_memory, "{capabilities:#?}");
        assert_eq!(is_yes(&capabilities.posix_fd), properties.posix_fd_handles, "{capabilities:#?}");
        assert!(is_yes(&capabilities.ipc), "{capabilities:#?}");
        // Nothing may ever claim that it was tried.
        assert!(!is_yes(&capabilities.multicast), "{capabilities:#?}");
        assert!(!is_yes(&capabilities.fabric) || properties.fabric_handles, "{capabilities:#?}");

        let links = &survey.links[index];
        assert_eq!(links.len(), count);
        assert!(links[index].access);
        if properties.name.contains("H200") && count > 1 {
            assert_ne!(device.active_links, Some(0), "NVML sees no NVLink");
        }
        if let Some(links) = device.active_links {
            assert!(links <= 64, "{links}");
        }
    }
}
