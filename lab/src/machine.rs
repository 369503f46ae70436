//! Description of the machine that was measured.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::subject::BlockDeviceCounters;

/// The machine and its load.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MachineDescription {
    /// Time of this description.
    pub date: String,
    /// Model of the processor.
    pub cpu: String,
    /// Number of usable CPUs.
    pub cpus: usize,
    /// CPU frequency governor, if visible.
    pub governor: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Swap in MiB.
    pub swap_mib: u64,
    /// Kernel release.
    pub kernel: String,
    /// True if the machine reports that it is virtual.
    pub virtual_machine: bool,
    /// Load average before the run.
    pub load: String,
    /// Device of the lab's directory.
    pub device: String,
    /// File system of the lab's directory.
    pub file_system: String,
    /// I/O scheduler of the device.
    pub scheduler: String,
    /// Read-ahead of the device, in KiB.
    pub read_ahead_kib: String,
    /// Rotational flag of the device.
    pub rotational: String,
    /// Logical and physical sector size of the device, in bytes.
    pub sectors: String,
}

impl MachineDescription {
    /// Collects the description; `dir` is the lab's directory.
    pub fn detect(dir: &Path) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let after = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| line.split_once(':')).map(|(_, v)| v.trim().to_string())
        };
        let mib = |key: &str| meminfo_bytes(key).unwrap_or(0) >> 20;
        let cpuinfo = read("/proc/cpuinfo");
        let device = BlockDeviceCounters::of_path(dir);
        let queue = |what: &str| {
            let said = device.as_ref().and_then(|device| device.queue_attribute(what));
            said.unwrap_or_else(|| "unknown".into())
        };
        let governor = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
        Self {
            date: jiff::Zoned::now().strftime("%Y-%m-%d %H:%M").to_string(),
            cpu: after(&cpuinfo, "model name").unwrap_or_else(|| "unknown".into()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            governor: match governor.trim() {
                "" => "not to be seen".into(),
                name => name.into(),
            },
            memory_mib: mib("MemTotal"),
            swap_mib: mib("SwapTotal"),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_string(),
            virtual_machine: after(&cpuinfo, "flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            load: read("/proc/loadavg").split(' ').next().unwrap_or_default().to_string(),
            file_system: file_system_type(dir),
            scheduler: queue("scheduler"),
            read_ahead_kib: queue("read_ahead_kb"),
            rotational: match queue("rotational").as_str() {
                "0" => "no".into(),
                "1" => "yes".into(),
                other => other.into(),
            },
            sectors: format!("{} / {}", queue("logical_block_size"), queue("physical_block_size")),
            device: device.map_or("none".into(), |device| device.name()),
        }
    }
}

/// Returns a value of `/proc/meminfo`, in bytes.
pub fn meminfo_bytes(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns the file system of `path`, by the longest mount point above it.
pub fn file_system_type(path: &Path) -> String {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mut best = (0, "unknown");
    for line in mounts.lines() {
        let mut fields = line.split(' ').skip(1);
        let (Some(at), Some(kind)) = (fields.next(), fields.next()) else { continue };
        if path.starts_with(at) && at.len() >= best.0 {
            best = (at.len(), kind);
        }
    }
    best.1.to_string()
}

impl std::fmt::Display for MachineDescription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { date, cpus, cpu, memory_mib, kernel, load, device, file_system, .. } = self;
        write!(
            f,
            "{date}; {cpus} x {cpu}, {memory_mib} MiB, Linux {kernel}; \
             {file_system} on {device}; load before {load}"
        )
    }
}
