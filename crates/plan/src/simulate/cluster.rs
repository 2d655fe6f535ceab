//! The figures of a cluster, on which a plan is simulated.

use serde::{Deserialize, Serialize};

use super::error::SimulateError;
use crate::text::escaped;

/// GPUs in nodes, all alike. Rank `r` is GPU `r mod gpus_per_node` of node `r / gpus_per_node`.
///
/// Bandwidths are in GB/s (10^9 bytes per second, which is bytes per ns), times in ns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// The cluster's name.
    pub name: String,
    /// How many nodes.
    pub nodes: u32,
    /// GPUs of each; any two have a link between them.
    pub gpus_per_node: u32,
    /// The time from the launch of a kernel to its first operation, and back to the stream.
    pub launch_ns: f64,
    /// Bandwidth of a GPU's memory; a local copy reads and writes, so it takes it twice.
    pub memory_gb_s: f64,
    /// The figures of a thread block.
    pub block: BlockCosts,
    /// Between the GPUs of a node.
    pub link: Link,
    /// A GPU's copy engine, behind port channels inside a node.
    pub copy_engine: PortEngine,
    /// A network card, behind port channels between nodes; without any, nodes cannot reach each other.
    pub nic: Option<PortEngine>,
    /// Network cards of each node, shared evenly by its GPUs.
    pub nics_per_node: u32,
}

/// What a thread block can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockCosts {
    /// The overhead of any operation besides its data.
    pub op_ns: f64,
    /// The time from a load of the own GPU's memory until the data is there.
    pub memory_ns: f64,
    /// All threads of the block meet.
    pub sync_ns: f64,
    /// Thread blocks of a GPU synchronise; a semaphore's release reaches the block that acquires it.
    pub atomic_ns: f64,
    /// Reading and writing the own GPU's memory, together.
    pub local_gb_s: f64,
    /// Stores to peers, together.
    pub store_gb_s: f64,
    /// Loads from each peer.
    pub load_gb_s: f64,
}

/// Between the GPUs of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Out of a GPU, and likewise into it.
    pub direction_gb_s: f64,
    /// Out of and into a GPU together.
    pub duplex_gb_s: f64,
    /// The part of it that SMs can store to or load from peers.
    pub sm_gb_s: f64,
    /// The time from a store until the peer sees it.
    pub latency_ns: f64,
    /// Until earlier stores to peers are acknowledged, which a signal waits for unless it is relaxed.
    pub fence_ns: f64,
    /// Whether the switch reduces and replicates (multicast objects).
    pub multicast: bool,
}

/// The engine that moves the bytes of port channels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortEngine {
    /// Each way.
    pub gb_s: f64,
    /// The time in which a thread block requests a transfer.
    pub issue_ns: f64,
    /// The time from the request until the engine begins.
    pub start_ns: f64,
    /// The time from the last byte sent until the peer sees it, and until a flush does.
    pub latency_ns: f64,
}

impl Cluster {
    /// A preset by its name, or a description as JSON.
    ///
    /// The presets are `h200xG` (a node of 1 to 8 H200) and `h200xG-nodesN` (N of them, a 400 Gb/s card for each GPU). Their
    /// figures of [`Link`], [`BlockCosts::store_gb_s`], [`BlockCosts::load_gb_s`], the copy engine's bandwidth and
    /// [`Cluster::launch_ns`] were measured on 4 × H200 (NV18, driver 580.159.04, CUDA 13.0) on 2026-11-21, in CUDA
    /// graphs, with 512 threads per block; see docs/guide/simulator.md for each. `memory_gb_s` is the data sheet's. All others are
    /// estimates: no network card or port channel has been measured.
    ///
    /// A description has all fields of [`Cluster`], or `"base"` with a preset's name and what differs from it:
    ///
    /// ```
    /// use antiphon_plan::simulate::Cluster;
    ///
    /// let slow = Cluster::from_spec(r#"{"base": "h200x8-nodes2", "name": "slow", "nic": {"gb_s": 12}}"#)?;
    /// assert_eq!((slow.gpus(), slow.nic.unwrap().gb_s), (16, 12.0));
    /// # Ok::<(), antiphon_plan::simulate::SimulateError>(())
    /// ```
    ///
    /// # Errors
    /// [`SimulateError::NoPreset`], [`SimulateError::Description`], or what [`Cluster::check`] finds.
    pub fn from_spec(spec: &str) -> Result<Self, SimulateError> {
        let spec = spec.trim();
        let cluster = if spec.starts_with('{') { described(spec)? } else { preset(spec)? };
        cluster.check()?;
        Ok(cluster)
    }

    /// How many GPUs there are.
    pub fn gpus(&self) -> u64 {
        u64::from(self.nodes) * u64::from(self.gpus_per_node)
    }

    /// Whether every figure makes sense.
    ///
    /// # Errors
    /// [`SimulateError::Figure`], the first that does not.
    pub fn check(&self) -> Result<(), SimulateError> {
        let (block, link, engine) = (&self.block, &self.link, &self.copy_engine);
        let nic = self.nic.as_ref().unwrap_or(engine);
        let counts = [
            ("nodes", self.nodes),
            ("gpus_per_node", self.gpus_per_node),
            ("nics_per_node", self.nics_per_node),
        ];
        let rates = [
            ("memory_gb_s", self.memory_gb_s),
            ("block.local_gb_s", block.local_gb_s),
            ("block.store_gb_s", block.store_gb_s),
            ("block.load_gb_s", block.load_gb_s),
            ("link.direction_gb_s", link.direction_gb_s),
            ("link.duplex_gb_s", link.duplex_gb_s),
            ("link.sm_gb_s", link.sm_gb_s),
            ("copy_engine.gb_s", engine.gb_s),
            ("nic.gb_s", nic.gb_s),
        ];
        let times = [
            ("launch_ns", self.launch_ns),
            ("block.op_ns", block.op_ns),
            ("block.memory_ns", block.memory_ns),
            ("block.sync_ns", block.sync_ns),
            ("block.atomic_ns", block.atomic_ns),
            ("link.latency_ns", link.latency_ns),
            ("link.fence_ns", link.fence_ns),
            ("copy_engine.issue_ns", engine.issue_ns),
            ("copy_engine.start_ns", engine.start_ns),
            ("copy_engine.latency_ns", engine.latency_ns),
            ("nic.issue_ns", nic.issue_ns),
            ("nic.start_ns", nic.start_ns),
            ("nic.latency_ns", nic.latency_ns),
        ];
        let wrong = |field, value, expected| SimulateError::Figure {
            cluster: self.name.clone(),
            field,
            value,
            expected,
        };
        for (field, value) in counts {
            if !(1..=1 << 16).contains(&value) {
                return Err(wrong(field, f64::from(value), "between 1 and 65536"));
            }
        }
        for (field, value) in rates {
            if !(1e-3..=1e9).contains(&value) {
                return Err(wrong(field, value, "between 10^-3 and 10^9 GB/s"));
            }
        }
        for (field, value) in times {
            if !(0.0..=1e12).contains(&value) {
                return Err(wrong(field, value, "between 0 and 10^12 ns"));
            }
        }
        Ok(())
    }
}

fn described(text: &str) -> Result<Cluster, SimulateError> {
    let wrong = |error: serde_json::Error| SimulateError::Description(escaped(&error.to_string()));
    let mut given: serde_json::Value = serde_json::from_str(text).map_err(wrong)?;
    let base = given.as_object_mut().and_then(|fields| fields.remove("base"));
    let Some(base) = base else { return serde_json::from_value(given).map_err(wrong) };
    let name = base.as_str().ok_or_else(|| SimulateError::NoPreset(base.to_string()))?;
    let mut whole = serde_json::to_value(preset(name)?).map_err(wrong)?;
    overlay(&mut whole, given);
    serde_json::from_value(whole).map_err(wrong)
}

/// Objects field by field, all else whole. No deeper than the text was, which serde_json limits.
fn overlay(base: &mut serde_json::Value, given: serde_json::Value) {
    match (base, given) {
        (serde_json::Value::Object(base), serde_json::Value::Object(given)) => {
            for (key, value) in given {
                overlay(base.entry(key).or_insert(serde_json::Value::Null), value);
            }
        }
        (base, given) => *base = given,
    }
}

fn preset(name: &str) -> Result<Cluster, SimulateError> {
    let unknown = || SimulateError::NoPreset(name.to_owned());
    let shape = name.strip_prefix("h200x").ok_or_else(unknown)?;
    let (gpus, nodes) = shape.split_once("-nodes").unwrap_or((shape, "1"));
    let number =
        |text: &str, most| text.parse().ok().filter(|number| (1..=most).contains(number)).ok_or_else(unknown);
    Ok(h200(name, number(gpus, 8)?, number(nodes, 4096)?))
}

fn h200(name: &str, gpus_per_node: u32, nodes: u32) -> Cluster {
    Cluster {
        name: name.to_owned(),
        nodes,
        gpus_per_node,
        launch_ns: 510.0,
        memory_gb_s: 4800.0,
        block: BlockCosts {
            op_ns: 50.0,
            memory_ns: 450.0,
            sync_ns: 20.0,
            atomic_ns: 700.0,
            local_gb_s: 60.0,
            store_gb_s: 19.3,
            load_gb_s: 7.4,
        },
        link: Link {
            direction_gb_s: 394.0,
            duplex_gb_s: 622.0,
            sm_gb_s: 366.0,
            latency_ns: 760.0,
            fence_ns: 600.0,
            multicast: false,
        },
        copy_engine: PortEngine { gb_s: 394.0, issue_ns: 500.0, start_ns: 3000.0, latency_ns: 1000.0 },
        nic: (nodes > 1).then_some(PortEngine {
            gb_s: 48.0,
            issue_ns: 500.0,
            start_ns: 2000.0,
            latency_ns: 3000.0,
        }),
        nics_per_node: gpus_per_node,
    }
}
