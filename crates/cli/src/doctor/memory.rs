//! Memory and its limits.

use rustix::fs::statvfs;
use rustix::process::{Resource, getrlimit};

use super::Check;
use crate::machine::{Files, meminfo_field, memory_limit};
use crate::sizes::Bytes;

const SHMEM_HUGE_PAGES: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// A launch of 16 ranks needs about this many files; each rank needs some for every peer.
const FEW_FILES: u64 = 256;

pub(super) fn checks(files: &Files) -> Vec<Check> {
    vec![
        ram(&files.read("proc/meminfo").unwrap_or_default(), memory_limit(files)),
        huge_pages(files.read(SHMEM_HUGE_PAGES).as_deref()),
        overcommit(files.read("proc/sys/vm/overcommit_memory").as_deref()),
        memlock(getrlimit(Resource::Memlock).current),
        nofile(getrlimit(Resource::Nofile).current, getrlimit(Resource::Nofile).maximum),
        dev_shm(files),
    ]
}

fn ram(meminfo: &str, limit: Option<u64>) -> Check {
    const NAME: &str = "RAM";
    let field = |name| meminfo_field(meminfo, name);
    let (Some(total), Some(available)) = (field("MemTotal"), field("MemAvailable")) else {
        return Check::warning(NAME, "unknown", "/proc/meminfo cannot be read: mount /proc.");
    };
    match limit.filter(|&limit| limit < total) {
        Some(limit) => {
            let value = format!("{} of {}", Bytes(limit), Bytes(total));
            let note =
                "More ends the control group's processes, and shared memory counts: see its memory.max.";
            Check::warning(NAME, value, note)
        }
        None => {
            let value = format!("{}, {} available", Bytes(total), Bytes(available));
            Check::ok(NAME, value, "shared tensors live here")
        }
    }
}

fn huge_pages(setting: Option<&str>) -> Check {
    const NAME: &str = "huge pages for shmem";
    match setting.and_then(chosen) {
        Some(choice @ ("always" | "within_size" | "force")) => {
            Check::ok(NAME, choice, "large shared buffers can use 2 MiB pages")
        }
        Some(choice) => {
            let remedy = "Shared buffers use small pages. As root: echo within_size > /";
            Check::warning(NAME, choice, format!("{remedy}{SHMEM_HUGE_PAGES}"))
        }
        None => {
            Check::warning(NAME, "not offered", "Shared buffers use small pages: the kernel has no others.")
        }
    }
}

/// The word in brackets in a list such as `always [madvise] never`.
fn chosen(setting: &str) -> Option<&str> {
    let (_, rest) = setting.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word)
}

fn overcommit(mode: Option<&str>) -> Check {
    const NAME: &str = "overcommit";
    match mode {
        Some("0") => Check::ok(NAME, "heuristic (0)", "memory is counted when it is touched"),
        Some("1") => Check::ok(NAME, "always (1)", "memory is counted when it is touched"),
        Some("2") => {
            let note =
                "Arenas count in full when they are made: keep them small, or set vm.overcommit_memory=0.";
            Check::warning(NAME, "strict (2)", note)
        }
        other => Check::ok(NAME, other.unwrap_or("unknown"), "the kernel's setting is not known here"),
    }
}

fn memlock(limit: Option<u64>) -> Check {
    let value = limit.map_or("unlimited".into(), |bytes| Bytes(bytes).to_string());
    Check::ok("memlock limit", value, "only pinned buffers of network engines count")
}

fn nofile(soft: Option<u64>, hard: Option<u64>) -> Check {
    let show = |limit: Option<u64>| limit.map_or("unlimited".into(), |files| files.to_string());
    let value = format!("{}, up to {}", show(soft), show(hard));
    if soft.is_some_and(|files| files < FEW_FILES) {
        Check::warning("open files limit", value, "A rank needs some for every peer: ulimit -n 1024.")
    } else {
        Check::ok("open files limit", value, "a rank needs some for every peer")
    }
}

fn dev_shm(files: &Files) -> Check {
    let size = statvfs(files.path("dev/shm")).map(|stat| Bytes(stat.f_blocks.saturating_mul(stat.f_frsize)));
    let value = size.map_or("none".into(), |size| size.to_string());
    Check::ok("/dev/shm", value, "not used: Antiphon's memory has no name")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let meminfo = "MemTotal:       24575560 kB\nMemFree:  1 kB\nMemAvailable:   2097152 kB\n";
        assert_eq!(ram(meminfo, None).value, "23.4 GiB, 2 GiB available");
        assert_eq!(ram("", None).status, Status::Warning);
        assert_eq!(meminfo_field(meminfo, "Mem"), None);
        let limited = ram(meminfo, Some(1 << 30));
        assert_eq!((limited.status, limited.value.as_str()), (Status::Warning, "1 GiB of 23.4 GiB"));
    }

    #[test]
    fn the_chosen_setting_is_the_one_in_brackets() {
        assert_eq!(chosen("always within_size advise [never] deny force"), Some("never"));
        assert_eq!(chosen("nothing"), None);
        assert_eq!(huge_pages(Some("always [within_size] advise never")).status, Status::Ok);
        assert_eq!(huge_pages(Some("always [never]")).status, Status::Warning);
        assert_eq!(huge_pages(None).status, Status::Warning);
    }

    #[test]
    fn strict_overcommit_is_a_warning() {
        assert_eq!(overcommit(Some("2")).status, Status::Warning);
        assert_eq!(overcommit(Some("0")).status, Status::Ok);
    }

    #[test]
    fn limits() {
        assert_eq!(memlock(None).value, "unlimited");
        assert_eq!(memlock(Some(8 << 20)).value, "8 MiB");
        assert_eq!(nofile(Some(64), None).status, Status::Warning);
        assert_eq!(nofile(Some(1024), Some(524288)).value, "1024, up to 524288");
    }
}
