//! Made-up machines, as `antiphon doctor --json` writes them.

use serde_json::{Value, json};

use super::*;
use crate::doctor::{Diagnosis, render};

fn missing(remedy: &str) -> Value {
    json!({"missing": {"what": "not found", "remedy": remedy}})
}

fn found(version: &str, place: &str) -> Value {
    json!({"found": {"version": version, "place": place}})
}

fn answer(answer: &str, how: &str) -> Value {
    json!({"answer": answer, "how": how})
}

fn device(bus: &str) -> Value {
    json!({
        "properties": {
            "name": "NVIDIA H200", "uuid": "GPU-1", "pci_bus_id": bus, "compute_capability": [9, 0],
            "multiprocessors": 132, "memory_bytes": 150_754_820_096u64, "l2_bytes": 62_914_560,
            "shared_bytes_per_block": 232_448, "threads_per_multiprocessor": 2048,
            "cooperative_launch": true, "cluster_launch": true, "virtual_memory": true,
            "posix_fd_handles": true, "fabric_handles": true, "rdma_virtual_memory": true, "multicast": true, "stream_writes": true
        },
        "capabilities": {
            "virtual_memory": answer("yes", "mapped"), "posix_fd": answer("yes", "imported"),
            "ipc": answer("yes", "exported"), "fabric": answer("no", "not permitted"),
            "multicast": answer("untested", "attribute says supported")
        },
        "active_links": 18, "divided": false
    })
}

fn link(access: bool) -> Value {
    json!({"access": access, "native_atomics": access, "performance_rank": 0})
}

fn two_devices() -> Value {
    json!({
        "driver": found("13.0", "libcuda.so.1"), "nvrtc": found("13.0", "/cu13/libnvrtc.so.13"),
        "nccl": missing("`pip install nvidia-nccl-cu13`"), "nvml": found("580.95.05", "libnvidia-ml.so.1"),
        "devices": [device("0000:19:00.0"), device("0000:3B:00.0")],
        "links": [[link(true), link(true)], [link(true), link(true)]]
    })
}

/// The table of the section alone.
fn text(survey: Value) -> String {
    let survey = serde_json::from_value(survey).unwrap();
    let checks = checks(&survey).into_iter().map(|check| Check { section: "GPU", ..check }).collect();
    let diagnosis = Diagnosis { schema: 1, version: "0", healthy: true, checks, gpu: survey };
    let text = render::text(&diagnosis, false);
    text.split_once("\n\n").unwrap().0.to_owned()
}

#[test]
fn a_machine_with_two_devices() {
    let expected = "\
GPU
  ok       driver            580.95.05, for CUDA 13.0      libcuda.so.1
  ok       NVRTC             13.0                          compiles kernels at their first use; /cu13/libnvrtc.so.13
  missing  NCCL              not found
                             It serves as yardstick and fallback: `pip install nvidia-nccl-cu13`.
  ok       cuda:0            NVIDIA H200, 140.4 GiB        compute capability 9.0, 132 multiprocessors, at 0000:19:00.0, MIG off
  ok       cuda:1            NVIDIA H200, 140.4 GiB        compute capability 9.0, 132 multiprocessors, at 0000:3B:00.0, MIG off
  ok       P2P from cuda:0   1: yes, with atomics, rank 0  loads and stores; rank is the driver's, 0 the fastest
  ok       P2P from cuda:1   0: yes, with atomics, rank 0  loads and stores; rank is the driver's, 0 the fastest
  ok       NVLink            18                            active links of each device
  ok       VMM               yes                           mapped
  ok       POSIX-fd handles  yes                           imported
  ok       CUDA IPC          yes                           exported
  ok       fabric handles    no                            not permitted
  ok       multicast         untested                      attribute says supported";
    assert_eq!(text(two_devices()), expected);
}

#[test]
fn a_machine_without_a_driver_is_told_what_to_install() {
    let survey = json!({
        "driver": missing("install the NVIDIA driver"), "nvrtc": missing("install it"), "nccl": missing("install it"),
        "nvml": missing("install it"), "devices": [], "links": []
    });
    let expected = "\
GPU
  missing  driver  not found
                   Ranks use the processor. For GPUs: install the NVIDIA driver.";
    let text = text(survey);
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(text.matches("missing").count(), 3, "{text}");
}

#[test]
fn devices_that_differ_are_told_apart() {
    let mut survey = two_devices();
    survey["devices"][1]["capabilities"]["ipc"] = answer("no", "refused");
    survey["devices"][1]["active_links"] = 12.into();
    survey["devices"][1]["divided"] = true.into();
    survey["links"][0][1] = link(false);
    let text = text(survey);
    for line in [
        "warning  CUDA IPC          0: yes; 1: no",
        "0: exported; 1: refused",
        "ok       NVLink            18, 12",
        "at 0000:3B:00.0, divided into instances (MIG)",
        "warning  P2P from cuda:0   1: no",
    ] {
        assert!(text.contains(line), "no `{line}` in:\n{text}");
    }
}

#[test]
fn without_nvml_links_and_instances_are_unknown() {
    let mut survey = two_devices();
    survey["nvml"] = missing("install it");
    for device in survey["devices"].as_array_mut().unwrap() {
        (device["active_links"], device["divided"]) = (Value::Null, Value::Null);
    }
    let text = text(survey);
    for line in ["ok       driver            for CUDA 13.0", "NVLink            untested", "MIG unknown"] {
        assert!(text.contains(line), "no `{line}` in:\n{text}");
    }
}

#[test]
fn peers_that_are_reached_in_the_same_way_stand_together() {
    let link = |native_atomics, performance_rank| PeerLink { access: true, native_atomics, performance_rank };
    let row = [link(true, 0), link(true, 0), link(true, 0), link(true, 0), link(false, 1)];
    let value = peers(2, &row).value;
    assert_eq!(value, "0, 1, 3: yes, with atomics, rank 0; 4: yes, without atomics, rank 1");
    assert_eq!([ordinals(&[1, 2, 3]), ordinals(&[0, 2, 3]), ordinals(&[])], ["1-3", "0, 2, 3", ""]);
}
