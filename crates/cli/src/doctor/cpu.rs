//! The processor: cores, vector instructions, nodes and caches.

use antiphon::device::host::cpu::Simd;

use super::Check;
use crate::machine::{Cores, Files, cpu, cpu_list};
use crate::sizes::Bytes;

pub(super) fn checks(files: &Files) -> Vec<Check> {
    vec![
        Check::ok("model", cpu(files), "results are comparable on one model only"),
        cores(Cores::count(files)),
        simd(&features(), Simd::widest()),
        nodes(files),
        caches(files),
    ]
}

fn cores(cores: Cores) -> Check {
    let quota = cores.quota.map_or("no quota".into(), |quota| format!("quota {quota}"));
    let value = format!("{} online, {} allowed, {quota}", cores.online, cores.allowed);
    let usable = cores.usable();
    if cores.quota.is_some_and(|quota| quota < cores.allowed as f64) {
        let note = format!(
            "The control group stops more than {usable} busy ranks: raise its cpu.max or start fewer."
        );
        Check::warning("cores", value, note)
    } else if usable == 1 {
        Check::warning(
            "cores",
            value,
            "Ranks take turns on one core: times will show the scheduler's slices.",
        )
    } else {
        Check::ok("cores", value, format!("more than {usable} ranks take turns"))
    }
}

/// The vector extensions that are of use here, and whether they are seen.
fn features() -> Vec<(&'static str, bool)> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("avx512fp16", is_x86_feature_detected!("avx512fp16")),
    ];
    #[cfg(target_arch = "aarch64")]
    return vec![
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("fp16", std::arch::is_aarch64_feature_detected!("fp16")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return Vec::new();
}

/// The vector instructions of the processor, and those that the reductions use.
fn simd(features: &[(&str, bool)], widest: Simd) -> Check {
    let seen: Vec<&str> = features.iter().filter(|(_, seen)| *seen).map(|(name, _)| *name).collect();
    let value = if seen.is_empty() { "none".into() } else { seen.join(" ") };
    match widest {
        Simd::Avx512 => Check::ok("SIMD", value, "reductions use 512 bits"),
        Simd::Avx2 => Check::ok("SIMD", value, "reductions use 256 bits"),
        Simd::Baseline if cfg!(target_arch = "x86_64") => {
            let note = "Reductions use 128 bits: the wider ones need avx2 and f16c, which a virtual machine may hide.";
            Check::warning("SIMD", value, note)
        }
        Simd::Baseline => Check::ok("SIMD", value, "reductions use what the compiler's baseline offers"),
    }
}

fn nodes(files: &Files) -> Check {
    let folder = "sys/devices/system/node";
    let online = files.read(format!("{folder}/online")).and_then(|text| cpu_list(&text)).unwrap_or_default();
    let described = online.iter().map(|node| {
        let cpus = files.read(format!("{folder}/node{node}/cpulist")).unwrap_or_default();
        format!("{node}: {}", if cpus.is_empty() { "no cores" } else { &cpus })
    });
    let described = described.collect::<Vec<_>>().join("; ");
    match online.len() {
        0 => Check::ok("NUMA nodes", "unknown", "the kernel shows none: all memory counts as equally near"),
        1 => Check::ok("NUMA nodes", format!("1 ({described})"), "all memory is equally near"),
        nodes => {
            let note = "memory is nearest to the rank that first touches it; see antiphon run --bind";
            Check::ok("NUMA nodes", format!("{nodes} ({described})"), note)
        }
    }
}

fn caches(files: &Files) -> Check {
    let folder = "sys/devices/system/cpu/cpu0/cache";
    let names = files.names(folder);
    let indexes = names.iter().filter(|name| name.starts_with("index"));
    let caches: Vec<String> =
        indexes.filter_map(|index| cache(files, &format!("{folder}/{index}"))).collect();
    if caches.is_empty() {
        return Check::ok("caches", "unknown", "the kernel shows none: block sizes are the defaults");
    }
    Check::ok("caches", caches.join(", "), "blocks that fit in L2 are reduced fastest")
}

/// One cache in words; instructions' caches do not matter here.
fn cache(files: &Files, folder: &str) -> Option<String> {
    let read = |name: &str| files.read(format!("{folder}/{name}"));
    let (level, kind) = (read("level")?, read("type")?);
    let letter = match kind.as_str() {
        "Data" => "d",
        "Unified" => "",
        _ => return None,
    };
    let size = cache_size(&read("size")?)?;
    let shared = read("shared_cpu_list").and_then(|text| cpu_list(&text)).map_or(1, |cpus| cpus.len());
    let shared = if shared > 1 { format!(" for {shared}") } else { String::new() };
    Some(format!("L{level}{letter} {}{shared}", Bytes(size)))
}

/// Linux writes `32K`.
fn cache_size(text: &str) -> Option<u64> {
    crate::sizes::parse(text).ok()?.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    fn fake(files: &[(&str, &str)]) -> (tempfile::TempDir, Files) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join("sys/devices/system").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let files = Files::at(folder.path());
        (folder, files)
    }

    #[test]
    fn caches_are_listed_without_that_of_instructions() {
        let (_folder, files) = fake(&[
            ("cpu/cpu0/cache/index0/level", "1\n"),
            ("cpu/cpu0/cache/index0/type", "Data\n"),
            ("cpu/cpu0/cache/index0/size", "32K\n"),
            ("cpu/cpu0/cache/index0/shared_cpu_list", "0\n"),
            ("cpu/cpu0/cache/index1/level", "1\n"),
            ("cpu/cpu0/cache/index1/type", "Instruction\n"),
            ("cpu/cpu0/cache/index1/size", "32K\n"),
            ("cpu/cpu0/cache/index3/level", "3\n"),
            ("cpu/cpu0/cache/index3/type", "Unified\n"),
            ("cpu/cpu0/cache/index3/size", "36608K\n"),
            ("cpu/cpu0/cache/index3/shared_cpu_list", "0-15\n"),
        ]);
        assert_eq!(caches(&files).value, "L1d 32 KiB, L3 35.8 MiB for 16");
    }

    #[test]
    fn nodes_are_listed_with_their_cores() {
        let (_folder, files) = fake(&[
            ("node/online", "0-2\n"),
            ("node/node0/cpulist", "0-3\n"),
            ("node/node1/cpulist", "4-7\n"),
            ("node/node2/cpulist", "\n"),
        ]);
        assert_eq!(nodes(&files).value, "3 (0: 0-3; 1: 4-7; 2: no cores)");
    }

    #[test]
    fn what_is_seen_and_what_is_used() {
        let check = simd(&[("avx2", true), ("fma", false), ("f16c", true)], Simd::Avx2);
        assert_eq!((check.value.as_str(), check.note.as_str()), ("avx2 f16c", "reductions use 256 bits"));
        let narrow = simd(&[("avx2", false)], Simd::Baseline);
        let expected = if cfg!(target_arch = "x86_64") { Status::Warning } else { Status::Ok };
        assert_eq!((narrow.value.as_str(), narrow.status), ("none", expected));
    }

    #[test]
    fn a_quota_below_the_cores_is_a_warning() {
        let status = |allowed, quota| cores(Cores { online: 8, allowed, quota }).status;
        assert_eq!(status(8, Some(1.5)), Status::Warning);
        assert_eq!(status(8, Some(8.0)), Status::Ok);
        assert_eq!(status(1, None), Status::Warning);
    }
}
