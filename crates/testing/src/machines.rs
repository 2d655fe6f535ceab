//! Two machines on one: namespaces with a link between them.

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader},
    net::Ipv4Addr,
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{Need, need};

/// Makes the namespaces, says the ids of the processes that hold them, and ends with its standard input.
///
/// UCX lists devices from /sys/class/net, which shows the network namespace in which sysfs was mounted: each machine mounts its own. The
/// link is made inside of one namespace, since a plain user may make one nowhere else.
const HOLDER: &str = r#"
set -e
exec 3<&0
mount -t sysfs sysfs /sys
ip link set lo up
unshare --net --mount sh -c 'mount -t sysfs sysfs /sys && ip link set lo up && echo $$ && exec cat' <&3 | {
    read second
    ip link add cable type veth peer name cable netns "$second"
    ip addr add 10.77.0.1/24 dev cable
    ip link set cable up
    nsenter --target "$second" --net sh -c 'ip addr add 10.77.0.2/24 dev cable && ip link set cable up'
    echo "ready $$ $second"
    cat
}
"#;

/// How long the namespaces may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Two machines that are namespaces of this one: each has network devices of its own, a loopback and [`CABLE`](Self::CABLE), which connects them.
///
/// The namespaces have no names. Processes hold them that end with this value, or with the process that made it: a killed test leaves nothing.
pub struct Machines {
    holder: Child,
    /// The holder ends when this is closed.
    _open: Option<ChildStdin>,
    /// A process in each.
    processes: [u32; 2],
    is_root: bool,
}

impl Machines {
    /// The name of the device that connects the two, on both.
    pub const CABLE: &str = "cable";

    /// Makes two machines: as root, or else in a user namespace. Where neither is allowed, the test is to return.
    pub fn make() -> Option<Self> {
        need(Need::Machines, Self::try_make())
    }

    /// As [`make`](Self::make), with the reason where it is not possible.
    pub fn try_make() -> Result<Self, String> {
        let is_root = fs::read_to_string("/proc/self/status").unwrap_or_default().lines().any(|line| {
            line.strip_prefix("Uid:").is_some_and(|ids| ids.split_whitespace().nth(1) == Some("0"))
        });
        let user: &[&str] = if is_root { &[] } else { &["--user", "--map-root-user"] };
        let mut holder = Command::new("unshare")
            .args(user)
            .args(["--net", "--mount", "sh", "-c", HOLDER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let open = holder.stdin.take();
        let mut said = String::new();
        let output = holder.stdout.take().expect("it is piped");
        let _ = BufReader::new(output).read_line(&mut said);
        let words: Vec<&str> = said.split_whitespace().collect();
        let processes = match words[..] {
            ["ready", first, second] => first.parse().ok().zip(second.parse().ok()),
            _ => None,
        };
        let Some((first, second)) = processes else {
            drop(open);
            let output = holder.wait_with_output().map_err(|error| error.to_string())?;
            return Err(format!("namespaces: {}", String::from_utf8_lossy(&output.stderr).trim()));
        };
        let machines = Self { holder, _open: open, processes: [first, second], is_root };
        machines.wait_for_carrier()?;
        Ok(machines)
    }

    /// The address of a machine on the link.
    pub fn address(machine: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, machine as u8 + 1)
    }

    /// A command that runs on a machine, in the folder of this process.
    ///
    /// # Panics
    /// If there is no such machine.
    pub fn command(&self, machine: usize, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.processes[machine].to_string());
        if !self.is_root {
            command.args(["--user", "--preserve-credentials"]);
        }
        let folder = std::env::current_dir().expect("this process is in a folder");
        command.args(["--net", "--mount"]).arg(format!("--wd={}", folder.display())).arg("--").arg(program);
        command
    }

    /// Cuts the link, as if somebody pulled the cable: nobody is told.
    pub fn cut(&self) {
        self.set_link("down");
    }

    /// Ends a [`cut`](Self::cut).
    pub fn mend(&self) {
        self.set_link("up");
        self.wait_for_carrier().expect("it was there before");
    }

    fn set_link(&self, state: &str) {
        let status = self.command(0, "ip").args(["link", "set", Self::CABLE, state]).status();
        assert!(status.is_ok_and(|status| status.success()), "ip link set {} {state}", Self::CABLE);
    }

    /// Waits until both ends of the link carry: connections fail before.
    fn wait_for_carrier(&self) -> Result<(), String> {
        let start = Instant::now();
        let file = format!("/sys/class/net/{}/operstate", Self::CABLE);
        for machine in [0, 1] {
            loop {
                let output =
                    self.command(machine, "cat").arg(&file).output().map_err(|error| error.to_string())?;
                if output.stdout.starts_with(b"up") {
                    break;
                }
                if start.elapsed() > LIMIT {
                    return Err(format!("the link carries nothing after {LIMIT:?}"));
                }
                thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        self._open.take();
        let _ = self.holder.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(machines: &Machines, machine: usize, words: &[&str]) -> String {
        let output = machines.command(machine, words[0]).args(&words[1..]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn machines_reach_each_other_by_the_link_alone_and_leave_nothing() {
        let Some(machines) = Machines::make() else { return };
        for machine in [0, 1] {
            let mut devices: Vec<String> = say(&machines, machine, &["ls", "/sys/class/net"])
                .split_whitespace()
                .map(str::to_owned)
                .collect();
            devices.sort();
            assert_eq!(devices, [Machines::CABLE, "lo"]);
            let folder = std::env::current_dir().unwrap();
            assert_eq!(say(&machines, machine, &["pwd"]).trim(), folder.to_str().unwrap());
        }
        let connect = |port: u16| {
            let script = format!("exec 3<>/dev/tcp/{}/{port}; head -c 5 <&3", Machines::address(1));
            machines.command(0, "bash").args(["-c", &script]).output().unwrap().stdout
        };
        // Nothing listens there, and the answer comes from the other machine.
        assert_eq!(connect(9), b"");
        let processes = machines.processes;
        drop(machines);
        for process in processes {
            assert!(
                !std::path::Path::new(&format!("/proc/{process}")).exists(),
                "process {process} is there"
            );
        }
    }
}
