//! The properties of the machine, read from /proc and /sys.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::system::uname;
use rustix::thread::sched_getaffinity;

use crate::sizes::Bytes;

/// The file system as seen from a root, which tests replace.
#[derive(Clone, Debug)]
pub struct Files {
    root: PathBuf,
}

impl Files {
    /// This machine's.
    pub fn system() -> Self {
        Self::at("/")
    }

    /// The one below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where `path` is; a leading slash means the root.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file without surrounding blanks; `None` if it cannot be read.
    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = self.bytes(path)?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The bytes of a file; `None` if it cannot be read.
    pub fn bytes(&self, path: impl AsRef<Path>) -> Option<Vec<u8>> {
        fs::read(self.path(path)).ok()
    }

    /// The sorted names in a folder; empty if it cannot be read.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into()).collect();
        names.sort();
        names
    }
}

/// The kernel's release, such as `6.8.0-45-generic`.
pub fn kernel() -> String {
    uname().release().to_string_lossy().into()
}

/// The processor by name, or by architecture where the kernel gives no name.
pub fn cpu(files: &Files) -> String {
    let named = files.read("proc/cpuinfo").and_then(|text| cpu_model(&text));
    // Arm boards name themselves in the device tree, and end the text with a NUL.
    let board = || files.read("sys/firmware/devicetree/base/model");
    let name = named.or_else(board).map(|name| name.trim_end_matches('\0').to_owned());
    name.unwrap_or_else(|| uname().machine().to_string_lossy().into())
}

/// The model in the text of /proc/cpuinfo, with runs of blanks made one.
pub fn cpu_model(cpuinfo: &str) -> Option<String> {
    let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let mut models = fields.filter(|(name, _)| matches!(name.trim(), "model name" | "Model" | "cpu"));
    let model = models.next()?.1.split_whitespace().collect::<Vec<_>>().join(" ");
    (!model.is_empty()).then_some(model)
}

/// A list such as `0-3,8` as its numbers; `None` if it is not one.
pub fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

/// How many cores there are, counted as Linux does: one for each hardware thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// The cores of the machine that are online.
    pub online: usize,
    /// The cores on which this process may run.
    pub allowed: usize,
    /// How many cores' worth of time the control group grants; `None` without a limit.
    pub quota: Option<f64>,
}

impl Cores {
    /// Counts them.
    pub fn count(files: &Files) -> Self {
        let allowed = sched_getaffinity(None).map(|set| set.count() as usize).ok();
        let online = files.read("sys/devices/system/cpu/online").and_then(|text| cpu_list(&text));
        let online = online.map(|cpus| cpus.len()).or(allowed).unwrap_or(1);
        Self { online, allowed: allowed.unwrap_or(online), quota: cpu_quota(files) }
    }

    /// How many can be busy at once.
    pub fn usable(&self) -> usize {
        let quota = self.quota.map_or(usize::MAX, |quota| quota.ceil() as usize);
        self.allowed.min(quota).max(1)
    }
}

/// The tightest limit of processor time on the way from this process's control group up to the root.
fn cpu_quota(files: &Files) -> Option<f64> {
    let groups = files.read("proc/self/cgroup")?;
    let limits = unified_limits(files, &groups, "cpu.max");
    limits.iter().filter_map(|limit| quota_v2(limit)).min_by(f64::total_cmp).or_else(|| {
        let read = |name| file_v1(files, &groups, "cpu", name);
        quota_v1(&read("cpu.cfs_quota_us")?, &read("cpu.cfs_period_us")?)
    })
}

/// The tightest limit of memory, in bytes, on the same way; `None` without a limit. Shared memory counts.
pub fn memory_limit(files: &Files) -> Option<u64> {
    let groups = files.read("proc/self/cgroup")?;
    let mut limits = unified_limits(files, &groups, "memory.max");
    limits.extend(file_v1(files, &groups, "memory", "memory.limit_in_bytes"));
    // Version 1 writes "no limit" as a number beyond any memory.
    limits.iter().filter_map(|limit| limit.parse().ok()).filter(|&limit| limit < 1 << 62).min()
}

/// How many bytes this process and its children can still take, swap included; `None` if Linux does not tell.
pub fn available_memory(files: &Files) -> Option<u64> {
    let meminfo = files.read("proc/meminfo")?;
    let swap = meminfo_field(&meminfo, "SwapFree").unwrap_or(0);
    let available = meminfo_field(&meminfo, "MemAvailable")?.saturating_add(swap);
    Some(memory_limit(files).map_or(available, |limit| limit.min(available)))
}

/// A field of /proc/meminfo in bytes.
pub(crate) fn meminfo_field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Refuses tensors that no memory here can hold: the kernel would end some process while they are filled, or the ranks
/// would abort. `bytes` are those of all ranks' tensors together for a message of `size` bytes.
pub(crate) fn refuse_beyond_memory(size: u64, ranks: usize, bytes: u128) -> Result<(), String> {
    let available = available_memory(&Files::system());
    match available {
        Some(available) if bytes > u128::from(available) => {
            let (shown, available) = (Bytes(size), Bytes(available));
            let needed = Bytes(u64::try_from(bytes).unwrap_or(u64::MAX));
            Err(format!(
                "a size of {size} bytes ({shown}) takes {bytes} bytes ({needed} or more) for the inputs and outputs of \
                 {ranks} ranks, and this machine has {available} available"
            ))
        }
        _ => Ok(()),
    }
}

/// What the files `name` say in this process's group of version 2 and in all groups around it.
fn unified_limits(files: &Files, groups: &str, name: &str) -> Vec<String> {
    let Some(group) = group_folder(groups, "") else { return Vec::new() };
    let folders = Path::new(&group).ancestors().map(|folder| folder.strip_prefix("/").unwrap_or(folder));
    folders.filter_map(|folder| files.read(Path::new("sys/fs/cgroup").join(folder).join(name))).collect()
}

/// What the file `name` says in this process's group of version 1.
fn file_v1(files: &Files, groups: &str, controller: &str, name: &str) -> Option<String> {
    let group = group_folder(groups, controller)?;
    let mount = Path::new("sys/fs/cgroup").join(controller);
    // Inside a container the group's own folder is mounted at the top.
    let folders = [mount.join(group.trim_start_matches('/')), mount];
    folders.iter().find_map(|folder| files.read(folder.join(name)))
}

/// The folder of `controller` in the text of /proc/self/cgroup; that of version 2 has no name.
fn group_folder(groups: &str, controller: &str) -> Option<String> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let folder = fields.next()?;
        controllers.split(',').any(|name| name == controller).then(|| folder.to_owned())
    })
}

/// `max 100000` or `150000 100000`, in microseconds of each period.
fn quota_v2(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    quota_v1(quota, period)
}

/// The same as two files, with -1 for no limit.
fn quota_v1(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (f64, f64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(files: &[(&str, &str)]) -> (tempfile::TempDir, Files) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let files = Files::at(folder.path());
        (folder, files)
    }

    #[test]
    fn the_model_is_found_on_intel_and_arm() {
        let intel = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Intel(R) Xeon(R)   CPU @ 2.50GHz\n";
        assert_eq!(cpu_model(intel).unwrap(), "Intel(R) Xeon(R) CPU @ 2.50GHz");
        assert_eq!(
            cpu_model("processor: 0\n\nModel\t: Raspberry Pi 4 Model B\n").unwrap(),
            "Raspberry Pi 4 Model B"
        );
        assert_eq!(cpu_model("processor\t: 0\nBogoMIPS\t: 243.75\n"), None);
    }

    #[test]
    fn a_board_is_named_by_its_device_tree() {
        let (_folder, files) = fake(&[
            ("proc/cpuinfo", "processor\t: 0\n"),
            ("sys/firmware/devicetree/base/model", "Board 5\0"),
        ]);
        assert_eq!(cpu(&files), "Board 5");
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(cpu_list("0-3,8,10-11\n").unwrap(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(cpu_list("").unwrap(), [0usize; 0]);
        assert_eq!(cpu_list("0-x"), None);
    }

    #[test]
    fn quotas() {
        assert_eq!(quota_v2("150000 100000\n"), Some(1.5));
        assert_eq!(quota_v2("max 100000\n"), None);
        assert_eq!(quota_v1("-1", "100000"), None);
    }

    #[test]
    fn the_tightest_group_counts() {
        let (_folder, files) = fake(&[
            ("proc/self/cgroup", "0::/pod/box\n"),
            ("sys/fs/cgroup/pod/cpu.max", "200000 100000\n"),
            ("sys/fs/cgroup/pod/box/cpu.max", "400000 100000\n"),
        ]);
        assert_eq!(cpu_quota(&files), Some(2.0));
    }

    #[test]
    fn version_1_groups() {
        let (_folder, files) = fake(&[
            ("proc/self/cgroup", "12:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ]);
        assert_eq!(cpu_quota(&files), Some(0.5));
    }

    #[test]
    fn memory_limits() {
        let (_folder, files) = fake(&[
            ("proc/self/cgroup", "0::/box\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/box/memory.max", "1048576\n"),
        ]);
        assert_eq!(memory_limit(&files), Some(1 << 20));
        let (_folder, files) = fake(&[
            ("proc/self/cgroup", "3:memory:/x\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!(memory_limit(&files), None);
    }

    #[test]
    fn available_memory_has_swap_in_it_and_ends_at_the_groups_limit() {
        let meminfo =
            ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   4 kB\nSwapTotal: 8 kB\nSwapFree:  2 kB\n");
        let (_folder, files) = fake(&[meminfo]);
        assert_eq!(available_memory(&files), Some(6 * 1024));
        let group = [("proc/self/cgroup", "0::/box\n"), ("sys/fs/cgroup/box/memory.max", "2048\n")];
        let (_folder, files) = fake(&[meminfo, group[0], group[1]]);
        assert_eq!(available_memory(&files), Some(2048));
        assert_eq!(available_memory(&fake(&[]).1), None);
    }

    #[test]
    fn usable_cores_round_a_quota_up() {
        let cores = |allowed, quota| Cores { online: 64, allowed, quota }.usable();
        assert_eq!((cores(8, Some(1.5)), cores(8, None), cores(2, Some(16.0))), (2, 8, 2));
    }
}
